"""The time of a collective on a link, `a + b * bytes`, fitted to measured times.

Hockney's alpha-beta model, as MG-WFBP uses it for fusion (Shi et al. 2019). One fit stands for
one collective over one group of ranks: a holds everything that does not depend on the size, b
the rate of the slowest link on the path times the number of times that a byte crosses it.
Neither is ever negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headway.units import format_rate, format_seconds

LARGEST_ERROR = 0.2
"""A fit that misses a measured time by more than this share is not to be trusted."""
# 4 KiB to 16 MiB: the sizes that buckets and chunks have.
_USUAL_SIZES = tuple(2**power for power in range(12, 26, 2))


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Seconds of an all-reduce among `ranks` ranks, as a function of the bytes of its buffer.

    Attributes:
        latency: a, seconds.
        seconds_per_byte: b, seconds per byte of the buffer (not per byte on the wire).
        error: Largest share by which the fit missed a measured time; 0.0 for a fit from a rate.
    """

    latency: float
    seconds_per_byte: float
    error: float = 0.0
    ranks: int = 2

    def __post_init__(self) -> None:
        for name in ("latency", "seconds_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a link is {value}; it must be finite and not negative")
        if self.ranks < 1:
            raise ValueError(f"a link among {self.ranks} ranks; at least 1")

    @staticmethod
    def of_rate(rate: float, latency: float, ranks: int) -> LinkFit:
        """From the rate of each rank's own link.

        Args:
            rate: Bytes per second that a rank can send, and receive at the same time.
            latency: Seconds of an all-reduce of nothing.
            ranks: A ring sends each byte 2 (n - 1) / n times.
        """
        if not rate > 0:
            raise ValueError(f"the rate of a link is {rate} bytes/s; it must be positive")
        return LinkFit(latency, ring_factor(ranks) / rate, 0.0, ranks)

    def seconds(self, num_bytes: float) -> float:
        """Time of one all-reduce of a buffer of this size."""
        return self.latency + self.seconds_per_byte * num_bytes

    def wire_seconds(self, sent: float) -> float:
        """Time that `sent` bytes, as they leave one rank, occupy its link; without latency.

        This turns the fit of the all-reduce into the price of other collectives.
        """
        factor = ring_factor(self.ranks)
        return sent * self.seconds_per_byte / factor if factor else 0.0

    @property
    def rate(self) -> float:
        """Bytes per second that leave one rank; infinite where nothing is sent."""
        factor = ring_factor(self.ranks)
        return factor / self.seconds_per_byte if self.seconds_per_byte and factor else math.inf

    @property
    def reliable(self) -> bool:
        """Whether the model describes what was measured."""
        return self.error <= LARGEST_ERROR

    def explain(self) -> str:
        """One sentence, with a warning where the fit is poor."""
        rate = "no limit" if math.isinf(self.rate) else format_rate(self.rate)
        text = f"{self.ranks} ranks: latency {format_seconds(self.latency)}, {rate} per rank"
        if self.reliable:
            return text
        return (
            f"{text}; but measured times differ from this by up to {self.error:.0%} "
            f"(more than {LARGEST_ERROR:.0%}): the link or the machine is shared or not steady"
        )


def ring_factor(ranks: int) -> float:
    """How often a rank sends each byte of a buffer in an all-reduce: 2 (n - 1) / n."""
    return 2 * (ranks - 1) / ranks


def fit_link(samples: Iterable[tuple[float, float]], *, ranks: int) -> LinkFit:
    """Fit a and b to measured times.

    Of each size the shortest time counts: noise of a shared machine only ever adds. The fit
    minimises the squares of the *relative* residuals, so that small messages count as much as
    large ones; neither parameter becomes negative.

    Args:
        samples: (bytes, seconds), several of each of at least two sizes; five sizes are good.

    Raises:
        ValueError: Fewer than two sizes, or a time that is not positive.
    """
    best: dict[float, float] = {}
    for size, seconds in samples:
        if not (seconds > 0 and math.isfinite(seconds) and size >= 0):
            raise ValueError(f"{size} bytes in {seconds} s is no measurement")
        best[size] = min(seconds, best.get(size, math.inf))
    if len(best) < 2:
        raise ValueError(f"a link fit needs at least two sizes, not {len(best)}")
    points = sorted(best.items())
    latency, slope = fit_line(points)
    error = max(abs(latency + slope * size - seconds) / seconds for size, seconds in points)
    return LinkFit(latency, slope, error, ranks)


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The a, b >= 0 that minimise the sum of ((a + b n) / t - 1)^2 over points (n, t > 0)."""
    # With u = 1 / t and v = n / t the terms are (a u + b v - 1)^2.
    rows = [(1 / seconds, size / seconds) for size, seconds in points]
    uu = math.fsum(u * u for u, _ in rows)
    uv = math.fsum(u * v for u, v in rows)
    vv = math.fsum(v * v for _, v in rows)
    su = math.fsum(u for u, _ in rows)
    sv = math.fsum(v for _, v in rows)
    # Not zero, because there are at least two sizes (Cauchy and Schwarz).
    determinant = uu * vv - uv * uv
    a = (su * vv - sv * uv) / determinant
    b = (sv * uu - su * uv) / determinant
    # The sum is convex: its constrained minimum lies on the border that was crossed.
    if a < 0:
        return 0.0, sv / vv
    if b < 0:
        return su / uu, 0.0
    return a, b


def link_drifted(old: LinkFit, new: LinkFit, tolerance: float = LARGEST_ERROR) -> bool:
    """Whether the link changed: some usual size takes more than `tolerance` longer or shorter."""
    return any(
        max(before, after) > (1 + tolerance) * min(before, after)
        for size in _USUAL_SIZES
        for before, after in [(old.seconds(size), new.seconds(size))]
    )
