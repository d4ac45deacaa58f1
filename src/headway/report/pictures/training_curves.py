"""Loss, throughput, learning rate, gradient norm and memory over the steps.

Long runs are thinned to the minimum and maximum of each stretch, so that a picture's size does not
grow with the run; a smoothed line is drawn over noisy values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from headway.report.history.records import RunHistory
from headway.report.pictures.canvas import NUM_SERIES, colour, draw, legend, plain_axes
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SIZE = (400, 235)
_MANY = 60
"""From so many points on, the raw values step back behind a smoothed line."""
_LIMIT = 500
"""Most points of one line."""
_LOG_SPREAD = 20.0
"""From this ratio of largest to smallest value on, the axis is logarithmic."""

Points = Sequence[tuple[int, float]]


def smooth(points: Points) -> list[tuple[int, float]]:
    """Mean over about 1/40 of the points around each; a one-sided mean would lag behind a fall.

    The window shrinks towards both ends and stays centred, so that a straight line stays one.
    """
    half = max(1, len(points) // 80)
    # Running sums: a window costs two look-ups, however wide it is.
    sums = [0.0, *accumulate(value for _, value in points)]
    smoothed = []
    for place, (step, _) in enumerate(points):
        reach = min(half, place, len(points) - 1 - place)
        total = sums[place + reach + 1] - sums[place - reach]
        smoothed.append((step, total / (2 * reach + 1)))
    return smoothed


def thin(points: Points, limit: int = _LIMIT) -> list[tuple[int, float]]:
    """At most `limit` points: the smallest and the largest of each stretch, and both ends."""
    if len(points) <= limit:
        return list(points)
    stretches = max(1, limit // 2 - 1)
    inner = points[1:-1]
    chosen = [points[0]]
    for number in range(stretches):
        stretch = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        low, high = (pick(stretch, key=lambda point: point[1]) for pick in (min, max))
        # A set, because in a stretch of one value both are the same point.
        chosen += sorted({low, high})
    return [*chosen, points[-1]]


def loss_picture(history: RunHistory) -> str | None:
    """Training loss of every step, smoothed where there are many, and validation loss."""
    losses = _finite((step.step, step.loss) for step in history.steps)
    validation = _finite((entry.step, entry.loss) for entry in history.validations)
    if not losses and not validation:
        return None

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure)
        _noisy(axes, losses, "training", colour("series-0"))
        if validation:
            axes.plot(
                *_columns(validation),
                color=colour("series-1"),
                marker="o",
                markersize=4,
                linewidth=1.4,
                label="validation",
            )
        _mark_restarts(axes, history)
        _finish(axes, "loss", [value for _, value in (*losses, *validation)])

    return draw("loss", SIZE, paint, alt="Training and validation loss over the steps")


MOST_METRICS = 6
"""Metrics that have a picture; the last value of all of them is among the facts."""


def metric_pictures(history: RunHistory) -> list[tuple[str, str | None]]:
    """For each metric of the validations its name, and its values where there are two or more."""
    names = dict.fromkeys(name for entry in history.validations for name in entry.metrics)
    chosen = list(names)[:MOST_METRICS]
    return [(name, _metric_picture(history, n, name)) for n, name in enumerate(chosen)]


def _metric_picture(history: RunHistory, number: int, name: str) -> str | None:
    points = _finite(
        (entry.step, entry.metrics.get(name, math.nan)) for entry in history.validations
    )
    if len(points) < 2:
        return None

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure)
        axes.plot(*_columns(points), color=colour("series-1"), marker="o", markersize=4, label=name)
        _mark_restarts(axes, history)
        _finish(axes, name, [])

    return draw(f"metric-{number}", SIZE, paint, alt=f"{name} of the validations over the steps")


def throughput_picture(history: RunHistory) -> str | None:
    """Samples per second of every step."""
    points = _finite((step.step, step.rate) for step in history.steps)
    if not points:
        return None

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure)
        _noisy(axes, points, "samples/s", colour("series-2"))
        _mark_restarts(axes, history)
        _finish(axes, "samples/s", [])
        axes.set_ylim(bottom=0)

    return draw("throughput", SIZE, paint, alt="Samples per second over the steps")


def rate_picture(history: RunHistory) -> str | None:
    """The learning rate, where it changes."""
    points = _finite((step.step, step.lr) for step in history.steps)
    if len({value for _, value in points}) < 2:
        return None

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter

        axes = plain_axes(figure)
        axes.plot(*_columns(thin(points)), color=colour("series-3"), linewidth=1.6)
        _finish(axes, "learning rate", [])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))

    return draw("lr", SIZE, paint, alt="Learning rate over the steps")


def norm_picture(history: RunHistory) -> str | None:
    """The global norm of the gradients before clipping, where it was measured."""
    points = _finite((step.step, step.norm) for step in history.steps)
    if not points:
        return None

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure)
        _noisy(axes, points, "gradient norm", colour("series-4"))
        _finish(axes, "gradient norm", [value for _, value in points])

    return draw("norm", SIZE, paint, alt="Global norm of the gradients over the steps")


def exposed_picture(history: RunHistory) -> str | None:
    """Exposed communication of every step, where there was an exchange."""
    points = _finite((step.step, step.exposed) for step in history.steps)
    if not points:
        return None

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter

        axes = plain_axes(figure)
        _noisy(axes, points, "exposed", colour("wait"))
        _mark_restarts(axes, history)
        _finish(axes, "exposed", [])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))

    return draw("exposed", SIZE, paint, alt="Exposed communication over the steps")


def memory_picture(history: RunHistory) -> str | None:
    """Memory of each rank over the steps; of many ranks, the range and the middle."""
    lines = {
        rank: _finite((step.step, step.memory_bytes) for step in steps)
        for rank, steps in history.rank_steps.items()
    }
    lines = {rank: points for rank, points in sorted(lines.items()) if points}
    if not lines:
        return None

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter, MultipleLocator

        axes = plain_axes(figure)
        _rank_lines(axes, lines)
        _finish(axes, "memory", [])
        top = 1.1 * max(value for points in lines.values() for _, value in points)
        axes.set_ylim(0, top or 1)
        axes.yaxis.set_major_locator(MultipleLocator(_binary_interval(top or 1)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))

    return draw("memory", SIZE, paint, alt="Memory of each rank over the steps")


def _rank_lines(axes: Axes, lines: Mapping[int, Points]) -> None:
    if len(lines) <= NUM_SERIES:
        for number, (rank, points) in enumerate(lines.items()):
            # Ranks often hold the same amount: later lines are dashed so that none is hidden.
            axes.plot(
                *_columns(thin(points)),
                color=colour(f"series-{number}"),
                linewidth=1.8,
                linestyle="-" if number == 0 else (2 * number, (4, 4)),
                label=f"rank {rank}",
            )
        return
    values: dict[int, list[float]] = {}
    for points in lines.values():
        for step, value in points:
            values.setdefault(step, []).append(value)
    steps = sorted(values)[:: max(1, len(values) // _LIMIT)]
    axes.fill_between(
        steps,
        [min(values[step]) for step in steps],
        [max(values[step]) for step in steps],
        color=colour("series-0"),
        alpha=0.25,
        linewidth=0,
        label=f"range of {len(lines)} ranks",
    )
    middle = [sorted(values[step])[len(values[step]) // 2] for step in steps]
    axes.plot(steps, middle, color=colour("series-0"), linewidth=1.6, label="median")


def _binary_interval(top: float) -> float:
    """A power of two that cuts 0..top into 3 to 5 parts."""
    return float(2 ** math.ceil(math.log2(top / 5)))


def _noisy(axes: Axes, points: Points, label: str, line: str) -> None:
    if not points:
        return
    if len(points) < _MANY:
        marker = "o" if len(points) < 3 else ""
        axes.plot(
            *_columns(points), color=line, linewidth=1.6, marker=marker, markersize=4, label=label
        )
        return
    axes.plot(*_columns(thin(points)), color=line, linewidth=0.8, alpha=0.35)
    axes.plot(*_columns(thin(smooth(points))), color=line, linewidth=1.8, label=label)


def _mark_restarts(axes: Axes, history: RunHistory) -> None:
    for number, attempt in enumerate(history.restarts):
        axes.axvline(
            attempt.step,
            color=colour("muted"),
            linewidth=1,
            linestyle=(0, (2, 3)),
            label="restart" if number == 0 else None,
        )


def _finish(axes: Axes, label: str, values: Sequence[float]) -> None:
    """Axes and legend; `values`, where given, decide between a linear and a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(x=0.02)
    if values and min(values) > 0 and max(values) / min(values) > _LOG_SPREAD:
        axes.set_yscale("log")
        decades = math.log10(max(values) / min(values))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 3 else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1 or (labels and labels != [label]):
        legend(axes)


def _finite(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
