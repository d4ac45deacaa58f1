"""The header of headway's schedule tables: everything that the cells do not say.

    # headway schedule
    # name = chimera
    # pipe d0 = ranks 0-3, microbatches 0 1
    # pipe u0 = ranks 3 2 1 0, microbatches 2 3
    # most_activations = 4
    # slots = columns

Keys are the attributes of `PipelineSchedule`; what has its default is left out. Invariant: an
unknown or ill-written key is an error that names the nearest legal one, never a comment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from headway.documents import nearest
from headway.schedule.pipeline import Pipe, PipelineSchedule
from headway.schedule.sheet import Entry, Problem

_PIPE = re.compile(r"ranks\s+(?P<ranks>[^,]*?)\s*,\s*microbatches\s+(?P<microbatches>[^,]*?)")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?")
_SKIP = re.compile(r"(?P<earlier>\d+)>(?P<later>\d+)")
_SHORTEST_RANGE = 3


@dataclass(frozen=True, slots=True)
class Header:
    """What a header said, and defaults; see `PipelineSchedule`. Recompute None: every stage."""

    name: str = ""
    pipes: tuple[Pipe, ...] = ()
    recompute: tuple[int, ...] | None = ()
    blockwise: bool = False
    halves: bool = False
    flush: bool = True
    skips: tuple[tuple[int, int], ...] = ()
    most_activations: float | None = None
    slots: bool = False


def header_lines(schedule: PipelineSchedule, *, slots: bool) -> list[str]:
    """The comment lines above a table.

    Args:
        schedule: Whose table.
        slots: The columns of the table are slots.
    """
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


def read_header(entries: Sequence[Entry], problems: list[Problem]) -> Header:
    """Read the entries; what is wrong with them is added to the problems."""
    header = Header()
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        if entry.sign == ":" and not get_close_matches(entry.key, _KEYS, cutoff=0.75):
            continue  # a comment
        try:
            if (entry.key, entry.part) in seen:
                raise ValueError(f"{entry.key} {entry.part}".strip() + " is there already")
            seen.add((entry.key, entry.part))
            header = _with(header, entry)
        except ValueError as error:
            problems.append(Problem(entry.line, entry.column, str(error)))
    return header


def _with(header: Header, entry: Entry) -> Header:
    if entry.key not in _KEYS:
        said = f"unknown key {entry.key}{nearest(entry.key, _KEYS)}"
        raise ValueError(f"{said} (begin a comment with ##)")
    if entry.sign != "=":
        raise ValueError(f"write = behind {entry.key}")
    if entry.key == "pipe":
        return replace(header, pipes=(*header.pipes, _pipe(entry)))
    if entry.part:
        raise ValueError(f"{entry.key} stands alone before =, without {entry.part}")
    return replace(header, **{entry.key: _READERS[entry.key](entry.value)})


def _pipe(entry: Entry) -> Pipe:
    found = _PIPE.fullmatch(entry.value)
    if found is None or not entry.part:
        raise ValueError("write a pipe like '# pipe d0 = ranks 0-3, microbatches 0 1'")
    return Pipe(entry.part, _numbers(found["ranks"]), _numbers(found["microbatches"]))


def _numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for word in text.split() if text != "none" else ():
        found = _RANGE.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is no number and no range like 0-3")
        first = int(found["first"])
        last = int(found["last"] or first)
        if last < first:
            raise ValueError(f"the range {word} goes down; write its numbers one by one")
        numbers += range(first, last + 1)
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
        skips.append((int(found["earlier"]), int(found["later"])))
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
