"""How many messages a stage of a pipeline has memory for, beside what its micro-batches keep.

A message that comes has memory from its POST on, and one that has left keeps it until the table
proves that it has arrived (`schedule.lowering`, `schedule.retirement`). Counted where most
micro-batches are under way. Invariant: what the executor obeys is what is counted; of long
pipelines a shorter one with the same order around each of its ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from headway.errors import PlanError
from headway.planner.degrees import Degrees
from headway.planner.schemes import Scheme
from headway.schedule import PipelineSchedule
from headway.schedule.action import Action, Kind
from headway.schedule.lowering import lower
from headway.schedule.named import make_schedule
from headway.schedule.retirement import retirements

RANKS = 8
"""Of the longest pipeline whose table is looked at: messages are posted four computes ahead."""
ROUNDS = 3
"""Micro-batches for each of its ranks: the table's steady state."""
_STEP = {Kind.SEND: 1, Kind.POST: 1, Kind.RECV: -1}
"""What is received is used by the next action, which counts it."""
_BACK = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD})
_AHEAD = frozenset({Kind.FORWARD, Kind.SEND})
_ENDS = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRAD})


class Held(NamedTuple):
    """Messages of a stage, the most of any stage.

    Attributes:
        entering: What has come for later forwards, or has memory to come; and the gradients of what
            entered, on their way back.
        left: What has left, on its way.
        returning: Gradients of what has left, but for the one that backward works with.
    """

    entering: int = 0
    left: int = 0
    returning: int = 0


Both = tuple[Held, Held]
"""While a backward runs, and when a forward has ended and its result leaves."""


def held(degrees: Degrees) -> Both:
    """Of a combination's stages, whatever their number."""
    scheme = Scheme(degrees.schedule, degrees.virtual, degrees.pipes)
    p, m = degrees.pipeline, degrees.microbatches
    few = min(p, RANKS)
    # Up to as many micro-batches as ranks all are under way at once on the first one.
    return _held(scheme, few, min(m, (ROUNDS if m > p else 1) * few))


@lru_cache(maxsize=512)
def _held(scheme: Scheme, ranks: int, microbatches: int) -> Both:
    if ranks == 1:
        return Held(), Held()
    try:
        table = make_schedule(
            scheme.name,
            stages=ranks,
            microbatches=microbatches,
            virtual=scheme.virtual,
            pipes=scheme.pipes,
        )
    except PlanError:  # fewer ranks or micro-batches than it can have
        few = Held(entering=2, left=1, returning=2)
        return few, few
    lowered = lower(table)
    back, ahead = zip(*(_of_rank(lowered, rank) for rank in range(ranks)), strict=True)
    return _most(back), _most(ahead)


def _most(each: Iterable[Held]) -> Held:
    return Held(*map(max, zip(*each, strict=True)))


def _of_rank(table: PipelineSchedule, rank: int) -> Both:
    row = table.order[rank]
    retired = retirements(table, rank)
    now: Counter[str] = Counter()
    under_way = 0
    found = {key: (0, Held()) for key in (_BACK, _AHEAD)}
    for position, action in enumerate(row):
        now[_name(action)] += _STEP.get(action.kind, 0)
        for sent in retired.get(position, ()):
            now[_name(row[sent])] -= 1
        under_way += action.kind == Kind.FORWARD
        here = Held(now["comes"] + now["goes back"], now["leaves"], now["returns"])
        for kinds, (most, fullest) in found.items():
            if action.kind in kinds and (under_way, sum(here)) > (most, sum(fullest)):
                found[kinds] = under_way, here
        under_way -= action.kind in _ENDS
    return found[_BACK][1], found[_AHEAD][1]


def _name(action: Action) -> str:
    """What a SEND or POST gives memory to."""
    if action.kind == Kind.SEND:
        return "goes back" if action.carries_gradient else "leaves"
    return "returns" if action.carries_gradient else "comes"
