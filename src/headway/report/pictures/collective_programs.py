"""Collective programs: times against the bound, bytes by pair, trees.

Ranks stand on a circle in order; a line between two ranks is as wide as the bytes that it carries,
on one scale per picture, and bent so that both directions are visible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headway.collective.nodes import Parents
from headway.planner.collective_algorithm import PricedProgram
from headway.report.pictures.canvas import NUM_SERIES, Hue, colour, draw, draw_png, plain_axes
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH = 900
_BAR, _CIRCLE, _TREE = 30, 250, 170
"""Heights in points."""
_CIRCLES, _TREES, _MOST_TREES = 3, 5, 10
"""In a row; of trees at most so many are drawn."""
_WIDEST = 5.0
"""Points of the line that carries most."""


Tree = tuple[Parents, float]
"""The parent of each rank (None: the root), and the share of the buffer that the tree carries."""


def programs_svg(title: str, shown: Sequence[PricedProgram]) -> str:
    """SVG text.

    Args:
        shown: At least one program, the fastest first.
    """
    alt = f"{title}: " + ", ".join(f"{d.name} {format_seconds(d.seconds)}" for d in shown)
    return draw(
        "collective",
        (WIDTH, _height(shown)),
        lambda figure: _paint(figure, title, shown, colour),
        alt=alt,
    )


def programs_png(title: str, shown: Sequence[PricedProgram]) -> bytes:
    """The same as PNG, at two pixels a point."""
    return draw_png((WIDTH, _height(shown)), lambda figure, hue: _paint(figure, title, shown, hue))


def _trees(shown: Sequence[PricedProgram]) -> tuple[Tree, ...]:
    """Of the fastest program that has any, the heaviest ones."""
    found = next((drawn.trees for drawn in shown if drawn.trees), ())
    # The weights of a packing are in any unit: only their sum makes them shares.
    total = sum(weight for _, weight in found)
    trees = [(parents, weight / total) for parents, weight in found]
    return tuple(sorted(trees, key=lambda tree: -tree[1])[:_MOST_TREES])


def _sent(drawn: PricedProgram) -> Mapping[tuple[int, int], float]:
    """Bytes by (sender, receiver)."""
    return drawn.program.traffic(drawn.played.element_bytes).sent


def _rows(shown: Sequence[PricedProgram]) -> tuple[int, int]:
    return -(-len(shown) // _CIRCLES), -(-len(_trees(shown)) // _TREES)


def _heights(shown: Sequence[PricedProgram]) -> list[int]:
    circles, trees = _rows(shown)
    return [60 + _BAR * len(shown), *[_CIRCLE] * circles, *[_TREE] * trees]


def _height(shown: Sequence[PricedProgram]) -> int:
    return 30 + sum(_heights(shown))


def _paint(figure: Figure, title: str, shown: Sequence[PricedProgram], paint: Hue) -> None:
    circles, _ = _rows(shown)
    names = shown[0].played.wires.names
    heights = _heights(shown)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part in parts:
        part.patch.set_visible(False)
    parts[0].suptitle(title, color=paint("ink"), fontsize=12)
    _bars(plain_axes(parts[0], grid="x", hue=paint), shown, paint)
    most = max((size for drawn in shown for size in _sent(drawn).values()), default=1.0)
    for number, drawn in enumerate(shown):
        row, column = divmod(number, _CIRCLES)
        axes = parts[1 + row].add_subplot(1, _CIRCLES, column + 1)
        _circle(axes, drawn, most, names, paint)
    for number, (parents, share) in enumerate(_trees(shown)):
        row, column = divmod(number, _TREES)
        axes = parts[1 + circles + row].add_subplot(1, _TREES, column + 1)
        _tree(axes, parents, share, names, paint(f"series-{number % NUM_SERIES}"), paint)


def _bars(axes: Axes, shown: Sequence[PricedProgram], paint: Hue) -> None:
    """Predicted seconds, with the bound as a line."""
    from matplotlib.ticker import FuncFormatter

    least = shown[0].least
    places = range(len(shown))
    colours = [paint("series-2" if not place else "series-7") for place in places]
    axes.barh(places, [drawn.seconds for drawn in shown], color=colours, height=0.6)
    axes.axvline(least, color=paint("ink"), linewidth=1.2)
    for place, drawn in enumerate(shown):
        share = f", {drawn.share:.0%} of the bound" if drawn.seconds else ""
        words = f" {format_seconds(drawn.seconds)}{share}"
        axes.text(drawn.seconds, place, words, va="center", color=paint("ink"), fontsize=9)
    axes.set_yticks(places, [drawn.name for drawn in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, max(drawn.seconds for drawn in shown) * 1.3 or 1.0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(max(0.0, value))))


def _places(count: int) -> list[tuple[float, float]]:
    """On a circle, from the top clockwise."""
    turns = [2 * math.pi * rank / count for rank in range(count)]
    return [(math.sin(turn), math.cos(turn)) for turn in turns]


def _circle(
    axes: Axes,
    drawn: PricedProgram,
    most: float,
    names: Sequence[str],
    paint: Hue,
) -> None:
    """Who sends how much to whom."""
    places, sent = _places(len(names)), _sent(drawn)
    # Sorted, because the order of the lines is that of the bytes in the file.
    for (sender, receiver), size in sorted(sent.items()):
        axes.annotate(
            "",
            xy=places[receiver],
            xytext=places[sender],
            arrowprops={
                "arrowstyle": "-|>,head_length=0.5,head_width=0.25",
                "connectionstyle": "arc3,rad=0.12",
                "color": paint("series-0"),
                "linewidth": max(0.4, _WIDEST * size / most),
                "shrinkA": 9,
                "shrinkB": 9,
                "alpha": 0.75,
            },
        )
    _ranks(axes, places, names, paint)
    largest = max(sent.values(), default=0.0)
    axes.set_title(
        f"{drawn.name}: up to {format_bytes(largest)} from rank to rank",
        color=paint("ink"),
        fontsize=10,
    )


def _tree(
    axes: Axes,
    parents: Sequence[int | None],
    share: float,
    names: Sequence[str],
    line: str,
    paint: Hue,
) -> None:
    """One tree; the root is the full mark."""
    places = _places(len(names))
    for rank, parent in enumerate(parents):
        if parent is not None:
            (x0, y0), (x1, y1) = places[parent], places[rank]
            axes.plot([x0, x1], [y0, y1], color=line, linewidth=2.2, zorder=1)
    _ranks(axes, places, names, paint, root=list(parents).index(None), line=line)
    axes.set_title(f"{share:.0%} of the buffer", color=paint("ink"), fontsize=9)


def _ranks(
    axes: Axes,
    places: Sequence[tuple[float, float]],
    names: Sequence[str],
    paint: Hue,
    *,
    root: int | None = None,
    line: str = "",
) -> None:
    for rank, ((x, y), name) in enumerate(zip(places, names, strict=True)):
        full = rank == root
        axes.scatter(
            [x], [y], s=190, color=line if full else paint("card"), edgecolor=paint("ink"), zorder=2
        )
        ink = paint("card" if full else "ink")
        axes.text(x, y, name, ha="center", va="center", fontsize=8, color=ink, zorder=3)
    axes.set_xlim(-1.3, 1.3)
    axes.set_ylim(-1.3, 1.3)
    axes.set_aspect("equal")
    axes.axis("off")
