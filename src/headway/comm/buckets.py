"""Fused buckets: where each parameter's gradient lies, and what happened to it in this step.

A bucket is one flat buffer of one type on one device; its parameters share a compressor and a node
group. Invariant: which parameters share a bucket depends on the layout alone, which is the same on
all ranks, never on the order in which gradients come in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headway.collective.chunks import cut
from headway.comm.flight import Flight
from headway.comm.method import Fused, Method, Piece, Route
from headway.comm.pacing import Pace

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the link does not idle until a full one is there."""

Layout = tuple[tuple[str, ...], ...]
"""Logical names per bucket, in the order in which the buckets become ready."""


class Toll:
    """What an emulated link asks for a bucket: how long its bytes need to leave this node.

    Args:
        pace: The node's interface.
        num_bytes: That this rank sends to other nodes.
    """

    def __init__(self, pace: Pace, num_bytes: float) -> None:
        self._pace = pace
        self._num_bytes = num_bytes

    def reserve(self, share: float) -> float:
        """Queue a share (0 to 1) of the bytes; returns the `time.monotonic` when they have left."""
        return self._pace.reserve(round(self._num_bytes * share))


@dataclass(slots=True, eq=False)
class Bucket:
    """One flat buffer; `views[i]` is the part that holds the gradient of `parameters[i]`.

    Attributes:
        number: The same on all ranks.
        names: Logical names of the parameters.
        fused: Buffer, pieces and flags, as the method sees them.
        method: How it becomes the same on all ranks; keeps state of this bucket.
        routes: One per place in flight.
        arrived: Which gradients have been put into the buffer in this step.
        missing: How many gradients have not arrived for the last time in this step.
        step: The step to which the content belongs.
        weight: Ranks of the world by ranks that exchange this bucket: a mean over a node group is
            one over its own ranks.
        toll: Of an emulated link.
        flight: What happened in this step.
        num_bytes: Of the gradients.
    """

    number: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    fused: Fused
    views: tuple[Tensor, ...]
    method: Method
    routes: tuple[Route, ...]
    arrived: list[bool] = field(default_factory=list)
    complete: list[bool] = field(default_factory=list)
    missing: int = 0
    step: int = 0
    wire_bytes: int = 0
    weight: float = 1.0
    toll: Toll | None = None
    flight: Flight = field(default_factory=lambda: Flight(0, (), 0, 0))
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = self.fused.gradients.numel() * self.fused.buffer.element_size()
        self.open(0)

    def open(self, step: int) -> None:
        """Begin a new step: no gradient is there."""
        self.step = step
        self.missing = len(self.parameters)
        self.arrived = [False] * self.missing
        self.complete = [False] * self.missing
        self.flight = Flight(self.number, self.names, self.num_bytes, self.wire_bytes)

    def fill(self) -> None:
        """All that will come has come: the rest counts as zero; set the flags."""
        flags = self.fused.flags
        if all(self.arrived):
            flags.fill_(1.0)
            return
        for view, arrived in zip(self.views, self.arrived, strict=True):
            if not arrived:
                view.zero_()
        flags.copy_(torch.tensor(self.arrived, dtype=flags.dtype))

    @property
    def used(self) -> list[bool]:
        """After the exchange: which parameters any rank has used."""
        if all(self.arrived):
            return self.arrived  # the flags of this rank alone say so
        flags = self.fused.flags
        return ((flags.real if flags.is_complex() else flags) > 0).tolist()

    def chunks(self, chunk_bytes: int | None) -> list[Fused]:
        """The buffer in parts that can be exchanged alone; the whole where the method cannot."""
        if chunk_bytes is None or not self.method.elementwise:
            return [self.fused]
        buffer = self.fused.buffer
        spans = cut(self.num_bytes, chunk_bytes)
        if len(spans) == 1:
            return [self.fused]
        starts = [start // buffer.element_size() for start, _ in spans]
        ends = [*starts[1:], buffer.numel()]  # the flags travel with the last one
        return [Fused(buffer[a:b], number=self.number) for a, b in zip(starts, ends, strict=True)]


def fuse(
    parameters: Mapping[str, nn.Parameter],
    keys: Mapping[str, Hashable],
    *,
    bucket_bytes: int,
    first_bytes: int | None = None,
) -> Layout:
    """Cut parameters into buckets in the order given.

    Args:
        parameters: Logical name -> parameter, in the order in which gradients are expected.
        keys: Only parameters with equal keys share a bucket.
        bucket_bytes: Largest size; a larger parameter has a bucket of its own.
        first_bytes: Another largest size of the first bucket of each kind.
    """
    limits: dict[Hashable, int] = {}
    opened: dict[Hashable, tuple[list[str], int]] = {}
    closed: list[tuple[str, ...]] = []
    for name, parameter in parameters.items():
        key = (keys[name], parameter.dtype, parameter.device)
        limit = limits.setdefault(key, min(first_bytes or bucket_bytes, bucket_bytes))
        num_bytes = parameter.numel() * parameter.element_size()
        names, size = opened.get(key, ([], 0))
        if names and size + num_bytes > limit:
            closed.append(tuple(names))
            if size >= limit // 2:
                limits[key] = bucket_bytes
            names, size = [], 0
        opened[key] = ([*names, name], size + num_bytes)
    closed += [tuple(names) for names, _ in opened.values()]
    # A bucket is ready with its last gradient.
    place = {name: number for number, name in enumerate(parameters)}
    return tuple(sorted(closed, key=lambda names: place[names[-1]]))


def split_by_key(layout: Iterable[Sequence[str]], keys: Mapping[str, Hashable]) -> Layout:
    """A layout that was found without looking at keys, cut further where keys differ."""
    found: list[tuple[str, ...]] = []
    for names in layout:
        groups: dict[Hashable, list[str]] = {}
        for name in names:
            groups.setdefault(keys[name], []).append(name)
        found.extend(map(tuple, groups.values()))
    return tuple(found)


def make_bucket(
    number: int,
    names: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    method: Method,
    routes: tuple[Route, ...],
) -> Bucket:
    """One bucket of the layout, with zeroed buffer."""
    chosen = tuple(parameters[name] for name in names)
    first = chosen[0]
    total = sum(p.numel() for p in chosen)
    buffer = torch.zeros(total + len(chosen), dtype=first.dtype, device=first.device)
    places = buffer[:total].split([p.numel() for p in chosen])
    pieces, start = [], 0
    for name, parameter in zip(names, chosen, strict=True):
        stop = start + parameter.numel()
        pieces.append(Piece(name, start, stop, _memory_shape(parameter)))
        start = stop
    return Bucket(
        number=number,
        names=tuple(names),
        parameters=chosen,
        fused=Fused(buffer, tuple(pieces), number),
        views=tuple(_shaped(place, p) for place, p in zip(places, chosen, strict=True)),
        method=method,
        routes=routes,
    )


def _order(parameter: Tensor) -> list[int]:
    return sorted(range(parameter.ndim), key=parameter.stride, reverse=True)


def _memory_shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape[dim] for dim in _order(parameter))


def _shaped(place: Tensor, parameter: Tensor) -> Tensor:
    """A flat piece in the parameter's shape and memory order (transposed, channels last)."""
    order = _order(parameter)
    back = sorted(range(parameter.ndim), key=order.__getitem__)
    return place.view(_memory_shape(parameter)).permute(back)
