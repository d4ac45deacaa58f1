"""How an operator can be sharded over one mesh axis, derived from its index expression.

Placements are DTensor's with a few more: "R" the whole tensor on each rank; "S1" its dimension 1
in parts; "S1/3" the same in each of 3 groups of that dimension (the heads inside of a fused
query-key-value); "P" on each rank a summand of it, "Pavg", "Pmax" and "Pmin" likewise. A rule is
one legal combination of placements of all inputs and outputs; what is not listed is not legal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.graph.model_graph import (
    Dims,
    LoopAxis,
    Operator,
    TensorSpec,
    Window,
    locate_axis,
    parse_index,
)

PARTIAL_PLACEMENTS = {"sum": "P", "masked": "P", "avg": "Pavg", "max": "Pmax", "min": "Pmin"}
"""Placement of a result that lacks the axis that is split, by the kind of the axis."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One legal way.

    Attributes:
        axis: The loop that is split; "" if none is.
        gradients: Placement in which backward leaves the gradient of each input, when the gradient
            of an output comes as the output is placed ("R" where it is pending).
        halo: Most bytes that a part fetches from its neighbours in forward, and returns in
            backward.
        exchange: Bytes of statistics that the parts reduce in forward, and again in backward.
        parts: Into how many the work is divided: 1 if every part does all of it.
    """

    axis: str = ""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    halo: int = 0
    exchange: int = 0
    parts: int = 1


def enumerate_rules(
    operator: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], parts: int
) -> tuple[Rule, ...]:
    """All legal ways to spread an operator over `parts` parts of equal size.

    First the replicated one, then one per axis in the order of the loops, then those that only let
    pending sums pass. Of rules with the same placements the cheapest is kept.

    Args:
        parts: At least 1.
    """
    found = [_replicated(operator)]
    axes = operator.axes
    if axes.known and parts > 1:
        split = [_split(operator, loop, inputs, outputs, parts) for loop in axes.loops]
        found += [rule for rule in split if rule is not None]
        found += [_passing(operator, group) for group in axes.linear]
    return _cheapest(found)


def _replicated(operator: Operator) -> Rule:
    whole = ("R",) * len(operator.inputs)
    return Rule(inputs=whole, outputs=("R",) * len(operator.outputs), gradients=whole)


def _passing(operator: Operator, group: Sequence[int]) -> Rule:
    """Pending sums in, pending sums out; the gradient of a sum is that of each summand."""
    numbers = range(len(operator.inputs))
    return Rule(
        inputs=tuple("P" if number in group else "R" for number in numbers),
        outputs=("P",) * len(operator.outputs),
        # Another factor has met one summand on each part: its gradient is pending.
        gradients=tuple("R" if number in group else "P" for number in numbers),
    )


def _split(
    operator: Operator,
    loop: LoopAxis,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    parts: int,
) -> Rule | None:
    if loop.kind == "fixed" or loop.size % parts:
        return None
    axes, sizes = operator.axes, operator.axes.sizes()
    sources = [parse_index(index) for index in axes.inputs]
    halo = 0
    for index, spec in zip(sources, inputs, strict=True):
        need = halo_bytes(index, spec, loop, parts)
        if need is None:
            return None
        halo = max(halo, need)
    results = [parse_index(index) for index in axes.outputs]
    placed = [
        _placement(index, loop, sizes, number, axes.added) for number, index in enumerate(sources)
    ]
    return Rule(
        axis=loop.name,
        inputs=tuple(placed),
        outputs=tuple(_result(index, loop, sizes) for index in results),
        gradients=tuple(_gradient(placement, loop) for placement in placed),
        halo=halo,
        exchange=loop.exchange,
        parts=parts,
    )


def _stands(index: Dims, loop: LoopAxis, sizes: dict[str, int]) -> str:
    """ "S1", "S1/3", or "" where the axis does not stand in the index."""
    found = locate_axis(index, loop.name, sizes)
    if found is None:
        return ""
    dim, groups = found
    return f"S{dim}" if groups == 1 else f"S{dim}/{groups}"


def _placement(
    index: Dims, loop: LoopAxis, sizes: dict[str, int], number: int, added: Sequence[int]
) -> str:
    # A bias that every part added to its summand would count several times.
    adds = number in added and loop.kind in ("sum", "masked")
    return _stands(index, loop, sizes) or ("P" if adds else "R")


def _result(index: Dims, loop: LoopAxis, sizes: dict[str, int]) -> str:
    return _stands(index, loop, sizes) or PARTIAL_PLACEMENTS.get(loop.kind, "R")


def _gradient(placement: str, loop: LoopAxis) -> str:
    """A whole input that every part used for its share of the results gets a pending gradient."""
    # The gradient of a sum is that of each summand, whole.
    if placement == "P":
        return "R"
    return "P" if placement == "R" else placement


def halo_bytes(index: Dims, spec: TensorSpec, loop: LoopAxis, parts: int) -> int | None:
    """Most bytes of a tensor that one part needs of its neighbours; None if that is too much.

    Part p of the loop of n positions computes positions p n / parts to (p + 1) n / parts - 1; they
    need the elements from stride * first - padding to stride * last - padding + dilation *
    (kernel - 1), of which a part owns its share of the tensor.

    Args:
        loop: The axis, perhaps with a window.

    Returns:
        None where parts of the tensor are unequal, or a neighbour's whole part is not enough.
    """
    dim = next((d for d, names in enumerate(index) if loop.name in names), None)
    if dim is None or loop.window is None or len(index[dim]) > 1:
        return 0
    size = spec.shape[dim]
    if size % parts or size == loop.size == 1:
        return None
    own, most = size // parts, 0
    for part in range(parts):
        low, high = window_input_range(
            loop.window, part * loop.size // parts, loop.size // parts, size
        )
        left, right = max(0, part * own - low), max(0, high - (part + 1) * own)
        # Halos come from the two neighbours only.
        if max(left, right) > own:
            return None
        most = max(most, left + right)
    return most * math.prod(spec.shape[:dim] + spec.shape[dim + 1 :]) * spec.itemsize


def window_input_range(window: Window, first: int, count: int, size: int) -> tuple[int, int]:
    """The elements from low to below high, inside of `size`, for `count` positions from `first`."""
    low = first * window.stride - window.padding
    reach = window.dilation * (window.kernel - 1) + 1
    high = (first + count - 1) * window.stride - window.padding + reach
    return max(low, 0), min(high, size)


def _cheapest(found: Sequence[Rule]) -> tuple[Rule, ...]:
    """Of rules that place everything alike, the one with the least to send; the first of equals."""
    best: dict[tuple[tuple[str, ...], ...], Rule] = {}
    for rule in found:
        key = (rule.inputs, rule.outputs)
        if key not in best or _price(rule) < _price(best[key]):
            best[key] = rule
    return tuple(best.values())


def _price(rule: Rule) -> tuple[int, int]:
    # With equal bytes, the rule that divides the work.
    return rule.halo + rule.exchange, -rule.parts
