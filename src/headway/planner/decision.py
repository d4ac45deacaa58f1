"""What a point of the frontier decides, operator by operator, and what it sends.

Invariant: the decisions are those whose costs the point's stages are the sums of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headway.graph import Operator, Rule
from headway.planner.candidate import Point, Stage
from headway.planner.operators import parameter_bytes
from headway.planner.search import Search
from headway.planner.stages import Tables


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How one operator is spread over the tensor axis.

    Attributes:
        stage: Number of its stage.
        operator: Name.
        module: Path in the user's model.
        kind: Of the operator.
        how: "replicate", "split:AXIS", or "pass" where pending sums pass through.
        parameters: Bytes of them on one device.
        summed: Bytes of whole parameters whose gradients are summed over the axis.
    """

    stage: int
    operator: str
    module: str
    kind: str
    how: str
    parameters: float
    summed: float


def choices(search: Search, point: Point) -> tuple[Choice, ...]:
    """Of every operator of a point of the search, in order."""
    degrees = point.degrees
    shared = search.tables_of(degrees.tensor, degrees.microbatch)
    return tuple(
        _choice(shared, number, operator, rule)
        for number, stage in enumerate(point.stages)
        for operator, rule in _rules(shared, point, stage)
    )


def _choice(shared: Tables, stage: int, operator: Operator, rule: Rule) -> Choice:
    held, summed = parameter_bytes(shared.setting, operator, rule)
    passes = "pass" if "P" in rule.outputs else "replicate"
    return Choice(
        stage=stage,
        operator=operator.name,
        module=operator.module,
        kind=operator.kind,
        how=f"split:{rule.axis}" if rule.axis else passes,
        parameters=held,
        summed=sum(summed),
    )


def _rules(shared: Tables, point: Point, stage: Stage) -> Iterator[tuple[Operator, Rule]]:
    row, again = shared.row, int(stage.recompute)
    ends = (
        shared.place(row[stage.start].entry, point.border),
        shared.place(row[stage.stop - 1].exit, point.border),
    )
    way = shared.path(stage.start, stage.stop, again, stage.price, ends)
    for place, pair in zip(range(stage.start, stage.stop), way, strict=True):
        unit = row[place]
        solved = shared.solved(unit.kind)
        number = again * shared.weights.shape[1] + stage.price
        operators = shared.setting.work.graph.operators
        first = next(u for u in row if u.kind == unit.kind)
        for one, other in zip(
            operators[unit.start : unit.stop], operators[first.start : first.stop], strict=True
        ):
            chosen = int(solved.strategies[other.name][(*pair, number)])
            yield one, solved.rules[other.name][chosen]
