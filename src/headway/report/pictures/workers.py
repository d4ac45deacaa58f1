"""Workers that do not agree at every step: staleness, waits, speed, distance and loss of each.

Losses of workers are of their own samples; they are drawn over the samples that all workers have
made until then, and over time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headway.report.pictures.canvas import NUM_SERIES, colour, draw, legend, plain_axes
from headway.report.pictures.training_curves import smooth, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (400, 235)
MOST_LINES = NUM_SERIES
"""Of workers with a line of their own; of more, every so many are drawn."""

Points = Sequence[tuple[float, float]]


def staleness_picture(counts: Mapping[int, Counter[int]]) -> str | None:
    """How many pushes of each worker were how stale: worker -> updates -> pushes."""
    if not any(counts.values()):
        return None
    most = max(max(found) for found in counts.values() if found)

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = plain_axes(figure)
        below = [0] * (most + 1)
        for number, (worker, found) in enumerate(counts.items()):
            heights = [found[stale] for stale in range(most + 1)]
            hue = colour(f"series-{number % NUM_SERIES}")
            label = f"worker {worker}" if number < MOST_LINES else None
            axes.bar(range(most + 1), heights, bottom=below, width=0.8, color=hue, label=label)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axes.set_xlabel("updates since the version that was read")
        axes.set_ylabel("pushes")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        legend(axes)

    return draw("staleness", SIZE, paint, alt="Staleness of the pushes of each worker")


def waits_picture(waits: Mapping[int, Mapping[str, float]]) -> str | None:
    """The share of each worker's time in which it waited, by cause: worker -> cause -> share."""
    causes = list(dict.fromkeys(cause for found in waits.values() for cause in found))
    if not causes:
        return None

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure, grid="x")
        workers = list(waits)
        left = [0.0] * len(workers)
        for number, cause in enumerate(causes):
            widths = [100 * waits[worker].get(cause, 0.0) for worker in workers]
            hue = colour(f"series-{number % NUM_SERIES}")
            axes.barh(range(len(workers)), widths, left=left, height=0.7, color=hue, label=cause)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(workers)), [f"worker {worker}" for worker in workers])
        axes.invert_yaxis()
        axes.set_xlabel("% of its time")
        legend(axes)

    return draw("worker-waits", SIZE, paint, alt="What each worker waited for")


def lines_picture(
    name: str, lines: Mapping[int, Points], *, across: str, up: str, smoothed: bool = False
) -> str | None:
    """A line for each worker.

    Args:
        name: Of the picture; see `canvas.draw`.
        across: What the first number of a point is, and `up` the second.
    """
    kept = {
        worker: [point for point in points if math.isfinite(point[1])]
        for worker, points in lines.items()
    }
    kept = {worker: points for worker, points in kept.items() if points}
    if not kept:
        return None
    every = -(-len(kept) // MOST_LINES)

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure)
        for number, (worker, points) in enumerate(list(kept.items())[::every]):
            _line(axes, points, f"worker {worker}", colour(f"series-{number}"), smoothed=smoothed)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.margins(x=0.02)
        legend(axes)

    return draw(name, SIZE, paint, alt=f"{up} of each worker, by {across}")


def _line(axes: Axes, points: Points, label: str, hue: str, *, smoothed: bool) -> None:
    # Thinned by number: what stands across may not be whole.
    numbered = [(place, value) for place, (_, value) in enumerate(points)]
    shown = thin(smooth(numbered) if smoothed else numbered)
    axes.plot(
        [points[place][0] for place, _ in shown],
        [value for _, value in shown],
        color=hue,
        linewidth=1.4,
        marker="o" if len(points) < 3 else "",
        markersize=4,
        label=label,
    )
