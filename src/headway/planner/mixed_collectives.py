"""What the ranks of a plan on devices of several types send in one step.

Invariant: a stage in a class of copies sends what the same stage sends where all copies are of that
class: sums go over all copies, messages have the size of the class's micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.collective.calls import Calls
from headway.planner.collectives import collectives_of
from headway.planner.mixed import MixedSearch
from headway.planner.mixed_point import MixedPoint
from headway.planner.point import Point


@dataclass(frozen=True, kw_only=True)
class Senders:
    """Equal ranks.

    Attributes:
        stage: Number of their stage.
        kind: Type of their devices.
        copies: Copies of the model in which they are.
        microbatch: Samples of their largest micro-batch.
        calls: What one of them does.
    """

    stage: int
    kind: str
    copies: int
    microbatch: int
    calls: Calls


def collectives_of_mixed(search: MixedSearch, point: MixedPoint) -> tuple[Senders, ...]:
    """Stage by stage, and class by class of the copies.

    Args:
        search: That found the point.
        point: On the devices of its question.
    """
    found = []
    for number, (kinds, copies) in enumerate(point.combination.cells.classes):
        for kind in dict.fromkeys(kinds):
            lists = collectives_of(search.engines[kind], alike(point, number, kind))
            found += [
                Senders(
                    stage=stage,
                    kind=kind,
                    copies=copies,
                    microbatch=point.sizes[number],
                    calls=calls,
                )
                for stage, calls in enumerate(lists)
                if kinds[stage] == kind
            ]
    return tuple(sorted(found, key=lambda one: one.stage))


def alike(point: MixedPoint, number: int, kind: str) -> Point:
    """As if all copies were of one class, on devices of one type; stages that the class has
    elsewhere stand for themselves."""
    stages = []
    for place, stage in enumerate(point.stages):
        cells = sorted(point.combination.cells.types_of(place))
        own = (number, kind)
        stages.append(stage.parts[cells.index(own) if own in cells else 0].stage)
    return Point(
        degrees=point.combination.degrees(point.sizes[number]),
        border=point.border,
        stages=tuple(stages),
        seconds=point.seconds,
        messages=point.messages,
        bucket=point.slowest.bucket,
    )
