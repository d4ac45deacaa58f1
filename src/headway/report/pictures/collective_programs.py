"""Collective programs: times against the bound, bytes by pair, trees.

Ranks stand on a circle in order; a line between two ranks is as wide as the bytes that it carries,
on one scale per picture, and bent so that both directions are visible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True)
class ProgramDrawing:
    """A program as it is drawn.

    Attributes:
        sent: Bytes by (sender, receiver).
        trees: Parents of each rank, and the share of the buffer of each tree.
    """

    name: str
    seconds: float
    sent: Mapping[tuple[int, int], float]
    trees: tuple[tuple[tuple[int | None, ...], float], ...] = ()


def programs_svg(
    title: str, shown: Sequence[ProgramDrawing], least: float, names: Sequence[str]
) -> str:
    """SVG text.

    Args:
        shown: At least one program, the fastest first.
        least: The bound, seconds.
    """
    alt = f"{title}: " + ", ".join(f"{d.name} {format_seconds(d.seconds)}" for d in shown)
    return draw(
        "collective",
        (WIDTH, _height(shown)),
        lambda figure: _paint(figure, title, shown, least, names, colour),
        alt=alt,
    )


def programs_png(
    title: str, shown: Sequence[ProgramDrawing], least: float, names: Sequence[str]
) -> bytes:
    """The same as PNG, at two pixels a point."""
    return draw_png(
        (WIDTH, _height(shown)), lambda figure, hue: _paint(figure, title, shown, least, names, hue)
    )


def _trees(shown: Sequence[ProgramDrawing]) -> tuple[tuple[tuple[int | None, ...], float], ...]:
    """Of the fastest program that has any, the heaviest ones."""
    found = next((drawn.trees for drawn in shown if drawn.trees), ())
    return tuple(sorted(found, key=lambda tree: -tree[1])[:_MOST_TREES])


def _rows(shown: Sequence[ProgramDrawing]) -> tuple[int, int]:
    return -(-len(shown) // _CIRCLES), -(-len(_trees(shown)) // _TREES)


def _heights(shown: Sequence[ProgramDrawing]) -> list[int]:
    circles, trees = _rows(shown)
    return [60 + _BAR * len(shown), *[_CIRCLE] * circles, *[_TREE] * trees]


def _height(shown: Sequence[ProgramDrawing]) -> int:
    return 30 + sum(_heights(shown))


def _paint(
    figure: Figure,
    title: str,
    shown: Sequence[ProgramDrawing],
    least: float,
    names: Sequence[str],
    paint: Hue,
) -> None:
    circles, _ = _rows(shown)
    heights = _heights(shown)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part in parts:
        part.patch.set_visible(False)
    parts[0].suptitle(title, color=paint("ink"), fontsize=12)
    _bars(plain_axes(parts[0], grid="x", hue=paint), shown, least, paint)
    most = max((size for drawn in shown for size in drawn.sent.values()), default=1.0)
    for number, drawn in enumerate(shown):
        row, column = divmod(number, _CIRCLES)
        axes = parts[1 + row].add_subplot(1, _CIRCLES, column + 1)
        _circle(axes, drawn, most, names, paint)
    for number, (parents, share) in enumerate(_trees(shown)):
        row, column = divmod(number, _TREES)
        axes = parts[1 + circles + row].add_subplot(1, _TREES, column + 1)
        _tree(axes, parents, share, names, paint(f"series-{number % NUM_SERIES}"), paint)


def _bars(axes: Axes, shown: Sequence[ProgramDrawing], least: float, paint: Hue) -> None:
    """Predicted seconds, with the bound as a line."""
    from matplotlib.ticker import FuncFormatter

    places = range(len(shown))
    colours = [paint("series-2" if not place else "series-7") for place in places]
    axes.barh(places, [drawn.seconds for drawn in shown], color=colours, height=0.6)
    axes.axvline(least, color=paint("ink"), linewidth=1.2)
    for place, drawn in enumerate(shown):
        share = f", {least / drawn.seconds:.0%} of the bound" if drawn.seconds else ""
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
    drawn: ProgramDrawing,
    most: float,
    names: Sequence[str],
    paint: Hue,
) -> None:
    """Who sends how much to whom."""
    places = _places(len(names))
    # Sorted, because the order of the lines is that of the bytes in the file.
    for (sender, receiver), size in sorted(drawn.sent.items()):
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
    largest = max(drawn.sent.values(), default=0.0)
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
