"""Which k of d values are the largest in magnitude, exactly.

Values are compared by their bits without the sign, read as an integer: for floats of any width that
is the order of the magnitudes, and not-a-number comes out on top, where it is found. A sample gives
a threshold that slightly more than k values pass; one pass in blocks that stay in the cache keeps
those as candidates, and the rest of the work is done among them. Invariant: exactly k distinct
indices, ascending; a threshold that k values do not pass is lowered, never trusted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import RunError

Keys = NDArray[np.signedinteger]
Indices = NDArray[np.int64]

BLOCK_BYTES = 2**18
"""Of a block of values: it stays in the second-level cache between the three passes over it."""
SAMPLES = 2**15
SMALL = 2**14
"""Below this a whole partition is cheaper than a sample and a pass."""

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
    check(values, k)
    quick = values.is_cpu and values.numel() >= SMALL and k <= values.numel() // 8
    if add is not None and (not quick or values.element_size() < 4):
        values.add_(add)
        add = None
    if not values.is_cpu:
        return _top_k_elsewhere(values, k)
    keys = keys_of(values)
    infinite = _INFINITE[values.dtype]
    if not quick:
        return torch.from_numpy(_largest(_magnitudes(keys), k, infinite))
    kept = candidates(values, add, keys, k)
    chosen = kept.indices[_largest(kept.magnitudes, min(k, kept.indices.size), infinite)]
    if chosen.size < k:  # fewer than k values are not zero
        chosen = _with_zeros(chosen, k, keys.size)
    return torch.from_numpy(chosen)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The values that reach a threshold: where they are, and their bits without the sign."""

    indices: Indices
    magnitudes: Keys
    total: float = 0.0


def check(values: Tensor, k: int) -> None:
    if values.ndim != 1 or values.dtype not in _INFINITE:
        raise ValueError(f"select among a 1-D float tensor, not {values.dtype} {values.shape}")
    if not 1 <= k <= values.numel():
        raise ValueError(f"k is {k}; it must be 1 to {values.numel()}, the number of values")


def keys_of(values: Tensor) -> Keys:
    """The bits of the values as integers, in the same memory."""
    bits: Keys = values.detach().view(_INTEGERS[values.element_size()]).numpy()
    return bits


def _mask(keys: Keys) -> np.signedinteger:
    """All bits but the sign."""
    return np.iinfo(keys.dtype).max  # type: ignore[return-value]


def _magnitudes(keys: Keys) -> Keys:
    return np.bitwise_and(keys, _mask(keys))


def _largest(magnitudes: Keys, k: int, infinite: int) -> Indices:
    """Positions of the k largest, ascending; among equal ones the first."""
    if magnitudes.size and magnitudes.max() > infinite:
        raise not_a_number()
    if k == magnitudes.size:
        return np.arange(k)
    border = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    found = np.flatnonzero(magnitudes >= border)
    surplus = found.size - k
    if surplus:  # equal to the border: the last ones go
        ties = np.flatnonzero(magnitudes[found] == border)
        found = np.delete(found, ties[ties.size - surplus :])
    return found


def candidates(
    values: Tensor, add: Tensor | None, keys: Keys, k: int, *, total: bool = False
) -> Candidates:
    """At least k values that contain the k largest; fewer only if all others are zero."""
    first = _sampled_threshold(values, add, k)
    kept = _at_least(keys, max(first, 1), values, add, total=total)
    rank = k
    while kept.indices.size < k and first > 1:
        # The sample was unlucky or the order of the values is regular: ask for four times as many.
        rank *= 4
        first = _sampled_threshold(values, None, rank) if rank < keys.size // 8 else 1
        again = _at_least(keys, max(first, 1))
        kept = Candidates(again.indices, again.magnitudes, kept.total)
    return kept


def everything(keys: Keys) -> Candidates:
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
    magnitudes = _magnitudes(keys_of(sample))
    expected = k * magnitudes.size / values.numel()
    rank = min(math.ceil(expected + 4 * math.sqrt(expected) + 4), magnitudes.size)
    place = magnitudes.size - rank
    magnitudes.partition(place)
    return int(magnitudes[place])


def _at_least(
    keys: Keys,
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
    """All that is not zero, and the first zeros up to k."""
    zeros = np.setdiff1d(np.arange(min(size, k + nonzero.size)), nonzero, assume_unique=True)
    return np.sort(np.concatenate((nonzero, zeros[: k - nonzero.size])))


def _top_k_elsewhere(values: Tensor, k: int) -> Tensor:
    magnitudes = values.abs()
    if bool(magnitudes.isnan().any()):
        raise not_a_number()
    return magnitudes.topk(k, sorted=False).indices.sort().values


def not_a_number() -> RunError:
    return RunError(
        "a gradient is not a number, so that its largest values cannot be told",
        why="A compressor that sends the largest values has met a NaN.",
        fix="Find where the loss or its gradient becomes NaN: a smaller learning rate, gradient "
        'clipping, or compress = "none" to go on without a selection.',
    )
