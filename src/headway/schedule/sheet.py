"""Tables as texts: rows of cells that know their line and column, and header entries.

One row per rank, cells parted by commas; `# key = value` is a header entry, other lines that begin
with # are comments, blank lines count for nothing. Invariant: every text of the file can be named
by line and column (both from 1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from headway.errors import DocumentError

_ENTRY = re.compile(
    r"#\s*(?P<key>[A-Za-z_][\w-]*)(?:\s+(?P<part>\w+))?\s*(?P<sign>[=:])\s*(?P<value>.*)"
)

_SHOWN = 20  # problems; a file that is no table has one in every cell


class Text(NamedTuple):
    """A cell, without spaces and quotation marks around it."""

    text: str
    line: int
    column: int


class Entry(NamedTuple):
    """A header entry: `# key part = value`; with ":" as its sign it may be a comment."""

    key: str
    part: str
    sign: str
    value: str
    line: int
    column: int


class Sheet(NamedTuple):
    """What a file says."""

    entries: list[Entry]
    rows: list[list[Text]]


class Problem(NamedTuple):
    """What is wrong in a place of the file."""

    line: int
    column: int
    text: str


def texts_of(text: str) -> Sheet:
    """Part a file into entries and rows."""
    sheet = Sheet([], [])
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        entry = _ENTRY.match(line.lstrip())
        if entry:
            column = len(line) - len(line.lstrip()) + entry.start("key") + 1
            part, value = entry["part"] or "", entry["value"].strip()
            sheet.entries.append(Entry(entry["key"], part, entry["sign"], value, number, column))
        elif line.strip() and not line.lstrip().startswith("#"):
            sheet.rows.append(_cells(line, number))
    return sheet


def _cells(line: str, number: int) -> list[Text]:
    cells, start = [], 0
    for part in line.split(","):
        text = part.strip().strip('"').strip()
        offset = part.find(text) if text else 0
        cells.append(Text(text, number, start + offset + 1))
        start += len(part) + 1
    return cells


def refuse(problems: Sequence[Problem], where: str) -> None:
    """Say what is wrong with a file, the first places of many.

    Raises:
        DocumentError: There is a problem.
    """
    if problems:
        ordered = sorted(problems, key=lambda problem: problem[:2])
        lines = [f"{where}:{line}:{column}  {text}" for line, column, text in ordered[:_SHOWN]]
        if len(ordered) > _SHOWN:
            lines.append(f"... and {len(ordered) - _SHOWN} more")
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise DocumentError(f"{count}:", where=where, problems=lines)
