"""A device as a file describes it: what it computes, holds and moves, and its price per hour.

Only what the file states stands in it: what is left out comes from the preset's datasheet, or from
the assumptions of the cost model (`headway.cost`), which name their source.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated

from headway.cluster.datasheets import DATASHEETS, has_datasheet
from headway.cluster.link import Rate, Seconds, from_text
from headway.cluster.memory_tier import Bytes, MemoryTier, tier_problems
from headway.documents import document, nearest
from headway.units import Price, parse_flops

_SHARES = ("efficiency", "depth", "sharpness", "overlap")
_TIMES = ("kernel", "dispatch", "update", "gather")
NUMBERS = ("memory", "memory_rate", *_SHARES, *_TIMES)
"""Names of a device's numbers, as in `cost.DeviceModel`."""
FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""Number formats of which a device may have a peak."""


Flops = Annotated[float, from_text(parse_flops, 'no rate of computing; write it as "312 TFLOP/s"')]
"""FLOP per second; in a file a text with its unit."""
_PerHour = Annotated[Price, from_text(Price.parse, 'no price; write it as "2.5 USD/h"')]


CORE_CACHE_BYTES = 5 * 2**20
"""Bytes that a kernel finds in, and leaves to, a cache of its core."""


@document
class KernelPace:
    """How fast one kind of kernel is: a pass takes the time of a call, and its FLOPs and its bytes
    over their rates, together. What is left out costs nothing, but weights without a rate of their
    own count as other bytes.

    Attributes:
        forward: FLOP/s of the forward pass.
        forward_stream: Bytes/s.
        forward_weights: Bytes/s of parameters, which are packed anew for every call.
        forward_far: Bytes/s of what is beyond `CORE_CACHE_BYTES` bytes, which takes so much longer.
        forward_call: What a call takes beyond its launch.
        backward: FLOP/s of all gradients.
        backward_stream: Bytes/s.
        backward_weights: Bytes/s of parameters and of their gradients.
    """

    forward: Flops | None = None
    forward_stream: Rate | None = None
    forward_weights: Rate | None = None
    forward_far: Rate | None = None
    forward_call: Seconds | None = None
    backward: Flops | None = None
    backward_stream: Rate | None = None
    backward_weights: Rate | None = None
    backward_far: Rate | None = None
    backward_call: Seconds | None = None

    def seconds(self, flops: float, moved: float, weights: float = 0.0, *, backward: bool) -> float:
        """Of one pass without its call.

        Args:
            flops: Of both gradients in backward, like the following.
            moved: Bytes that are no parameters'.
            weights: Bytes of parameters.
        """
        rates = (self.forward, self.forward_stream, self.forward_weights)
        if backward:
            rates = (self.backward, self.backward_stream, self.backward_weights)
        work = (flops, moved, weights) if rates[2] else (flops, moved + weights, 0.0)
        return sum(n / rate for n, rate in zip(work, rates, strict=True) if rate)

    def far(self, moved: float, *, backward: bool) -> float:
        """Seconds of one pass more, as a cache does not hold what it moves.

        Args:
            moved: Bytes of one device, parameters included.
        """
        rate = self.backward_far if backward else self.forward_far
        return max(0.0, moved - CORE_CACHE_BYTES) / rate if rate else 0.0

    def call(self, *, backward: bool) -> float:
        """Seconds of a call, however small."""
        return (self.backward_call if backward else self.forward_call) or 0.0


UPDATE_TENSOR_SIZES = (2**12, 2**16, 2**20)
"""Numbers of the tensors with which updates are measured."""


@document
class OptimizerPace:
    """What an optimiser's step takes per parameter: in small tensors the launches count, large ones
    lie in no cache.

    Attributes:
        small: Of tensors of `UPDATE_TENSOR_SIZES[0]` numbers, and of fewer: they take as long.
        middle: Of `UPDATE_TENSOR_SIZES[1]`.
        large: Of `UPDATE_TENSOR_SIZES[2]` and more.
    """

    small: Seconds
    middle: Seconds
    large: Seconds

    def seconds(self, numbers: float) -> float:
        """Of one tensor; between the sizes, seconds per parameter follow the size's logarithm."""
        small, middle, large = UPDATE_TENSOR_SIZES
        size = max(numbers, small)
        if size <= middle:
            start, one, two, share = small, self.small, self.middle, middle / small
        else:
            start, one, two, share = middle, self.middle, self.large, large / middle
        way = min(1.0, math.log(size / start) / math.log(share))
        return size * (one + way * (two - one))


@document
class HostOverhead:
    """What a step takes beside kernels, updates and exchanges, where host and device are one.

    Attributes:
        step: Seconds of a step without a pipeline.
        microbatch: Of each micro-batch of such a step.
        tensor: Of each trained tensor: its hook, and its place in a bucket.
        piped_step: Of a step of a pipeline.
        piped_microbatch: Of both passes of a micro-batch through one stage.
    """

    step: Seconds = 0.0
    microbatch: Seconds = 0.0
    tensor: Seconds = 0.0
    piped_step: Seconds = 0.0
    piped_microbatch: Seconds = 0.0


@document
class Device:
    """What is known of a kind of device; the numbers are those of `cost.DeviceModel`.

    Attributes:
        preset: Name of a datasheet, see `headway cluster presets`; what stands beside it counts
            instead.
        peak: FLOP/s by number format.
        memory: Bytes.
        memory_rate: Bytes/s that streaming kernels reach.
        tiers: Memory behind its own, from the nearest outwards; empty: that of the preset.
        efficiency: Share of the peak that endless matrix products reach.
        depth: Length of the summed dimension at which a matrix product reaches half of that.
        kernel: Seconds that any kernel costs on the device beyond its work.
        dispatch: Seconds that the host needs to issue one kernel.
        sharpness: 1: times of host and device add up; at infinity, the longer one alone counts.
        update: Seconds per parameter of the optimiser's step.
        updates: Of each optimiser's step alone, as `optimizer_name` calls it, and as "clip" of the
            norm of the gradients.
        gather: Seconds that the host needs to put one tensor of one sample into a batch.
        overlap: Share of an exchange under way that computation beside it does not feel.
        kinds: Of kinds of kernels in a training step, by torch's names; linear layers for all
            products.
        host: What a step takes beside all of these.
        price: Of an hour of one device.
        source: Of each number, by its name above.
    """

    preset: str | None = None
    peak: dict[str, Flops] = dataclasses.field(default_factory=dict)
    memory: Bytes | None = None
    memory_rate: Rate | None = None
    tiers: tuple[MemoryTier, ...] = ()
    efficiency: float | None = None
    depth: float | None = None
    kernel: Seconds | None = None
    dispatch: Seconds | None = None
    sharpness: float | None = None
    update: Seconds | None = None
    gather: Seconds | None = None
    overlap: float | None = None
    kinds: dict[str, KernelPace] = dataclasses.field(default_factory=dict)
    updates: dict[str, OptimizerPace] = dataclasses.field(default_factory=dict)
    host: HostOverhead | None = None
    price: _PerHour | None = None
    source: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def own(self) -> dict[str, float]:
        """The numbers that were given, by name, without peaks and price."""
        values = {name: getattr(self, name) for name in NUMBERS}
        return {name: value for name, value in values.items() if value is not None}

    def problems(self, key: str) -> Iterator[str]:
        """What is impossible about it, one line each."""
        if self.preset is not None and not has_datasheet(self.preset):
            yield f"{key}.preset: no device {self.preset!r}{nearest(self.preset, list(DATASHEETS))}"
        for name in self.peak:
            if name not in FORMATS:
                yield f"{key}.peak.{name}: no number format{nearest(name, FORMATS)}"
        for name, value in {**self.peak, **self.own}.items():
            if name in (*self.peak, "memory", "memory_rate") and not value > 0:
                yield f"{key}: {name} is {value:g}; it must be positive"
        if self.preset is None:
            needed = ("peak", "memory", "memory_rate")
            missing = [name for name in needed if getattr(self, name) in (None, {})]
            if missing:
                yield f"{key}: without a preset it needs {', '.join(missing)} too"
        if self.efficiency is not None and not 0 < self.efficiency <= 1:
            yield f"{key}.efficiency: {self.efficiency:g}; between 0 and 1 is possible"
        if self.sharpness is not None and not self.sharpness >= 1:
            yield f"{key}.sharpness: {self.sharpness:g}; it must be at least 1"
        if self.overlap is not None and not 0 <= self.overlap <= 1:
            yield f"{key}.overlap: {self.overlap:g}; between 0 and 1 is possible"
        yield from tier_problems(self.tiers, f"{key}.tiers")
        for name in self.source:
            if name not in (*NUMBERS, "peak", "kinds", "updates", "host", "price"):
                yield f"{key}.source.{name}: no such number{nearest(name, (*NUMBERS, 'peak'))}"


def device_problems(
    devices: Mapping[str, Device], users: Mapping[str, str | None]
) -> Iterator[str]:
    """What is wrong with a cluster's devices, one line each.

    Args:
        users: By key of the file ("device", and one for each node): the name that stands there.
    """
    for name, device in devices.items():
        yield from device.problems(f"devices.{name}")
    currencies = {device.price.currency for device in devices.values() if device.price}
    if len(currencies) > 1:
        yield f"devices: prices in {' and '.join(sorted(currencies))}; write all in one currency"
    for key, said in users.items():
        if said is not None and said not in devices:
            hint = nearest(said, list(devices))
            if has_datasheet(said):
                hint = f'; to use the preset, add [devices.{said}] with preset = "{said}"'
            yield f"{key}: no device {said!r}{hint}"
        # The cluster need not name a device if every node does.
        elif said is None and key != "device" and len(devices) > 1 and users["device"] is None:
            yield f"{key}: missing; one of {', '.join(devices)}"
