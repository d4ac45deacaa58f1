"""What a plan on devices of several types takes at least, before any table is made.

Invariant: no plan of a combination is faster than `least`, or needs less than `state`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from headway.planner.degrees import state_per_byte
from headway.planner.mixed_point import Combination
from headway.planner.mixed_question import MixedQuestion
from headway.planner.operators import Floats
from headway.planner.search import Search
from headway.planner.whale.filling import slowest_stage, whole_filling

DENSE = 1024
"""Up to so many samples of a micro-batch each has a bound of its own, beyond only some."""


class Least:
    """Bounds of one question.

    Args:
        question: What is asked.
        engines: A search of each type.
    """

    def __init__(self, question: MixedQuestion, engines: Mapping[str, Search]) -> None:
        self.question = question
        self.engines = engines
        self.engine = next(iter(engines.values()))
        self._bounds: dict[tuple[str, int], Floats] = {}
        self._copies: dict[tuple[tuple[tuple[str, int], ...], int], tuple[Floats, Floats]] = {}

    def seconds(self, combination: Combination) -> float:
        """Seconds that no plan of it is below; infinite where the parameters alone do not fit."""
        question, state = self.question, self.state(combination)
        for kinds, _ in combination.cells.classes:
            if state > sum(question.caps[kind] for kind in kinds):
                return np.inf
        costs = [self.costs(kinds, combination) for kinds, _ in combination.cells.classes]
        copies = [number for _, number in combination.cells.classes]
        need = -(-question.batch // combination.microbatches)
        return whole_filling(costs, copies, need)[1]

    def costs(self, kinds: tuple[str, ...], combination: Combination) -> Floats:
        """Least seconds of a copy's step with micro-batches of 1, 2, ... samples."""
        m = combination.microbatches
        need = -(-self.question.batch // m)
        slowest, through = self._copy(tuple(sorted(Counter(kinds).items())), combination.tensor)
        return (m - 1) * slowest[:need] + through[:need]

    def _copy(self, stages: tuple[tuple[str, int], ...], tensor: int) -> tuple[Floats, Floats]:
        """Least seconds of a copy's slowest stage, and of all its stages one after the other, with
        micro-batches of 1, 2, ... samples.
        """
        key = (stages, tensor)
        if key not in self._copies:
            counts = np.array(list(self._kinds.values()))
            each = np.stack([self._spread(kind, tensor) for kind, _ in stages])
            numbers = np.array([number for _, number in stages])
            slowest, through = slowest_stage(each, counts, numbers)
            self._copies[key] = np.maximum.accumulate(slowest), np.maximum.accumulate(through)
        return self._copies[key]

    @cached_property
    def _kinds(self) -> Mapping[int, int]:
        """How many units there are of each kind."""
        return Counter(unit.kind for unit in self.engine.row)

    def _spread(self, kind: str, tensor: int) -> Floats:
        """(kinds of units, batch): seconds of a micro-batch of 1, 2, ... samples on t devices of a
        type: every operator's work evenly spread, or its launch."""
        key = (kind, tensor)
        if key not in self._bounds:
            passes, launches = self.engines[kind].work
            device = self.question.machines[kind].device
            batch = self.question.batch
            sparse = np.floor(np.geomspace(min(batch, DENSE), batch, 512))
            grid = np.unique([*range(1, min(batch, DENSE) + 1), *sparse, batch])
            stops = np.cumsum([0, *(unit.stop - unit.start for unit in self.engine.row)]).tolist()
            spans = {unit.kind: stops[n : n + 2] for n, unit in enumerate(self.engine.row)}
            found = []
            for number in self._kinds:
                some, calls = (
                    part[slice(*spans[number])][..., None] for part in (passes, launches)
                )
                work = some * grid / tensor + device.seconds_of_kernels(calls)
                slower = np.maximum(work, device.seconds_of_host(calls))
                found.append(np.where(some > 0, slower, 0.0).sum(axis=(0, 1)))
            at = np.searchsorted(grid, np.arange(1, batch + 1), side="right") - 1
            self._bounds[key] = np.maximum.accumulate(np.stack(found)[:, at], axis=1)
        return self._bounds[key]

    def held(self, combination: Combination) -> float:
        """Bytes that the fullest device needs at least: some copy takes no less than the mean."""
        microbatch = -(-self.question.batch // combination.microbatches // combination.data)
        kept = min(self.engine.kept, self.engine.crossing) / combination.tensor
        return (self.state(combination) + kept * microbatch) / combination.pipeline

    def may_fit(
        self, combination: Combination, tuples: np.ndarray, caps: Mapping[str, float]
    ) -> np.ndarray:
        """Which sizes leave room for the state and the least that forward keeps."""
        state, t = self.state(combination), combination.tensor
        kept = min(self.engine.kept, self.engine.crossing) / t
        fits = np.ones(len(tuples), dtype=bool)
        for c, (kinds, _) in enumerate(combination.cells.classes):
            fits &= state + kept * tuples[:, c] <= sum(caps[kind] for kind in kinds)
        return fits

    def state(self, combination: Combination) -> float:
        """Bytes of weights, gradients and optimiser of a copy on the devices of one tensor rank."""
        itemsize, work = self.engine.question.itemsize, self.engine.question.work
        per_byte = state_per_byte(
            itemsize,
            combination.zero,
            combination.data,
            work.optimiser.state,
            microbatches=combination.microbatches,
        )
        return self.engine.held * per_byte / combination.tensor
