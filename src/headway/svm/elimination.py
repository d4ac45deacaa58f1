"""When samples that cannot be part of a violating pair are eliminated, and when they come back.

A sample at a bound whose gamma lies beyond the other side's best can, for now, not change. Setting
it aside saves its share of every update of gamma; what it costs is that its gamma has to be made
anew before the end. Vishnu et al. (2015; "Fast and Accurate Support Vector Machines on Large Scale
Systems") try twelve rules: six for the first test, and whether it goes on after the first
reconstruction. `adaptive` predicts whether setting aside pays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headway.errors import UsageError

FIRST_TESTS: dict[str, float] = {
    "2": 2,
    "500": 500,
    "1000": 1000,
    "5pc": 0.05,
    "10pc": 0.10,
    "50pc": 0.50,
}
"""Steps of pairs before the first test; below 1: a share of the number of samples."""


@dataclass(frozen=True)
class Elimination:
    """A rule of elimination.

    Attributes:
        name: "none", "adaptive", or as published: "single2" to "multi50pc".
        first: Steps before the first test, or a share of the samples.
        again: Whether samples are eliminated after the first reconstruction as well.
    """

    name: str
    first: float = math.inf
    again: bool = True


NONE = Elimination("none")
ADAPTIVE = Elimination("adaptive", first=1)
RULES: dict[str, Elimination] = {
    "none": NONE,
    "adaptive": ADAPTIVE,
    **{
        f"{kind}{name}": Elimination(f"{kind}{name}", first, again=kind == "multi")
        for kind in ("single", "multi")
        for name, first in FIRST_TESTS.items()
    },
}


def find_rule(name: object) -> Elimination:
    """The rule of a name, in capitals or not.

    Raises:
        UsageError: There is none of this name.
    """
    found = RULES.get(str(name).lower())
    if found is None:
        raise UsageError(
            f"there is no rule of elimination {name!r}", fix=f"Use one of {', '.join(RULES)}."
        )
    return found


@dataclass(frozen=True)
class Prediction:
    """What setting samples aside was expected to bring, in kernel values.

    Attributes:
        saved: Values that updates until the end will not need.
        cost: Values that are needed instead: the copy of what stays, as so many values, and gamma
            of the samples that were eliminated.
        rows: Kernel rows that were expected until the end.
    """

    saved: float
    cost: float
    rows: float

    @property
    def pays(self) -> bool:
        return self.saved > self.cost


_COPIED_VALUES = 16
"""Kernel values whose time a copied sample takes."""


@dataclass
class RemainingWork:
    """Kernel rows until the end, from how the violation has fallen: a line through its logarithm.

    The violation is not monotone, so that the slope is that of all steps since gamma was last
    exact, and at least that of a violation that halves with every pass over the samples.
    """

    tolerance: float
    samples: int
    _first: tuple[float, float] | None = None
    _last: tuple[float, float] = (0.0, 0.0)

    def note(self, violation: float, rows: int) -> None:
        """Note a violation, after so many kernel rows since the beginning."""
        point = (math.log(max(violation, self.tolerance)), float(rows))
        if self._first is None:
            self._first = point
        self._last = point

    def restart(self) -> None:
        self._first = None

    def rows(self) -> float:
        """Kernel rows until the violation is the tolerance, as far as one can tell."""
        if self._first is None:
            return 0.0
        fallen, spent = self._first[0] - self._last[0], self._last[1] - self._first[1]
        left = self._last[0] - math.log(self.tolerance)
        slowest = self.samples / math.log(2)
        return left * (min(spent / fallen, slowest) if fallen > 0 else slowest)


@dataclass
class EliminationClock:
    """Asks of a rule, step by step, whether samples are to be eliminated now.

    Attributes:
        predictions: What was predicted at each test of "adaptive".
    """

    rule: Elimination
    samples: int
    predictions: list[Prediction] = field(default_factory=list)
    _next: float = 0.0
    _over: bool = False

    def __post_init__(self) -> None:
        first = self.rule.first
        self._next = first if first >= 1 else math.ceil(first * self.samples)

    def due(self, steps: int) -> bool:
        """Whether samples are tested after so many steps of pairs."""
        return not self._over and self.rule != NONE and steps >= self._next

    def tested(self, steps: int, active: int) -> None:
        """The next test is after as many steps as samples are active; of "adaptive" after one."""
        self._next = steps + (1 if self.rule == ADAPTIVE else active)

    def reconstructed(self, steps: int) -> None:
        """Gamma of all samples has been reconstructed, and all take part again."""
        self._over = not self.rule.again
        self._next = steps

    def worth(self, *, removed: int, active: int, moved: int, work: RemainingWork) -> bool:
        """Whether to eliminate `removed` of `active` samples; a fixed rule always does.

        Args:
            moved: Samples whose multiplier has changed since gamma was last exact: kernel rows
                that gamma of an eliminated sample will need.
        """
        if removed == 0:
            return False
        if self.rule != ADAPTIVE:
            return True
        rows = work.rows()
        # At the end gamma of all samples is made from those that have moved, whether they were
        # active or not; an eliminated sample is likely to be looked at once more.
        prediction = Prediction(
            saved=removed * rows,
            cost=_COPIED_VALUES * (active - removed) + removed * min(moved, rows) / 4,
            rows=rows,
        )
        self.predictions.append(prediction)
        return prediction.pays and removed >= active / 20
