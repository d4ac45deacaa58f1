"""Where messages stand in a table: SEND, POST and RECV around compute whose order is given.

Invariant: a SEND directly follows its producer (and its other SENDs), a RECV directly precedes its
consumer, and its POST stands before that. For transports without tags the SENDs and POSTs between
two ranks have one common order on both of them, which is the proof that they match and that no two
of them wait for each other.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.schedule.action import COMPUTE, Action, Kind
from headway.schedule.costs import StageCosts
from headway.schedule.pipeline import PipelineSchedule
from headway.schedule.timing import time_schedule

Where = tuple[int, int]
"""(rank, position in its row)"""
Key = tuple[str, int, int]
"""(pipe, stage, micro-batch)"""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Message:
    """One result that goes from one rank to another.

    Attributes:
        pipe: Whose.
        source: Stage that makes it.
        target: Stage that takes it; later: activations, earlier: their gradients.
        microbatch: Which.
        giver: Where its producer stands.
        taker: Where its consumer stands.
    """

    pipe: str
    source: int
    target: int
    microbatch: int
    giver: Where
    taker: Where

    @property
    def send(self) -> Action:
        return Action(Kind.SEND, self.pipe, self.source, self.microbatch, self.target)

    @property
    def post(self) -> Action:
        return Action(Kind.POST, self.pipe, self.target, self.microbatch, self.source)

    @property
    def receive(self) -> Action:
        return Action(Kind.RECV, self.pipe, self.target, self.microbatch, self.source)


def messages(schedule: PipelineSchedule) -> Iterator[Message]:
    """All messages of a table: every edge, both directions, between different ranks alone."""
    forward, gradient = _places(schedule)
    for earlier, later in schedule.edges:
        for pipe in schedule.pipes:
            if pipe.placement[earlier] == pipe.placement[later]:
                continue
            for number in pipe.microbatches:
                for source, target, places in (
                    (earlier, later, forward),
                    (later, earlier, gradient),
                ):
                    giver = places.get((pipe.name, source, number))
                    taker = places.get((pipe.name, target, number))
                    if giver is not None and taker is not None:
                        yield Message(pipe.name, source, target, number, giver, taker)


def _places(schedule: PipelineSchedule) -> tuple[dict[Key, Where], dict[Key, Where]]:
    """Where each forward stands, and where each gradient of a stage's input is made."""
    forward: dict[Key, Where] = {}
    gradient: dict[Key, Where] = {}
    of_kind = {Kind.FORWARD: forward, Kind.BACKWARD: gradient, Kind.INPUT_GRAD: gradient}
    for rank, actions in enumerate(schedule.order):
        for position, a in enumerate(actions):
            if a.kind in of_kind:
                of_kind[a.kind][a.pipe, a.stage, a.microbatch] = (rank, position)
    return forward, gradient


def add_messages(
    schedule: PipelineSchedule, *, lookahead: int, tags: bool = True
) -> PipelineSchedule:
    """Insert SEND, POST and RECV.

    Without tags, all messages between two ranks, in both directions, are put in one order: by the
    moment at which they are made at the habitual costs, and of two made at the same moment in
    opposite directions first the one that leaves the even rank (the *parity rule*; the lower rank,
    if both are even or both are odd). Each of the two ranks issues its SENDs and POSTs for the
    other in this order, if need be earlier than `lookahead` allows. So the k-th operation on one
    side is the counterpart of the k-th on the other. Nothing waits in a circle, and no compute
    starts later, even if an operation blocks the next one of its pair until it is done: a message
    that stands before m in the order was made no later than m, and was posted before m's consumer
    starts (same direction) or before m's producer starts (opposite direction).

    Args:
        schedule: Without messages.
        lookahead: Most computes between a POST and its consumer.
        tags: The transport tells messages of one pair apart.
    """
    found = sorted(messages(schedule), key=_distance)
    posts = _posts(schedule, found, lookahead)
    if tags:
        sends, arrivals = found, sorted(found, key=_taker)
    else:
        sends = arrivals = sorted(found, key=_moments(schedule, found).__getitem__)
        posts = _in_common_order(sends, posts)
    gaps = _Gaps(schedule)
    for message in sends:
        rank, position = message.giver
        gaps.sends[rank][position + 1].append(message.send)
    for message in arrivals:
        rank, position = message.taker
        gaps.posts[rank][posts[message]].append(message.post)
        gaps.receives[rank][position].append(message.receive)
    return replace(schedule, order=tuple(map(gaps.row, range(schedule.ranks))))


def _distance(message: Message) -> int:
    """The nearest stage needs its message first."""
    return abs(message.target - message.source)


def _taker(message: Message) -> Where:
    return message.taker


class _Gaps:
    """What is inserted before each position of each row: SENDs, then POSTs, then RECVs."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.order = schedule.order
        self.sends = self._empty()
        self.posts = self._empty()
        self.receives = self._empty()

    def _empty(self) -> list[list[list[Action]]]:
        return [[[] for _ in range(len(actions) + 1)] for actions in self.order]

    def row(self, rank: int) -> tuple[Action, ...]:
        row: list[Action] = []
        for position in range(len(self.order[rank]) + 1):
            row += self.sends[rank][position]
            row += self.posts[rank][position]
            row += self.receives[rank][position]
            row += self.order[rank][position : position + 1]
        return tuple(row)


def _posts(
    schedule: PipelineSchedule, found: Sequence[Message], lookahead: int
) -> dict[Message, int]:
    """Where each message is posted: before which position of its taker's row."""
    room = _Room(schedule)
    posts = {}
    for message in sorted(found, key=_taker):
        rank, position = message.taker
        first = room.earliest(rank, position, lookahead)
        if message.target > message.source:
            first = room.take(rank, first, position)
        posts[message] = first
    return posts


class _Room:
    """Room for activations that are posted but not yet there, by rank and position."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        bound = schedule.most_activations
        self.bound = math.inf if bound is None else bound
        self.unit = schedule.ranks / schedule.stages
        self.held = [self._held(actions) for actions in schedule.order]
        self.computes = [
            [i for i, action in enumerate(actions) if action.kind in COMPUTE]
            for actions in schedule.order
        ]

    def _held(self, actions: tuple[Action, ...]) -> list[float]:
        """Activations while each action of a row goes on."""
        held, now = [], 0.0
        for action in actions:
            now += self.unit * (action.kind == Kind.FORWARD)
            held.append(now)
            now -= self.unit * (action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD))
        return held

    def earliest(self, rank: int, position: int, lookahead: int) -> int:
        computes = self.computes[rank]
        return computes[max(0, bisect_left(computes, position) - lookahead)]

    def take(self, rank: int, first: int, position: int) -> int:
        """Reserve room before `position`, from `first` or from where there is room."""
        held = self.held[rank]
        start = position
        while start > first and held[start - 1] + self.unit <= self.bound + _ROUNDING:
            start -= 1
            held[start] += self.unit
        return start


def _moments(
    schedule: PipelineSchedule, found: Sequence[Message]
) -> dict[Message, tuple[float, int, int, int, int]]:
    """By what messages are put in one order; never equal for two of one pair of ranks."""
    timing = time_schedule(schedule, StageCosts.of(schedule.stages, ranks=schedule.ranks))
    moments = {}
    for message in found:
        rank, position = message.giver
        end = timing.ends[rank][position]
        moments[message] = (end, rank % 2, rank, position, message.target)
    return moments


def _in_common_order(
    in_order: Sequence[Message], posts: Mapping[Message, int]
) -> dict[Message, int]:
    """Move POSTs so that both ranks of a pair issue SENDs and POSTs in the given order."""
    of_pair: dict[tuple[int, int], list[Message]] = {}
    for message in in_order:
        ends = sorted((message.giver[0], message.taker[0]))
        of_pair.setdefault((ends[0], ends[1]), []).append(message)
    moved: dict[Message, int] = {}
    for pair, shared in of_pair.items():
        for rank in pair:
            _order_side(rank, shared, posts, moved)
    return moved


def _order_side(
    rank: int,
    shared: Sequence[Message],
    posts: Mapping[Message, int],
    moved: dict[Message, int],
) -> None:
    """One rank's POSTs: behind the SENDs before them, before the SENDs and POSTs after them."""
    after, wished = 0, {}
    for message in shared:
        if message.giver[0] == rank:
            after = message.giver[1] + 1
        else:
            wished[message] = max(posts[message], after)
    before: float = math.inf
    for message in reversed(shared):
        if message.giver[0] == rank:
            before = min(before, message.giver[1])
        else:
            before = moved[message] = int(min(before, wished[message]))
