"""What a plan on devices of several types takes at least, before any table is made.

Invariant: no plan of a combination is faster than `least`, or needs less than `state`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headway.planner.degrees import state_per_byte
from headway.planner.mixed_question import MixedQuestion
from headway.planner.mixed_stage import Combination
from headway.planner.operators import Floats
from headway.planner.search import Search
from headway.planner.whale.filling import whole_filling

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
        each = [self._spread(kind, combination.tensor)[:need] for kind in kinds]
        together = 1.0 / sum(1.0 / one for one in each)  # stages that take equally long
        found: Floats = (m - 1) * together + np.min(each, axis=0)
        return found

    def _spread(self, kind: str, tensor: int) -> Floats:
        """Seconds of a micro-batch of 1, 2, ... samples on t devices of a type: every operator's
        work evenly spread, or its launch."""
        key = (kind, tensor)
        if key not in self._bounds:
            passes, launches = self.engines[kind].work
            device = self.question.machines[kind].device
            batch = self.question.batch
            sparse = np.floor(np.geomspace(min(batch, DENSE), batch, 512))
            grid = np.unique([*range(1, min(batch, DENSE) + 1), *sparse, batch])
            host, own = device.seconds_of_host(launches), device.seconds_of_kernels(launches)
            found = np.empty(len(grid))
            for place, samples in enumerate(grid):
                slower = np.maximum(passes * samples / tensor + own, host)
                found[place] = np.where(passes > 0, slower, 0.0).sum()
            at = np.searchsorted(grid, np.arange(1, batch + 1), side="right") - 1
            self._bounds[key] = np.maximum.accumulate(found[at])
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
        itemsize = self.engine.question.itemsize
        per_byte = state_per_byte(itemsize, combination.zero, combination.data)
        return self.engine.held * per_byte / combination.tensor
