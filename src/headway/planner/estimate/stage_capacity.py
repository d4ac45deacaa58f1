"""How many units of each kind a stage has room for within a memory and a time.

A stage with c units of one kind takes at least c times the least seconds of such a unit, and holds
at least c times its least bytes. If the room of all stages together is less than the units that
there are, no plan is possible, and none needs to be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.operators import Floats
from headway.schedule.generators.registry import SCHEDULES

if TYPE_CHECKING:
    from headway.planner.estimate.segments import SegmentTables


ROUNDING = 1e-9
"""Room is counted so much too large, which is more than sums of floats are off."""


class StageCapacity(NamedTuple):
    """The least of each kind of unit, (kinds, 1) or (2, kinds, 1): without and with recomputation.

    Attributes:
        params: Bytes of parameters of a device.
        kept: Bytes that a micro-batch keeps, without what the unit before keeps, too.
        peak: Bytes of one micro-batch at the fullest moment.
        seconds: Of a micro-batch.
        ahead: Share of the forward pass in the seconds of a stage, at most.
    """

    counts: np.ndarray
    params: Floats
    kept: Floats
    peak: Floats
    seconds: Floats
    ahead: float
    kinds: tuple[int, ...]

    @property
    def least(self) -> dict[int, float]:
        """Seconds of a micro-batch by kind."""
        return dict(zip(self.kinds, self.seconds.min(axis=0)[:, 0].tolist(), strict=True))

    @property
    def whole(self) -> Floats:
        """(kinds, 1): least seconds of all units of a kind together."""
        found: Floats = self.counts * self.seconds.min(axis=0)
        return found

    def places(
        self,
        degrees: Degrees,
        under_way: Sequence[int],
        passes: Sequence[int],
        *,
        state: float,
        passing: float,
        tied: float,
        late: float,
        cap: float,
        known: float,
        whole: float,
    ) -> Floats:
        """(kinds, stages): how many units of a kind each stage has room for.

        Args:
            under_way: Micro-batches that each stage holds at most.
            passes: 0: stages may keep everything; 1: they may recompute.
            state: Bytes of state per byte of parameters.
            passing: Bytes while the update runs, above the state and per byte of it.
            tied: Bytes of state that units count more than once.
            late: Of `state`, gradients that are not there yet in stages with all micro-batches
                under way; 0: they are.
            cap: Bytes of a device.
            known: Seconds of a step that are too many.
            whole: Seconds that all units take at least.
        """
        number = np.array(under_way, dtype=np.float64)
        own, room = self.params * state, np.zeros((len(self.counts), len(number)))
        with np.errstate(divide="ignore", invalid="ignore"):
            longest = self._longest(degrees, number, known, whole)
            updated = (cap + tied) / (own * (1.0 + passing))
            for again in passes:
                there = own - np.where(number == degrees.microbatches, self.params * late, 0.0)
                left = cap + tied - self.peak[again] * (there == own)
                held = np.where(left < 0, 0.0, left / (there + (number - 1.0) * self.kept[again]))
                whole = np.minimum(np.minimum(held, updated), longest / self.seconds[again])
                room = np.maximum(room, np.nan_to_num(whole, nan=np.inf, posinf=np.inf))
        found: Floats = np.floor(room * (1.0 + ROUNDING))
        return found

    def _longest(self, degrees: Degrees, under_way: Floats, known: float, whole: float) -> Floats:
        """Seconds of a micro-batch that each stage may take at most: its rank has all of them to
        compute; with 1F1B one goes to the last rank and back before the others' backwards.
        """
        m = degrees.microbatches
        longest = np.full(len(under_way), known / max(1, m // degrees.pipes))
        if SCHEDULES[degrees.schedule].held == "depth" and m > 1:
            times = (m - 1) - (under_way - 1.0) * self.ahead
            longest = np.minimum(longest, max(known - whole, 0.0) / times)
        return longest


def stage_capacity(tables: SegmentTables) -> StageCapacity:
    """Of a model with these tables."""
    counts, _ = tables.kinds
    kinds = list(dict.fromkeys(unit.kind for unit in tables.row))
    moments, part = tables.transients.units(tables.setting), tables.setting.tensor
    entries = {unit.kind: unit.entry for unit in tables.row}
    lines = []
    ahead = 0.0
    for kind in kinds:
        rows = tables.solved(kind).rows.reshape(2, -1, 5)
        forward, backward = rows[..., 0], rows[..., 1] + np.arange(2.0)[:, None] * rows[..., 0]
        kept, more, again, *_ = moments[kind]
        entry = tables.setting.bytes_of(entries[kind])
        twice = tables.transients.twice(kind, tables.setting)
        least = rows[..., 4].min(axis=1)
        seconds = (forward + backward).min(axis=1)
        lines.append(
            [
                *(rows[..., 3].min(),) * 2,
                *(max(least[0] - twice, 0.0), least[1]),
                *((kept + more) / part, max(entry, again) / part),
                *seconds,
            ]
        )
        both = forward + backward
        ahead = max(ahead, float(np.divide(forward, both, out=0 * both, where=both > 0).max()))
    params, kept_, peak, seconds_ = np.array(lines).T.reshape(4, 2, len(kinds), 1)
    return StageCapacity(counts[:, None], params[0], kept_, peak, seconds_, ahead, tuple(kinds))
