"""Samples of which a rank reads one slab: a source beside all others, and bytes for the store.

Which box a rank reads is arithmetic (`SlabCut`) and the same as what spatial parallelism says that
it owns. What the files of a sample give this rank lies in one packed block of bytes, so that it is
kept, and sent, as one thing, in the type of the files. A recipe gives a source that is not cut; the
run asks for this rank's part of it (`SlabSource.parted`), whose batches say that they are `Parts`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.data.slab_owners import Keep
from headway.data.slab_readers import Shape, SlabReader
from headway.errors import DataError
from headway.graph.ranges import Range, balanced

_ALIGNED = 16
"""Bytes of the largest number (complex128): parts begin at multiples."""

Finish = Callable[[tuple[Tensor, ...]], Any]
"""From the parts of a batch, as in the files, to the batch that is delivered."""


class Parts(NamedTuple):
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
        """Slabs of a sample."""
        return prod(self.sizes)

    def ranges(self, shape: Sequence[int]) -> tuple[Range, ...]:
        """The box of an array of this shape: balanced shares, as spatial parallelism has them."""
        whole = tuple((0, size) for size in shape)
        if len(shape) < len(self.sizes):
            return whole
        cut: list[Range] = []
        rest = self.offset
        for size, extent in reversed(list(zip(self.sizes, self._last(shape), strict=True))):
            rest, place = divmod(rest, size)
            cut.insert(0, balanced(extent, size)[place])
        return (*whole[: len(shape) - len(cut)], *cut)

    def _last(self, shape: Sequence[int]) -> Sequence[int]:
        return shape[len(shape) - len(self.sizes) :]


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
        keep: What it keeps where not all fits, see `SlabStore`.

    Attributes:
        cut, memory, keep: As given.
        nbytes: Bytes of a packed slab.
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
        keep: Keep = "first",
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
        self._readers, self._finish, self._length = readers, finish, lengths[0]
        self._parts, self.nbytes = _packed(readers, self.cut)
        self.slabs_read = self.bytes_read = 0

    def __len__(self) -> int:
        return self._length

    def parted(self, cut: SlabCut) -> SlabSource:
        """The same samples, of which one part is read; batches are `Parts`, and counters zero.

        Raises:
            DataError: This source is cut already, or the arrays that are cut differ in extent, or
                none has the dimensions.
        """
        found = copy.copy(self)
        found.cut, found._extents = cut, self._cut_extents(cut)
        found._parts, found.nbytes = _packed(self._readers, cut)
        found.slabs_read = found.bytes_read = 0
        return found

    def _cut_extents(self, cut: SlabCut) -> Shape:
        """The last dimensions of all arrays that are cut: one for all of them."""
        if self.cut.parts > 1:
            raise DataError(
                "samples that are cut already",
                why=f"The source has {self.cut}; the plan splits samples as {cut.sizes}.",
                fix="Give the source without `cut`: the run takes each rank's part.",
            )
        dims = len(cut.sizes)
        shapes = [reader.shape for reader in self._readers]
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
        return tuple((samples, *reader.shape) for reader in self._readers)

    def read(self, indices: Sequence[int]) -> Any:
        """This rank's slabs of the samples: tensors [len(indices), ...].

        Raises:
            DataError: A file is missing, damaged, or of another shape.
        """
        return self.batch([self.load(index) for index in indices])

    def load(self, sample: int) -> Tensor:
        """The packed slab of a sample, from its files; uint8 [nbytes].

        Raises:
            DataError: As `read`.
        """
        slab = torch.empty(self.nbytes, dtype=torch.uint8)
        for reader, part in zip(self._readers, self._parts, strict=True):
            box = torch.from_numpy(reader.read(sample, part.ranges))
            part.view(slab).copy_(box)
            self.bytes_read += box.numel() * box.element_size()
        self.slabs_read += 1
        return slab

    def batch(self, slabs: Sequence[Tensor]) -> Any:
        """What packed slabs are as a batch."""
        arrays = []
        for part in self._parts:
            array = torch.empty((len(slabs), *part.shape), dtype=part.dtype)
            for row, slab in enumerate(slabs):
                array[row].copy_(part.view(slab))
            arrays.append(array)
        data: Any = arrays[0] if len(arrays) == 1 else tuple(arrays)
        if self._finish is not None:
            data = self._finish(tuple(arrays))
        return data if self._extents is None else Parts(data, self._extents)


def _packed(readers: Sequence[SlabReader], cut: SlabCut) -> tuple[tuple[_Part, ...], int]:
    """The arrays of a sample one behind the other, and the bytes of all."""
    parts: list[_Part] = []
    end = 0
    for reader in readers:
        ranges = cut.ranges(reader.shape)
        shape = tuple(stop - start for start, stop in ranges)
        start = end + -end % _ALIGNED
        end = start + prod(shape) * reader.dtype.itemsize
        dtype = torch.from_numpy(np.empty(0, reader.dtype)).dtype
        parts.append(_Part(ranges=ranges, shape=shape, dtype=dtype, start=start, stop=end))
    return tuple(parts), end
