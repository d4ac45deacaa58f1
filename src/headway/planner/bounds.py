"""What no plan is below: bounds of a combination of degrees, and of any plan at all.

Invariant: a bound is never above what a combination's best plan costs, so that what is dropped by
it could not have been on the frontier.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from headway.planner.degrees import Degrees, least_state_per_byte
from headway.planner.operators import Floats, Setting, check_force, kernels, roofline
from headway.planner.room import ROUNDING
from headway.planner.row import Stretches, Unit, stretches, units
from headway.planner.shared import Shared
from headway.planner.stages import Tables, tables
from headway.planner.transients import Transients

if TYPE_CHECKING:
    from headway.planner.question import Question


def hull_bound(seconds: Floats, held: Floats, cap: float) -> tuple[float, float]:
    """(least seconds within the cap, least bytes) of all mixtures of some strategies."""
    fits = held <= cap
    if not fits.any():
        return np.inf, float(held.min())
    own, other = seconds[fits], seconds[~fits][:, None]
    share = (cap - held[fits]) / (held[~fits][:, None] - held[fits])
    mixed = own + share * (other - own)
    return min(float(own.min()), float(mixed.min(initial=np.inf))), float(held.min())


def least_step(degrees: Degrees, forward: Floats, backward: Floats) -> Floats:
    """Seconds that a table takes at least for a model whose passes take so long on one device.

    Of any table: all ranks together compute m micro-batches, and no micro-batch passes faster than
    its chain of forwards. GPipe, for ranks r and q: all stages once, m - 1 more forwards on r and
    backwards on q; the mean over the ranks is (m + p - 1) / p. 1F1B with m > p has for every rank r
    the path to the last rank and back, then r's row, then to the last rank and back again: stages
    before r once, those behind it twice, r itself m - p + 1 + r times; weights
    w(r+1) = w(r) (m - p - 1 + r) / (m - p + 1 + r) of these paths make every stage count
    (m + p - 1) / p times. With fewer micro-batches, for every r: all stages once and m - 1 more
    forwards, or backwards, on r.

    Args:
        degrees: With the schedule.
        forward: Of one micro-batch in all stages.
        backward: The same.
    """
    m, p = degrees.microbatches, degrees.pipeline
    both = forward + backward
    if p == 1:
        return m * both
    if degrees.schedule == "gpipe" or (degrees.schedule == "1f1b" and m > p):
        return both * (m + p - 1) / p
    whole = both * m / p
    if degrees.schedule == "1f1b":
        return np.maximum(whole, both + (m - 1) / p * np.maximum(forward, backward))
    return np.maximum(whole, forward)


def least_1f1b(
    microbatches: int,
    under_way: Floats,
    forward: Floats,
    seconds: Floats,
    wire: Floats,
    sums: Floats,
) -> float:
    """Seconds that a table of 1F1B takes at least with these stages: for every rank the first
    micro-batch's way to it, all that it computes, and the last one's way back, or its sum; and the
    way to the last rank and back, the rest of a rank's row, and the way back.

    Args:
        microbatches: m.
        under_way: Micro-batches that each rank holds at most.
        forward: Seconds of each stage, of one micro-batch.
        seconds: The same, of both passes.
        wire: Seconds of a message at each border.
        sums: Seconds of the sum of each stage's gradients.
    """
    backward = seconds - forward
    before = np.concatenate([[0.0], np.cumsum(forward[:-1] + wire)])
    behind = np.concatenate([[0.0], np.cumsum(backward[:-1] + wire)])
    own = before + microbatches * seconds + np.maximum(behind, sums)
    through = before[-1] + behind[-1] + seconds[-1]
    rest = (microbatches - under_way) * forward + (microbatches - 1) * backward
    return float(max(own.max(), through + rest.max()) * (1.0 - ROUNDING))


def crowded(tables: Tables, degrees: Degrees) -> float:
    """Seconds below which no step is, because units are not divided: of n units of one kind some
    rank has at least n / p, rounded up; with copies, some ranks that have the same stages together.
    """
    p, pipes = degrees.pipeline, degrees.pipes
    counts, seconds = tables.kinds
    most = (degrees.microbatches // pipes) * -(-counts * pipes // p)
    return float((most * seconds).max())


class Bounds:
    """The tables of one question, and what bounds its combinations."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.row: tuple[Unit, ...] = units(question.work)
        self.classes: Stretches = stretches(self.row)
        self.shared = Shared(question.work, self.row, self.classes)
        self.transients = Transients(question.work, self.row, self.classes)
        self._tables: dict[tuple[int, int], Tables] = {}
        self._least: dict[tuple[int, int], tuple[float, float]] = {}
        self._sums: dict[tuple[int, int, int], float] = {}

    def tables_of(self, tensor: int, samples: int) -> Tables:
        """Shared by all combinations with this tensor degree and micro-batch."""
        key = (tensor, samples)
        if key not in self._tables:
            question = self.question
            setting = Setting(
                work=question.work,
                machine=question.priced,
                tensor=tensor,
                samples=samples,
                force=question.force,
            )
            if tensor > 1:
                check_force(setting)
            self._tables[key] = tables(setting, self.row, self.classes, self.transients)
        return self._tables[key]

    def _first_bound(self, degrees: Degrees) -> tuple[float, float]:
        """Work alone, evenly spread; state, and what is kept without or with recomputation."""
        question = self.question
        p, b = degrees.pipeline, degrees.microbatch
        copies = question.work.optimiser.state
        per_byte = least_state_per_byte(question.itemsize, degrees, copies)
        state = self.held * per_byte * degrees.pipes
        forward, backward = self._least_seconds(degrees.tensor, b)
        passes = np.array([backward, forward + backward])
        seconds = least_step(degrees, np.full(2, forward), passes)
        held = (state + b * np.array([self.kept, self.crossing])) / degrees.tensor / p
        return hull_bound(seconds, held, question.cap)

    def floor(self, degrees: Degrees) -> float:
        """Seconds below which no plan of these degrees is, whatever its cut, its schedule, its
        order of axes and its placements: work evenly spread without a bubble, and what of the
        exchange is longer than all backward passes."""
        forward, backward = self._least_seconds(degrees.tensor, degrees.microbatch)
        m, p, d = degrees.microbatches, degrees.pipeline, degrees.data
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
                    (*(roofline(setting, o) if o.name in batched else (0.0, 0.0)), kernels(o))
                    for o in operators[unit.start : unit.stop]
                ]
        each = np.array([line for unit in self.row for line in known[unit.kind]])
        return each[:, :2] / self.question.work.samples, each[:, 2:]

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
