"""How a fixed number of values is shared out among layers.

Invariant: the shares are whole numbers, at least 1, at most the size of the layer, and add up to
the total exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST, MOST = 0.25, 4.0
"""Of a layer's even share."""
FASTEST = 2.0
"""By which a share changes in one step at most."""


def allocate(wanted: Sequence[float], sizes: Sequence[int], total: int) -> list[int]:
    """Whole numbers in about these proportions (largest remainders).

    Args:
        wanted: Positive; only the proportions count.
        sizes: The most that each may have.
        total: Their sum; from the number of layers to the sum of `sizes`.
    """
    counts = [1] * len(wanted)
    left = total - len(wanted)
    while left:  # again where a layer is full: at most once per layer
        open_ = [i for i, size in enumerate(sizes) if counts[i] < size]
        weight = math.fsum(wanted[i] for i in open_)
        shares = {i: wanted[i] / weight * left for i in open_}
        for i in open_:
            counts[i] += min(math.floor(shares[i]), sizes[i] - counts[i])
        rest = total - sum(counts)
        if rest < len(open_):
            by_remainder = sorted(open_, key=lambda i: (math.floor(shares[i]) - shares[i], i))
            for i in by_remainder[:rest]:
                counts[i] += counts[i] < sizes[i]
        left = total - sum(counts)
    return counts


def adapt(shares: Sequence[float], even: Sequence[int], smallest: Sequence[float]) -> list[float]:
    """New shares, from the smallest magnitude that each layer has sent.

    Args:
        shares: Relative to the even ones.
        even: The even shares, which weigh the mean.
        smallest: Zero where a layer had fewer values than its share.
    """
    known = [i for i, value in enumerate(smallest) if 0 < value < math.inf]
    if not known:
        return list(shares)
    weight = sum(even[i] for i in known)
    mean = math.fsum(even[i] * math.log(smallest[i]) for i in known) / weight
    factors = [
        math.exp((math.log(value) - mean) / 2) if 0 < value < math.inf else 1 / FASTEST
        for value in smallest
    ]
    moved = [
        share * min(max(factor, 1 / FASTEST), FASTEST)
        for share, factor in zip(shares, factors, strict=True)
    ]
    scale = sum(even) / math.fsum(e * share for e, share in zip(even, moved, strict=True))
    return [min(max(share * scale, LEAST), MOST) for share in moved]
