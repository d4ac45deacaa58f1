"""Which step the report shows, its timeline per rank, and the shares of a mean step.

Exposed communication (a wait on the compute lane) has the most prominent colour: it is what a
better plan would remove.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headway.report.history.records import LoggedRankStep, RunHistory
from headway.report.pictures.canvas import colour, draw, legend, plain_axes
from headway.timeline import KINDS, LANES, SHARED_LANES, Span, Timeline, tracks
from headway.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle


MOST_RANKS = 16
"""Most ranks in one picture; timeline.json has all of them."""
_MOST_SPANS = 3000
_MOST_TRACKS = 6
"""Most rows of one lane; of more buckets at the same time some are drawn on top of others."""
_WORDS: Mapping[str, str] = {
    "wait": "exposed communication",
    "exchange": "communication",
    "queued": "queued for it",
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


_Place = tuple[int, str, int]
"""Rank, lane, and row of the lane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Mean seconds of one rank's step and of its parts; the parts add up to the step.

    Attributes:
        parts: One of PARTS -> seconds.
    """

    rank: int
    steps: int
    seconds: float
    parts: Mapping[str, float]


def shares(history: RunHistory) -> tuple[Shares, ...]:
    """Where each rank's time went; the first step of every attempt is left out as warm-up."""
    found = []
    for rank, steps in sorted(history.rank_steps.items()):
        timed = [step for step in steps if step.seconds > 0]
        warm = [step for step in timed if step.step not in history.warm_up] or timed
        if warm:
            found.append(_mean(rank, warm))
    return tuple(found)


def _mean(rank: int, steps: Sequence[LoggedRankStep]) -> Shares:
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
    """The traced step of middle duration that has spans of most ranks; warm-up is left out.

    A step of which only its checkpoint is known is drawn only where there is nothing else.
    """
    whole = {
        step: trace
        for step, trace in history.traces.items()
        if any(span.lane == "compute" for span in trace.spans)
    }
    traces = whole or history.traces
    if not traces:
        return None
    most = max(len(trace.ranks) for trace in traces.values())
    complete = [step for step, trace in traces.items() if len(trace.ranks) == most]
    warm = [step for step in complete if step not in history.warm_up] or complete
    ordered = sorted(warm, key=lambda step: (_length(traces[step]), step))
    # The shorter of two in the middle: it must be a step that there is.
    return ordered[(len(ordered) - 1) // 2]


def _length(trace: Timeline) -> float:
    """Seconds of the step itself: a checkpoint may be written long after it."""
    spans = [span for span in trace.spans if span.lane == "compute" and span.kind != "wait"]
    spans = spans or list(trace.spans)  # waits may lie in the step after it
    return max(span.end for span in spans) - min(span.start for span in spans)


def timeline_picture(trace: Timeline) -> str | None:
    """One step: a row for each lane of each rank, time from left to right."""
    ranks = chosen_ranks(trace.ranks)
    spans = _from_its_start([span for span in trace.spans if span.rank in ranks])[:_MOST_SPANS]
    if not spans:
        return None
    spans, places = _places(spans)
    heights = _row_heights(sorted(set(places), key=lambda p: (p[0], LANES.index(p[1]), p[2])))
    start = min(span.start for span in spans)
    titles = {
        f"span-{number}": f"{_word(span.kind)}"
        f"{': ' + span.label if span.label else ''} ({format_seconds(span.seconds)})"
        for number, span in enumerate(spans)
    }

    def paint(figure: Figure) -> None:
        axes = plain_axes(figure, grid="x")
        for number, span in enumerate(spans):
            bar = span_bar(axes, span, start, heights[places[number]], 0.82)
            # The key of this bar's text in `titles`.
            bar.set_gid(f"span-{number}")
        _label_rows(axes, heights)
        bar_of_time(axes, 9)
        present = {span.kind if span.kind in KINDS else "other" for span in spans}
        words = {kind: _word(kind) for kind in (*KINDS, "other") if kind in present}
        kinds_legend(axes, words, len(words))

    height = 62 + 17 * len(heights) + 7 * len(ranks)
    alt = "Timeline of one step: what each rank did on each lane"
    return draw("timeline", (900, height), paint, alt=alt, titles=titles)


def _from_its_start(spans: Sequence[Span]) -> list[Span]:
    """Without what the exchange of the step before did before this step began."""
    begins = [span.start for span in spans if span.lane != "exchange"]
    begin = min(begins, default=-math.inf)
    return [
        replace(span, start=max(span.start, begin))
        for span in spans
        if span.lane != "exchange" or span.end > begin
    ]


def _places(spans: Sequence[Span]) -> tuple[list[Span], list[_Place]]:
    """The spans that are drawn, and where: what overlaps on a shared lane has several rows.

    Where these would be too many, buckets that only wait to leave are left out.
    """
    lanes: dict[tuple[int, str], list[int]] = {}
    for number, span in enumerate(spans):
        if span.lane in SHARED_LANES:
            lanes.setdefault((span.rank, span.lane), []).append(number)
    rows: dict[int, int] = {}
    for numbers in lanes.values():
        found = tracks([spans[number] for number in numbers])
        if max(found) >= _MOST_TRACKS:
            numbers = [number for number in numbers if spans[number].kind != "queued"]
            found = [row % _MOST_TRACKS for row in tracks([spans[n] for n in numbers])]
        rows |= dict(zip(numbers, found, strict=True))
    drawn = [n for n, span in enumerate(spans) if span.lane not in SHARED_LANES or n in rows]
    return (
        [spans[number] for number in drawn],
        [(spans[n].rank, spans[n].lane, rows.get(n, 0)) for n in drawn],
    )


def _row_heights(places: Sequence[_Place]) -> dict[_Place, float]:
    """Positions from the top, with a gap between ranks."""
    heights: dict[_Place, float] = {}
    position, before = 0.0, None
    for place in places:
        position += 1.0 if place[0] == before or before is None else 1.5
        before = place[0]
        heights[place] = position
    return heights


def span_bar(axes: Axes, span: Span, start: float, place: float, height: float) -> Rectangle:
    """A span as a bar around `place`, `start` being the time 0 of the picture."""
    bars = axes.barh(
        place,
        span.seconds,
        left=span.start - start,
        height=height,
        color=colour(span.kind if span.kind in KINDS else "other"),
        edgecolor=colour("card"),
        linewidth=0.4,
    )
    bar: Rectangle = bars[0]
    return bar


def _label_rows(axes: Axes, heights: Mapping[_Place, float]) -> None:
    ranks = sorted({rank for rank, _, _ in heights})
    labels = []
    named: set[int] = set()
    for rank, lane, row in heights:
        text = "" if row else lane
        labels.append(text if rank in named else f"rank {rank}   {text}")
        named.add(rank)
    axes.set_yticks(list(heights.values()), labels)
    axes.set_ylim(max(heights.values()) + 0.7, 0.3)
    if len(ranks) > 1:
        tops = [min(h for (r, _, _), h in heights.items() if r == rank) for rank in ranks]
        for top in tops[1:]:
            axes.axhline(top - 0.75, color=colour("grid"), linewidth=0.8)


def bar_of_time(axes: Axes, bins: int) -> None:
    """Seconds from 0 on the horizontal axis, with their units."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(left=0)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=bins, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(max(0.0, value))))


def kinds_legend(axes: Axes, words: Mapping[str, str], columns: int) -> None:
    """The colours of kinds of spans, each with its words."""
    for kind, text in words.items():
        # Without a length: for the legend alone.
        axes.barh(0, 0, color=colour(kind), label=text)
    legend(axes, columns=columns)


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
        bar_of_time(axes, 5)
        legend(axes, columns=2)

    height = 106 + 24 * len(drawn)
    return draw("shares", (400, height), paint, alt="Mean step time of each rank by its parts")
