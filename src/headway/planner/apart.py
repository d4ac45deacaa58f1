"""What tells plans apart whose degrees read alike: cuts, recomputation, placements, what is split.

Invariant: two plans have the same words here only if nothing that a plan decides tells them apart;
of what all of them have in common nothing is said.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from headway.planner.candidate import Point, Stage
from headway.planner.decision import choices
from headway.planner.mixed_point import MixedStage
from headway.planner.refusal import recomputed
from headway.planner.row import Unit
from headway.planner.search import Search
from headway.units import format_bytes

Features = Mapping[str, str]
"""By aspect, in words."""


def apart(heads: Sequence[Hashable], features: Sequence[Features]) -> list[str]:
    """For each plan the words that tell it from all others with the same head; "" where none has.

    Of the aspects in which they differ so many are named, the first ones first, as it takes.

    Args:
        heads: What is said of the plans anyway.
        features: Of each.
    """
    found = []
    for head, own in zip(heads, features, strict=True):
        alike = [f for other, f in zip(heads, features, strict=True) if other == head]
        named: list[str] = []
        for name in dict.fromkeys(name for one in alike for name in one):
            if _kinds(alike, [*named, name]) > _kinds(alike, named):
                named.append(name)
        found.append(", ".join(own.get(name, f"no {name}") for name in named))
    return found


def _kinds(features: Sequence[Features], names: Sequence[str]) -> int:
    """How many of them differ in these aspects."""
    return len({tuple(one.get(name) for name in names) for one in features})


def points_apart(search: Search, points: Sequence[Point]) -> list[str]:
    """`apart` of points of one search, beside their degrees and number of recomputing stages."""
    heads = [(point.degrees, recomputed(point)) for point in points]
    features: list[Features] = [
        _features(search, point) if heads.count(head) > 1 else {}
        for head, point in zip(heads, points, strict=True)
    ]
    return apart(heads, features)


def _features(search: Search, point: Point) -> Features:
    found = stages_in_words(search.row, point.stages) | {
        "border": placed(point.border),
        "bucket": f"buckets of {format_bytes(point.bucket)}",
    }
    modules: dict[str, list[str]] = {}
    for choice in choices(search, point) if point.degrees.tensor > 1 else ():
        modules.setdefault(choice.module or choice.operator, []).append(choice.how)
    ways = {name: " and ".join(dict.fromkeys(hows)) for name, hows in modules.items()}
    return found | {f"split of {name}": f"{name} {way}" for name, way in ways.items()}


def stages_in_words(row: Sequence[Unit], stages: Sequence[Stage | MixedStage]) -> dict[str, str]:
    """Where each stage begins, and whether it computes again."""
    found = {}
    for number, stage in enumerate(stages):
        found[f"stage {number}"] = f"stage {number} from {row[stage.start].module or 'the inputs'}"
    for number, stage in enumerate(stages):
        again = "recomputes" if stage.recompute else "does not recompute"
        found[f"recompute {number}"] = f"stage {number} {again}"
    return found


def placed(border: str) -> str:
    """How tensors cross from stage to stage, in words."""
    whole = "whole tensors" if border == "R" else f"tensors split along {border[1:]}"
    return f"{whole} between stages"
