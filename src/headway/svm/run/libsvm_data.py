"""Samples in libsvm's text format, read by all ranks at once, and written.

A line is a sample: its label, then index:value with indices from 1, increasing; what is left out is
0. From "#" on it is a comment; lines without a label are passed over. A rank reads the lines that
begin in its share of the bytes (of those of the content, where the file is compressed), twice: to
count, so that every array is made once and in its size, and to take in.

The grammar is compiled by numba. It makes the numbers whose digits and power of ten are exact in
float64; the others, one in some, are converted by numpy in one call: all are rounded as by `float`.
"""

from __future__ import annotations

import bz2
import gzip
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy import sparse

from headway.errors import DocumentError, os_reason, shown_path
from headway.svm.arrays import Array, Matrix
from headway.svm.peers import Peers

MOST_PROBLEMS = 10
"""Lines of an error; the others are counted."""
DENSE_SHARE = 0.25
"""From this share of entries on samples are dense: less memory, and products that are faster."""
_BLOCK = 2**22
"""Bytes of text at a time; up to twenty times as many for its numbers, until they are taken in."""
_POWERS = np.array([float(f"1e{power}") for power in range(23)])
"""All that float64 holds exactly."""
_MOST_INDEX = 2**31 - 1
_LABEL, _PAIR, _ORDER = 0, 1, 2
_WIDTH = 32
"""Longest number that numpy converts; Python converts longer ones."""


@dataclass(frozen=True)
class LabelledRows:
    """The samples of a rank.

    Attributes:
        rows: float64 [n, m], an array or compressed rows; alike on all ranks, and so is m.
        labels: float64 [n].
        first: Number of the first one among those of all ranks.
        total: Samples of all ranks.
    """

    rows: Matrix
    labels: Array
    first: int
    total: int


class DataSize(NamedTuple):
    """What a part of a file holds.

    Attributes:
        entries: Numbers that are not left out.
        columns: The largest index.
        labels: At most three that differ: enough to tell two classes from several.
    """

    lines: int
    rows: int
    entries: int
    columns: int
    labels: tuple[float, ...]


def is_dense(rows: int, columns: int, entries: int) -> bool:
    """Whether samples with so many entries are held as an array."""
    return entries >= DENSE_SHARE * rows * columns


def data_sizes(path: Path, parts: int) -> list[DataSize]:
    """What each of so many ranks will read; lines are counted, not checked.

    Raises:
        DocumentError: The file cannot be read.
    """
    with _Content(path) as content:
        return [content.measure(part, parts) for part in range(parts)]


def count_columns(path: Path, peers: Peers) -> int:
    """The largest index of a file; collective."""
    with _Content(path) as content:
        own = content.measure(peers.rank, peers.ranks).columns
    return int(peers.gather(np.array([float(own)]), "counting columns").max())


def load_rows(path: Path, peers: Peers, *, columns: int = 0) -> LabelledRows:
    """This rank's share of the samples; collective.

    Args:
        columns: Of the result, where no line has more.

    Raises:
        DocumentError: The file cannot be read; or lines are broken: the first ones of all ranks,
            the same error on each.
    """
    with _Content(path) as content:
        size = content.measure(peers.rank, peers.ranks)
        sizes = peers.gather(np.array(size[:4], dtype=np.float64), "the data").astype(np.int64)
        _, total, entries, _ = sizes.sum(0).tolist()
        width = max(columns, int(sizes[:, 3].max()))
        taken = _ParsedRows(size, width, dense=is_dense(total, width, entries))
        for block in content.blocks(peers.rank, peers.ranks):
            taken.take(block)
    before = sizes[: peers.rank].sum(0).tolist()
    _raise_together(taken, path, before[0], peers)
    return LabelledRows(taken.rows, taken.labels, before[1], total)


def dump(path: Path, rows: Matrix, labels: Array) -> None:
    """Write samples, such that reading them gives the same numbers; .gz and .bz2 are compressed.

    Args:
        rows: [n, m], an array or compressed rows with increasing indices; zeros are left out.
    """
    rows = sparse.csr_matrix(rows)
    with _open(path, "wb") as file:
        for number, label in enumerate(labels):
            entries = slice(rows.indptr[number], rows.indptr[number + 1])
            pairs = zip(rows.indices[entries].tolist(), rows.data[entries].tolist(), strict=True)
            text = "".join(f" {index + 1}:{_text(value)}" for index, value in pairs if value)
            file.write(f"{_text(float(label))}{text}\n".encode())


def _text(value: float) -> str:
    """The shortest decimal that is read as this number: 3 of 3.0."""
    return repr(value).removesuffix(".0")


def _open(path: Path, mode: str) -> BinaryIO:
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix.lower(), open)
    file: BinaryIO = opener(path, mode)
    return file


class _Content:
    """The bytes of a file, decompressed.

    Raises:
        DocumentError: It cannot be read; from any method.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._explained():
            self._file = _open(path, "rb")
            # Of a compressed file this reads all of it.
            self._size = self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> _Content:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def measure(self, part: int, parts: int) -> DataSize:
        """Count the lines of one of several parts."""
        counts, labels = np.zeros(5, dtype=np.int64), np.zeros(3)
        for block in self.blocks(part, parts):
            _measure(block, counts, labels)
        lines, rows, entries, columns, differing = counts.tolist()
        return DataSize(lines, rows, entries, columns, tuple(labels[:differing].tolist()))

    def blocks(self, part: int, parts: int) -> Iterator[NDArray[np.uint8]]:
        """The lines that begin in one of several parts of the bytes, whole lines at a time."""
        start, end = (self._size * number // parts for number in (part, part + 1))
        if start == end:
            return
        with self._explained():
            # From the byte before: if it is the end of a line, one begins at `start`.
            at = self._file.seek(max(start - 1, 0))
            if start:
                at += len(self._file.readline())
        kept = b""
        while at < end:
            with self._explained():
                data = self._file.read(min(_BLOCK, end - at))
                at = at + len(data) if data else end
                # The last line may reach into the next part.
                if at >= end and not data.endswith(b"\n"):
                    data += self._file.readline() or b"\n"
            whole = data.rfind(b"\n") + 1
            block, kept = kept + data[:whole], data[whole:] if whole else kept + data
            if whole:
                yield np.frombuffer(block, dtype=np.uint8)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, zlib.error) as error:
            why = os_reason(error, self._path) if isinstance(error, OSError) else str(error)
            raise DocumentError(
                "cannot be read", where=shown_path(self._path), problems=[why]
            ) from None


class _ParsedRows:
    """Samples that have been read so far, in arrays of the size that they will have.

    Attributes:
        problems: Line of the part, and what is wrong with it; of the first ones.
        broken: Lines with a problem.
    """

    def __init__(self, size: DataSize, width: int, *, dense: bool) -> None:
        self.labels = np.empty(size.rows)
        self.problems: list[tuple[int, str]] = []
        self.broken = 0
        self._width = width
        self._count = self._entries = self._lines = 0
        self._table = np.zeros((size.rows, width)) if dense else None
        self._indptr = np.zeros(size.rows + 1, dtype=np.int64)
        self._indices = np.empty(0 if dense else size.entries, dtype=np.int32)
        self._values = np.empty(0 if dense else size.entries)

    @property
    def rows(self) -> Matrix:
        """The samples; where no line was broken."""
        if self._table is not None:
            return self._table
        parts = self._values, self._indices, self._indptr
        return sparse.csr_matrix(parts, shape=(len(self.labels), self._width))

    def take(self, block: NDArray[np.uint8]) -> None:
        """Take in whole lines."""
        counts = np.zeros(5, dtype=np.int64)
        _measure(block, counts, np.zeros(3))
        lines, rows, entries, *_ = counts.tolist()
        labels, values = np.empty(rows), np.empty(entries)
        indptr, indices = np.zeros(rows + 1, dtype=np.int64), np.empty(entries, dtype=np.int32)
        inexact = np.empty((rows + entries, 4), dtype=np.int64)
        broken = np.empty((MOST_PROBLEMS, 4), dtype=np.int64)
        found, late, wrong = _parse(block, labels, indptr, indices, values, inexact, broken)
        told = [
            (line, _told(kind, bytes(block[start:end])))
            for line, kind, start, end in broken[: min(wrong, MOST_PROBLEMS)].tolist()
        ]
        tokens = inexact[:late]
        numbers, where = _convert(block, tokens), tokens[:, 2]
        values[where[where >= 0]] = numbers[where >= 0]
        labels[-1 - where[where < 0]] = numbers[where < 0]
        for start, end, place, line in tokens[~np.isfinite(numbers)].tolist():
            while place >= 0 and block[start - 1] > 32:  # the index before it
                start -= 1
            told.append((line, _told(_PAIR if place >= 0 else _LABEL, bytes(block[start:end]))))
            wrong += 1
        self.problems += [(self._lines + line, text) for line, text in sorted(told)]
        self.broken += wrong
        self._lines += lines
        if not self.broken:
            self._keep(found, labels, indptr, indices, values)

    def _keep(self, found: int, labels: Array, indptr: Any, indices: Any, values: Array) -> None:
        stretch = slice(self._count, self._count + found)
        self.labels[stretch] = labels
        if self._table is not None:
            numbers = np.repeat(np.arange(found), np.diff(indptr))
            self._table[stretch][numbers, indices] = values
        else:
            self._indptr[self._count + 1 : self._count + 1 + found] = self._entries + indptr[1:]
            place = slice(self._entries, self._entries + len(values))
            self._indices[place], self._values[place] = indices, values
            self._entries = place.stop
        self._count += found


def _raise_together(taken: _ParsedRows, path: Path, before: int, peers: Peers) -> None:
    """One error of all ranks, if a line is broken; collective.

    Args:
        before: Lines of the ranks before this one.
    """
    own = [f"line {before + line}: {text}" for line, text in taken.problems[:MOST_PROBLEMS]]
    text = "\n".join([str(taken.broken), *own]).encode()
    packed = np.frombuffer(text, dtype=np.uint8).astype(np.float64)
    said: list[str] = []
    count = 0
    for part in peers.gather_arrays(packed, "broken lines"):
        number, *lines = bytes(part.astype(np.uint8)).decode().split("\n")
        said, count = said + lines, count + int(number)
    if count:
        shown = said[:MOST_PROBLEMS]
        shown += [f"... and {count - len(shown)} more lines"] if count > len(shown) else []
        raise DocumentError("is not in libsvm's format", where=shown_path(path), problems=shown)


def _told(kind: int, token: bytes) -> str:
    """What is wrong with a token."""
    text = token.decode("utf-8", errors="replace")
    shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
    if kind == _LABEL:
        return f"the label {shown} is {_why(text)}"
    if kind == _ORDER:
        return f"{shown}: indices must increase along a line"
    match = re.fullmatch(r"([+-]?\d+):(.*)", text, re.ASCII)
    if match is None:
        return f"{shown} is not index:value"
    index = int(match[1])
    if index < 1:
        return f"{shown}: indices begin at 1"
    if index > _MOST_INDEX:
        return f"{shown}: indices end at {_MOST_INDEX}"
    return f"{shown}: the value is {_why(match[2])}"


def _why(text: str) -> str:
    try:
        finite = np.isfinite(float(text))
    except ValueError:
        return "no number"
    return "no number" if finite else "not finite"


def _convert(block: NDArray[np.uint8], tokens: NDArray[np.int64]) -> Array:
    """The numbers of tokens [k, start and end], each of the form of a number."""
    lengths = tokens[:, 1] - tokens[:, 0]
    short = np.zeros((len(tokens), _WIDTH), dtype=np.uint8)
    _copy_tokens(block, tokens, short)
    numbers: Array = short.view(f"S{_WIDTH}").ravel().astype(np.float64)
    for number in np.flatnonzero(lengths > _WIDTH):
        numbers[number] = float(bytes(block[tokens[number, 0] : tokens[number, 1]]))
    return numbers


@njit(cache=True)
def _copy_tokens(block: Any, tokens: Any, out: Any) -> None:
    for number in range(len(tokens)):
        start, end = tokens[number, 0], tokens[number, 1]
        if end - start > out.shape[1]:
            out[number, 0] = 48  # "0"; converted by Python
            continue
        for place in range(end - start):
            out[number, place] = block[start + place]


@njit(cache=True)
def _number(text: Any, at: int) -> tuple[int, float, int]:
    """Read a number: where it ends, -1 if there is none; its value; whether that is exact."""
    negative = False
    if text[at] == 43 or text[at] == 45:
        negative = text[at] == 45
        at += 1
    mantissa, digits, power, seen = np.int64(0), 0, 0, False
    point = False
    while True:
        byte = text[at]
        if 48 <= byte <= 57:
            seen = True
            if digits < 18:
                mantissa = mantissa * 10 + np.int64(byte - 48)
                if mantissa:
                    digits += 1
                if point:
                    power -= 1
            else:
                digits += 1  # too many: not exact
                if not point:
                    power += 1
        elif byte == 46 and not point:
            point = True
        else:
            break
        at += 1
    if not seen:
        return -1, 0.0, 0
    if text[at] == 101 or text[at] == 69:  # "e"
        at += 1
        below = False
        if text[at] == 43 or text[at] == 45:
            below = text[at] == 45
            at += 1
        exponent, some = 0, False
        while 48 <= text[at] <= 57:
            some = True
            if exponent < 100000:
                exponent = exponent * 10 + (text[at] - 48)
            at += 1
        if not some:
            return -1, 0.0, 0
        power += -exponent if below else exponent
    exact = digits <= 18 and mantissa <= 9007199254740992 and -22 <= power <= 22
    value = 0.0
    if exact:
        value = float(mantissa)
        value = value * _POWERS[power] if power >= 0 else value / _POWERS[-power]
        if negative:
            value = -value
    return at, value, 1 if exact else 0


@njit(cache=True)
def _measure(text: Any, counts: Any, labels: Any) -> None:
    """Add lines, samples, colons, the largest index, and labels that differ, of whole lines."""
    used, comment, index, digits = False, False, 0, False
    for at in range(len(text)):
        byte = text[at]
        if byte == 10:
            counts[0] += 1
            if used:
                counts[1] += 1
            used, comment, index = False, False, 0
        elif comment:
            continue
        elif byte == 35:  # "#"
            comment = True
        elif byte == 58:  # ":"
            counts[2] += 1
            if digits and index <= 2147483647 and index > counts[3]:
                counts[3] = index
        elif byte != 32 and byte != 9 and byte != 13:
            if not used and counts[4] < len(labels):
                _note_label(text, at, counts, labels)
            used = True
            if 48 <= byte <= 57:
                if digits:
                    if index <= 2147483647:
                        index = index * 10 + (byte - 48)
                else:
                    index = byte - 48
                digits = True
                continue
        digits = False


@njit(cache=True)
def _note_label(text: Any, at: int, counts: Any, labels: Any) -> None:
    _, label, _ = _number(text, at)
    for known in labels[: counts[4]]:
        if known == label:
            return
    labels[counts[4]] = label
    counts[4] += 1


@njit(cache=True)
def _ends(byte: int) -> bool:
    return byte == 32 or byte == 9 or byte == 13 or byte == 10 or byte == 35


@njit(cache=True)
def _parse(
    text: Any, labels: Any, indptr: Any, indices: Any, values: Any, slow: Any, broken: Any
) -> tuple[int, int, int]:
    """Parse whole lines.

    Args:
        slow: [k, 4] of numbers that are not exact: start, end, entry (or -1 - sample), line.
        broken: [k, 4] of the first broken lines: line from 1, kind, start and end of the token.

    Returns:
        Samples, numbers that are not exact, broken lines.
    """
    at, line, rows, entries, late, wrong = 0, 1, 0, 0, 0, 0
    size = len(text)
    while at < size:
        byte = text[at]
        if byte == 32 or byte == 9 or byte == 13:
            at += 1
            continue
        if byte == 10 or byte == 35:
            while text[at] != 10:
                at += 1
            at += 1
            line += 1
            continue
        kind, start = -1, at
        first_entry, first_late = entries, late
        end, value, exact = _number(text, at)
        if end < 0 or not _ends(text[end]):
            kind = 0
        else:
            labels[rows] = value
            if not exact:
                slow[late, 0], slow[late, 1], slow[late, 2], slow[late, 3] = (
                    at,
                    end,
                    -1 - rows,
                    line,
                )
                late += 1
            at = end
            last = np.int64(0)
            while True:
                while text[at] == 32 or text[at] == 9 or text[at] == 13:
                    at += 1
                if text[at] == 10 or text[at] == 35:
                    break
                start = at
                index = np.int64(0)
                while 48 <= text[at] <= 57 and index <= 2147483647:
                    index = index * 10 + np.int64(text[at] - 48)
                    at += 1
                if text[at] != 58 or index < 1 or index > 2147483647:
                    kind = 1
                    break
                end, value, exact = _number(text, at + 1)
                if end < 0 or not _ends(text[end]):
                    kind = 1
                    break
                if index <= last:
                    kind = 2
                    break
                last = index
                indices[entries] = index - 1
                values[entries] = value
                if not exact:
                    slow[late, 0], slow[late, 1] = at + 1, end
                    slow[late, 2], slow[late, 3] = entries, line
                    late += 1
                entries += 1
                at = end
        if kind >= 0:
            if wrong < len(broken):
                end = start
                while not _ends(text[end]):
                    end += 1
                broken[wrong, 0], broken[wrong, 1] = line, kind
                broken[wrong, 2], broken[wrong, 3] = start, end
            wrong += 1
            entries, late = first_entry, first_late
        else:
            rows += 1
            indptr[rows] = entries
        while text[at] != 10:
            at += 1
        at += 1
        line += 1
    return rows, late, wrong
