"""Published formulas of schedules (bubble, memory); Chimera's performance model and its choice.

Chimera (Li and Hoefler, SC 2021, section 3.4), the time of a step from counts on the critical
path:

    T = (F + p2p) C_f + (B + p2p) C_b + max over workers of Comm_unoverlapped

With p2p = 0 and no all-reduce T is what executing the table takes. With messages or all-reduces
it is an estimate, never below execution where N is a multiple of D: every action of the path is
charged a message, and all-reduces proceed only while their worker idles. The choice tries every
(W, D) with W D = P, takes the largest micro-batch that fits, and orders what is left by T.

`schedule_formula` gives the published bubble ratio, weights and activations of a schedule,
which stand beside what `headway.schedule.stats` measures: Tables 2 and 3 of Chimera; Narayanan
et al. 2021 (interleaved); Qi et al. 2023 (ZB-H1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from headway.cluster.link import Link
from headway.errors import PlanError
from headway.schedule.generators.chimera import chimera
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import ActionKind, PipelineSchedule
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import measure_schedule
from headway.schedule.timing import ScheduleTiming, time_schedule
from headway.units import format_bytes


class ChimeraShape(NamedTuple):
    """Sizes of a Chimera pipeline: D stages, N micro-batches of a step, 2f pipes.

    Attributes:
        mode: Beyond N = D: "direct", "doubling" or "halving".
    """

    stages: int
    microbatches: int
    pipes: int = 2
    mode: str = "direct"


class CriticalPathCounts(NamedTuple):
    """C_f and C_b: forwards and backwards on the critical path (of halves, where halving)."""

    forwards: int
    backwards: int


@dataclass(frozen=True, kw_only=True)
class ChimeraTimes:
    """Seconds of the parts of a step, the same for all stages; halving halves the first three.

    Attributes:
        backward: B, with recomputation if there is any.
        wire: beta L: time of a micro-batch's activations on a link, without latency.
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

    def of_table(self, shape: ChimeraShape) -> ChimeraTimes:
        """Of one micro-batch of the table."""
        part = 0.5 if shape.mode == "halving" else 1.0
        return replace(
            self, forward=self.forward * part, backward=self.backward * part, wire=self.wire * part
        )


@dataclass(frozen=True, kw_only=True)
class ChimeraPrice:
    """T, and the seconds of all-reduces that no idle time hides, on the worst worker."""

    seconds: float
    counts: CriticalPathCounts
    unoverlapped: float


def price_chimera_step(shape: ChimeraShape, times: ChimeraTimes) -> ChimeraPrice:
    """T of the module's docstring.

    Raises:
        PlanError: No such Chimera pipeline.
    """
    own = times.of_table(shape)
    ratio = own.backward / own.forward if own.forward else 2.0
    counts = critical_counts(shape, ratio=ratio)
    # Free regions are in units of a forward (F = 1), so that those of a shape serve all times.
    late = max(
        unoverlapped_all_reduce(region, own.sync / own.forward if own.forward else own.sync)
        for region in free_regions(shape, ratio=ratio)
    ) * (own.forward or 1.0)
    seconds = (own.forward + own.message) * counts.forwards
    seconds += (own.backward + own.message) * counts.backwards
    return ChimeraPrice(seconds=seconds + late, counts=counts, unoverlapped=late)


def simulate_chimera_step(shape: ChimeraShape, times: ChimeraTimes) -> float:
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
def _table(shape: ChimeraShape) -> PipelineSchedule:
    return replace(
        chimera(shape.stages, shape.microbatches, pipes=shape.pipes, mode=shape.mode),
        # Backward times include recomputation already: the table must not add it again.
        recompute=(),
    )


def critical_counts(shape: ChimeraShape, *, ratio: float = 2.0) -> CriticalPathCounts:
    """C_f and C_b: by formula where there is one, else counted on the path of the timed table.

    Raises:
        PlanError: No such Chimera pipeline.
    """
    return closed_counts(shape, ratio=ratio) or _measured_counts(shape, ratio)


@lru_cache(maxsize=1024)
def _measured_counts(shape: ChimeraShape, ratio: float) -> CriticalPathCounts:
    found = measure_schedule(_table(shape), StageCosts.of(shape.stages, backward=ratio))
    return CriticalPathCounts(found.critical_forwards, found.critical_backwards)


def closed_counts(shape: ChimeraShape, *, ratio: float = 2.0) -> CriticalPathCounts | None:
    """C_f and C_b by formula; None where there is none.

    With K = N / D whole units: "direct": C_f = D + (K-1)(D - D/f + 2), C_b = K (D + D/f - 2), for
    every f; for K = f = 1 the paper's D and 2D - 2. "doubling" and "halving", f = 1: the longest of
    three paths, which cross at B = 2F and B = 3F. Every formula needs B >= F.
    """
    stages, number, pipes, mode = shape
    units, rest = divmod(number, stages)
    legal = stages % 2 == 0 and pipes % 2 == 0 and pipes > 0 and stages % pipes == 0
    if rest or not units or ratio < 1 or not legal:
        return None
    if mode == "direct" or (mode == "doubling" and units == 1):
        width = 2 * stages // pipes
        return CriticalPathCounts(
            stages + (units - 1) * (stages - width + 2), units * (stages + width - 2)
        )
    if pipes != 2:
        return None
    double, single = (units, 0) if mode == "halving" else divmod(units, 2)
    return max(
        _doubled_paths(stages, double, single), key=lambda c: c.forwards + ratio * c.backwards
    )


def _doubled_paths(stages: int, double: int, single: int) -> list[CriticalPathCounts]:
    """Paths through `double` units of 2D forwards and `single` units of D (0 or 1)."""
    zigzag = 5 * stages // 2 - 1
    tail = CriticalPathCounts(2 * single, (2 * stages - 2) * single)
    later = double - 1
    paths = (
        (stages + 2 + 4 * later, (3 * stages - 2) * double),
        (zigzag + 2 * stages * later, zigzag + 2 * stages * later),
        (zigzag + 4 * later, zigzag + (3 * stages - 2) * later),
    )
    return [CriticalPathCounts(f + tail.forwards, b + tail.backwards) for f, b in paths]


class FreeRegion(NamedTuple):
    """Free time of one worker at the end of its step, F = 1.

    Attributes:
        gaps: For each hosted stage, by the moment at which its gradients are complete: idle time
            from then until the next stage's are, or until local compute ends (regions a and b).
        tail: From the end of local compute to the end of the pipeline (region c).
    """

    gaps: tuple[float, ...]
    tail: float


def unoverlapped_all_reduce(region: FreeRegion, sync: float) -> float:
    """What all-reduces add to a step on one worker; same unit as `region`.

    Args:
        sync: Time of the all-reduce of one stage.
    """
    left = 0.0
    for gap in region.gaps:
        # What one gap does not hide delays the sum of the next stage: a worker has one lane for
        # sums.
        left = max(0.0, left + sync - gap)
    return max(0.0, left - region.tail)


@lru_cache(maxsize=1024)
def free_regions(shape: ChimeraShape, *, ratio: float = 2.0) -> tuple[FreeRegion, ...]:
    """Free regions of all workers.

    Raises:
        PlanError: No such Chimera pipeline.
    """
    # The last unit decides, so a table of few units is timed.
    unit = shape.stages * (2 if shape.mode == "doubling" else 1)
    if shape.microbatches >= 2 * unit:
        shape = shape._replace(microbatches=unit + shape.microbatches % unit)
    table = _table(shape)
    timing = time_schedule(table, StageCosts.of(shape.stages, backward=ratio))
    return tuple(_region(timing, rank) for rank in range(table.ranks))


def _region(timing: ScheduleTiming, rank: int) -> FreeRegion:
    last = {a.stage: i for i, a in enumerate(timing.order[rank]) if a.kind == ActionKind.BACKWARD}
    complete = sorted(last.values())
    starts, ends = timing.starts[rank], timing.ends[rank]
    bounds = zip(complete, [*complete[1:], len(ends) - 1], strict=True)
    gaps = tuple(
        math.fsum(starts[i] - ends[i - 1] for i in range(first + 1, until + 1))
        for first, until in bounds
    )
    return FreeRegion(gaps, timing.makespan - timing.compute_end(rank))


# State of a layer in its weights: weights, gradients, and two moments of Adam.
ADAM = 4


@dataclass(frozen=True, kw_only=True)
class EqualLayers:
    """A model of equal layers, as the choice sees it.

    Attributes:
        forward: Seconds of the forward of one layer for one sample.
        launch: Seconds that the forward of one stage costs beyond, whatever its size: why larger
            micro-batches are better.
        activation: Bytes that go from a layer to the next, per sample.
        held: Bytes that a layer keeps for its backward, per sample.
        gradient: Bytes of the gradients of a layer.
        state: Bytes of a layer's weights, gradients and optimiser state together.
    """

    layers: int
    forward: float
    activation: float
    held: float
    gradient: float
    state: float
    launch: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ChimeraSetting:
    """What the choice is made for: P workers, 2f pipes.

    Attributes:
        batch: Samples of a mini-batch.
        memory: Bytes of one worker.
        mode: Beyond N = D. "doubling" implies recomputation.
        recompute: Backward computes the forward again: B = 3F instead of 2F.
    """

    workers: int
    batch: int
    memory: float
    link: Link
    pipes: int = 2
    mode: str = "direct"
    recompute: bool = False

    @property
    def recomputes(self) -> bool:
        return self.recompute or self.mode == "doubling"


@dataclass(frozen=True, kw_only=True)
class ChimeraCandidate:
    """One way to split a job into W replicas, with B samples of a micro-batch.

    Attributes:
        memory: Bytes of the worker that needs most.
    """

    replicas: int
    microbatch: int
    shape: ChimeraShape
    times: ChimeraTimes
    memory: float
    price: ChimeraPrice

    def simulated(self) -> float:
        """T by execution of the table."""
        return simulate_chimera_step(self.shape, self.times)


def rabenseifner(ranks: int, num_bytes: float, link: Link) -> float:
    """Seconds of an all-reduce: 2 log2(r) alpha + 2 (r-1)/r beta L (Rabenseifner's algorithm)."""
    if ranks == 1:
        return 0.0
    return 2 * math.log2(ranks) * link.latency + 2 * (ranks - 1) / ranks * num_bytes / link.rate


def rank_chimera_candidates(
    workload: EqualLayers, setting: ChimeraSetting
) -> tuple[ChimeraCandidate, ...]:
    """All candidates, the fastest first; of equal ones the one with fewer stages.

    The model can prefer another candidate than `ChimeraCandidate.simulated` does where a little
    idle time lets an all-reduce start early: execution then hides it behind compute too, the model
    does not.

    Raises:
        PlanError: Nothing fits; says for each D why.
    """
    found, problems = [], refused_depths(workload, setting)
    for stages in _depths(setting):
        size = greedy_microbatch(workload, setting, stages)
        if size is not None and not _impossible(workload, setting, stages):
            found.append(_candidate(workload, setting, stages, size))
    if not found:
        raise PlanError(
            f"no Chimera pipeline for {setting.workers} workers with "
            f"{format_bytes(setting.memory)} each",
            problems=problems or [f"{setting.workers} workers: an even number is needed"],
            fix="Give more memory, recompute activations, or take another number of workers.",
        )
    return tuple(sorted(found, key=lambda c: (c.price.seconds, c.shape.stages)))


def refused_depths(workload: EqualLayers, setting: ChimeraSetting) -> list[str]:
    """For each even D that divides P and is no candidate, why not."""
    problems = []
    for stages in _depths(setting):
        problem = _impossible(workload, setting, stages)
        if not problem and greedy_microbatch(workload, setting, stages) is None:
            least = format_bytes(_memory(workload, setting, stages, 1))
            problem = f"{stages} stages: {least} are needed at B = 1"
        if problem:
            problems.append(problem)
    return problems


def _depths(setting: ChimeraSetting) -> list[int]:
    # Pipes in both directions meet in the middle of an even number of stages.
    return [d for d in range(2, setting.workers + 1, 2) if setting.workers % d == 0]


def _impossible(workload: EqualLayers, setting: ChimeraSetting, stages: int) -> str:
    replicas = setting.workers // stages
    if workload.layers % stages:
        return f"{stages} stages: they do not divide {workload.layers} layers"
    if stages % setting.pipes:
        return f"{stages} stages: {setting.pipes} pipes do not divide them"
    if setting.batch % replicas:
        return f"{stages} stages: {replicas} replicas do not divide {setting.batch} samples"
    return ""


def greedy_microbatch(workload: EqualLayers, setting: ChimeraSetting, stages: int) -> int | None:
    """B for D stages: the largest that divides a replica's samples, fits in memory, and leaves
    at least D micro-batches; if none leaves so many, B = 1. None: not even B = 1 fits."""
    share = setting.batch * stages // setting.workers
    sizes = [b for b in range(1, share // stages + 1) if share % b == 0] or [1]
    fitting = [b for b in sizes if _memory(workload, setting, stages, b) <= setting.memory]
    return max(fitting, default=None)


def _memory(workload: EqualLayers, setting: ChimeraSetting, stages: int, microbatch: int) -> float:
    layers = workload.layers / stages
    number = setting.batch * stages // setting.workers // microbatch
    held = workload.held * layers * microbatch
    # Each worker has copies of 2f stages.
    weights = setting.pipes * layers * workload.state
    if not setting.recomputes:
        return weights + min(number, stages) * held
    # Forward doubling has the forwards of two units in flight at once (Chimera).
    live = min(number, 2 * stages if setting.mode == "doubling" else stages)
    return weights + live * workload.activation * microbatch + held


def _candidate(
    workload: EqualLayers, setting: ChimeraSetting, stages: int, microbatch: int
) -> ChimeraCandidate:
    replicas = setting.workers // stages
    layers = workload.layers // stages
    forward = workload.launch + workload.forward * layers * microbatch
    times = ChimeraTimes(
        forward=forward,
        backward=forward * (3 if setting.recomputes else 2),
        wire=workload.activation * microbatch / setting.link.rate,
        latency=setting.link.latency,
        # Each replica has a copy of the stage in each of its pipes.
        sync=rabenseifner(setting.pipes * replicas, workload.gradient * layers, setting.link),
    )
    number = setting.batch // replicas // microbatch
    shape = ChimeraShape(stages, number, setting.pipes, setting.mode)
    return ChimeraCandidate(
        replicas=replicas,
        microbatch=microbatch,
        shape=shape,
        times=times,
        memory=_memory(workload, setting, stages, microbatch),
        price=price_chimera_step(shape, times),
    )


Range = tuple[float, float]
"""(least, most) of the ranks."""


@dataclass(frozen=True, slots=True)
class ScheduleFormula:
    """What a paper says of a schedule.

    Attributes:
        bubble: Idle time / (ranks * time of the step).
        text: The formula of the bubble, as people write it.
        weights: In weights of one stage, of as many stages as ranks.
        activations: In activations of one micro-batch at such a stage.
        exact: The bubble is that of the table; else of a steady state, or rounded.
    """

    bubble: float
    text: str
    weights: Range
    activations: Range
    exact: bool = True


def schedule_formula(
    name: str,
    *,
    stages: int,
    microbatches: int,
    pipes: int = 2,
    virtual: int = 2,
    mode: str = "direct",
    ratio: float = 2.0,
) -> ScheduleFormula | None:
    """The formula of a schedule of `schedule.generators.registry.SCHEDULES` on D ranks with N
    micro-batches; None where none is known for these sizes.

    Args:
        pipes: 2f, of Chimera.
        virtual: Stages per rank, of looped schedules.
        ratio: B / F; input and weight gradient are half of B each.
    """
    d, n = stages, microbatches
    deep = float(min(d, n))
    match name:
        case "gpipe" | "1f1b":
            held = (n, n) if name == "gpipe" else (1, deep)
            return ScheduleFormula((d - 1) / (n + d - 1), "(D-1)/(N+D-1)", (1, 1), held)
        case "gems":
            bubble = (d - 1) / (d + 0.5)
            return ScheduleFormula(bubble, "(D-1)/(D+1/2)", (2, 2), (1, 1), exact=False)
        # PipeDream keeps the weights with which each micro-batch in flight began, 2BW the last two.
        case "pipedream":
            return ScheduleFormula(0.0, "0", (1, deep), (1, deep), exact=False)
        case "pipedream-2bw":
            return ScheduleFormula(0.0, "0", (2, 2), (1, deep), exact=False)
        case "interleaved" | "breadth-first":
            return _looped(name, d, n, virtual)
        case "zb-h1":
            return _zb_h1(d, n, ratio)
        case "chimera" | "chimera-doubling" | "chimera-halving":
            own = name.partition("-")[2] or mode
            return _chimera(ChimeraShape(d, n, pipes, own), ratio)
    return None


def _looped(name: str, d: int, n: int, v: int) -> ScheduleFormula | None:
    if n % d:
        return None
    # Megatron's warm-up: 2 (D - r - 1) + (v - 1) D chunks ahead on rank r, and one under way; a
    # chunk is 1 / v of a stage.
    first, last = ((w + (v - 1) * d + 1) / v for w in (2 * (d - 1), 0))
    held = (min(n, last), min(n, first)) if name == "interleaved" else (n, n)
    return ScheduleFormula((d - 1) / (v * n + d - 1), "(D-1)/(vN+D-1)", (1, 1), held)


def _zb_h1(d: int, n: int, ratio: float) -> ScheduleFormula | None:
    """(D-1)(F + I - W) of bubble, with I = W."""
    # At B = 2F all three passes take F, and so does F + I - W.
    if n < d or ratio != 2:
        return None
    return ScheduleFormula((d - 1) / (3 * n + d - 1), "(D-1)/(3N+D-1)", (1, 1), (d, d))


def _chimera(shape: ChimeraShape, ratio: float) -> ScheduleFormula | None:
    """From C_f and C_b; at B = F, at B = 2F and N = D, and doubled, these are the paper's."""
    counts = closed_counts(shape, ratio=ratio)
    if counts is None:
        return None
    d, n, pipes, mode = shape
    part = 0.5 if mode == "halving" else 1.0
    step = part * (counts.forwards + ratio * counts.backwards)
    most, least = d, d - d // pipes + 1
    if mode != "direct" and (mode == "halving" or n > d):
        most, least = 2 * d, 3 * d // 2 + 1
    return ScheduleFormula(
        1 - n * (1 + ratio) / step,
        _chimera_text(shape, ratio),
        (pipes, pipes),
        (part * least, part * most),
    )


def _chimera_text(shape: ChimeraShape, ratio: float) -> str:
    d, n, pipes, mode = shape
    if pipes == 2 and ratio == 2:
        if mode == "halving":
            return "(D-2)/(4N+D-2)"
        if mode == "doubling" and n % (2 * d) == 0:
            return "(D-2)/(2N+D-2)"
        if n == d:
            return "(D-2)/(3N/2+D-2)"
        if mode == "direct":
            return "(D-2)(K+1)/(3KD+(D-2)(K+1))"
    if ratio == 1 and mode == "direct":
        return "(D-2f)/(2fN+D-2f)"
    return "1 - N(F+B)/(C_f F + C_b B)"
