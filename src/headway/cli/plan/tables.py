"""Text of `headway plan` about a plan whose embedding tables lie over ranks and tiers of memory."""

from __future__ import annotations

from collections.abc import Iterator

from headway.api.planning import TABLES, PlanningResult
from headway.api.table_planning import TablesOverRanks
from headway.cli.terminal.console import table_lines
from headway.planner.tables.placement import PlacedTable, RankLoad
from headway.planner.tables.solve import PROVEN
from headway.units import format_bytes, format_seconds

MOST_RANKS = 16
"""Whose loads are listed one by one."""


def tables_lines(result: PlanningResult) -> Iterator[str]:
    """The section; nothing where the model has no tables to place."""
    found = result.tables
    if found is None:
        return
    placement = found.placement
    yield (
        f"tables over {found.ranks} ranks: step {format_seconds(found.seconds)}, of which tables "
        f"{format_seconds(placement.seconds)}; {format_bytes(found.bytes)} of the fullest device; "
        f"{_verdict(result)}"
    )
    rows: list[tuple[str, ...]] = [
        ("table", "rows", "way", "ranks", "tier", "hot rows", "bytes", "why")
    ]
    rows += [_row(table) for table in placement.tables]
    yield from table_lines(rows)
    yield from _loads(found)
    yield from (f"binds: {sentence}" for sentence in placement.binds)
    if placement.gap > PROVEN:
        yield f"no placement of the tables saves more than {placement.gap:.1%} of their time"
    else:
        yield "no placement of the tables is faster"


def _verdict(result: PlanningResult) -> str:
    assert result.tables is not None
    if not result.whole_fits:
        return "chosen, as no plan with whole tables fits"
    if result.by_tables:
        return f"chosen, {result.tables.seconds / result.chosen.seconds:.2f}x the time of the best"
    times = result.tables.seconds / result.chosen.seconds
    return f"{times:.2f}x the time of the chosen plan (--take {TABLES} --out FILE writes it)"


def _row(table: PlacedTable) -> tuple[str, ...]:
    tiers = list(dict.fromkeys(piece.tier for piece in table.pieces))
    hot = next((piece for piece in table.pieces if piece.hot_tier != piece.tier), None)
    tier = "/".join(tiers) if hot is None else f"{hot.hot_tier} + {'/'.join(tiers)}"
    way = table.way
    if len(table.placement.owners) > 1:
        way += f" {len(table.placement.owners)}"
    return (
        table.table,
        f"{table.placement.rows:,} x {table.placement.columns}",
        way,
        number_runs([piece.rank for piece in table.pieces]),
        tier,
        "" if hot is None else f"{hot.hot_rows:,}",
        format_bytes(table.bytes),
        table.why,
    )


def _loads(found: TablesOverRanks) -> Iterator[str]:
    loads = found.placement.loads
    tiers = [name for name in loads[0].capacity if any(load.used[name] for load in loads)]
    rows = [("rank", "tables", "lookups", "exchange", *(f"{name} used" for name in tiers))]
    shown = loads
    if len(loads) > MOST_RANKS:
        shown = tuple(sorted(loads, key=lambda load: -load.seconds)[:MOST_RANKS])
    rows += [_load(load, tiers) for load in shown]
    yield from table_lines(rows)
    if len(shown) < len(loads):
        yield f"  and {len(loads) - len(shown)} ranks that take less"


def _load(load: RankLoad, tiers: list[str]) -> tuple[str, ...]:
    used = (
        f"{format_bytes(load.used[name])} of {format_bytes(load.capacity[name])}" for name in tiers
    )
    return (
        str(load.rank),
        format_seconds(load.seconds),
        format_seconds(sum(load.lookup.values())),
        format_seconds(load.exchange),
        *used,
    )


def number_runs(numbers: list[int]) -> str:
    """ "0-3, 6"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, dict.fromkeys(span))) for span in spans)
