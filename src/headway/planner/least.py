"""The least memory of a device with which a question has a plan, and whether it has one.

Invariant: where `fitting` finds nothing no combination of degrees has a plan within the memory, and
`least_memory` is exact to a byte: both go by lower bounds of what a combination needs, and ask
those that the bounds leave. The number of combinations that are opened is bounded, never the time,
so that the same question gets the same answer.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headway.planner.candidate import Candidate, Point
from headway.planner.degrees import COUNTED, Degrees, least_state_per_byte
from headway.planner.operators import Floats
from headway.planner.pricing import Rows
from headway.planner.question import Question
from headway.planner.search import Search

MOST = 256
"""Combinations that are opened to find the least memory."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The least memory of a device with which a question has a plan.

    Attributes:
        bytes: Whole bytes; one less is too few.
        point: The plan that needs them.
        proven: Whether every combination was looked at; else there may be a smaller one.
    """

    bytes: int
    point: Point
    proven: bool


def sibling(engine: Search, question: Question) -> Search:
    """A search of another question of the same model, machine and forced choices: same tables."""
    other = copy.copy(engine)
    other.question = question
    other.points, other.opened, other._known = [], 0, np.zeros((0, 3))
    return other


def fitting(engine: Search) -> Point | None:
    """Some plan within the memory, those that may need least first; None: nothing fits."""
    cap = engine.question.cap
    for _, candidate in _by_memory(engine, cap):
        point = candidate.fastest(cap)
        if point is not None:
            return point
    return None


def least_memory(engine: Search) -> Need | None:
    """The least memory with which there is a plan; None: the model has no plan at all."""
    best: Point | None = None
    least = np.inf
    for opened, (bound, candidate) in enumerate(_by_memory(engine, np.inf)):
        if bound >= least or opened == MOST:
            return _need(best, bound >= least)
        point = candidate.fastest(least - 1) if best else candidate.fastest(np.inf)
        low = bound
        while point is not None:
            best, least = point, float(np.ceil(point.bytes))
            point = None
            while least - low > 1 and point is None:
                middle = np.floor((low + least) / 2)
                point = candidate.fastest(middle)
                if point is None:
                    low = middle
    return _need(best, True)


def _need(point: Point | None, proven: bool) -> Need | None:
    if point is None:
        return None
    return Need(bytes=int(np.ceil(point.bytes)), point=point, proven=proven)


def _by_memory(engine: Search, cap: float) -> Iterator[tuple[float, Candidate]]:
    """All combinations that may need at most `cap`, by the least that they may need."""
    waiting: list[tuple[float, Degrees, Candidate | None]] = []
    for degrees in engine.combinations():
        bound = _first(engine, degrees)
        if bound <= cap:
            waiting.append((bound, degrees, None))
    heapq.heapify(waiting)
    while waiting:
        bound, degrees, candidate = heapq.heappop(waiting)
        if candidate is not None:
            yield bound, candidate
            continue
        candidate = engine.candidate(degrees)
        better = max(bound, _second(candidate))
        if better <= cap:
            heapq.heappush(waiting, (better, degrees, candidate))


def _first(engine: Search, degrees: Degrees) -> float:
    """Bytes that the fullest rank needs at least: all parameters and what is kept, spread."""
    question = engine.question
    per_byte = least_state_per_byte(question.itemsize, degrees, question.work.optimiser.state)
    kept = degrees.microbatch * min(engine.kept, engine.crossing)
    state = engine.held * per_byte * degrees.pipes
    return float(_spread(np.array([state, kept]) / degrees.tensor, degrees))


def _second(candidate: Candidate) -> float:
    """The same from the candidate's own tables."""
    rows = candidate.least_rows
    rows = np.stack([candidate.there(rows), rows[..., Rows.KEPT]], axis=-1)
    return max(float(_spread(rows, candidate.degrees).min()), candidate.bound()[1])


def _spread(rows: Floats, degrees: Degrees) -> Floats:
    """The fullest of p ranks with f_i micro-batches under way needs at least a weighted mean of
    what all need: with weights 1, and with one stage on each rank with weights 1 / f_i, too. `rows`
    end in (state, kept) of the model."""
    state, kept, p = rows[..., 0], rows[..., 1], degrees.pipeline
    alike = (state + kept) / p
    if degrees.schedule not in COUNTED:
        return alike
    under_way = [degrees.in_flight(behind) for behind in range(p)]
    fair = (state / max(under_way) + kept) / sum(1.0 / number for number in under_way)
    return np.maximum(alike, fair)
