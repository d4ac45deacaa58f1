"""Sources of slabs: from HDF5, .npy or zarr files a rank reads only its box of each sample.

A slab is a box of a sample: one range for each dimension. Which box a rank reads (`SlabCut`) is the
box that spatial parallelism says it owns. A recipe gives a source that is not cut; the run asks for
this rank's part (`SlabSource.parted`), whose batches are `SampleParts`. The arrays of one sample
lie in one packed block of bytes, in the type of the files, so that they are kept and sent as one.

A file is opened for each read and closed after it (1 ms for HDF5), so that nothing is held across
a fork, in a pickle or over a replaced file. Ranks read disjoint slabs of one file independently;
LBANN reads hyperslabs through MPI-IO, a file opened by each rank needs no MPI.
"""

from __future__ import annotations

import copy
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.data.slabs.ownership import OwnerPolicy
from headway.data.source import file_size, native_byte_order, open_npy
from headway.errors import DataError, MissingExtra
from headway.graph.ranges import Range, balanced_ranges

Array = NDArray[Any]
Shape = tuple[int, ...]
Paths = str | Path | Sequence[str | Path]
"""One file whose dimension 0 counts the samples, or a list of files, one per sample."""

_PAGE = 4096
"""Bytes that a disk is asked for at least."""


class SlabReader(Protocol):
    """Random access to boxes of samples of one shape and one type."""

    @property
    def shape(self) -> Shape:
        """Of a whole sample."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its numbers, in the byte order of this machine."""
        ...

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def read(self, sample: int, ranges: Sequence[Range]) -> Array:
        """A box of a sample, in memory of its own; `ranges` has one for each dimension."""
        ...


class _SlabFiles(ABC):
    """One array per file and sample, or one array whose rows are the samples.

    The first file says what shape and type a sample has, unless `shape` does; every other one is
    held against it when it is read.
    """

    _in = ""
    """Where in a file the array is, for errors."""

    def __init__(self, paths: Paths, *, shape: Shape | None = None) -> None:
        self._rows = isinstance(paths, str | Path)
        self.paths = (Path(paths),) if isinstance(paths, str | Path) else tuple(map(Path, paths))
        if not self.paths:
            raise DataError("no files", fix="Give the files of the samples, one for each.")
        with self._opened(self.paths[0]) as array:
            self._shape, self._dtype = self._of_a_sample(array), np.dtype(array.dtype)
            self._length = int(array.shape[0]) if self._rows else len(self.paths)
            self._check_numbers(self.paths[0])
            if shape is not None:
                self._shape = tuple(shape)
                self._check(self.paths[0], array)

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        native_order: np.dtype[Any] = self._dtype.newbyteorder("=")
        return native_order

    def __len__(self) -> int:
        return self._length

    def read(self, sample: int, ranges: Sequence[Range]) -> Array:
        """A box of a sample, in memory of its own.

        Raises:
            DataError: The file is missing, damaged, or holds something else; or there is no such
                sample or box.
        """
        box = self._box(sample, ranges)
        path = self.paths[0 if self._rows else sample]
        with self._opened(path) as array:
            self._check(path, array)
            # A copy, because the file is closed behind the `with`.
            return native_byte_order(np.array(array[(sample, *box) if self._rows else box]))

    @abstractmethod
    def _opened(self, path: Path) -> AbstractContextManager[Any]:
        """The array of a file, which has shape and dtype and reads what it is indexed with."""

    def _of_a_sample(self, array: Any) -> Shape:
        return tuple(int(size) for size in array.shape[self._rows :])

    def _box(self, sample: int, ranges: Sequence[Range]) -> tuple[slice, ...]:
        inside = len(ranges) == len(self._shape) and all(
            0 <= start <= stop <= size
            for (start, stop), size in zip(ranges, self._shape, strict=True)
        )
        if not inside or not 0 <= sample < self._length:
            raise DataError(
                f"no box {tuple(ranges)} of sample {sample}",
                where=f"{self.paths[0]}{self._in}",
                why=f"There are {self._length} samples of shape {self._shape}.",
            )
        return tuple(slice(start, stop) for start, stop in ranges)

    def _check_numbers(self, path: Path) -> None:
        if self._dtype.kind not in "biufc":
            raise DataError(
                f"values of type {self._dtype}",
                where=f"{path}{self._in}",
                fix="Give an array of numbers.",
            )

    def _check(self, path: Path, array: Any) -> None:
        found, kind = self._of_a_sample(array), np.dtype(array.dtype).newbyteorder("=")
        if found == self._shape and kind == self.dtype:
            return
        raise DataError(
            f"a sample of shape {found} and type {kind}",
            where=f"{path}{self._in}",
            why=f"Expected are shape {self._shape} and type {self.dtype}.",
            fix="Give files of one kind, or correct `shape`.",
        )


@final
class Hdf5Slabs(_SlabFiles):
    """Samples in HDF5 files.

    Args:
        dataset: Name of the data set in a file: "full".

    Raises:
        MissingExtra: The h5py package is not installed.
        DataError: The first file is missing or damaged, or has not what was asked for.
    """

    def __init__(self, paths: Paths, dataset: str, *, shape: Shape | None = None) -> None:
        self.dataset, self._in = dataset, f", data set {dataset!r}"
        super().__init__(paths, shape=shape)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        h5py = _package("h5py", "hdf5")
        # Before the library opens it: HDF5's own text for a missing file is three lines long.
        file_size(path)
        with _sound(path, "HDF5 file"), _open_h5(h5py, path) as file:
            found = file.get(self.dataset)
            if not isinstance(found, h5py.Dataset) or found.ndim < 1:
                names: list[str] = []

                def note(name: str, held: Any) -> None:
                    if isinstance(held, h5py.Dataset):
                        names.append(name)

                file.visititems(note)
                raise DataError(
                    f"no data set {self.dataset!r}" if found is None else "no array",
                    where=f"{path}{'' if found is None else self._in}",
                    why=f"The file holds {', '.join(map(repr, names[:20])) or 'no data sets'}.",
                    fix="Correct the name, or the list of files.",
                )
            yield found


@final
class NpySlabs(_SlabFiles):
    """Samples in .npy files, which are mapped into memory: only the pages of the slab are read.

    Raises:
        DataError: The first file is missing or damaged, or has another shape.
    """

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        # Its length is held against the header now: a shorter file would kill the process.
        yield open_npy(path)


@final
class ZarrSlabs(_SlabFiles):
    """Samples in zarr arrays, which are folders. A chunk that was never written is its fill value.

    Args:
        array: Name of the array where the paths are groups: "full".

    Raises:
        MissingExtra: The zarr package is not installed.
        DataError: The first array is missing or damaged, or has not what was asked for.
    """

    def __init__(self, paths: Paths, array: str = "", *, shape: Shape | None = None) -> None:
        self.array, self._in = array, f", array {array!r}" if array else ""
        super().__init__(paths, shape=shape)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        zarr = _package("zarr", "zarr")
        file_size(path)
        with _sound(path, "zarr array"):
            yield zarr.open_array(str(path), path=self.array, mode="r")


def slabs_in(folder: str | Path, *names: str) -> tuple[SlabReader, ...]:
    """Readers of the named arrays of all samples in a folder, one for each name.

    Either NAME.npy or NAME.zarr, whose dimension 0 counts the samples, for every name; or files
    *.hdf5 in sorted order, one for each sample, with data sets of these names.

    Raises:
        DataError: The folder holds neither, or what it holds is damaged.
        MissingExtra: The h5py or zarr package is needed.
    """
    folder = Path(folder)
    kinds: dict[str, Callable[[Path], SlabReader]] = {".npy": NpySlabs, ".zarr": ZarrSlabs}
    for suffix, reader in kinds.items():
        rows = [folder / f"{name}{suffix}" for name in names]
        if any(path.exists() for path in rows):
            return tuple(map(reader, rows))
    paths = sorted(folder.glob("*.hdf5"))
    if not paths:
        raise DataError(
            "no samples",
            where=str(folder),
            why=f"It has neither *.hdf5 nor .npy or .zarr of the names {', '.join(names)}.",
            fix="Give the folder of the samples.",
        )
    return tuple(Hdf5Slabs(paths, name) for name in names)


def write_sample(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """One HDF5 file with an array under each name; a file that is there is left alone.

    Raises:
        MissingExtra: The h5py package is not installed.
    """
    h5py, path = _package("h5py", "hdf5"), Path(path)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that no reader finds half a file.
    aside = path.with_suffix(".part")
    with h5py.File(aside, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    aside.replace(path)


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"{extra} files cannot be read",
            why=f"The {name} package cannot be imported ({error}).",
            fix=f"pip install headway[{extra}]",
        ) from None


def _open_h5(h5py: Any, path: Path) -> Any:
    # HDF5 reads ahead 64 KiB for every run of a slab that is shorter: four times a slab of 16 KiB.
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_sieve_buf_size(_PAGE)
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, fapl=access))


@contextmanager
def _sound(path: Path, what: str) -> Iterator[None]:
    """Name the file in the errors that the library raises for a damaged one."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise DataError(
            f"not a sound {what}",
            where=str(path),
            why=str(error),
            fix=f"It was cut short or damaged, or is no {what}: restore it.",
        ) from error


_ALIGNED = 16
"""Bytes of the largest number (complex128): parts begin at multiples."""

Finish = Callable[[tuple[Tensor, ...]], Any]
"""From the parts of a batch, as in the files, to the batch that is delivered."""


class SampleParts(NamedTuple):
    """A batch that does not hold whole samples.

    Attributes:
        data: What `finish` made of this rank's slabs.
        extents: The last dimensions, those that are cut, as they are in whole samples.
    """

    data: Any
    extents: Shape


@dataclass(frozen=True)
class SlabCut:
    """Which box of a sample is a rank's.

    Attributes:
        sizes: Into how many parts each of the last dimensions is cut, as in a plan's
            `split.spatial`: (2, 1, 1) halves the depth of C D H W and of labels D H W. An array
            with fewer dimensions (a target with 4 numbers) stays whole.
        offset: Number of the part, counted row by row, from 0.
    """

    sizes: tuple[int, ...] = ()
    offset: int = 0

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.sizes) or not 0 <= self.offset < self.parts:
            raise DataError(
                f"no part {self.offset} of samples cut into {self.sizes}",
                why=f"Parts are numbered from 0 to {self.parts - 1}.",
                fix="Give sizes of at least 1, and the rank's place among those of its sample.",
            )

    @property
    def parts(self) -> int:
        return prod(self.sizes)

    def ranges(self, shape: Sequence[int]) -> tuple[Range, ...]:
        """The box of an array of this shape: balanced shares, as spatial parallelism has them."""
        whole = tuple((0, size) for size in shape)
        if len(shape) < len(self.sizes):
            return whole
        cut: list[Range] = []
        rest = self.offset
        # The last dimension's part counts fastest.
        last = shape[len(shape) - len(self.sizes) :]
        for size, extent in reversed(list(zip(self.sizes, last, strict=True))):
            rest, place = divmod(rest, size)
            cut.insert(0, balanced_ranges(extent, size)[place])
        return (*whole[: len(shape) - len(cut)], *cut)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One array of a sample: the box of it, and where it lies in the packed block."""

    ranges: tuple[Range, ...]
    shape: Shape
    dtype: torch.dtype
    start: int
    stop: int

    def view(self, slab: Tensor) -> Tensor:
        return slab[self.start : self.stop].view(self.dtype).view(self.shape)


class SlabSource:
    """A `Source` of this rank's slabs.

    Args:
        readers: One for each array of a sample: the input, labels that are cut likewise, targets
            that stay whole.
        cut: Which box of each; by default all of it.
        finish: Applied to the arrays of a batch (int16 to float, a logarithm); it must treat every
            number alike, since it sees this rank's slabs only. Without it a batch is a tuple of
            tensors, or one tensor, of the types in the files.
        memory: Most that a rank of a run keeps of its slabs ("40 GiB"); None: half of what is its
            share of the machine.

    Attributes:
        slabs_read: Samples of which this process has read its slab so far, and
        bytes_read: what that took, in bytes of numbers.

    Raises:
        DataError: No readers, or of unequal length.
    """

    def __init__(
        self,
        *readers: SlabReader,
        cut: SlabCut | None = None,
        finish: Finish | None = None,
        memory: int | str | None = None,
        keep: OwnerPolicy = "first",
    ) -> None:
        lengths = [len(reader) for reader in readers]
        if len(set(lengths)) != 1:
            raise DataError(
                "readers of unequal length" if lengths else "no readers",
                why=f"They have {', '.join(map(str, lengths))} samples." if lengths else "",
                fix="Give files whose samples belong together.",
            )
        self.cut = cut or SlabCut()
        self.memory, self.keep = memory, keep
        self._extents: Shape | None = None
        self.readers, self.finish, self._length = readers, finish, lengths[0]
        self._parts, self.nbytes = _packed(readers, self.cut)
        self.slabs_read = self.bytes_read = 0

    def __len__(self) -> int:
        return self._length

    def parted(self, cut: SlabCut) -> SlabSource:
        """The same samples, of which one part is read; batches are `SampleParts`, and counters
        zero.

        Raises:
            DataError: This source is cut already, or the arrays that are cut differ in extent, or
                none has the dimensions.
        """
        found = copy.copy(self)  # the readers are shared: they hold no open file
        found.cut, found._extents = cut, self._cut_extents(cut)
        found._parts, found.nbytes = _packed(self.readers, cut)
        found.slabs_read = found.bytes_read = 0
        return found

    def _cut_extents(self, cut: SlabCut) -> Shape:
        if self.cut.parts > 1:
            raise DataError(
                "samples that are cut already",
                why=f"The source has {self.cut}; the plan splits samples as {cut.sizes}.",
                fix="Give the source without `cut`: the run takes each rank's part.",
            )
        dims = len(cut.sizes)
        shapes = [reader.shape for reader in self.readers]
        found = {shape[len(shape) - dims :] for shape in shapes if len(shape) >= dims}
        if len(found) != 1:
            raise DataError(
                f"samples of shapes {', '.join(map(str, shapes))} cannot be read in parts",
                why=f"What is cut along the last {dims} dimensions must be of one extent.",
                fix="Store it in one resolution, or read whole samples.",
            )
        return found.pop()

    def shapes(self, samples: int) -> tuple[Shape, ...]:
        """Shapes of the arrays of a batch if they were whole: what `SpatialContext.adopt` asks."""
        return tuple((samples, *reader.shape) for reader in self.readers)

    def read(self, indices: Sequence[int]) -> Any:
        """This rank's slabs of the samples: tensors [len(indices), ...]."""
        return self.batch([self.load(index) for index in indices])

    def load(self, sample: int) -> Tensor:
        """The packed slab of a sample, from its files; uint8 [nbytes]."""
        slab = torch.empty(self.nbytes, dtype=torch.uint8)
        for reader, part in zip(self.readers, self._parts, strict=True):
            box = torch.from_numpy(reader.read(sample, part.ranges))
            part.view(slab).copy_(box)
            self.bytes_read += box.numel() * box.element_size()
        self.slabs_read += 1
        return slab

    def batch(self, slabs: Sequence[Tensor]) -> Any:
        """The batch of packed slabs."""
        arrays = []
        for part in self._parts:
            array = torch.empty((len(slabs), *part.shape), dtype=part.dtype)
            for row, slab in enumerate(slabs):
                array[row].copy_(part.view(slab))
            arrays.append(array)
        data: Any = arrays[0] if len(arrays) == 1 else tuple(arrays)
        if self.finish is not None:
            data = self.finish(tuple(arrays))
        return data if self._extents is None else SampleParts(data, self._extents)


def _packed(readers: Sequence[SlabReader], cut: SlabCut) -> tuple[tuple[_Part, ...], int]:
    """The arrays of a sample one behind the other, and the bytes of all together."""
    parts: list[_Part] = []
    end = 0
    for reader in readers:
        ranges = cut.ranges(reader.shape)
        shape = tuple(stop - start for start, stop in ranges)
        start = end + -end % _ALIGNED  # torch views bytes as numbers at aligned places only
        end = start + prod(shape) * reader.dtype.itemsize
        dtype = torch.from_numpy(np.empty(0, reader.dtype)).dtype
        parts.append(_Part(ranges=ranges, shape=shape, dtype=dtype, start=start, stop=end))
    return tuple(parts), end
