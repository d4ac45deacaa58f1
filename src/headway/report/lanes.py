"""Pictures of where a step's time goes: its timeline per rank, and the shares of all steps.

Exposed communication (a wait on the compute lane) has the loudest colour: it is what a better plan
would remove.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.report.canvas import colour, draw, legend, plain_axes
from headway.report.records import RankStep, RunHistory
from headway.timeline import KINDS, LANES, Span, Timeline
from headway.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 16
"""Most ranks in one picture; timeline.json has all of them."""
_MOST_SPANS = 3000
_WORDS: Mapping[str, str] = {
    "wait": "exposed communication",
    "exchange": "communication",
    "data": "data wait",
}
PARTS = ("compute", "exposed", "data", "update", "other")
_PART_COLOURS: Mapping[str, str] = {
    "compute": "forward",
    "exposed": "wait",
    "data": "data",
    "update": "update",
    "other": "other",
}
_PART_WORDS: Mapping[str, str] = {"exposed": "exposed communication", "data": "data wait"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Mean seconds of one rank's step and of its parts; the parts add up to the step.

    Attributes:
        rank: Whose.
        steps: Over how many steps.
        seconds: Of the whole step.
        parts: One of PARTS -> seconds.
    """

    rank: int
    steps: int
    seconds: float
    parts: Mapping[str, float]


def shares(history: RunHistory) -> tuple[Shares, ...]:
    """Where each rank's time went; the first step of every attempt is left out as warm-up."""
    warm_up = {attempt.step + 1 for attempt in history.attempts}
    found = []
    for rank, steps in sorted(history.rank_steps.items()):
        timed = [step for step in steps if step.seconds > 0]
        warm = [step for step in timed if step.step not in warm_up] or timed
        if warm:
            found.append(_mean(rank, warm))
    return tuple(found)


def _mean(rank: int, steps: Sequence[RankStep]) -> Shares:
    total = sum(step.seconds for step in steps) / len(steps)
    parts = {part: sum(getattr(step, part) for step in steps) / len(steps) for part in PARTS[:-1]}
    parts["other"] = max(0.0, total - sum(parts.values()))
    return Shares(rank=rank, steps=len(steps), seconds=total, parts=parts)


def chosen_ranks(ranks: Sequence[int]) -> list[int]:
    """At most MOST_RANKS of them, evenly over the whole."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    return [ranks[i * (len(ranks) - 1) // (MOST_RANKS - 1)] for i in range(MOST_RANKS)]


def representative_step(history: RunHistory) -> int | None:
    """The traced step of middle duration that has spans of most ranks; warm-up is left out."""
    traces = history.traces
    if not traces:
        return None
    most = max(len(trace.ranks) for trace in traces.values())
    complete = [step for step, trace in traces.items() if len(trace.ranks) == most]
    warm_up = {attempt.step + 1 for attempt in history.attempts}
    warm = [step for step in complete if step not in warm_up] or complete
    ordered = sorted(warm, key=lambda step: (_length(traces[step]), step))
    return ordered[(len(ordered) - 1) // 2]


def _length(trace: Timeline) -> float:
    """Seconds of the step itself: a checkpoint may be written long after it."""
    spans = [span for span in trace.spans if span.lane == "compute"] or list(trace.spans)
    return max(span.end for span in spans) - min(span.start for span in spans)


def timeline_picture(trace: Timeline) -> str | None:
    """One step: a row for each lane of each rank, time from left to right."""
    ranks = chosen_ranks(trace.ranks)
    spans = [span for span in trace.spans if span.rank in ranks][:_MOST_SPANS]
    if not spans:
        return None
    rows = [
        (rank, lane)
        for rank in ranks
        for lane in LANES
        if any(span.rank == rank and span.lane == lane for span in spans)
    ]
    heights = _row_heights(rows)
    start = min(span.start for span in spans)
    titles = {
        f"span-{number}": f"{_word(span.kind)}"
        f"{': ' + span.label if span.label else ''} ({format_seconds(span.seconds)})"
        for number, span in enumerate(spans)
    }

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure, grid="x")
        for number, span in enumerate(spans):
            _bar(axes, span, start, heights[span.rank, span.lane], f"span-{number}")
        _label_rows(axes, heights)
        _time_axis(axes, 9)
        _kinds_legend(axes, spans)

    height = 62 + 17 * len(rows) + 7 * len(ranks)
    alt = "Timeline of one step: what each rank did on each lane"
    return draw("timeline", (900, height), paint, alt=alt, titles=titles)


def _row_heights(rows: Sequence[tuple[int, str]]) -> dict[tuple[int, str], float]:
    """Positions from the top, with a gap between ranks."""
    heights: dict[tuple[int, str], float] = {}
    position, before = 0.0, None
    for rank, lane in rows:
        position += 1.0 if rank == before or before is None else 1.5
        before = rank
        heights[rank, lane] = position
    return heights


def _bar(axes: Axes, span: Span, start: float, height: float, group: str) -> None:
    known = span.kind if span.kind in KINDS else "other"
    bars = axes.barh(
        height,
        span.seconds,
        left=span.start - start,
        height=0.82,
        color=colour(known),
        edgecolor=colour("card"),
        linewidth=0.4,
    )
    bars[0].set_gid(group)


def _label_rows(axes: Axes, heights: Mapping[tuple[int, str], float]) -> None:
    ranks = {rank for rank, _ in heights}
    labels = []
    named: set[int] = set()
    for rank, lane in heights:
        labels.append(lane if rank in named else f"rank {rank}   {lane}")
        named.add(rank)
    axes.set_yticks(list(heights.values()), labels)
    axes.set_ylim(max(heights.values()) + 0.7, 0.3)
    if len(ranks) > 1:
        tops = [min(h for (r, _), h in heights.items() if r == rank) for rank in sorted(ranks)]
        for top in tops[1:]:
            axes.axhline(top - 0.75, color=colour("grid"), linewidth=0.8)


def _time_axis(axes: Axes, bins: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(left=0)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=bins, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(max(0.0, value))))


def _kinds_legend(axes: Axes, spans: Sequence[Span]) -> None:
    present = {span.kind if span.kind in KINDS else "other" for span in spans}
    for kind in (*KINDS, "other"):
        if kind in present:
            axes.barh(0, 0, color=colour(kind), label=_word(kind))
    legend(axes, columns=len(present))


def _word(kind: str) -> str:
    return _WORDS.get(kind, kind)


def shares_picture(found: Sequence[Shares]) -> str | None:
    """Mean step of each rank, stacked from its parts."""
    by_rank = {entry.rank: entry for entry in found}
    drawn = [by_rank[rank] for rank in chosen_ranks(sorted(by_rank))]
    if not drawn:
        return None

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure, grid="x")
        lefts = [0.0] * len(drawn)
        for part in PARTS:
            widths = [entry.parts[part] for entry in drawn]
            if not any(widths):
                continue
            axes.barh(
                range(len(drawn)),
                widths,
                left=lefts,
                height=0.62,
                color=colour(_PART_COLOURS[part]),
                label=_PART_WORDS.get(part, part),
            )
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        axes.set_yticks(range(len(drawn)), [f"rank {entry.rank}" for entry in drawn])
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        _time_axis(axes, 5)
        legend(axes, columns=2)

    height = 106 + 24 * len(drawn)
    return draw("shares", (400, height), paint, alt="Mean step time of each rank by its parts")
