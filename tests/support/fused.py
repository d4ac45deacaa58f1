"""Buckets with known content, for tests of exchange methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headway.collective.nodes import Nodes
from headway.comm.algorithms.method import FusedBuffer, GradientSlice, Route, complete

SHAPES = {
    "embed": (60, 24),
    "bias": (24,),
    "first": (48, 40),
    "conv": (8, 6, 5, 5),
    "tiny": (5, 7),
    "wide": (16, 150),
    "norm": (48,),
}
"""Matrices whose sizes are no multiples of anything, with vectors and a small one between them."""

CUTS = {
    "one": [list(SHAPES)],
    "three": [["embed", "bias", "first"], ["conv", "tiny"], ["wide", "norm"]],
    "other": [["norm", "wide", "tiny", "conv"], ["first"], ["bias"], ["embed"]],
}
"""Ways to fuse the parameters into buckets."""


def make_route(world) -> Route:
    return Route(tuple(range(world.size)), world.rank, world.group, Nodes.one(world.size))


def pieces_of(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]] = SHAPES):
    found, start = [], 0
    for name in names:
        stop = start + torch.Size(shapes[name]).numel()
        found.append(GradientSlice(name, start, stop, tuple(shapes[name])))
        start = stop
    return tuple(found)


def fuse(
    gradients: Mapping[str, Tensor], names: Sequence[str], *, flags: Sequence[float] | None = None
) -> FusedBuffer:
    """One bucket with the gradients of these parameters; flags default to 1."""
    parts = [gradients[name].flatten() for name in names]
    flag = torch.ones(len(names)) if flags is None else torch.tensor(flags)
    pieces = pieces_of(names, {name: tuple(gradients[name].shape) for name in names})
    return FusedBuffer(torch.cat([*parts, flag.to(parts[0].dtype)]), pieces)


def draw_gradients(
    step: int, rank: int, dtype: torch.dtype = torch.float32, shapes=SHAPES
) -> dict[str, Tensor]:
    """Gradients of one step on one rank; layers differ in size by a factor of up to 100."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: (torch.randn(shape, generator=draw, dtype=torch.float64) * 10 ** (i % 3 - 1)).to(
            dtype
        )
        for i, (name, shape) in enumerate(shapes.items())
    }


class Buckets:
    """Some buckets with a method each, as an exchange would keep them."""

    def __init__(self, make, cut: Sequence[Sequence[str]]) -> None:
        self.cut = cut
        self.methods = [make() for _ in cut]
        self._fused: list[FusedBuffer | None] = [None] * len(cut)

    def exchange(self, gradients: Mapping[str, Tensor], route: Route) -> dict[str, Tensor]:
        """The results by name; buckets one after the other, with all flags set."""
        results = {}
        for number, (names, method) in enumerate(zip(self.cut, self.methods, strict=True)):
            fused = fuse(gradients, names)
            before = self._fused[number]
            if before is not None:  # as in an exchange: one buffer for the whole run
                before.buffer.copy_(fused.buffer)
                fused = before
            self._fused[number] = fused
            complete(method, fused, route)
            assert (fused.flags > 0).all()
            for piece in fused.pieces:
                results[piece.name] = fused.buffer[piece.start : piece.stop].view(piece.shape)
        return {name: value.clone() for name, value in results.items()}

    def state(self) -> dict[str, Tensor]:
        return {key: value for method in self.methods for key, value in method.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for method in self.methods:
            method.restore(state)
