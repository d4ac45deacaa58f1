"""Rules about messages and deadlocks.

One SEND, POST and RECV for each result that goes to another rank: SEND after its producer, then
POST, RECV and the consumer in that order. Where the transport has no tags, the k-th message
that a rank sends on a lane (pipe, direction) is the k-th that its peer posts.

Deadlocks are found by executing the table: a rank goes through its row and waits where it needs
a result of another rank, a RECV its SEND, a WAIT the SYNCs of all holders of the stage. A table
hangs exactly if some rank does not reach its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule
from headway.schedule.rules.cells import (
    CellIndex,
    TableCell,
    Violation,
    cell_violation,
    cells_of_kinds,
    key_of,
    missing_violation,
)

Edge = tuple[str, int, int, int]
"""(pipe, stage that sends, stage that receives, micro-batch)"""
Lane = tuple[int, int, str, bool]
"""(rank that sends, rank that receives, pipe, whether gradients)"""


def find_unmatched_messages(table: CellIndex) -> Iterator[Violation]:
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
        Action(ActionKind.SEND, pipe, source, microbatch, target),
        Action(ActionKind.POST, pipe, target, microbatch, source),
        Action(ActionKind.RECV, pipe, target, microbatch, source),
    )


def _missing(table: CellIndex, edge: Edge, actions: tuple[Action, ...]) -> Iterator[Violation]:
    for action in actions:
        if not table.has(key_of(action)):
            text = f"stage {edge[2]} needs the result of stage {edge[1]}; add it"
            yield missing_violation(table.schedule.rank_of(action), action, text)


def _in_turn(first: TableCell | None, second: TableCell | None) -> Iterator[Violation]:
    if first and second and first.position > second.position:
        text = f"must come behind {first.action} in cell {first.position}; move it there"
        yield cell_violation("message-order", second, text)


def find_misordered_messages(table: CellIndex) -> Iterator[Violation]:
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
                yield cell_violation("lane-order", post, text)
                break


def _by_lane(
    table: CellIndex,
) -> tuple[dict[Lane, dict[Edge, TableCell]], dict[Lane, dict[Edge, TableCell]]]:
    """The SENDs and the POSTs of every lane."""
    sent, posted = dict[Lane, dict[Edge, TableCell]](), dict[Lane, dict[Edge, TableCell]]()
    for (kind, pipe, stage, microbatch, other), cell in table.at.items():
        if kind == ActionKind.SEND or kind == ActionKind.POST:
            source, target = (stage, other) if kind == ActionKind.SEND else (other, stage)
            placement = table.schedule.pipe_of[pipe].placement
            lane = (placement[source], placement[target], pipe, source > target)
            lanes = sent if kind == ActionKind.SEND else posted
            lanes.setdefault(lane, {})[pipe, source, target, microbatch] = cell
    return sent, posted


# Deadlocks: ranks that wait for each other in a circle, found by carrying the table out.


Needs = Mapping[tuple[int, int], Sequence[TableCell]]
"""By (rank, position): cells of other ranks that come first."""


def find_deadlocks(table: CellIndex, broken: Collection[tuple[int, int]]) -> Iterator[Violation]:
    """One violation for each circle.

    Args:
        broken: Cells, as (rank, position), that break another rule: they are taken not to wait, so
            that what follows from their mistake is not reported again.
    """
    order = table.schedule.order
    needs = {place: cells for place, cells in _needs(table).items() if place not in broken}
    reached = _reached(order, needs)
    stuck: dict[int, tuple[TableCell, TableCell]] = {}
    for rank, position in enumerate(reached):
        if position < len(order[rank]):
            unmet = next(n for n in needs[rank, position] if n.position >= reached[n.rank])
            stuck[rank] = TableCell(rank, position, order[rank][position]), unmet
    for circle in _circles(stuck):
        waiting = "; ".join(f"{stuck[r][0]} waits for {stuck[r][1]}" for r in circle)
        text = f"{waiting}: nobody can go on; move one of the awaited actions forward in its row"
        cell = stuck[circle[0]][0]
        yield Violation("deadlock", cell.rank, cell.position, cell.action, text)


def _reached(order: Sequence[Sequence[object]], needs: Needs) -> list[int]:
    """For each rank how many cells can be carried out."""
    reached = [0] * len(order)
    able, waiting = list(range(len(order))), dict[int, list[int]]()
    while able:
        rank = able.pop()
        position = reached[rank]
        while position < len(order[rank]):
            unmet = [n for n in needs.get((rank, position), ()) if n.position >= reached[n.rank]]
            if unmet:
                waiting.setdefault(unmet[0].rank, []).append(rank)
                break
            position += 1
        if position > reached[rank]:
            reached[rank] = position
            able += waiting.pop(rank, ())
    return reached


def _circles(stuck: Mapping[int, tuple[TableCell, TableCell]]) -> Iterator[list[int]]:
    """Every stuck rank waits for one other stuck rank; follow them."""
    seen: set[int] = set()
    for first in stuck:
        path: list[int] = []
        rank = first
        while rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = stuck[rank][1].rank
        if rank in path:
            yield path[path.index(rank) :]


def _needs(table: CellIndex) -> dict[tuple[int, int], list[TableCell]]:
    needs = dict[tuple[int, int], list[TableCell]]()
    pairs = _messages(table) if table.lowered else _results(table)
    for cell, needed in (*pairs, *_all_reduces(table)):
        if cell and needed and cell.rank != needed.rank:
            needs.setdefault((cell.rank, cell.position), []).append(needed)
    return needs


def _results(table: CellIndex) -> Iterator[tuple[TableCell | None, TableCell | None]]:
    for pipe in table.schedule.pipes:
        for a, b in table.schedule.edges:
            if pipe.placement[a] != pipe.placement[b]:
                for m in pipe.microbatches:
                    yield table.forward(pipe.name, b, m), table.forward(pipe.name, a, m)
                    yield table.gradient(pipe.name, a, m), table.gradient(pipe.name, b, m)


def _messages(table: CellIndex) -> Iterator[tuple[TableCell | None, TableCell | None]]:
    for (kind, pipe, stage, microbatch, other), cell in table.at.items():
        if kind == ActionKind.RECV:
            yield cell, table.at.get((ActionKind.SEND, pipe, other, microbatch, stage))


def _all_reduces(table: CellIndex) -> Iterator[tuple[TableCell | None, TableCell | None]]:
    """The k-th SYNCs of a stage belong together; a WAIT is for the SYNC before it."""
    syncs = {
        place: cells_of_kinds(cells, ActionKind.SYNC) for place, cells in table.of_stage.items()
    }
    for (rank, stage), cells in table.of_stage.items():
        for wait in cells_of_kinds(cells, ActionKind.WAIT):
            own = syncs[rank, stage]
            k = sum(sync.position < wait.position for sync in own) - 1
            for holder in table.schedule.holders(stage):
                theirs = syncs.get((holder, stage), [])
                if 0 <= k < len(theirs):
                    yield wait, theirs[k]
