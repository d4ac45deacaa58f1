"""What a stage holds for a moment, above its state and all that its micro-batches keep.

While a micro-batch passes an operator, forward or backward, activations and gradients are alive
that nobody keeps; what later operators keep is not there yet, or not any more. With k_i kept by the
units up to operator i and t_i alive beside it, a stretch needs max_i (k_i + t_i) for a micro-batch:
that much more than its kept bytes K. What two neighbouring units both keep counts once. Invariant:
more(AB) = max(more(A) - K(B), more(B)), so that all stretches follow from their last units. In the
first backward of a step the gradients G of operators up to i are not there yet: it needs
first = max_i (k_i + t_i - G_i) - K, and first(AB) = max(first(A) - K(B), first(B) - G(A)).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from headway.planner.operators import Floats, Setting, Workload
from headway.planner.row import Stretches, Unit


class _Facts(NamedTuple):
    """Of a unit with the micro-batch of the capture, in bytes: of each operator whether it runs
    over samples, what it keeps first, what passes, gradients of weights while it makes them, and
    those that no other operator adds to; of what enters, where it is kept or there before the first
    operator, bytes and whether it has samples."""

    operators: tuple[tuple[bool, int, int, int, int], ...]
    entry: tuple[int, bool]


class Transients:
    """Of all stretches of a row.

    Args:
        work: The model.
        row: Its units.
        classes: Of stretches.
    """

    def __init__(self, work: Workload, row: tuple[Unit, ...], classes: Stretches) -> None:
        self.work = work
        self.row = row
        self.classes = classes
        self._known: dict[int, Floats] = {}

    @cached_property
    def _facts(self) -> dict[int, dict[_Facts, None]]:
        """By kind of unit; units of a kind differ in what is alive beside them."""
        graph, found = self.work.graph, dict[int, dict[_Facts, None]]()
        for unit in self.row:
            known = set[str]()
            operators = []
            for operator in graph.operators[unit.start : unit.stop]:
                own = {
                    s.name: s.bytes
                    for s in operator.saved
                    if s.name not in known and s.name not in graph.held
                }
                known.update(own)
                batched, moment = operator.name in self.work.batch_loops, operator.footprint
                operators.append(
                    (
                        batched,
                        sum(own.values()),
                        moment.passing,
                        moment.weights,
                        self._gradients.get(operator.name, 0),
                    )
                )
            entry = 0, False
            if unit.entry in known or unit.entry in graph.held:
                entry = graph.tensors[unit.entry].bytes, unit.entry in self.work.batch_dims
            found.setdefault(unit.kind, {})[_Facts(tuple(operators), entry)] = None
        return found

    @cached_property
    def _gradients(self) -> dict[str, int]:
        """By operator: bytes of gradients that are there behind its backward and not before."""
        graph = self.work.graph
        last = {
            name: operator.name
            for operator in graph.operators
            for name in operator.inputs
            if name in graph.parameters and name not in graph.frozen
        }
        found: dict[str, int] = {}
        for name, operator in last.items():
            found[operator] = found.get(operator, 0) + graph.parameters[name].bytes
        return found

    def units(self, setting: Setting) -> dict[int, tuple[float, ...]]:
        """By kind of unit: (kept, more; what is alive at most in one that is computed again; first;
        the same of the first backward of one that is computed again; gradients)."""
        found: dict[int, tuple[float, ...]] = {}
        for kind, several in self._facts.items():
            each = [_unit(facts, setting) for facts in several]
            most = [max(line[n] for line in each) for n in range(1, 5)]
            found[kind] = each[-1][0], *most, min(line[5] for line in each)
        return found

    @cached_property
    def _both(self) -> dict[int, int]:
        """By kind of unit: bytes that it keeps, and the unit before it, too."""
        graph, found = self.work.graph, dict[int, int]()
        known: dict[str, int] = {}
        for number, unit in enumerate(self.row):
            own = graph.saved_by(graph.operators[unit.start : unit.stop])
            if number:
                twice = sum(own[name] for name in own.keys() & known.keys())
                found[unit.kind] = min(twice, found.get(unit.kind, twice))
            known = own
        return found

    def twice(self, kind: int, setting: Setting) -> float:
        """Bytes that a unit of a kind keeps, and the unit before it, too."""
        return self._both.get(kind, 0) * setting.scale

    def of(self, setting: Setting, several: bool) -> Floats:
        """(classes, 2, 5): without and with recomputation (kept, more, kept by two units, first,
        gradients) of a micro-batch, whole.

        Args:
            setting: With the size of a micro-batch; of any tensor degree.
            several: False: of the whole row only, as class 0.
        """
        if setting.samples not in self._known:
            self._known[setting.samples] = self._all(setting)
        whole = self._known[setting.samples]
        return whole if several else whole[[int(self.classes.of[0, -1])]]

    def _all(self, setting: Setting) -> Floats:
        units = self.units(setting)
        crossing = {u.kind: setting.bytes_of(u.entry) if u.entry else 0.0 for u in self.row}
        ways = np.zeros((max(units) + 1, 2, 5))  # by kind: (kept, above, by two, first, gradients)
        for kind, (kept, more, again, first, first_again, made) in units.items():
            entry = crossing[kind]
            ways[kind, 0] = kept, more, self.twice(kind, setting), first, made
            ways[kind, 1] = entry, max(again - entry, 0.0), 0.0, first_again - entry, made
        last = ways[np.array(self.classes.last)]
        before = np.array(self.classes.before)
        found = np.zeros((len(before), 2, 5))
        for low, high in self.classes.lengths:
            held, above, twice, first, made = np.moveaxis(last[low:high], -1, 0)
            if before[low] < 0:
                found[low:high, :, 0], found[low:high, :, 1] = held, np.maximum(above, 0.0 - held)
                found[low:high, :, 3], found[low:high, :, 4] = first, made
                continue
            total, known, both, early, gradients = np.moveaxis(found[before[low:high]], -1, 0)
            found[low:high, :, 0] = total + held
            found[low:high, :, 1] = np.maximum(known - held + twice, above)
            found[low:high, :, 2] = both + twice
            found[low:high, :, 3] = np.maximum(early - held + twice, first - gradients)
            found[low:high, :, 4] = gradients + made
        return found

    def first(self, setting: Setting, *, several: bool) -> tuple[Floats, Floats]:
        """(classes, 2): bytes above state and kept ones in the first backward of a step, whose
        gradients count as state (it may be below 0); and those gradients. Arguments as `beside`.
        """
        known = self.of(setting, several)
        return known[..., 3], known[..., 4]

    def beside(self, setting: Setting, kept: Floats, *, several: bool) -> tuple[Floats, Floats]:
        """Of strategies, (2, classes, K): kept bytes, without what two units keep and both count,
        and bytes above state and kept ones.

        Args:
            setting: What they are for.
            kept: What a micro-batch keeps with each, as its units count: what the tensor axis
                splits is taken to be split for the moment, too.
            several: As for `of`.
        """
        known = self.of(setting, several)[: kept.shape[1]]
        own, more, twice = known.transpose(2, 1, 0)[:3, ..., None]
        part = 1.0 / setting.tensor
        least = np.full(kept.shape, part)
        own = np.broadcast_to(own, kept.shape)
        share = np.clip(np.divide(kept, own, out=least, where=own > 0), part, 1)
        return np.maximum(kept - twice * share, 0.0), more * share


def _unit(facts: _Facts, setting: Setting) -> tuple[float, ...]:
    """As `Transients.units` says."""
    kept = made = 0.0
    most, early = 0.0, -np.inf
    for batched, own, passing, weights, gradients in facts.operators:
        kept += own * (setting.scale if batched else 1.0)
        made += gradients
        now = kept + passing * setting.scale + weights
        most, early = max(most, now), max(early, now - made)
    entered, batched = facts.entry
    entry = entered * (setting.scale if batched else 1.0)
    return kept, most - kept, most - entry, early - kept, early - entry, made
