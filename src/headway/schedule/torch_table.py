"""The CSV dialect of torch's pipelining runtime: cells like 2F0, one row per rank.

torch numbers the stages of all pipes through (pipe * stages + stage) and the micro-batches of each
pipe from 0. Its RECV_F is what POST is here: the receiver waits at the action that uses the
message. Invariant: compute and messages keep their order both ways. Source: the `_Action` texts and
`_load_csv` of torch.distributed.pipelining.schedules (2.13).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.errors import PlanError
from headway.schedule.action import COMPUTE, NONE, Action, Kind
from headway.schedule.pipeline import Pipe, PipelineSchedule
from headway.schedule.sheet import Problem, Text, refuse, texts_of

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
            number = place.get((action.pipe, action.microbatch), NONE)
            texts += [
                f"{first[action.pipe] + action.stage}{word}" for word in _words(action, number)
            ]
        rows.append(",".join(texts) or ",")
    return "\n".join(rows) + "\n"


def _words(action: Action, microbatch: int) -> Iterator[str]:
    """Kind and micro-batch as torch writes them; nothing for what torch does not say."""
    if action.kind in COMPUTE:
        yield f"{action.kind}{microbatch}"
    elif action.kind == Kind.SYNC:
        yield "REDUCE_GRAD"
    elif action.kind in (Kind.SEND, Kind.POST):
        verb = "SEND" if action.kind == Kind.SEND else "RECV"
        yield f"{verb}_{'B' if action.carries_gradient else 'F'}{microbatch}"


def looks_like_torch(text: str) -> bool:
    """Whether the first cell of a table is one of torch's."""
    first = next((cell.text for row in texts_of(text).rows for cell in row if cell.text), "")
    return bool(_CELL.fullmatch(first) or _OVERLAP.fullmatch(first))


@dataclass(frozen=True, slots=True)
class _Word:
    """A cell of torch's: a stage of all pipes, a kind, a micro-batch of its pipe (or NONE)."""

    stage: int
    kind: str
    microbatch: int
    cell: Text


def from_torch_csv(
    text: str, *, where: str = "the table", name: str = "torch", pipes: int = 1
) -> PipelineSchedule:
    """Read a table that torch, or somebody for torch, wrote.

    OVERLAP_F_B becomes its two parts in turn. UNSHARD and RESHARD concern FSDP and are left out.
    A RECV is put before the action that uses its message, a WAIT for each REDUCE_GRAD at the end.

    Args:
        text: Of the file; empty cells are idle.
        where: Name of the file, for messages.
        name: Of the schedule.
        pipes: How many there are, half of them up where there are more than one.

    Raises:
        DocumentError: With all problems, by line and column.
    """
    sheet = texts_of(text)
    problems: list[Problem] = []
    rows = [[w for cell in row for w in _parse(cell, problems)] for row in sheet.rows]
    stages = 1 + max((word.stage for row in rows for word in row), default=-1)
    if not stages or stages % pipes:
        said = f"{stages} stages cannot be those of {pipes} pipes; give the right number of pipes"
        problems.append(Problem(1, 1, said))
    refuse(problems, where)
    length = stages // pipes
    chains = _chains(rows, pipes, length, problems)
    refuse(problems, where)
    order = tuple(tuple(_actions(row, chains, length)) for row in rows)
    return PipelineSchedule(name=name, pipes=chains, order=order)


def _parse(cell: Text, problems: list[Problem]) -> list[_Word]:
    overlap = _OVERLAP.fullmatch(cell.text)
    if overlap:
        start = cell.column + 1
        parts, words = overlap["inner"].split(";"), list[_Word]()
        for part in parts:
            words += _parse(Text(part.strip(), cell.line, start), problems)
            start += len(part) + 1
        return words
    found = _CELL.fullmatch(cell.text)
    if found is None:
        if cell.text:
            said = f"{cell.text!r} is no action of torch; write one like 2F0 or 2SEND_F0"
            problems.append(Problem(cell.line, cell.column, said))
        return []
    if found["other"]:
        word = _Word(int(found["stage"]), found["other"], NONE, cell)
        return [] if word.kind in _LEFT_OUT else [word]
    return [_Word(int(found["stage"]), found["kind"], int(found["microbatch"]), cell)]


def _chains(
    rows: Sequence[Sequence[_Word]], pipes: int, length: int, problems: list[Problem]
) -> tuple[Pipe, ...]:
    """The pipes, with the rank of every stage and all micro-batches."""
    place: dict[int, int] = {}
    most = [0] * pipes
    for rank, row in enumerate(rows):
        for word in row:
            most[word.stage // length] = max(most[word.stage // length], word.microbatch + 1)
            if place.setdefault(word.stage, rank) != rank:
                said = f"stage {word.stage} is on rank {place[word.stage]} already"
                problems.append(Problem(word.cell.line, word.cell.column, said))
    missing = [str(stage) for stage in range(pipes * length) if stage not in place]
    if missing:
        problems.append(Problem(1, 1, f"no rank has stage {', '.join(missing)}"))
        return ()
    half = (pipes + 1) // 2
    chains, first = list[Pipe](), 0
    for number in range(pipes):
        name = f"d{number}" if number < half else f"u{number - half}"
        placement = tuple(place[number * length + stage] for stage in range(length))
        chains.append(Pipe(name, placement, tuple(range(first, first + most[number]))))
        first += most[number]
    return tuple(chains)


def _actions(row: Sequence[_Word], pipes: Sequence[Pipe], length: int) -> Iterator[Action]:
    """A rank's actions, with the RECVs and WAITs that torch does not write."""
    posted: dict[tuple[str, int, int, bool], list[Action]] = {}
    waits = []
    for word in row:
        pipe, stage = pipes[word.stage // length], word.stage % length
        microbatch = NONE if word.microbatch == NONE else pipe.microbatches[word.microbatch]
        if word.kind == "REDUCE_GRAD":
            yield Action(Kind.SYNC, pipe.name, stage)
            waits.append(Action(Kind.WAIT, pipe.name, stage))
        elif word.kind in _BEHIND:
            kind = Kind.SEND if word.kind.startswith("SEND") else Kind.POST
            message = Action(kind, pipe.name, stage, microbatch, stage + _BEHIND[word.kind])
            yield message
            if kind == Kind.POST:
                key = (pipe.name, stage, microbatch, message.carries_gradient)
                posted.setdefault(key, []).append(message)
        else:
            backward = word.kind in "BI"
            if word.kind != Kind.WEIGHT_GRAD:
                for post in posted.pop((pipe.name, stage, microbatch, backward), ()):
                    yield Action(Kind.RECV, pipe.name, stage, microbatch, post.other)
            yield Action(Kind(word.kind), pipe.name, stage, microbatch)
    yield from waits
