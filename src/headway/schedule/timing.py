"""When every action of a table starts and ends: list execution of each rank's fixed order.

An action starts when its rank has finished what stands before it and its inputs have arrived;
nothing is reordered. Messages of one ordered pair of ranks follow each other on their link,
all-reduces of one rank follow each other on its communication lane, in the order in which they
became ready. So the drawings of the papers with unequal forward and backward come about
(Chimera, Li and Hoefler, SC'21, section 3).

`Wiring` is the dependence graph as plain numbers. A *cell* is one action of one rank; an
*event* is the end of a cell (event number = cell number), the arrival of a message, or the end
of an all-reduce. It depends on which cells a table has and what they cost, not on their order,
so that a search times many orders with one wiring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from headway.errors import PlanError
from headway.schedule.pipeline_schedule import (
    COMPUTE_KINDS,
    MESSAGE_KINDS,
    WEIGHT_GRADIENT_KINDS,
    Action,
    ActionKind,
    PipelineSchedule,
)
from headway.schedule.stage_costs import StageCosts

Key = tuple[str, int, int]
"""(pipe, stage, micro-batch)"""


class TimedMessage(NamedTuple):
    """A message that a cell sets off: it occupies `link` for `wire` seconds."""

    event: int
    link: int
    wire: float
    latency: float


class StageAllReduce(NamedTuple):
    """An all-reduce: of the ranks that hold a stage, in which all must have arrived."""

    event: int
    stage: int
    ranks: tuple[int, ...]
    cells: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class Wiring:
    """Lists by cell number, unless said otherwise.

    Attributes:
        order: Of each rank: its cells, in the order of the table that was wired.
        needs: Events that must have happened before the cell starts.
        sends: Messages that leave when the cell ends.
        joins: Of SYNC cells: index in `syncs`.
        links: How many links (ordered rank pairs, or single messages if links are not shared).
    """

    order: tuple[tuple[int, ...], ...] = ()
    actions: list[Action] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    needs: list[tuple[int, ...]] = field(default_factory=list)
    sends: list[tuple[TimedMessage, ...]] = field(default_factory=list)
    joins: dict[int, int] = field(default_factory=dict)
    syncs: list[StageAllReduce] = field(default_factory=list)
    events: int = 0
    links: int = 0
    names: dict[int, str] = field(default_factory=dict)

    def name(self, event: int) -> str:
        if event < len(self.actions):
            return f"{self.actions[event]} of rank {self.ranks[event]}"
        return self.names[event]

    def by_rank(self, values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """Values of cells, in the order of the table that was wired."""
        return tuple(tuple(values[cell] for cell in cells) for cells in self.order)


def make_wiring(schedule: PipelineSchedule, costs: StageCosts, *, shared_links: bool) -> Wiring:
    """The wiring of a table; `shared_links` as in `time_schedule`.

    Raises:
        ValueError: Costs of another number of stages.
    """
    if costs.stages != schedule.stages:
        raise ValueError(f"costs of {costs.stages} stages for pipes of {schedule.stages}")
    return _WiringBuilder(schedule, costs, shared_links).wire()


class _WiringBuilder:
    def __init__(self, schedule: PipelineSchedule, costs: StageCosts, shared_links: bool) -> None:
        self.schedule = schedule
        self.costs = costs
        self.shared_links = shared_links
        self.made = Wiring()
        self.cells: dict[ActionKind, dict[Key, int]] = {kind: {} for kind in COMPUTE_KINDS}
        self.messages: dict[ActionKind, dict[tuple[str, int, int, int], int]] = {
            kind: {} for kind in MESSAGE_KINDS
        }
        self.stage_syncs: dict[int, dict[int, list[int]]] = {}
        self.waits: list[tuple[int, int, int]] = []
        self.needs: list[list[int]] = []
        self.sends: list[list[tuple[int, TimedMessage]]] = []
        self.link_of: dict[tuple[int, int], int] = {}
        self.earlier: dict[int, list[int]] = {}
        self.later: dict[int, list[int]] = {}
        for a, b in schedule.edges:
            self.earlier.setdefault(b, []).append(a)
            self.later.setdefault(a, []).append(b)

    def wire(self) -> Wiring:
        made = self.made
        made.order = tuple(
            tuple(self._number(rank, action) for action in actions)
            for rank, actions in enumerate(self.schedule.order)
        )
        made.events = len(made.actions)  # messages and all-reduces are numbered behind the cells
        self.needs = [[] for _ in made.actions]
        self.sends = [[] for _ in made.actions]
        self._wire_compute()
        self._wire_syncs()
        made.needs = [tuple(events) for events in self.needs]
        made.sends = [tuple(message for _, message in sorted(found)) for found in self.sends]
        return made

    def _number(self, rank: int, action: Action) -> int:
        made, cell = self.made, len(self.made.actions)
        kind, stage = action.kind, action.stage
        if kind in self.cells:
            self.cells[kind][action.pipe, stage, action.microbatch] = cell
            again = stage in self.schedule.recompute
            seconds = self.costs.seconds(action, rank, recompute=again)
        else:
            seconds = self.costs.overhead
            if kind in self.messages:
                key = (action.pipe, stage, action.other, action.microbatch)
                self.messages[kind][key] = cell
            elif kind == ActionKind.SYNC:
                self.stage_syncs.setdefault(stage, {}).setdefault(rank, []).append(cell)
            elif kind == ActionKind.WAIT:
                # It waits for the last SYNC of its stage that stands before it on its rank.
                before = self.stage_syncs.get(stage, {}).get(rank, [])
                # Without one, the first of its stage: it cannot happen without this rank, and the
                # WAIT hangs.
                self.waits.append((cell, stage, max(len(before) - 1, 0)))
        made.actions.append(action)
        made.ranks.append(rank)
        made.seconds.append(seconds)
        return cell

    def _wire_compute(self) -> None:
        forward, backward = self.cells[ActionKind.FORWARD], self.cells[ActionKind.BACKWARD]
        input_grad = self.cells[ActionKind.INPUT_GRAD]
        gradient = backward | input_grad
        for key, cell in forward.items():
            for stage in self.earlier.get(key[1], ()):
                self._pass(forward, key, stage, cell, self._message_time(stage))
        for key, cell in gradient.items():
            self._need(cell, forward, key, ActionKind.FORWARD)
            for stage in self.later.get(key[1], ()):
                self._pass(gradient, key, stage, cell, self._message_time(key[1]))
        for key, cell in self.cells[ActionKind.WEIGHT_GRAD].items():
            self._need(cell, input_grad, key, ActionKind.INPUT_GRAD)

    def _message_time(self, stage: int) -> float:
        return self.costs.message[stage] if self.costs.message else 0.0

    def _need(self, cell: int, cells: dict[Key, int], key: Key, kind: ActionKind) -> None:
        found = cells.get(key)
        self.needs[cell].append(self._never(Action(kind, *key)) if found is None else found)

    def _never(self, missing: Action) -> int:
        """An event that does not happen: who needs it stands still, and the deadlock names it."""
        return self._event(f"{missing}, which is not in the table")

    def _event(self, name: str) -> int:
        event = self.made.events
        self.made.events += 1
        self.made.names[event] = name
        return event

    def _pass(
        self, cells: dict[Key, int], key: Key, stage: int, consumer: int, wire: float
    ) -> None:
        """Wire what `stage` hands to the stage of `key`, over the network if they are apart."""
        pipe, own, microbatch = key
        producer = cells.get((pipe, stage, microbatch))
        if producer is None:
            kind = ActionKind.FORWARD if stage < own else ActionKind.BACKWARD
            self.needs[consumer].append(self._never(Action(kind, pipe, stage, microbatch)))
            return
        source, target = self.made.ranks[producer], self.made.ranks[consumer]
        if source == target:
            self.needs[consumer].append(producer)
            return
        send = self.messages[ActionKind.SEND].get((pipe, stage, own, microbatch))
        receive = self.messages[ActionKind.RECV].get((pipe, own, stage, microbatch))
        if send is not None:
            self.needs[send].append(producer)
        if receive is not None:
            self.needs[consumer].append(receive)
            post = self.messages[ActionKind.POST].get((pipe, own, stage, microbatch))
            self.needs[receive].extend([] if post is None else [post])
        # Half a message never arrives: who needs it stands still, and the deadlock names the other
        # half.
        if (send is None) != (receive is None):
            kind = ActionKind.SEND if send is None else ActionKind.RECV
            ends = (stage, own) if send is None else (own, stage)
            missing = Action(kind, pipe, ends[0], microbatch, ends[1])
            self.needs[consumer if receive is None else receive].append(self._never(missing))
            return
        giver = producer if send is None else send
        taker = consumer if receive is None else receive
        distance = abs(stage - own)
        self.needs[taker].append(self._message(giver, (source, target), wire, distance))

    def _message(self, giver: int, ends: tuple[int, int], wire: float, distance: int) -> int:
        """The event of a message's arrival; the giver's own end if no message takes any time.

        Of several messages of one giver the one to the nearest stage leaves first.
        """
        if not self.costs.latency and not any(self.costs.message):
            return giver
        # No two ranks are called (-1, n): a message that shares no link gets one to itself.
        pair = ends if self.shared_links else (-1, self.made.events)
        link = self.link_of.setdefault(pair, len(self.link_of))
        self.made.links = len(self.link_of)
        event = self._event(f"the message after {self.made.name(giver)}")
        self.sends[giver].append((distance, TimedMessage(event, link, wire, self.costs.latency)))
        return event

    def _wire_syncs(self) -> None:
        """The k-th SYNC of a stage on each of its holders belong together."""
        made, ended = self.made, {}
        for stage, of_rank in self.stage_syncs.items():
            ranks = self.schedule.holders(stage)
            seconds = self.costs.sync[stage] if self.costs.sync else 0.0
            for k in range(max(map(len, of_rank.values()))):
                arriving = {r: cells[k] for r, cells in of_rank.items() if len(cells) > k}
                holders = ", ".join(map(str, ranks))
                event = self._event(f"the all-reduce of stage {stage} (ranks {holders})")
                if missing := [str(r) for r in ranks if r not in arriving]:
                    made.names[event] += f"; rank {', '.join(missing)} has no SYNC for it"
                for cell in arriving.values():
                    made.joins[cell] = len(made.syncs)
                cells = tuple(arriving.values())
                made.syncs.append(StageAllReduce(event, stage, ranks, cells, seconds))
                ended[stage, k] = event
        for cell, stage, k in self.waits:
            pipe, after = made.actions[cell].pipe, ended.get((stage, k))
            sync = Action(ActionKind.SYNC, pipe, stage)
            self.needs[cell].append(self._never(sync) if after is None else after)


Order = Sequence[Sequence[int]]
"""For each rank its cell numbers."""
_NOT_YET = -1.0


@dataclass(frozen=True, slots=True)
class AllReduceSpan:
    """An all-reduce on the communication lane of one rank; same unit as the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTiming:
    """When what happens; times are in the unit of the costs, from 0.

    Attributes:
        starts: By rank and position in `order`.
        ends: As `starts`. The end of a SYNC is the moment in which the rank goes on; the
            all-reduce itself is in `sync_spans`.
        sync_spans: By rank, then by start.
        makespan: When everything has ended, all-reduces too.
    """

    order: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    sync_spans: tuple[AllReduceSpan, ...]
    makespan: float

    def row(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """The actions of a rank with start and end."""
        return zip(self.order[rank], self.starts[rank], self.ends[rank], strict=True)

    def compute_end(self, rank: int) -> float:
        """End of the last F, B, I or W of a rank; 0 if it has none."""
        ends = (end for action, _, end in self.row(rank) if action.kind in COMPUTE_KINDS)
        return max(ends, default=0.0)

    def busy(self, rank: int) -> float:
        """Time that a rank spends in F, B, I and W, with their overhead."""
        return sum(b - a for action, a, b in self.row(rank) if action.kind in COMPUTE_KINDS)


def time_schedule(
    schedule: PipelineSchedule, costs: StageCosts, *, shared_links: bool = True
) -> ScheduleTiming:
    """Time a table.

    In a table without messages, a result is on its way to another rank from the end of its
    producer; with messages, from the end of its SEND, and the consumer waits in RECV. SEND, POST,
    RECV, SYNC, WAIT and STEP take `costs.overhead` on their rank and nothing else. POST never
    delays a message (the transport is taken to buffer what nobody asked for yet).

    Args:
        costs: Of one micro-batch of the table: of half a micro-batch where `schedule.halves`.
        shared_links: Messages of one ordered pair of ranks follow each other, in the order in which
            the sender sends them, each occupying the link for its `costs.message`. If not, every
            message has a link to itself.

    Raises:
        PlanError: A rank cannot go on; names the cell where each rank stands and what is missing.
        ValueError: Costs of another number of stages.
    """
    return ScheduleTimer(schedule, costs, shared_links=shared_links).timing()


@dataclass(slots=True)
class TimerRun:
    """The raw outcome of one execution.

    Attributes:
        at: When each event happened; negative: never. Ends of cells come first.
        done: Cells and all-reduces (their events) in an order in which causes precede effects.
        stuck: For each rank that could not go on: position in its order, and the missing event.
    """

    at: list[float]
    starts: list[float]
    done: list[int] = field(default_factory=list)
    stuck: dict[int, tuple[int, int]] = field(default_factory=dict)
    sync_starts: dict[int, float] = field(default_factory=dict)


class ScheduleTimer:
    """Times many orders of the same cells: the wiring is made once.

    Cells are numbered rank by rank in the order of the given table: `wiring.order`,
    `wiring.actions`. A search permutes the numbers of a rank and asks `makespan`.
    """

    def __init__(
        self, schedule: PipelineSchedule, costs: StageCosts, *, shared_links: bool = True
    ) -> None:
        self.schedule = schedule
        self.costs = costs
        self.wiring = make_wiring(schedule, costs, shared_links=shared_links)

    def makespan(self, order: Order | None = None) -> float:
        """Of the given order (default: the table's own); infinite if it cannot go on."""
        run = self.run(order)
        if run.stuck:
            return math.inf
        return max(run.at, default=0.0)

    def timing(self) -> ScheduleTiming:
        """Of the table's own order; raises as `time_schedule`."""
        run = self.run()
        if run.stuck:
            raise _deadlock(self.schedule.name, self.wiring, run)
        return ScheduleTiming(
            order=self.schedule.order,
            starts=self.wiring.by_rank(run.starts),
            ends=self.wiring.by_rank(run.at),
            sync_spans=_sync_spans(self.wiring, run),
            makespan=max(run.at, default=0.0),
        )

    def run(self, order: Order | None = None) -> TimerRun:
        """Execute; a table that cannot go on is executed as far as it goes."""
        return _Execution(self.wiring, self.wiring.order if order is None else order).run()


class AllReduceLanes:
    """The communication lane of each rank: its all-reduces follow each other."""

    def __init__(self, ranks: int) -> None:
        self.free = [0.0] * ranks

    def reduce(self, ready: float, ranks: Sequence[int], seconds: float) -> tuple[float, float]:
        """(start, end) of an all-reduce that takes the lanes of all its ranks."""
        start = max([ready, *(self.free[rank] for rank in ranks)])
        end = start + seconds
        for rank in ranks:
            self.free[rank] = end
        return start, end


class _Execution:
    """One run: ranks go on until something is missing, and again when it is there."""

    def __init__(self, wiring: Wiring, order: Order) -> None:
        self.wiring = wiring
        self.order = order
        self.made = TimerRun([_NOT_YET] * wiring.events, [_NOT_YET] * len(wiring.actions))
        self.position = [0] * len(order)
        self.clock = [0.0] * len(order)
        self.link_free = [0.0] * wiring.links
        self.waiting: dict[int, list[int]] = {}
        self.able = list(range(len(order) - 1, -1, -1))  # a stack: rank 0 goes first
        self.arrived = [0] * len(wiring.syncs)
        self.lanes = AllReduceLanes(len(order))
        self.ready_syncs: list[tuple[float, int, int]] = []

    def run(self) -> TimerRun:
        while True:
            while self.able:
                self._advance(self.able.pop())
            if not self.ready_syncs:
                break
            self._sync()
        # What is still waited for now will not happen.
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
                there = at[event]  # negative: it has not happened
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
            # The link is busy while the bytes leave; latency does not occupy it.
            left = max(time, self.link_free[link]) + wire_seconds
            self.link_free[link] = left
            self._happens(event, left + latency)

    def _happens(self, event: int, time: float) -> None:
        self.made.at[event] = time  # ranks that waited for it look at their cell again
        self.able += self.waiting.pop(event, ())

    def _join(self, number: int, time: float) -> None:
        self.arrived[number] += 1
        sync = self.wiring.syncs[number]
        # Without a SYNC of every holder an all-reduce never becomes ready.
        if self.arrived[number] == len(sync.ranks):
            ready = max(self.made.at[cell] for cell in sync.cells)
            # Of those that are ready at one moment, the lowest stage goes first on every rank.
            heappush(self.ready_syncs, (ready, sync.stage, number))

    def _sync(self) -> None:
        # Called when no rank can go on: whatever becomes ready later is ready after the end of one
        # of those that wait here, so the first of them is the first of all.
        ready, _, number = heappop(self.ready_syncs)
        sync = self.wiring.syncs[number]
        start, end = self.lanes.reduce(ready, sync.ranks, sync.seconds)
        self.made.sync_starts[sync.event] = start
        self.made.done.append(sync.event)
        self._happens(sync.event, end)


def _sync_spans(wiring: Wiring, run: TimerRun) -> tuple[AllReduceSpan, ...]:
    spans = [
        AllReduceSpan(
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


def _deadlock(name: str, wiring: Wiring, run: TimerRun) -> PlanError:
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


# One order with many durations: the search for plans times a table for thousands of partitions.


class StagePasses(NamedTuple):
    """Seconds of one micro-batch by stage; `weight` is part of `backward`."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]


class StageMessages(NamedTuple):
    """Messages of one micro-batch: latency of each border, and seconds of its bytes."""

    latency: Sequence[float]
    wire: Sequence[float]


class OrderEnds(NamedTuple):
    """Seconds.

    Attributes:
        gradients: When the last gradients of a stage are there: (stage, rank).
    """

    ranks: tuple[float, ...]
    gradients: dict[tuple[int, int], float]


OrderedCell = tuple[int, int, int, int, int]
"""A cell as `FixedOrder` plays it: the cell that its rank does before it; the cell of another rank
whose result it needs; the index of its seconds; the link on which its result leaves, and the border
that this crosses. -1: none. A plain tuple, which unpacks in two thirds of a named one's time."""
PassKey = tuple[bool, int, tuple[str, int]]
"""(whether it goes forward, stage, (pipe, micro-batch))"""
_SECONDS = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 1,
    ActionKind.INPUT_GRAD: 2,
    ActionKind.WEIGHT_GRAD: 3,
}
"""Order of the seconds that a `FixedOrder` plays: of all stages those of F, then of B, I, W."""


class FixedOrder:
    """The fast path of `ScheduleTimer` for tables of compute alone along a chain of stages.

    An order in which ranks go on as far as they can puts causes before effects, whatever the
    durations are: playing is one pass over a list, with the timer's arithmetic, so that times
    are the same to the last bit. A cell takes 0.3 us in place of 4 (wiring left out), and the
    search of a plan plays tables ten thousand times.

    Attributes:
        ends: Of each rank: its last cell.
        last: Of each (stage, rank): the cell behind which its gradients are complete.
    """

    def __init__(
        self,
        cells: Sequence[OrderedCell],
        ends: Sequence[int],
        last: Mapping[tuple[int, int], int],
        links: int,
    ) -> None:
        self.cells = cells
        self.ends = tuple(ends)
        self.last = last
        self.links = links

    @staticmethod
    def of(schedule: PipelineSchedule) -> FixedOrder:
        """The order of a table.

        Raises:
            PlanError: The table cannot be executed.
        """
        rank_of = {
            (a.kind is ActionKind.FORWARD, a.stage, (a.pipe, a.microbatch)): rank
            for rank, row in enumerate(schedule.order)
            for a in row
            if a.kind is not ActionKind.WEIGHT_GRAD
        }
        rows = [iter(row) for row in schedule.order]
        heads = [next(row, None) for row in rows]
        able = list(range(schedule.ranks))
        waiting: dict[PassKey, int] = {}
        place: dict[PassKey, int] = {}
        links: dict[tuple[int, int], int] = {}
        ends, last = [-1] * schedule.ranks, dict[tuple[int, int], int]()
        cells: list[OrderedCell] = []
        while able:
            rank = able.pop()
            while (action := heads[rank]) is not None:
                kind, stage, visit = action.kind, action.stage, (action.pipe, action.microbatch)
                ahead, late = kind is ActionKind.FORWARD, kind is ActionKind.WEIGHT_GRAD
                own, source, link, border = (ahead, stage, visit), -1, -1, -1
                if not ahead and (not late, stage, visit) not in place:
                    break  # it never comes: what a gradient is made of stands before it
                if not late:
                    # What its rank gave it stands before it there; of a chain of stages a cell
                    # needs one message at most.
                    behind, onward = (stage - 1, stage + 1) if ahead else (stage + 1, stage - 1)
                    came = (ahead, behind, visit)
                    if 0 <= behind < schedule.stages:
                        if came not in place:
                            waiting[came] = rank
                            break
                        source = place[came] if rank_of[came] != rank else -1
                    to = rank_of.get((ahead, onward, visit), rank)
                    if to != rank:
                        # Border b is behind stage b: a gradient crosses that in front of its stage.
                        link = links.setdefault((rank, to), len(links))
                        border = stage if ahead else onward
                    place[own] = len(cells)
                if kind in WEIGHT_GRADIENT_KINDS:
                    last[stage, rank] = len(cells)
                seconds = _SECONDS[kind] * schedule.stages + stage
                cells.append((ends[rank], source, seconds, link, border))
                ends[rank] = len(cells) - 1
                heads[rank] = next(rows[rank], None)
                if not late and own in waiting:
                    able.append(waiting.pop(own))
        if any(head is not None for head in heads):
            time_schedule(schedule, StageCosts.of(schedule.stages))  # raises, and says where
        return FixedOrder(cells, ends, last, len(links))

    def play(self, work: StagePasses, wire: StageMessages | None = None) -> OrderEnds:
        """When ranks and gradients are done; without a `wire` messages take no time."""
        ends = self._played(_seconds_of(work), wire)
        return OrderEnds(
            tuple(ends[cell] if cell >= 0 else 0.0 for cell in self.ends),
            {key: ends[cell] for key, cell in self.last.items()},
        )

    def idle(self, work: StagePasses) -> dict[tuple[int, int], float]:
        """Of each (stage, rank) the seconds for which the rank waits once the stage's gradients are
        complete."""
        seconds = _seconds_of(work)
        ends = self._played(seconds, None)
        # What each rank has computed by the end of each cell.
        busy: list[float] = []
        for before, _, index, _, _ in self.cells:
            busy.append((busy[before] if before >= 0 else 0.0) + seconds[index])
        return {
            (stage, rank): (ends[end] - ends[cell]) - (busy[end] - busy[cell])
            for (stage, rank), cell in self.last.items()
            for end in [self.ends[rank]]
        }

    def _played(self, seconds: Sequence[float], wire: StageMessages | None) -> list[float]:
        """The end of every cell."""
        nothing = [0.0] * len(seconds)
        latency, sent = wire or StageMessages(nothing, nothing)
        free = [0.0] * self.links
        ends: list[float] = []
        there: list[float] = []
        for before, source, index, link, border in self.cells:
            time = ends[before] if before >= 0 else 0.0
            if source >= 0 and there[source] > time:
                time = there[source]
            time += seconds[index]
            ends.append(time)
            if link >= 0:
                left = free[link]
                left = (left if left > time else time) + sent[border]
                free[link] = left
                time = left + latency[border]
            there.append(time)
        return ends


def _seconds_of(work: StagePasses) -> list[float]:
    """Of F of all stages, then of B, I and W."""
    split = [b - w for b, w in zip(work.backward, work.weight, strict=True)]
    return [*work.forward, *work.backward, *split, *work.weight]


WIDE = 64
"""Ranks of 1F1B from which on all cells of one second are played at once: with fewer, a numpy call
for a handful of cells takes longer than the cells."""


class OneFOneBOrder:
    """`FixedOrder` of 1F1B for any sizes: no table is written.

    With a second for each pass, F of micro-batch k on rank r of p ends at r + k while the pipeline
    fills (k < p - r), at 2 k + r from then on, and B at 2 p - 1 - r + 2 k (Narayanan et al. 2019,
    PipeDream). All cells of one second depend on earlier ones only. 1,000 layers on 1,024 devices
    have pipelines of millions of cells, which as a table take minutes and gigabytes.
    """

    def __init__(self, ranks: int, microbatches: int) -> None:
        self.ranks, self.microbatches = ranks, microbatches

    def play(self, work: StagePasses, wire: StageMessages | None = None) -> OrderEnds:
        return self.fixed.play(work, wire) if self.ranks < WIDE else self.sweep(work, wire)

    @cached_property
    def fixed(self) -> FixedOrder:
        p = self.ranks
        cells: list[OrderedCell] = []
        last, come, back_ = [-1] * p, [-1] * (p + 1), [-1] * (p + 1)
        for ahead, back in self._seconds():
            # From the last rank on, because each reads what the rank before made a second earlier.
            for rank in reversed(range(p)[ahead]):
                link, border = (2 * rank, rank) if rank < p - 1 else (-1, -1)
                cells.append((last[rank], come[rank], rank, link, border))
                last[rank] = come[rank + 1] = len(cells) - 1
            # Here from the first rank on: each reads what the rank behind made a second earlier.
            for rank in range(p)[back]:
                link = 2 * rank - 1 if rank else -1
                cells.append((last[rank], back_[rank + 1], p + rank, link, rank - 1))
                last[rank] = back_[rank] = len(cells) - 1
        return FixedOrder(
            cells, last, {(rank, rank): cell for rank, cell in enumerate(last)}, 2 * (p - 1)
        )

    @cached_property
    def _sweeps(self) -> list[tuple[int, slice]]:
        """One after the other: whether the cells are backwards, and of which ranks."""
        both = ((back, ranks) for cells in self._seconds() for back, ranks in enumerate(cells))
        return [(back, ranks) for back, ranks in both if ranks.stop > (ranks.start or 0)]

    def _seconds(self) -> Iterator[tuple[slice, slice]]:
        """Of every second the ranks with a forward and those with a backward."""
        p, m = self.ranks, self.microbatches
        for time in range(2 * (p + m) - 2):
            if time < p:
                yield slice(max(0, time - m + 1), time + 1), slice(0)
                continue
            # F of k is at 2 k + r and B at 2 p - 1 - r + 2 k: solved for the k with 0 <= r < p.
            # Forwards with k > time - p belong to the fill.
            last = min(m - 1, time - p, time // 2)  # micro-batches of the forwards
            first = max(0, -(-(time - p + 1) // 2))
            ahead = slice(time - 2 * last, time - 2 * first + 1, 2) if first <= last else slice(0)
            first = max(0, -(-(time - 2 * p + 1) // 2))
            last = min(m - 1, (time - p) // 2)
            low = 2 * p - 1 + 2 * first - time
            back = slice(low, low + 2 * (last - first) + 1, 2) if first <= last else slice(0)
            yield ahead, back

    def sweep(self, work: StagePasses, wire: StageMessages | None = None) -> OrderEnds:
        """All cells of one second at once."""
        p = self.ranks
        forward, backward = np.array(work.forward), np.array(work.backward)
        delay, sent = np.zeros((2, p))
        if wire is not None:
            delay[:-1], sent[:-1] = wire
        delay_back, sent_back = np.roll(delay, 1), np.roll(sent, 1)  # of the border in front
        clock, free, free_back = np.zeros((3, p))
        there, there_back = np.zeros((2, p + 1))  # of rank r: from r - 1 at r, from r + 1 at r + 1
        ways = (
            (forward, there[:-1], free, sent, delay, there[1:]),
            (backward, there_back[1:], free_back, sent_back, delay_back, there_back[:-1]),
        )
        for back, ranks in self._sweeps:
            # Slices are views: what is written into `go` is read as `come` of the next rank.
            seconds, come, link, wire_, wait, go = ways[back]
            time, left = clock[ranks], link[ranks]
            np.maximum(time, come[ranks], out=time)
            time += seconds[ranks]
            np.maximum(left, time, out=left)
            left += wire_[ranks]
            np.add(left, wait[ranks], out=go[ranks])
        found: list[float] = clock.tolist()
        return OrderEnds(tuple(found), {(rank, rank): end for rank, end in enumerate(found)})
