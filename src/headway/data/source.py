"""Sources of samples (data sets, tensors, token files, .npy), and how samples become a batch.

A source gives random access to samples and knows nothing about ranks, order or batches. `read` is a
function of its indices alone. What draws random numbers (augmentation) takes a seed per sample from
the loader (`SeededSource`), so that no number of ranks or workers changes a sample; this covers
the global generators of torch (CPU), numpy and random, not those that a data set makes for itself
or those of an accelerator.

A file that shrinks while it is mapped kills the process with SIGBUS at the next touch. So its size
is asked for before every read (about 2 us) and a `DataError` names the file.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import DTypeLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from headway.errors import DataError, HeadwayError
from headway.keywords import checks_keywords


class GlobalGenerators:
    """The state of the three generators at one moment: were they used since, and put it back.

    Taking and comparing it costs about 0.2 ms each, most of it numpy's.
    """

    def __init__(self) -> None:
        self._state = _now()
        self._moved = True

    def used(self) -> bool:
        self._moved = not _same(self._state, _now())
        return self._moved

    def seed(self, seed: int) -> None:
        """Start the generators from 64 bits."""
        self._moved = True
        # Not `torch.manual_seed`: that also seeds every accelerator, or queues it, on each call.
        torch.default_generator.manual_seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # takes words of 32 bits
        random.seed(seed)

    def restore(self) -> None:
        """Put the generators back, unless `used` has just said that they did not move."""
        if self._moved:
            torch.set_rng_state(self._state["torch"])
            np.random.set_state(self._state["numpy"])
            random.setstate(self._state["python"])


def _now() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def _same(one: Any, other: Any) -> bool:
    # Tuples compare whole, which is fast for Python's 625 words.
    if isinstance(one, dict):
        return all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


@contextmanager
def explained(what: str, where: str = "") -> Iterator[None]:
    """Say what failed in code of the user's.

    Raises:
        DataError: In place of any exception but a HeadwayError, which says so itself.
    """
    try:
        yield
    # A wrapper would hide its advice.
    except HeadwayError:
        raise
    except Exception as error:
        raise DataError(what, where=where, why=f"{type(error).__name__}: {error}") from error


Collate = Callable[[list[Any]], Any]


class DatasetSource:
    """Any map-style torch data set.

    A micro-batch is first read as torch reads it, with `__getitems__` if there is one. If that used
    a random generator, the result is thrown away and the samples are read one by one with
    `__getitem__`, each with its own seeds; from then on this source does so at once.

    Args:
        collate: Makes one batch of a list of samples; torch's `default_collate` if not given. It
            must treat every sample alike: what it draws at random depends on the micro-batch.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None = None) -> None:
        self.dataset: Any = dataset
        self._kind = type(dataset).__name__
        self.collate = collate or default_collate
        self._draws = False

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Sequence[int]) -> Any:
        """The samples as one batch; what they draw comes from the global generators as they are."""
        with explained(f"samples {_format_indices(indices)} cannot be read", self._kind):
            try:
                samples = self._fetch(indices)
            except Exception:
                for index in indices:  # one of them alone fails too: then the error names it
                    self._sample(index)
                raise
        return self._joined(indices, samples)

    def read_seeded(self, indices: Sequence[int], seeds: Sequence[int]) -> Any:
        """As `read`, with one 64-bit seed per sample; the global generators stay as they were.

        Raises:
            DataError: A sample cannot be read, or the samples do not fit into one batch.
        """
        generators = GlobalGenerators()
        failure: Exception | None = None
        try:
            # Seeding around every sample would cost a quick data set more than its samples do.
            if not self._draws:
                try:
                    batch = self.collate(self._fetch(indices))
                except Exception as error:
                    failure = error
                self._draws = generators.used()
                if not self._draws and failure is None:
                    return batch
            batch = self._one_by_one(indices, seeds, generators)
        finally:
            generators.restore()
        # Each sample could be read alone, so the fault lies in reading or joining them together.
        if failure is not None and not self._draws:
            what = f"samples {_format_indices(indices)} cannot be read together"
            with explained(what, self._kind):
                raise failure
        return batch

    def _fetch(self, indices: Sequence[int]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self.dataset[index] for index in indices]
        samples: list[Any] = together(list(indices))
        if len(samples) != len(indices):
            raise ValueError(f"__getitems__ gave {len(samples)} of {len(indices)} samples")
        return samples

    def _one_by_one(
        self, indices: Sequence[int], seeds: Sequence[int], generators: GlobalGenerators
    ) -> Any:
        samples = []
        for index, seed in zip(indices, seeds, strict=True):
            generators.seed(seed)
            samples.append(self._sample(index))
        generators.seed(seeds[0])  # for a collate function that draws
        return self._joined(indices, samples)

    def _sample(self, index: int) -> Any:
        with explained(f"sample {index} cannot be read", self._kind):
            return self.dataset[index]

    def _joined(self, indices: Sequence[int], samples: list[Any]) -> Any:
        return join_samples(self.collate, indices, samples, self._kind)


def join_samples(
    collate: Collate, indices: Sequence[int], samples: list[Any], where: str = ""
) -> Any:
    """One batch of samples; DataError where they do not fit into one."""
    with explained(f"samples {_format_indices(indices)} do not fit into one batch", where):
        return collate(samples)


class TensorSource:
    """The rows of tensors of equal length; reads a batch at once.

    Gives a list with one tensor each, as torch's loader does for a `TensorDataset`.

    Raises:
        DataError: There is no tensor, or their lengths differ.
    """

    def __init__(self, *tensors: Tensor) -> None:
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise DataError(
                "tensors of unequal length" if lengths else "no tensors",
                why=f"Their lengths are {sorted(lengths)}." if lengths else "",
                fix="Give tensors whose dimension 0 counts the same samples.",
            )
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def read(self, indices: Sequence[int]) -> list[Tensor]:
        """One tensor [len(indices), ...] for each of `tensors`."""
        rows = torch.tensor(indices)
        # Not `tensor[rows]`: that wakes torch's threads for 32 rows, 5 ms on busy cores.
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self.tensors]


def _format_indices(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:5])
    return shown if len(indices) <= 5 else f"{shown}, ... ({len(indices)})"


Array = NDArray[Any]


@checks_keywords
class MemmapSource:
    """Windows of a flat file of tokens: sample i is the window + 1 tokens from i * window on.

    Args:
        path: A raw file of numbers, without a header.
        window: Tokens of a sample; the target is the input moved on by one token.
        dtype: Type of the numbers in the file, a whole-number type, for example "uint16".

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
        """Input and target, each int64 [len(indices), window]."""
        # A file that shrank would kill the process with SIGBUS at the first touch.
        file_size(self.path, self.offset + self._tokens * self.dtype.itemsize)
        # An index array copies, so that the batch does not refer to the mapped file.
        rows = self._mapped()[np.asarray(indices, dtype=np.int64)]
        return (
            torch.from_numpy(rows[:, :-1].astype(np.int64)),
            torch.from_numpy(rows[:, 1:].astype(np.int64)),
        )

    def _count(self) -> int:
        held = max(file_size(self.path) - self.offset, 0)
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
            # Views of overlapping windows: nothing is read before a sample is asked for.
            windows = sliding_window_view(tokens.view(np.ndarray), self.window + 1)
            self._windows = windows[:: self.window]
        return self._windows

    def __getstate__(self) -> dict[str, Any]:
        # numpy would put the contents of the mapped file into the pickle.
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
        self._sizes = tuple(file_size(path) for path in self.paths)
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
        """One tensor [len(indices), ...] for each file."""
        for path, size in zip(self.paths, self._sizes, strict=True):
            file_size(path, size)
        if self._arrays is None:
            self._arrays = tuple(open_npy(path) for path in self.paths)
        rows = np.asarray(indices, dtype=np.int64)
        tensors = tuple(torch.from_numpy(native_byte_order(array[rows])) for array in self._arrays)
        return tensors[0] if len(tensors) == 1 else tensors

    def __getstate__(self) -> dict[str, Any]:
        # The pickle would otherwise hold what is in the files.
        return self.__dict__ | {"_arrays": None}


def open_npy(path: Path) -> Array:
    """The mapped array of a .npy file.

    Raises:
        DataError: It is missing, or holds no array of numbers.
    """
    file_size(path)
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


def native_byte_order(array: Array) -> Array:
    # torch knows no other.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def file_size(path: Path, needed: int = 0) -> int:
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


@runtime_checkable
class Source(Protocol):
    """Random access to samples; knows nothing about ranks, order or batches."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def read(self, indices: Sequence[int]) -> Any:
        """The samples at `indices` as one batch: tensors (or tuples, lists, dicts of tensors) whose
        dimension 0 has one entry per index."""
        ...


@runtime_checkable
class SeededSource(Source, Protocol):
    """A source whose samples may draw random numbers (augmentation)."""

    def read_seeded(self, indices: Sequence[int], seeds: Sequence[int]) -> Any:
        """As `read`; all that is drawn for sample `indices[i]` follows from `seeds[i]` (64 bits),
        and the global generators of the process are left as they were."""
        ...


def reading(source: Source, indices: Sequence[int]) -> AbstractContextManager[None]:
    """Around a source's `read`: name the samples and the source in what it raises."""
    first = next(iter(indices), 0)
    what = f"{len(indices)} samples from number {first} on cannot be read"
    return explained(what, type(source).__name__)


def as_source(examples: Any) -> Source:
    """What a user gave as data, as a source: a `Source` itself, or any map-style torch `Dataset`.

    Raises:
        DataError: It is neither.
    """
    if isinstance(examples, Source):
        return examples
    # Exactly this class: a subclass may do anything in __getitem__.
    if type(examples) is TensorDataset:
        return TensorSource(*examples.tensors)
    kind = type(examples).__name__
    if isinstance(examples, IterableDataset):
        raise DataError(
            f"{kind} is an iterable data set",
            why="Its samples have no numbers, so they can be neither shuffled nor resumed.",
            fix="Give a map-style data set: __len__ and __getitem__.",
        )
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        raise DataError(
            f"{kind} is not a data set",
            why="A map-style data set has __len__ and __getitem__; a source has __len__ and read.",
            fix="Give one of these; for files see MemmapSource and ArraySource.",
        )
    # They have a length and items, and would fail at the first sample only.
    if isinstance(examples, str | bytes | dict):
        raise DataError(
            f"a {kind} is not a data set",
            fix="Give a map-style data set; for files see MemmapSource and ArraySource.",
        )
    return DatasetSource(examples)
