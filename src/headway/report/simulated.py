"""A simulated step as a picture: what ranks do, and what they hold; before and after a change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.report.canvas import NUM_SERIES, colour, draw, legend, plain_axes
from headway.report.lanes import MOST_RANKS, timeline_picture
from headway.report.stacked import stack
from headway.simulator.simulated import Account, Simulated
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (900, 240)


def picture(shown: Sequence[tuple[str, Simulated]], cap: float = 0.0) -> str:
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
        parts.append((f"{name}: memory of these ranks", memory_picture(step, name, cap)))
    return stack(parts)


def memory_picture(step: Simulated, name: str = "", cap: float = 0.0) -> str:
    """What each rank that was played holds, over the step; a line at `cap` where it is near."""
    accounts = step.accounts[:MOST_RANKS]

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

        axes = plain_axes(figure)
        for number, account in enumerate(accounts):
            times, sizes = _line(account, step.seconds)
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
            MultipleLocator(2.0 ** math.floor(math.log2(max(step.peak, 3.0) / 3)))
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(max(0.0, y))))
        legend(axes, columns=8)

    alt = "Memory of each rank over one step"
    return draw(f"memory {name}".strip(), _SIZE, paint, alt=alt)


def _line(account: Account, until: float) -> tuple[list[float], list[float]]:
    last = dict(account.curve)  # of one moment the last
    return [*last, until], [*last.values(), account.curve[-1][1]]
