"""What a model's graph says to all combinations of degrees: gradients, ties, and what W takes.

Invariant: every parameter counts once on a device, however many operators use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headway.planner.borders import nameless
from headway.planner.operators import Floats, Workload
from headway.planner.overlap import Gradients
from headway.planner.row import Stretches, Unit


@dataclass(frozen=True)
class Tie:
    """A parameter that several units use, or one unit more than once.

    Attributes:
        bytes: Of it.
        units: That use it, ascending, with repetitions.
    """

    bytes: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Shared:
    """Facts of a row of units."""

    work: Workload
    row: tuple[Unit, ...]
    classes: Stretches

    @cached_property
    def nameless(self) -> frozenset[int]:
        """Units at which no stage can begin."""
        return nameless(self.row)

    @cached_property
    def _uses(self) -> dict[str, list[int]]:
        """The units that use each parameter, in the order of the forward pass."""
        operators = self.work.graph.operators
        found: dict[str, list[int]] = {}
        for number, unit in enumerate(self.row):
            for operator in operators[unit.start : unit.stop]:
                for name in dict.fromkeys(operator.inputs):
                    if name in operator.parameters:
                        found.setdefault(name, []).append(number)
        return found

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """All parameters that are used more than once."""
        tensors = self.work.graph.tensors
        return tuple(
            Tie(tensors[name].bytes, tuple(units))
            for name, units in self._uses.items()
            if len(units) > 1
        )

    def doubled(self, start: int, stop: int) -> float:
        """Bytes that the units of a stretch count more than once."""
        return float(
            sum(
                tie.bytes * max(0, sum(start <= unit < stop for unit in tie.units) - 1)
                for tie in self.ties
            )
        )

    @cached_property
    def doubles(self) -> Floats:
        """`doubled` of every class of stretches."""
        return np.array([self.doubled(*example) for example in self.classes.examples])

    @cached_property
    def whole(self) -> Floats:
        """(1,): `doubled` of the whole row."""
        return np.array([self.doubled(0, len(self.row))])

    def between(self, borders: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
        """Of what several stages use: (bytes, first stage, last stage, stages).

        Args:
            borders: The first unit of each stage, and the number of units.
        """
        for tie in self.ties:
            stages = sorted({int(np.searchsorted(borders, u, "right")) - 1 for u in tie.units})
            if len(stages) > 1:
                yield tie.bytes, stages[0], stages[-1], len(stages)

    @cached_property
    def gradients(self) -> Gradients:
        """In the order in which backward makes them: what is used more than once with its first
        use, when it is complete; what is frozen not at all."""
        graph = self.work.graph
        frozen = set(graph.frozen)
        found = [
            (graph.tensors[name].bytes, units[0])
            for name, units in self._uses.items()
            if name not in frozen
        ]
        found.reverse()  # the order of first uses, backwards
        return Gradients(tuple(size for size, _ in found), tuple(unit for _, unit in found))

    @cached_property
    def held(self) -> Floats:
        """Bytes of the parameters of each unit, as its operators count them."""
        tensors = self.work.graph.tensors
        found = np.zeros(len(self.row))
        for name, units in self._uses.items():
            for unit in units:
                found[unit] += tensors[name].bytes
        return found

    def weight_shares(self, starts: np.ndarray, stops: np.ndarray) -> Floats:
        """Which part of the backward of stretches makes gradients of weights, by its FLOPs."""
        inputs, weights = (sums[stops] - sums[starts] for sums in self._gradient_flops)
        both = inputs + weights
        found: Floats = np.divide(weights, both, out=np.zeros_like(both), where=both > 0)
        return found

    @cached_property
    def _gradient_flops(self) -> tuple[Floats, Floats]:
        """Running sums over the units."""
        operators = self.work.graph.operators
        each = np.array(
            [
                [
                    sum(o.flops.input_gradient for o in operators[unit.start : unit.stop]),
                    sum(o.flops.weight_gradient for o in operators[unit.start : unit.stop]),
                ]
                for unit in self.row
            ],
            dtype=float,
        )
        sums = np.concatenate([np.zeros((1, 2)), np.cumsum(each, axis=0)])
        return sums[:, 0], sums[:, 1]
