"""Criteo's logs of displayed advertisements, as text.

A line has 40 fields between tabs: the label (0 or 1), 13 whole numbers, 26 categories of up to
eight hexadecimal digits; numbers and categories may be missing. A file of the terabyte set is a
day; the set of Kaggle is one file. Files may be compressed with gzip.

Every rank reads the lines of all samples, and parses only its own: lines are what the stream
gives, and parsing is its collate function.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headway.data.stream import StreamSource
from headway.errors import DataError, RecipeError
from headway.workloads.recommender.click_data import ClickData, Field

NUMBERS, CATEGORIES = 13, 26
HELD_OUT = 10
"""Of a single file every tenth line validates."""

Line: TypeAlias = tuple[str, int, bytes]
"""File, number from 1 on, and text of a line."""


@dataclass
class Lines:
    """The lines of files, one after the other; a stream that can go on where it was.

    Args:
        keep: Of the lines of a file, by number: "all", "training" (not every tenth) or "held out"
            (every tenth).
    """

    files: tuple[Path, ...]
    keep: str = "all"
    first: int = 0
    offset: int = 0
    passed: int = 0

    def __post_init__(self) -> None:
        self._at = (self.first, self.offset, self.passed)

    def __iter__(self) -> Iterator[Line]:
        start, offset, passed = self.first, self.offset, self.passed
        for number in range(start, len(self.files)):
            file = self.files[number]
            with _opened(file) as text:
                text.seek(offset)
                for line, content in enumerate(_read(file, text, passed), passed + 1):
                    # The place behind this line, which `state_dict` is asked for.
                    self._at = (number, text.tell(), line)
                    if self.keep == "all" or (line % HELD_OUT == 0) == (self.keep == "held out"):
                        yield str(file), line, content
            offset = passed = 0

    def state_dict(self) -> dict[str, int]:
        """The place behind the line that was given last."""
        return dict(zip(("file", "offset", "line"), self._at, strict=True))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.first, self.offset, self.passed = state["file"], state["offset"], state["line"]
        self._at = (self.first, self.offset, self.passed)


def _opened(file: Path) -> IO[bytes]:
    try:
        with file.open("rb") as start:
            packed = start.read(2) == b"\x1f\x8b"
        return gzip.open(file, "rb") if packed else file.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise DataError(
            "a file of samples cannot be read", where=str(file), why=str(error)
        ) from None


def _read(file: Path, text: IO[bytes], line: int) -> Iterator[bytes]:
    try:
        while content := text.readline():
            line += 1
            yield content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            "a compressed file is cut short or damaged",
            where=f"{file}:{line + 1}",
            why=str(error),
            fix="Fetch it again.",
        ) from error


def parse(lines: Sequence[Line], rows: int) -> list[Tensor]:
    """Lines as a batch.

    Numbers become log(1 + x), 0 where they are missing or negative; a category becomes
    1 + value mod (rows - 1), 0 where it is missing.

    Args:
        rows: Of each table.

    Returns:
        dense [N, 13] float32, ids [N, 26] int64, labels [N] float32.

    Raises:
        DataError: A line does not have 40 fields, or a field is not what it must be.
    """
    fields = [_fields(line) for line in lines]
    numbers = [[int(text or b"0") for text in line[1 : 1 + NUMBERS]] for line in fields]
    ids = [
        [1 + int(text, 16) % (rows - 1) if text else 0 for text in line[1 + NUMBERS :]]
        for line in fields
    ]
    scaled = np.log1p(np.maximum(np.array(numbers, dtype=np.float64), 0.0))
    return [
        torch.from_numpy(scaled.astype(np.float32)),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor([float(line[0]) for line in fields], dtype=torch.float32),
    ]


_LABEL, _NUMBER, _CATEGORY = rb"[01]", rb"(?:-?[0-9]{1,18})?", rb"[0-9A-Fa-f]{0,16}"
_LINE = re.compile(
    _LABEL + rb"(?:\t%b){%d}(?:\t%b){%d}" % (_NUMBER, NUMBERS, _CATEGORY, CATEGORIES)
)


def _fields(line: Line) -> list[bytes]:
    """The 40 fields of a line, which are what they must be."""
    file, number, content = line
    content = content.rstrip(b"\r\n")
    fields = content.split(b"\t")
    # One look at the whole line: a look at each field would take twice the time.
    if _LINE.fullmatch(content):
        return fields
    where = f"{file}:{number}"
    if len(fields) != 1 + NUMBERS + CATEGORIES:
        raise DataError(
            f"a line of {len(fields)} fields",
            where=where,
            why=f"A label, {NUMBERS} numbers and {CATEGORIES} categories are "
            f"{1 + NUMBERS + CATEGORIES} fields, separated by tabs.",
        )
    kinds = [("the label", _LABEL, "0 or 1")]
    kinds += [(f"number I{n}", _NUMBER, "a whole number") for n in range(1, NUMBERS + 1)]
    kinds += [(f"category C{n}", _CATEGORY, "hexadecimal digits") for n in range(1, CATEGORIES + 1)]
    wrong = (
        _wrong(where, name, text, legal)
        for (name, pattern, legal), text in zip(kinds, fields, strict=True)
        if not re.fullmatch(pattern, text)
    )
    raise next(wrong)


def _wrong(where: str, field: str, text: bytes, legal: str) -> DataError:
    shown = text[:40].decode("utf-8", "backslashreplace")
    return DataError(f"{field} is {shown!r}", where=where, why=f"It must be {legal}.")


def criteo(path: str | Path | None, *, rows: int = 100_000) -> ClickData:
    """Clicks on advertisements.

    Args:
        path: A file, of which every tenth line validates; or a folder of days, of which the last
            one validates, in the order of the numbers in their names.
        rows: Of each of the 26 tables; categories share rows.

    Raises:
        DataError: There is no such file, or the folder has fewer than two files.
        RecipeError: `rows` is less than 2.
    """
    if rows < 2:
        raise RecipeError(f"tables of {rows} rows", why="One row is for what is missing.")
    found = _files(path)
    if len(found) == 1:
        halves = [Lines(found, keep) for keep in ("training", "held out")]
    else:
        halves = [Lines(found[:-1]), Lines(found[-1:])]
    training, validation = (StreamSource(lines, collate=_Parse(rows)) for lines in halves)
    return ClickData(
        "criteo",
        tuple(f"I{n}" for n in range(1, NUMBERS + 1)),
        tuple(Field(f"C{n}", rows) for n in range(1, CATEGORIES + 1)),
        training,
        validation,
    )


@dataclass(frozen=True)
class _Parse:
    rows: int

    def __call__(self, samples: list[Any]) -> list[Tensor]:
        return parse(samples, self.rows)


def _files(path: str | Path | None) -> tuple[Path, ...]:
    if path is None:
        raise DataError(
            "the files of Criteo are not here",
            why="No package has them, and their terms are Criteo's.",
            fix="Get them from Criteo, and name the file or the folder of days with "
            "arguments.path; or try it with arguments.data=random.",
        )
    path = Path(path)
    if path.is_file():
        return (path,)
    files = sorted((f for f in path.glob("*") if f.is_file()), key=_day) if path.is_dir() else []
    if len(files) < 2:
        raise DataError(
            "not a file of samples, nor a folder of days",
            where=str(path),
            why=f"It has {len(files)} files; the last of two or more validates."
            if path.is_dir()
            else "There is no such file.",
        )
    return tuple(files)


def _day(file: Path) -> tuple[int, str]:
    numbers = re.findall(r"\d+", file.name)
    return (int(numbers[0]) if numbers else 0, file.name)
