"""Training of a machine for several classes, one against one, over the samples of all ranks.

Every pair of classes is a problem of its own (`solver.py`), over the samples of the two. What a
training has reached is a `TrainingState`: multipliers by the number of the sample, so that any
number of ranks goes on from it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from headway.svm.arrays import Array, Indices, Matrix
from headway.svm.elimination import ADAPTIVE, Elimination
from headway.svm.kernels import Kernel
from headway.svm.machine import Machine, PairFacts, pairs_of
from headway.svm.peers import Peers
from headway.svm.small_solver import SmallSolver, is_small
from headway.svm.solver import SAVE, STOP, Progress, Share, Solver, SolverOptions
from headway.svm.threads import threads_over_blocks

_FIRST_SAVE_SECONDS = 1.0
_SAVE_SHARE = 0.02
"""At most this share of the time goes into saving."""


@dataclass(frozen=True)
class TrainingOptions:
    """What is trained, and how.

    Attributes:
        C: Bound of the multipliers.
        class_factors: Of C, for each class in their sorted order; (): 1.
        tolerance: Largest violation of a finished machine.
        working_set: Samples that are solved for at once, 2 to 1,024.
        rule: When samples are eliminated.
        most_steps: Of each pair of classes; -1: see `SolverOptions`.
    """

    kernel: Kernel
    C: float = 1.0
    class_factors: tuple[float, ...] = ()
    tolerance: float = 1e-3
    working_set: int = 512
    rule: Elimination = ADAPTIVE
    most_steps: int = -1


@dataclass(frozen=True)
class PairState:
    """Multipliers of a pair of classes that are not zero.

    Attributes:
        numbers: Of the samples, among those of all ranks, [s], rising.
        weights: alpha y, [s].
        offset: libsvm's rho; 0 before the end.
        facts: None: not finished yet.
    """

    numbers: Indices
    weights: Array
    offset: float = 0.0
    facts: PairFacts | None = None


@dataclass(frozen=True)
class TrainingState:
    """All that a training needs to go on; the same on all ranks.

    Attributes:
        digest: Of samples, labels, weights and what is trained, for any number of ranks.
        pairs: Those that were solved, and the one that was being solved.
        outer: Outer steps so far.
    """

    digest: int
    pairs: tuple[PairState, ...] = ()
    outer: int = 0


@dataclass(frozen=True)
class MachineProgress:
    """Where a training is after an outer step; the same on all ranks.

    Attributes:
        pair: Number of the pair of classes, from 0.
        pairs: How many there are.
        positive, negative: Labels of the two classes.
    """

    pair: int
    pairs: int
    positive: Any
    negative: Any
    progress: Progress


Observe = Callable[[MachineProgress], None]
Save = Callable[[TrainingState], None]


def train_machine(
    rows: Matrix,
    codes: Indices,
    factors: Array,
    classes: NDArray[Any],
    options: TrainingOptions,
    peers: Peers,
    *,
    observe: Observe | None = None,
    save: Save | None = None,
    resume: TrainingState | None = None,
    stop: Callable[[], bool] | None = None,
) -> Machine:
    """Train a machine; collective, and all ranks get the whole of it.

    Args:
        rows: This rank's samples, float64 [n, m], dense or compressed rows in canonical form; the
            ranks' samples in the order of the ranks are the whole set.
        codes: Places of their labels among `classes`, [n].
        factors: Weights of samples, multiplied with C, [n]; those of weight 0 take no part.
        classes: Labels of the classes in sorted order, the same on all ranks, at least two.
        observe: Called after every outer step.
        save: Called with the state now and then, and at the end of an unfinished training;
            on all ranks.
        resume: A state of this training (`TrainingState.digest`), given on rank 0 at least; of
            another one it is left aside.
        stop: Whether this rank wants to stop; asked after every outer step. What one rank wants,
            all do, and the machine is unfinished then.
    """
    training = _Training(
        rows, codes, factors, classes, options, peers, observe, save, stop or (lambda: False)
    )
    # What a user's kernel does with torch is left alone.
    with threads_over_blocks(concurrent=options.kernel.concurrent):
        return training.run(resume)


class _SaveClock:
    """Says when to save: soon at first, and so seldom that little of the time goes into it."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _FIRST_SAVE_SECONDS

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def saved(self, seconds: float) -> None:
        self._next = time.monotonic() + max(_FIRST_SAVE_SECONDS, seconds / _SAVE_SHARE)


@dataclass
class _Training:
    rows: Matrix
    codes: Indices
    factors: Array
    classes: NDArray[Any]
    options: TrainingOptions
    peers: Peers
    observe: Observe | None
    save: Save | None
    stop: Callable[[], bool]
    clock: _SaveClock = field(default_factory=_SaveClock)
    done: list[PairState] = field(default_factory=list)
    outer: int = 0
    digest: int = 0
    first: int = 0

    def run(self, resume: TrainingState | None) -> Machine:
        """Train; collective."""
        counts = self.peers.gather(np.array([len(self.codes)]), "the numbers of samples")[:, 0]
        self.first = int(counts[: self.peers.rank].sum())
        known = _from_rank0(resume, self.peers)
        # Only where somebody asks for it: it takes a pass over the samples.
        if known is not None or self.save is not None:
            self.digest = digest_training(
                self.rows, self.codes, self.factors, self.options, self.peers
            )
        if known is None or known.digest != self.digest:
            known = TrainingState(self.digest)
        self.outer = known.outer
        for place, (one, other) in enumerate(pairs_of(len(self.classes))):
            before = known.pairs[place] if place < len(known.pairs) else None
            if before is None or not self._finished(before):
                before = self._solve(place, one, other, before)
            self.done.append(before)
            if self._anyone_stops():
                break
        machine = self._machine()
        if not machine.finished:
            self._save(self.done)
        return machine

    def _finished(self, pair: PairState) -> bool:
        # By this training's tolerance: the one before may have had another.
        return pair.facts is not None and pair.facts.violation <= self.options.tolerance

    def _anyone_stops(self) -> bool:
        return bool(self.peers.sum(np.array([float(self.stop())]), "the end of a pair")[0])

    def _solve(self, place: int, one: int, other: int, before: PairState | None) -> PairState:
        """Solve for one pair of classes; collective."""
        options = self.options
        chosen = np.flatnonzero(((self.codes == one) | (self.codes == other)) & (self.factors > 0))
        codes = self.codes[chosen]
        counts = self.peers.gather(np.array([len(chosen)]), "the samples of a pair")[:, 0]
        classes = np.array([1.0, *options.class_factors])[1:]
        share = Share(
            rows=self.rows if len(chosen) == len(self.codes) else self.rows[chosen],
            labels=np.where(codes == one, 1.0, -1.0),
            bounds=options.C * self.factors[chosen] * (classes[codes] if len(classes) else 1.0),
            first=int(counts[: self.peers.rank].sum()),
            total=int(counts.sum()),
        )
        solving = SolverOptions(
            options.kernel,
            options.tolerance,
            options.working_set,
            options.rule,
            options.most_steps,
        )
        start = None if before is None else self._local(before, chosen)
        make = SmallSolver if is_small(share.total, solving) else Solver
        solver = make(share, solving, self.peers, start)
        labels = self.classes[[one, other]].tolist()
        solver.vote = STOP if self.stop() else 0
        for progress in solver.run():
            self.outer += 1
            if self.observe is not None:
                self.observe(MachineProgress(place, self._pairs, labels[0], labels[1], progress))
            if progress.votes & SAVE:
                self._save([*self.done, self._state(solver.state(), chosen, share.labels)])
            solver.vote = STOP if self.stop() else 0
            if self.save is not None and self.clock.due():
                solver.vote |= SAVE
        solution = solver.solution()
        facts = PairFacts(
            violation=solution.violation,
            objective=solution.objective,
            finished=solution.finished,
            steps=solution.steps,
            outer=solution.outer,
            values=solution.values,
            reconstructions=solution.reconstructions,
            samples=share.total,
        )
        return self._state(solution.alpha, chosen, share.labels, solution.offset, facts)

    @property
    def _pairs(self) -> int:
        return len(self.classes) * (len(self.classes) - 1) // 2

    def _local(self, pair: PairState, chosen: Indices) -> Array:
        """Multipliers of this rank's chosen samples."""
        alpha = np.zeros(len(chosen))
        places = np.searchsorted(pair.numbers, chosen + self.first)
        inside = places < len(pair.numbers)
        inside[inside] = pair.numbers[places[inside]] == chosen[inside] + self.first
        alpha[inside] = np.abs(pair.weights[places[inside]])
        return alpha

    def _state(
        self,
        alpha: Array,
        chosen: Indices,
        labels: Array,
        offset: float = 0.0,
        facts: PairFacts | None = None,
    ) -> PairState:
        """The multipliers of all ranks that are not zero; collective."""
        moved = np.flatnonzero(alpha)
        own = np.stack([chosen[moved] + self.first, (alpha * labels)[moved]], axis=1)
        all_ranks = np.concatenate(self.peers.gather_arrays(own, "the multipliers"))
        return PairState(all_ranks[:, 0].astype(np.int64), all_ranks[:, 1], offset, facts)

    def _save(self, pairs: list[PairState]) -> None:
        if self.save is None:
            return
        began = time.monotonic()
        self.save(TrainingState(self.digest, tuple(pairs), self.outer))
        self.clock.saved(time.monotonic() - began)

    def _machine(self) -> Machine:
        """All pairs in libsvm's layout, and the support vectors of all ranks; collective."""
        numbers = np.unique(np.concatenate([pair.numbers for pair in self.done]))
        codes = np.zeros(len(numbers), dtype=np.int64)
        table = np.zeros((len(self.classes) - 1, len(numbers)))
        for pair, (one, other) in zip(self.done, pairs_of(len(self.classes)), strict=False):
            places = np.searchsorted(numbers, pair.numbers)
            positive = pair.weights > 0
            codes[places] = np.where(positive, one, other)
            table[np.where(positive, other - 1, one), places] = pair.weights
        order = np.argsort(codes, kind="stable")
        local = numbers - self.first
        local = local[(local >= 0) & (local < len(self.codes))]
        rows, _ = self.peers.gather_rows(self.rows[local], "the support vectors")
        offsets = np.zeros(self._pairs)
        offsets[: len(self.done)] = [pair.offset for pair in self.done]
        return Machine(
            classes=self.classes,
            kernel=self.options.kernel,
            rows=rows[order],
            numbers=numbers[order],
            counts=np.bincount(codes, minlength=len(self.classes)),
            coefficients=table[:, order],
            offsets=offsets,
            finished=len(self.done) == self._pairs and all(map(self._finished, self.done)),
            pairs=tuple(pair.facts for pair in self.done if pair.facts is not None),
        )


def _from_rank0(state: TrainingState | None, peers: Peers) -> TrainingState | None:
    """The state that rank 0 was given, on all ranks; collective."""
    if peers.world is None:
        return state
    packs = [] if state is None or peers.rank else [pack_state(state)]
    pack = peers.gather_arrays(np.concatenate([np.zeros(0), *packs]), "the state")[0]
    return unpack_state(pack) if len(pack) else None


_FACTS = 8


def pack_state(state: TrainingState) -> Array:
    """A state as one array of float64, for a message or a file."""
    low, high = state.digest & 0xFFFFFFFF, state.digest >> 32
    parts = [np.array([low, high, state.outer, len(state.pairs)], dtype=np.float64)]
    for pair in state.pairs:
        facts = pair.facts
        known = (
            [np.nan] * _FACTS
            if facts is None
            else [
                facts.violation, facts.objective, facts.finished, facts.steps, facts.outer,
                facts.values, facts.reconstructions, facts.samples,
            ]
        )  # fmt: skip
        head = np.array([len(pair.numbers), pair.offset, *known], dtype=np.float64)
        parts += [head, pair.numbers.astype(np.float64), pair.weights]
    return np.concatenate(parts)


def unpack_state(pack: Array) -> TrainingState:
    """What `pack_state` has packed."""
    low, high, outer, count = (int(value) for value in pack[:4])
    pairs, place = [], 4
    for _ in range(count):
        size, offset = int(pack[place]), float(pack[place + 1])
        known = pack[place + 2 : place + 2 + _FACTS]
        place += 2 + _FACTS
        numbers, weights = pack[place : place + size], pack[place + size : place + 2 * size]
        place += 2 * size
        facts = None
        if not np.isnan(known[2]):
            facts = PairFacts(
                float(known[0]), float(known[1]), bool(known[2]),
                *(int(value) for value in known[3:]),
            )  # fmt: skip
        pairs.append(PairState(numbers.astype(np.int64), weights.copy(), offset, facts))
    return TrainingState(low | high << 32, tuple(pairs), outer)


_ODD = np.uint64(0x9E3779B97F4A7C15)
_STRETCH = 65536


def digest_training(
    rows: Matrix, codes: Indices, factors: Array, options: TrainingOptions, peers: Peers
) -> int:
    """A number, below 2^64, that another training is unlikely to have; collective.

    The same for any number of ranks: a sum of products of each value's bits with odd numbers that
    stand for its row and column. The tolerance, the rule and the working set may change.
    """
    counts = peers.gather(np.array([len(codes)]), "the numbers of samples")[:, 0]
    numbers = np.arange(len(codes), dtype=np.uint64) + np.uint64(counts[: peers.rank].sum())
    odd = (numbers * _ODD << np.uint64(1)) | np.uint64(1)
    parts = [
        (_mixed(factors) * odd).sum(),
        ((codes.astype(np.uint64) + np.uint64(1)) * _ODD * odd).sum(),
    ]
    for first in range(0, len(codes), _STRETCH):
        stretch = slice(first, first + _STRETCH)
        part = rows[stretch]
        if sparse.issparse(part):
            columns = part.indices.astype(np.uint64) * np.uint64(2) + np.uint64(1)
            of_row = np.repeat(odd[stretch], np.diff(part.indptr))
            parts.append((_mixed(part.data) * columns * of_row).sum())
        else:
            columns = np.arange(part.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
            parts.append((_mixed(part) @ columns * odd[stretch]).sum())
    own = np.array(parts, dtype=np.uint64).sum(keepdims=True)
    # As float64 only for the way: no arithmetic touches its bits.
    every = peers.gather(own.view(np.float64), "the digest of a training").view(np.uint64).sum()
    kernel = options.kernel
    name = getattr(kernel.function, "__qualname__", "")
    told = (kernel.name, kernel.gamma, kernel.degree, kernel.coef0, name, options.C,
            options.class_factors)  # fmt: skip
    return int(every) ^ zlib.crc32(repr(told).encode()) << 32


def _mixed(values: Array) -> NDArray[np.uint64]:
    """The bits of values; the low ones, which are often nothing, hold something of the high."""
    bits: NDArray[np.uint64] = np.ascontiguousarray(values, dtype=np.float64).view(np.uint64)
    return bits ^ bits >> np.uint64(32)
