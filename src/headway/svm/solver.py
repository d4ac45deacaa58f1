"""The dual problem of a support vector machine over all ranks: working sets, updates, the end.

    minimise  1/2 sum_ij a_i a_j y_i y_j K_ij - sum_i a_i,   0 <= a_i <= C_i,   sum_i a_i y_i = 0

Each rank has a stretch of the samples. With gamma_k = sum_j a_j y_j K_jk - y_k, y a of a sample may
rise where gamma is low and sink where it is high; the problem is solved when the highest gamma that
may sink is no more than `tolerance` above the lowest that may rise (Keerthi et al. 2001; libsvm's
test). An outer step:

1. every rank proposes its samples that violate most; all choose the same working set;
2. the owners give the rows of what is new in it, and every rank solves the small problem;
3. every rank brings gamma of its active samples up to date, by the multipliers that changed.

With a working set of two this is the algorithm of Vishnu et al. (2015), iterate for iterate the
same for any number of ranks. Nothing of an update is kept: no kernel row, no matrix.

Gamma is *reconstructed* before the end: in float64, of all samples, by what has changed since it
was last exact (`ring` of `peers.py`). A solution counts only if it holds for this gamma.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from headway.svm.arrays import Array, Indices, Mask, Matrix, stack_rows
from headway.svm.elimination import (
    ADAPTIVE,
    Elimination,
    EliminationClock,
    Prediction,
    RemainingWork,
)
from headway.svm.kernels import (
    FEW,
    Kernel,
    Samples,
    exact_sums,
    kernel_values,
    largest_value,
    prepare_samples,
    sum_grids,
    weighted_sums,
)
from headway.svm.pair_solver import solve_pairs
from headway.svm.peers import Peers
from headway.svm.threads import CHUNK

STOP, SAVE = 1, 2
"""Votes of a rank; what one rank votes for, all do."""
_WIDEN = 4
"""The vote of a rank whose updates round by more than they can bring."""
_PATIENCE = 3
"""Reconstructions after which updates are made in float64."""
_LARGEST_ERROR = 0.25
"""Of an update, as a part of the violation; above, updates are made in float64."""
_MOST_STEPS = 10**9
"""Where nobody says: scikit-learn has no limit, libsvm 10^7, which C of 1,000 needs at times."""
_MOST_STEPS_PER_MEMBER = 100
_EXACT_ROWS = 16 * CHUNK
_MEAN_BITS = 20
"""Of each value in the mean: sums of 2^33 samples are exact in float64."""


@dataclass(frozen=True)
class Share:
    """The samples of one rank.

    Attributes:
        rows: float64 [n, m], dense or compressed rows.
        labels: +1 or -1, [n].
        bounds: C of each sample, above 0, [n].
        first: Number of the first one among those of all ranks.
        total: Samples of all ranks.
    """

    rows: Matrix
    labels: Array
    bounds: Array
    first: int
    total: int


@dataclass(frozen=True)
class SolverOptions:
    """How a problem is solved.

    Attributes:
        tolerance: Largest violation of a solution.
        working_set: Samples that are solved for at once: 2 (the paper's) to 1,024.
        rule: When samples are eliminated.
        most_steps: Steps of pairs after which an unfinished machine is returned; -1: 10^9, or a
            hundred for each sample.
        second_order: How the second sample of a pair is chosen; see `solve_pairs`.
    """

    kernel: Kernel
    tolerance: float = 1e-3
    working_set: int = 512
    rule: Elimination = ADAPTIVE
    most_steps: int = -1
    second_order: bool = True


@dataclass(frozen=True)
class Progress:
    """Where a run is after an outer step; the same on all ranks.

    Attributes:
        violation: Of the active samples, before the step.
        active: Samples that take part in updates.
        support: Multipliers that are not zero.
        values: Kernel values that all ranks have computed.
        steps: Of pairs.
        outer: Outer steps.
        seconds: Since the beginning.
        remaining: Seconds until the end, as far as one can tell.
        votes: What ranks have voted for.
        predictions: Of the rule "adaptive", those since the progress before.
    """

    violation: float
    active: int
    support: int
    values: int
    steps: int
    outer: int
    seconds: float
    remaining: float
    votes: int
    predictions: tuple[Prediction, ...] = ()


@dataclass(frozen=True)
class Solution:
    """Multipliers of this rank's samples, and facts about all.

    Attributes:
        alpha: [n].
        gamma: [n], reconstructed.
        offset: Subtracted from the sum over support vectors (libsvm's rho).
        violation: Largest violation over all samples.
        objective: Of the dual problem.
        finished: Whether the violation is below the tolerance.
        reconstructions: How often gamma was reconstructed.
        predictions: Of the rule "adaptive", one for each test.
    """

    alpha: Array
    gamma: Array
    offset: float
    violation: float
    objective: float
    finished: bool
    steps: int
    outer: int
    values: int
    reconstructions: int
    predictions: tuple[Prediction, ...]


def sides(labels: Array, bounds: Array, alpha: Array, gamma: Array) -> tuple[Array, Array]:
    """Gamma where y a may rise, else infinity; where it may sink, else -infinity."""
    positive = labels > 0
    below, above = alpha < bounds, alpha > 0
    rising = np.where(np.where(positive, below, above), gamma, np.inf)
    sinking = np.where(np.where(positive, above, below), gamma, -np.inf)
    return rising, sinking


def solution_sums(labels: Array, bounds: Array, alpha: Array, gamma: Array) -> Array:
    """What ranks add up for a solution: gamma of free multipliers, their number, the objective."""
    free = (alpha > 0) & (alpha < bounds)
    objective = ((alpha * labels * gamma).sum() - alpha.sum()) / 2
    return np.array([gamma[free].sum(), free.sum(), objective])


def steps_limit(options: SolverOptions, total: int) -> int:
    """Steps of pairs after which a problem of so many samples is left unfinished."""
    return options.most_steps if options.most_steps >= 0 else max(_MOST_STEPS, 100 * total)


@dataclass
class _Active:
    """The samples of this rank that take part in updates, packed."""

    places: Indices  # among the rank's samples
    samples: Samples
    labels: Array
    bounds: Array
    alpha: Array
    gamma: Array
    aside: int = 0  # support vectors of the rank that do not: they are eliminated

    def sides(self) -> tuple[Array, Array]:
        return sides(self.labels, self.bounds, self.alpha, self.gamma)


@dataclass
class _WorkingSet:
    """Samples that are solved for at once, known to all ranks."""

    numbers: Indices
    labels: Array
    bounds: Array
    alpha: Array
    gamma: Array
    rows: Matrix
    kernel: Array  # values of the members, float64 [members, members], but of new ones
    fresh: int  # the first ones are new

    def stay(self, count: int) -> _WorkingSet:
        """The first members, as those that stay for the next set."""
        return _WorkingSet(
            self.numbers[:count], self.labels[:count], self.bounds[:count], self.alpha[:count],
            self.gamma[:count], self.rows[:count], self.kernel[:count, :count], fresh=0,
        )  # fmt: skip


@dataclass
class _Counts:
    steps: int = 0
    outer: int = 0
    values: float = 0.0  # of this rank
    rows: int = 0
    reconstructions: int = 0
    told: int = 0  # predictions that a progress has told
    began: float = field(default_factory=time.monotonic)


_HEAD = 7  # extremes, active, support, values, votes, moved


class Solver:
    """Solves a problem; `run` is to be iterated over to the end, by all ranks.

    Attributes:
        vote: STOP or SAVE, of this rank; it counts from the next step on.
    """

    def __init__(
        self, share: Share, options: SolverOptions, peers: Peers, alpha: Array | None = None
    ) -> None:
        self.vote = 0
        self._rough = False
        self._share, self._options, self._peers = share, options, peers
        self._alpha = np.zeros(len(share.labels)) if alpha is None else alpha.copy()
        self._exact_alpha = np.zeros(len(share.labels))
        self._gamma = -share.labels.copy()
        self._exact_gamma = -share.labels.copy()
        self._clock = EliminationClock(options.rule, share.total)
        self._work = RemainingWork(options.tolerance, share.total)
        self._counts = _Counts()
        self._shift = self._mean()
        self._dtype = torch.float64 if options.working_set <= FEW else torch.float32
        self._all = self._prepare()
        self._active = self._activate(None)
        self._before: _WorkingSet | None = None
        self._violation = np.inf
        self._largest: float | None = None
        self._unverified = False
        if self._peers.sum(np.array([float(self._alpha.any())]), "the beginning")[0]:
            self._reconstruct()

    def run(self) -> Iterator[Progress]:
        """Solve; a progress after every outer step."""
        options = self._options
        most = steps_limit(options, self._share.total)
        while True:
            rising, sinking = self._active.sides()
            heads, ups, downs = self._propose(rising, sinking)
            lowest, highest = heads[:, 0].min(), heads[:, 1].max()
            self._violation = float(highest - lowest)
            votes = int(np.bitwise_or.reduce(heads[:, 5].astype(int)))
            if votes & STOP or self._counts.steps >= most:
                return
            if votes & _WIDEN:
                self._reconstruct(widen=True)
                continue
            if self._violation <= options.tolerance:
                if not self._unverified and int(heads[:, 2].sum()) == self._share.total:
                    return
                self._reconstruct()
                continue
            self._work.note(self._violation, self._counts.rows)
            active, moved = int(heads[:, 2].sum()), int(heads[:, 6].sum())
            due = self._clock.due(self._counts.steps)
            aside = self._beyond(rising, sinking, lowest, highest) if due else None
            chosen, removed = self._choose(ups, downs, lowest, highest, aside)
            if aside is not None and self._eliminate(aside, removed, active, moved):
                active -= removed
            self._solve(chosen)
            yield self._progress(heads, votes, active)

    def solution(self) -> Solution:
        """The multipliers now; collective."""
        if self._unverified:
            self._reconstruct()
        else:  # eliminated samples, which only some ranks may have, kept their exact gamma
            self._write_back()
            self._active = self._activate(None)
        rising, sinking = self._active.sides()
        ends = self._peers.gather(
            np.array([rising.min(initial=np.inf), sinking.max(initial=-np.inf)]), "the solution"
        )
        lowest, highest = float(ends[:, 0].min()), float(ends[:, 1].max())
        share = self._share
        own = solution_sums(share.labels, share.bounds, self._alpha, self._gamma)
        sums = self._peers.sum(np.array([*own, self._counts.values]), "the solution")
        offset = sums[0] / sums[1] if sums[1] else (lowest + highest) / 2
        counts = self._counts
        return Solution(
            alpha=self._alpha.copy(),
            gamma=self._gamma.copy(),
            offset=float(offset),
            violation=highest - lowest,
            objective=float(sums[2]),
            finished=highest - lowest <= self._options.tolerance,
            steps=counts.steps,
            outer=counts.outer,
            values=int(sums[3]),
            reconstructions=counts.reconstructions,
            predictions=tuple(self._clock.predictions),
        )

    def state(self) -> Array:
        """Multipliers of this rank's samples: all that a run needs to go on."""
        self._write_back()
        return self._alpha.copy()

    def _mean(self) -> Array | None:
        """The mean of all samples, where they are dense; bit by bit the same for any ranks.

        Of values that are rounded to whole multiples of a power of two: their sums are exact.
        """
        rows = self._share.rows
        if self._options.kernel.name != "rbf" or not isinstance(rows, np.ndarray):
            return None
        # Not of absolute values, which would be a second matrix.
        own = np.maximum(rows.max(axis=0, initial=0.0), -rows.min(axis=0, initial=0.0))
        largest = self._peers.gather(own, "the largest values").max(axis=0)
        grid = np.ldexp(1.0, np.frexp(largest)[1] - _MEAN_BITS)
        total = np.zeros(rows.shape[1])
        for first in range(0, len(rows), CHUNK):
            total += np.rint(rows[first : first + CHUNK] / grid).sum(axis=0)
        mean: Array = self._peers.sum(total, "the mean") * grid / self._share.total
        return mean

    def _prepare(self) -> Samples:
        return prepare_samples(self._options.kernel, self._share.rows, self._dtype, self._shift)

    def _activate(self, places: Indices | None) -> _Active:
        """Take up these samples of the rank, all where None."""
        share = self._share
        if places is None:
            return _Active(
                np.arange(len(share.labels)), self._all, share.labels, share.bounds,
                self._alpha.copy(), self._gamma.copy(),
            )  # fmt: skip
        return _Active(
            places, self._all.take(places), share.labels[places], share.bounds[places],
            self._alpha[places], self._gamma[places],
            aside=int(np.count_nonzero(self._alpha) - np.count_nonzero(self._alpha[places])),
        )  # fmt: skip

    def _write_back(self) -> None:
        self._alpha[self._active.places] = self._active.alpha
        self._gamma[self._active.places] = self._active.gamma

    def _propose(self, rising: Array, sinking: Array) -> tuple[Array, Array, Array]:
        """What every rank knows, and its samples that violate most.

        Returns:
            [ranks, _HEAD]; [candidates, 6] that may rise; the same that may sink: gamma, number,
            multiplier, label, bound, rank.
        """
        half = max(self._options.working_set // 2, 1)
        active = self._active
        own = self._own_places()
        up, down = rising, sinking
        if len(own):
            up, down = rising.copy(), sinking.copy()
            up[own], down[own] = np.inf, -np.inf
        ups = _lowest(up, half)
        downs = _lowest(-down, half)
        moved = np.count_nonzero(active.alpha != self._exact_alpha[active.places])
        head = [
            rising.min(initial=np.inf), sinking.max(initial=-np.inf), len(active.places),
            np.count_nonzero(active.alpha) + active.aside, self._counts.values,
            self.vote | (_WIDEN if self._rough else 0), moved,
        ]  # fmt: skip
        message = np.full(_HEAD + 2 * half * 5, np.nan)
        message[:_HEAD] = head
        for start, which in ((0, ups), (half, downs)):
            table = message[_HEAD:].reshape(2 * half, 5)[start : start + len(which)]
            table[:, 0] = active.gamma[which]
            table[:, 1] = active.places[which] + self._share.first
            table[:, 2] = active.alpha[which]
            table[:, 3] = active.labels[which]
            table[:, 4] = active.bounds[which]
        everyone = self._peers.gather(message, "the choice of a working set")
        tables = everyone[:, _HEAD:].reshape(self._peers.ranks, 2, half, 5)
        owners = np.broadcast_to(
            np.arange(self._peers.ranks, dtype=np.float64)[:, None, None],
            (*tables.shape[:1], half, 1),
        )
        sides = [
            np.concatenate([tables[:, side], owners], axis=2).reshape(-1, 6) for side in (0, 1)
        ]
        return everyone[:, :_HEAD], *(side[~np.isnan(side[:, 0])] for side in sides)

    def _own_places(self) -> Indices:
        """Which active samples of this rank stay in the working set."""
        if self._before is None:
            return np.zeros(0, dtype=np.int64)
        local = self._before.numbers - self._share.first
        local = local[(local >= 0) & (local < len(self._alpha))]
        return self._among_active(local)

    def _among_active(self, local: Indices) -> Indices:
        places = self._active.places
        if len(places) == len(self._alpha):
            return local
        found = np.searchsorted(places, local)
        inside = found < len(places)
        inside[inside] = places[found[inside]] == local[inside]
        return found[inside]

    def _beyond(self, rising: Array, sinking: Array, lowest: float, highest: float) -> Mask:
        """What cannot be part of a violating pair: it may move in one way, and nobody can follow.

        Members that stay in the working set are left out: they go on to take part in it.
        """
        only_up, only_down = np.isneginf(sinking), np.isposinf(rising)
        beyond = (only_up & (rising > highest)) | (only_down & (sinking < lowest))
        beyond[self._own_places()] = False
        return beyond

    def _choose(
        self, ups: Array, downs: Array, lowest: float, highest: float, aside: Mask | None
    ) -> tuple[_WorkingSet, int]:
        """The next working set: those that violate most, and what was new in the last one.

        Args:
            aside: What this rank could eliminate; the second result is how many all ranks could.
        """
        kept = self._before
        room = self._options.working_set - (0 if kept is None else len(kept.numbers))
        ups = _ranked(ups[ups[:, 0] < highest])
        downs = _ranked(downs[downs[:, 0] > lowest] * [-1.0, 1, 1, 1, 1, 1])
        downs[:, 0] *= -1
        half = room // 2
        # Where one side has fewer, the other has more.
        count_up = min(len(ups), max(half, room - len(downs)))
        ups = ups[:count_up]
        # A free sample may be wanted for both sides.
        downs = downs[~np.isin(downs[:, 1], ups[:, 1])]
        chosen = np.concatenate([ups, downs[: room - count_up]])
        owners = chosen[:, 5].astype(np.int64)
        own = chosen[owners == self._peers.rank, 1].astype(np.int64) - self._share.first
        rows, removed = self._peers.gather_rows(
            self._share.rows[own],
            "the samples of a working set",
            np.array([0.0 if aside is None else aside.sum()]),
        )
        # Rows come rank by rank; each sample takes its own.
        rows = rows[np.argsort(np.argsort(owners, kind="stable"))]
        made = _WorkingSet(
            chosen[:, 1].astype(np.int64), chosen[:, 3], chosen[:, 4], chosen[:, 2], chosen[:, 0],
            rows, np.empty((0, 0)), fresh=len(chosen),
        )  # fmt: skip
        return made if kept is None else _joined(made, kept), int(removed.sum())

    def _complete(self, chosen: _WorkingSet) -> None:
        """Kernel values of the new members with all; the others have theirs."""
        fresh, kept = chosen.fresh, chosen.kernel
        samples = prepare_samples(self._options.kernel, chosen.rows, torch.float64, self._shift)
        chosen.kernel = np.empty((len(samples), len(samples)))
        kernel_values(samples.take(np.arange(fresh)), samples, chosen.kernel[:fresh])
        chosen.kernel[fresh:, :fresh] = chosen.kernel[:fresh, fresh:].T
        chosen.kernel[fresh:, fresh:] = kept
        self._counts.values += chosen.fresh * len(samples) / self._peers.ranks

    def _solve(self, chosen: _WorkingSet) -> None:
        """Solve for a working set, and bring gamma of the active samples up to date."""
        options, counts = self._options, self._counts
        self._complete(chosen)
        before = chosen.alpha.copy()
        counts.steps += solve_pairs(
            chosen.kernel, chosen.kernel.diagonal().copy(), chosen.labels, chosen.bounds,
            chosen.alpha, chosen.gamma,
            max(options.tolerance / 2, self._violation / 10),
            _MOST_STEPS_PER_MEMBER * len(before) if options.working_set > 2 else 1,
            options.second_order,
        )  # fmt: skip
        counts.outer += 1
        self._unverified = True
        changed = np.flatnonzero(chosen.alpha != before)
        columns = prepare_samples(options.kernel, chosen.rows[changed], self._dtype, self._shift)
        weights = ((chosen.alpha - before) * chosen.labels)[changed]
        active = self._active
        active.gamma += weighted_sums(active.samples, columns, weights)
        counts.values += len(active.gamma) * len(changed)
        counts.rows += len(changed)
        # Of the members the small problem knows both exactly.
        local = chosen.numbers - self._share.first
        mine = np.flatnonzero((local >= 0) & (local < len(self._alpha)))
        places = self._among_active(local[mine])
        error = np.abs(active.gamma[places] - chosen.gamma[mine]).max(initial=0.0)
        if self._dtype == torch.float32 and error > self._violation * _LARGEST_ERROR:
            self._rough = True
        active.alpha[places] = chosen.alpha[mine]
        active.gamma[places] = chosen.gamma[mine]
        half = self._options.working_set // 2
        keep = min(chosen.fresh, half) if self._options.working_set > 2 else 0
        self._before = chosen.stay(keep) if keep else None

    def _eliminate(self, aside: Mask, removed: int, active: int, moved: int) -> bool:
        """Eliminate samples of this rank, if the rule says so; alike on all ranks.

        Args:
            removed: How many samples all ranks would eliminate, of `active`.
            moved: Samples of all ranks whose multiplier is not that of the exact gamma.
        """
        worth = self._clock.worth(removed=removed, active=active, moved=moved, work=self._work)
        self._clock.tested(self._counts.steps, active - removed if worth else active)
        if worth:
            self._write_back()
            self._active = self._activate(self._active.places[~aside])
        return worth

    def _reconstruct(self, *, widen: bool = False) -> None:
        """Reconstruct gamma of all samples from what has changed since it was exact; collective.

        In float64. What ranks have changed travels round a ring, while gamma is summed up.

        Args:
            widen: Make updates in float64 from now on.
        """
        self._write_back()
        share, counts = self._share, self._counts
        moved = np.flatnonzero(self._alpha != self._exact_alpha)
        weights = ((self._alpha - self._exact_alpha) * share.labels)[moved]
        grids = self._grids(weights)
        parts = np.zeros((2, len(share.labels)))
        for rows, factors in self._peers.ring(share.rows[moved], weights, "the reconstruction"):
            columns = prepare_samples(self._options.kernel, rows, torch.float64, self._shift)
            for first in range(0, len(share.labels), _EXACT_ROWS):
                stretch = slice(first, first + _EXACT_ROWS)
                samples = prepare_samples(
                    self._options.kernel, share.rows[stretch], torch.float64, self._shift
                )
                if grids is None:
                    parts[0, stretch] += weighted_sums(samples, columns, factors)
                else:
                    parts[:, stretch] += exact_sums(samples, columns, factors, grids)
            counts.values += len(share.labels) * len(factors)
        self._exact_gamma += parts.sum(axis=0)
        self._exact_alpha = self._alpha.copy()
        self._gamma = self._exact_gamma.copy()
        counts.reconstructions += 1
        self._clock.reconstructed(counts.steps)
        self._work.restart()
        if self._dtype == torch.float32 and (widen or counts.reconstructions == _PATIENCE):
            # The rounding of updates is what keeps it from the end.
            self._dtype = torch.float64
            self._rough = False
            self._all = self._prepare()
        self._active = self._activate(None)
        self._before = None
        self._unverified = False

    def _grids(self, weights: Array) -> Array | None:
        """How terms are rounded, so that no number of ranks changes an iterate; collective.

        None for larger working sets, which have no such law, and the user's own kernels.
        """
        if self._options.working_set > FEW:
            return None
        if self._largest is None:
            own = largest_value(self._options.kernel, self._share.rows)
            self._largest = float(self._peers.gather(np.array([own]), "the largest values").max())
        own_facts = np.array([np.abs(weights).max(initial=0.0), len(weights)])
        facts = self._peers.gather(own_facts, "the reconstruction")
        largest = self._largest * facts[:, 0].max()
        if not np.isfinite(largest):
            return None
        return sum_grids(largest, int(facts[:, 1].sum()))

    def _progress(self, heads: Array, votes: int, active: int) -> Progress:
        counts = self._counts
        seconds = time.monotonic() - counts.began
        predictions = tuple(self._clock.predictions[counts.told :])
        counts.told += len(predictions)
        return Progress(
            violation=self._violation,
            active=active,
            support=int(heads[:, 3].sum()),
            values=int(heads[:, 4].sum()),
            steps=counts.steps,
            outer=counts.outer,
            seconds=seconds,
            remaining=self._work.rows() / max(counts.rows, 1) * seconds,
            votes=votes,
            predictions=predictions,
        )


def _lowest(values: Array, count: int) -> Indices:
    """Places of the lowest finite values, at most `count` of them."""
    if count == 1 and len(values):
        best = int(values.argmin())
        return np.array([best] if np.isfinite(values[best]) else [], dtype=np.int64)
    found: Indices = (
        np.arange(len(values))
        if len(values) <= count
        else np.argpartition(values, count - 1)[:count]
    )
    return found[np.isfinite(values[found])]


def _ranked(candidates: Array) -> Array:
    """By gamma, then by number."""
    return candidates[np.lexsort((candidates[:, 1], candidates[:, 0]))]


def _joined(one: _WorkingSet, other: _WorkingSet) -> _WorkingSet:
    return _WorkingSet(
        np.concatenate([one.numbers, other.numbers]),
        np.concatenate([one.labels, other.labels]),
        np.concatenate([one.bounds, other.bounds]),
        np.concatenate([one.alpha, other.alpha]),
        np.concatenate([one.gamma, other.gamma]),
        stack_rows([one.rows, other.rows]),
        other.kernel,
        fresh=one.fresh,
    )
