"""Pipeline schedules by time: a row per rank, a block of rows per schedule.

All blocks share one time axis, so that their ends can be compared; pale ground is idle time. A step
that is much longer than most is cut off at the right, and its title says so. Pipes in the second
direction have colours of their own.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headway.report.pictures.canvas import Hue, colour, draw, draw_png, legend
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule
from headway.schedule.timing import ScheduleTiming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch


_WIDTH = 900
_TALL, _FLAT = 20.0, 7.0
"""Points per row where there are few, with numbers, and where there are many."""
_FEW = 24
_GAP = 1.4
"""Rows between two schedules."""
_BAR = 0.88
_LETTER = 6.5
"""Points that a digit needs."""
_MARGIN = 130
_OUTLIER = 1.6
"""Times the median: no step is shown for longer."""
_KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "backward",
    ActionKind.WEIGHT_GRAD: "weight gradient",
}
_COLOURS = {
    ("forward", False): "forward",
    ("backward", False): "backward",
    ("forward", True): "data",
    ("backward", True): "series-1",
    ("weight gradient", False): "exchange",
    ("weight gradient", True): "series-6",
}
_ORDER = tuple(_COLOURS)


class TimedSchedule(Protocol):
    """What can be drawn: a table, when its actions start and end, and what is written beside it."""

    @property
    def schedule(self) -> PipelineSchedule: ...

    @property
    def timing(self) -> ScheduleTiming: ...

    @property
    def title(self) -> str: ...


class _Bar(NamedTuple):
    """An action of compute in the picture; `later`: not the first stage of its pipe here."""

    action: Action
    row: float
    start: float
    length: float
    later: bool

    @property
    def style(self) -> tuple[str, bool]:
        return _KINDS[self.action.kind], self.action.pipe.startswith("u")


def schedule_svg(shown: Sequence[TimedSchedule], unit: str = "") -> str:
    """SVG text of one schedule, or of several below each other."""
    names = ", ".join(found.title.partition("\n")[0] for found in shown)
    alt = f"What each rank of the pipeline does when: {names}"

    return draw(
        "schedules", _size(shown), lambda figure: _paint(figure, shown, colour, unit), alt=alt
    )


def schedule_png(shown: Sequence[TimedSchedule]) -> bytes:
    """The same as PNG, at two pixels a point."""
    return draw_png(_size(shown), lambda figure, hue: _paint(figure, shown, hue))


def _is_small(shown: Sequence[TimedSchedule]) -> bool:
    return sum(found.schedule.ranks for found in shown) <= _FEW


def _size(shown: Sequence[TimedSchedule]) -> tuple[int, int]:
    rows = sum(found.schedule.ranks + _GAP for found in shown)
    return _WIDTH, round(70 + rows * (_TALL if _is_small(shown) else _FLAT))


def _paint(figure: Figure, shown: Sequence[TimedSchedule], hue: Hue, unit: str = "") -> None:
    axes = _axes(figure, hue)
    until = _until(shown)
    bars: list[_Bar] = []
    ticks: list[tuple[float, str]] = []
    top = 0.0
    for found in shown:
        ranks = found.schedule.ranks
        _ground(axes, found, top, hue)
        bars += _bars(found, top)
        if len(shown) == 1:
            ticks += [(top + rank, f"P{rank}") for rank in range(ranks)]
        else:
            cut = ", cut off" if found.timing.makespan > until else ""
            ticks.append((top + (ranks - 1) / 2, found.title + cut))
        top += ranks + _GAP
    _draw_bars(axes, bars, hue)
    if _is_small(shown):
        _write_numbers(axes, [bar for bar in bars if bar.start < until], until, hue)
    if unit:
        axes.set_xlabel(unit, color=hue("muted"))
    elif len(shown) == 1:
        axes.set_xlabel(shown[0].title.replace("\n", ": "), color=hue("ink"))
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks])
    # Downwards, so that rank 0 is at the top.
    axes.set_ylim(top - _GAP - 0.4, -0.6)
    axes.set_xlim(0, until * 1.005)
    _legend(axes, bars, hue)


def _until(shown: Sequence[TimedSchedule]) -> float:
    """Where the picture ends."""
    steps = [found.timing.makespan for found in shown]
    return min(max(steps), _OUTLIER * statistics.median(steps)) or 1.0


def _axes(figure: Figure, hue: Hue) -> Axes:
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, labelcolor=hue("ink"), labelsize=9)
    return axes


def _ground(axes: Axes, found: TimedSchedule, top: float, hue: Hue) -> None:
    """The time from start to end of the step, for each rank."""
    for rank in range(found.schedule.ranks):
        span = [(0.0, found.timing.makespan)]
        axes.broken_barh(span, (top + rank - _BAR / 2, _BAR), facecolor=hue("grid"), linewidth=0)


def _bars(found: TimedSchedule, top: float) -> list[_Bar]:
    timing, schedule = found.timing, found.schedule
    bars = []
    for rank, row in enumerate(timing.order):
        first: dict[str, int] = {}
        for pipe, stage in schedule.hosted(rank):
            first[pipe] = min(stage, first.get(pipe, stage))
        for action, start, end in zip(row, timing.starts[rank], timing.ends[rank], strict=True):
            if action.kind in _KINDS and end > start:
                later = action.stage != first[action.pipe]
                bars.append(_Bar(action, top + rank, start, end - start, later))
    return bars


def _draw_bars(axes: Axes, bars: Sequence[_Bar], hue: Hue) -> None:
    """One collection per row and colour; later stages of a rank are paler."""
    groups: dict[tuple[float, tuple[str, bool], bool], list[_Bar]] = defaultdict(list)
    for bar in bars:
        groups[bar.row, bar.style, bar.later].append(bar)
    for (row, style, later), group in groups.items():
        axes.broken_barh(
            [(bar.start, bar.length) for bar in group],
            (row - _BAR / 2, _BAR),
            facecolor=hue(_COLOURS[style]),
            edgecolor=hue("card"),
            linewidth=0.5,
            alpha=0.65 if later else 1.0,
        )


def _write_numbers(axes: Axes, bars: Sequence[_Bar], until: float, hue: Hue) -> None:
    """Micro-batches, where there is room."""
    points = (_WIDTH - _MARGIN) / until
    for bar in bars:
        text = str(bar.action.microbatch)
        if bar.length * points >= _LETTER * len(text) + 3:
            axes.text(
                bar.start + bar.length / 2,
                bar.row,
                text,
                ha="center",
                va="center_baseline",
                fontsize=9,
                color=hue("card"),
            )


def _legend(axes: Axes, bars: Sequence[_Bar], hue: Hue) -> None:
    styles = {bar.style for bar in bars}
    both = any(up for _, up in styles)
    whole = any(bar.action.kind == ActionKind.BACKWARD for bar in bars)
    split = any(bar.action.kind == ActionKind.INPUT_GRAD for bar in bars)
    words = {"backward": "backward" if whole else "input gradient"}
    if whole and split:
        words["backward"] = "backward or input gradient"
    handles = []
    for kind, up in _ORDER:
        if (kind, up) in styles:
            direction = f", {'up' if up else 'down'}" if both else ""
            handles.append(_patch(hue(_COLOURS[kind, up]), words.get(kind, kind) + direction))
    legend(
        axes,
        columns=4 if both and whole and split else 7,
        hue=hue,
        handles=[*handles, _patch(hue("grid"), "idle")],
        columnspacing=1.0,
        fontsize=9,
    )


def _patch(hue: str, label: str) -> Patch:
    from matplotlib.patches import Patch

    return Patch(color=hue, label=label)
