"""What a comparison found: cells of a table, whether each does the same work, and its figures.

A cell is one framework on one number of processes, with the trials of all rounds. Within a round
the trials follow each other, so ratios are taken within rounds: what disturbs the machine for a
while disturbs both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from headway.comparison.trial import TrialResult

REFERENCE = "serial"
"""The name of the row that the losses of all others are compared with."""
INDEPENDENT = "independent"
"""The name of the row of processes that never talk."""
FOUR_DIGITS = 1e-4
"""Largest relative difference of two losses that count as equal."""
_ROUNDING_FACTOR = 100.0
"""How many times as far as a last bit of the parameters other roundings of a step may lead."""


@dataclass(frozen=True)
class Interval:
    """A median over the rounds, and the lowest and highest of them."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, kw_only=True)
class SameWork:
    """Whether a framework computes what one process computes.

    Attributes:
        difference: The largest relative difference of a step's loss.
        step: The first that differs by more than four digits allow; None: none does.
        loss: Of that step, and `expected` of the reference; None where none differs.
        rounding: The first step with another loss that rounding alone explains; None: there is
            none.
        note: How both were made comparable, or why they could not be; "": nothing had to be done.
    """

    difference: float
    step: int | None = None
    loss: float | None = None
    expected: float | None = None
    rounding: int | None = None
    note: str = ""

    @classmethod
    def compare(
        cls,
        losses: Sequence[float],
        expected: Sequence[float],
        ulp_apart: Sequence[float] | None = None,
    ) -> SameWork:
        """Step by step.

        Args:
            ulp_apart: Losses of the reference with parameters that began a last bit apart. Training
                of some recipes doubles such a difference in every step.
        """
        apart = [_apart(one, other) for one, other in zip(losses, expected, strict=True)]
        grown = map(_apart, expected if ulp_apart is None else ulp_apart, expected)
        allowed = [max(FOUR_DIGITS, _ROUNDING_FACTOR * most) for most in accumulate(grown, max)]
        differing = [n for n, value in enumerate(apart) if value > FOUR_DIGITS]
        step = next((n for n in differing if apart[n] > allowed[n]), None)
        if step is None:
            return cls(difference=max(apart), rounding=next(iter(differing), None))
        return cls(difference=max(apart), step=step, loss=losses[step], expected=expected[step])

    def __str__(self) -> str:
        return f"{self._verdict}, {self.note}" if self.note else self._verdict

    @property
    def _verdict(self) -> str:
        if self.rounding is not None:
            return (
                f"equal until rounding has grown, at step {self.rounding + 1}: "
                f"{self.difference:.1e} at most"
            )
        if self.step is None:
            return "equal"
        return (
            f"differs from step {self.step + 1} on: {self.loss:.6g} for {self.expected:.6g}, "
            f"{self.difference:.1e} at most"
        )


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(other), 1e-30)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One framework on one number of processes.

    Attributes:
        framework: Its name.
        processes: How many.
        batch: Samples of a step, of all processes together.
        rounds: By the number of the round; one that failed is not there.
        failure: What ended it; "": nothing.
        work: None: it was not compared.
        target: The loss that `to_target` is about: the lowest of the reference; None: unknown.
        predicted: Seconds of a step, where headway predicted it.
        plan: That headway chose, in words.
    """

    framework: str
    processes: int
    batch: int
    rounds: Mapping[int, TrialResult] = field(default_factory=dict)
    failure: str = ""
    work: SameWork | None = None
    target: float | None = None
    predicted: float | None = None
    plan: str = ""

    @property
    def measured(self) -> bool:
        """Whether there are any figures."""
        return bool(self.rounds)

    @property
    def step(self) -> Interval:
        """Seconds of a step."""
        return self._over(lambda one: one.median)

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch / self.step.value

    @property
    def cpu(self) -> Interval:
        """Processor seconds of a step, all processes together."""
        return self._over(lambda one: one.cpu_seconds)

    @property
    def first_step(self) -> Interval:
        """Seconds from a cold start to the end of the first step."""
        return self._over(lambda one: one.first_step)

    @property
    def memory(self) -> float:
        """Bytes of the process with the most."""
        return max(one.peak_bytes for one in self.rounds.values())

    @property
    def sent(self) -> float | None:
        """Bytes of a step and process."""
        counts = [one.sent_bytes for one in self.rounds.values() if one.sent_bytes is not None]
        return statistics.median(counts) if counts else None

    @property
    def losses(self) -> tuple[float, ...]:
        """By step, of the first round."""
        return self.rounds[min(self.rounds)].losses

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds of training at the end of each step, the first one not counted: medians."""
        per_step = [
            statistics.median(values)
            for values in zip(*(one.seconds for one in self.rounds.values()), strict=True)
        ]
        total, found = 0.0, [0.0]
        for seconds in per_step:
            total += seconds
            found.append(total)
        return tuple(found)

    @property
    def to_target(self) -> float | None:
        """Seconds of training until a step's loss is the target, to four digits; None: never."""
        if self.target is None:
            return None
        enough = self.target + FOUR_DIGITS * abs(self.target)
        return next(
            (t for t, one in zip(self.times, self.losses, strict=True) if one <= enough), None
        )

    def ratio(self, other: Cell) -> Interval | None:
        """How many times as long as this cell's step another one's takes, round by round."""
        both = sorted(set(self.rounds) & set(other.rounds))
        if not both:
            return None
        return Interval.of([other.rounds[n].median / self.rounds[n].median for n in both])

    def _over(self, value: Callable[[TrialResult], float]) -> Interval:
        return Interval.of([value(one) for one in self.rounds.values()])
