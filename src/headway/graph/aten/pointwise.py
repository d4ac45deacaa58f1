"""Index expressions of elementwise operators and of operators that create tensors.

Every dimension may be split. Partial sums pass through where the operator is linear.
"""

from __future__ import annotations

from headway.graph.aten.index_expression import (
    IndexExpression,
    OperatorCall,
    axis_labels,
    broadcast_index,
)

LINEAR: dict[str, list[tuple[str, ...]]] = {
    "add": [("self", "other")],
    "alias": [("self",)],
    "clone": [("self",)],
    "contiguous": [("self",)],
    "detach": [("self",)],
    "detach_copy": [("self",)],
    "div": [("self",)],
    "lift_fresh_copy": [("self",)],
    "mul": [("self",), ("other",)],
    "neg": [("self",)],
    "sub": [("self", "other")],
    "to": [("self",)],
    "type_as": [("self",)],
    "_to_copy": [("self",)],
}
"""In which sets of arguments an operator is linear: pending sums pass through those."""


def pointwise(call: OperatorCall) -> IndexExpression:
    """x0 x1 ..., broadcast as torch does it."""
    names = axis_labels(len(call.result))
    inputs = {
        role: broadcast_index(spec.shape, call.result, names)
        for role, spec in zip(call.roles, call.inputs, strict=True)
    }
    sets = [roles for roles in LINEAR.get(call.kind, []) if set(roles) <= set(call.roles)]
    floating = all(spec.floating for spec in (*call.inputs, *call.outputs))
    rounded = call.attributes.get("rounding_mode") is not None
    outputs = [" ".join(names)] * len(call.outputs)
    return IndexExpression(
        inputs=inputs, outputs=outputs, linear=sets if floating and not rounded else []
    )


def created(call: OperatorCall) -> IndexExpression:
    """All elements alike (or drawn): any part of it can be made. The shape of an input is read."""
    names = axis_labels(len(call.result))
    same = [spec.shape == call.result for spec in call.inputs]
    inputs = {
        role: " ".join(names if alike else ["1"] * len(spec.shape))
        for role, spec, alike in zip(call.roles, call.inputs, same, strict=True)
    }
    form = IndexExpression(inputs=inputs, outputs=[" ".join(names)])
    others = [
        (role, spec)
        for role, spec, alike in zip(call.roles, call.inputs, same, strict=True)
        if not alike
    ]
    for number, (role, spec) in enumerate(others):
        own = axis_labels(len(spec.shape), f"y{number}_")
        form.inputs[role] = " ".join(own)
        form.fix("only the type of this tensor is read", *own)
    return form


def counted(call: OperatorCall) -> IndexExpression:
    """arange, linspace: the numbers count from the first element."""
    names = axis_labels(len(call.result))
    form = IndexExpression(inputs={}, outputs=[" ".join(names)])
    return form.fix("its numbers count from the first element", *names)


def triangle(call: OperatorCall) -> IndexExpression:
    """tril, triu: which elements stay depends on the last two positions."""
    names = axis_labels(len(call.result))
    form = IndexExpression(
        inputs={"self": " ".join(names)}, outputs=[" ".join(names)], linear=[("self",)]
    )
    return form.fix("which elements stay depends on the position", *names[-2:])
