"""The context of split samples: which dimensions are split over which ranks, and where that ends.

Behind the last layers that look at neighbours a split of space gains nothing; there each of
the p ranks can get the whole of N / p samples instead and works on them as in data parallelism
(Oyama et al. 2020, the shuffle behind LBANN's last spatial layer). A rank without a sample
works on an empty tensor, so that its gradients are zeros and statistics count it as nothing.

The last part is what the rules of sliding windows share: the ranges wanted, the split of the
result, and where a dimension has become too narrow to stay split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from headway.errors import PlanError
from headway.graph.ranges import Box, Range, SlidingWindow, balanced_ranges
from headway.parallel.layout_rules import total
from headway.parallel.spatial.halo_exchange import (
    SINGLE_RANK_AXIS,
    BoxRedistribution,
    RangeExchange,
    fetch_box,
    redistribute_box,
    sum_into_boxes,
    sum_over_axes,
)
from headway.parallel.split_tensor import (
    WHOLE_DIMENSION,
    OperatorRule,
    RangeCut,
    RuleRefused,
    SpatialAxis,
    SplitContext,
    SplitTensor,
    in_autograd_function,
    map_nested,
    modifies_in_place,
    qualified_torch_name,
    split_tensors_in,
    unsupported_operator,
)

DimensionSplits = Mapping[int, RangeCut]
"""Dimension, counted from 0, to how it is split; the others are whole on every rank."""


HeadMode = Literal["auto", "gathered", "samples"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SpatialContext(SplitContext):
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
            "gathered": each gets all samples; "auto": see `switches_to_samples`.
        together: All ranks of the mesh, in the order of their places along the first, second, ...
            of the dimensions that are split. Without it samples are given out where one is split.
    """

    axes: Mapping[int, SpatialAxis]
    statistics: tuple[SpatialAxis, ...] = ()
    min_width: int = 1
    overlap: bool = field(default=False)
    head: HeadMode = "auto"
    together: SpatialAxis | None = None
    whole_in_messages: ClassVar[bool] = True
    kind = "space"
    remedy = "Gather it first: headway.parallel.spatial.gather(x) gives the whole tensor."

    @property
    def rules(self) -> Mapping[str, OperatorRule]:
        # The rules take this module's contexts, so that the table of them imports this module.
        from headway.parallel.operator_rules import RULES

        return RULES["space"]

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function of torch gives.

        Raises:
            PlanError: There is no rule, and a tensor lies in parts of space; or it is asked for by
                an autograd function of the model's own.
        """
        found = split_tensors_in(args, kwargs)
        try:
            return self.run_rule(func, args, kwargs)
        except (RuleRefused, PlanError) as refusal:
            # Whole samples can be gathered where no rule can work on them.
            gathered = not modifies_in_place(func, kwargs) and not in_autograd_function()
            if not gathered or not all(map(by_samples, found)):
                if isinstance(refusal, PlanError):
                    raise
                name = qualified_torch_name(func)
                raise unsupported_operator(name, found[0], refusal.why) from None
            return func(*map_nested(args, gather), **map_nested(kwargs, gather))

    def attribute(self, x: SplitTensor, name: str) -> Any:
        """Of whole samples alone."""
        if by_samples(x):
            return getattr(gather(x), name)
        raise unsupported_operator(f"Tensor.{name}", x, "that of a part is not that of the whole")

    def wrap(self, local: Tensor, cuts: Sequence[Any]) -> Any:
        split = {dim: cut for dim, cut in enumerate(cuts) if isinstance(cut, RangeCut)}
        if not split:
            return local
        shape = [split[dim].extent if dim in split else n for dim, n in enumerate(local.shape)]
        return SplitTensor(local, torch.Size(shape), tuple(cuts), self)

    def gather(self, x: SplitTensor) -> Tensor:
        needs = [
            RangeExchange(dim, split.axis, split.ranges, ((0, split.extent),) * split.axis.size)
            for dim, split in x.splits.items()
        ]
        return fetch_box(x.local, needs)

    def local_part(self, whole: Tensor, cuts: Sequence[Any]) -> Tensor:
        splits = {d - len(cuts): cut for d, cut in enumerate(cuts) if isinstance(cut, RangeCut)}
        return local_part_for(whole, splits)

    def sum_over_ranks(self, local: Tensor, cuts: Sequence[Any]) -> Tensor:
        return sum_over_axes(local, [cut.axis for cut in cuts if isinstance(cut, RangeCut)])

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
        head: HeadMode = "auto",
        together: dist.ProcessGroup | None = None,
    ) -> SpatialContext:
        """From process groups, as `DeviceMesh.get_group` gives them."""
        return cls(
            axes={dim: SpatialAxis.of(group) for dim, group in groups.items()},
            statistics=tuple(map(SpatialAxis.of, statistics)),
            min_width=min_width,
            overlap=overlap,
            head=head,
            together=None if together is None else SpatialAxis.of(together),
        )

    @property
    def copies(self) -> int:
        """Ranks that share one sample: a loss that all of them hold counts so many times."""
        return prod(axis.size for axis in self.axes.values())

    @cached_property
    def everyone(self) -> SpatialAxis | None:
        """All ranks as one axis, another than those of space; None: it is not known."""
        if self.together is not None:
            return self.together
        split = [axis for axis in self.axes.values() if axis.size > 1]
        # A copy: axes are compared by identity, and a cut over samples is none of space.
        return replace(split[0]) if len(split) == 1 else None

    def boxes(self, shape: Sequence[int], splits: Mapping[int, RangeCut]) -> tuple[Box, ...]:
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

    def _place(self, rank: int, axis: SpatialAxis) -> int:
        """Along an axis, of a rank of `everyone`."""
        if axis is self.everyone:
            return rank
        # The last dimension's places run fastest, as in `_problems`.
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

    def splits(self, shape: torch.Size | tuple[int, ...]) -> dict[int, RangeCut]:
        """How a tensor of this shape is split: balanced."""
        return {
            len(shape) + dim: RangeCut(axis, balanced_ranges(shape[dim], axis.size))
            for dim, axis in self.axes.items()
            if axis.size > 1 and -dim <= len(shape)
        }

    def split(self, whole: Tensor) -> Any:
        """The split form of a tensor that every rank has whole; its part is a view."""
        splits = self.splits(whole.shape)
        local = whole
        for dim, split in splits.items():
            local = local.narrow(dim, split.own[0], split.own[1] - split.own[0])
        return self.wrap(local, [splits.get(dim, WHOLE_DIMENSION) for dim in range(local.ndim)])

    def adopt(self, local: Tensor, shape: torch.Size | tuple[int, ...]) -> Any:
        """The split form of a tensor of which this rank has its own part only.

        Args:
            local: `ranges(shape)` of the tensor.
        """
        splits = self.splits(shape)
        expected = tuple(stop - start for start, stop in self.ranges(shape))
        if tuple(local.shape) != expected:
            raise PlanError(
                f"a part of shape {tuple(local.shape)} is not this rank's of {tuple(shape)}",
                problems=[f"it owns {expected}"],
                fix="Read what SpatialContext.ranges(shape) says.",
            )
        return self.wrap(local, [splits.get(dim, WHOLE_DIMENSION) for dim in range(local.ndim)])


def splits_from_last_dim(x: Any) -> dict[int, RangeCut]:
    """Splits by dimension counted from the end: -1 is the last."""
    return {dim - len(x.shape): split for dim, split in x.splits.items()}


def local_part_for(x: SplitTensor | Tensor, target: DimensionSplits) -> Tensor:
    """The part of a tensor, split or whole, that a layout gives to this rank.

    Args:
        target: By dimension counted from the end. Where it has more, a dimension of one entry
            stays as it is.
    """
    have = splits_from_last_dim(x) if isinstance(x, SplitTensor) else {}
    local = x.local if isinstance(x, SplitTensor) else x
    if isinstance(x, SplitTensor) and by_samples(x) != _by_samples(target.values(), x.context):
        return _redistribute_for(x, target)
    needs = []
    for dim, split in target.items():
        if -dim > len(x.shape) or (x.shape[dim] == 1 and split.extent > 1):
            continue
        _check_extent(x, dim, split)
        if dim not in have:
            local = local.narrow(dim, split.own[0], split.own[1] - split.own[0])
        elif have[dim] != split:
            if have[dim].axis is not split.axis:
                raise RuleRefused("its operands are split over different ranks")
            needs.append(
                RangeExchange(len(x.shape) + dim, split.axis, have[dim].ranges, split.ranges)
            )
    return fetch_box(local, needs) if needs else local


def by_samples(x: SplitTensor) -> bool:
    """Whether this rank has whole samples, of which others have others."""
    return _by_samples(x.splits.values(), x.context)


def _by_samples(splits: Iterable[RangeCut], context: SpatialContext) -> bool:
    return any(split.axis is context.everyone for split in splits)


def _check_extent(x: SplitTensor | Tensor, dim: int, split: RangeCut) -> None:
    if x.shape[dim] != split.extent:
        raise PlanError(
            f"shapes do not match: {tuple(x.shape)} against a dimension of {split.extent}",
            problems=[f"dimension {dim} has {x.shape[dim]} entries"],
            fix="Give the whole tensor, or its part as a split one (SpatialContext.adopt).",
        )


def _redistribute_for(x: SplitTensor, target: DimensionSplits) -> Tensor:
    """`local_part_for`, from parts of space to whole samples or back."""
    wanted = {}
    for dim, split in target.items():
        if -dim <= x.dim() and (x.shape[dim] != 1 or split.extent == 1):
            _check_extent(x, dim, split)
            wanted[x.dim() + dim] = split
    return redistribute_to(x, wanted)


def redistribute_to(x: SplitTensor, splits: DimensionSplits) -> Tensor:
    """The part of a tensor that other splits give to this rank, in one exchange of all ranks."""
    everyone = x.context.everyone
    assert everyone is not None
    boxes = x.context.boxes(x.shape, x.splits), x.context.boxes(x.shape, splits)
    return redistribute_box(x.local, BoxRedistribution(everyone, *boxes))


def gather(x: Any) -> Any:
    """The whole tensor on every rank; what is no split tensor is returned as it is."""
    return x.full_tensor() if isinstance(x, SplitTensor) else x


# The switch from parts of space to whole samples, and back.


def switches_to_samples(x: SplitTensor) -> bool:
    """Whether what leaves the split of space becomes whole samples; it is gathered otherwise.

    With "auto" that is where the busiest rank has less to receive and to compute: ceil(N / p) of
    the N samples are fewer than all of them.
    """
    context = x.context
    if context.everyone is None or context.head == "gathered" or 0 in x.splits or by_samples(x):
        return False
    return context.head == "samples" or x.shape[0] > 1


def leave_spatial_split(x: SplitTensor) -> Any:
    """The tensor as layers want it that need the whole of a sample."""
    if not switches_to_samples(x):
        return gather(x)
    splits = {0: _sample_split(x)}
    return x.like(redistribute_to(x, splits), splits)


def return_to_spatial_split(x: SplitTensor, sizes: Sequence[int]) -> Any:
    """The input of an operator that makes space grow: split by space where the result is wide.

    Args:
        x: The input; one that is not split by samples stays as it is.
        sizes: Of the result, from dimension 2.
    """
    splits = x.context.splits(x.shape)
    if x.splits.keys() != {0} or not by_samples(x) or 0 in splits or 1 in splits:
        return x
    least = max(x.context.min_width, 1)
    grows = any(sizes[dim - 2] > x.shape[dim] for dim in splits)
    wide = all(sizes[dim - 2] >= least * split.axis.size for dim, split in splits.items())
    if not wide or not grows:
        return x
    return x.like(redistribute_to(x, splits), splits)


def reduce_scatter_samples(x: SplitTensor, local: Tensor) -> Any:
    """The sum over all ranks of what each has of all samples, whole for this rank's samples.

    Args:
        local: This rank's sum, samples along dimension 0.
    """
    split = _sample_split(x)
    everything = tuple((0, size) for size in local.shape)
    have = tuple((own, *everything[1:]) for own in split.ranges)
    move = BoxRedistribution(split.axis, have, (everything,) * split.axis.size)
    return x.like(sum_into_boxes(local, move), {0: split})


def sum_over_space(
    input: SplitTensor,  # noqa: A002 - torch's name
    dims: Sequence[int],
    keepdim: bool,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """A sum over all of space, as before a classifier: each rank gets that of its samples."""
    held = prod(split.axis.size for split in input.splits.values())
    repeated = held < input.context.copies  # what several ranks have would count several times
    if repeated or not switches_to_samples(input) or not input.splits.keys() <= {*dims}:
        return total(input, dims, keepdim, dtype=dtype)
    return reduce_scatter_samples(input, input.local.sum([*dims], keepdim, dtype=dtype))


def _sample_split(x: SplitTensor) -> RangeCut:
    everyone = x.context.everyone
    assert everyone is not None
    return RangeCut(everyone, balanced_ranges(x.shape[0], everyone.size))


# What rules of windows share: what is wanted, how results are split, where a split ends.


IntPerDimension = int | Sequence[int]


def int_per_dimension(value: IntPerDimension, count: int) -> list[int]:
    """An argument that is one number or one per dimension."""
    if isinstance(value, int):
        return [value] * count
    listed = [int(entry) for entry in value]
    return listed * count if len(listed) == 1 else listed


def check_batched(x: SplitTensor, count: int) -> None:
    """Refuse inputs without a dimension of samples, and channels that are split."""
    if x.ndim != count + 2:
        raise RuleRefused(f"it needs {count + 2} dimensions: samples and channels first")
    check_whole_channels(x)


def check_whole_channels(x: SplitTensor) -> None:
    if 1 in x.splits:
        raise RuleRefused("its channels are split")


def result_ranges(x: SplitTensor, dim: int, extent: int) -> tuple[SpatialAxis, tuple[Range, ...]]:
    """Who holds what of a result of `extent` entries along a dimension of x."""
    split = x.splits.get(dim)
    if split is None:
        return SINGLE_RANK_AXIS, ((0, extent),)
    return split.axis, balanced_ranges(extent, split.axis.size)


def window_ranges(
    x: SplitTensor, windows: Sequence[SlidingWindow], *, ceil: bool = False, pad_all: bool = True
) -> tuple[list[RangeExchange], dict[int, RangeCut], list[Range]]:
    """What windows over the last dimensions want.

    Args:
        windows: One for each of the last dimensions.
        pad_all: Lay out the padding of dimensions that are not split, too.

    Returns:
        The needs, how the result is split, and the outputs that this rank computes, by dimension.
    """
    first = x.dim() - len(windows)
    needs, splits, outputs = [], {d: s for d, s in x.splits.items() if d < first}, []
    for dim, window in enumerate(windows, first):
        extent = x.shape[dim]
        axis, ranges = result_ranges(x, dim, window.outputs(extent, ceil=ceil))
        if ranges[-1][1] < 1:
            raise RuleRefused(f"a window is larger than its input: {window} on {extent} entries")
        outputs.append(ranges[axis.rank])
        if dim in x.splits:
            splits[dim] = RangeCut(axis, ranges)
        if dim in x.splits or pad_all:
            have = x.splits[dim].ranges if dim in x.splits else ((0, extent),)
            needs.append(RangeExchange(dim, axis, have, tuple(window.wanted(r) for r in ranges)))
    return needs, splits, outputs


def leave_split_if_narrow(x: Any) -> Any:
    """The tensor; it leaves the split where that is narrower than the context allows."""
    if not isinstance(x, SplitTensor):
        return x
    least = x.context.min_width
    narrow = any(split.extent < least * split.axis.size for d, split in x.splits.items() if d > 1)
    return leave_spatial_split(x) if narrow else x


def empty_with_graph(shape: Sequence[int], *sources: Tensor | None) -> Tensor:
    """A result without elements that keeps the graph: gradients of 0 reach the sources."""
    found = [source for source in sources if source is not None]
    empty = found[0].new_zeros(list(shape))
    for source in found:
        # A sum of no elements is 0 and keeps the graph.
        empty = empty + source.reshape(-1)[:0].sum()
    return empty


def autocast_operands(x: Tensor, *others: Tensor | None) -> list[Any]:
    """Arguments of an operator that torch runs in lower precision within `torch.autocast`."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point():
        return [x, *others]
    dtype = torch.get_autocast_dtype(kind)
    return [None if tensor is None else tensor.to(dtype) for tensor in (x, *others)]
