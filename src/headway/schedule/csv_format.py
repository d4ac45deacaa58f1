"""Pipeline schedules as CSV files, in headway's dialect and in torch's.

One row per rank, cells like d0.s2.F.5. Header entries in comment lines say what the cells do
not; their keys are the attributes of `PipelineSchedule`, and what has its default is left out:

    # headway schedule
    # name = chimera
    # pipe d0 = ranks 0-3, microbatches 0 1
    # pipe u0 = ranks 3 2 1 0, microbatches 2 3
    # most_activations = 4
    # slots = columns

Where a generator placed the actions in slots, columns are slots and empty cells are idle.
`from_csv(to_csv(schedule))` is the schedule. An unknown or malformed key is an error that names
the nearest legal one, and every problem is reported by line and column (both from 1).

torch's dialect has cells like 2F0 (the `_Action` texts and `_load_csv` of
torch.distributed.pipelining.schedules, 2.13). torch numbers the stages of all pipes through
(pipe * stages + stage) and the micro-batches of each pipe from 0. Its RECV_F is a POST here:
the receiver waits at the action that uses the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from headway.documents import nearest, read_text
from headway.errors import DocumentError, PlanError
from headway.schedule.pipeline_schedule import (
    COMPUTE_KINDS,
    NO_NUMBER,
    Action,
    ActionKind,
    PipelineSchedule,
    SchedulePipe,
)

_ENTRY = re.compile(
    r"#\s*(?P<key>[A-Za-z_][\w-]*)(?:\s+(?P<part>\w+))?\s*(?P<sign>[=:])\s*(?P<value>.*)"
)

_SHOWN = 20  # problems; a file that is no table has one in every cell


class CsvCell(NamedTuple):
    """A cell, without spaces and quotation marks around it."""

    text: str
    line: int
    column: int


class HeaderEntry(NamedTuple):
    """A header entry: `# key part = value`; with ":" as its sign it may be a comment."""

    key: str
    part: str
    sign: str
    value: str
    line: int
    column: int


class CsvSheet(NamedTuple):
    """What a file says."""

    entries: list[HeaderEntry]
    rows: list[list[CsvCell]]


class CsvProblem(NamedTuple):
    line: int
    column: int
    text: str


def parse_sheet(text: str) -> CsvSheet:
    """Split a file into header entries and rows."""
    sheet = CsvSheet([], [])
    # Spreadsheets write a byte-order mark.
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        entry = _ENTRY.match(line.lstrip())
        if entry:
            column = len(line) - len(line.lstrip()) + entry.start("key") + 1
            part, value = entry["part"] or "", entry["value"].strip()
            sheet.entries.append(
                HeaderEntry(entry["key"], part, entry["sign"], value, number, column)
            )
        elif line.strip() and not line.lstrip().startswith("#"):
            sheet.rows.append(_cells(line, number))
    return sheet


def _cells(line: str, number: int) -> list[CsvCell]:
    cells, start = [], 0
    # Not the csv module: no action contains a comma, and problems name the column.
    for part in line.split(","):
        text = part.strip().strip('"').strip()
        offset = part.find(text) if text else 0
        cells.append(CsvCell(text, number, start + offset + 1))
        start += len(part) + 1
    return cells


def raise_problems(problems: Sequence[CsvProblem], where: str) -> None:
    """Raise a DocumentError with the first problems of a file, if it has any."""
    if problems:
        ordered = sorted(problems, key=lambda problem: problem[:2])
        lines = [f"{where}:{line}:{column}  {text}" for line, column, text in ordered[:_SHOWN]]
        if len(ordered) > _SHOWN:
            lines.append(f"... and {len(ordered) - _SHOWN} more")
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise DocumentError(f"{count}:", where=where, problems=lines)


_PIPE = re.compile(r"ranks\s+(?P<ranks>[^,]*?)\s*,\s*microbatches\s+(?P<microbatches>[^,]*?)")
_DIGITS = re.compile(r"\d+")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?")
_SKIP = re.compile(r"(?P<earlier>\d+)>(?P<later>\d+)")
_SHORTEST_RANGE = 3


def header_lines(schedule: PipelineSchedule, *, slots: bool) -> list[str]:
    """The comment lines above a table."""
    lines = ["# headway schedule", f"# name = {schedule.name}"]
    for pipe in schedule.pipes:
        ranks, microbatches = _numbers_text(pipe.placement), _numbers_text(pipe.microbatches)
        lines.append(f"# pipe {pipe.name} = ranks {ranks}, microbatches {microbatches}")
    if schedule.recompute:
        lines.append(f"# recompute = {_numbers_text(schedule.recompute)}")
    for key, default in (("blockwise", False), ("halves", False), ("flush", True)):
        value = getattr(schedule, key)
        if value != default:
            lines.append(f"# {key} = {str(value).lower()}")
    if schedule.skips:
        lines.append(f"# skips = {' '.join(f'{a}>{b}' for a, b in schedule.skips)}")
    if schedule.most_activations is not None:
        lines.append(f"# most_activations = {schedule.most_activations!r}")
    return lines + ["# slots = columns"] * slots


def _numbers_text(numbers: Sequence[int]) -> str:
    """ "0-3 7", or "none"."""
    words, place = list[str](), 0
    while place < len(numbers):
        end = place
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        if end - place + 1 >= _SHORTEST_RANGE:
            words.append(f"{numbers[place]}-{numbers[end]}")
        else:
            words += map(str, numbers[place : end + 1])
        place = end + 1
    return " ".join(words) or "none"


def read_header(entries: Sequence[HeaderEntry], problems: list[CsvProblem]) -> dict[str, Any]:
    """The values of the entries by key, those of pipes as "pipes"; adds to the problems."""
    values: dict[str, Any] = {"pipes": ()}
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        # "# note: ..." is a comment; "# nmae: ..." is taken for a mistyped key.
        if entry.sign == ":" and not get_close_matches(entry.key, _KEYS, cutoff=0.75):
            continue
        try:
            if (entry.key, entry.part) in seen:
                raise ValueError(f"{entry.key} {entry.part}".strip() + " is there already")
            seen.add((entry.key, entry.part))
            _check_entry(entry)
            if entry.key == "pipe":
                values["pipes"] += (_pipe(entry),)
            else:
                values[entry.key] = _READERS[entry.key](entry.value)
        except ValueError as error:
            problems.append(CsvProblem(entry.line, entry.column, str(error)))
    return values


def _check_entry(entry: HeaderEntry) -> None:
    if entry.key not in _KEYS:
        said = f"unknown key {entry.key}{nearest(entry.key, _KEYS)}"
        raise ValueError(f"{said} (begin a comment with ##)")
    if entry.sign != "=":
        raise ValueError(f"write = behind {entry.key}")
    if entry.part and entry.key != "pipe":
        raise ValueError(f"{entry.key} stands alone before =, without {entry.part}")


def _pipe(entry: HeaderEntry) -> SchedulePipe:
    found = _PIPE.fullmatch(entry.value)
    if found is None or not entry.part:
        raise ValueError("write a pipe like '# pipe d0 = ranks 0-3, microbatches 0 1'")
    return SchedulePipe(entry.part, _numbers(found["ranks"]), _numbers(found["microbatches"]))


MAX_NUMBER = 100_000
"""Of a rank, stage or micro-batch in a file; a mistyped one would otherwise ask for lists of all
numbers below it."""


def _number(text: str) -> int:
    if len(text) > len(str(MAX_NUMBER)) + 20 or int(text) > MAX_NUMBER:
        raise ValueError(f"{text[:20]} is larger than {MAX_NUMBER}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for word in text.split() if text != "none" else ():
        found = _RANGE.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is no number and no range like 0-3")
        first = _number(found["first"])
        last = _number(found["last"] or found["first"])
        if last < first:
            raise ValueError(f"the range {word} goes down; write its numbers one by one")
        numbers += range(first, last + 1)
        if len(numbers) > MAX_NUMBER:
            raise ValueError(f"there are more than {MAX_NUMBER} numbers")
    return tuple(numbers)


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is not true or false")
    return text == "true"


def _stages(text: str) -> tuple[int, ...] | None:
    if text in ("true", "false"):  # of all stages
        return None if text == "true" else ()
    try:
        return tuple(sorted(set(_numbers(text))))
    except ValueError:
        raise ValueError(f"{text!r} is not true, false or stages like 0 2-3") from None


def _skips(text: str) -> tuple[tuple[int, int], ...]:
    skips = []
    for word in text.split():
        found = _SKIP.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is no skip; write one like 0>2")
        skips.append((_number(found["earlier"]), _number(found["later"])))
    return tuple(skips)


def _amount(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number of activations") from None


def _columns(text: str) -> bool:
    if text != "columns":
        raise ValueError(f"{text!r} is not columns")
    return True


_READERS: dict[str, Callable[[str], Any]] = {
    "name": str,
    "recompute": _stages,
    "blockwise": _truth,
    "halves": _truth,
    "flush": _truth,
    "skips": _skips,
    "most_activations": _amount,
    "slots": _columns,
}
_KEYS = ("pipe", *_READERS)


# The CSV dialect of torch's pipelining runtime: cells like 2F0, one row per rank.


_CELL = re.compile(
    r"(?P<stage>\d+)(?:(?P<kind>[FIWB]|SEND_F|SEND_B|RECV_F|RECV_B)(?P<microbatch>\d+)"
    r"|(?P<other>UNSHARD|RESHARD|REDUCE_GRAD))"
)
_OVERLAP = re.compile(r"\((?P<inner>[^()]*)\)OVERLAP_F_B")
_LEFT_OUT = frozenset({"UNSHARD", "RESHARD"})
_BEHIND = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}
"""Where the other end of a message is: in the next stage, or in the one before."""


def to_torch_csv(schedule: PipelineSchedule) -> str:
    """Write a schedule for torch's `_load_csv`.

    POST becomes RECV_F or RECV_B, SYNC becomes REDUCE_GRAD; RECV, WAIT and STEP have no place in
    torch's tables and are left out. (torch's own simulator takes its RECV as a wait, unlike its
    runtime: only tables that were lowered with `lookahead=0` get through it.)

    Raises:
        PlanError: Weight versions or skip connections, which torch's tables cannot say.
    """
    problems = [] if schedule.flush else ["without a flush actions have versions of the weights"]
    problems += ["messages of skip connections need two stages"] * bool(schedule.skips)
    if problems:
        raise PlanError(
            f"the schedule {schedule.name} cannot be written as a table of torch",
            problems=problems,
            fix="Write headway's own table instead.",
        )
    # torch knows no pipes: stages are numbered through all of them, micro-batches within each.
    first = {pipe.name: number * schedule.stages for number, pipe in enumerate(schedule.pipes)}
    place = {
        (pipe.name, microbatch): number
        for pipe in schedule.pipes
        for number, microbatch in enumerate(pipe.microbatches)
    }
    rows = []
    for row in schedule.order:
        texts = []
        for action in row:
            number = place.get((action.pipe, action.microbatch), NO_NUMBER)
            texts += [
                f"{first[action.pipe] + action.stage}{word}"
                for word in _torch_words(action, number)
            ]
        # A rank without actions keeps its row: `parse_sheet` skips a blank line.
        rows.append(",".join(texts) or ",")
    return "\n".join(rows) + "\n"


def _torch_words(action: Action, microbatch: int) -> Iterator[str]:
    """Kind and micro-batch as torch writes them; nothing for what torch does not say."""
    if action.kind in COMPUTE_KINDS:
        yield f"{action.kind}{microbatch}"
    elif action.kind == ActionKind.SYNC:
        yield "REDUCE_GRAD"
    elif action.kind in (ActionKind.SEND, ActionKind.POST):
        verb = "SEND" if action.kind == ActionKind.SEND else "RECV"
        yield f"{verb}_{'B' if action.carries_gradient else 'F'}{microbatch}"


def looks_like_torch(text: str) -> bool:
    """Whether the first cell of a table is one of torch's."""
    first = next((cell.text for row in parse_sheet(text).rows for cell in row if cell.text), "")
    return bool(_CELL.fullmatch(first) or _OVERLAP.fullmatch(first))


@dataclass(frozen=True, slots=True)
class _Word:
    """A cell of torch's: a stage of all pipes, a kind, a micro-batch of its pipe (or NO_NUMBER)."""

    stage: int
    kind: str
    microbatch: int
    cell: CsvCell


def from_torch_csv(
    text: str, *, where: str = "the table", name: str = "torch", pipes: int = 1
) -> PipelineSchedule:
    """Read a table that torch, or somebody for torch, wrote.

    OVERLAP_F_B becomes its two parts in turn. UNSHARD and RESHARD concern FSDP and are left out.
    A RECV is put before the action that uses its message, a WAIT for each REDUCE_GRAD at the end.

    Args:
        pipes: How many there are, half of them up where there are more than one.

    Raises:
        DocumentError: With all problems, by line and column.
    """
    sheet = parse_sheet(text)
    problems: list[CsvProblem] = []
    rows = [[w for cell in row for w in _parse_torch_cell(cell, problems)] for row in sheet.rows]
    stages = 1 + max((word.stage for row in rows for word in row), default=-1)
    if not stages or stages % pipes:
        said = f"{stages} stages cannot be those of {pipes} pipes; give the right number of pipes"
        problems.append(CsvProblem(1, 1, said))
    raise_problems(problems, where)
    length = stages // pipes
    chains = _chains(rows, pipes, length, problems)
    raise_problems(problems, where)
    order = tuple(tuple(_torch_actions(row, chains, length)) for row in rows)
    return PipelineSchedule(name=name, pipes=chains, order=order)


def _parse_torch_cell(cell: CsvCell, problems: list[CsvProblem]) -> list[_Word]:
    overlap = _OVERLAP.fullmatch(cell.text)
    if overlap:
        start = cell.column + 1
        parts, words = overlap["inner"].split(";"), list[_Word]()
        for part in parts:
            words += _parse_torch_cell(CsvCell(part.strip(), cell.line, start), problems)
            start += len(part) + 1
        return words
    found = _CELL.fullmatch(cell.text)
    if found is None:
        if cell.text:
            said = f"{cell.text!r} is no action of torch; write one like 2F0 or 2SEND_F0"
            problems.append(CsvProblem(cell.line, cell.column, said))
        return []
    try:
        stage = _number(found["stage"])
        microbatch = NO_NUMBER if found["other"] else _number(found["microbatch"])
    except ValueError as error:
        problems.append(CsvProblem(cell.line, cell.column, str(error)))
        return []
    if found["other"]:
        word = _Word(stage, found["other"], NO_NUMBER, cell)
        return [] if word.kind in _LEFT_OUT else [word]
    return [_Word(stage, found["kind"], microbatch, cell)]


def _listed(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
    return ", ".join(map(str, numbers[:10])) + more


def _chains(
    rows: Sequence[Sequence[_Word]], pipes: int, length: int, problems: list[CsvProblem]
) -> tuple[SchedulePipe, ...]:
    place: dict[int, int] = {}
    most = [0] * pipes
    for rank, row in enumerate(rows):
        for word in row:
            most[word.stage // length] = max(most[word.stage // length], word.microbatch + 1)
            if place.setdefault(word.stage, rank) != rank:
                said = f"stage {word.stage} is on rank {place[word.stage]} already"
                problems.append(CsvProblem(word.cell.line, word.cell.column, said))
    missing = [stage for stage in range(pipes * length) if stage not in place]
    if missing:
        problems.append(CsvProblem(1, 1, f"no rank has stage {_listed(missing)}"))
        return ()
    half = (pipes + 1) // 2
    chains, first = list[SchedulePipe](), 0
    for number in range(pipes):
        name = f"d{number}" if number < half else f"u{number - half}"
        placement = tuple(place[number * length + stage] for stage in range(length))
        chains.append(SchedulePipe(name, placement, tuple(range(first, first + most[number]))))
        first += most[number]
    return tuple(chains)


def _torch_actions(
    row: Sequence[_Word], pipes: Sequence[SchedulePipe], length: int
) -> Iterator[Action]:
    """A rank's actions, with the RECVs and WAITs that torch does not write."""
    posted: dict[tuple[str, int, int, bool], list[Action]] = {}
    waits = []
    for word in row:
        pipe, stage = pipes[word.stage // length], word.stage % length
        microbatch = (
            NO_NUMBER if word.microbatch == NO_NUMBER else pipe.microbatches[word.microbatch]
        )
        if word.kind == "REDUCE_GRAD":
            yield Action(ActionKind.SYNC, pipe.name, stage)
            waits.append(Action(ActionKind.WAIT, pipe.name, stage))
        elif word.kind in _BEHIND:
            kind = ActionKind.SEND if word.kind.startswith("SEND") else ActionKind.POST
            message = Action(kind, pipe.name, stage, microbatch, stage + _BEHIND[word.kind])
            yield message
            if kind == ActionKind.POST:
                key = (pipe.name, stage, microbatch, message.carries_gradient)
                posted.setdefault(key, []).append(message)
        else:
            # W needs no message: its I has taken the gradient.
            backward = word.kind in "BI"
            if word.kind != ActionKind.WEIGHT_GRAD:
                for post in posted.pop((pipe.name, stage, microbatch, backward), ()):
                    yield Action(ActionKind.RECV, pipe.name, stage, microbatch, post.other)
            yield Action(ActionKind(word.kind), pipe.name, stage, microbatch)
    yield from waits


_IDLE = (".", "-")
Cells = Sequence[Sequence[tuple[Action, CsvCell, int]]]
"""For each rank its actions, where they stand, and the number of their column."""


def to_csv(schedule: PipelineSchedule) -> str:
    """Write a schedule in headway's dialect; `from_csv` reads it back."""
    slotted = _fits_slots(schedule)
    lines = header_lines(schedule, slots=slotted)
    slots = schedule.slots if slotted else None
    lines += [",".join(_row(row, slots)) for row in schedule.order]
    return "\n".join(lines) + "\n"


def _fits_slots(schedule: PipelineSchedule) -> bool:
    """Whether every action has a slot, in the order of its row; lowering adds ones without."""
    slots = schedule.slots
    if slots is None:
        return False
    for row in schedule.order:
        places = [slots.get(action, -1) for action in row]
        if places != sorted(places) or (places and places[0] < 0):
            return False
    # An action that stands twice, or has a slot but no cell, would be lost on the way back.
    return len(slots) == sum(map(len, schedule.order))


def _row(row: Sequence[Action], slots: Mapping[Action, int] | None) -> Iterable[str]:
    if not row:
        # A blank line would not be read as a row.
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
        path: Its name is the schedule's, unless the header says another.
        pipes: Of a table of torch: how many there are.

    Raises:
        DocumentError: The file cannot be read, or has problems; all are listed.
    """
    text = read_text(path)
    if looks_like_torch(text):
        return from_torch_csv(text, where=str(path), name=path.stem, pipes=pipes)
    return from_csv(text, where=str(path), name=path.stem)


def from_csv(text: str, *, where: str = "the table", name: str = "table") -> PipelineSchedule:
    """Read a table in headway's dialect.

    The header may be left out where there is one pipe: it holds the stages and micro-batches that
    the cells name. Cells may be empty, "." or "-" (idle) and may hold several actions.

    Raises:
        DocumentError: With all problems, by line and column.
    """
    sheet = parse_sheet(text)
    problems: list[CsvProblem] = []
    header = read_header(sheet.entries, problems)
    cells = [list(_actions(row, problems)) for row in sheet.rows]
    if not sheet.rows:
        problems.append(CsvProblem(1, 1, "there are no rows; write one for each rank"))
    # Before the pipe is inferred: a malformed cell would be reported again, as a missing stage.
    raise_problems(problems, where)
    pipes = header["pipes"] or _inferred(cells, problems)
    raise_problems(problems, where)
    return _schedule(header, pipes, cells, name)


def _actions(
    row: Sequence[CsvCell], problems: list[CsvProblem]
) -> Iterator[tuple[Action, CsvCell, int]]:
    for number, cell in enumerate(row):
        start = 0
        for word in cell.text.split():
            start = cell.text.index(word, start)
            place = CsvCell(word, cell.line, cell.column + start)
            start += len(word)
            if word in _IDLE:
                continue
            try:
                for digits in _DIGITS.findall(word):
                    _number(digits)
                yield Action.parse(word), place, number
            except ValueError as error:
                problems.append(CsvProblem(place.line, place.column, str(error)))


def _schedule(
    header: dict[str, Any], pipes: tuple[SchedulePipe, ...], cells: Cells, name: str
) -> PipelineSchedule:
    # The keys are attributes of the schedule; those that are missing have its defaults.
    facts = {**header, "pipes": pipes, "name": header.get("name") or name}
    if facts.get("recompute", ()) is None:  # "true": every stage
        facts["recompute"] = tuple(range(len(pipes[0].placement)))
    slots = {action: column for row in cells for action, _, column in row}
    facts["slots"] = slots if header.get("slots") else None
    order = tuple(tuple(action for action, _, _ in row) for row in cells)
    return PipelineSchedule(order=order, **facts)


def _inferred(cells: Cells, problems: list[CsvProblem]) -> tuple[SchedulePipe, ...]:
    """The one pipe that the cells name: the rank of each stage, and the micro-batches."""
    name, place = "", dict[int, int]()
    entering, others = dict[int, None](), set[int]()
    for rank, row in enumerate(cells):
        for action, text, _ in row:
            name = name or action.pipe
            if action.pipe != name:
                said = f"pipe {action.pipe} beside {name}: say what each holds in lines like"
                said += f" '# pipe {name} = ranks 0 1, microbatches 0-3'"
                problems.append(CsvProblem(text.line, text.column, said))
                return ()
            if place.setdefault(action.stage, rank) != rank:
                said = f"stage {action.stage} is here and on rank {place[action.stage]}; one of the"
                said += f" two is wrong, or say so in a line '# pipe {name} = ranks ...'"
                problems.append(CsvProblem(text.line, text.column, said))
            if action.stage == 0 and action.kind == "F":
                entering[action.microbatch] = None
            elif action.microbatch >= 0:
                others.add(action.microbatch)
    # Stages are numbered without gaps; one that no cell names was mistyped or forgotten.
    missing = [stage for stage in range(max(place, default=0) + 1) if stage not in place]
    if missing:
        said = f"no rank does anything for stage {_listed(missing)}"
        problems.append(CsvProblem(1, 1, said))
    # A pipe lists its micro-batches as they enter it, which is the order of stage 0's forwards.
    microbatches = (*entering, *sorted(others - entering.keys()))
    return (SchedulePipe(name, tuple(place[stage] for stage in sorted(place)), microbatches),)
