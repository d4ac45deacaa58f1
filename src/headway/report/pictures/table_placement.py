"""Which embedding table lies where, and what each rank has to do in a step.

Above, a bar for each rank: lookups by tier of memory, and exchange. Below, a row for each table
and a column for each rank, in which a piece has the colour of its tier; hot rows that lie in a
faster tier are a strip of that tier's colour.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from headway.planner.tables.placement import PlacedTable, TablesPlan
from headway.report.pictures.canvas import NUM_SERIES, colour, draw, legend, plain_axes, stack_svg
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, LOADS, ROW, MARGIN = 820, 230, 17, 70
"""Points: of the picture, of the height of the upper part, of a table, and beside the tables."""
MOST_TABLES = 60
"""Tables that are drawn: the largest."""
_STRIP = 0.3
"""Of a piece: what its hot rows take."""


def tables_picture(placement: TablesPlan, *, title: str) -> str:
    """SVG text, a file of its own."""
    tables = sorted(placement.tables, key=lambda table: -table.bytes)[:MOST_TABLES]
    shown = [table for table in placement.tables if table in tables]
    slowest = max(placement.loads, key=lambda load: load.seconds)
    loads = draw(
        "loads",
        (WIDTH, LOADS),
        lambda figure: _loads(figure, placement),
        alt=f"{title}. Time of each rank; rank {slowest.rank} is the slowest with "
        f"{format_seconds(slowest.seconds)}.",
    )
    words = {
        f"piece-{number}-{piece.rank}": f"{table.table} on rank {piece.rank}: {table.why}"
        for number, table in enumerate(shown)
        for piece in table.pieces
    }
    places = draw(
        "places",
        (WIDTH, MARGIN + ROW * len(shown)),
        lambda figure: _places(figure, placement, shown),
        alt=f"{title}. Where the pieces of {len(shown)} tables lie.",
        titles=words,
    )
    less = len(placement.tables) - len(shown)
    largest = f", the largest {len(shown)} of {len(placement.tables)}" if less else ""
    return stack_svg(
        [
            (
                html.escape(f"{title}: tables take {format_seconds(placement.seconds)} a step"),
                loads,
            ),
            (html.escape(f"Tables{largest}: way, bytes, and the ranks that have them"), places),
        ]
    )


def _tier_colours(placement: TablesPlan) -> dict[str, str]:
    tiers = list(placement.loads[0].capacity)
    return {name: colour(f"series-{n % NUM_SERIES}") for n, name in enumerate(tiers)}


def _loads(figure: Figure, placement: TablesPlan) -> None:
    axes = plain_axes(figure)
    hues, ranks = _tier_colours(placement), [load.rank for load in placement.loads]
    high = [0.0] * len(ranks)
    parts = [
        (f"rows in {name}", [load.lookup[name] for load in placement.loads], hue)
        for name, hue in hues.items()
    ]
    parts.append(("exchange", [load.exchange for load in placement.loads], colour("exchange")))
    for label, seconds, hue in parts:
        values = [1000 * value for value in seconds]
        if any(values):
            axes.bar(ranks, values, bottom=high, color=hue, label=label, width=0.7)
            high = [low + value for low, value in zip(high, values, strict=True)]
    axes.set_ylabel("ms", color=colour("muted"))
    axes.set_xlabel("rank", color=colour("muted"))
    axes.set_xlim(-0.6, len(ranks) - 0.4)
    _whole_numbers(axes, len(ranks))
    legend(axes)


def _places(figure: Figure, placement: TablesPlan, tables: list[PlacedTable]) -> None:
    from matplotlib.patches import Rectangle

    axes = plain_axes(figure, grid="x")
    hues = _tier_colours(placement)
    for number, table in enumerate(tables):
        for piece in table.pieces:
            corner = (piece.rank - 0.42, number - 0.38)
            box = Rectangle(corner, 0.84, 0.76, color=hues[piece.tier], linewidth=0)
            box.set_gid(f"piece-{number}-{piece.rank}")
            axes.add_patch(box)
            if piece.hot_tier != piece.tier:
                hot = Rectangle(
                    corner, 0.84 * _STRIP, 0.76, color=hues[piece.hot_tier], linewidth=0
                )
                axes.add_patch(hot)
    axes.set_yticks(range(len(tables)), [_label(table) for table in tables], fontsize=8)
    axes.set_ylim(len(tables) - 0.4, -0.6)
    axes.set_xlim(-0.6, len(placement.loads) - 0.4)
    _whole_numbers(axes, len(placement.loads))
    used = {p.tier for t in tables for p in t.pieces} | {
        p.hot_tier for t in tables for p in t.pieces
    }
    for name, hue in hues.items():
        if name in used:
            axes.bar([0], [0], color=hue, label=name)
    legend(axes)


def _label(table: PlacedTable) -> str:
    name = table.table if len(table.table) <= 36 else f"...{table.table[-33:]}"
    return f"{name}  {table.way}  {format_bytes(table.bytes)}"


def _whole_numbers(axes: Axes, count: int) -> None:
    step = max(1, -(-count // 32))
    axes.set_xticks(range(0, count, step))
