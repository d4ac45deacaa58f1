"""The switch from parts of space to whole samples, and back.

Behind the last layers that look at neighbours a network is cheap for its size and gains nothing
from a split of space. There each of the p ranks gets the whole of N / p samples, and works on them
as in data parallelism: the tensor is a `SplitTensor` of dimension 0 from there on (Oyama et al.
2020, the shuffle behind LBANN's last spatial layer). Where a rank gets no sample it works on an
empty tensor, so that its gradients are zeros and statistics count it as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headway.graph.ranges import balanced
from headway.parallel.spatial.moving import Move, collected
from headway.parallel.spatial.tensor import Split, SplitTensor, carried, gather


def switches(x: SplitTensor) -> bool:
    """Whether what leaves the split of space becomes whole samples; it is gathered otherwise.

    With "auto" that is where the busiest rank has less to receive and to compute: ceil(N / p) of
    the N samples are fewer than all of them.
    """
    context = x.context
    if context.everyone is None or context.head == "gathered" or 0 in x.splits or x.by_samples:
        return False
    return context.head == "samples" or x.shape[0] > 1


def leave(x: SplitTensor) -> SplitTensor | Tensor:
    """The tensor as layers want it that need the whole of a sample."""
    if not switches(x):
        return gather(x)  # type: ignore[no-any-return]
    splits = {0: _by_samples(x)}
    return SplitTensor(carried(x, splits), splits, x.context)


def returned(x: SplitTensor, sizes: Sequence[int]) -> SplitTensor:
    """The input of an operator that makes space grow: split by space where the result is wide.

    Args:
        x: The input; one that is not split by samples stays as it is.
        sizes: Of the result, from dimension 2.
    """
    splits = x.context.splits(x.shape)
    if x.splits.keys() != {0} or not x.by_samples or 0 in splits or 1 in splits:
        return x
    least = max(x.context.min_width, 1)
    grows = any(sizes[dim - 2] > x.shape[dim] for dim in splits)
    wide = all(sizes[dim - 2] >= least * split.axis.size for dim, split in splits.items())
    if not wide or not grows:
        return x
    return SplitTensor(carried(x, splits), splits, x.context)


def summed_by_samples(x: SplitTensor, local: Tensor) -> SplitTensor:
    """The sum over all ranks of what each has of all samples, whole for this rank's samples.

    Args:
        x: That was summed up.
        local: This rank's sum, samples along dimension 0.
    """
    split = _by_samples(x)
    everything = tuple((0, size) for size in local.shape)
    have = tuple((own, *everything[1:]) for own in split.ranges)
    move = Move(split.axis, have, (everything,) * split.axis.size)
    return SplitTensor(collected(local, move), {0: split}, x.context)


def _by_samples(x: SplitTensor) -> Split:
    everyone = x.context.everyone
    assert everyone is not None
    return Split(everyone, balanced(x.shape[0], everyone.size))
