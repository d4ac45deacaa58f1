"""Raw measurements of a machine, rank by rank.

`capture.benchmark` makes these records; `headway.cost` fits a cluster's numbers to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SizeTimings = tuple[tuple[float, float], ...]
"""(Bytes, seconds), the shortest of several for each size."""


@dataclass(frozen=True, kw_only=True)
class KernelTiming:
    """One kernel.

    Attributes:
        kind: By torch's name.
        forward: FLOPs, bytes, seconds.
        backward: The same, of all gradients.
        weights: Bytes of parameters among those of forward, and of backward.
        calls: How often it is called, one after the other: cells of a recurrent layer.
    """

    kind: str
    forward: tuple[float, float, float]
    backward: tuple[float, float, float]
    weights: tuple[float, float] = (0.0, 0.0)
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class IdleStep:
    """A step of the executor with next to nothing to compute, in a plan of all ranks.

    Attributes:
        tensors: That are trained, of four numbers each, in a row of as many products.
        samples: Of a micro-batch, of one tensor each.
        stages: Of a pipeline; 1: there is none.
    """

    tensors: int
    microbatches: int
    samples: int
    stages: int = 1


@dataclass(frozen=True, kw_only=True)
class DeviceReadings:
    """What one rank measured of its device while all ranks of the machine measured theirs.

    Attributes:
        name: Of the device, fit for a file.
        adds: Host and device are the same processor, so that their times add up.
        products: By number format: (m, n, k, seconds) of matrix products.
        streams: Of sums of two tensors into a new one: bytes read and written, seconds.
        dispatch: Seconds to issue a tiny kernel, forward and backward.
        kernel: Seconds of a tiny kernel on the device beyond that.
        gather: Seconds to put one tensor of one sample into a batch.
        memory: Bytes.
        spread: Usual time of a product over its shortest one.
        kinds: Of kernels in a training step.
        overlap: Share of an exchange under way that products beside it do not feel.
        updates: Seconds per parameter of a step of each optimiser alone, and of the norm of the
            gradients as "clip", in tensors of each of `cluster.device.UPDATE_TENSOR_SIZES` numbers.
        idle: Seconds of steps with nothing to compute; empty: not measured.
    """

    name: str
    adds: bool
    products: Mapping[str, tuple[tuple[int, int, int, float], ...]]
    streams: SizeTimings
    dispatch: float
    kernel: float
    memory: float
    spread: float
    kinds: tuple[KernelTiming, ...] = ()
    overlap: float | None = None
    gather: float | None = None
    updates: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    idle: Mapping[IdleStep, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LinkReadings:
    """What a group of ranks measured of one level of links.

    Attributes:
        sums: Of all-reduces: bytes of the buffer, seconds.
        messages: From one rank to another one.
    """

    ranks: int
    sums: SizeTimings
    messages: SizeTimings


@dataclass(frozen=True, kw_only=True)
class RankReadings:
    """What one rank measured.

    Attributes:
        inside: Of the links inside its node; None: it is alone there.
        between: Of the links between nodes; None: it took no part, or there is one node.
        busy: Cores that others used before anything was measured.
    """

    node: str
    kernels: DeviceReadings
    inside: LinkReadings | None
    between: LinkReadings | None
    busy: float
    threads: int
