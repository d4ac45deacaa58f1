"""Chimera's performance model: the time of a step from counts on the critical path.

    T = (F + p2p) C_f + (B + p2p) C_b + max over workers of Comm_unoverlapped

Invariant: with p2p = 0 and no all-reduce, T is what executing the table takes, for every number of
stages, micro-batches and pipes. With messages or all-reduces it is an estimate, never below
execution where N is a multiple of D: every action of the path is charged a message, and all-reduces
proceed only while their worker idles. Source: Li and Hoefler, "Chimera", SC 2021, section 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from headway.schedule import PipelineSchedule, StageCosts
from headway.schedule.action import Kind
from headway.schedule.generators.chimera import chimera
from headway.schedule.lowering import lower
from headway.schedule.stats import measure
from headway.schedule.timing import Timing, time_schedule


class Shape(NamedTuple):
    """Sizes of a Chimera pipeline.

    Attributes:
        stages: D.
        microbatches: N of a step.
        pipes: 2f.
        mode: Beyond N = D: "direct", "doubling" or "halving".
    """

    stages: int
    microbatches: int
    pipes: int = 2
    mode: str = "direct"


class Counts(NamedTuple):
    """C_f and C_b: forwards and backwards on the critical path (of halves, where halving)."""

    forwards: int
    backwards: int


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the parts of a step, the same for all stages; halving halves the first three.

    Attributes:
        forward: F of one stage and micro-batch.
        backward: B, with recomputation if there is any.
        wire: beta L: time of a micro-batch's activations on a link, without latency.
        latency: alpha of a message.
        sync: All-reduce of the gradients of one stage.
    """

    forward: float
    backward: float
    wire: float = 0.0
    latency: float = 0.0
    sync: float = 0.0

    @property
    def message(self) -> float:
        """p2p = alpha + beta L."""
        return self.latency + self.wire

    def of_table(self, shape: Shape) -> StepTimes:
        """Of one micro-batch of the table."""
        part = 0.5 if shape.mode == "halving" else 1.0
        return replace(
            self, forward=self.forward * part, backward=self.backward * part, wire=self.wire * part
        )


@dataclass(frozen=True, kw_only=True)
class StepPrice:
    """What the model says.

    Attributes:
        seconds: T.
        counts: C_f and C_b.
        unoverlapped: Seconds of all-reduces that no idle time hides, on the worst worker.
    """

    seconds: float
    counts: Counts
    unoverlapped: float


def price_step(shape: Shape, times: StepTimes) -> StepPrice:
    """T of the module's docstring.

    Raises:
        PlanError: No such Chimera pipeline.
    """
    own = times.of_table(shape)
    ratio = own.backward / own.forward if own.forward else 2.0
    counts = critical_counts(shape, ratio=ratio)
    late = max(
        unoverlapped(region, own.sync / own.forward if own.forward else own.sync)
        for region in free_regions(shape, ratio=ratio)
    ) * (own.forward or 1.0)
    seconds = (own.forward + own.message) * counts.forwards
    seconds += (own.backward + own.message) * counts.backwards
    return StepPrice(seconds=seconds + late, counts=counts, unoverlapped=late)


def simulate_step(shape: Shape, times: StepTimes) -> float:
    """T by execution of the table with messages and eager-opt all-reduces; same arguments.

    Raises:
        PlanError: No such Chimera pipeline.
    """
    own = times.of_table(shape)
    table = _table(shape)
    costs = StageCosts.of(
        shape.stages,
        forward=own.forward,
        backward=own.backward,
        message=own.wire,
        latency=own.latency,
        sync=own.sync,
    )
    return time_schedule(lower(table, sync="eager-opt", costs=costs), costs).makespan


@lru_cache(maxsize=256)
def _table(shape: Shape) -> PipelineSchedule:
    """Recomputation is in the price of B."""
    return replace(
        chimera(shape.stages, shape.microbatches, pipes=shape.pipes, mode=shape.mode),
        recompute=(),
    )


def critical_counts(shape: Shape, *, ratio: float = 2.0) -> Counts:
    """C_f and C_b: by formula where there is one, else counted on the path of the timed table.

    Args:
        shape: Sizes.
        ratio: B / F.

    Raises:
        PlanError: No such Chimera pipeline.
    """
    return closed_counts(shape, ratio=ratio) or _measured_counts(shape, ratio)


@lru_cache(maxsize=1024)
def _measured_counts(shape: Shape, ratio: float) -> Counts:
    found = measure(_table(shape), StageCosts.of(shape.stages, backward=ratio))
    return Counts(found.critical_forwards, found.critical_backwards)


def closed_counts(shape: Shape, *, ratio: float = 2.0) -> Counts | None:
    """C_f and C_b by formula; None where there is none.

    With K = N / D whole units: "direct": C_f = D + (K-1)(D - D/f + 2), C_b = K (D + D/f - 2), for
    every f; for K = f = 1 the paper's D and 2D - 2. "doubling" and "halving", f = 1: the longest of
    three paths, which cross at B = 2F and B = 3F. Every formula needs B >= F.

    Args:
        shape: Sizes.
        ratio: B / F.
    """
    stages, number, pipes, mode = shape
    units, rest = divmod(number, stages)
    legal = stages % 2 == 0 and pipes % 2 == 0 and pipes > 0 and stages % pipes == 0
    if rest or not units or ratio < 1 or not legal:
        return None
    if mode == "direct" or (mode == "doubling" and units == 1):
        width = 2 * stages // pipes
        return Counts(stages + (units - 1) * (stages - width + 2), units * (stages + width - 2))
    if pipes != 2:
        return None
    double, single = (units, 0) if mode == "halving" else divmod(units, 2)
    return max(
        _doubled_paths(stages, double, single), key=lambda c: c.forwards + ratio * c.backwards
    )


def _doubled_paths(stages: int, double: int, single: int) -> list[Counts]:
    """Paths through `double` units of 2D forwards and `single` units of D (0 or 1)."""
    zigzag = 5 * stages // 2 - 1
    tail = Counts(2 * single, (2 * stages - 2) * single)
    later = double - 1
    paths = (
        (stages + 2 + 4 * later, (3 * stages - 2) * double),
        (zigzag + 2 * stages * later, zigzag + 2 * stages * later),
        (zigzag + 4 * later, zigzag + (3 * stages - 2) * later),
    )
    return [Counts(f + tail.forwards, b + tail.backwards) for f, b in paths]


class Region(NamedTuple):
    """Free time of one worker at the end of its step, F = 1.

    Attributes:
        gaps: For each hosted stage, by the moment at which its gradients are complete: idle time
            from then until the next stage's are, or until local compute ends (regions a and b).
        tail: From the end of local compute to the end of the pipeline (region c).
    """

    gaps: tuple[float, ...]
    tail: float


def unoverlapped(region: Region, sync: float) -> float:
    """What all-reduces add to a step on one worker; same unit as `region`.

    Args:
        region: The worker's free time.
        sync: Time of the all-reduce of one stage.
    """
    left = 0.0
    for gap in region.gaps:
        left = max(0.0, left + sync - gap)
    return max(0.0, left - region.tail)


@lru_cache(maxsize=1024)
def free_regions(shape: Shape, *, ratio: float = 2.0) -> tuple[Region, ...]:
    """Free regions of all workers; the last unit decides, so a table of few units is timed.

    Raises:
        PlanError: No such Chimera pipeline.
    """
    unit = shape.stages * (2 if shape.mode == "doubling" else 1)
    if shape.microbatches >= 2 * unit:
        shape = shape._replace(microbatches=unit + shape.microbatches % unit)
    table = _table(shape)
    timing = time_schedule(table, StageCosts.of(shape.stages, backward=ratio))
    return tuple(_region(timing, rank) for rank in range(table.ranks))


def _region(timing: Timing, rank: int) -> Region:
    last = {a.stage: i for i, a in enumerate(timing.order[rank]) if a.kind == Kind.BACKWARD}
    complete = sorted(last.values())
    starts, ends = timing.starts[rank], timing.ends[rank]
    bounds = zip(complete, [*complete[1:], len(ends) - 1], strict=True)
    gaps = tuple(
        math.fsum(starts[i] - ends[i - 1] for i in range(first + 1, until + 1))
        for first, until in bounds
    )
    return Region(gaps, timing.makespan - timing.compute_end(rank))
