"""Frameworks side by side: time of a step, learning by samples and by seconds, and other costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.report.pictures.canvas import NUM_SERIES, colour, draw, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (760, 340)
_MARKS = ("o", "s", "D", "^", "v", "P", "X")
_DASHES = ("solid", "dashed", "dotted", "dashdot")


@dataclass(frozen=True, kw_only=True)
class FrameworkPoint:
    """What is drawn of one framework on one number of processes.

    Attributes:
        step: Seconds: median, lowest and highest of the rounds.
        losses: By step.
        times: Seconds of training at the end of each step.
        costs: Name -> number, for the bars; None: not known.
    """

    framework: str
    processes: int
    batch: int
    step: tuple[float, float, float]
    losses: tuple[float, ...]
    times: tuple[float, ...]
    costs: Mapping[str, float | None]


def time_picture(points: Sequence[FrameworkPoint]) -> str:
    """Seconds of a step by number of processes, with the interval of the rounds; samples/s."""
    return draw(
        "compare-time",
        SIZE,
        lambda figure: _time(figure, points),
        alt="Time of a step by framework",
    )


def learning_picture(points: Sequence[FrameworkPoint]) -> str:
    """The loss by samples and by seconds, on the most processes."""
    return draw(
        "compare-learning",
        SIZE,
        lambda figure: _learning(figure, points),
        alt="Loss by samples and by seconds",
    )


def cost_picture(points: Sequence[FrameworkPoint]) -> str:
    """Memory, bytes, processor seconds and lines of each framework, on the most processes."""
    return draw(
        "compare-costs", SIZE, lambda figure: _costs(figure, points), alt="Costs by framework"
    )


def _most(points: Sequence[FrameworkPoint]) -> list[FrameworkPoint]:
    most = max(point.processes for point in points)
    return [point for point in points if point.processes == most]


@dataclass(frozen=True)
class _Look:
    """How a framework is drawn: colours repeat, marks and dashes then differ."""

    hue: str
    mark: str
    dash: str


def _looks(points: Sequence[FrameworkPoint]) -> dict[str, _Look]:
    found = {}
    for number, name in enumerate(dict.fromkeys(point.framework for point in points)):
        again, hue = divmod(number, NUM_SERIES)
        mark, dash = _MARKS[again % len(_MARKS)], _DASHES[again % len(_DASHES)]
        found[name] = _Look(colour(f"series-{hue}"), mark, dash)
    return found


def _time(figure: Figure, points: Sequence[FrameworkPoint]) -> None:
    left, right = _pair(figure)
    looks = _looks(points)
    counts = sorted({point.processes for point in points})
    for number, (name, look) in enumerate(looks.items()):
        own = [point for point in points if point.framework == name]
        # Beside each other, so that no interval hides another.
        places = [
            counts.index(point.processes) + 0.5 * (number / max(1, len(looks) - 1) - 0.5)
            for point in own
        ]
        values = [point.step[0] for point in own]
        errors = (
            [point.step[0] - point.step[1] for point in own],
            [point.step[2] - point.step[0] for point in own],
        )
        style: dict[str, Any] = {"color": look.hue, "markersize": 5, "label": name}
        left.errorbar(places, values, yerr=errors, fmt=look.mark, linewidth=1.5, **style)
        right.plot(places, [p.batch / p.step[0] for p in own], look.mark, linestyle="none", **style)
    for axes, title in ((left, "seconds of a step"), (right, "samples per second")):
        axes.set_ylabel(title, color=colour("muted"))
        axes.set_xlabel("processes", color=colour("muted"))
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_xlim(-0.5, len(counts) - 0.5)
        axes.set_ylim(bottom=0)
    _shared_legend(figure, left)


def _learning(figure: Figure, points: Sequence[FrameworkPoint]) -> None:
    left, right = _pair(figure)
    looks = _looks(points)
    for point in _most(points):
        samples = [point.batch * (n + 1) for n in range(len(point.losses))]
        line: dict[str, Any] = {
            "color": looks[point.framework].hue,
            "linestyle": looks[point.framework].dash,
            "linewidth": 1.2,
            "label": point.framework,
        }
        left.plot(samples, point.losses, **line)
        right.plot(point.times, point.losses, **line)
    left.set_xlabel("samples", color=colour("muted"))
    right.set_xlabel("seconds behind the first step", color=colour("muted"))
    for axes in (left, right):
        axes.set_ylabel("loss", color=colour("muted"))
    _shared_legend(figure, left)


def _costs(figure: Figure, points: Sequence[FrameworkPoint]) -> None:
    most, looks = _most(points), _looks(points)
    kinds = list(most[0].costs)
    names = [point.framework for point in most]
    for number, kind in enumerate(kinds):
        axes = plain_axes(figure, place=(1, len(kinds), number + 1), grid="x")
        values = [point.costs[kind] or 0.0 for point in most]
        axes.barh(range(len(most)), values, color=[looks[name].hue for name in names], height=0.7)
        axes.set_yticks(range(len(most)), names if number == 0 else [""] * len(most))
        axes.invert_yaxis()
        axes.set_xlabel(kind, color=colour("muted"))


def _pair(figure: Figure) -> tuple[Axes, Axes]:
    return plain_axes(figure, place=(1, 2, 1)), plain_axes(figure, place=(1, 2, 2))


def _shared_legend(figure: Figure, axes: Axes) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper left",
        ncols=6,
        frameon=False,
        labelcolor=colour("ink"),
        handlelength=1.8,
        columnspacing=1.2,
    )
