"""What a study of batch sizes and learning rates says: best rates, their exponent, critical batch.

A study has trained the same recipe with each batch B and rate to one target. Here its runs become

- the best rate of each batch, lr*(B), and its exponent p: log lr* = c + p log B. The linear rule
  has p = 1 (Goyal et al. 2017), the square-root rule p = 1/2 (Krizhevsky 2014).
- the critical batch of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
  section 2.3: with the best rates, S = S_min (1 + B_crit / B) steps. Its second form, without a
  model: where doubling the batch stops halving the steps.

Intervals are of 95 %, from Student's t. Neither the grid of rates nor the steps between two
judgements let a number be known better than their spacing, which is a floor of the variance: of a
value somewhere within a width h it is h^2 / 12. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_REACH = 64.0
"""B_crit is sought from the smallest batch divided by it to the largest times it."""
_POINTS = 4001
"""Of B_crit, on a logarithmic scale: neighbours differ by 0.3 % with batches from 4 to 64."""
HALVING = 0.5
"""Steps fall as B^-1/2 at B_crit, and faster below: a doubling divides them by sqrt(2)."""


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One training run of a study.

    Attributes:
        batch: Samples of the global batch.
        rate: Learning rate of the optimiser's first group.
        end: "reached", "budget", "diverged" or "cut" (slower than another rate).
        steps: Optimiser steps to the target, or until the run ended without it.
        samples: Used in these steps.
        every: Steps between two judgements.
        value: Last judged value; None where it is no number.
        directory: The run directory, relative to the study's.
    """

    batch: int
    rate: float
    seed: int
    end: str
    steps: int
    samples: int
    every: int
    value: float | None
    directory: str


@dataclass(frozen=True, kw_only=True)
class RateResult:
    """All seeds of a batch and rate.

    Attributes:
        steps: Geometric mean over the seeds; infinite where one did not reach the target.
        samples: Likewise.
        ends: How the runs ended, each way once.
    """

    batch: int
    rate: float
    steps: float
    samples: float
    every: int
    ends: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The best rate of a batch.

    Attributes:
        best: The rate of the grid with the fewest steps, of several the smallest; None: with no
            rate the target was reached.
        edge: "smallest" or "largest": the best rate is the grid's last, a better one may lie
            beyond; "" else.
        optimum: Vertex of the parabola in log rate and log steps through the best and its two
            neighbours; the best itself where one of them has not reached the target.
        spacing: Logarithm of the ratio of neighbouring rates at the best.
    """

    batch: int
    rates: tuple[RateResult, ...]
    best: RateResult | None
    edge: str
    optimum: float
    spacing: float


@dataclass(frozen=True)
class Estimate:
    """A number and its interval of 95 %; an end that the data do not bound is 0 or infinite."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class BatchScaling:
    """What a study says.

    Attributes:
        exponent: p of lr* ~ B^p, over batches whose best rate is not at the grid's edge; None with
            fewer than three of them.
        factor: c of lr* = c B^p; nan without.
        exponents: Between neighbouring batches of these: (smaller, larger, exponent).
        left_out: Batches that the exponent leaves out.
        critical: B_crit, samples; None with fewer than three batches that reached the target.
        min_steps: S_min, the steps of an infinite batch.
        min_samples: E_min = S_min B_crit, the samples of the smallest batch.
        stops_halving: The first two batches between which steps fall slower than B^-1/2.
    """

    batches: tuple[BatchResult, ...]
    exponent: Estimate | None
    factor: float
    exponents: tuple[tuple[int, int, float], ...]
    left_out: tuple[int, ...]
    critical: Estimate | None
    min_steps: float
    min_samples: float
    stops_halving: tuple[int, int] | None


def analyze(runs: Iterable[StudyRun]) -> BatchScaling:
    """All of it, from the runs of a study in any order."""
    cells: dict[int, dict[float, list[StudyRun]]] = {}
    for run in runs:
        cells.setdefault(run.batch, {}).setdefault(run.rate, []).append(run)
    batches = tuple(
        best_of([_result(rates[rate]) for rate in sorted(rates)])
        for _, rates in sorted(cells.items())
    )
    reached = [one for one in batches if one.best is not None]
    inside = [one for one in reached if not one.edge]
    exponent, factor = fit_exponent(
        [one.batch for one in inside],
        [one.optimum for one in inside],
        [one.spacing for one in inside],
    )
    sizes = [one.batch for one in reached]
    steps = [one.best.steps for one in reached if one.best is not None]
    every = [one.best.every for one in reached if one.best is not None]
    critical, min_steps = fit_critical_batch(sizes, steps, every)
    return BatchScaling(
        batches=batches,
        exponent=exponent,
        factor=factor,
        exponents=tuple(
            (a.batch, b.batch, math.log(b.optimum / a.optimum) / math.log(b.batch / a.batch))
            for a, b in pairwise(inside)
        ),
        left_out=tuple(one.batch for one in batches if one not in inside),
        critical=critical,
        min_steps=min_steps,
        min_samples=min_steps * critical.value if critical else math.nan,
        stops_halving=next(
            (
                (sizes[n], sizes[n + 1])
                for n in range(len(sizes) - 1)
                # Rounded: a fourfold batch that halves the steps is at the limit, not below.
                if round(-math.log(steps[n + 1] / steps[n], sizes[n + 1] / sizes[n]), 9) < HALVING
            ),
            None,
        ),
    )


def _result(runs: Sequence[StudyRun]) -> RateResult:
    first, all_reached = runs[0], all(run.end == "reached" for run in runs)

    def mean(values: Iterable[int]) -> float:
        logs = [math.log(value) for value in values]
        return math.exp(math.fsum(logs) / len(logs)) if all_reached else math.inf

    return RateResult(
        batch=first.batch,
        rate=first.rate,
        steps=mean(run.steps for run in runs),
        samples=mean(run.samples for run in runs),
        every=first.every,
        ends=tuple(dict.fromkeys(run.end for run in runs)),
    )


def best_of(rates: Sequence[RateResult]) -> BatchResult:
    """The best rate of a batch.

    Args:
        rates: In ascending order.
    """
    at = min(range(len(rates)), key=lambda n: (rates[n].steps, rates[n].rate))
    best = rates[at]
    if best.steps == math.inf:
        return BatchResult(
            batch=best.batch,
            rates=tuple(rates),
            best=None,
            edge="",
            optimum=math.nan,
            spacing=math.nan,
        )
    logs = [math.log(one.rate) for one in rates]
    edge = "" if 0 < at < len(rates) - 1 else "smallest" if at == 0 else "largest"
    gaps = [logs[n + 1] - logs[n] for n in (at - 1, at) if 0 <= n < len(rates) - 1]
    return BatchResult(
        batch=best.batch,
        rates=tuple(rates),
        best=best,
        edge=edge,
        optimum=best.rate if edge else _vertex(rates[at - 1 : at + 2]),
        spacing=math.fsum(gaps) / len(gaps) if gaps else math.nan,
    )


def _vertex(three: Sequence[RateResult]) -> float:
    """The rate at which the parabola through three points has its minimum."""
    best = three[1].rate
    if any(one.steps == math.inf for one in three):
        return best
    x = [math.log(one.rate / best) for one in three]
    y = [math.log(one.steps / three[1].steps) for one in three]
    left, right = y[0] / x[0], y[2] / x[2]
    curvature = (right - left) / (x[2] - x[0])
    if not curvature > 0:
        return best  # three alike
    return best * math.exp(-(left - curvature * x[0]) / (2 * curvature))


def fit_exponent(
    batches: Sequence[float], rates: Sequence[float], spacing: Sequence[float]
) -> tuple[Estimate | None, float]:
    """p and c of lr* = c B^p by least squares of the logarithms.

    Args:
        rates: lr* of each batch.
        spacing: Logarithm of the ratio of neighbouring rates of the grid there.

    Returns:
        None and nan of fewer than three batches: two lie on a line whatever they are.
    """
    if len(batches) < 3:
        return None, math.nan
    x, y = np.log(batches), np.log(rates)
    spread = float(np.sum((x - x.mean()) ** 2))
    p = float(np.sum((x - x.mean()) * (y - y.mean()))) / spread
    c = float(y.mean() - p * x.mean())
    freedom = len(x) - 2
    variance = max(
        float(np.sum((y - c - p * x) ** 2)) / freedom, float(np.mean(np.square(spacing))) / 12
    )
    half = _student(freedom) * math.sqrt(variance / spread)
    return Estimate(p, p - half, p + half), math.exp(c)


def fit_critical_batch(
    batches: Sequence[float], steps: Sequence[float], every: Sequence[float]
) -> tuple[Estimate | None, float]:
    """B_crit and S_min of S = S_min (1 + B_crit / B) by least squares of log S.

    The interval has each B_crit whose sum of squares, with the best S_min, exceeds the least by no
    more than t^2 times the variance.

    Args:
        steps: S of each batch with its best rate.
        every: Steps between two judgements.

    Returns:
        None and nan of fewer than three batches.
    """
    if len(batches) < 3:
        return None, math.nan
    tried = np.geomspace(min(batches) / _REACH, max(batches) * _REACH, _POINTS)
    shape = np.log1p(tried[:, None] / np.asarray(batches, dtype=float)[None, :])
    logs = np.log(np.asarray(steps, dtype=float))
    floor = (logs[None, :] - shape).mean(axis=1)
    squares: NDArray[np.float64] = ((logs[None, :] - floor[:, None] - shape) ** 2).sum(axis=1)
    at, freedom = int(squares.argmin()), len(batches) - 2
    width = np.divide(every, steps)
    variance = max(float(squares[at]) / freedom, float(np.mean(width**2)) / 12)
    within = np.flatnonzero(squares <= squares[at] + _student(freedom) ** 2 * variance)
    # An end of the scale within it: the data do not bound B_crit on this side. Else rounded
    # outwards, because exact steps leave an interval narrower than the scale is fine.
    first, last = int(within[0]), int(within[-1])
    low = 0.0 if first == 0 else float(tried[first - 1])
    high = math.inf if last == _POINTS - 1 else float(tried[last + 1])
    return Estimate(float(tried[at]), low, high), math.exp(float(floor[at]))


def _student(freedom: int) -> float:
    from scipy.special import stdtrit  # 0.2 s, for which `headway --help` does not wait

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
