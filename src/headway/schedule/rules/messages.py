"""Rules about messages: one SEND, POST and RECV for each result that goes to another rank.

A SEND stands behind what makes the result; POST, RECV and what takes it follow each other.
Invariant: where the transport has no tags, the k-th message that a rank sends to another on a lane
is the k-th for which that one posts. A lane is (pipe, direction).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from headway.schedule.action import Action, Kind
from headway.schedule.pipeline import PipelineSchedule
from headway.schedule.rules.cells import Cell, Table, Violation, absence, key_of, offence

Edge = tuple[str, int, int, int]
"""(pipe, stage that sends, stage that receives, micro-batch)"""
Lane = tuple[int, int, str, bool]
"""(rank that sends, rank that receives, pipe, whether gradients)"""


def unmatched(table: Table) -> Iterator[Violation]:
    """Messages that are missing, or stand on the wrong side of what they belong to."""
    for edge in _edges(table.schedule):
        pipe, source, target, microbatch = edge
        result = table.forward if source < target else table.gradient
        actions = _actions(edge)
        send, post, receive = (table.at.get(key_of(action)) for action in actions)
        if not (send and post and receive):
            yield from _missing(table, edge, actions)
        yield from _in_turn(result(pipe, source, microbatch), send)
        yield from _in_turn(post, receive)
        yield from _in_turn(receive, result(pipe, target, microbatch))


def _edges(schedule: PipelineSchedule) -> Iterator[Edge]:
    """Every result that must travel, in both directions."""
    for pipe in schedule.pipes:
        for a, b in schedule.edges:
            if pipe.placement[a] != pipe.placement[b]:
                for microbatch in pipe.microbatches:
                    yield pipe.name, a, b, microbatch
                    yield pipe.name, b, a, microbatch


def _actions(edge: Edge) -> tuple[Action, Action, Action]:
    pipe, source, target, microbatch = edge
    return (
        Action(Kind.SEND, pipe, source, microbatch, target),
        Action(Kind.POST, pipe, target, microbatch, source),
        Action(Kind.RECV, pipe, target, microbatch, source),
    )


def _missing(table: Table, edge: Edge, actions: tuple[Action, ...]) -> Iterator[Violation]:
    for action in actions:
        if not table.has(key_of(action)):
            text = f"stage {edge[2]} needs the result of stage {edge[1]}; add it"
            yield absence(table.schedule.rank_of(action), action, text)


def _in_turn(first: Cell | None, second: Cell | None) -> Iterator[Violation]:
    if first and second and first.position > second.position:
        text = f"must come behind {first.action} in cell {first.position}; move it there"
        yield offence("message-order", second, text)


def out_of_step(table: Table) -> Iterator[Violation]:
    """Lanes on which messages are sent in one order and posted in another."""
    sent, posted = _by_lane(table)
    for lane, posts in posted.items():
        pairs = ((p, sent[lane].get(edge)) for edge, p in posts.items() if lane in sent)
        matched = [(post, send) for post, send in pairs if send]
        matched.sort(key=lambda pair: pair[0].position)
        for (_, before), (post, send) in itertools.pairwise(matched):
            if send.position < before.position:
                text = (
                    f"rank {lane[0]} sends this message before the one posted before it "
                    f"({send} and {before}); post and send in one order"
                )
                yield offence("lane-order", post, text)
                break


def _by_lane(
    table: Table,
) -> tuple[dict[Lane, dict[Edge, Cell]], dict[Lane, dict[Edge, Cell]]]:
    """The SENDs and the POSTs of every lane."""
    sent, posted = dict[Lane, dict[Edge, Cell]](), dict[Lane, dict[Edge, Cell]]()
    for (kind, pipe, stage, microbatch, other), cell in table.at.items():
        if kind == Kind.SEND or kind == Kind.POST:
            source, target = (stage, other) if kind == Kind.SEND else (other, stage)
            placement = table.schedule.pipe_of[pipe].placement
            lane = (placement[source], placement[target], pipe, source > target)
            lanes = sent if kind == Kind.SEND else posted
            lanes.setdefault(lane, {})[pipe, source, target, microbatch] = cell
    return sent, posted
