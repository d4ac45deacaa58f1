"""Ways to train a convolutional network on p devices: computation, communication, memory, limit.

All times are of an epoch: D / B iterations of B samples. Symbols as in the paper: |x_l|, |y_l|,
|w_l|, |b_l| elements of a layer's input and output per sample, weights and biases; FW, BW seconds
per sample, WU per iteration; alpha + bytes beta a message; delta bytes of an element; gamma the
share of memory that is in use at the same time. Invariant: on one device every row is the serial
run, without communication. Source: Kahira et al. 2021, "An Oracle for Guiding Large-Scale
Model/Hybrid Parallel Training of Convolutional Neural Networks" (ParaDL), table of its cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from headway.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class ParadlLayer:
    """One layer; elements and seconds per sample.

    Attributes:
        update: WU, seconds per iteration.
        points: W H of the input, what a spatial split divides; 1: it has no space, and what it
            computes is divided by samples there.
        halo_x: Elements of the input that a part fetches from its neighbours.
        halo_dy: Elements of the output's gradient that it fetches.
    """

    forward: float
    backward: float
    update: float
    x: float
    y: float
    w: float = 0.0
    b: float = 0.0
    filters: int = 1
    channels: int = 1
    points: int = 1
    halo_x: float = 0.0
    halo_dy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ParadlJob:
    """What is trained, and on what.

    Attributes:
        samples: D, of an epoch.
        batch: B, of all devices.
        latency: alpha, seconds per message.
        seconds_per_byte: beta.
        element: delta, bytes.
        reuse: gamma.
        segments: S, micro-batches of a pipeline.
        begins: Layers with which the second and later groups of a pipeline begin.
    """

    layers: Sequence[ParadlLayer]
    samples: float
    batch: float
    latency: float
    seconds_per_byte: float
    element: float = 4.0
    reuse: float = 1.0
    segments: int = 1
    begins: tuple[int, ...] = ()

    @property
    def iterations(self) -> float:
        """D / B."""
        return self.samples / self.batch

    def message(self, elements: float) -> float:
        """alpha + elements delta beta."""
        return self.latency + elements * self.element * self.seconds_per_byte

    @property
    def groups(self) -> tuple[Sequence[ParadlLayer], ...]:
        """G_i: the layers of each stage of the pipeline."""
        edges = (0, *self.begins, len(self.layers))
        return tuple(self.layers[a:b] for a, b in pairwise(edges))


@dataclass(frozen=True, kw_only=True)
class ParadlRow:
    """A line of the table: seconds of an epoch, bytes of a device, most devices."""

    computation: float
    communication: float
    memory: float
    limit: int

    @property
    def seconds(self) -> float:
        return self.computation + self.communication


def data(job: ParadlJob, p: int) -> ParadlRow:
    """comp D/p sum(FW + BW) + D/B sum WU; comm 2 D/B (p-1)(alpha + sum|w|/p delta beta)."""
    return data_filter(job, p, 1)


def filter_(job: ParadlJob, p: int) -> ParadlRow:
    """comp D/p sum(FW + BW) + D/(B p) sum WU; comm 3 D/B (p-1) sum_{l<G} (alpha + B|y|/p ...):
    outputs are gathered forward, input gradients summed backward."""
    return data_filter(job, 1, p)


def channel(job: ParadlJob, p: int) -> ParadlRow:
    """As `filter_`, with an all-reduce forward and an all-gather backward."""
    return replace(filter_(job, p), limit=min(layer.channels for layer in job.layers))


def spatial(job: ParadlJob, p: int) -> ParadlRow:
    """As `data`, plus D/B sum (2 alpha + B (halo|x| + halo|dy|) delta beta), and at most min(W H)
    devices, both of the layers that have space."""
    return data_spatial(job, 1, p)


def data_filter(job: ParadlJob, p1: int, p2: int) -> ParadlRow:
    """p1 groups of p2 devices: filters split inside, gradients summed across.

    comm 3 D/B (p2-1) sum_{l<G} (alpha + B|y|/p delta beta)
       + 2 D/B (p1-1)(alpha + sum|w|/p delta beta), p = p1 p2.
    """
    p, layers = _positive(p1) * _positive(p2), job.layers
    # The paper sums over l < G: no layer needs the outputs of the last one.
    outputs = sum(job.message(job.batch * layer.y / p) for layer in layers[:-1])
    weights = job.message(_total(layers, "w") / p)
    return ParadlRow(
        computation=_passes(job, p) + job.iterations * _total(layers, "update") / p2,
        communication=job.iterations * (3 * (p2 - 1) * outputs + 2 * (p1 - 1) * weights),
        memory=_memory(job, layers, samples=job.batch / p1, shards=p2),
        limit=_limit(job, min(layer.filters for layer in layers), p1, p2),
    )


def data_spatial(job: ParadlJob, p1: int, p2: int) -> ParadlRow:
    """p1 groups of p2 devices: samples split in space inside, gradients summed over all."""
    p, layers = _positive(p1) * _positive(p2), job.layers
    weights = 2 * (p - 1) * job.message(_total(layers, "w") / p)
    halos = sum(
        job.latency + job.message(job.batch / p1 * (layer.halo_x + layer.halo_dy))
        for layer in layers
        if layer.points > 1
    )
    return ParadlRow(
        computation=_passes(job, p) + job.iterations * _total(layers, "update"),
        communication=job.iterations * (weights + (halos if p2 > 1 else 0.0)),
        memory=_memory(job, layers, samples=job.batch / p),
        limit=_limit(job, min((n.points for n in layers if n.points > 1), default=1), p1, p2),
    )


def pipeline(job: ParadlJob, p: int) -> ParadlRow:
    """comp D (p+S-1)/S (max FW_G + max BW_G) + D/B max WU_G;
    comm 2 D (p+S-2)/B max(alpha + B/S |y| delta beta), of the layers at the cuts.

    Raises:
        PlanError: The job is not cut into p groups.
    """
    groups, s = job.groups, job.segments
    if len(groups) != p:
        raise PlanError(
            f"a pipeline of {p} devices",
            problems=[f"the network is cut into {len(groups)} groups"],
            fix="name the first layers of the other groups in `begins`",
        )
    slowest = max(_total(g, "forward") for g in groups) + max(_total(g, "backward") for g in groups)
    sent = max((job.message(job.batch / s * g[-1].y) for g in groups[:-1]), default=0.0)
    return ParadlRow(
        computation=job.samples * (p + s - 1) / s * slowest
        + job.iterations * max(_total(g, "update") for g in groups),
        communication=2 * job.iterations * (p + s - 2) * sent,
        memory=max(_memory(job, g, samples=job.batch) for g in groups),
        limit=len(job.layers),
    )


ROWS: Mapping[str, Callable[[ParadlJob, int], ParadlRow]] = MappingProxyType(
    {
        "data": data,
        "spatial": spatial,
        "pipeline": pipeline,
        "filter": filter_,
        "channel": channel,
    }
)
"""Of one way to split; the hybrids take two numbers."""


def possible(row: ParadlRow, devices: int, memory: float) -> bool:
    """Whether so many devices of so many bytes can work like this."""
    return devices <= row.limit and row.memory <= memory


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError(f"{number} devices; at least 1")
    return number


def _limit(job: ParadlJob, parts: int, p1: int, p2: int) -> int:
    """Most devices: at most a sample for each group, and a part for each of its devices."""
    # A single group of several devices splits no samples, so the batch does not limit it.
    samples = int(job.batch) if p1 > 1 or p2 == 1 else 1
    return samples * (parts if p2 > 1 else 1)


def _total(layers: Sequence[ParadlLayer], name: str) -> float:
    return float(sum(getattr(layer, name) for layer in layers))


def _passes(job: ParadlJob, p: int) -> float:
    """D/p sum(FW + BW)."""
    return job.samples / p * (_total(job.layers, "forward") + _total(job.layers, "backward"))


def _memory(
    job: ParadlJob, layers: Sequence[ParadlLayer], *, samples: float, shards: int = 1
) -> float:
    """gamma delta sum(2 samples (|x| + |y|) + 2|w| / shards + |b|)."""
    # Twice for the gradients of activations and weights; the paper counts biases once.
    elements = sum(
        2 * samples * (layer.x + layer.y) + 2 * layer.w / shards + layer.b for layer in layers
    )
    return job.reuse * job.element * elements
