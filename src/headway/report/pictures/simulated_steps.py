"""Simulated steps: timelines, memory, and gradient exchanges side by side.

`simulated_steps_svg` draws timeline and memory of a simulated plan, before and after a change.
`exchange_steps_svg` draws steps of several ways to exchange gradients on one time axis: computation
above, the link below, a black line at the end of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.collective.model.scheme_ranking import ExchangePrediction, GradientLayer
from headway.report.pictures.canvas import NUM_SERIES, colour, draw, legend, plain_axes, stack_svg
from headway.report.pictures.step_timeline import MOST_RANKS, kinds_legend, timeline_picture
from headway.simulator.exchange import simulate_exchange
from headway.simulator.simulation import RankBreakdown, SimulatedStep
from headway.timeline import Span
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MEMORY_SIZE = (900, 240)


def simulated_steps_svg(shown: Sequence[tuple[str, SimulatedStep]], cap: float = 0.0) -> str:
    """SVG text.

    Args:
        shown: (name, step), below each other.
        cap: Bytes of a device, as a line; 0: none.
    """
    parts = []
    for name, step in shown:
        drawn = timeline_picture(step.timeline)
        heading = f"{name}: a step of {format_seconds(step.seconds)}"
        if drawn is not None:
            parts.append((heading, drawn))
        parts.append((f"{name}: memory of these ranks", simulated_memory_svg(step, name, cap)))
    return stack_svg(parts)


def simulated_memory_svg(step: SimulatedStep, name: str = "", cap: float = 0.0) -> str:
    """What each rank that was played holds, over the step; a line at `cap` where it is near."""
    accounts = step.accounts[:MOST_RANKS]

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

        axes = plain_axes(figure)
        for number, account in enumerate(accounts):
            times, sizes = _memory_curve(account, step.seconds)
            axes.step(
                times,
                sizes,
                where="post",
                linewidth=1.4,
                color=colour(f"series-{number % NUM_SERIES}"),
                linestyle="-" if number < NUM_SERIES else "--",
                label=f"rank {account.rank}",
            )
        if 0 < cap < 2 * step.peak:
            axes.axhline(cap, color=colour("wait"), linewidth=1, linestyle=":", label="a device")
        axes.set_ylim(0, max(step.peak, 1.0) * 1.05)
        axes.set_xlim(0, step.seconds * 1.01 or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_seconds(max(0.0, x))))
        axes.yaxis.set_major_locator(
            # Powers of two are round numbers in binary units.
            MultipleLocator(2.0 ** math.floor(math.log2(max(step.peak, 3.0) / 3)))
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(max(0.0, y))))
        legend(axes, columns=8)

    alt = "Memory of each rank over one step"
    return draw(f"memory {name}".strip(), _MEMORY_SIZE, paint, alt=alt)


def _memory_curve(account: RankBreakdown, until: float) -> tuple[list[float], list[float]]:
    last = dict(account.curve)  # of one moment the last
    return [*last, until], [*last.values(), account.curve[-1][1]]


# A picture of some ways of exchanging: the steps of each, one under the other, on one time
# axis.


_WORDS = {"wait": "exposed communication", "exchange": "communication"}
_KINDS = ("forward", "backward", "wait", "exchange")
_ROW_HEIGHT = 2.6
"""Height of the two lanes of one exchange, and the gap to the next."""
_STEPS_SHOWN = 2
"""Steps of each."""


def exchange_steps_svg(
    shown: Sequence[tuple[str, ExchangePrediction]], layers: Sequence[GradientLayer]
) -> str:
    """SVG text: two steps of each exchange, in the steady state."""
    played = [_steady_state(predicted, layers) for _, predicted in shown]
    names = [
        f"{name}\n{format_seconds(step)} a step"
        for (name, _), (_, step) in zip(shown, played, strict=True)
    ]

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure, grid="x")
        for row, (spans, step) in enumerate(played):
            _exchange_row(axes, spans, row * _ROW_HEIGHT)
            for end in range(1, _STEPS_SHOWN + 1):
                top = row * _ROW_HEIGHT
                axes.plot([end * step] * 2, [top - 0.55, top + 1.55], color=colour("ink"))
        axes.set_yticks([row * _ROW_HEIGHT + 0.5 for row in range(len(shown))], names)
        axes.set_ylim(len(shown) * _ROW_HEIGHT - 1.1, -0.7)
        axes.set_xlim(0, _STEPS_SHOWN * max(step for _, step in played) * 1.005)
        _seconds_axis(axes)
        kinds_legend(axes, {kind: _WORDS.get(kind, kind) for kind in _KINDS}, len(_KINDS))

    alt = "Two steps of each way of exchanging: what is computed above, what is on the link below"
    return draw("exchange", (900, 90 + 62 * len(shown)), paint, alt=alt)


def _steady_state(
    predicted: ExchangePrediction, layers: Sequence[GradientLayer]
) -> tuple[list[tuple[Span, float, float]], float]:
    """Spans with their start and length in the picture, and the seconds of a step."""
    # One step more at either end: the first one does not yet overlap with one before it.
    simulated = simulate_exchange(predicted, layers, steps=_STEPS_SHOWN + 2)
    start, end = simulated.starts[1], simulated.starts[1 + _STEPS_SHOWN]
    found = []
    for span in simulated.timeline.spans:
        left, right = max(span.start, start), min(span.end, end)
        if right > left:
            found.append((span, left - start, right - left))
    return found, simulated.steps[1]


def _exchange_row(axes: Axes, spans: Sequence[tuple[Span, float, float]], top: float) -> None:
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
