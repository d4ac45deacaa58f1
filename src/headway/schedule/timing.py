"""When every action of a table starts and ends: list execution of each rank's fixed order.

An action starts when its rank has done what stands before it and what it needs is there; nothing
is reordered. Messages of one ordered pair of ranks follow each other on their link, all-reduces of
one rank follow each other on its communication lane, in the order in which they became ready.
Invariant: the result depends on the table and the costs alone. This is how the drawings of the
papers with unequal forward and backward come about (Chimera, Li and Hoefler, SC'21, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

from headway.errors import PlanError
from headway.schedule.action import COMPUTE, Action
from headway.schedule.costs import StageCosts
from headway.schedule.pipeline import PipelineSchedule
from headway.schedule.wiring import Wiring, wire

Place = tuple[int, Action]
"""(rank, action)"""
Order = Sequence[Sequence[int]]
"""For each rank its cell numbers."""
_NOT_YET = -1.0


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """An all-reduce on the communication lane of one rank; same unit as the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    """When what happens; times are in the unit of the costs, from 0.

    Attributes:
        order: The actions of each rank.
        starts: By rank and position in `order`.
        ends: As `starts`. The end of a SYNC is the moment in which the rank goes on; the
            all-reduce itself is in `sync_spans`.
        sync_spans: By rank, then by start.
        makespan: When everything has ended, all-reduces too.
    """

    order: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    sync_spans: tuple[SyncSpan, ...]
    makespan: float

    @cached_property
    def start(self) -> Mapping[Place, float]:
        """By (rank, action); of an action that occurs more than once (STEP), the last."""
        return self._by_place(self.starts)

    @cached_property
    def end(self) -> Mapping[Place, float]:
        """By (rank, action), as `start`."""
        return self._by_place(self.ends)

    def _by_place(self, times: tuple[tuple[float, ...], ...]) -> dict[Place, float]:
        return {
            (rank, action): time
            for rank, actions in enumerate(self.order)
            for action, time in zip(actions, times[rank], strict=True)
        }

    def compute_end(self, rank: int) -> float:
        """End of the last F, B, I or W of a rank; 0 if it has none."""
        pairs = zip(self.order[rank], self.ends[rank], strict=True)
        return max((end for action, end in pairs if action.kind in COMPUTE), default=0.0)

    def busy(self, rank: int) -> float:
        """Time that a rank spends in F, B, I and W, with their overhead."""
        rows = zip(self.order[rank], self.starts[rank], self.ends[rank], strict=True)
        return sum(end - start for action, start, end in rows if action.kind in COMPUTE)


def time_schedule(
    schedule: PipelineSchedule, costs: StageCosts, *, shared_links: bool = True
) -> Timing:
    """Time a table.

    In a table without messages, a result is on its way to another rank from the end of its
    producer; with messages, from the end of its SEND, and the consumer waits in RECV. SEND, POST,
    RECV, SYNC, WAIT and STEP take `costs.overhead` on their rank and nothing else. POST never
    delays a message (the transport is taken to buffer what nobody asked for yet).

    Args:
        schedule: Any table, valid or not.
        costs: Of one micro-batch of the table: of half a micro-batch where `schedule.halves`.
        shared_links: Messages of one ordered pair of ranks follow each other, in the order in which
            the sender sends them, each occupying the link for its `costs.message`. If not, every
            message has a link to itself.

    Raises:
        PlanError: A rank cannot go on; names the cell where each rank stands and what is missing.
        ValueError: Costs of another number of stages.
    """
    return Timer(schedule, costs, shared_links=shared_links).timing()


@dataclass(slots=True)
class Run:
    """The raw outcome of one execution.

    Attributes:
        at: When each event happened; negative: never. Ends of cells come first.
        starts: Of each cell.
        done: Cells and all-reduces (their events) in an order in which causes precede effects.
        stuck: For each rank that could not go on: position in its order, and the missing event.
        sync_starts: Of each all-reduce, by event.
    """

    at: list[float]
    starts: list[float]
    done: list[int] = field(default_factory=list)
    stuck: dict[int, tuple[int, int]] = field(default_factory=dict)
    sync_starts: dict[int, float] = field(default_factory=dict)


class Timer:
    """Times many orders of the same cells: the wiring is made once.

    Cells are numbered rank by rank in the order of the given table: `wiring.order`,
    `wiring.actions`. A search permutes the numbers of a rank and asks `makespan`.
    """

    def __init__(
        self, schedule: PipelineSchedule, costs: StageCosts, *, shared_links: bool = True
    ) -> None:
        self.schedule = schedule
        self.costs = costs
        self.wiring: Wiring = wire(schedule, costs, shared_links=shared_links)

    def makespan(self, order: Order | None = None) -> float:
        """Of the given order (default: the table's own); infinite if it cannot go on."""
        run = self.run(order)
        if run.stuck:
            return math.inf
        return max(run.at, default=0.0)

    def timing(self) -> Timing:
        """Of the table's own order.

        Raises:
            PlanError: As `time_schedule`.
        """
        run = self.run()
        if run.stuck:
            raise _deadlock(self.schedule.name, self.wiring, run)
        return Timing(
            order=self.schedule.order,
            starts=self.wiring.by_rank(run.starts),
            ends=self.wiring.by_rank(run.at),
            sync_spans=_sync_spans(self.wiring, run),
            makespan=max(run.at, default=0.0),
        )

    def run(self, order: Order | None = None) -> Run:
        """Execute; a table that cannot go on is executed as far as it goes."""
        return _Execution(self.wiring, self.wiring.order if order is None else order).run()


class _Execution:
    """One run: ranks go on until something is missing, and again when it is there."""

    def __init__(self, wiring: Wiring, order: Order) -> None:
        self.wiring = wiring
        self.order = order
        self.made = Run([_NOT_YET] * wiring.events, [_NOT_YET] * len(wiring.actions))
        self.position = [0] * len(order)
        self.clock = [0.0] * len(order)
        self.link_free = [0.0] * wiring.links
        self.waiting: dict[int, list[int]] = {}
        self.able = list(range(len(order) - 1, -1, -1))
        self.arrived = [0] * len(wiring.syncs)
        self.lane_free = [0.0] * len(order)
        self.ready_syncs: list[tuple[float, int, int]] = []

    def run(self) -> Run:
        while True:
            while self.able:
                self._advance(self.able.pop())
            if not self.ready_syncs:
                break
            self._sync()
        for event, ranks in self.waiting.items():
            for rank in ranks:
                self.made.stuck[rank] = (self.position[rank], event)
        return self.made

    def _advance(self, rank: int) -> None:
        """Carry out the cells of a rank until one has to wait: the innermost loop of searches."""
        at, starts, waiting = self.made.at, self.made.starts, self.waiting
        needs, seconds = self.wiring.needs, self.wiring.seconds
        sends, joins, done = self.wiring.sends, self.wiring.joins, self.made.done
        cells, time = self.order[rank], self.clock[rank]
        for position in range(self.position[rank], len(cells)):
            cell = cells[position]
            for event in needs[cell]:
                there = at[event]
                if there > time:
                    time = there
                elif there < 0:
                    waiting.setdefault(event, []).append(rank)
                    self.position[rank], self.clock[rank] = position, time
                    return
            starts[cell] = time
            time += seconds[cell]
            at[cell] = time
            done.append(cell)
            if cell in waiting:
                self.able += waiting.pop(cell)
            if sends[cell]:
                self._send(cell, time)
            if cell in joins:
                self._join(joins[cell], time)
        self.position[rank] = len(cells)

    def _send(self, cell: int, time: float) -> None:
        for event, link, wire_seconds, latency in self.wiring.sends[cell]:
            left = max(time, self.link_free[link]) + wire_seconds
            self.link_free[link] = left
            self._happens(event, left + latency)

    def _happens(self, event: int, time: float) -> None:
        self.made.at[event] = time
        self.able += self.waiting.pop(event, ())

    def _join(self, number: int, time: float) -> None:
        """A rank has arrived at an all-reduce."""
        self.arrived[number] += 1
        sync = self.wiring.syncs[number]
        if self.arrived[number] == len(sync.ranks):
            ready = max(self.made.at[cell] for cell in sync.cells)
            heappush(self.ready_syncs, (ready, sync.stage, number))

    def _sync(self) -> None:
        """Carry out the all-reduce that was ready first.

        Called when no rank can go on: whatever becomes ready later is ready after the end of one
        of those that wait here, so the first of them is the first of all.
        """
        ready, _, number = heappop(self.ready_syncs)
        sync = self.wiring.syncs[number]
        start = max(ready, *(self.lane_free[rank] for rank in sync.ranks))
        end = start + sync.seconds
        for rank in sync.ranks:
            self.lane_free[rank] = end
        self.made.sync_starts[sync.event] = start
        self.made.done.append(sync.event)
        self._happens(sync.event, end)


def _sync_spans(wiring: Wiring, run: Run) -> tuple[SyncSpan, ...]:
    spans = [
        SyncSpan(
            wiring.ranks[cell],
            wiring.actions[cell],
            run.sync_starts[sync.event],
            run.at[sync.event],
        )
        for sync in wiring.syncs
        if sync.event in run.sync_starts
        for cell in sync.cells
    ]
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start, span.action.stage)))


def _deadlock(name: str, wiring: Wiring, run: Run) -> PlanError:
    problems = []
    for rank, (position, event) in sorted(run.stuck.items()):
        action = wiring.actions[wiring.order[rank][position]]
        problems.append(
            f"rank {rank} stands at cell {position}, {action}, and waits for {wiring.name(event)}"
        )
    return PlanError(
        f"the schedule {name} cannot go on",
        problems=problems,
        fix="Follow the waiting cells: one of them stands before what another one waits for.",
    )
