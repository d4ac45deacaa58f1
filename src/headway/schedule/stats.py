"""What a table costs: time, idle time, memory, messages, critical path.

Invariant: memory follows from the order of each rank alone, because a rank does one thing at a
time: the activations of a micro-batch are held from the start of its forward to the end of its
backward (of W, where the backward is split), so the peak does not depend on durations. A stage that
recomputes holds `costs.kept` of a micro-batch until its backward begins.
Definitions: Chimera (SC'21), Table 2.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headway.schedule.action import NONE, Action, Kind
from headway.schedule.costs import StageCosts
from headway.schedule.critical import critical_path
from headway.schedule.pipeline import PipelineSchedule
from headway.schedule.timing import Timer

_HOLDS = {Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}
_ROUNDING = 9


@dataclass(frozen=True, kw_only=True)
class ScheduleStats:
    """Tuples have one entry per rank.

    Attributes:
        makespan: Time of the step, in the unit of the costs.
        bubble: 1 - (time of all F, B, I, W) / (ranks * makespan).
        bubbles: The same of each rank.
        peak_activations: Most that is held at a time, in the unit of `costs.activation`.
        weights: Weights of all hosted stages with their versions, in the unit of `costs.weight`.
        versions: Most versions of one stage's weights that are held at a time.
        messages: Results that go from one rank to another in the step.
        critical_path: (rank, action) from the start to the end of the step.
    """

    makespan: float
    bubble: float
    bubbles: tuple[float, ...]
    peak_activations: tuple[float, ...]
    weights: tuple[float, ...]
    versions: tuple[int, ...]
    messages: int
    critical_path: tuple[tuple[int, Action], ...]

    @property
    def critical_forwards(self) -> int:
        """C_f of Chimera's performance model."""
        return self._critical(Kind.FORWARD)

    @property
    def critical_backwards(self) -> int:
        """C_b of Chimera's performance model; a split backward counts by its input gradient."""
        return self._critical(Kind.BACKWARD) + self._critical(Kind.INPUT_GRAD)

    @property
    def critical_weight_grads(self) -> int:
        """Split weight gradients on the critical path."""
        return self._critical(Kind.WEIGHT_GRAD)

    def _critical(self, kind: Kind) -> int:
        return sum(action.kind == kind for _, action in self.critical_path)


def measure(
    schedule: PipelineSchedule, costs: StageCosts, *, freed_by_input_grad: float = 0.0
) -> ScheduleStats:
    """Time a table and count what it holds.

    Args:
        schedule: With or without messages.
        costs: Of one micro-batch of the table.
        freed_by_input_grad: Share of a micro-batch's activations that its input gradient (I) frees
            already; the rest is held until its weight gradient (W). 0 is the cautious convention,
            1 that of papers that count until I.

    Raises:
        PlanError: The table cannot be carried out.
    """
    timer = Timer(schedule, costs)
    timing = timer.timing()
    busy = [timing.busy(rank) for rank in range(schedule.ranks)]
    span = timing.makespan or 1.0
    versions = [_versions(actions) for actions in schedule.order]
    return ScheduleStats(
        makespan=timing.makespan,
        bubble=1 - sum(busy) / (schedule.ranks * span),
        bubbles=tuple(1 - time / span for time in busy),
        peak_activations=peak_activations(schedule, costs, freed_by_input_grad=freed_by_input_grad),
        weights=tuple(
            sum(
                costs.weight[stage] * versions[rank].get(stage, 1)
                for stage in _held(schedule, rank)
            )
            for rank in range(schedule.ranks)
        ),
        versions=tuple(max(counts.values(), default=1) for counts in versions),
        messages=count_messages(schedule),
        critical_path=critical_path(timer, timer.run()),
    )


def peak_activations(
    schedule: PipelineSchedule, costs: StageCosts, *, freed_by_input_grad: float = 0.0
) -> tuple[float, ...]:
    """Most activations that each rank holds at a time; arguments as in `measure`."""
    return tuple(
        round(_peak(actions, costs, _kept(schedule, costs), freed_by_input_grad), _ROUNDING)
        for actions in schedule.order
    )


def _kept(schedule: PipelineSchedule, costs: StageCosts) -> tuple[float, ...]:
    """For each stage: what it holds of a micro-batch between forward and backward."""
    again = set(schedule.recompute) if costs.kept else set()
    return tuple(
        costs.kept[stage] if stage in again else activation
        for stage, activation in enumerate(costs.activation)
    )


def _peak(
    actions: tuple[Action, ...], costs: StageCosts, kept: tuple[float, ...], freed: float
) -> float:
    frees = {Kind.BACKWARD: 1.0, Kind.INPUT_GRAD: freed, Kind.WEIGHT_GRAD: 1.0 - freed}
    held = peak = 0.0
    for action in actions:
        whole, least = costs.activation[action.stage], kept[action.stage]
        if action.kind == Kind.FORWARD:
            held += least
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            held += whole - least
        peak = max(peak, held)
        held -= frees.get(action.kind, 0.0) * whole
    return peak


def _held(schedule: PipelineSchedule, rank: int) -> set[int]:
    """Stages on a rank; two pipes that bring the same stage there share its weights."""
    return {stage for _, stage in schedule.hosted(rank)}


def _versions(actions: tuple[Action, ...]) -> dict[int, int]:
    """Most versions of each stage's weights that a rank holds at a time.

    A version is held while it is the newest, and as long as an action that is still to come uses
    it. STEP makes the next one.
    """
    uses: dict[int, Counter[int]] = {}
    for action in actions:
        if action.kind in _HOLDS and action.version != NONE:
            uses.setdefault(action.stage, Counter())[action.version] += 1
    newest = dict.fromkeys(uses, 0)
    most = dict.fromkeys(uses, 1)
    for action in actions:
        stage = action.stage
        if stage not in uses:
            continue
        if action.kind == Kind.STEP:
            newest[stage] += 1
        older = sum(version < newest[stage] for version in +uses[stage])
        most[stage] = max(most[stage], 1 + older)
        if action.kind in _HOLDS and action.version != NONE:
            uses[stage][action.version] -= 1
    return most


def count_messages(schedule: PipelineSchedule) -> int:
    """Results that go from one rank to another: activations and gradients of every edge."""
    return sum(
        2 * len(pipe.microbatches)
        for pipe in schedule.pipes
        for a, b in schedule.edges
        if pipe.placement[a] != pipe.placement[b]
    )
