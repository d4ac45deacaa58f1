"""Deadlocks: ranks that wait for each other in a circle, found by carrying the table out.

A rank goes through its row and waits where it needs something of another rank: a result, or with
messages in the table the SEND of a RECV, and at WAIT the SYNCs of all holders of the stage.
Invariant: a table hangs exactly if some rank does not come to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from headway.schedule.action import Kind
from headway.schedule.rules.cells import Cell, Table, Violation, kinds

Needs = Mapping[tuple[int, int], Sequence[Cell]]
"""By (rank, position): cells of other ranks that come first."""


def deadlocks(table: Table, broken: Collection[tuple[int, int]]) -> Iterator[Violation]:
    """One violation for each circle.

    Args:
        table: Whose rows.
        broken: Cells, as (rank, position), that break another rule: they are taken not to wait, so
            that what follows from their mistake is not reported again.
    """
    order = table.schedule.order
    needs = {place: cells for place, cells in _needs(table).items() if place not in broken}
    reached = _reached(order, needs)
    stuck: dict[int, tuple[Cell, Cell]] = {}
    for rank, position in enumerate(reached):
        if position < len(order[rank]):
            unmet = next(n for n in needs[rank, position] if n.position >= reached[n.rank])
            stuck[rank] = Cell(rank, position, order[rank][position]), unmet
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


def _circles(stuck: Mapping[int, tuple[Cell, Cell]]) -> Iterator[list[int]]:
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


def _needs(table: Table) -> dict[tuple[int, int], list[Cell]]:
    needs = dict[tuple[int, int], list[Cell]]()
    pairs = _messages(table) if table.lowered else _results(table)
    for cell, needed in (*pairs, *_all_reduces(table)):
        if cell and needed and cell.rank != needed.rank:
            needs.setdefault((cell.rank, cell.position), []).append(needed)
    return needs


def _results(table: Table) -> Iterator[tuple[Cell | None, Cell | None]]:
    for pipe in table.schedule.pipes:
        for a, b in table.schedule.edges:
            if pipe.placement[a] != pipe.placement[b]:
                for m in pipe.microbatches:
                    yield table.forward(pipe.name, b, m), table.forward(pipe.name, a, m)
                    yield table.gradient(pipe.name, a, m), table.gradient(pipe.name, b, m)


def _messages(table: Table) -> Iterator[tuple[Cell | None, Cell | None]]:
    for (kind, pipe, stage, microbatch, other), cell in table.at.items():
        if kind == Kind.RECV:
            yield cell, table.at.get((Kind.SEND, pipe, other, microbatch, stage))


def _all_reduces(table: Table) -> Iterator[tuple[Cell | None, Cell | None]]:
    """The k-th SYNCs of a stage belong together; a WAIT is for the SYNC before it."""
    syncs = {place: kinds(cells, Kind.SYNC) for place, cells in table.of_stage.items()}
    for (rank, stage), cells in table.of_stage.items():
        for wait in kinds(cells, Kind.WAIT):
            own = syncs[rank, stage]
            k = sum(sync.position < wait.position for sync in own) - 1
            for holder in table.schedule.holders(stage):
                theirs = syncs.get((holder, stage), [])
                if 0 <= k < len(theirs):
                    yield wait, theirs[k]
