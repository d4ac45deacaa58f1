"""Which dimensions are split over which ranks, and what the user chose about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from headway.errors import PlanError
from headway.graph.ranges import Box, Range, balanced
from headway.parallel.spatial.exchange import Axis
from headway.parallel.spatial.tensor import Split, SplitTensor

Head = Literal["auto", "gathered", "samples"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SpatialContext:
    """One rank's view of a spatial mesh.

    Attributes:
        axes: Tensor dimension, counted from the end (-3 is the depth of N C D H W and of labels
            N D H W), to the ranks among which it is split.
        statistics: Further ranks over which batch normalisation takes its statistics: of data
            groups. Without them each data group has its own, as in plain data parallelism.
        min_width: A convolution or pooling whose result would have fewer entries per rank ends the
            split of space. 0: never; ranks may then own nothing.
        overlap: Compute the inner part of a convolution while the halos are under way.
        head: Where that split ends: "samples": each rank gets whole samples, its share of them;
            "gathered": each gets all samples; "auto": see `samples.switches`.
        together: All ranks of the mesh, in the order of their places along the first, second, ...
            of the dimensions that are split. Without it samples are given out where one is split.
    """

    axes: Mapping[int, Axis]
    statistics: tuple[Axis, ...] = ()
    min_width: int = 1
    overlap: bool = field(default=False)
    head: Head = "auto"
    together: Axis | None = None
    whole_in_messages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        wrong = [dim for dim in self.axes if dim >= 0]
        if wrong or not self.axes:
            raise PlanError(
                "a spatial mesh names dimensions counted from the end",
                problems=[f"dimension {dim} is not negative" for dim in wrong] or ["none is named"],
                fix="Use -3, -2 and -1 for depth, height and width.",
            )
        if problems := list(self._problems()):
            raise PlanError(
                "the ranks of a spatial mesh cannot share out samples",
                problems=problems,
                fix="Give one group of all its ranks, the last dimension's next to each other.",
            )

    def _problems(self) -> Iterator[str]:
        if self.head == "samples" and self.everyone is None and self.copies > 1:
            yield "head is 'samples'; several dimensions are split and `together` is not given"
        if self.together is None:
            return
        place = 0
        for dim in sorted(self.axes):
            place = place * self.axes[dim].size + self.axes[dim].rank
        if (self.together.size, self.together.rank) != (self.copies, place):
            yield (
                f"`together` has {self.together.size} ranks, of which this is {self.together.rank};"
                f" the mesh has {self.copies}, of which this is {place}"
            )

    @classmethod
    def of(
        cls,
        groups: Mapping[int, dist.ProcessGroup],
        *,
        statistics: tuple[dist.ProcessGroup, ...] = (),
        min_width: int = 1,
        overlap: bool = False,
        head: Head = "auto",
        together: dist.ProcessGroup | None = None,
    ) -> SpatialContext:
        """From process groups, as `DeviceMesh.get_group` gives them."""
        return cls(
            axes={dim: Axis.of(group) for dim, group in groups.items()},
            statistics=tuple(map(Axis.of, statistics)),
            min_width=min_width,
            overlap=overlap,
            head=head,
            together=None if together is None else Axis.of(together),
        )

    @property
    def copies(self) -> int:
        """Ranks that share one sample: a loss that all of them hold counts so many times."""
        return prod(axis.size for axis in self.axes.values())

    @cached_property
    def everyone(self) -> Axis | None:
        """All ranks as one axis, another than those of space; None: it is not known."""
        if self.together is not None:
            return self.together
        split = [axis for axis in self.axes.values() if axis.size > 1]
        return replace(split[0]) if len(split) == 1 else None

    def boxes(self, shape: Sequence[int], splits: Mapping[int, Split]) -> tuple[Box, ...]:
        """By rank of `everyone`, what it owns of a tensor of this shape that is split so."""
        assert self.everyone is not None
        return tuple(
            tuple(
                splits[dim].ranges[self._place(rank, splits[dim].axis)]
                if dim in splits
                else (0, size)
                for dim, size in enumerate(shape)
            )
            for rank in range(self.everyone.size)
        )

    def _place(self, rank: int, axis: Axis) -> int:
        """Along an axis, of a rank of `everyone`."""
        if axis is self.everyone:
            return rank
        for dim in sorted(self.axes, reverse=True):
            rank, place = divmod(rank, self.axes[dim].size)
            if self.axes[dim] is axis:
                return place
        raise ValueError("an axis of another mesh")

    def ranges(self, shape: torch.Size | tuple[int, ...]) -> tuple[Range, ...]:
        """What this rank owns of a tensor of this shape: one range for each dimension."""
        splits = self.splits(shape)
        return tuple(
            splits[dim].own if dim in splits else (0, size) for dim, size in enumerate(shape)
        )

    def splits(self, shape: torch.Size | tuple[int, ...]) -> dict[int, Split]:
        """How a tensor of this shape is split: balanced."""
        return {
            len(shape) + dim: Split(axis, balanced(shape[dim], axis.size))
            for dim, axis in self.axes.items()
            if axis.size > 1 and -dim <= len(shape)
        }

    def split(self, whole: Tensor) -> SplitTensor | Tensor:
        """The split form of a tensor that every rank has whole; its part is a view."""
        splits = self.splits(whole.shape)
        local = whole
        for dim, split in splits.items():
            local = local.narrow(dim, split.own[0], split.own[1] - split.own[0])
        return SplitTensor(local, splits, self) if splits else whole

    def adopt(self, local: Tensor, shape: torch.Size | tuple[int, ...]) -> SplitTensor | Tensor:
        """The split form of a tensor of which this rank has its own part only.

        Args:
            local: `ranges(shape)` of the tensor.
            shape: Of the whole.
        """
        splits = self.splits(shape)
        expected = tuple(stop - start for start, stop in self.ranges(shape))
        if tuple(local.shape) != expected:
            raise PlanError(
                f"a part of shape {tuple(local.shape)} is not this rank's of {tuple(shape)}",
                problems=[f"it owns {expected}"],
                fix="Read what SpatialContext.ranges(shape) says.",
            )
        return SplitTensor(local, splits, self) if splits else local
