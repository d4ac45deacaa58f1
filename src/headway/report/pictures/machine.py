"""The training of a support vector machine over its outer steps: violation, elimination, work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from headway.report.history.records import LoggedMachineStep, RunHistory
from headway.report.pictures.canvas import colour, draw, legend, plain_axes
from headway.report.pictures.training_curves import thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (400, 235)
MOST_MARKS = 12
"""Pairs of classes whose beginnings are marked; of more there would be nothing but marks."""

Steps = Sequence[LoggedMachineStep]


def machine_pictures(history: RunHistory) -> list[tuple[str, str]]:
    """Headings and pictures; none where no machine was trained."""
    steps = history.machine.steps
    if not steps:
        return []
    return [
        ("Violation", _violation(steps, history)),
        ("Active and eliminated samples", _shares(steps, history)),
        ("Support vectors", _support(steps, history)),
        ("Kernel values", _values(steps, history)),
    ]


def samples_of_pairs(steps: Steps) -> dict[int, int]:
    """Samples of each pair of classes: at its first step all of them are active."""
    found: dict[int, int] = {}
    for step in steps:
        found[step.pair] = max(found.get(step.pair, 0), step.active)
    return found


def values_so_far(steps: Steps) -> list[float]:
    """Kernel values of all pairs until each step."""
    before, last, pair, found = 0.0, 0.0, -1, []
    for step in steps:
        # A pair that is begun, or gone on with in another attempt, counts from 0.
        if step.pair != pair or step.values < last:
            before, pair = before + last, step.pair
        last = step.values if math.isfinite(step.values) else 0.0
        found.append(before + last)
    return found


def _violation(steps: Steps, history: RunHistory) -> str:
    points = [(s.step, s.violation) for s in steps if s.violation > 0]

    def paint(axes: Axes) -> None:
        axes.plot(*_columns(points), color=colour("series-0"), linewidth=1.6)
        if points:
            axes.set_yscale("log")
        axes.set_ylabel("violation")

    return _draw("violation", steps, history, paint, "Violation over the outer steps")


def _shares(steps: Steps, history: RunHistory) -> str:
    whole = samples_of_pairs(steps)
    active = [(s.step, 100 * s.active / max(whole[s.pair], 1)) for s in steps]

    def paint(axes: Axes) -> None:
        across, up = _columns(active)
        axes.fill_between(
            across, up, color=colour("series-2"), alpha=0.55, linewidth=0, label="active"
        )
        axes.fill_between(
            across, up, 100, color=colour("series-1"), alpha=0.35, linewidth=0, label="eliminated"
        )
        axes.set_ylim(0, 100)
        axes.set_ylabel("% of the samples")
        legend(axes)

    return _draw("eliminated", steps, history, paint, "Share of the samples that was eliminated")


def _support(steps: Steps, history: RunHistory) -> str:
    points = [(s.step, float(s.support)) for s in steps]

    def paint(axes: Axes) -> None:
        axes.plot(*_columns(points), color=colour("series-3"), linewidth=1.6)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("support vectors")

    return _draw("support", steps, history, paint, "Support vectors over the outer steps")


def _values(steps: Steps, history: RunHistory) -> str:
    points = list(zip([s.step for s in steps], values_so_far(steps), strict=True))

    def paint(axes: Axes) -> None:
        axes.plot(*_columns(points), color=colour("series-4"), linewidth=1.6)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("kernel values")

    return _draw("values", steps, history, paint, "Kernel values that were computed")


def _draw(
    name: str, steps: Steps, history: RunHistory, paint: Callable[[Axes], None], alt: str
) -> str:
    begun = [b.step for a, b in pairwise(steps) if a.pair != b.pair]

    def whole(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = plain_axes(figure)
        paint(axes)
        for step in begun if len(begun) < MOST_MARKS else ():
            axes.axvline(step, color=colour("grid"), linewidth=1)
        for attempt in history.restarts:
            axes.axvline(attempt.step, color=colour("muted"), linewidth=1, linestyle=(0, (2, 3)))
        axes.set_xlabel("outer step")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.margins(x=0.02)

    return draw(f"svm-{name}", SIZE, whole, alt=alt)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    kept = thin(points)
    return [step for step, _ in kept], [value for _, value in kept]
