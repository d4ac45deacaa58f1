"""From a table of compute to one that a runtime can execute: messages and gradient all-reduces.

SEND stands right after what produces the message, RECV right before its consumer, POST some
actions earlier. Compute keeps its order, so that without latency and overhead the lowered table
takes as long as the table. For transports without tags the SENDs and POSTs between two ranks
have one common order on both of them, which proves that they match and that no two of them wait
for each other. Placement of all-reduces: Chimera (SC'21), section 3.2 (eager-sync-opt).

`completed_sends` tells when the memory of a sent message can be freed. torch's point-to-point
operations cannot be polled, only waited for; but once this rank has received something that its
peer sent after receiving our message, that message has arrived and waiting for it costs
nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, get_args

from headway.schedule.pipeline_schedule import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    MESSAGE_KINDS,
    STAGE_KINDS,
    WEIGHT_GRADIENT_KINDS,
    Action,
    ActionKind,
    PipelineSchedule,
    message_actions,
)
from headway.schedule.stage_costs import StageCosts
from headway.schedule.timing import ScheduleTiming, time_schedule

Where = tuple[int, int]
"""(rank, position in its row)"""
Key = tuple[str, int, int]
"""(pipe, stage, micro-batch)"""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Message:
    """One result that goes from one rank to another.

    Attributes:
        target: Stage that takes it; later: activations, earlier: their gradients.
    """

    pipe: str
    source: int
    target: int
    microbatch: int
    giver: Where
    taker: Where

    @property
    def actions(self) -> tuple[Action, Action, Action]:
        """SEND, POST and RECV."""
        return message_actions(self.pipe, self.source, self.target, self.microbatch)


def messages(schedule: PipelineSchedule) -> Iterator[Message]:
    """All messages of a table: every edge, both directions, between different ranks alone."""
    forward, gradient = _places(schedule)
    for pipe, source, target, number in schedule.transfers():
        places = forward if source < target else gradient
        giver = places.get((pipe, source, number))
        taker = places.get((pipe, target, number))
        if giver is not None and taker is not None:
            yield Message(pipe, source, target, number, giver, taker)


def _places(schedule: PipelineSchedule) -> tuple[dict[Key, Where], dict[Key, Where]]:
    forward: dict[Key, Where] = {}
    gradient: dict[Key, Where] = {}
    for rank, actions in enumerate(schedule.order):
        for position, a in enumerate(actions):
            if a.kind == ActionKind.FORWARD:
                forward[a.pipe, a.stage, a.microbatch] = (rank, position)
            elif a.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
                gradient[a.pipe, a.stage, a.microbatch] = (rank, position)
    return forward, gradient


def add_messages(
    schedule: PipelineSchedule, *, lookahead: int, tags: bool = True
) -> PipelineSchedule:
    """Insert SEND, POST and RECV.

    Without tags, all messages between two ranks, in both directions, are put in one order: by the
    moment at which they are made at the default costs, and of two made at the same moment in
    opposite directions first the one that leaves the even rank (the *parity rule*; the lower rank,
    if both are even or both are odd). Each of the two ranks issues its SENDs and POSTs for the
    other in this order, if need be earlier than `lookahead` allows. So the k-th operation on one
    side is the counterpart of the k-th on the other. Nothing waits in a circle, and no compute
    starts later, even if an operation blocks the next one of its pair until it is done: a message
    that stands before m in the order was made no later than m, and was posted before m's consumer
    starts (same direction) or before m's producer starts (opposite direction).

    Args:
        lookahead: Most computes between a POST and its consumer.
    """
    # The nearest stage needs its message first; of equal distance the order is that of the edges.
    found = sorted(messages(schedule), key=_distance)
    posts = _posts(schedule, found, lookahead)
    if tags:
        sends, arrivals = found, sorted(found, key=attrgetter("taker"))
    else:
        sends = arrivals = sorted(found, key=_moments(schedule, found).__getitem__)
        posts = _in_common_order(sends, posts)
    # Three lists, because before one position stand all SENDs, then all POSTs, then all RECVs.
    sent: dict[Where, list[Action]] = {}
    posted: dict[Where, list[Action]] = {}
    received: dict[Where, list[Action]] = {}
    for message in sends:
        rank, position = message.giver
        sent.setdefault((rank, position + 1), []).append(message.actions[0])
    for message in arrivals:
        _, post, receive = message.actions
        posted.setdefault((message.taker[0], posts[message]), []).append(post)
        received.setdefault(message.taker, []).append(receive)
    rows = []
    for rank, actions in enumerate(schedule.order):
        row: list[Action] = []
        # One position more than actions: the SENDs behind the last one.
        for position in range(len(actions) + 1):
            for inserted in (sent, posted, received):
                row += inserted.get((rank, position), ())
            row += actions[position : position + 1]
        rows.append(tuple(row))
    return replace(schedule, order=tuple(rows))


def _distance(message: Message) -> tuple[int, int]:
    return abs(message.target - message.source), min(message.source, message.target)


def _posts(
    schedule: PipelineSchedule, found: Sequence[Message], lookahead: int
) -> dict[Message, int]:
    room = _Room(schedule)
    posts = {}
    # By consumer, because each room that is taken leaves less for the messages after it.
    for message in sorted(found, key=attrgetter("taker")):
        rank, position = message.taker
        first = room.earliest(rank, position, lookahead)
        # Only activations count towards `most_activations`; gradients have no bound.
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
            [i for i, action in enumerate(actions) if action.kind in COMPUTE_KINDS]
            for actions in schedule.order
        ]

    def _held(self, actions: tuple[Action, ...]) -> list[float]:
        """Activations while each action of a row goes on."""
        held, now = [], 0.0
        for action in actions:
            now += self.unit * (action.kind == ActionKind.FORWARD)
            held.append(now)
            now -= self.unit * (action.kind in WEIGHT_GRADIENT_KINDS)
        return held

    def earliest(self, rank: int, position: int, lookahead: int) -> int:
        computes = self.computes[rank]
        return computes[max(0, bisect_left(computes, position) - lookahead)]

    def take(self, rank: int, first: int, position: int) -> int:
        """Reserve room before `position`, from `first` or from where there is room."""
        held = self.held[rank]
        # Backwards from the consumer: the room must be free from the POST up to there.
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
        # Behind the end, the parity rule: of two ranks exactly one may be the first to leave.
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
    # The k-th operation on one side must be the counterpart of the k-th on the other.
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
    # Forwards the earliest place behind all SENDs that come first, then backwards the latest place
    # in front of everything that comes after.
    after, wished = 0, {}
    for message in shared:
        if message.giver[0] == rank:
            after = message.giver[1] + 1
        else:
            wished[message] = max(posts[message], after)
    before: float = math.inf  # of all that come later in the common order, the earliest place
    for message in reversed(shared):
        if message.giver[0] == rank:
            before = min(before, message.giver[1])
        else:
            before = moved[message] = int(min(before, wished[message]))


SyncPlacement = Literal["none", "post", "eager", "eager-opt"]
"""Where the all-reduce of a stage's gradients starts."""
_IDLE = 1e-9
"""Idle time below this share of the makespan is rounding."""


def lower(
    schedule: PipelineSchedule,
    *,
    sync: SyncPlacement = "none",
    costs: StageCosts | None = None,
    lookahead: int = 4,
    tags: bool = True,
) -> PipelineSchedule:
    """Add messages, and SYNC, WAIT and STEP where wanted.

    A message is made for every edge of `schedule.edges` in both directions whose stages lie on
    different ranks. Messages that are there already are placed anew.

    Args:
        sync: "none": leave SYNC, WAIT and STEP as they are. Otherwise they are placed anew, one of
            each for every stage of a rank: all SYNCs in stage order after the last compute, then
            all WAITs, then all STEPs ("post"); SYNC right after the stage's last backward on that
            rank ("eager"); the same, but only where the rank idles between that moment and the
            end of its compute ("eager-opt"). Without a flush, SYNC and WAIT stand before each STEP,
            whichever way is chosen.
        costs: By which "eager-opt" finds idle time; the default costs if not given.
        lookahead: A message is posted at most this many computes before its consumer, and, where
            the table declares `most_activations`, not while what it brings would be one too many.
        tags: The transport tells messages of one pair of ranks apart. Without, both ranks of a pair
            SEND and POST all their messages to each other in one common order, see `add_messages`.

    Raises:
        PlanError: "eager-opt" of a table that cannot be executed.
        ValueError: An unknown placement, or a negative lookahead.
    """
    if sync not in get_args(SyncPlacement) or lookahead < 0:
        raise ValueError(f"sync={sync!r}, lookahead={lookahead}")
    plain = _without(schedule, MESSAGE_KINDS)
    if sync != "none":
        plain = _with_syncs(plain, sync, costs)
    return add_messages(plain, lookahead=lookahead, tags=tags)


def _without(schedule: PipelineSchedule, kinds: frozenset[ActionKind]) -> PipelineSchedule:
    rows = (tuple(a for a in actions if a.kind not in kinds) for actions in schedule.order)
    return replace(schedule, order=tuple(rows))


def _with_syncs(
    schedule: PipelineSchedule, sync: SyncPlacement, costs: StageCosts | None
) -> PipelineSchedule:
    if not schedule.flush:
        # Every STEP uses its own group of gradients, so each has an all-reduce of its own.
        bare = _without(schedule, frozenset({ActionKind.SYNC, ActionKind.WAIT}))
        return replace(schedule, order=tuple(map(_before_steps, bare.order)))
    bare = _without(schedule, STAGE_KINDS)
    eager = eager_stages(bare, sync, costs)
    # In the order of stages on every rank, so that copies start their all-reduces in one order.
    rows = (
        _around(actions, bare.stages_on(rank), eager[rank])
        for rank, actions in enumerate(bare.order)
    )
    return replace(schedule, order=tuple(rows))


def _before_steps(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    row: list[Action] = []
    for action in actions:
        if action.kind == ActionKind.STEP:
            row += [replace(action, kind=ActionKind.SYNC), replace(action, kind=ActionKind.WAIT)]
        row.append(action)
    return tuple(row)


def _around(
    actions: tuple[Action, ...], hosted: dict[int, str], eager: frozenset[int]
) -> tuple[Action, ...]:
    last = _last_gradients(actions)
    row: list[Action] = []
    for position, action in enumerate(actions):
        row.append(action)
        if action.stage in eager and last[action.stage] == position:
            row.append(Action(ActionKind.SYNC, hosted[action.stage], action.stage))
    row += [
        Action(ActionKind.SYNC, pipe, stage) for stage, pipe in hosted.items() if stage not in eager
    ]
    for kind in (ActionKind.WAIT, ActionKind.STEP):
        row += [Action(kind, pipe, stage) for stage, pipe in hosted.items()]
    return tuple(row)


def _last_gradients(actions: tuple[Action, ...]) -> dict[int, int]:
    """Position in its row at which the gradients of each stage are complete."""
    return {a.stage: i for i, a in enumerate(actions) if a.kind in BACKWARD_KINDS}


def eager_stages(
    schedule: PipelineSchedule, sync: SyncPlacement, costs: StageCosts | None = None
) -> tuple[frozenset[int], ...]:
    """For each rank the stages whose all-reduce starts before the end of the rank's compute.

    A stage without any backward on a rank is never eager.

    Raises:
        PlanError: "eager-opt" of a table that cannot be executed.
    """
    if sync in ("none", "post"):
        return (frozenset(),) * schedule.ranks
    last = [_last_gradients(actions) for actions in schedule.order]
    if sync == "eager":
        return tuple(map(frozenset, last))
    given = costs or StageCosts.of(schedule.stages, ranks=schedule.ranks)
    timing = time_schedule(schedule, given)
    return tuple(
        frozenset(stage for stage in stages if idle_after_gradients(timing, rank, stage) > 0)
        for rank, stages in enumerate(last)
    )


def idle_after_gradients(timing: ScheduleTiming, rank: int, stage: int) -> float:
    """Idle time of a rank between a stage's gradients being complete and its last compute's end.

    The all-reduce of the stage can hide in it (Chimera, SC'21, figure 4: free regions).
    """
    ends = timing.ends[rank]
    after = _last_gradients(timing.order[rank])[stage]
    idle, before = 0.0, ends[after]
    for position in range(after + 1, len(ends)):
        if timing.order[rank][position].kind in COMPUTE_KINDS:
            idle += timing.starts[rank][position] - before
            before = ends[position]
    return idle if idle > _IDLE * timing.makespan else 0.0


def completed_sends(schedule: PipelineSchedule, rank: int) -> dict[int, list[int]]:
    """For each RECV of a rank, by position, the SENDs before it that it proves to have arrived."""
    row = schedule.order[rank]
    places = [{action: n for n, action in enumerate(other)} for other in schedule.order]
    answers = {peer: _answers(schedule, rank, peer, places) for peer in range(schedule.ranks)}
    found: dict[int, list[int]] = {}
    for position, action in enumerate(row):
        if action.kind != ActionKind.SEND:
            continue
        peer = schedule.pipe_of[action.pipe].placement[action.other]
        taken = places[peer].get(matching_action(action))
        if taken is None:
            continue
        sent, received = answers[peer]
        # Whatever the peer sent after it had received this message proves that it arrived; the
        # earliest of those that this rank receives later is the first moment to know it.
        later = received[bisect_right(sent, taken) :]
        proof = min((p for p in later if p > position), default=None)
        if proof is not None:
            found.setdefault(proof, []).append(position)
    return found


def _answers(
    schedule: PipelineSchedule, rank: int, peer: int, places: list[dict[Action, int]]
) -> tuple[list[int], list[int]]:
    """Positions of a peer's SENDs to a rank, and of the RECVs there."""
    pairs = [
        (position, places[rank][matching_action(action)])
        for position, action in enumerate(schedule.order[peer])
        if action.kind == ActionKind.SEND
        and schedule.pipe_of[action.pipe].placement[action.other] == rank
        and matching_action(action) in places[rank]
    ]
    return [sent for sent, _ in pairs], [received for _, received in pairs]


def matching_action(action: Action) -> Action:
    """The RECV of a SEND, and the other way round."""
    kind = ActionKind.RECV if action.kind == ActionKind.SEND else ActionKind.SEND
    return replace(action, kind=kind, stage=action.other, other=action.stage)
