"""A study of batch sizes and rates: steps over the batch, the best rate, and every run's steps.

Below the fitted critical batch lies the region of perfect scaling, in which a doubled batch halves
the steps; its interval is shaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from headway.cost.batch_scaling import BatchScaling
from headway.report.pictures.canvas import (
    NUM_SERIES,
    colour,
    draw,
    legend,
    plain_axes,
    stack_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (560, 300)


def study_svg(found: BatchScaling) -> str | None:
    """All pictures below each other, a file of its own; None where no run reached the target."""
    pictures = list(study_pictures(found))
    return stack_svg(pictures) if pictures else None


def study_pictures(found: BatchScaling) -> Iterator[tuple[str, str]]:
    """Heading and SVG of each picture."""
    if not any(one.best for one in found.batches):
        return
    yield (
        "Steps to the target, with the best rate of each batch",
        draw("study-steps", SIZE, lambda figure: _steps(figure, found), alt="Steps over the batch"),
    )
    yield (
        "Best learning rate",
        draw("study-rates", SIZE, lambda figure: _best(figure, found), alt="Rate over the batch"),
    )
    yield (
        "Steps to the target, over the rate",
        draw("study-grid", SIZE, lambda figure: _grid(figure, found), alt="Steps over the rate"),
    )


def _steps(figure: Figure, found: BatchScaling) -> None:
    axes = _logarithmic(figure, "batch, samples", "steps")
    points = [(one.batch, one.best.steps) for one in found.batches if one.best]
    batches = np.geomspace(points[0][0] / 1.2, points[-1][0] * 1.2, 100)
    critical = found.critical
    if critical is not None:
        low, high = max(critical.low, batches[0]), min(critical.high, batches[-1])
        if low < high:
            axes.axvspan(
                low, high, color=colour("grid"), alpha=0.6, linewidth=0, label="B_crit, 95 %"
            )
        if batches[0] <= critical.value <= batches[-1]:
            axes.axvline(critical.value, color=colour("muted"), linestyle=(0, (4, 3)))
        axes.plot(
            batches,
            found.min_steps * (1 + critical.value / batches),
            color=colour("series-0"),
            label="S_min (1 + B_crit / B)",
        )
    axes.plot(
        batches,
        points[0][1] * points[0][0] / batches,
        color=colour("muted"),
        linewidth=1,
        linestyle=(0, (1, 3)),
        label="halved by each doubling",
    )
    axes.plot(*zip(*points, strict=True), "o", color=colour("series-1"), label="measured")
    axes.set_ylim(min(s for _, s in points) / 1.3, max(s for _, s in points) * 1.3)
    _batch_ticks(axes, found)
    legend(axes, columns=4, fontsize=9)


def _best(figure: Figure, found: BatchScaling) -> None:
    axes = _logarithmic(figure, "batch, samples", "learning rate")
    inside = [one for one in found.batches if one.best and not one.edge]
    outside = [one for one in found.batches if one.best and one.edge]
    if found.exponent is not None:
        batches = np.geomspace(inside[0].batch, inside[-1].batch, 50)
        p = found.exponent
        axes.plot(
            batches,
            found.factor * batches**p.value,
            color=colour("series-0"),
            label=f"batch^{p.value:.2f}",
        )
    if inside:
        first = inside[0]
        sizes = np.array([first.batch, found.batches[-1].batch])
        for name, power, dots in (("linear", 1.0, (0, (1, 3))), ("square root", 0.5, (0, (4, 3)))):
            axes.plot(
                sizes,
                first.optimum * (sizes / first.batch) ** power,
                color=colour("muted"),
                linewidth=1,
                linestyle=dots,
                label=name,
            )
        for one in inside:
            # The grid knows no rate better than half a step to each side.
            axes.plot(
                [one.batch] * 2,
                [one.optimum * math.exp(side * one.spacing / 2) for side in (-1, 1)],
                color=colour("series-1"),
                linewidth=1.5,
            )
        axes.plot(
            [one.batch for one in inside],
            [one.optimum for one in inside],
            "o",
            color=colour("series-1"),
            label="best",
        )
    if outside:
        axes.plot(
            [one.batch for one in outside],
            [one.optimum for one in outside],
            "x",
            color=colour("wait"),
            label="at the grid's edge",
        )
    _batch_ticks(axes, found)
    legend(axes, columns=5, fontsize=9)


def _grid(figure: Figure, found: BatchScaling) -> None:
    axes = _logarithmic(figure, "learning rate", "steps")
    for number, batch in enumerate(found.batches):
        points = [(one.rate, one.steps) for one in batch.rates if math.isfinite(one.steps)]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                "o-",
                markersize=4,
                linewidth=1.2,
                color=colour(f"series-{number % NUM_SERIES}"),
                label=f"batch {batch.batch}",
            )
    legend(axes, columns=6, fontsize=9)


def _logarithmic(figure: Figure, x: str, y: str) -> Axes:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes = plain_axes(figure)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x, color=colour("muted"))
    axes.set_ylabel(y, color=colour("muted"))
    axes.tick_params(which="minor", length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    return axes


def _batch_ticks(axes: Axes, found: BatchScaling) -> None:
    sizes = [one.batch for one in found.batches]
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_xticks([], minor=True)
