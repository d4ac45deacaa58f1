"""Index expressions of operators that add nothing up: elementwise ones, new tensors, other shapes.

A reshape is an index expression, too: `a*b c -> a b c`. Partial sums pass through where the
operator is linear, as all changes of shape are.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.graph.aten.index_expression import (
    IndexExpression,
    OperatorCall,
    UnsupportedCall,
    axis_labels,
    broadcast_index,
)
from headway.graph.model_graph import common_factors, format_index, matching_runs, take_factors

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
    # x + 1 is not linear, as every summand would add the 1: both arguments have to be tensors.
    sets = [roles for roles in LINEAR.get(call.kind, []) if set(roles) <= set(call.roles)]
    floating = all(spec.floating for spec in (*call.inputs, *call.outputs))
    # Rounding does not commute with a sum.
    rounded = call.attributes.get("rounding_mode") is not None
    outputs = [" ".join(names)] * len(call.outputs)
    return IndexExpression(
        inputs=inputs, outputs=outputs, linear=sets if floating and not rounded else []
    )


def factory(call: OperatorCall) -> IndexExpression:
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


def arange(call: OperatorCall) -> IndexExpression:
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


# Reshapes, permutations, slices, concatenation, padding and sorting.


APART = "its parts are taken apart along this dimension"


def reshape(call: OperatorCall) -> IndexExpression:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: by groups of factors."""
    first, second = call.shape("self"), call.result
    # () stays at dimensions of size 1, which no axis counts.
    source: list[tuple[str, ...]] = [()] * len(first)
    target: list[tuple[str, ...]] = [()] * len(second)
    form = IndexExpression(inputs={}, outputs=[], linear=[("self",)])
    count = 0
    for left, right in matching_runs(first, second):
        factors = common_factors([first[d] for d in left], [second[d] for d in right])
        if factors is None:
            _mixed(form, left, right, source, target)
            continue
        names = [f"x{number}" for number in range(count, count + len(factors))]
        count += len(factors)
        form.sizes.update(zip(names, factors, strict=True))
        for dims, shape, index in ((left, first, source), (right, second, target)):
            some, rest = list(factors), list(names)
            for dim in dims:
                index[dim] = tuple(take_factors(some, rest, shape[dim]))
    form.inputs["self"] = format_index(source)
    form.outputs.append(format_index(target))
    return form


def _mixed(
    form: IndexExpression,
    left: list[int],
    right: list[int],
    source: list[tuple[str, ...]],
    target: list[tuple[str, ...]],
) -> None:
    """Dimensions without common factors."""
    for dims, index, letter in ((left, source, "i"), (right, target, "o")):
        for dim in dims:
            index[dim] = (f"{letter}{dim}",)
            form.fix("the reshape mixes these dimensions", f"{letter}{dim}")


def permute(call: OperatorCall) -> IndexExpression:
    """permute, transpose, t."""
    rank = len(call.shape("self"))
    order = list(range(rank))
    if call.kind == "permute":
        order = [int(dim) % rank for dim in call.value("dims")]
    elif call.kind in ("transpose", "swapaxes", "swapdims"):
        pair = [
            call.dim(name, rank)
            for name in ("dim0", "dim1", "axis0", "axis1")
            if name in call.attributes
        ]
        order[pair[0]], order[pair[1]] = pair[1], pair[0]
    elif call.kind == "movedim":
        order = _moved(call, rank)
    else:
        order.reverse()
    names = axis_labels(rank)
    return IndexExpression(
        inputs={"self": " ".join(names)},
        outputs=[" ".join(names[dim] for dim in order)],
        linear=[("self",)],
    )


def _moved(call: OperatorCall, rank: int) -> list[int]:
    where = [call.value("source"), call.value("destination")]
    source, target = ([w] if isinstance(w, int) else list(w) for w in where)
    order = [dim for dim in range(rank) if dim not in {s % rank for s in source}]
    # In ascending order, so that no insertion moves a dimension that is in its place.
    for to, dim in sorted(zip((t % rank for t in target), source, strict=True)):
        order.insert(to, dim % rank)
    return order


def expand(call: OperatorCall) -> IndexExpression:
    """expand, expand_as, broadcast_to: new axes stand in the result only."""
    names = axis_labels(len(call.result))
    inputs = {"self": broadcast_index(call.shape("self"), call.result, names)}
    if "other" in call.roles:
        inputs["other"] = " ".join(names)
    return IndexExpression(inputs=inputs, outputs=[" ".join(names)], linear=[("self",)])


def repeat(call: OperatorCall) -> IndexExpression:
    """r*x for every dimension that is repeated r times."""
    shape, times = call.shape("self"), [int(n) for n in call.value("repeats")]
    names = axis_labels(len(times))
    sizes = {f"r{dim}": n for dim, n in enumerate(times)}
    behind = len(times) - len(shape)
    # Dimensions that only the repetition adds have one entry to repeat.
    sizes |= dict.fromkeys(names[:behind], 1)
    outputs = format_index((f"r{dim}", name) for dim, name in enumerate(names))
    return IndexExpression(
        inputs={"self": " ".join(names[behind:])},
        outputs=[outputs],
        linear=[("self",)],
        sizes=sizes,
    )


def split_dimension(call: OperatorCall) -> IndexExpression:
    """slice, narrow, select, split, chunk, unbind: along one dimension."""
    shape = call.shape("self")
    dim = call.dim("dim", len(shape))
    names = axis_labels(len(shape))
    before, behind = names[:dim], names[dim + 1 :]
    form = IndexExpression(inputs={}, outputs=[], linear=[("self",)])
    # select and unbind drop the dimension.
    gone = len(call.result) < len(shape)
    pieces = [1 if gone else spec.shape[dim] for spec in call.outputs]
    if pieces == [shape[dim]] and not gone:
        middle, outs = [names[dim]], [[names[dim]]]
    elif sum(pieces) == shape[dim] and len(set(pieces)) == 1 and not gone:
        # Pieces of equal size share the inner axis p, which can be split in all of them.
        middle, outs = ["j*p"], [["p"]] * len(pieces)
        form.sizes.update(j=len(pieces), p=pieces[0])
        form.fix(APART, "j")
    else:
        middle = ["j"]
        outs = [[] if gone else [f"j{number}"] for number in range(len(pieces))]
        form.fix(APART, "j", *(name for out in outs for name in out))
    form.inputs["self"] = " ".join([*before, *middle, *behind])
    form.outputs.extend(" ".join([*before, *out, *behind]) for out in outs)
    return form


def concatenate(call: OperatorCall) -> IndexExpression:
    """cat, stack: equal parts are j*p, others are fixed along the dimension."""
    rank = len(call.result)
    dim = call.dim("dim", rank)
    names = axis_labels(rank)
    before, behind = names[:dim], names[dim + 1 :]
    if call.kind == "stack":
        parts, middle, pieces = [list[str]()] * len(call.roles), "j", {"j"}
    elif len({call.shape(role)[dim] for role in call.roles}) == 1:
        parts, middle, pieces = [["p"]] * len(call.roles), "j*p", {"j"}
    else:
        parts = [[f"j{number}"] for number in range(len(call.roles))]
        middle, pieces = "j", {"j", *(name for part in parts for name in part)}
    form = IndexExpression(
        inputs={
            role: " ".join([*before, *part, *behind])
            for role, part in zip(call.roles, parts, strict=True)
        },
        outputs=[" ".join([*before, middle, *behind])],
        # Only jointly: a part that is whole would be added by every summand.
        linear=[call.roles],
    )
    return form.fix("the joined parts are laid one behind the other", *sorted(pieces))


def pad(call: OperatorCall) -> IndexExpression:
    """constant_pad_nd, pad: dimensions that grow are fixed."""
    shape = call.shape("self")
    if len(call.result) != len(shape):
        raise UnsupportedCall("pad")
    # Padding other than 0 would be added up over the summands.
    return _kept_where_equal(call, shape, "it is padded", linear=not call.attributes.get("value"))


def whole_dimension(call: OperatorCall) -> IndexExpression:
    """flip, roll, cumsum, sort, topk and others that need the whole of one dimension."""
    shape = call.shape("self")
    dims = call.attributes.get("dims", call.attributes.get("dim", -1))
    listed = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
    fixed = {int(dim) % max(len(shape), 1) for dim in listed}
    names = axis_labels(len(shape))
    linear: list[tuple[str, ...]] = [("self",)] if call.kind in ("flip", "roll", "cumsum") else []
    outputs = []
    for spec in call.outputs:
        same = len(spec.shape) == len(shape)
        outputs.append(
            [
                f"y{dim}" if dim in fixed and spec.shape[dim] != shape[dim] else name
                for dim, name in enumerate(names)
            ]
            if same
            else [name for dim, name in enumerate(names) if dim not in fixed]
        )
    form = IndexExpression(
        inputs={"self": " ".join(names)}, outputs=[" ".join(o) for o in outputs], linear=linear
    )
    ends = {f"y{dim}" for dim in fixed} & {name for out in outputs for name in out}
    return form.fix(
        "it needs the whole dimension", *(names[dim] for dim in sorted(fixed)), *sorted(ends)
    )


def _kept_where_equal(
    call: OperatorCall, shape: Sequence[int], why: str, *, linear: bool
) -> IndexExpression:
    names = axis_labels(len(shape))
    outputs = [
        name if size == call.result[dim] else f"y{dim}"
        for dim, (name, size) in enumerate(zip(names, shape, strict=True))
    ]
    changed = [dim for dim, name in enumerate(outputs) if name.startswith("y")]
    form = IndexExpression(
        inputs={"self": " ".join(names)},
        outputs=[" ".join(outputs)],
        linear=[("self",)] if linear else [],
    )
    return form.fix(why, *(n for dim in changed for n in (names[dim], outputs[dim])))
