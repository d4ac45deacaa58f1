"""What would make a plan fit that does not: single changes of it, each priced by the search.

Invariant: every plan that is returned is within the memory, and differs from the given one in one
kind of thing. Source: none; the changes are those that people try by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway.planner.candidate import Point
from headway.planner.degrees import Degrees
from headway.planner.least import sibling
from headway.planner.refusal import ends
from headway.planner.search import Search


@dataclass(frozen=True, kw_only=True)
class Mend:
    """A change with which a plan fits.

    Attributes:
        change: In words.
        point: The plan with it.
        slower: By which share its step is longer.
    """

    change: str
    point: Point
    slower: float


def too_much(engine: Search, point: Point) -> int:
    """Whole bytes by which the fullest device is over what is allowed; 0: it fits."""
    return max(0, math.ceil(point.bytes - engine.question.cap))


def mends(engine: Search, point: Point) -> tuple[Mend, ...]:
    """The smallest change of each kind that makes a plan fit, the fastest first.

    Args:
        engine: Of the plan's model, cluster and number of devices.
        point: A plan that holds more than is allowed.
    """
    found = [*_recomputed(engine, point), *_cut(engine, point)]
    for name in _KINDS:
        found += _moved(engine, point, name)
    return tuple(sorted(found, key=lambda mend: mend.slower))


def _mend(engine: Search, old: Point, change: str, new: Point | None) -> Iterator[Mend]:
    if new is not None and new.bytes <= engine.question.cap:
        yield Mend(change=change, point=new, slower=new.seconds / old.seconds - 1)


def _recomputed(engine: Search, point: Point) -> Iterator[Mend]:
    """The same cut, and recomputation in just those stages that are too full without."""
    over = [n for n, s in enumerate(point.stages) if s.bytes > engine.question.cap]
    fresh = [n for n in over if not point.stages[n].recompute]
    alone = engine.question.recompute == "pipeline" and len(point.stages) == 1
    if not fresh or alone:
        return
    again = {n for n, stage in enumerate(point.stages) if stage.recompute}
    borders = [stage.start for stage in point.stages] + [point.stages[-1].stop]
    new = engine.candidate(point.degrees).planned(borders, again | {*fresh})
    spans = (" to ".join(ends(engine, point.stages[n])) for n in fresh)
    yield from _mend(engine, point, f"recompute {', '.join(spans)}", new)


def _cut(engine: Search, point: Point) -> Iterator[Mend]:
    """The same degrees, cut elsewhere and without further recomputation, or with it."""
    if len(point.stages) == 1:
        return
    new = engine.candidate(point.degrees).fastest(engine.question.cap)
    if new is None:
        return
    starts = ", ".join(engine.row[stage.start].module for stage in new.stages[1:])
    more = sum(s.recompute for s in new.stages) - sum(s.recompute for s in point.stages)
    words = f", recompute in {more} more stage{'s' if more > 1 else ''}" if more > 0 else ""
    yield from _mend(engine, point, f"cut before {starts}{words}", new)


_KINDS = {
    "tensor": ("tensor", ("tensor", "data", "microbatches")),
    "pipeline": ("pipe", ("pipeline", "data", "microbatches")),
    "microbatch": ("micro-batches of", ("microbatch", "microbatches")),
    "zero": ("ZeRO", ("zero",)),
}
"""What is changed: how it is called, and the degrees that follow; all others stay."""


def _moved(engine: Search, point: Point, name: str) -> Iterator[Mend]:
    """The nearest degree of one kind with which there is a plan."""
    old = point.degrees
    called, follow = _KINDS[name]
    asked = replace(engine.question, devices=(old.devices,), tensor=None, zero=(0, 1, 2, 3))
    others = [
        degrees
        for degrees in sibling(engine, asked).combinations()
        if getattr(degrees, name) != getattr(old, name)
        and replace(degrees, **{one: getattr(old, one) for one in follow}) == old
    ]

    def far(degrees: Degrees) -> float:
        return abs(math.log((1 + getattr(degrees, name)) / (1 + getattr(old, name))))

    for degrees in sorted(others, key=lambda one: (far(one), one)):
        new = engine.candidate(degrees).fastest(engine.question.cap)
        if new is not None:
            yield from _mend(engine, point, f"{called} {getattr(degrees, name)}", new)
            return
