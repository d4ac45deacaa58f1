"""Lower bounds of a combination's time and memory: what they exclude is never opened.

Bounds are never above what the combination's best plan costs, so what they drop could not have been
on the Pareto front. `SearchBounds` needs no tables: work alone, evenly spread, on devices of one
type; `LayoutBounds` the same where copies stand on devices of several types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from headway.cost.device import Array
from headway.cost.pipeline_model import schedule_formula
from headway.planner.estimate.degrees import Degrees, least_state_per_byte
from headway.planner.estimate.gradient_exchange import ModelParameters
from headway.planner.estimate.operators import (
    OperatorSetting,
    check_force,
    kernel_count,
    roofline_seconds,
)
from headway.planner.estimate.segments import ROUNDING, SegmentTables, make_segment_tables
from headway.planner.estimate.stage_cut import (
    IntervalClasses,
    LayerUnit,
    interval_classes,
    make_units,
)
from headway.planner.estimate.transient_memory import TransientMemory
from headway.planner.search.device_layout import Combination
from headway.planner.search.request import PlanRequest
from headway.planner.whale.load_balance import slowest_stage, whole_filling
from headway.schedule.generators.registry import SCHEDULES

# Up to so many samples of a micro-batch each has a bound of its own, beyond only some.
DENSE = 1024


def lower_hull_bound(seconds: Array, held: Array, cap: float) -> tuple[float, float]:
    """(least seconds within the cap, least bytes) of all mixtures of some strategies."""
    fits = held <= cap
    if not fits.any():
        return np.inf, float(held.min())
    own, other = seconds[fits], seconds[~fits][:, None]
    # Between a strategy that fits and one that does not: the mixture that just fills the cap.
    share = (cap - held[fits]) / (held[~fits][:, None] - held[fits])
    mixed = own + share * (other - own)
    return min(float(own.min()), float(mixed.min(initial=np.inf))), float(held.min())


def step_lower_bound(degrees: Degrees, forward: Array, backward: Array) -> Array:
    """Seconds that a table takes at least for a model whose passes take so long on one device."""
    m, p = degrees.microbatches, degrees.pipeline
    both = forward + backward
    if p == 1:
        return m * both
    # GPipe, for ranks r and q: all stages once, m - 1 more forwards on r and backwards on q; the
    # mean over the ranks is (m + p - 1) / p. 1F1B with m > p has for every rank r the path to the
    # last rank and back, then r's row, then to the last rank and back again: stages before r once,
    # those behind it twice, r itself m - p + 1 + r times. Weights w(r+1) = w(r) (m - p - 1 + r) /
    # (m - p + 1 + r) of these paths make every stage count (m + p - 1) / p times.
    held = SCHEDULES[degrees.schedule].held
    if held == "all" or (held == "depth" and m > p):
        return both * (m + p - 1) / p
    # Of any table: all ranks together compute m micro-batches, and no micro-batch passes faster
    # than its chain of forwards.
    whole = both * m / p
    if held == "depth":
        # 1F1B with m <= p, for every r: all stages once and m - 1 more forwards, or backwards, on
        # r.
        return np.maximum(whole, both + (m - 1) / p * np.maximum(forward, backward))
    return np.maximum(whole, forward)


def step_estimate(degrees: Degrees, least: float) -> float:
    """Seconds that a table is expected to take, by the published bubble of its schedule.

    Args:
        least: Seconds that it takes at least.
    """
    p, m = degrees.pipeline, degrees.microbatches
    if p == 1 or SCHEDULES[degrees.schedule].held == "all":
        return least  # the bound has the bubble already
    known = schedule_formula(
        degrees.schedule, stages=p, microbatches=m, virtual=degrees.virtual, pipes=degrees.pipes
    )
    # Of the others (ZB-V, DualPipe-V, sizes without a formula) the order is that of 1F1B.
    bubble = (p - 1) / (m + p - 1) if known is None else known.bubble
    return least / (1.0 - bubble)


def one_f_one_b_lower_bound(
    microbatches: int,
    under_way: Array,
    forward: Array,
    seconds: Array,
    wire: Array,
    sums: Array,
) -> float:
    """Seconds that a table of 1F1B takes at least with these stages, (p,) arrays.

    Args:
        under_way: Micro-batches that each rank holds at most.
        forward: Seconds of each stage, of one micro-batch.
        wire: Seconds of a message at each border, (p - 1,).
        sums: Seconds of the sum of each stage's gradients.
    """
    backward = seconds - forward
    before = np.concatenate([[0.0], np.cumsum(forward[:-1] + wire)])
    behind = np.concatenate([[0.0], np.cumsum(backward[:-1] + wire)])
    # Of every rank: the first micro-batch's way to it, all that it computes, and the last one's way
    # back, or its sum.
    own = before + microbatches * seconds + np.maximum(behind, sums)
    # Or to the last rank and back, the rest of a rank's row, and back again.
    through = before[-1] + behind[-1] + seconds[-1]
    rest = (microbatches - under_way) * forward + (microbatches - 1) * backward
    return float(max(own.max(), through + rest.max()) * (1.0 - ROUNDING))


class SearchBounds:
    """The tables of one question, and what bounds its combinations before any is opened."""

    def __init__(self, question: PlanRequest) -> None:
        self.question = question
        self.row: tuple[LayerUnit, ...] = make_units(question.work.graph)
        self.classes: IntervalClasses = interval_classes(self.row)
        self.shared = ModelParameters(question.work, self.row, self.classes)
        self.transients = TransientMemory(question.work, self.row, self.classes)
        self._tables: dict[tuple[int, int], SegmentTables] = {}
        self._least: dict[tuple[int, int], tuple[float, float]] = {}
        self._sums: dict[tuple[int, int, int], float] = {}

    def tables_of(self, tensor: int, samples: int) -> SegmentTables:
        """Shared by all combinations with this tensor degree and micro-batch."""
        key = (tensor, samples)
        if key not in self._tables:
            question = self.question
            setting = OperatorSetting(
                work=question.work,
                machine=question.priced,
                tensor=tensor,
                samples=samples,
                force=question.force,
            )
            if tensor > 1:
                check_force(setting)
            self._tables[key] = make_segment_tables(
                setting, self.row, self.classes, self.transients
            )
        return self._tables[key]

    def first(self, degrees: Degrees) -> tuple[float, float]:
        """Work alone, evenly spread; state, and what is kept without or with recomputation."""
        p, b = degrees.pipeline, degrees.microbatch
        state = self.state(degrees) * degrees.pipes
        forward, backward = self._least_seconds(degrees.tensor, b)
        passes = np.array([backward, forward + backward])
        seconds = step_lower_bound(degrees, np.full(2, forward), passes)
        held = (state + b * np.array([self.kept, self.crossing])) / degrees.tensor / p
        return lower_hull_bound(seconds, held, self.question.cap)

    def floor(self, degrees: Degrees) -> float:
        """Seconds below which no plan of these degrees is, whatever its cut, schedule and
        placements."""
        forward, backward = self._least_seconds(degrees.tensor, degrees.microbatch)
        m, p, d = degrees.microbatches, degrees.pipeline, degrees.data
        # Work evenly spread without a bubble, and what of the exchange is longer than all backward
        # passes.
        compute = (forward + backward) * m / p
        if d == 1:
            return compute
        sums = self._least_sums(degrees.tensor, p, d)
        return compute + max(0.0, sums - backward * m / p)

    def _least_sums(self, tensor: int, pipeline: int, data: int) -> float:
        """Seconds in which gradients are scattered, in the better order of the axes."""
        key = (tensor, pipeline, data)
        if key not in self._sums:
            network, held = self.question.machine.network, self.held / tensor / pipeline
            self._sums[key] = min(
                float(network.reduce_scatter(held, data, tensor * inside))
                for inside in (1, pipeline)
            )
        return self._sums[key]

    def _least_seconds(self, tensor: int, samples: int) -> tuple[float, float]:
        """Of a micro-batch in both passes: every operator's work evenly spread, or its launch."""
        key = (tensor, samples)
        if key not in self._least:
            device = self.question.machine.device
            passes, launches = self.work
            spread = passes * samples / tensor + device.seconds_of_kernels(launches)
            slower = np.where(passes > 0, np.maximum(spread, device.seconds_of_host(launches)), 0.0)
            forward, backward = slower.sum(axis=0)
            self._least[key] = float(forward), float(backward)
        return self._least[key]

    @cached_property
    def work(self) -> tuple[np.ndarray, np.ndarray]:
        """(operators, 2): seconds of one sample on one device in both passes, and kernels."""
        setting = self.tables_of(1, self.question.work.samples).setting
        operators = self.question.work.graph.operators
        batched = self.question.work.batch_loops
        known: dict[int, list[tuple[float, float, int]]] = {}
        for unit in self.row:
            if unit.kind not in known:
                known[unit.kind] = [
                    (
                        # What does not grow with the samples is left out: the bound is proportional
                        # to them.
                        *(roofline_seconds(setting, o) if o.name in batched else (0.0, 0.0)),
                        kernel_count(o),
                    )
                    for o in operators[unit.start : unit.stop]
                ]
        each = np.array([line for unit in self.row for line in known[unit.kind]])
        return each[:, :2] / self.question.work.samples, each[:, 2:]

    def state(self, degrees: Degrees) -> float:
        """Bytes of all weights, gradients and optimiser state at any moment of a step."""
        copies = self.question.work.optimiser.state
        return self.held * least_state_per_byte(self.question.itemsize, degrees, copies)

    @cached_property
    def held(self) -> int:
        """Bytes of all parameters."""
        return self.question.work.graph.parameter_bytes

    @cached_property
    def kept(self) -> float:
        """Bytes that a sample's forward keeps."""
        return self.question.work.graph.saved_bytes / self.question.work.samples

    @cached_property
    def crossing(self) -> float:
        """Bytes of one sample that enter units."""
        graph = self.question.work.graph
        entered = sum(graph.tensors[unit.entry].bytes for unit in self.row if unit.entry)
        return entered / self.question.work.samples


class LayoutBounds:
    """What bounds the plans of one question on devices of several types."""

    def __init__(self, question: PlanRequest, types: Mapping[str, SearchBounds]) -> None:
        self.question = question
        self.types = types
        self.first = next(iter(types.values()))
        self._bounds: dict[tuple[str, int], Array] = {}
        self._copies: dict[tuple[tuple[tuple[str, int], ...], int], tuple[Array, Array]] = {}

    def seconds(self, combination: Combination) -> float:
        """Seconds that no plan of it is below; infinite where the parameters alone do not fit."""
        question, state = self.question, self.state(combination)
        for kinds, _ in combination.classes:
            if state > sum(question.caps[kind] for kind in kinds):
                return np.inf
        costs = [self.costs(kinds, combination) for kinds, _ in combination.classes]
        copies = [number for _, number in combination.classes]
        need = -(-question.batch // combination.degrees.microbatches)
        return whole_filling(costs, copies, need)[1]

    def costs(self, kinds: tuple[str, ...], combination: Combination) -> Array:
        """Least seconds of a copy's step with micro-batches of 1, 2, ... samples."""
        m = combination.degrees.microbatches
        need = -(-self.question.batch // m)
        slowest, through = self._copy(
            tuple(sorted(Counter(kinds).items())), combination.degrees.tensor
        )
        return (m - 1) * slowest[:need] + through[:need]

    def _copy(self, stages: tuple[tuple[str, int], ...], tensor: int) -> tuple[Array, Array]:
        """(n,) least seconds of a copy's slowest stage, and of all its stages one after the other,
        with micro-batches of 1, 2, ... n samples."""
        key = (stages, tensor)
        if key not in self._copies:
            counts = np.array(list(self._kinds.values()))
            each = np.stack([self._spread(kind, tensor) for kind, _ in stages])
            numbers = np.array([number for _, number in stages])
            slowest, through = slowest_stage(each, counts, numbers)
            # `whole_filling` needs times that do not fall with the number of samples.
            self._copies[key] = np.maximum.accumulate(slowest), np.maximum.accumulate(through)
        return self._copies[key]

    @cached_property
    def _kinds(self) -> Mapping[int, int]:
        return Counter(unit.kind for unit in self.first.row)

    def _spread(self, kind: str, tensor: int) -> Array:
        """(kinds of units, batch): seconds of a micro-batch of 1, 2, ... samples on t devices of a
        type: every operator's work evenly spread, or its launch."""
        key = (kind, tensor)
        if key not in self._bounds:
            passes, launches = self.types[kind].work
            device = self.types[kind].question.machine.device
            batch = self.question.batch
            sparse = np.floor(np.geomspace(min(batch, DENSE), batch, 512))
            grid = np.unique([*range(1, min(batch, DENSE) + 1), *sparse, batch])
            stops = np.cumsum([0, *(unit.stop - unit.start for unit in self.first.row)]).tolist()
            spans = {unit.kind: stops[n : n + 2] for n, unit in enumerate(self.first.row)}
            found = []
            for number in self._kinds:
                some, calls = (
                    part[slice(*spans[number])][..., None] for part in (passes, launches)
                )
                work = some * grid / tensor + device.seconds_of_kernels(calls)
                slower = np.maximum(work, device.seconds_of_host(calls))
                found.append(np.where(some > 0, slower, 0.0).sum(axis=(0, 1)))
            # Between points of the grid the bound of the next smaller number of samples holds.
            at = np.searchsorted(grid, np.arange(1, batch + 1), side="right") - 1
            self._bounds[key] = np.maximum.accumulate(np.stack(found)[:, at], axis=1)
        return self._bounds[key]

    def held(self, combination: Combination) -> float:
        """Bytes that the fullest device needs at least."""
        # Some copy takes no less than the mean.
        microbatch = -(
            -self.question.batch // combination.degrees.microbatches // combination.degrees.data
        )
        kept = min(self.first.kept, self.first.crossing) / combination.degrees.tensor
        return (self.state(combination) + kept * microbatch) / combination.degrees.pipeline

    def may_fit(
        self, combination: Combination, tuples: np.ndarray, caps: Mapping[str, float]
    ) -> np.ndarray:
        """Which sizes leave room for the state and the least that forward keeps."""
        state, t = self.state(combination), combination.degrees.tensor
        kept = min(self.first.kept, self.first.crossing) / t
        fits = np.ones(len(tuples), dtype=bool)
        for c, (kinds, _) in enumerate(combination.classes):
            fits &= state + kept * tuples[:, c] <= sum(caps[kind] for kind in kinds)
        return fits

    def state(self, combination: Combination) -> float:
        """Bytes of weights, gradients and optimiser of a copy at any moment of a step, on the
        devices of one tensor rank."""
        return self.first.state(combination.degrees) / combination.degrees.tensor
