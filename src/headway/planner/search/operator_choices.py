"""How a point of the search spreads each operator over the tensor axis.

The search solves strategies once for equal units; here they are read back for every operator of
every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headway.graph.model_graph import Operator
from headway.graph.operator_registry import splits_in_layers
from headway.graph.sharding_rules import Rule
from headway.planner.estimate.operators import parameter_bytes
from headway.planner.estimate.pipeline_time import PointStage
from headway.planner.estimate.segments import SegmentTables
from headway.planner.search.plan_point import Point


@dataclass(frozen=True, kw_only=True)
class OperatorChoice:
    """How one operator is spread over the tensor axis.

    Attributes:
        module: Path in the user's model.
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


def operator_choices(tables: SegmentTables, point: Point) -> tuple[OperatorChoice, ...]:
    """Of every operator of a point of the search, in order.

    Args:
        tables: Of the point's tensor degree and micro-batch, `PlanSearch.tables_at`.
    """
    found = []
    for number, stage in enumerate(point.stages):
        for operator, rule in _rules(tables, point, stage):
            held, summed = parameter_bytes(tables.setting, operator, rule)
            passes = "pass" if "P" in rule.outputs else "replicate"
            found.append(
                OperatorChoice(
                    stage=number,
                    operator=operator.name,
                    module=operator.module,
                    kind=operator.kind,
                    how=f"split:{rule.axis}" if rule.axis else passes,
                    parameters=held,
                    summed=sum(summed),
                )
            )
    return tuple(found)


def splits_parameters(tables: SegmentTables, point: Point) -> bool:
    """Whether the tensor axis splits any: else each group does what one device would."""
    choices = operator_choices(tables, point)
    return any(choice.parameters and choice.how.startswith("split") for choice in choices)


def _rules(
    tables: SegmentTables, point: Point, stage: PointStage
) -> Iterator[tuple[Operator, Rule]]:
    """Each operator of a stage, with the rule that the search chose for it."""
    row, again = tables.row, int(stage.recompute)
    way = tables.path(stage.start, stage.stop, again, stage.price, point.border)
    for place, pair in zip(range(stage.start, stage.stop), way, strict=True):
        unit = row[place]
        solved = tables.solved(unit.kind)
        number = again * tables.weights.shape[1] + stage.price
        operators = tables.setting.work.graph.operators
        # Strategies are solved for the first unit of a kind; operators of equal units correspond in
        # order.
        first = next(u for u in row if u.kind == unit.kind)
        for one, other in zip(
            operators[unit.start : unit.stop], operators[first.start : first.stop], strict=True
        ):
            chosen = int(solved.strategies[other.name][(*pair, number)])
            yield one, solved.rules[other.name][chosen]


def unsplittable_operators(tables: SegmentTables, point: Point) -> tuple[str, ...]:
    """Kinds of operators that the point splits, but that split layers have no rule for.

    The executor would keep the weights around them whole, which is not what the point is priced at.
    """
    return tuple(
        sorted(
            {
                operator.kind
                for stage in point.stages
                for operator, rule in _rules(tables, point, stage)
                if rule.axis and not splits_in_layers(operator.kind)
            }
        )
    )
