"""Selecting k of d values: exact top-k on CPUs, and MSTopK by bisection of a threshold.

Exact: values are compared by their bits without the sign, read as an integer. For floats of any
width that is the order of the magnitudes, and NaN comes out on top, where it is found. A sample
gives a threshold that slightly more than k values pass; one pass in cache-sized blocks keeps those
as candidates. A threshold that k values do not pass is lowered. The result is exactly k distinct
indices, ascending.

MSTopK: Shi et al. 2021, "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters", algorithm 1. Made for accelerators, where some passes over the memory cost less than a
sort; on CPUs `top_k` is as fast. Exactly k distinct indices; every value that reaches the upper
threshold is chosen, none that does not reach the lower one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import RunError

MagnitudeKeys = NDArray[np.signedinteger]
Indices = NDArray[np.int64]

# Of a block of values: it stays in the second-level cache between the three passes over it.
BLOCK_BYTES = 2**18
SAMPLES = 2**15
# Below this a whole partition is cheaper than a sample and a pass.
SMALL = 2**14

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_INFINITE = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}


def top_k(values: Tensor, k: int, *, add: Tensor | None = None) -> Tensor:
    """Indices of the k largest magnitudes; among equal ones the first.

    Args:
        values: 1-D, of a floating type.
        k: 1 to the number of values.
        add: Is added to `values` in place on the way, which saves a pass over the memory; of the
            same type and length, contiguous.

    Returns:
        int64[k], ascending.

    Raises:
        RunError: A value is not a number.
        ValueError: No such k.
    """
    check_selection(values, k)
    quick = values.is_cpu and values.numel() >= SMALL and k <= values.numel() // 8
    if add is not None and (not quick or values.element_size() < 4):
        values.add_(add)
        add = None
    if not values.is_cpu:
        return _top_k_elsewhere(values, k)
    keys = magnitude_keys(values)
    infinite = _INFINITE[values.dtype]
    if not quick:
        return torch.from_numpy(_largest(_magnitudes(keys), k, infinite))
    kept = find_candidates(values, add, keys, k)
    chosen = kept.indices[_largest(kept.magnitudes, min(k, kept.indices.size), infinite)]
    if chosen.size < k:  # fewer than k values are not zero
        chosen = _with_zeros(chosen, k, keys.size)
    return torch.from_numpy(chosen)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The values that reach a threshold: where they are, and their bits without the sign."""

    indices: Indices
    magnitudes: MagnitudeKeys
    total: float = 0.0


def check_selection(values: Tensor, k: int) -> None:
    if values.ndim != 1 or values.dtype not in _INFINITE:
        raise ValueError(f"select among a 1-D float tensor, not {values.dtype} {values.shape}")
    if not 1 <= k <= values.numel():
        raise ValueError(f"k is {k}; it must be 1 to {values.numel()}, the number of values")


def magnitude_keys(values: Tensor) -> MagnitudeKeys:
    """The bits of the values as integers, in the same memory."""
    bits: MagnitudeKeys = values.detach().view(_INTEGERS[values.element_size()]).numpy()
    return bits


def _mask(keys: MagnitudeKeys) -> np.signedinteger:
    """All bits but the sign."""
    return np.iinfo(keys.dtype).max  # type: ignore[return-value]


def _magnitudes(keys: MagnitudeKeys) -> MagnitudeKeys:
    return np.bitwise_and(keys, _mask(keys))


def _largest(magnitudes: MagnitudeKeys, k: int, infinite: int) -> Indices:
    """Positions of the k largest, ascending; among equal ones the first."""
    # As bits, only NaN is above infinity.
    if magnitudes.size and magnitudes.max() > infinite:
        raise nan_error()
    if k == magnitudes.size:
        return np.arange(k)
    border = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    found = np.flatnonzero(magnitudes >= border)
    surplus = found.size - k
    if surplus:  # equal to the border: the last ones go
        ties = np.flatnonzero(magnitudes[found] == border)
        found = np.delete(found, ties[ties.size - surplus :])
    return found


def find_candidates(
    values: Tensor, add: Tensor | None, keys: MagnitudeKeys, k: int, *, total: bool = False
) -> Candidates:
    """At least k values that contain the k largest; fewer only if all others are zero."""
    first = _sampled_threshold(values, add, k)
    # From 1: zeros are no candidates, and `_with_zeros` adds them where they are needed.
    kept = _at_least(keys, max(first, 1), values, add, total=total)
    rank = k
    while kept.indices.size < k and first > 1:
        # The sample was unlucky or the order of the values is regular: ask for four times as many.
        rank *= 4
        first = _sampled_threshold(values, None, rank) if rank < keys.size // 8 else 1
        # Without `add` and the sum: both were done in the first pass.
        again = _at_least(keys, max(first, 1))
        kept = Candidates(again.indices, again.magnitudes, kept.total)
    return kept


def all_candidates(keys: MagnitudeKeys) -> Candidates:
    """All values, with the sum of their magnitudes."""
    magnitudes = _magnitudes(keys)
    total = float(magnitudes.view(f"f{keys.itemsize}").sum(dtype=np.float64))
    return Candidates(np.arange(keys.size), magnitudes, total)


def _sampled_threshold(values: Tensor, add: Tensor | None, k: int) -> int:
    """A magnitude that more than k of the values reach, most likely.

    Of m samples, k m / d are expected above the k-th largest, with a standard deviation of at most
    the square root of that: four of them below, it fails about once in 30,000 cases. The stride is
    odd, so that it meets all columns of a matrix whose width is a power of two.
    """
    stride = (values.numel() // min(SAMPLES, values.numel() // 32)) | 1
    sample = values[::stride]
    sample = sample + add[::stride] if add is not None else sample.contiguous()
    magnitudes = _magnitudes(magnitude_keys(sample))
    expected = k * magnitudes.size / values.numel()
    rank = min(math.ceil(expected + 4 * math.sqrt(expected) + 4), magnitudes.size)
    place = magnitudes.size - rank
    magnitudes.partition(place)
    return int(magnitudes[place])


def _at_least(
    keys: MagnitudeKeys,
    threshold: int,
    values: Tensor | None = None,
    add: Tensor | None = None,
    *,
    total: bool = False,
) -> Candidates:
    """All values whose magnitude's bits reach a threshold; adds `add` and sums up on the way."""
    size = BLOCK_BYTES // keys.itemsize
    block = np.empty(min(size, keys.size), keys.dtype)
    passes = np.empty(block.size, np.bool_)
    floats = block.view(f"f{keys.itemsize}") if total else None
    into = values.numpy() if add is not None and values is not None else None
    more = add.numpy() if add is not None else None
    mask, limit = _mask(keys), keys.dtype.type(threshold)
    indices, magnitudes, sums = [], [], 0.0
    for start in range(0, keys.size, size):
        part = keys[start : start + size]
        here, reach = block[: part.size], passes[: part.size]
        if into is not None and more is not None:
            target = into[start : start + size]
            np.add(target, more[start : start + size], out=target)
        np.bitwise_and(part, mask, out=here)
        np.greater_equal(here, limit, out=reach)
        found = np.flatnonzero(reach)
        if found.size:
            magnitudes.append(here[found])
            found += start
            indices.append(found)
        if floats is not None:
            sums += float(floats[: part.size].sum())
    if not indices:
        return Candidates(np.empty(0, np.int64), np.empty(0, keys.dtype), sums)
    return Candidates(np.concatenate(indices), np.concatenate(magnitudes), sums)


def _with_zeros(nonzero: Indices, k: int, size: int) -> Indices:
    """All nonzero places, and the first zeros up to k."""
    # Among so many places there are zeros enough.
    zeros = np.setdiff1d(np.arange(min(size, k + nonzero.size)), nonzero, assume_unique=True)
    return np.sort(np.concatenate((nonzero, zeros[: k - nonzero.size])))


def _top_k_elsewhere(values: Tensor, k: int) -> Tensor:
    magnitudes = values.abs()
    if bool(magnitudes.isnan().any()):
        raise nan_error()
    return magnitudes.topk(k, sorted=False).indices.sort().values


def nan_error() -> RunError:
    return RunError(
        "a gradient is NaN, so that its largest values are undefined",
        why="A compressor that sends the largest values found a NaN.",
        fix="Find where the loss or its gradient becomes NaN: a smaller learning rate, gradient "
        'clipping, or compress = "none" to go on without a selection.',
    )


# MSTopK: about the largest k of d values, by a threshold that is bisected.


SAMPLINGS = 30
"""N of the paper."""


def ms_top_k(
    values: Tensor,
    k: int,
    draw: np.random.Generator,
    *,
    samplings: int = SAMPLINGS,
    add: Tensor | None = None,
) -> BisectedSelection:
    """k values that are about the largest, by bisection of a threshold (MSTopK).

    The threshold t = mean + q (max - mean) is bisected by counting the values that reach it; what
    lies between the two closest thresholds is taken as k - k1 neighbours in index order, from a
    random place. On CPUs the counts are those of the candidates that a first threshold leaves,
    which makes them exact and cheap; elsewhere each is one pass.

    Args:
        values: 1-D, of a floating type.
        samplings: N of the paper.
        add: As for `top_k`.

    Raises:
        RunError: A value is not finite.
        ValueError: k is not 1 to the number of values.
    """
    check_selection(values, k)
    few = values.numel() < SMALL
    many = not few and k > values.numel() // 8
    if add is not None and (few or many or values.element_size() < 4 or not values.is_cpu):
        values.add_(add)
        add = None
    if values.element_size() < 4:
        values = values.float()
    found = None
    if values.is_cpu and not many:
        found = _ms_top_k_of_candidates(values, k, draw, samplings, add)
    return found or ms_top_k_by_passes(values, k, draw, samplings=samplings)


def ms_top_k_by_passes(
    values: Tensor, k: int, draw: np.random.Generator, *, samplings: int = SAMPLINGS
) -> BisectedSelection:
    """`ms_top_k` as the paper has it: every count is a pass over all values."""
    check_selection(values, k)
    magnitudes = values.abs()
    mean, largest = _finite(float(magnitudes.double().mean()), float(magnitudes.max()))
    search = BisectedSelection(k, values.numel(), mean, largest)
    for _ in range(samplings):
        threshold = _rounded(search.threshold, values.dtype)
        search.count(int((magnitudes >= threshold).sum()), threshold)
    sure = magnitudes >= search.above
    maybe = ((magnitudes >= search.below) & ~sure).nonzero().flatten()
    start = search.start(maybe.numel(), draw)
    extra = maybe[start : start + k - search.count_above]
    search.indices = torch.cat((sure.nonzero().flatten(), extra)).sort().values
    return search


@dataclass(slots=True)
class BisectedSelection:
    """Algorithm 1: the closest thresholds that too few and too many values reach, and the choice.

    Attributes:
        above: Every value of at least this magnitude is chosen; infinite where there is none.
        below: No value of smaller magnitude is chosen.
        count_above: How many values reach `above`: at most k.
        count_below: How many values reach `below`: at least k.
        indices: int64[k], ascending; empty until the bisection is over.
    """

    k: int
    size: int
    mean: float
    largest: float
    low: float = 0.0
    high: float = 1.0
    above: float = math.inf
    below: float = 0.0
    count_above: int = 0
    count_below: int = -1
    indices: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        self.count_below = self.size

    @property
    def threshold(self) -> float:
        middle = self.low + (self.high - self.low) / 2
        return self.mean + middle * (self.largest - self.mean)

    def count(self, found: int, threshold: float) -> None:
        """So many values reach the threshold."""
        middle = self.low + (self.high - self.low) / 2
        if found <= self.k:
            self.high = middle
            if found > self.count_above:
                self.count_above, self.above = found, threshold
        else:
            self.low = middle
            if found < self.count_below:
                self.count_below, self.below = found, threshold

    def start(self, between: int, draw: np.random.Generator) -> int:
        """Where the k - k1 neighbours begin among those between the thresholds."""
        return int(draw.integers(between - (self.k - self.count_above) + 1))


def _ms_top_k_of_candidates(
    values: Tensor, k: int, draw: np.random.Generator, samplings: int, add: Tensor | None
) -> BisectedSelection | None:
    """None where a threshold falls among values that are no candidates."""
    keys = magnitude_keys(values)
    if keys.size < SMALL:
        kept = all_candidates(keys)
    else:
        kept = find_candidates(values, add, keys, k + 1, total=True)
        if kept.indices.size <= k:
            return None
    magnitudes = kept.magnitudes.view(f"f{keys.itemsize}")
    # Sorted once, so that each count of the bisection is a binary search.
    ordered = np.sort(magnitudes)
    mean, largest = _finite(kept.total / keys.size, float(ordered[-1]))
    search = BisectedSelection(k, keys.size, mean, largest)
    for _ in range(samplings):
        threshold = _rounded(search.threshold, values.dtype)
        # Below all candidates the true count is unknown, but above k and larger than the next
        # ones: it would only matter as the last one, and then the counts need whole passes.
        found = ordered.size - int(np.searchsorted(ordered, np.asarray(threshold, ordered.dtype)))
        search.count(found if threshold >= ordered[0] else keys.size, threshold)
    if search.below < ordered[0] and ordered.size < keys.size:
        return None
    sure = magnitudes >= search.above
    maybe = np.flatnonzero((magnitudes >= search.below) & ~sure)
    start = search.start(maybe.size, draw)
    sure[maybe[start : start + k - search.count_above]] = True
    search.indices = torch.from_numpy(kept.indices[sure])
    return search


def _rounded(number: float, dtype: torch.dtype) -> float:
    """A threshold as a number that the values' type can hold, so that all comparisons agree."""
    return float(np.float32(number)) if dtype is torch.float32 else number


def _finite(mean: float, largest: float) -> tuple[float, float]:
    if math.isnan(mean) or math.isnan(largest):
        raise nan_error()
    if math.isinf(mean) or math.isinf(largest):
        raise RunError(
            "a gradient is infinite, so that MSTopK has no threshold between mean and largest",
            why=f"The mean magnitude is {mean}, the largest {largest}.",
            fix="Clip gradients or lower the learning rate; topk selects infinite values, too.",
        )
    return mean, largest
