"""What every cell of a table waits for and sets off, as plain numbers: the input of `timing`.

A *cell* is one action of one rank; an *event* is the end of a cell (event number = cell number),
the arrival of a message, or the end of an all-reduce. Invariant: the wiring depends on which cells
a table has and on their costs, not on the order of the cells, so that a search times many orders
with one wiring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.schedule.action import COMPUTE, Action, Kind
from headway.schedule.costs import StageCosts
from headway.schedule.pipeline import PipelineSchedule

Key = tuple[str, int, int]
"""(pipe, stage, micro-batch)"""


class Message(NamedTuple):
    """A message that a cell sets off: it occupies `link` for `wire` seconds."""

    event: int
    link: int
    wire: float
    latency: float


class Sync(NamedTuple):
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
        actions: What.
        ranks: Who.
        seconds: Time on the compute lane.
        needs: Events that must have happened before the cell starts.
        sends: Messages that leave when the cell ends.
        joins: Of SYNC cells: index in `syncs`.
        syncs: All-reduces.
        events: How many there are.
        links: How many links (ordered rank pairs, or single messages if links are not shared).
        names: Of events that are no cells: what to call them.
    """

    order: tuple[tuple[int, ...], ...] = ()
    actions: list[Action] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    needs: list[tuple[int, ...]] = field(default_factory=list)
    sends: list[tuple[Message, ...]] = field(default_factory=list)
    joins: dict[int, int] = field(default_factory=dict)
    syncs: list[Sync] = field(default_factory=list)
    events: int = 0
    links: int = 0
    names: dict[int, str] = field(default_factory=dict)

    def name(self, event: int) -> str:
        """Of what happens, for people."""
        if event < len(self.actions):
            return f"{self.actions[event]} of rank {self.ranks[event]}"
        return self.names[event]

    def by_rank(self, values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """Values of cells, in the order of the table that was wired."""
        return tuple(tuple(values[cell] for cell in cells) for cells in self.order)


def wire(schedule: PipelineSchedule, costs: StageCosts, *, shared_links: bool) -> Wiring:
    """The wiring of a table.

    Args:
        schedule: With or without messages.
        costs: One entry per stage of a pipe.
        shared_links: Messages of one ordered pair of ranks follow each other on one link.

    Raises:
        ValueError: Costs of another number of stages.
    """
    if costs.stages != schedule.stages:
        raise ValueError(f"costs of {costs.stages} stages for pipes of {schedule.stages}")
    return _Wirer(schedule, costs, shared_links).wire()


class _Wirer:
    """Fills a `Wiring`."""

    def __init__(self, schedule: PipelineSchedule, costs: StageCosts, shared_links: bool) -> None:
        self.schedule = schedule
        self.costs = costs
        self.shared_links = shared_links
        self.made = Wiring()
        self.cells: dict[Kind, dict[Key, int]] = {kind: {} for kind in COMPUTE}
        self.messages: dict[Kind, dict[tuple[str, int, int, int], int]] = {
            kind: {} for kind in (Kind.SEND, Kind.POST, Kind.RECV)
        }
        self.stage_syncs: dict[int, dict[int, list[int]]] = {}
        self.waits: list[tuple[int, int, int]] = []
        self.needs: list[list[int]] = []
        self.sends: list[list[tuple[int, Message]]] = []
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
        made.events = len(made.actions)
        self.needs = [[] for _ in made.actions]
        self.sends = [[] for _ in made.actions]
        self._wire_compute()
        self._wire_syncs()
        made.needs = [tuple(events) for events in self.needs]
        made.sends = [tuple(message for _, message in sorted(found)) for found in self.sends]
        return made

    def _number(self, rank: int, action: Action) -> int:
        """Note a cell; returns its number."""
        made, cell = self.made, len(self.made.actions)
        kind, stage = action.kind, action.stage
        seconds = 0.0
        if kind in self.cells:
            self.cells[kind][action.pipe, stage, action.microbatch] = cell
            again = stage in self.schedule.recompute
            seconds = self.costs.seconds(action, rank, recompute=again)
        else:
            seconds = self.costs.overhead
            if kind in self.messages:
                key = (action.pipe, stage, action.other, action.microbatch)
                self.messages[kind][key] = cell
            elif kind == Kind.SYNC:
                self.stage_syncs.setdefault(stage, {}).setdefault(rank, []).append(cell)
            elif kind == Kind.WAIT:
                before = self.stage_syncs.get(stage, {}).get(rank, [])
                self.waits.append((cell, stage, max(len(before) - 1, 0)))
        made.actions.append(action)
        made.ranks.append(rank)
        made.seconds.append(seconds)
        return cell

    def _wire_compute(self) -> None:
        forward, backward = self.cells[Kind.FORWARD], self.cells[Kind.BACKWARD]
        input_grad, weight_grad = self.cells[Kind.INPUT_GRAD], self.cells[Kind.WEIGHT_GRAD]
        gradient = backward | input_grad
        for key, cell in forward.items():
            for stage in self.earlier.get(key[1], ()):
                self._pass(forward, key, stage, cell, self._message_time(stage))
        for key, cell in gradient.items():
            self._need(cell, forward, key, Kind.FORWARD)
            for stage in self.later.get(key[1], ()):
                self._pass(gradient, key, stage, cell, self._message_time(key[1]))
        for key, cell in weight_grad.items():
            self._need(cell, input_grad, key, Kind.INPUT_GRAD)

    def _message_time(self, stage: int) -> float:
        return self.costs.message[stage] if self.costs.message else 0.0

    def _need(self, cell: int, cells: dict[Key, int], key: Key, kind: Kind) -> None:
        found = cells.get(key)
        self.needs[cell].append(self._never(_text(key, kind)) if found is None else found)

    def _never(self, text: str) -> int:
        """An event that does not happen."""
        return self._event(f"{text}, which is not in the table")

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
            kind = Kind.FORWARD if stage < own else Kind.BACKWARD
            self.needs[consumer].append(self._never(_text((pipe, stage, microbatch), kind)))
            return
        source, target = self.made.ranks[producer], self.made.ranks[consumer]
        if source == target:
            self.needs[consumer].append(producer)
            return
        send = self.messages[Kind.SEND].get((pipe, stage, own, microbatch))
        receive = self.messages[Kind.RECV].get((pipe, own, stage, microbatch))
        if send is not None:
            self.needs[send].append(producer)
        if receive is not None:
            self.needs[consumer].append(receive)
            post = self.messages[Kind.POST].get((pipe, own, stage, microbatch))
            self.needs[receive].extend([] if post is None else [post])
        if (send is None) != (receive is None):
            kind = Kind.SEND if send is None else Kind.RECV
            ends = (stage, own) if send is None else (own, stage)
            missing = Action(kind, pipe, ends[0], microbatch, ends[1])
            self.needs[consumer if receive is None else receive].append(self._never(str(missing)))
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
        pair = ends if self.shared_links else (-1, self.made.events)
        link = self.link_of.setdefault(pair, len(self.link_of))
        self.made.links = len(self.link_of)
        event = self._event(f"the message after {self.made.name(giver)}")
        self.sends[giver].append((distance, Message(event, link, wire, self.costs.latency)))
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
                made.syncs.append(Sync(event, stage, ranks, cells, seconds))
                ended[stage, k] = event
        for cell, stage, k in self.waits:
            pipe, after = made.actions[cell].pipe, ended.get((stage, k))
            self.needs[cell].append(
                self._never(f"{pipe}.s{stage}.SYNC") if after is None else after
            )


def _text(key: Key, kind: Kind) -> str:
    return str(Action(kind, *key))
