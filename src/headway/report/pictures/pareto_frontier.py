"""Pareto frontier of plans: step time against memory, by device count.

SVG and PNG are drawn from one `FrontierPlot`. The ground is darker where plans are dominated at any
device count. SVG has light and dark colours and tooltips on the marks; PNG has the light colours.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.planner.explain.alternatives import label_points
from headway.planner.search.branch_and_bound import SearchResult
from headway.planner.search.plan_point import describe_point
from headway.report.pictures.canvas import (
    NUM_SERIES,
    Hue,
    colour,
    draw,
    draw_png,
    legend,
    stack_svg,
)
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LabelSide = tuple[bool, bool]
SIZE = (820, 480)
MARKS = "os^Dv<>pPXdh"
_BOX = (0.48, 0.2)
"""About what the label of the chosen plan takes of the axes."""
WIDE = 5.0
"""From this ratio of the largest to the least on, an axis is logarithmic."""
NEAR = 2.5
"""The allowed memory is drawn where it is at most so many times the most that a plan needs."""
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


@dataclass(frozen=True)
class FrontierPlot:
    """The frontier of a search, and what is written beside each of its plans."""

    outcome: SearchResult
    title: str
    words: tuple[str, ...]


def frontier_plot(outcome: SearchResult, *, model: str, cluster: str) -> FrontierPlot:
    """What there is to draw of an answer."""
    question, notes = outcome.question, label_points(outcome.search, outcome.points)
    words = []
    for point, said in zip(outcome.points, notes, strict=True):
        devices = f"{point.devices} device{'s' if point.devices > 1 else ''}"
        figures = f"{format_seconds(point.seconds)}, {format_bytes(point.bytes)}, {devices}"
        words.append(f"{figures}\n{describe_point(point)}{said and f' ({said})'}")
    title = f"{model} on {cluster}, batch {question.batch}: {question.objective}"
    return FrontierPlot(outcome, title, tuple(words))


def frontier_svg(shown: FrontierPlot) -> str:
    """SVG text, a file of its own."""
    best = shown.words[shown.outcome.chosen]
    alt = f"{shown.title}. {len(shown.words)} plans by step time and memory; chosen: {best}."
    titles = {f"plan-{n}": words for n, words in enumerate(shown.words)}
    svg = draw(
        "frontier", SIZE, lambda figure: _paint(figure, shown, "", colour), alt=alt, titles=titles
    )
    return stack_svg([(html.escape(shown.title), svg)])


def frontier_png(shown: FrontierPlot) -> bytes:
    """The same as PNG, at two pixels a point."""
    return draw_png(SIZE, lambda figure, hue: _paint(figure, shown, shown.title, hue))


def _paint(figure: Figure, shown: FrontierPlot, title: str, hue: Hue) -> None:
    axes = _axes(figure, title, hue)
    points, best = shown.outcome.points, shown.outcome.chosen
    time, size = (
        _unit(_TIMES, [p.seconds for p in points]),
        _unit(_SIZES, [p.bytes for p in points]),
    )
    axes.set_xlabel(f"step time, {time[1]}", color=hue("muted"))
    axes.set_ylabel(f"memory of the fullest device, {size[1]}", color=hue("muted"))
    places = [(point.seconds / time[0], point.bytes / size[0]) for point in points]
    allowed = shown.outcome.question.cap / size[0]
    _limits(axes, places, allowed)
    counts = sorted({point.devices for point in points})
    # A plan of the fewest devices dominates with any number of them.
    fewest = [place for place, p in zip(places, points, strict=True) if p.devices == counts[0]]
    _dominated(axes, fewest, len(counts) > 1, hue)
    for number, devices in enumerate(counts):
        mine = [n for n, point in enumerate(points) if point.devices == devices]
        series = hue(f"series-{number % NUM_SERIES}")
        _staircase(axes, [places[n] for n in mine], series)
        label = f"{devices} device{'s' if devices > 1 else ''}"
        for place, n in enumerate(mine):
            # One by one, because only an artist of its own can have the text of one plan.
            axes.plot(
                *places[n],
                marker=MARKS[number % len(MARKS)],
                markersize=7,
                color=series,
                markeredgecolor=hue("card"),
                linestyle="none",
                label="" if place else label,
                gid=f"plan-{n}",
                zorder=4,
            )
    _allowed(axes, allowed, size[1], hue)
    _ring(axes, places[best], shown.words[best], _label_side(axes, places, best), hue)
    legend(axes, columns=7, hue=hue, columnspacing=1.0, fontsize=9)


def _unit(units: Sequence[tuple[float, str]], values: Sequence[float]) -> tuple[float, str]:
    """The unit in which the least value is at least 1, else the smallest."""
    return next((unit for unit in units if unit[0] <= min(values)), units[-1])


def _axes(figure: Figure, title: str, hue: Hue) -> Axes:
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(hue("grid"))
    axes.grid(True, color=hue("grid"), linewidth=0.8)
    axes.tick_params(which="both", length=0, colors=hue("muted"), labelcolor=hue("muted"))
    if title:
        axes.set_title(title, loc="left", color=hue("ink"), fontsize=11, pad=30)
    return axes


def _limits(axes: Axes, places: Sequence[tuple[float, float]], allowed: float) -> None:
    """Room around all marks; what spans much is logarithmic, with ticks at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for number, axis in enumerate((axes.xaxis, axes.yaxis)):
        values = [place[number] for place in places]
        low, high = min(values), max(values)
        if number and allowed <= NEAR * high:
            high = max(high, allowed)
        log = high > WIDE * low
        margin = (high / low) ** 0.08 if log else 0.08 * (high - low) or 0.1 * high
        ends = (low / margin, high * margin) if log else (max(0.0, low - margin), high + margin)
        (axes.set_ylim if number else axes.set_xlim)(*ends)
        if log:
            (axes.set_yscale if number else axes.set_xscale)("log")
            axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _staircase(axes: Axes, places: Sequence[tuple[float, float]], series: str) -> None:
    """What these plans reach: from each to the right, at its memory."""
    ordered = sorted(places)
    axes.step(*zip(*ordered, strict=True), where="post", color=series, linewidth=1.2, alpha=0.7)


def _dominated(axes: Axes, places: Sequence[tuple[float, float]], several: bool, hue: Hue) -> None:
    """All that is slower and takes more memory than a plan of the fewest devices."""
    ordered = sorted(places)
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    across = [*(x for x, _ in ordered), right]
    # One value more, for the right edge: a step reaches to the next point.
    up = [*(y for _, y in ordered), ordered[-1][1]]
    words = "dominated, with any number of devices" if several else "dominated"
    axes.fill_between(
        across, up, top, step="post", color=hue("grid"), alpha=0.45, linewidth=0, label=words
    )


def _allowed(axes: Axes, allowed: float, unit: str, hue: Hue) -> None:
    if allowed <= axes.get_ylim()[1]:
        axes.axhline(allowed, color=hue("wait"), linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate(
            f"allowed: {allowed:.3g} {unit}",
            (1.0, allowed),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=hue("wait"),
        )


def _ring(axes: Axes, place: tuple[float, float], words: str, room: LabelSide, hue: Hue) -> None:
    """Around the chosen plan, with what it is beside it."""
    axes.plot(
        *place,
        marker="o",
        markersize=15,
        markerfacecolor="none",
        markeredgecolor=hue("ink"),
        markeredgewidth=1.5,
        linestyle="none",
        zorder=5,
    )
    right, up = room
    axes.annotate(
        f"chosen: {words}",
        place,
        xytext=(16 if right else -16, 20 if up else -20),
        textcoords="offset points",
        ha="left" if right else "right",
        va="bottom" if up else "top",
        fontsize=9.5,
        color=hue("ink"),
        arrowprops={"arrowstyle": "-", "color": hue("muted"), "linewidth": 0.8, "shrinkB": 8},
        zorder=6,
    )


def _label_side(axes: Axes, places: Sequence[tuple[float, float]], best: int) -> LabelSide:
    """On which side of the chosen plan (right, up) a label hides the fewest marks."""
    spots = axes.transAxes.inverted().transform(axes.transData.transform(places))
    x, y = spots[best]

    def hidden(room: LabelSide) -> tuple[float, int]:
        left, bottom = (x if room[0] else x - _BOX[0]), (y if room[1] else y - _BOX[1])
        outside = max(0.0, -left, left + _BOX[0] - 1) + max(0.0, -bottom, bottom + _BOX[1] - 1)
        inside = (spots >= (left, bottom)) & (spots <= (left + _BOX[0], bottom + _BOX[1]))
        return outside, int(inside.all(axis=1).sum())

    return min(((right, up) for up in (True, False) for right in (True, False)), key=hidden)
