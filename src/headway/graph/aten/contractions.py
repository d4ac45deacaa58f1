"""Index expressions of linear layers, matrix products, einsum and attention.

An axis that occurs in the operands only is summed; splitting it leaves a partial sum on every
rank (DTensor's `Partial`).
"""

from __future__ import annotations

import string

from headway.graph.aten.index_expression import (
    IndexExpression,
    OperatorCall,
    UnsupportedCall,
    axis_labels,
    broadcast_index,
)
from headway.graph.model_graph import LoopAxis, format_index


def summed(*names: str) -> dict[str, LoopAxis]:
    """Axes over which a result is added up."""
    return {name: LoopAxis(name=name, size=0, kind="sum") for name in names}


def linear(call: OperatorCall) -> IndexExpression:
    """... k, o k (, o) -> ... o."""
    names = axis_labels(len(call.result) - 1)
    sets: list[tuple[str, ...]] = (
        [("input",), ("weight",)] if "bias" not in call.roles else [("input", "bias")]
    )
    if "bias" in call.roles:
        sets.append(("weight", "bias"))
    return IndexExpression(
        inputs={"input": " ".join([*names, "k"]), "weight": "o k", "bias": "o"},
        outputs=[" ".join([*names, "o"])],
        axes=summed("k"),
        linear=sets,
        added=("bias",),
    )


def matmul(call: OperatorCall) -> IndexExpression:
    """... m k, ... k n -> ... m n, with vectors and broadcasting."""
    left, right = ("self", "mat2") if "mat2" in call.roles else ("self", "other")
    a, b = call.shape(left), call.shape(right)
    rows, columns = ["m"] * (len(a) > 1), ["n"] * (len(b) > 1)
    batch = axis_labels(len(call.result) - len(rows) - len(columns))
    outer = call.result[: len(batch)]
    return IndexExpression(
        inputs={
            left: " ".join([broadcast_index(a[:-2], outer, batch), *rows, "k"]),
            right: " ".join([broadcast_index(b[:-2], outer, batch), "k", *columns]),
        },
        outputs=[" ".join([*batch, *rows, *columns])],
        axes=summed("k"),
        linear=[(left,), (right,)],
    )


def added_product(call: OperatorCall) -> IndexExpression:
    """addmm, baddbmm: self + first @ second."""
    first, second = ("mat1", "mat2") if "mat1" in call.roles else ("batch1", "batch2")
    batch = axis_labels(len(call.result) - 2)
    names = [*batch, "m", "n"]
    return IndexExpression(
        inputs={
            "self": broadcast_index(call.shape("self"), call.result, names),
            first: " ".join([*batch, "m", "k"]),
            second: " ".join([*batch, "k", "n"]),
        },
        outputs=[" ".join(names)],
        axes=summed("k"),
        linear=[("self", first), ("self", second)],
        added=("self",),
    )


def einsum(call: OperatorCall) -> IndexExpression:
    """As its equation says; without "..." and repeated letters in one operand."""
    equation = str(call.value("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if not arrow or "." in equation or any(len(set(o)) < len(o) for o in operands):
        raise UnsupportedCall(f"einsum {equation}")
    only = [letter for letter in string.ascii_letters if letter in left and letter not in right]
    return IndexExpression(
        inputs={role: " ".join(o) for role, o in zip(call.roles, operands, strict=True)},
        outputs=[" ".join(right)],
        axes=summed(*only),
        linear=[(role,) for role in call.roles],
    )


def outer(call: OperatorCall) -> IndexExpression:
    """m, n -> m n."""
    second = "vec2" if "vec2" in call.roles else "other"
    return IndexExpression(
        inputs={"self": "m", second: "n"},
        outputs=["m n"],
        linear=[("self",), (second,)],
    )


def attention(call: OperatorCall) -> IndexExpression:
    """... h s k, ... h t k, ... h t v -> ... h s v (Vaswani et al. 2017, equation 1).

    Groups of heads that share keys and values (Ainslie et al. 2023) are h*g in the queries.
    """
    query, key = call.shape("query"), call.shape("key")
    batch = axis_labels(len(query) - 3)
    grouped = len(query) > 3 and query[-3] != key[-3]
    head: list[tuple[str, ...]] = []
    if len(query) > 2:
        head.append(("h", "g") if grouped else ("h",))
    inner = [("h",)] if head else []
    before = [(name,) for name in batch]
    queries = [*before, *head]
    form = IndexExpression(
        inputs={
            "query": format_index([*queries, ("s",), ("k",)]),
            "key": format_index([*before, *inner, ("t",), ("k",)]),
            "value": format_index([*before, *inner, ("t",), ("v",)]),
        },
        outputs=[format_index([*queries, ("s",), ("v",)])],
        linear=[] if call.attributes.get("dropout_p") else [("value",)],
        sizes={"h": key[-3]} if head else {},
    )
    if "attn_mask" in call.roles:
        mask = call.shape("attn_mask")
        named = [*queries, ("s",), ("t",)]
        full = (*query[:-1], key[-2])
        behind = len(full) - len(mask)
        dims = [
            () if size == 1 and full[behind + dim] != 1 else named[behind + dim]
            for dim, size in enumerate(mask)
        ]
        form.inputs["attn_mask"] = format_index(dims)
    form.fix("the softmax needs all keys of a query", "t")
    form.fix("the scores are needed whole by the softmax", "k")
    if call.attributes.get("is_causal"):
        form.fix("the causal mask depends on the position", "s")
    return form
