"""A picture of some ways of exchanging: the steps of each, one under the other, on one time axis.

Drawn from what the simulator plays, with the report's colours. Above what is computed, below what
is on the link; a black line ends a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.collective.predict import Layer, Predicted
from headway.report.canvas import colour, draw, legend, plain_axes
from headway.simulator import simulate_exchange
from headway.timeline import Span
from headway.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WORDS = {"wait": "exposed communication", "exchange": "communication"}
_KINDS = ("forward", "backward", "wait", "exchange")
_ROW = 2.6
"""Height of the two lanes of one exchange, and the gap to the next."""
_SHOWN = 2
"""Steps of each."""


def steps_picture(shown: Sequence[tuple[str, Predicted]], layers: Sequence[Layer]) -> str:
    """SVG text: two steps of each exchange, in the steady state.

    Args:
        shown: Name and prediction of each.
        layers: As they were priced.
    """
    played = [_steady(predicted, layers) for _, predicted in shown]
    names = [
        f"{name}\n{format_seconds(step)} a step"
        for (name, _), (_, step) in zip(shown, played, strict=True)
    ]

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure, grid="x")
        for row, (spans, step) in enumerate(played):
            _row(axes, spans, row * _ROW)
            for end in range(1, _SHOWN + 1):
                top = row * _ROW
                axes.plot([end * step] * 2, [top - 0.55, top + 1.55], color=colour("ink"))
        axes.set_yticks([row * _ROW + 0.5 for row in range(len(shown))], names)
        axes.set_ylim(len(shown) * _ROW - 1.1, -0.7)
        axes.set_xlim(0, _SHOWN * max(step for _, step in played) * 1.005)
        _seconds_axis(axes)
        for kind in _KINDS:
            axes.barh(0, 0, color=colour(kind), label=_WORDS.get(kind, kind))
        legend(axes, columns=len(_KINDS))

    alt = "Two steps of each way of exchanging: what is computed above, what is on the link below"
    return draw("exchange", (900, 90 + 62 * len(shown)), paint, alt=alt)


def _steady(
    predicted: Predicted, layers: Sequence[Layer]
) -> tuple[list[tuple[Span, float, float]], float]:
    """Spans with their start and length in the picture, and the seconds of a step."""
    simulated = simulate_exchange(predicted, layers, steps=_SHOWN + 2)
    start, end = simulated.starts[1], simulated.starts[1 + _SHOWN]
    found = []
    for span in simulated.timeline.spans:
        left, right = max(span.start, start), min(span.end, end)
        if right > left:
            found.append((span, left - start, right - left))
    return found, simulated.steps[1]


def _row(axes: Axes, spans: Sequence[tuple[Span, float, float]], top: float) -> None:
    for kind in _KINDS:
        bars = [(left, width) for span, left, width in spans if span.kind == kind]
        if bars:
            axes.broken_barh(
                bars,
                (top - 0.41 + (kind == "exchange"), 0.82),
                facecolor=colour(kind),
                edgecolor=colour("card"),
                linewidth=0.4,
            )


def _seconds_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(max(0.0, value))))
