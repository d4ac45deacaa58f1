"""One device as numbers: what a matrix product, a streaming kernel and a row of launches cost.

Kernels take time on the device; the host takes time to issue them. Whichever is slower decides, and
where both take about as long they hinder each other. Every function takes numbers or arrays.

Sources: roofline (Williams et al. 2009); floors of eager execution as in the measurements of vTrain
(Bang et al. 2024), where they matter more than the peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.cluster.device import HostOverhead, KernelPace
from headway.cluster.memory_tier import MemoryTier
from headway.errors import PlanError

Array = NDArray[np.float64]
Number = float | Array
"""Seconds, bytes, counts: one, or one per plan."""
# cuBLAS with large fp16 matrices under a lasting load, 250 to 270 of 312 TFLOP/s on an A100;
# assumed, 0.03 either way.
PEAK_SHARE = 0.82
WIDTHS = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp8": 1.0}
"""Bytes of a number, where they are not 2."""


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """A device under a framework that issues kernel after kernel.

    Attributes:
        peak: FLOP/s by number format, as in the datasheet.
        efficiency: Share of the peak that endless matrix products reach.
        depth: Length of the summed dimension at which a matrix product reaches half of that.
        kernel: Seconds that any kernel costs on the device beyond its work.
        dispatch: Seconds that the host needs to issue one kernel.
        sharpness: How little host and device hinder each other, at least 1: 1, times add up; at
            infinity, the longer one alone counts.
        update: Seconds per parameter of the optimiser's step, gradient norm and conversions.
        gather: Seconds of the host to put one tensor of one sample into a batch; 0: not measured.
        overlap: Share of an exchange under way that computation beside it does not feel.
        tiers: Memory behind its own, from the nearest outwards.
        kinds: Kernels in a training step, by torch's names, linear layers for all products; with
            any of them known, an operator costs the sum of its kernels.
        host: What a step takes beside kernels, updates and exchanges.
        source: Of each number above: a datasheet, a measurement with its date, or an assumption.
    """

    name: str
    peak: Mapping[str, float]
    memory: float
    memory_rate: float
    efficiency: float = PEAK_SHARE
    depth: float = 60.0
    kernel: float = 4e-6
    dispatch: float = 40e-6
    sharpness: float = 4.0
    update: float = 20e-12
    gather: float = 0.0
    overlap: float = 1.0
    tiers: tuple[MemoryTier, ...] = ()
    kinds: Mapping[str, KernelPace] = field(default_factory=dict)
    host: HostOverhead = field(default_factory=HostOverhead)
    source: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value:g}; it must be positive"
            for name, value in (("memory", self.memory), ("memory_rate", self.memory_rate))
            if not value > 0
        ]
        problems += [f"peak {key} is {v:g}" for key, v in self.peak.items() if not v > 0]
        if not 0 < self.efficiency <= 1:
            problems.append(f"efficiency is {self.efficiency:g}; between 0 and 1 is possible")
        if not self.sharpness >= 1:
            problems.append(f"sharpness is {self.sharpness:g}; it must be at least 1")
        floors = ("depth", "kernel", "dispatch", "update", "gather")
        problems += [f"{key} is negative" for key in floors if getattr(self, key) < 0]
        if problems:
            raise PlanError(f"no such device: {self.name}", problems=problems)

    def rate(self, dtype: str) -> float:
        """FLOP/s that endless matrix products reach.

        Raises:
            PlanError: The peak of this format is not known.
        """
        if dtype not in self.peak:
            known = ", ".join(sorted(self.peak)) or "none"
            raise PlanError(
                f"{self.name} has no peak for {dtype}",
                problems=[f"known: {known}"],
                fix="Take one of these formats, or add the datasheet's figure.",
            )
        return self.peak[dtype] * self.efficiency

    def seconds_of_matmul(
        self, m: Number, n: Number, k: Number, *, dtype: str = "fp16", count: Number = 1.0
    ) -> Number:
        """Of `count` products (m, k) @ (k, n), at least the time of their bytes:

            2 m n k / (peak efficiency) * (1 + depth / k)

        The launch is not in it: see `seconds_of_kernels`.
        """
        work = 2.0 * m * n * k / self.rate(dtype) * (1.0 + self.depth / k)
        width = WIDTHS.get(dtype, 2.0)
        moved = width * (m * k + k * n + m * n) / self.memory_rate
        return count * np.maximum(work, moved)

    def seconds_of_elementwise(self, num_bytes: Number) -> Number:
        """Of kernels that read and write so many bytes."""
        return num_bytes / self.memory_rate

    def seconds_of_kernels(self, count: Number) -> Number:
        """What so many kernels cost on the device beyond their work."""
        return self.kernel * count

    def seconds_of_host(self, kernels: Number) -> Number:
        """What the host needs to issue so many kernels."""
        return self.dispatch * kernels

    def join(self, host: Number, device: Number) -> Number:
        """Time in which both are done: (host^q + device^q)^(1/q), q the sharpness."""
        q = self.sharpness
        longer: Number
        if isinstance(host, float) and isinstance(device, float):
            longer = np.float64(max(host, device, 1e-30))
        else:
            longer = np.maximum(np.maximum(host, device), 1e-30)
        # Relative to the longer one: powers of microseconds would underflow where q is large.
        return longer * ((host / longer) ** q + (device / longer) ** q) ** (1.0 / q)


def scale_device(
    device: DeviceModel, *, compute: float = 1.0, stream: float = 1.0, launches: float = 1.0
) -> DeviceModel:
    """The device with other rates.

    Args:
        compute: Times the FLOP/s of every number format and kind of kernel.
        stream: Times the bytes/s of its memory, of every kind of kernel.
        launches: So many times less does issuing a kernel take, on the host, on the device, and in
            the libraries that set it up.
    """
    return replace(
        device,
        peak={name: compute * rate for name, rate in device.peak.items()},
        memory_rate=stream * device.memory_rate,
        dispatch=device.dispatch / launches,
        kernel=device.kernel / launches,
        kinds={name: _pace(pace, compute, stream, launches) for name, pace in device.kinds.items()},
    )


def _pace(pace: KernelPace, compute: float, stream: float, launches: float) -> KernelPace:
    factors = {"": compute, "_stream": stream, "_weights": stream, "_call": 1.0 / launches}
    numbers = {
        name: getattr(pace, name) * factor
        for term, factor in factors.items()
        for name in (f"forward{term}", f"backward{term}")
        if getattr(pace, name) is not None
    }
    return replace(pace, **numbers)
