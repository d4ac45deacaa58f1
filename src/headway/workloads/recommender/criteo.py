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
    labels, dense, ids = [], [], []
    for file, number, content in lines:
        fields = content.rstrip(b"\r\n").split(b"\t")
        where = f"{file}:{number}"
        if len(fields) != 1 + NUMBERS + CATEGORIES:
            raise DataError(
                f"a line of {len(fields)} fields",
                where=where,
                why=f"A label, {NUMBERS} numbers and {CATEGORIES} categories are "
                f"{1 + NUMBERS + CATEGORIES} fields, separated by tabs.",
            )
        if fields[0] not in (b"0", b"1"):
            raise _wrong(where, "the label", fields[0], "0 or 1")
        labels.append(float(fields[0]))
        dense.append([_number(text, where, n) for n, text in enumerate(fields[1 : 1 + NUMBERS], 1)])
        ids.append([_id(text, where, n, rows) for n, text in enumerate(fields[1 + NUMBERS :], 1)])
    scaled = np.log1p(np.maximum(np.array(dense, dtype=np.float64), 0.0))
    return [
        torch.from_numpy(scaled.astype(np.float32)),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(labels, dtype=torch.float32),
    ]


_WHOLE = re.compile(rb"-?[0-9]{1,18}")
_HEXADECIMAL = re.compile(rb"[0-9A-Fa-f]{1,16}")


def _number(text: bytes, where: str, number: int) -> int:
    if not text:
        return 0
    if not _WHOLE.fullmatch(text):
        raise _wrong(where, f"number I{number}", text, "a whole number")
    return int(text)


def _id(text: bytes, where: str, number: int, rows: int) -> int:
    if not text:
        return 0
    if not _HEXADECIMAL.fullmatch(text):
        raise _wrong(where, f"category C{number}", text, "hexadecimal digits")
    return 1 + int(text, 16) % (rows - 1)


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
