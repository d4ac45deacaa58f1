"""Buckets of fused gradients: where each parameter's gradient lies, and what happened to it.

A bucket is one flat buffer of one type on one device; its parameters share a compressor and a node
group. Which parameters share a bucket depends on the layout alone, never on the order in which
gradients arrive. `BucketTiming` records what happened to it in one step: timeline, report and
messages read it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headway.collective.model.gradient_buckets import chunk_spans, fill_buckets_by_key
from headway.comm.algorithms.method import ExchangeMethod, FusedBuffer, GradientSlice, Route
from headway.comm.traffic_shaper import TrafficShaper


@dataclass(slots=True)
class BucketTiming:
    """Times are `perf_counter` seconds; 0.0: not yet.

    Attributes:
        parameters: Logical names.
        wire_bytes: What this rank sends for it by the plan's own arithmetic.
        ready: The last of its gradients was there.
        sent: Its first byte was handed to the network.
        applied: The optimiser had used it (exchanges across the step's border; else 0.0).
        needed: The training thread asked for it.
        waited: Seconds for which the training thread then waited: exposed communication.
        name: Of what is no bucket: the all-reduce of a pipeline's stage.
    """

    bucket: int
    parameters: tuple[str, ...]
    num_bytes: int
    wire_bytes: int
    ready: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    applied: float = 0.0
    needed: float = 0.0
    waited: float = 0.0
    name: str = ""


BucketNames = tuple[tuple[str, ...], ...]
"""Logical names per bucket, in the order in which the buckets become ready."""


@dataclass(slots=True, eq=False)
class Bucket:
    """One flat buffer; `views[i]` is the part that holds the gradient of `parameters[i]`.

    Attributes:
        names: Logical names of the parameters.
        routes: One per place in flight.
        arrived: Which gradients have been put into the buffer in this step.
        missing: How many gradients have not arrived for the last time in this step.
        step: The step to which the content belongs.
        weight: Ranks of the world by ranks that exchange this bucket: a mean over a node group is
            one over its own ranks.
        reserve: Of an emulated link: queues a share (0 to 1) of the bucket's bytes and returns the
            `time.monotonic` at which they have left this node.
    """

    number: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    fused: FusedBuffer
    views: tuple[Tensor, ...]
    method: ExchangeMethod
    routes: tuple[Route, ...]
    arrived: list[bool] = field(default_factory=list)
    complete: list[bool] = field(default_factory=list)
    missing: int = 0
    step: int = 0
    wire_bytes: int = 0
    weight: float = 1.0
    reserve: Callable[[float], float] | None = None
    flight: BucketTiming = field(default_factory=lambda: BucketTiming(0, (), 0, 0))
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = self.fused.gradients.numel() * self.fused.buffer.element_size()
        self.open(0)

    def shape_traffic(self, pace: TrafficShaper, num_bytes: float) -> None:
        """Let this node's emulated interface slow the bytes down that go to other nodes."""
        self.reserve = lambda share: pace.reserve(round(num_bytes * share))

    def open(self, step: int) -> None:
        """Begin a new step: no gradient is there."""
        self.step = step
        self.missing = len(self.parameters)
        self.arrived = [False] * self.missing
        self.complete = [False] * self.missing
        self.flight = BucketTiming(self.number, self.names, self.num_bytes, self.wire_bytes)

    def fill(self) -> None:
        """All that will come has come: the rest counts as zero; set the flags."""
        flags = self.fused.flags
        if all(self.arrived):
            flags.fill_(1.0)
            return
        for view, arrived in zip(self.views, self.arrived, strict=True):
            if not arrived:
                # It still holds the sum of the last step.
                view.zero_()
        flags.copy_(torch.tensor(self.arrived, dtype=flags.dtype))

    @property
    def used(self) -> list[bool]:
        """After the exchange: which parameters any rank has used."""
        if all(self.arrived):
            return self.arrived  # the flags of this rank alone say so
        flags = self.fused.flags
        # Complex numbers have no order.
        return ((flags.real if flags.is_complex() else flags) > 0).tolist()

    def chunks(self, chunk_bytes: int | None) -> list[FusedBuffer]:
        """The buffer in parts that can be exchanged alone; the whole where the method cannot."""
        if chunk_bytes is None or not self.method.elementwise:
            return [self.fused]
        buffer = self.fused.buffer
        spans = chunk_spans(self.num_bytes, chunk_bytes)
        if len(spans) == 1:
            return [self.fused]
        starts = [start // buffer.element_size() for start, _ in spans]
        ends = [*starts[1:], buffer.numel()]  # the flags travel with the last one
        return [
            FusedBuffer(buffer[a:b], number=self.number) for a, b in zip(starts, ends, strict=True)
        ]


def fuse_parameters(
    parameters: Mapping[str, nn.Parameter],
    keys: Mapping[str, Hashable],
    *,
    bucket_bytes: int,
    first_bytes: int | None = None,
) -> BucketNames:
    """Fuse parameters into buckets.

    Args:
        parameters: Logical name -> parameter, in the order in which gradients are expected.
        keys: Only parameters with equal keys share a bucket.
        bucket_bytes: Largest size; a larger parameter has a bucket of its own.
        first_bytes: Another largest size of the first bucket of each kind.
    """
    names = list(parameters)
    sizes = [p.numel() * p.element_size() for p in parameters.values()]
    whole = [(keys[name], p.dtype, p.device) for name, p in parameters.items()]
    found = fill_buckets_by_key(sizes, whole, range(len(names)), bucket_bytes, first_bytes)
    return tuple(tuple(names[number] for number in bucket) for bucket in found)


def make_bucket(
    number: int,
    names: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    method: ExchangeMethod,
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
        pieces.append(GradientSlice(name, start, stop, _memory_shape(parameter)))
        start = stop
    return Bucket(
        number=number,
        names=tuple(names),
        parameters=chosen,
        fused=FusedBuffer(buffer, tuple(pieces), number),
        views=tuple(_view_as_parameter(place, p) for place, p in zip(places, chosen, strict=True)),
        method=method,
        routes=routes,
    )


def dims_by_stride(parameter: Tensor) -> list[int]:
    """The dimensions in memory order, the one with the largest stride first."""
    return sorted(range(parameter.ndim), key=parameter.stride, reverse=True)


def _memory_shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape[dim] for dim in dims_by_stride(parameter))


def _view_as_parameter(place: Tensor, parameter: Tensor) -> Tensor:
    """A flat piece in the parameter's shape and memory order (transposed, channels last)."""
    order = dims_by_stride(parameter)
    # The inverse permutation, from memory order back to the parameter's dimensions.
    back = sorted(range(parameter.ndim), key=order.__getitem__)
    return place.view(_memory_shape(parameter)).permute(back)
