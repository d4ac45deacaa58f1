"""Schedules as pictures: text with one line per rank, and timelines for the report.

Small tables are drawn as the papers draw them (figures 3 and 8 of Chimera, Li and Hoefler, SC
2021): a digit is the forward of that micro-batch, a letter its backward. Others get cells of
fixed width with kind and number. Equal columns on all lines are the same moment. A timeline has
exactly the spans of `headway.schedule.timing`: a bubble is a gap, a wait that the table names
(RECV, WAIT) is a span of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from headway.schedule.pipeline_schedule import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    Action,
    ActionKind,
    PipelineSchedule,
)
from headway.schedule.timing import ScheduleTiming
from headway.timeline import Span, Timeline

_IDLE = "."
_GOES_ON = "-"
_DIGITS = 10
_LETTERS = "abcdefghij"


def draw_aligned(schedule: PipelineSchedule) -> str:
    """The table in equal slots, as its generator placed the actions.

    Args:
        schedule: With `slots`; actions without a slot (messages) are not drawn.

    Raises:
        ValueError: The schedule has no slots; draw it by time.
    """
    if schedule.slots is None:
        raise ValueError(f"{schedule.name} has no slots; use draw_timed")
    write = _writer(schedule)
    rows: list[dict[int, str]] = []
    for row in schedule.order:
        cells: dict[int, str] = {}
        for action in row:
            if action in schedule.slots:
                slot = schedule.slots[action]
                # The two forwards of a pair share a slot (Chimera's double units).
                cells[slot] = cells.get(slot, "") + write(action)
        rows.append(cells)
    return _lines(rows)


def draw_timed(
    schedule: PipelineSchedule, timing: ScheduleTiming, *, unit: float | None = None
) -> str:
    """The table by time.

    Args:
        unit: Time of one column; the shortest action's time if not given. Actions that are shorter
            may hide each other.
    """
    write = _writer(schedule)
    # Cells of one column are then the shortest ones, and none is left out.
    column = unit or _shortest(timing)
    rows: list[dict[int, str]] = []
    for rank in range(len(timing.order)):
        cells: dict[int, str] = {}
        for action, start, end in timing.row(rank):
            if action.kind in COMPUTE_KINDS:
                first, last = _rounded(start / column), _rounded(end / column)
                text = write(action)
                rest = text if len(text) == 1 else _GOES_ON
                cells |= {first: text, **dict.fromkeys(range(first + 1, last), rest)}
        rows.append(cells)
    return _lines(rows)


def legend(schedule: PipelineSchedule) -> str:
    """How to read the drawings of a schedule, in one line."""
    kinds = {action.kind for _, action in schedule.actions()}
    split = ActionKind.WEIGHT_GRAD in kinds
    if _is_small(schedule):
        letters = "letter: its backward (a is 0)"
        if split:
            letters = "letter: its backward or input gradient (a is 0), capital: weight gradient"
        return f"digit: forward of that micro-batch, {letters}, dot: idle"
    names = {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.INPUT_GRAD: "input gradient",
        ActionKind.WEIGHT_GRAD: "weight gradient",
    }
    said = ", ".join(f"{kind}: {name}" for kind, name in names.items() if kind in kinds)
    stage = "stage, " if _has_several_stages(schedule) else ""
    return f"{stage}kind and number of the micro-batch ({said}), dot: idle"


def _shortest(timing: ScheduleTiming) -> float:
    times = [
        end - start
        for rank in range(len(timing.order))
        for action, start, end in timing.row(rank)
        if action.kind in COMPUTE_KINDS and end > start
    ]
    return min(times, default=1.0)


def _rounded(columns: float) -> int:
    """Halves go up, so that nothing of at least one column vanishes."""
    return math.floor(columns + 0.5)


def _is_small(schedule: PipelineSchedule) -> bool:
    numbers = [m for pipe in schedule.pipes for m in pipe.microbatches]
    return max(numbers, default=0) < _DIGITS and not _has_several_stages(schedule)


def _has_several_stages(schedule: PipelineSchedule) -> bool:
    return any(max(Counter(pipe.placement).values()) > 1 for pipe in schedule.pipes)


def _writer(schedule: PipelineSchedule) -> Callable[[Action], str]:
    if _is_small(schedule):
        return _glyph
    if _has_several_stages(schedule):
        return lambda action: f"{action.stage}{action.kind}{action.microbatch}"
    return lambda action: f"{action.kind}{action.microbatch}"


def _glyph(action: Action) -> str:
    if action.kind == ActionKind.FORWARD:
        return str(action.microbatch)
    letter = _LETTERS[action.microbatch]
    return letter.upper() if action.kind == ActionKind.WEIGHT_GRAD else letter


def _lines(rows: Sequence[Mapping[int, str]]) -> str:
    """Cells by column, padded to one width; a space between them unless they are single."""
    width = max((len(text) for cells in rows for text in cells.values()), default=1)
    columns = max((column + 1 for cells in rows for column in cells), default=0)
    names = [f"P{rank}" for rank in range(len(rows))]
    margin = max(map(len, names), default=0)
    gap = "" if width == 1 else " "
    lines = []
    for name, cells in zip(names, rows, strict=True):
        texts = [cells.get(column, _IDLE) for column in range(columns)]
        padded = [(t * width if t == _GOES_ON else t).ljust(width) for t in texts]
        lines.append(f"{name.ljust(margin)} {gap.join(padded)}".rstrip())
    return "\n".join(lines)


TIMELINE_KINDS: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "forward",
    **dict.fromkeys(BACKWARD_KINDS, "backward"),
    ActionKind.STEP: "update",
    **dict.fromkeys((ActionKind.SYNC, ActionKind.SEND, ActionKind.POST), "exchange"),
    **dict.fromkeys((ActionKind.RECV, ActionKind.WAIT), "wait"),
}
"""What a timeline calls each action; all of them occupy the compute lane."""


def timing_timeline(timing: ScheduleTiming) -> Timeline:
    """The timeline of a timed step; labels are the texts of the actions.

    All-reduces are on the lane "exchange", everything else on "compute". What takes no time (SEND
    without overhead, STEP) has no span.
    """
    spans = [span for rank in range(len(timing.order)) for span in _compute(timing, rank)]
    spans += [
        Span(
            rank=sync.rank,
            lane="exchange",
            kind="exchange",
            label=str(sync.action),
            start=sync.start,
            end=sync.end,
        )
        for sync in timing.sync_spans
        if sync.end > sync.start
    ]
    return Timeline.of(spans)


def _compute(timing: ScheduleTiming, rank: int) -> Iterator[Span]:
    before = 0.0
    for action, start, end in timing.row(rank):
        # A rank has waited since its last action ended, not only since the wait was reached.
        begin = before if TIMELINE_KINDS[action.kind] == "wait" else start
        if end > begin:
            yield Span(
                rank=rank,
                lane="compute",
                kind=TIMELINE_KINDS[action.kind],
                label=str(action),
                start=begin,
                end=end,
            )
        before = end
