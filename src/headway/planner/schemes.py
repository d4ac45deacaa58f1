"""The schedules that the search can price, and their tables for any number of micro-batches.

Tables of more than `LIMIT` cells are played for fewer micro-batches: from some number on, each
round of them takes as long as the one before. Invariant: a name decides nothing but which table is
made. Source: such systems grow linearly in the end (max-plus algebra; Baccelli et al. 1992).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from headway.errors import PlanError
from headway.planner.straight import Straight
from headway.planner.timetable import Played, Timetable, Wire, Work
from headway.schedule import PipelineSchedule
from headway.schedule.action import COMPUTE
from headway.schedule.named import SCHEDULES, make_schedule

LIMIT = 5_000
"""Cells of a table that is played as a whole."""


class Scheme(NamedTuple):
    """A schedule with its options, as `Degrees` have it.

    Attributes:
        name: A key of `schedule.named.SCHEDULES`.
        virtual: Stages of one pipe on a rank.
        pipes: Pipes at once.
    """

    name: str
    virtual: int = 1
    pipes: int = 1

    def __str__(self) -> str:
        option = {"virtual": self.virtual, "pipes": self.pipes}
        words = [f"{key} {option[key]}" for key in SCHEDULES[self.name].options if key in option]
        return " ".join([self.name, *words])


PLAIN = Scheme("1f1b")
SCHEMES = (
    PLAIN,
    Scheme("gpipe"),
    Scheme("interleaved", virtual=2),
    Scheme("interleaved", virtual=4),
    Scheme("zb-h1"),
    Scheme("zbv", virtual=2),
    Scheme("dualpipe-v", virtual=2),
    Scheme("chimera", pipes=2),
    Scheme("chimera", pipes=4),
)
"""All that the search can price and the executor can run."""


def scheme_of(name: str, virtual: int, pipes: int) -> Scheme:
    """A schedule of which the search has a price.

    Args:
        name: Of one in `SCHEMES`.
        virtual: Stages of a rank, where the schedule leaves that open.
        pipes: The same.
    """
    known = next(scheme for scheme in SCHEMES if scheme.name == name)
    takes = SCHEDULES[name].options
    return Scheme(
        name,
        virtual if "virtual" in takes else known.virtual,
        pipes if "pipes" in takes else known.pipes,
    )


def schemes(words: Sequence[str]) -> tuple[Scheme, ...]:
    """Those of some names, with all their options; "all": all.

    Raises:
        PlanError: No price is known for a name.
    """
    known = {scheme.name for scheme in SCHEMES}
    if unknown := [word for word in words if word not in {*known, "all"}]:
        raise PlanError(
            "the search has no price for a schedule",
            problems=unknown,
            fix=f"Take some of {', '.join(sorted(known))}, or all.",
        )
    return tuple(s for s in SCHEMES if s.name in words or "all" in words)


@dataclass(frozen=True)
class Book:
    """A table of any number of micro-batches: whole, or the last two rounds of a shorter one.

    Attributes:
        table: Of all micro-batches, or of `rounds` rounds fewer.
        before: Of one round fewer than `table`; None where `table` is whole.
        rounds: Rounds that are left out.
    """

    table: Timetable
    before: Timetable | None = None
    rounds: int = 0

    @property
    def peaks(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """As of `Timetable`, for all micro-batches."""
        if self.before is None:
            return self.table.peaks
        return tuple(
            now
            if now == past
            else tuple(
                tuple(a + self.rounds * (a - b) for a, b in zip(x, y, strict=True))
                for x, y in zip(now, past, strict=True)
            )
            for now, past in zip(self.table.peaks, self.before.peaks, strict=True)
        )

    @property
    def computed(self) -> tuple[tuple[int, ...], ...]:
        """Micro-batches that each rank computes of each of its stages."""
        if self.before is None:
            return self.table.computed
        return tuple(
            tuple(a + self.rounds * (a - b) for a, b in zip(now, past, strict=True))
            for now, past in zip(self.table.computed, self.before.computed, strict=True)
        )

    def in_flight(self) -> tuple[int, ...]:
        """Of each stage, on the rank that holds most micro-batches of it."""
        peaks = self.peaks
        return tuple(
            max(
                vector[self.table.hosted[rank].index(stage)]
                for rank in ranks
                for vector in peaks[rank]
            )
            for stage, ranks in enumerate(self.table.holders)
        )

    def play(self, work: Work, wire: Wire | None = None, sums: Sequence[float] = ()) -> Played:
        """As `Timetable.play`, for all micro-batches."""
        played = self.table.play(work, wire, sums)
        if self.before is None:
            return played
        return played.plus(self.before.play(work, wire, sums), self.rounds)

    def held(self, rank: int, kept: Sequence[float]) -> float:
        """Most bytes that a rank keeps for backward.

        Args:
            rank: Of the pipeline.
            kept: Of one micro-batch, by stage.
        """
        own = [kept[stage] for stage in self.table.hosted[rank]]
        return max(
            sum(number * size for number, size in zip(vector, own, strict=True))
            for vector in self.peaks[rank]
        )


def book(scheme: Scheme, ranks: int, microbatches: int, limit: int = LIMIT) -> Book | None:
    """The table of a schedule; None where it cannot have these sizes.

    Args:
        scheme: Which.
        ranks: Of the pipeline.
        microbatches: Of a step.
        limit: Cells that are played at most, where the table has a steady state to go on from.
    """
    per = 2 * ranks * scheme.virtual  # cells of a micro-batch
    round_ = 2 * ranks
    least = 2 * round_
    most = max(limit // per, least + round_)
    if microbatches <= most:
        whole = _table(scheme, ranks, microbatches)
        return None if whole is None else Book(whole)
    rounds = -(-(microbatches - most) // round_)
    now, past = (_table(scheme, ranks, microbatches - n * round_) for n in (rounds, rounds + 1))
    if now is None or past is None:
        return None
    if any(len(a) != len(b) for a, b in zip(now.peaks, past.peaks, strict=True)):
        whole = _table(scheme, ranks, microbatches)
        return None if whole is None else Book(whole)
    return Book(now, past, rounds)


@lru_cache(maxsize=512)
def _table(scheme: Scheme, ranks: int, microbatches: int) -> Timetable | None:
    name, virtual, pipes = scheme
    if scheme == PLAIN:
        return Straight(ranks, microbatches)
    try:
        made = make_schedule(
            name, stages=ranks, microbatches=microbatches, virtual=virtual, pipes=pipes
        )
    except PlanError:
        return None
    return Timetable(made) if _whole(made) else None


def _whole(schedule: PipelineSchedule) -> bool:
    """Whether every rank computes something, so that no device stands by."""
    return all(any(a.kind in COMPUTE for a in actions) for actions in schedule.order)
