"""Samples from memory-mapped files: windows of a token file, rows of .npy files.

A file that shrinks while it is mapped kills the process with SIGBUS at the next touch, without a
word. So its size is asked for before every read (about 2 us) and a `DataError` names the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from headway.errors import DataError

Array = NDArray[Any]


class MemmapSource:
    """Windows of a flat file of tokens: sample i is the window + 1 tokens from i * window on.

    Args:
        path: A raw file of numbers, without a header.
        window: Tokens of a sample; the target is the input moved on by one token.
        dtype: Type of the numbers in the file, a whole-number type, for example "uint16".
        offset: Bytes before the first token.

    Raises:
        DataError: The file is missing, holds part of a number, or less than one sample.
    """

    def __init__(
        self, path: str | Path, *, window: int, dtype: DTypeLike = "uint8", offset: int = 0
    ) -> None:
        self.path, self.window, self.offset = Path(path), window, offset
        self.dtype = np.dtype(dtype)
        if self.dtype.kind not in "iu":
            raise DataError(
                f"tokens of type {self.dtype}",
                where=str(path),
                why="Tokens are whole numbers.",
                fix='Give the type that the file was written with, for example dtype="uint16".',
            )
        if window < 1:
            raise DataError(f"a window of {window} tokens", where=str(path), fix="Give 1 or more.")
        self._tokens = self._count()
        self._windows: Array | None = None

    def __len__(self) -> int:
        return (self._tokens - 1) // self.window

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Input and target, each int64 [len(indices), window].

        Raises:
            DataError: The file has vanished or was cut short.
        """
        _size(self.path, self.offset + self._tokens * self.dtype.itemsize)
        rows = self._mapped()[np.asarray(indices, dtype=np.int64)]
        return (
            torch.from_numpy(rows[:, :-1].astype(np.int64)),
            torch.from_numpy(rows[:, 1:].astype(np.int64)),
        )

    def _count(self) -> int:
        """Tokens of the file."""
        held = max(_size(self.path) - self.offset, 0)
        tokens, rest = divmod(held, self.dtype.itemsize)
        if rest:
            raise DataError(
                f"not a whole number of {self.dtype} tokens",
                where=str(self.path),
                why=f"{held} bytes are {tokens} tokens of {self.dtype.itemsize} bytes and {rest}.",
                fix="Give the dtype that the file was written with; or the file was cut short.",
            )
        if tokens <= self.window:
            raise DataError(
                "less than one sample",
                where=str(self.path),
                why=f"It holds {tokens} tokens; a sample needs {self.window + 1}.",
                fix="Give a shorter window, or a longer file.",
            )
        return tokens

    def _mapped(self) -> Array:
        """The overlapping windows of the file [len(self), window + 1], mapped at the first read."""
        if self._windows is None:
            try:
                tokens = np.memmap(
                    self.path, self.dtype, mode="r", offset=self.offset, shape=(self._tokens,)
                )
            except OSError as error:
                raise unreadable(self.path, error) from error
            windows = sliding_window_view(tokens.view(np.ndarray), self.window + 1)
            self._windows = windows[:: self.window]
        return self._windows

    def __getstate__(self) -> dict[str, Any]:
        """Without the map: numpy would put the contents of the file into the pickle."""
        return self.__dict__ | {"_windows": None}


class ArraySource:
    """The rows of .npy files; several files are aligned: row i of each belongs to sample i.

    Args:
        paths: Files written by `numpy.save`. One file gives a tensor, several a tuple of tensors,
            of the types in the files.

    Raises:
        DataError: A file is missing, is no .npy file of numbers, or the lengths differ.
    """

    def __init__(self, *paths: str | Path) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self._arrays: tuple[Array, ...] | None = tuple(open_npy(path) for path in self.paths)
        self._sizes = tuple(_size(path) for path in self.paths)
        lengths = [len(array) for array in self._arrays]
        if len(set(lengths)) != 1:
            each = ", ".join(f"{p}: {n}" for p, n in zip(self.paths, lengths, strict=True))
            raise DataError(
                "files of unequal length" if lengths else "no files",
                why=f"Rows of {each}." if lengths else "",
                fix="Give files whose rows belong together.",
            )
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Sequence[int]) -> Tensor | tuple[Tensor, ...]:
        """One tensor [len(indices), ...] for each file.

        Raises:
            DataError: A file has vanished or was cut short.
        """
        for path, size in zip(self.paths, self._sizes, strict=True):
            _size(path, size)
        if self._arrays is None:
            self._arrays = tuple(open_npy(path) for path in self.paths)
        rows = np.asarray(indices, dtype=np.int64)
        tensors = tuple(torch.from_numpy(native(array[rows])) for array in self._arrays)
        return tensors[0] if len(tensors) == 1 else tensors

    def __getstate__(self) -> dict[str, Any]:
        """Without the maps: numpy would put the contents of the files into the pickle."""
        return self.__dict__ | {"_arrays": None}


def open_npy(path: Path) -> Array:
    """The mapped array of a .npy file.

    Raises:
        DataError: It is missing, or holds no array of numbers.
    """
    _size(path)
    try:
        array = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, EOFError) as error:
        raise DataError(
            "not a sound .npy file",
            where=str(path),
            why=str(error),
            fix="Write it with numpy.save; or it was cut short.",
        ) from error
    if array.ndim == 0 or array.dtype.kind not in "biufc":
        raise DataError(
            f"rows of type {array.dtype}" if array.ndim else "a single number, not rows",
            where=str(path),
            fix="Give an array of numbers whose dimension 0 counts the samples.",
        )
    return array


def native(array: Array) -> Array:
    """In the byte order of this machine: torch knows no other."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _size(path: Path, needed: int = 0) -> int:
    """Bytes of a file that must exist and have at least `needed` of them."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from error
    if size < needed:
        raise DataError(
            "data file was cut short",
            where=str(path),
            why=f"It had {needed} bytes when the run began and has {size} now.",
            fix="Restore the file and start again from the last checkpoint.",
        )
    return size


def unreadable(path: Path, error: OSError) -> DataError:
    """The error of a file that the system does not open."""
    return DataError(
        "data file cannot be read",
        where=str(path),
        why=f"{error.strerror or error}.",
        fix="Put it back, or correct the path.",
    )
