"""What a stage holds for a moment, above its state and all that its micro-batches keep.

While a micro-batch passes an operator, forward or backward, activations and gradients are alive
that nobody keeps; what later operators keep is not there yet, or not any more. With k_i kept by the
units up to operator i and t_i alive beside it, a stretch needs max_i (k_i + t_i) for a micro-batch:
that much more than its kept bytes K. What two neighbouring units both keep counts once. Invariant:
more(AB) = max(more(A) - K(B), more(B)), so that all stretches follow from their last units.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from headway.planner.operators import Floats, Setting
from headway.planner.row import Stretches, Unit


class Transients:
    """Of all stretches of a row, for one micro-batch size.

    Args:
        setting: The model, the tensor degree and the micro-batch.
        row: Its units.
        classes: Of stretches.
    """

    def __init__(self, setting: Setting, row: tuple[Unit, ...], classes: Stretches) -> None:
        self.setting = setting
        self.row = row
        self.classes = classes

    @cached_property
    def units(self) -> dict[int, tuple[float, float, float]]:
        """By kind of unit: (kept, more; what is alive at most in one that is computed again)."""
        found: dict[int, tuple[float, float, float]] = {}
        for unit in self.row:
            one = self._unit(unit)
            known = found.get(unit.kind, one)
            found[unit.kind] = (one[0], max(one[1], known[1]), max(one[2], known[2]))
        return found

    def _unit(self, unit: Unit) -> tuple[float, float, float]:
        graph, work = self.setting.work.graph, self.setting.work
        known = set[str]()
        kept = most = 0.0
        for operator in graph.operators[unit.start : unit.stop]:
            scale = self.setting.scale if operator.name in work.batch_loops else 1.0
            own = {
                s.name: s.bytes
                for s in operator.saved
                if s.name not in known and s.name not in graph.held
            }
            known.update(own)
            kept += sum(own.values()) * scale
            footprint = operator.footprint
            most = max(most, kept + footprint.passing * self.setting.scale + footprint.weights)
        there = unit.entry in known or unit.entry in graph.held
        entry = self.setting.bytes_of(unit.entry) if there else 0.0
        return kept, most - kept, most - entry

    @cached_property
    def both(self) -> dict[int, float]:
        """By kind of unit: bytes that it keeps, and the unit before it, too."""
        graph, found = self.setting.work.graph, dict[int, float]()
        known: dict[str, int] = {}
        for number, unit in enumerate(self.row):
            own = graph.saved_by(graph.operators[unit.start : unit.stop])
            twice = sum(size for name, size in own.items() if name in known) * self.setting.scale
            if number:
                found[unit.kind] = min(twice, found.get(unit.kind, twice))
            known = own
        return found

    def of(self, several: bool) -> Floats:
        """(classes, 2, 3): without and with recomputation (kept, more, kept by two units) of a
        micro-batch, whole.

        Args:
            several: False: of the whole row only, as class 0.
        """
        whole = self._all
        return whole if several else whole[[int(self.classes.of[0, -1])]]

    @cached_property
    def _all(self) -> Floats:
        crossing = {u.kind: self.setting.bytes_of(u.entry) if u.entry else 0.0 for u in self.row}
        found = np.zeros((len(self.classes.before), 2, 3))
        for number, (before, last) in enumerate(
            zip(self.classes.before, self.classes.last, strict=True)
        ):
            kept, more, again = self.units[last]
            ways = ((kept, more), (crossing[last], max(again - crossing[last], 0.0)))
            twice = (self.both.get(last, 0.0) if before >= 0 else 0.0, 0.0)
            for way, (held, above) in enumerate(ways):
                total, known, both = found[before, way] if before >= 0 else (0.0, 0.0, 0.0)
                most = max(known - held + twice[way], above)
                found[number, way] = total + held, most, both + twice[way]
        return found

    def beside(self, rows: Floats, column: int, *, several: bool) -> Floats:
        """(classes, 2, K, c) strategies with one column more: bytes above state and kept ones.

        What two units keep is taken out of the column of kept bytes, where it counts twice.

        Args:
            rows: The strategies.
            column: What a micro-batch keeps with each: what the tensor axis splits is taken to be
                split for the moment, too.
            several: As for `of`.
        """
        kept, whole = rows[..., column], self.of(several)[:, :, None]
        least = np.full(kept.shape, 1.0 / self.setting.tensor)
        own = np.broadcast_to(whole[..., 0], kept.shape)
        share = np.clip(np.divide(kept, own, out=least, where=own > 0), 1 / self.setting.tensor, 1)
        found = np.concatenate([rows, (whole[..., 1] * share)[..., None]], axis=-1)
        found[..., column] = np.maximum(kept - whole[..., 2] * share, 0.0)
        return found
