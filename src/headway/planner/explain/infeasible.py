"""Why no plan fits, the least memory that would do, and the smallest changes that help.

The least memory is exact to a byte: combinations are excluded by lower bounds of what they need,
and those that the bounds leave are opened. Their number is bounded, never the time, so the same
request gets the same answer.

A relaxation is the smallest change of its kind (memory, devices, degree, ZeRO, schedule, ...) with
which a plan exists; the search proves that it has one and that the next smaller change has none.
For a plan that somebody has decided and that does not fit, `memory_fixes` finds single changes that
make it fit. The changes are those that people try by hand.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.cluster.datasheets import DATASHEETS
from headway.cluster.device import Device
from headway.cost.device import Array
from headway.cost.machines import device_of
from headway.cost.network import HierarchicalNetwork
from headway.errors import NothingFits, PlanError
from headway.planner.estimate.degrees import Degrees, state_per_byte
from headway.planner.estimate.pipeline_time import PointStage
from headway.planner.estimate.pricing import IntervalRows
from headway.planner.explain.step_parts import fullest_stage_memory
from headway.planner.search.branch_and_bound import LayoutCandidate, PlanSearch
from headway.planner.search.candidate import PlanCandidate, whole_bytes, with_rounding
from headway.planner.search.device_layout import Combination
from headway.planner.search.plan_point import Point, describe_point
from headway.planner.search.request import PlanRequest
from headway.plans.tensor_layout import divisors
from headway.schedule.generators.registry import PLAIN
from headway.units import format_bytes, format_seconds

# Combinations that are opened to find the least memory: their number is bounded, never the time.
MOST = 256


@dataclass(frozen=True, kw_only=True)
class LeastMemory:
    """The least memory of a device with which a question has a plan.

    Attributes:
        bytes: Whole bytes; one less is too few.
        proven: Whether every combination was looked at; else there may be a smaller one.
    """

    bytes: int
    point: Point
    proven: bool


def find_fitting(engine: PlanSearch) -> Point | None:
    """Some plan within the memory, those that may need least first; None: nothing fits."""
    cap = engine.question.cap
    for _, candidate in _by_memory(engine, cap):
        point = candidate.fastest(cap)
        if point is not None:
            return point
    return None


def least_memory(engine: PlanSearch) -> LeastMemory | None:
    """The least memory with which there is a plan; None: the model has no plan at all."""
    best: Point | None = None
    least = np.inf
    for opened, (bound, candidate) in enumerate(_by_memory(engine, np.inf)):
        # Combinations come by rising bounds: none of the rest can need less.
        if bound >= least or opened == MOST:
            return _least_memory(best, bound >= least)
        point = candidate.fastest(least - 1) if best else candidate.fastest(np.inf)
        low = bound
        while point is not None:
            best, least = point, float(whole_bytes(point.bytes))
            point = None
            # Bisection in whole bytes; every plan that is found begins it anew from what that plan
            # needs.
            while least - low > 1 and point is None:
                middle = np.floor((low + least) / 2)
                point = candidate.fastest(middle)
                if point is None:
                    low = middle
    return _least_memory(best, True)


def _least_memory(point: Point | None, proven: bool) -> LeastMemory | None:
    if point is None:
        return None
    return LeastMemory(bytes=whole_bytes(point.bytes), point=point, proven=proven)


def _by_memory(
    engine: PlanSearch, cap: float
) -> Iterator[tuple[float, PlanCandidate | LayoutCandidate]]:
    """All combinations that may need at most `cap`, by the least that they may need."""
    waiting: list[tuple[float, Combination, PlanCandidate | LayoutCandidate | None]] = []
    for combination in engine.combinations():
        bound = _first(engine, combination)
        if bound <= cap:
            waiting.append((bound, combination, None))
    heapq.heapify(waiting)
    while waiting:
        bound, combination, candidate = heapq.heappop(waiting)
        if candidate is not None:
            yield bound, candidate
            continue
        # Its tables take time, so they are made only when its first bound is the least.
        candidate = engine.open(combination)
        better = max(bound, _second(candidate))
        if better <= cap:
            heapq.heappush(waiting, (better, combination, candidate))


def _first(engine: PlanSearch, combination: Combination) -> float:
    """Bytes that the fullest rank needs at least: all parameters and what is kept, spread."""
    if combination.layout is not None:
        return engine.layouts.held(combination)
    degrees = combination.degrees
    kept = degrees.microbatch * min(engine.bounds.kept, engine.bounds.crossing)
    state = engine.bounds.state(degrees) * degrees.pipes
    return float(_spread(np.array([state, kept]) / degrees.tensor, degrees))


def _second(candidate: PlanCandidate | LayoutCandidate) -> float:
    if isinstance(candidate, LayoutCandidate):
        return candidate.bound()[1]
    rows = candidate.least_rows
    rows = np.stack([candidate.there(rows), rows[..., IntervalRows.KEPT]], axis=-1)
    return max(float(_spread(rows, candidate.degrees).min()), candidate.bound()[1])


def _spread(rows: Array, degrees: Degrees) -> Array:
    """What the fullest of p ranks needs at least. `rows` end in (state, kept) of the model."""
    state, kept, p = rows[..., 0], rows[..., 1], degrees.pipeline
    # With f_i micro-batches in flight on rank i: a weighted mean of what all need, with weights 1,
    # and with one stage on each rank with weights 1 / f_i, too.
    even = (state + kept) / p
    if not degrees.counted:
        return even
    under_way = [degrees.in_flight(behind) for behind in range(p)]
    fair = (state / max(under_way) + kept) / sum(1.0 / number for number in under_way)
    return np.maximum(even, fair)


# Nodes, from the least number that can hold the parameters on, that are tried one by one.
NUMBERS = 32
# The least number is doubled less often than this.
DOUBLED = 9
LARGER = (2, 4, 8)
"""How many times larger batches are tried."""


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A change with which a plan exists.

    Attributes:
        kind: "memory", "devices", "device", "tensor", "zero", "recompute", "schedule", "batch"
            or "force".
        shorter: The next smaller change of this kind; None: there is none.
        slower: By which share its time of a sample is above that of the fastest plan without a
            memory limit, on the devices as they are; None: the links of such a cluster are not
            known.
    """

    kind: str
    change: str
    question: PlanRequest
    point: Point
    shorter: PlanRequest | None
    slower: float | None
    hardware: bool = False

    @property
    def cost(self) -> float:
        """Of a sample, in money or seconds of devices."""
        point = self.point
        step = self.question.cost(point.devices, point.seconds, point.amounts)
        return step / self.question.batch


def find_relaxations(
    engine: PlanSearch, wider: HierarchicalNetwork | None = None
) -> tuple[LeastMemory | None, tuple[Relaxation, ...]]:
    """The least memory that would do (None: the model cannot be split so at all), and the smallest
    change of each kind with which there is a plan: those that take no other machines first, the
    cheapest of them first.

    Args:
        engine: Of a question to which nothing fits.
        wider: The links of as many such nodes as are wanted, of a preset.
    """
    question = engine.question
    # The request's limit bounds the candidates of each group of devices; what a device has remains.
    need = least_memory(engine.related(replace(question, memory=np.inf)))
    if need is None:
        return None, ()
    # What memory alone costs: the fastest plan of the same devices without a limit.
    free = engine.related(replace(question, memory=np.inf, objective="fastest"))
    base = free.run().best.seconds / question.batch
    found = [_memory(engine, base, need)]
    if not question.groups:  # which type there should be more of, nobody says
        found += _devices(engine, base, wider)
    for kind, tried in _same_machines(question):
        found += _first_that_fits(engine, base, kind, tried)
    larger = list(_larger_devices(question))
    found += _first_that_fits(engine, base, "device", larger, hardware=True)
    found.sort(key=lambda one: (one.hardware, one.cost))
    return need, tuple(found)


def _memory(engine: PlanSearch, base: float, need: LeastMemory) -> Relaxation:
    question = engine.question
    more = need.bytes - question.cap
    own = need.bytes <= max(one.device.memory for one in question.machines.values())
    how = f', --memory "{need.bytes} B"' if own else ""
    words = f"{format_bytes(more)} more per device ({format_bytes(need.bytes)}{how})"
    enough = replace(question, memory=float(need.bytes))
    shorter = replace(question, memory=float(need.bytes - 1)) if need.proven else None
    change = words if need.proven else f"{words} or less"
    return _relaxed(engine, base, "memory", change, enough, shorter, hardware=not own)


def _devices(
    engine: PlanSearch, base: float, wider: HierarchicalNetwork | None
) -> Iterator[Relaxation]:
    if wider is not None:
        machine = replace(engine.question.machine, network=wider)
        engine = PlanSearch(replace(engine.question, machine=machine))
    question = engine.question
    most = question.devices[-1]
    alone = Degrees(tensor=1, data=1, pipeline=1, microbatch=1, microbatches=1)
    copies = question.work.optimiser.state
    whole = engine.bounds.held * state_per_byte(question.itemsize, alone, copies)
    # However it is split, all devices together hold the whole state.
    least = max(most + 1, int(np.ceil(whole / question.cap)))
    # Up to a node one by one, then node by node; where the file does not say how large a node is,
    # doubled.
    width, node = question.machine.network.levels[0].width, 1
    if np.isfinite(width):
        node = int(width)
        start = -(-max(least, node + 1) // node) * node
        numbers = [*range(least, node + 1), *range(start, start + NUMBERS * node, node)]
    else:
        start = most * 2 ** int(np.ceil(np.log2(least / most)))
        numbers = [start]
    numbers += [start * 2**n for n in range(1, DOUBLED) if start * 2**n > numbers[-1]]
    tried = [
        (
            f"{number} devices" + (f" (--nodes {-(-number // node)})" if wider else ""),
            replace(question, devices=(number,)),
        )
        for number in numbers
    ]
    before = replace(question, devices=(most,))
    yield from _first_that_fits(engine, base, "devices", tried, shorter=before, hardware=True)


def _same_machines(question: PlanRequest) -> Iterator[tuple[str, list[tuple[str, PlanRequest]]]]:
    """By kind: changes in words, the smallest first, and the questions with them."""
    if question.tensor is not None:
        inner = min(question.machine.network.levels[0].width, question.most)
        numbers = question.devices or (question.most,)
        others = {t for n in numbers for t in divisors(n) if t <= inner}
        yield (
            "tensor",
            [
                (f"tensor {t}", replace(question, tensor=(*question.tensor, t)))
                for t in sorted(others - set(question.tensor))
            ],
        )
    zeros = sorted({1, 2, 3} - set(question.zero))
    yield "zero", [(f"ZeRO {z}", replace(question, zero=(*question.zero, z))) for z in zeros]
    if question.recompute != "any":
        free = replace(question, recompute="any")
        yield "recompute", [("recompute blocks without a pipeline", free)]
    if not {PLAIN.name, "all"} & set(question.schedules):
        more = replace(question, schedules=(*question.schedules, PLAIN.name))
        yield "schedule", [(f"schedule {PLAIN}", more)]
    # The largest smaller batch, of those that divide it; and a larger one, for more shares.
    larger = [question.batch * factor for factor in LARGER]
    for sizes in (divisors(question.batch)[-2::-1], larger):
        yield "batch", [(f"a batch of {size}", replace(question, batch=size)) for size in sizes]
    for pattern, how in question.force:
        left = tuple(pair for pair in question.force if pair != (pattern, how))
        yield "force", [(f"without --force {pattern}={how}", replace(question, force=left))]


def _larger_devices(question: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Devices with a datasheet, those with the least memory first."""
    # A limit of the user's own would hold on larger devices, too.
    if question.memory is not None or question.groups:
        return
    machine = question.machine
    larger = sorted(
        (sheet.memory, name)
        for name, sheet in DATASHEETS.items()
        if sheet.memory > machine.device.memory and machine.dtype in sheet.peak
    )
    for memory, name in larger:
        device = device_of(Device(preset=name), name)
        words = f"devices of {format_bytes(memory)}, such as {name}"
        yield words, replace(question, machine=replace(machine, device=device))


def _first_that_fits(
    engine: PlanSearch,
    base: float,
    kind: str,
    tried: Sequence[tuple[str, PlanRequest]],
    *,
    shorter: PlanRequest | None = None,
    hardware: bool = False,
) -> Iterator[Relaxation]:
    """The first question with a plan; the one before it is the `shorter` one."""
    for change, question in tried:
        old = engine.question
        # Tables depend on the machine and on what is forced: only if both stay can they be shared.
        same = question.machine is old.machine and question.force == old.force
        own = engine.related(question) if same else PlanSearch(question)
        if _fits(own):
            yield _relaxed(own, base, kind, change, question, shorter, hardware=hardware)
            return
        shorter = question


def _fits(engine: PlanSearch) -> bool:
    try:
        return find_fitting(engine) is not None
    except PlanError:
        return False  # what is forced cannot be with these degrees


def _relaxed(
    engine: PlanSearch,
    base: float,
    kind: str,
    change: str,
    question: PlanRequest,
    shorter: PlanRequest | None,
    *,
    hardware: bool,
) -> Relaxation:
    point = engine.related(replace(question, objective="fastest")).run().best
    known = question.machine.network.levels[-1].width >= point.devices
    return Relaxation(
        kind=kind,
        change=change,
        question=question,
        point=point,
        shorter=shorter,
        slower=point.seconds / question.batch / base - 1 if known else None,
        hardware=hardware,
    )


def infeasible_error(
    question: PlanRequest, wider: HierarchicalNetwork | None = None
) -> NothingFits:
    """The error for a question to which nothing fits: how much is missing where, and each change
    that would do.
    """
    engine = PlanSearch(question)
    need, changes = find_relaxations(engine, wider)
    problems = list(_missing(engine, need))
    lines = [f"  {describe_relaxation(one)}" for one in changes]
    head = (
        "Each of these would help (time per sample against the fastest plan without a memory "
        "limit):"
    )
    fix = "\n  ".join([head, *lines]) if lines else "No single change of the request would help."
    return NothingFits("no plan fits", problems=problems, fix=fix)


def describe_relaxation(one: Relaxation) -> str:
    """ "tensor 4: 21.3 ms a step, +6.0% a sample; data 2, tensor 4, ..." """
    point = one.point
    most = one.question.machine.network.levels[-1].width
    time = f"time unknown: the cluster's file joins no more than {most:g} devices"
    if one.slower is not None:
        time = f"{format_seconds(point.seconds)} a step, {one.slower:+.1%} a sample"
    return f"{one.change}: {time}; {describe_point(point)}"


def _missing(engine: PlanSearch, need: LeastMemory | None) -> Iterator[str]:
    question = engine.question
    numbers = question.devices or (question.most,)
    devices = f"{_or(numbers)} device{'s' if numbers != (1,) else ''}"
    if need is None:
        within = " within their memory" if question.groups else ""
        yield f"the model cannot be split over {devices}{within} with a batch of {question.batch}"
        return
    point = need.point
    less = "" if need.proven else "about "
    yield (
        f"{devices}: every plan needs {less}{format_bytes(need.bytes)} per device or more, "
        f"{format_bytes(need.bytes - question.cap)} more than the {format_bytes(question.cap)} "
        f"that are allowed; least with {describe_point(point)}"
    )
    yield describe_fullest_stage(engine, point)


def describe_fullest_stage(engine: PlanSearch, point: Point) -> str:
    """Which ranks hold most, and what."""
    held = fullest_stage_memory(engine.question, point)
    stage = point.stages[held.stage]
    first, last = stage_end_modules(engine, stage)
    each = point.degrees.tensor * point.degrees.data
    ranks = f"rank {held.stage}" if each == 1 else f"stage {held.stage}, {each} ranks,"
    what = {
        "weights": held.weights,
        "gradients and optimiser": held.training,
        "activations": held.activations,
        "transient memory of a micro-batch": held.again,
        "temporaries of the update": held.update,
    }
    filled = ", ".join(f"{name} {format_bytes(size)}" for name, size in what.items() if size)
    return f"there {ranks} ({first} to {last}) is the fullest: {filled}"


def stage_end_modules(engine: PlanSearch, stage: PointStage) -> tuple[str, str]:
    """The first and the last module of a stage that have a name."""
    operators = engine.question.work.graph.operators
    start, stop = engine.row[stage.start].start, engine.row[stage.stop - 1].stop
    modules = [one.module for one in operators[start:stop] if one.module] or ["the inputs"]
    return modules[0], modules[-1]


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]} to {numbers[-1]}"


@dataclass(frozen=True, kw_only=True)
class MemoryFix:
    """A change with which a plan fits.

    Attributes:
        slower: By which share its step is longer.
    """

    change: str
    point: Point
    slower: float


def excess_bytes(engine: PlanSearch, point: Point) -> int:
    """Whole bytes by which the fullest device exceeds what is allowed; 0: it fits."""
    question = engine.question
    over = [whole_bytes(point.bytes_on(kind)) - question.caps[kind] for kind, _ in point.amounts]
    return max(0, math.ceil(max(over, default=whole_bytes(point.bytes) - question.cap)))


def memory_fixes(engine: PlanSearch, point: Point) -> tuple[MemoryFix, ...]:
    """The smallest change of each kind that makes a plan fit, the fastest first; none of a plan on
    devices of several types.

    Args:
        point: A plan that holds more than is allowed.
    """
    if len(point.amounts) > 1:
        return ()
    found = [*_recomputed(engine, point), *_cut(engine, point)]
    for name in _FIXES:
        found += _moved(engine, point, name)
    return tuple(sorted(found, key=lambda fix: fix.slower))


def _memory_fix(
    engine: PlanSearch, old: Point, change: str, new: Point | None
) -> Iterator[MemoryFix]:
    if new is not None and new.bytes <= with_rounding(engine.question.cap):
        yield MemoryFix(change=change, point=new, slower=new.seconds / old.seconds - 1)


def _recomputed(engine: PlanSearch, point: Point) -> Iterator[MemoryFix]:
    """The same cut, and recomputation in just those stages that are too full without."""
    over = [n for n, s in enumerate(point.stages) if s.bytes > engine.question.cap]
    fresh = [n for n in over if not point.stages[n].recompute]
    alone = engine.question.recompute == "pipeline" and len(point.stages) == 1
    if not fresh or alone:
        return
    again = {n for n, stage in enumerate(point.stages) if stage.recompute}
    borders = [stage.start for stage in point.stages] + [point.stages[-1].stop]
    new = engine.candidate(point.degrees, point.kind).planned(borders, again | {*fresh})
    spans = (" to ".join(stage_end_modules(engine, point.stages[n])) for n in fresh)
    yield from _memory_fix(engine, point, f"recompute {', '.join(spans)}", new)


def _cut(engine: PlanSearch, point: Point) -> Iterator[MemoryFix]:
    """The same degrees, cut elsewhere and without further recomputation, or with it."""
    if len(point.stages) == 1:
        return
    new = engine.candidate(point.degrees, point.kind).fastest(engine.question.cap)
    if new is None:
        return
    starts = ", ".join(engine.row[stage.start].module for stage in new.stages[1:])
    more = sum(s.recompute for s in new.stages) - sum(s.recompute for s in point.stages)
    words = f", recompute in {more} more stage{'s' if more > 1 else ''}" if more > 0 else ""
    yield from _memory_fix(engine, point, f"cut before {starts}{words}", new)


_FIXES = {
    "tensor": ("tensor", ("tensor", "data", "microbatches")),
    "pipeline": ("pipe", ("pipeline", "data", "microbatches")),
    "microbatch": ("micro-batches of", ("microbatch", "microbatches")),
    "zero": ("ZeRO", ("zero",)),
}
"""What is changed: how it is called, and the degrees that follow; all others stay."""


def _moved(engine: PlanSearch, point: Point, name: str) -> Iterator[MemoryFix]:
    """The nearest degree of one kind with which there is a plan."""
    old = point.degrees
    called, follow = _FIXES[name]
    asked = replace(engine.question, devices=(old.devices,), tensor=None, zero=(0, 1, 2, 3))
    others = [
        degrees
        for degrees in (one.degrees for one in engine.related(asked).combinations())
        if getattr(degrees, name) != getattr(old, name)
        # Nothing else may differ, as the message names this change alone.
        and replace(degrees, **{one: getattr(old, one) for one in follow}) == old
    ]

    def far(degrees: Degrees) -> float:
        # 1 is added because the stages of ZeRO begin at 0.
        return abs(math.log((1 + getattr(degrees, name)) / (1 + getattr(old, name))))

    for degrees in sorted(others, key=lambda one: (far(one), one)):
        new = engine.candidate(degrees, point.kind).fastest(engine.question.cap)
        if new is not None:
            yield from _memory_fix(engine, point, f"{called} {getattr(degrees, name)}", new)
            return
