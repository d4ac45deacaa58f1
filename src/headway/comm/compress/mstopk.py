"""MSTopK: about the largest k of d values, by a threshold that is bisected.

Shi et al. 2021, "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters",
algorithm 1. Made for accelerators, where some passes over the memory cost less than a sort; on CPUs
`selection.top_k` is as fast. Invariant: exactly k distinct indices; every value that reaches the
upper threshold is chosen, none that does not reach the lower one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.comm.compress.selection import (
    SMALL,
    candidates,
    check,
    everything,
    keys_of,
    not_a_number,
)
from headway.errors import RunError

SAMPLINGS = 30
"""N of the paper."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What MSTopK chose, with the two thresholds between which its choice is arbitrary.

    Attributes:
        indices: int64[k], ascending.
        above: Every value of at least this magnitude is chosen; infinite where there is none.
        below: No value of smaller magnitude is chosen.
        count_above: How many values reach `above`: at most k.
        count_below: How many values reach `below`: at least k.
    """

    indices: Tensor
    above: float
    below: float
    count_above: int
    count_below: int


def ms_top_k(
    values: Tensor,
    k: int,
    draw: np.random.Generator,
    *,
    samplings: int = SAMPLINGS,
    add: Tensor | None = None,
) -> Sampled:
    """k values that are about the largest, by bisection of a threshold (MSTopK).

    Shi et al. 2021, "Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters", algorithm 1: the threshold t = mean + q (max - mean) is bisected by counting the
    values that reach it; what lies between the two closest thresholds is taken as k - k1
    neighbours in index order, from a random place. On CPUs the counts are those of the candidates
    that a first threshold leaves, which makes them exact and cheap; elsewhere each is one pass.

    Args:
        values: 1-D, of a floating type.
        k: 1 to the number of values.
        draw: Draws the random place.
        samplings: N of the paper.
        add: As for `top_k`.

    Raises:
        RunError: A value is not finite.
        ValueError: No such k.
    """
    check(values, k)
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
) -> Sampled:
    """`ms_top_k` as the paper has it: every count is a pass over all values."""
    check(values, k)
    magnitudes = values.abs()
    mean, largest = _finite(float(magnitudes.double().mean()), float(magnitudes.max()))
    number = _ExactIn(values.dtype)
    search = _Bisection(k, values.numel(), mean, largest)
    for _ in range(samplings):
        threshold = number(search.threshold)
        search.count(int((magnitudes >= threshold).sum()), threshold)
    sure = magnitudes >= search.above
    maybe = ((magnitudes >= search.below) & ~sure).nonzero().flatten()
    start = search.start(maybe.numel(), draw)
    extra = maybe[start : start + k - search.count_above]
    indices = torch.cat((sure.nonzero().flatten(), extra)).sort().values
    return search.result(indices)


@dataclass(slots=True)
class _Bisection:
    """The state of algorithm 1: the closest thresholds that too few and too many values reach."""

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

    def result(self, indices: Tensor) -> Sampled:
        return Sampled(indices, self.above, self.below, self.count_above, self.count_below)


def _ms_top_k_of_candidates(
    values: Tensor, k: int, draw: np.random.Generator, samplings: int, add: Tensor | None
) -> Sampled | None:
    """None where the thresholds fall among values that are no candidates."""
    keys = keys_of(values)
    if keys.size < SMALL:
        kept = everything(keys)
    else:
        kept = candidates(values, add, keys, k + 1, total=True)
        if kept.indices.size <= k:
            return None
    magnitudes = kept.magnitudes.view(f"f{keys.itemsize}")
    ordered = np.sort(magnitudes)
    mean, largest = _finite(kept.total / keys.size, float(ordered[-1]))
    number = _ExactIn(values.dtype)
    search = _Bisection(k, keys.size, mean, largest)
    for _ in range(samplings):
        threshold = number(search.threshold)
        # Below all candidates the true count is unknown but above k, and larger than the next
        # ones: it would only matter if it were the last, and then the passes have to tell.
        found = ordered.size - int(np.searchsorted(ordered, np.asarray(threshold, ordered.dtype)))
        search.count(found if threshold >= ordered[0] else keys.size, threshold)
    if search.below < ordered[0] and ordered.size < keys.size:
        return None
    sure = magnitudes >= search.above
    maybe = np.flatnonzero((magnitudes >= search.below) & ~sure)
    start = search.start(maybe.size, draw)
    sure[maybe[start : start + k - search.count_above]] = True
    return search.result(torch.from_numpy(kept.indices[sure]))


class _ExactIn:
    """Rounds a number to what a type can hold, so that all comparisons mean the same."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._type = np.float32 if dtype is torch.float32 else np.float64

    def __call__(self, number: float) -> float:
        return float(self._type(number))


def _finite(mean: float, largest: float) -> tuple[float, float]:
    if math.isnan(mean) or math.isnan(largest):
        raise not_a_number()
    if math.isinf(mean) or math.isinf(largest):
        raise RunError(
            "a gradient is infinite, so that MSTopK has no threshold between mean and largest",
            why=f"The mean magnitude is {mean}, the largest {largest}.",
            fix="Clip gradients or lower the learning rate; topk selects infinite values, too.",
        )
    return mean, largest
