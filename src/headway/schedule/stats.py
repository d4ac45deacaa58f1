"""What a table costs: time, bubble, memory, messages, and its critical path.

Memory follows from the order of each rank alone: the activations of a micro-batch are held from
the start of its forward to the end of its backward (of W, where the backward is split), so the
peak does not depend on durations. A stage that recomputes holds `costs.kept` of a micro-batch
until its backward begins. Definitions: Chimera (SC'21), Table 2.

The critical path is the chain of actions that decides the makespan. Of paths of equal length
the one with most messages is taken, because it grows first when messages take time: this gives
the counts C_f and C_b of Chimera's performance model (section 3.4).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headway.schedule.pipeline_schedule import (
    COMPUTE_KINDS,
    NO_NUMBER,
    Action,
    ActionKind,
    PipelineSchedule,
)
from headway.schedule.stage_costs import StageCosts
from headway.schedule.timing import ScheduleTimer, StageAllReduce, TimerRun, Wiring

_SAME_MOMENT = 1e-9
_DECIMALS = 9
"""Of sums of activations: shares such as 1/3 are added and taken away again."""


@dataclass(slots=True)
class _LongestPaths:
    """For each event: the most messages on a longest path to it, and the event before it."""

    wiring: Wiring
    run: TimerRun
    best: dict[int, tuple[int, int]] = field(default_factory=dict)
    last_of_rank: dict[int, int] = field(default_factory=dict)
    last_of_link: dict[int, int] = field(default_factory=dict)
    last_of_lane: dict[int, int] = field(default_factory=dict)

    def add_cell(self, cell: int) -> None:
        start, rank = self.run.starts[cell], self.wiring.ranks[cell]
        before = [*self.wiring.needs[cell]]
        if rank in self.last_of_rank:
            before.append(self.last_of_rank[rank])
        self.best[cell] = self._best_of(before, start, rank)
        self.last_of_rank[rank] = cell
        for message in self.wiring.sends[cell]:
            left = self.run.at[message.event] - message.latency
            messages, origin = self.best[cell][0], cell
            queued = self.last_of_link.get(message.link)
            # It left later than its cell ended: the message before it on the link held it up.
            if queued is not None and left - message.wire > self._late(self.run.at[cell]):
                messages, origin = self.best[queued][0], queued
            self.best[message.event] = (messages, origin)
            self.last_of_link[message.link] = message.event

    def add_sync(self, sync: StageAllReduce) -> None:
        event = sync.event
        lanes = [self.last_of_lane[rank] for rank in sync.ranks if rank in self.last_of_lane]
        start = self.run.sync_starts[event]
        self.best[event] = self._best_of([*sync.cells, *lanes], start, -1)
        for rank in sync.ranks:
            self.last_of_lane[rank] = event

    def _best_of(self, before: list[int], start: float, rank: int) -> tuple[int, int]:
        """Of the events that end when something starts on a rank."""
        found = (0, -1)
        for event in before:
            if self._late(self.run.at[event]) >= start:
                # An all-reduce (rank -1) crosses to no rank of its own.
                crossed = rank >= 0 and self._rank(event) != rank
                found = max(found, (self.best[event][0] + crossed, event))
        return found

    def _late(self, time: float) -> float:
        # Equal moments differ in their last bits where they are sums of other terms.
        return time + _SAME_MOMENT * max(1.0, time)

    def _rank(self, event: int) -> int:
        return self.wiring.ranks[event] if event < len(self.wiring.ranks) else -1


def critical_path(timer: ScheduleTimer, run: TimerRun) -> tuple[tuple[int, Action], ...]:
    """(rank, action) of all that decide the makespan of a run that was not stuck, first to last."""
    chains = _LongestPaths(timer.wiring, run)
    cells = len(timer.wiring.actions)
    syncs = {sync.event: sync for sync in timer.wiring.syncs}
    # Causes come first in `done`, so that `best` is known for all that an event comes after.
    for event in run.done:
        if event < cells:
            chains.add_cell(event)
        else:
            chains.add_sync(syncs[event])
    if not chains.best:
        return ()
    end = max(run.at)
    # Of the paths that end last the one with most messages: they decide once messages take time.
    last = [
        (*chains.best[event], event) for event in run.done if chains._late(run.at[event]) >= end
    ]
    path, event = [], max(last)[2]
    while event >= 0:
        if event < cells:
            path.append((timer.wiring.ranks[event], timer.wiring.actions[event]))
        event = chains.best[event][1]
    return tuple(reversed(path))


@dataclass(frozen=True, kw_only=True)
class ScheduleStats:
    """Tuples have one entry per rank.

    Attributes:
        bubble: 1 - (time of all F, B, I, W) / (ranks * makespan).
        peak_activations: Most that is held at a time, in the unit of `costs.activation`.
        weights: Weights of all hosted stages with their versions, in the unit of `costs.weight`.
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
        return self._critical(ActionKind.FORWARD)

    @property
    def critical_backwards(self) -> int:
        """C_b of Chimera's performance model; a split backward counts by its input gradient."""
        return self._critical(ActionKind.BACKWARD) + self._critical(ActionKind.INPUT_GRAD)

    @property
    def critical_weight_grads(self) -> int:
        return self._critical(ActionKind.WEIGHT_GRAD)

    def _critical(self, kind: ActionKind) -> int:
        return sum(action.kind == kind for _, action in self.critical_path)


def measure_schedule(
    schedule: PipelineSchedule, costs: StageCosts, *, freed_by_input_grad: float = 0.0
) -> ScheduleStats:
    """Time a table and count what it holds.

    Args:
        freed_by_input_grad: Share of a micro-batch's activations that its input gradient (I) frees
            already; the rest is held until its weight gradient (W). 0 is the cautious convention,
            1 that of papers that count until I.

    Raises:
        PlanError: The table cannot be executed.
    """
    timer = ScheduleTimer(schedule, costs)
    timing = timer.timing()
    busy = [timing.busy(rank) for rank in range(schedule.ranks)]
    # A table of nothing takes no time, and has no bubble to divide by it.
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
                # Two pipes that bring the same stage to a rank share its weights.
                for stage in schedule.stages_on(rank)
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
    """Most activations that each rank holds at a time; arguments as in `measure_schedule`."""
    return tuple(
        round(_peak(actions, costs, _kept(schedule, costs), freed_by_input_grad), _DECIMALS)
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
    frees = {
        ActionKind.BACKWARD: 1.0,
        ActionKind.INPUT_GRAD: freed,
        ActionKind.WEIGHT_GRAD: 1.0 - freed,
    }
    held = peak = 0.0
    for action in actions:
        whole, least = costs.activation[action.stage], kept[action.stage]
        if action.kind == ActionKind.FORWARD:
            held += least
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
            held += whole - least  # recomputed: everything is there again while backward runs
        peak = max(peak, held)
        held -= frees.get(action.kind, 0.0) * whole  # after the peak: it is held while it runs
    return peak


def _versions(actions: tuple[Action, ...]) -> dict[int, int]:
    """Most versions of each stage's weights that a rank holds at a time.

    A version is held while it is the newest, and as long as an action that is still to come uses
    it. STEP makes the next one.
    """
    uses: dict[int, Counter[int]] = {}
    for action in actions:
        if action.kind in COMPUTE_KINDS and action.version != NO_NUMBER:
            uses.setdefault(action.stage, Counter())[action.version] += 1
    # `+uses` drops versions without further uses: those are let go.
    newest = dict.fromkeys(uses, 0)
    most = dict.fromkeys(uses, 1)
    for action in actions:
        stage = action.stage
        if stage not in uses:
            continue
        if action.kind == ActionKind.STEP:
            newest[stage] += 1
        older = sum(version < newest[stage] for version in +uses[stage])
        most[stage] = max(most[stage], 1 + older)
        if action.kind in COMPUTE_KINDS and action.version != NO_NUMBER:
            uses[stage][action.version] -= 1
    return most


def count_messages(schedule: PipelineSchedule) -> int:
    """Results that go from one rank to another: activations and gradients of every edge."""
    return sum(1 for _ in schedule.transfers())
