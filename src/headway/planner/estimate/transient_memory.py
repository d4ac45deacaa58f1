"""What a stage holds for a moment, above its state and all that its micro-batches keep.

While a micro-batch passes an operator, forward or backward, activations and gradients are alive
that nobody keeps; what later operators keep is not there yet, or not any more. With k_i kept by the
units up to operator i and t_i alive beside it, an interval needs max_i (k_i + t_i) for a
micro-batch: that much more than its kept bytes K. What two neighbouring units both keep counts
once. So more(AB) = max(more(A) - K(B), more(B)), and all intervals follow from their last units.

In the first backward of a step the gradients G of operators up to i are not made yet: it needs
first = max_i (k_i + t_i - G_i) - K, and first(AB) = max(first(A) - K(B), first(B) - G(A)). What A
and B both use has its gradient when A is reached: no part of G(A). The gradient X of what leaves a
stage is alive until its backward has ended; t_i of the operator that made it counts it already. So
of A B, X is added to what A needs, and to all of B but that operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from headway.cost.device import Array
from headway.graph.model_graph import Operator
from headway.planner.estimate.operators import OperatorSetting, PlanningWorkload
from headway.planner.estimate.stage_cut import IntervalClasses, LayerUnit


class _Facts(NamedTuple):
    """Of a unit with the micro-batch of the capture, in bytes: of each operator, or part of a
    folded one, whether it runs over samples, what it keeps first, what passes, gradients of weights
    while it makes them, and those that no other operator adds to; of what enters, where it is kept
    or there before the first operator, bytes and whether it has samples; the number of the operator
    that makes what leaves."""

    operators: tuple[tuple[bool, int, int, int, int], ...]
    entry: tuple[int, bool]
    maker: int


class TransientMemory:
    """Of all intervals of a row of units."""

    def __init__(
        self, work: PlanningWorkload, row: tuple[LayerUnit, ...], classes: IntervalClasses
    ) -> None:
        self.work = work
        self.row = row
        self.classes = classes
        self._known: dict[int, Array] = {}
        self._crossing: dict[int, Array] = {}

    @cached_property
    def _facts(self) -> dict[int, dict[_Facts, None]]:
        """By kind of unit; units of a kind differ in what is alive beside them."""
        graph, found = self.work.graph, dict[int, dict[_Facts, None]]()
        for unit in self.row:
            known = set[str]()
            operators: list[tuple[bool, int, int, int, int]] = []
            maker = -1
            inside = graph.operators[unit.start : unit.stop]
            for operator, made in zip(inside, self._made(inside), strict=True):
                operators += self._moments(operator, known, made)
                maker = len(operators) - 1 if unit.exit in operator.outputs else maker
            entry = 0, False
            if unit.entry in known or unit.entry in graph.held:
                entry = graph.tensors[unit.entry].bytes, unit.entry in self.work.batch_dims
            found.setdefault(unit.kind, {})[_Facts(tuple(operators), entry, maker)] = None
        return found

    def _moments(
        self, operator: Operator, known: set[str], made: int
    ) -> Iterator[tuple[bool, int, int, int, int]]:
        """Of every part of an operator, as `_Facts` says; what is saved becomes known."""
        left, batched = iter(operator.saved), operator.name in self.work.batch_loops
        last = max(moment.weights for moment in operator.moments)
        for moment in operator.moments:
            # `saved` lists the tensors of all parts of a fused operator, one part after the other.
            fresh = [s for s in islice(left, moment.saved) if s.name not in known]
            known.update(s.name for s in fresh)
            own = sum(s.bytes for s in fresh if s.name not in self.work.graph.held)
            gradients, made = (made, 0) if moment.weights == last else (0, made)
            yield batched, own, moment.passing, moment.weights, gradients

    def _made(self, operators: Sequence[Operator]) -> list[int]:
        """Of every operator of a unit: bytes of gradients that exist behind its backward and, of
        the unit alone, not before."""
        parameters, found, known = self.work.graph.parameters, list[int](), set[str]()
        for operator in reversed(operators):
            fresh = self._trained(operator) - known
            known |= fresh
            found.append(sum(parameters[name].bytes for name in fresh))
        return found[::-1]

    def _trained(self, operator: Operator) -> set[str]:
        graph = self.work.graph
        return {n for n in operator.inputs if n in graph.parameters and n not in graph.frozen}

    @cached_property
    def _tied(self) -> Array:
        """(classes, 1): bytes of parameters that the last unit of an interval uses, and one before
        it, too: their gradients exist when that is reached."""
        graph, users = self.work.graph, dict[str, set[int]]()
        for number, unit in enumerate(self.row):
            for operator in graph.operators[unit.start : unit.stop]:
                for name in self._trained(operator):
                    users.setdefault(name, set()).add(number)
        found = np.zeros((len(self.classes.examples), 1))
        for name in (name for name, units in users.items() if len(units) > 1):
            for number, (start, stop) in enumerate(self.classes.examples):
                again = stop - 1 in users[name] and any(start <= u < stop - 1 for u in users[name])
                found[number] += again * graph.parameters[name].bytes
        return found

    def units(
        self, setting: OperatorSetting, *, ends: bool = False, apart: float = 0.0
    ) -> dict[int, tuple[float, ...]]:
        """By kind of unit: (kept, more; what is alive at most in one that is computed again; first;
        the same of the first backward of one that is computed again; gradients).
        """
        leaves = {u.kind: setting.bytes_of(u.exit if ends else "") for u in self.row}
        found: dict[int, tuple[float, ...]] = {}
        for kind, several in self._facts.items():
            each = [_unit(facts, setting, leaves[kind], apart) for facts in several]
            # Units of a kind differ in their surroundings. The largest needs are safe, and so are
            # the fewest gradients, which are subtracted.
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
                # It is subtracted from what both units count, so the least is safe.
                found[unit.kind] = min(twice, found.get(unit.kind, twice))
            known = own
        return found

    def twice(self, kind: int, setting: OperatorSetting) -> float:
        """Bytes that a unit of a kind keeps, and the unit before it, too."""
        return self._both.get(kind, 0) * setting.scale

    def of(self, setting: OperatorSetting, several: bool) -> Array:
        """(classes, 2, 7): without and with recomputation (kept, more, kept by two units, first,
        gradients; more and first where a stage ends there) of a micro-batch, whole.

        Args:
            setting: With the size of a micro-batch; of any tensor degree.
            several: False: of the whole row only, as class 0.
        """
        if setting.samples not in self._known:
            self._known[setting.samples] = self._all(setting)
        # Whole tensors: of a tensor degree `beside` takes its share.
        whole = self._known[setting.samples]
        return whole if several else whole[[int(self.classes.of[0, -1])]]

    def _all(self, setting: OperatorSetting) -> Array:
        crossing = {u.kind: setting.bytes_of(u.entry) for u in self.row}
        ways = np.zeros((len(crossing), 2, 7))  # by kind, as `of` has them
        for ends, columns in ((False, (1, 3)), (True, (5, 6))):
            for kind, line in self.units(setting, ends=ends).items():
                kept, more, again, first, first_again, made = line
                entry, twice = crossing[kind], self.twice(kind, setting)
                ways[kind, :, [0, 2, 4]] = [[kept, entry], [twice, 0.0], [made, made]]
                ways[kind, 0, columns] = more, first
                ways[kind, 1, columns] = max(again - entry, 0.0), first_again - entry
        last, before = ways[np.array(self.classes.last)], np.array(self.classes.before)
        leaves = self.crossing(setting)[1].T
        found: Array = last.copy()
        for low, high in self.classes.lengths:
            if before[low] < 0:
                most = found[low:high, :, [1, 5]]
                found[low:high, :, [1, 5]] = np.maximum(most, -found[low:high, :, :1])
                continue
            held, above, twice, first, made, above_, first_ = np.moveaxis(last[low:high], -1, 0)
            total, known, both, early, gradients, *_ = np.moveaxis(found[before[low:high]], -1, 0)
            tied, out = self._tied[low:high], leaves[low:high]
            # What both keep counts once: the last unit adds K(B) without it.
            known, early, gradients = known - held + twice, early - held + twice, gradients - tied
            early = early + tied
            columns_ = (
                *(total + held, np.maximum(known, above), both + twice),
                *(np.maximum(early, first - gradients), gradients + made),
                np.maximum(known + out, above_),
                np.maximum(early + out, first_ - gradients),
            )
            found[low:high] = np.stack(columns_, axis=-1)
        return found

    def along(self, setting: OperatorSetting, apart: float) -> tuple[Array, float]:
        """Of the whole row, unit by unit, (4, units, 2): more, first, what is kept up to it, and
        what exists when all gradients of its weights have been made, but for these, each above all
        that is kept, without and with recomputation; and gradients in all.

        Args:
            setting: Without a tensor degree.
            apart: Share of a unit's gradients that goes when its backward has ended.
        """
        lines = self.units(setting, apart=apart)
        kept, more, again, first, first_again, made = np.array([lines[u.kind] for u in self.row]).T
        entry = np.array([setting.bytes_of(u.entry) for u in self.row])
        twice = np.array([self.twice(u.kind, setting) for u in self.row])
        held = np.stack([kept - twice, entry], axis=-1)
        behind = held.sum(axis=0) - held.cumsum(axis=0)
        mores = np.stack([more, np.maximum(again - entry, 0.0)], axis=-1)
        firsts = np.stack([first, first_again - entry], axis=-1)
        before = (made.cumsum() - made)[:, None]
        inside, passing = np.array([self._ended(u, setting) for u in self.row]).T
        there = np.stack([np.maximum(inside - twice, 0.0), np.maximum(inside, entry)], axis=-1)
        ended = there - held - behind + passing[:, None]
        found = np.stack([mores - behind, firsts - before - behind, -behind, ended])
        return found, float(made.sum())

    def _ended(self, unit: LayerUnit, setting: OperatorSetting) -> tuple[float, float]:
        """Bytes, when the last gradients of a unit's weights have been made, of what the operators
        in front keep, and of what passes on to them."""
        graph, known, kept = self.work.graph, set[str](), 0.0
        for operator in graph.operators[unit.start : unit.stop]:
            moments = [*self._moments(operator, known, len(self._trained(operator)))]
            scale = setting.scale if operator.name in self.work.batch_loops else 1.0
            for number, (_, own, passing, _, trained) in enumerate(moments, start=1):
                if trained:
                    # All passes on but the gradient of a known result.
                    known_results = operator.outputs if number == len(moments) else ()
                    result = sum(graph.tensors[name].bytes for name in known_results)
                    return kept, scale * max(0, passing - result)
                kept += scale * own
        return kept, 0.0

    def crossing(self, setting: OperatorSetting) -> Array:
        """(3, 2, classes): of one message, without and with recomputation, bytes of what enters an
        interval, of what leaves it, and of that where the interval does not keep it, too."""
        if setting.samples not in self._crossing:
            ends = [(setting.bytes_of(u.entry), setting.bytes_of(u.exit)) for u in self.row]
            entries, exits = np.array(ends).T
            first, stop = np.array(self.classes.examples).T
            whole = np.stack([entries[first], exits[stop - 1], exits[stop - 1]])
            found = np.repeat(whole[:, None], 2, axis=1)
            found[2, 0] *= self._leaves[stop - 1]
            self._crossing[setting.samples] = found
        return self._crossing[setting.samples]

    @cached_property
    def _leaves(self) -> np.ndarray:
        """(L,): whether a unit does not keep what leaves it."""
        graph = self.work.graph
        operators = (graph.operators[unit.start : unit.stop] for unit in self.row)
        both = zip(self.row, operators, strict=True)
        return np.array([unit.exit not in graph.saved_by(own) for unit, own in both])

    def first(self, setting: OperatorSetting, *, several: bool) -> tuple[Array, Array]:
        """(classes, 2): bytes above state and kept ones in the first backward of a step, whose
        gradients count as state (it may be below 0); and those gradients."""
        known = self.of(setting, several)
        return known[..., 6], known[..., 4]

    def beside(
        self, setting: OperatorSetting, kept: Array, *, several: bool
    ) -> tuple[Array, Array]:
        """Of strategies, (2, classes, K): kept bytes, without what two units keep and both count,
        and bytes above state and kept ones.

        Args:
            kept: What a micro-batch keeps with each, as its units count.
        """
        known = self.of(setting, several)[: kept.shape[1]]
        own, more, twice = known.transpose(2, 1, 0)[[0, 5, 2], ..., None]
        part = 1.0 / setting.tensor
        least = np.full(kept.shape, part)
        # What the tensor axis splits of the kept bytes is taken to be split of the transient ones,
        # too.
        own = np.broadcast_to(own, kept.shape)
        share = np.clip(np.divide(kept, own, out=least, where=own > 0), part, 1)
        return np.maximum(kept - twice * share, 0.0), more * share


def _unit(
    facts: _Facts, setting: OperatorSetting, leaves: float, apart: float
) -> tuple[float, ...]:
    """As `TransientMemory.units` says; `leaves`: bytes of the gradient of what leaves the stage."""
    kept = made = 0.0
    total = sum(gradients for *_, gradients in facts.operators)
    most, early = 0.0, -np.inf
    for number, (batched, own, passing, weights, gradients) in enumerate(facts.operators):
        kept += own * (setting.scale if batched else 1.0)
        made += gradients
        now = kept + passing * setting.scale + weights + leaves * (number != facts.maker)
        now += apart * (total - made)
        most, early = max(most, now), max(early, now - made)
    entered, batched = facts.entry
    entry = entered * (setting.scale if batched else 1.0)
    return kept, most - kept, most - entry, early - kept, early - entry, made
