"""What the statistics of a data cache amount to."""

from __future__ import annotations

from headway.data import CacheStatistics


def hit_rate(counts: CacheStatistics) -> float:
    """The part of the samples that was found in a level; 0 if there were none."""
    return 1 - counts.remote_samples / counts.samples if counts.samples else 0.0


def since(later: CacheStatistics, earlier: CacheStatistics) -> CacheStatistics:
    """What came between two moments."""
    before = earlier.to_dict()
    return CacheStatistics(**{name: n - before[name] for name, n in later.to_dict().items()})
