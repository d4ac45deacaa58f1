"""A convolution whose inner outputs are computed while the halos are under way.

The inner outputs want nothing from other ranks. What is left is a shell: for each split dimension
a slab at either end, of which later dimensions have the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from headway.graph.ranges import Range, Window, length
from headway.parallel.spatial.exchange import Fetching, Need, Piece, assemble

if TYPE_CHECKING:
    from headway.parallel.spatial.convolution import Call

FIRST = 2
"""The first spatial dimension."""


def inner_first(fetching: Fetching, call: Call, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The outputs of this rank; on return the fetch has finished."""
    inner = list(call.outputs)
    for need in call.needs:
        window, own = call.windows[need.dim - FIRST], call.outputs[need.dim - FIRST]
        inner[need.dim - FIRST] = _inside(window, need.own, need.have[-1][1], own)
    if any(2 * length(i) < length(o) for i, o in zip(inner, call.outputs, strict=True)):
        return call.run(assemble(fetching.finish(), call.needs), weight, bias)
    first = _compute(fetching.pieces, inner, call, weight, bias)
    pieces = fetching.finish()
    shape = [*first.shape[:FIRST], *map(length, call.outputs)]
    out = first.new_empty(shape)
    _place(out, call.outputs, inner, first)
    for box in shell(call.outputs, inner):
        _place(out, call.outputs, box, _compute(pieces, box, call, weight, bias))
    return out


@lru_cache(maxsize=4096)
def _inside(window: Window, have: Range, extent: int, outputs: Range) -> Range:
    return window.inside(have, extent, outputs)


def shell(outer: Sequence[Range], inner: Sequence[Range]) -> Iterator[list[Range]]:
    """Boxes that fill `outer` without `inner`, each element once."""
    for dim, (whole, part) in enumerate(zip(outer, inner, strict=True)):
        for side in ((whole[0], part[0]), (part[1], whole[1])):
            if length(side):
                yield [*inner[:dim], side, *outer[dim + 1 :]]


def _compute(
    pieces: Sequence[Piece], box: Sequence[Range], call: Call, weight: Tensor, bias: Tensor | None
) -> Tensor:
    needs = [_narrowed(need, call.windows[need.dim - FIRST].wanted(box[need.dim - FIRST]))
             for need in call.needs]  # fmt: skip
    return call.run(assemble(pieces, needs), weight, bias)


def _narrowed(need: Need, wish: Range) -> Need:
    want = list(need.want)
    want[need.axis.rank] = wish
    return replace(need, want=tuple(want))


def _place(out: Tensor, outer: Sequence[Range], box: Sequence[Range], part: Tensor) -> None:
    for dim, (whole, held) in enumerate(zip(outer, box, strict=True)):
        out = out.narrow(dim + FIRST, held[0] - whole[0], length(held))
    out.copy_(part)
