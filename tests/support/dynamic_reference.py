"""The definition of a table that grows: a dict, loops, and Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Row = list[float]
Law = Callable[[Row, Row, dict[str, Any], int], Row]
"""From a row, its gradient, what is kept for it, and the number of the step (from 1) to its new
values."""


class SerialTable:
    """Keys -> rows. One call of `step` has the gradients of all keys that were touched in it."""

    def __init__(
        self,
        law: Law,
        initial: Callable[[int], Row],
        admit_after: int = 0,
        evict_after: int = 10**9,
    ) -> None:
        self.law, self.initial = law, initial
        self.admit_after, self.evict_after = admit_after, evict_after
        self.rows: dict[int, Row] = {}
        self.slots: dict[int, dict[str, Any]] = {}
        self.seen: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.clock = 0

    def read(self, key: int) -> Row:
        return self.rows[key] if key in self.rows else self.initial(key)

    def step(self, gradients: dict[int, Row]) -> None:
        for key, gradient in gradients.items():
            if self.seen.get(key, 0) >= self.admit_after:
                slots = self.slots.setdefault(key, {})
                self.rows[key] = self.law(self.read(key), gradient, slots, self.clock + 1)
            self.seen[key] = self.seen.get(key, 0) + 1
            self.last[key] = self.clock
        self.clock += 1
        for key in [k for k, last in self.last.items() if self.clock - last > self.evict_after]:
            for known in (self.rows, self.slots, self.seen, self.last):
                known.pop(key, None)


def sgd(row: Row, gradient: Row, slots: dict[str, Any], step: int) -> Row:
    return [x - 0.1 * g for x, g in zip(row, gradient, strict=True)]


def momentum(row: Row, gradient: Row, slots: dict[str, Any], step: int) -> Row:
    old = slots.get("velocity", [0.0] * len(row))
    slots["velocity"] = [0.9 * v + g for v, g in zip(old, gradient, strict=True)]
    return [x - 0.1 * v for x, v in zip(row, slots["velocity"], strict=True)]


def adam(row: Row, gradient: Row, slots: dict[str, Any], step: int) -> Row:
    """Lazy: moments of touched rows only, and the number of the step is that of the table."""
    zeros = [0.0] * len(row)
    slots["m"] = [0.9 * m + 0.1 * g for m, g in zip(slots.get("m", zeros), gradient, strict=True)]
    slots["v"] = [
        0.999 * v + 0.001 * g * g for v, g in zip(slots.get("v", zeros), gradient, strict=True)
    ]
    return [
        x - 0.1 * (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.999**step)) + 1e-8)
        for x, m, v in zip(row, slots["m"], slots["v"], strict=True)
    ]


def adagrad(row: Row, gradient: Row, slots: dict[str, Any], step: int) -> Row:
    """With accumulators that begin with 0.5."""
    old = slots.get("sum", [0.5] * len(row))
    slots["sum"] = [s + g * g for s, g in zip(old, gradient, strict=True)]
    return [
        x - 0.1 * g / (math.sqrt(s) + 1e-10)
        for x, g, s in zip(row, gradient, slots["sum"], strict=True)
    ]


def row_wise_adagrad(row: Row, gradient: Row, slots: dict[str, Any], step: int) -> Row:
    slots["sum"] = slots.get("sum", 0.0) + sum(g * g for g in gradient) / len(gradient)
    return [
        x - 0.1 * g / (math.sqrt(slots["sum"]) + 1e-10) for x, g in zip(row, gradient, strict=True)
    ]


def gradients_of_bags(
    bags: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    given: Sequence[Row],
    mode: str = "sum",
) -> dict[int, Row]:
    """The gradient of each key's row from those of the bags' vectors."""
    found: dict[int, Row] = {}
    for keys, factors, gradient in zip(bags, weights, given, strict=True):
        for key, factor in zip(keys, factors, strict=True):
            share = factor / divisor(factors, mode)
            old = found.get(key, [0.0] * len(gradient))
            found[key] = [o + share * g for o, g in zip(old, gradient, strict=True)]
    return found


def divisor(factors: Sequence[float], mode: str) -> float:
    if mode == "sum" or not factors:
        return 1.0
    return sum(factors) if mode == "mean" else math.sqrt(sum(w * w for w in factors))


def vectors_of_bags(
    read: Callable[[int], Row],
    bags: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    dim: int,
    mode: str = "sum",
) -> list[Row]:
    """What a module gives for bags."""
    found = []
    for keys, factors in zip(bags, weights, strict=True):
        total = [0.0] * dim
        for key, factor in zip(keys, factors, strict=True):
            total = [t + factor * x for t, x in zip(total, read(key), strict=True)]
        found.append([t / divisor(factors, mode) for t in total])
    return found
