"""The placement of tables as a problem of choices: what each way to hold a table costs each rank.

A table is held in one of several ways (`Option`); each gives one or more ranks a piece, which a
rank keeps in one of several forms (`Form`: in which tiers of memory its rows lie). The step takes
as long as the slowest rank, and no rank's tier may be fuller than it is. Cost models make such
problems, solvers solve them; neither knows of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headway.cost.device import Array

EXACT = 1e-12
"""Relative error of sums of sizes: what is larger than a capacity by less still fits."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a rank keeps its piece of a table.

    Attributes:
        seconds: By rank; infinite where the rank cannot have this form.
        bytes: By tier and rank.
        fast: Number of the tier of its hot rows.
        slow: Of its other rows; as `fast` where all lie in one tier.
        hot: Its rows in the fast tier, where the two differ.
        exchange: Of `seconds`, communication.
        lookups: Of `seconds`, reading and updating rows, by tier and rank; None: not told apart.
    """

    seconds: Array
    bytes: Array
    fast: int = 0
    slow: int = 0
    hot: int = 0
    exchange: float = 0.0
    lookups: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to hold a table.

    Attributes:
        way: As in `plans.tables.Way`, or what the cost model calls it.
        pieces: How many ranks hold one.
        ranks: Those that may; as many as `pieces`: all of them do.
        forms: How any of them may keep it.
        exchange: Number of the latency of `PlacementProblem.latencies` that it causes.
        columns: Ranges of columns.
        parts: Parts of the rows of each range.
    """

    way: str
    pieces: int
    ranks: tuple[int, ...]
    forms: tuple[Form, ...]
    exchange: int | None = None
    columns: int = 1
    parts: int = 1

    @cached_property
    def best(self) -> Array:
        """The least seconds of any form, by rank."""
        return np.asarray(np.min([form.seconds for form in self.forms], axis=0))

    @cached_property
    def seconds(self) -> Array:
        """By form and by rank of `ranks`."""
        return np.array([form.seconds[list(self.ranks)] for form in self.forms])

    @cached_property
    def bytes(self) -> Array:
        """By form, tier, and rank of `ranks`."""
        return np.array([form.bytes[:, list(self.ranks)] for form in self.forms])


@dataclass(frozen=True, kw_only=True)
class Held:
    """How a table is held: the number of its option, and of the form on each rank that has some."""

    option: int
    forms: Mapping[int, int]


Assignment = tuple[Held, ...]
"""Of each table, in the order of the problem."""


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """What is to be chosen.

    Attributes:
        names: Of the tables.
        options: Of each table.
        tiers: Names of the tiers, the fastest first.
        capacity: Bytes by tier and rank.
        latencies: Seconds that a step takes more as soon as any table causes them.
    """

    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    tiers: tuple[str, ...]
    capacity: Array
    latencies: tuple[float, ...] = ()

    @property
    def ranks(self) -> int:
        return int(self.capacity.shape[1])

    def loads(self, assignment: Assignment) -> Array:
        """Seconds of each rank, without latencies."""
        found = np.zeros(self.ranks)
        for options, held in zip(self.options, assignment, strict=True):
            option = options[held.option]
            for rank, form in held.forms.items():
                found[rank] += option.forms[form].seconds[rank]
        return found

    def used(self, assignment: Assignment) -> Array:
        """Bytes by tier and rank."""
        found = np.zeros_like(self.capacity)
        for options, held in zip(self.options, assignment, strict=True):
            option = options[held.option]
            for rank, form in held.forms.items():
                found[:, rank] += option.forms[form].bytes[:, rank]
        return found

    def latency(self, assignment: Assignment) -> float:
        """Seconds of latencies."""
        causes = {
            options[held.option].exchange
            for options, held in zip(self.options, assignment, strict=True)
        }
        return sum(self.latencies[cause] for cause in causes if cause is not None)

    def seconds(self, assignment: Assignment) -> float:
        """Of a step: the slowest rank, and latencies."""
        return float(self.loads(assignment).max(initial=0.0)) + self.latency(assignment)

    def fits(self, assignment: Assignment) -> bool:
        """Whether no tier of any rank is overfull."""
        return bool((self.used(assignment) <= self.capacity * (1 + EXACT)).all())
