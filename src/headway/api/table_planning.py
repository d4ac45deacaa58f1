"""A plan whose embedding tables lie over ranks and tiers, beside the plans of the ordinary search.

All devices share the batch, and so the rest of the model, for which the ordinary search finds the
micro-batches; the tables lie on the same ranks, in what memory is left of them. Where no plan with
whole tables fits, this one may; where one does, the faster of the two is chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from headway.api.plan_request import PlanSearchOptions, build_question
from headway.cluster import Cluster
from headway.errors import HeadwayError, NothingFits
from headway.planner.export.auto import RecipeLimits
from headway.planner.export.prediction import with_prediction
from headway.planner.search.branch_and_bound import PlanSearch, SearchResult
from headway.planner.search.plan_conversion import to_plan
from headway.planner.search.plan_point import Point
from headway.planner.tables.costs import tier_machine
from headway.planner.tables.demand import TableDemand
from headway.planner.tables.model_tables import model_tables
from headway.planner.tables.placement import TablesPlan, place_over_tiers
from headway.plans import LayerSplit, Plan

if TYPE_CHECKING:
    from headway.api.recipe_workload import RecipeWorkload

TABLE_SHARE = 0.5
"""Of a model's parameters, from which on tables without bags are worth a plan of their own."""
_LOG = logging.getLogger("headway")


@dataclass(frozen=True, kw_only=True)
class TablesOverRanks:
    """What was found.

    Attributes:
        outcome: Of the search for the rest of the model, with all ranks on the data axis.
        placement: Of the tables.
    """

    cluster: Cluster
    outcome: SearchResult
    placement: TablesPlan

    @property
    def point(self) -> Point:
        """Of the rest of the model."""
        return self.outcome.best

    @property
    def ranks(self) -> int:
        return self.point.devices

    @property
    def seconds(self) -> float:
        """Of a step: the rest of the model, then its tables; none hides behind the other."""
        return self.point.seconds + self.placement.seconds

    @property
    def bytes(self) -> float:
        """Of a device's own memory, on the fullest."""
        return self.point.bytes + self.placement.device_bytes

    @cached_property
    def plan(self) -> Plan:
        """What runs, with its prediction."""
        plain = to_plan(self.outcome, self.point)
        plan = replace(plain, split=LayerSplit(tables=self.placement.splits))
        plan.check()
        known = with_prediction(plan, self.outcome.question, self.point, self.cluster)
        assert known.prediction is not None
        slowest = max(self.placement.loads, key=lambda load: load.seconds)
        parts = dict(known.prediction.parts)
        for name, more in (
            ("compute", sum(slowest.lookup.values())),
            ("exchange", slowest.exchange + self.placement.latency),
        ):
            parts[name] = parts.get(name, 0.0) + more
        expected = replace(known.prediction, seconds=self.seconds, parts=parts, bytes=self.bytes)
        return replace(known, prediction=expected)


def plan_tables(
    captured: RecipeWorkload,
    options: PlanSearchOptions,
    tables: Sequence[TableDemand],
    cluster: Cluster,
) -> TablesOverRanks:
    """Place a recipe's tables over all ranks that share its batch.

    Args:
        tables: As `api.recipe_tables.recipe_tables` finds them.

    Raises:
        NothingFits: The tables, or the rest of the model, do not fit.
        PlanError: Nothing is known of the devices' memory, or they are of several types.
    """
    from headway.api.recipe_tables import with_skew, without_tables  # imports torch
    from headway.api.recipe_workload import capture_workload

    recipe = captured.recipe
    rest = capture_workload(without_tables(recipe, [table.table for table in tables]))
    ranks = options.counts[-1] if options.counts else cluster.ranks
    question = build_question(
        replace(options, counts=(ranks,), tensor=(1,), force=(), runnable=True),
        rest,
        cluster,
    )
    question = replace(question, zero=(0,))
    outcome = PlanSearch(question, RecipeLimits(pipeline=False).allow).run()
    machine = tier_machine(cluster, ranks=ranks, reserved=outcome.best.bytes, limit=options.memory)
    placement = place_over_tiers(
        with_skew(recipe, tables), machine, samples=-(-rest.batch // ranks)
    )
    return TablesOverRanks(cluster=cluster, outcome=outcome, placement=placement)


def find_tables(
    captured: RecipeWorkload, options: PlanSearchOptions, cluster: Cluster
) -> TablesOverRanks | NothingFits | None:
    """As `plan_tables`, of a model with bags of ids, or mostly of tables; an error where memory is
    missing, and None where no such plan can be."""
    graph = captured.work.graph
    kinds = {*cluster.devices_of_ranks}
    if len(kinds) != 1 or None in kinds or not model_tables(graph, captured.work.samples):
        return None
    from headway.api.recipe_tables import recipe_tables  # imports torch

    tables = recipe_tables(captured.recipe, graph, captured.work.samples)
    size = sum(table.rows * table.columns * table.itemsize for table in tables)
    large = size >= TABLE_SHARE * sum(spec.bytes for spec in graph.parameters.values())
    # Bags of ids are what recommenders have, and few others.
    if not large and not any(table.pooled for table in tables):
        return None
    try:
        return plan_tables(captured, options, tables, cluster)
    except NothingFits as error:
        return error
    except HeadwayError as error:
        _LOG.info("no plan with tables over ranks: %s: %s", error.what, error.why)
        return None
