"""Schedules as CSV files that people write and read: headway's own dialect; what differs.

One row per rank, cells like d0.s2.F.5; header entries in comment lines say what the cells do not.
Where a generator placed the actions in slots, columns are slots and empty cells are idle.
Invariant: `from_csv(to_csv(schedule))` is the schedule. The dialect of torch is in `torch_table`,
drawings for terminals are in `drawing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from headway.errors import DocumentError
from headway.schedule.action import Action
from headway.schedule.drawing import draw_aligned, draw_timed, legend
from headway.schedule.header import Header, header_lines, read_header
from headway.schedule.pipeline import Pipe, PipelineSchedule
from headway.schedule.sheet import Problem, Text, refuse, texts_of
from headway.schedule.torch_table import from_torch_csv, looks_like_torch, to_torch_csv

__all__ = [
    "difference",
    "draw_aligned",
    "draw_timed",
    "from_csv",
    "from_torch_csv",
    "legend",
    "read_table",
    "to_csv",
    "to_torch_csv",
]

_IDLE = (".", "-")
Cells = Sequence[Sequence[tuple[Action, Text, int]]]
"""For each rank its actions, where they stand, and the number of their column."""


def to_csv(schedule: PipelineSchedule) -> str:
    """Write a schedule; `from_csv` reads it back."""
    slotted = _fits_slots(schedule)
    lines = header_lines(schedule, slots=slotted)
    slots = schedule.slots if slotted else None
    lines += [",".join(_row(row, slots)) for row in schedule.order]
    return "\n".join(lines) + "\n"


def _fits_slots(schedule: PipelineSchedule) -> bool:
    """Whether every action has a slot, in the order of its row."""
    slots = schedule.slots
    if slots is None:
        return False
    for row in schedule.order:
        places = [slots.get(action, -1) for action in row]
        if places != sorted(places) or (places and places[0] < 0):
            return False
    return len(slots) == sum(map(len, schedule.order))


def _row(row: Sequence[Action], slots: Mapping[Action, int] | None) -> Iterable[str]:
    """The cells of a rank; one that does nothing is a dot."""
    if not row:
        return ["."]
    if slots is None:
        return map(str, row)
    cells = [""] * (1 + slots[row[-1]])
    for action in row:
        cells[slots[action]] = f"{cells[slots[action]]} {action}".strip()
    return cells


def read_table(path: Path, *, pipes: int = 1) -> PipelineSchedule:
    """Read a schedule from a file, in headway's dialect or in torch's.

    Args:
        path: Of the file; its name is the schedule's, unless it says another.
        pipes: Of a table of torch: how many there are.

    Raises:
        DocumentError: The file cannot be read, or has problems; all are listed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DocumentError("cannot be read", where=str(path), problems=[reason]) from None
    if looks_like_torch(text):
        return from_torch_csv(text, where=str(path), name=path.stem, pipes=pipes)
    return from_csv(text, where=str(path), name=path.stem)


def from_csv(text: str, *, where: str = "the table", name: str = "table") -> PipelineSchedule:
    """Read a table in headway's dialect.

    The header may be left out where there is one pipe: it holds the stages and micro-batches that
    the cells name. Cells may be empty, "." or "-" (idle) and may hold several actions.

    Args:
        text: Of the file.
        where: Name of the file, for messages.
        name: Of the schedule, unless the header says another.

    Returns:
        The schedule, which may be wrong in what it does: see `check`.

    Raises:
        DocumentError: With all problems, by line and column.
    """
    sheet = texts_of(text)
    problems: list[Problem] = []
    header = read_header(sheet.entries, problems)
    cells = [list(_actions(row, problems)) for row in sheet.rows]
    if not sheet.rows:
        problems.append(Problem(1, 1, "there are no rows; write one for each rank"))
    refuse(problems, where)
    pipes = header.pipes or _inferred(cells, problems)
    refuse(problems, where)
    return _schedule(header, pipes, cells, name)


def _actions(row: Sequence[Text], problems: list[Problem]) -> Iterator[tuple[Action, Text, int]]:
    for number, cell in enumerate(row):
        start = 0
        for word in cell.text.split():
            start = cell.text.index(word, start)
            place = Text(word, cell.line, cell.column + start)
            start += len(word)
            if word in _IDLE:
                continue
            try:
                yield Action.parse(word), place, number
            except ValueError as error:
                problems.append(Problem(place.line, place.column, str(error)))


def _schedule(header: Header, pipes: tuple[Pipe, ...], cells: Cells, name: str) -> PipelineSchedule:
    slots = {action: column for row in cells for action, _, column in row}
    every = tuple(range(len(pipes[0].placement)))
    return PipelineSchedule(
        name=header.name or name,
        pipes=pipes,
        order=tuple(tuple(action for action, _, _ in row) for row in cells),
        slots=slots if header.slots else None,
        recompute=every if header.recompute is None else header.recompute,
        blockwise=header.blockwise,
        skips=header.skips,
        halves=header.halves,
        flush=header.flush,
        most_activations=header.most_activations,
    )


def _inferred(cells: Cells, problems: list[Problem]) -> tuple[Pipe, ...]:
    """The one pipe that the cells name: the rank of each stage, and the micro-batches."""
    name, place = "", dict[int, int]()
    entering, others = dict[int, None](), set[int]()
    for rank, row in enumerate(cells):
        for action, text, _ in row:
            name = name or action.pipe
            if action.pipe != name:
                said = f"pipe {action.pipe} beside {name}: say what each holds in lines like"
                said += f" '# pipe {name} = ranks 0 1, microbatches 0-3'"
                problems.append(Problem(text.line, text.column, said))
                return ()
            if place.setdefault(action.stage, rank) != rank:
                said = f"stage {action.stage} is here and on rank {place[action.stage]}; one of the"
                said += f" two is wrong, or say so in a line '# pipe {name} = ranks ...'"
                problems.append(Problem(text.line, text.column, said))
            if action.stage == 0 and action.kind == "F":
                entering[action.microbatch] = None
            elif action.microbatch >= 0:
                others.add(action.microbatch)
    missing = [str(stage) for stage in range(max(place, default=0) + 1) if stage not in place]
    if missing:
        problems.append(Problem(1, 1, f"no rank does anything for stage {', '.join(missing)}"))
    microbatches = (*entering, *sorted(others - entering.keys()))
    return (Pipe(name, tuple(place[stage] for stage in sorted(place)), microbatches),)


# ---- what differs ------------------------------------------------------------------------------


def difference(a: PipelineSchedule, b: PipelineSchedule) -> list[str]:
    """In what two schedules differ: their facts, and the first differing cell of each rank.

    Returns:
        One line per difference; empty: they are equal (their slots are not looked at).
    """
    lines = [
        f"{fact}: {getattr(a, fact)!r}, {getattr(b, fact)!r}"
        for fact in (
            "name",
            "recompute",
            "blockwise",
            "halves",
            "flush",
            "skips",
            "most_activations",
        )
        if getattr(a, fact) != getattr(b, fact)
    ]
    for one, other in zip_longest(a.pipes, b.pipes):
        if one != other:
            lines.append(f"pipe: {_shown(one)}, {_shown(other)}")
    for rank, (row, other_row) in enumerate(zip_longest(a.order, b.order)):
        if row != other_row:
            lines.append(_first_difference(rank, row, other_row))
    return lines


def _shown(pipe: Pipe | None) -> str:
    return repr(pipe) if pipe else "none"


def _first_difference(
    rank: int, row: tuple[Action, ...] | None, other: tuple[Action, ...] | None
) -> str:
    if row is None or other is None:
        return f"rank {rank} is only in the {'second' if row is None else 'first'}"
    pairs = enumerate(zip_longest(row, other))
    position, (one, two) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return f"rank {rank}, cell {position}: {one or 'the end'}, {two or 'the end'}"
