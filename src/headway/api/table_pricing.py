"""What the split tables of a plan add to its step: counted by a dry run, priced on a cluster.

The rest of the model is priced by the search, as a plan without split tables; a `SplitTablesOfPlan`
has both parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from headway.collective.table_traffic import TableTraffic
from headway.errors import PlanError
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.tables.demand import TableDemand
from headway.planner.tables.step_price import price_tables
from headway.plans import LayerSplit, Plan
from headway.plans.tables import TablePlacement, place_tables
from headway.simulator.table_work import TableWork
from headway.simulator.work import StepWork

if TYPE_CHECKING:
    from headway.api.recipe_workload import RecipeWorkload
    from headway.run.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class SplitTablesOfPlan:
    """The tables of a plan, and the plan without them.

    Attributes:
        rest: The plan of the other layers.
        captured: The model with a row in the place of each table.
        demands: Of the tables whose use is known.
    """

    rest: Plan
    captured: RecipeWorkload
    placements: Mapping[str, TablePlacement]
    demands: tuple[TableDemand, ...]
    recipe: Recipe

    @cached_property
    def traffic(self) -> TableTraffic:
        """What ranks exchange in a step; the model is run for it."""
        from headway.run.measure.table_dry_run import dry_run_tables  # imports torch

        work = self.captured.work
        return dry_run_tables(
            self.recipe,
            self.placements,
            self.rest.batch,
            self.rest.data_degree,
            precision=self.rest.memory.precision,
            flops=work.graph.flops.total / work.samples,
        )

    def work(self, search: PlanSearch, kinds: Sequence[str] = ()) -> TableWork:
        """On the machines of a search.

        Args:
            kinds: The type of each rank's device; empty: there is one.
        """
        ranks = self.rest.data_degree
        machines = [search.machine_of(kind) for kind in kinds or [""] * ranks]
        touched = [self._touched(rank) for rank in range(ranks)]
        return price_tables(
            self.traffic,
            [machine.device for machine in machines],
            dtype=machines[0].dtype,
            updates=[
                numbers * machine.device.update
                for (numbers, _), machine in zip(touched, machines, strict=True)
            ],
            state=[size for _, size in touched],
        )

    def _touched(self, rank: int) -> tuple[float, float]:
        """Numbers that a step of the optimiser changes on a rank, and bytes of the rows there."""
        numbers = held = 0.0
        batch = self.rest.batch.samples
        for demand in self.demands:
            placed = self.placements[demand.table]
            place = placed.piece_of(rank)
            if place is None:
                continue
            share = 1.0 if placed.cut == "none" else 1.0 / len(placed.owners[place[0]])
            width = len(placed.column_range(place[0]))
            changed = demand.accesses.unique(batch * demand.bag) if demand.sparse else demand.rows
            numbers += changed * share * width
            held += demand.rows * share * demand.row_bytes(width)
        return numbers, held

    def added(self, work: StepWork, search: PlanSearch, kinds: Sequence[str] = ()) -> StepWork:
        """A step of the rest with these tables."""
        return replace(work, tables=self.work(search, kinds))


def split_tables_of(plan: Plan, captured: RecipeWorkload) -> SplitTablesOfPlan:
    """The tables of a plan of a captured model.

    Raises:
        PlanError: A split means no table of the model or does not fit it, tables grow, or lie
            beside stages or split layers.
    """
    from headway.api.recipe_tables import (  # imports torch
        recipe_tables,
        with_skew,
        without_tables,
    )
    from headway.api.recipe_workload import capture_workload

    recipe, shapes = captured.recipe, _shapes(captured.recipe)
    problems = [
        f"split.tables: {split}; tables that grow have no number of rows to price"
        for split in plan.split.tables
        if split.way == "grow"
    ]
    if plan.data_degree != plan.ranks:
        problems.append("split.tables beside stages, split.tensor or split.spatial")
    problems += [
        f"split.tables: no table matches {split.tables!r}"
        for split in plan.split.tables
        if split.way != "grow" and not any(split.matches(name) for name in shapes)
    ]
    if not problems:
        try:
            placed = place_tables(plan.split.tables, shapes, plan.data_degree)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise PlanError(
            "the tables of this plan have no price",
            problems=problems,
            fix="Correct split.tables, or run the plan.",
        )
    known = recipe_tables(recipe, captured.work.graph, captured.work.samples)
    demands = with_skew(recipe, [one for one in known if one.table in placed])
    return SplitTablesOfPlan(
        rest=replace(plan, split=LayerSplit(), prediction=None),
        captured=capture_workload(without_tables(recipe, [one.table for one in demands])),
        placements=placed,
        demands=tuple(demands),
        recipe=recipe,
    )


def _shapes(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Of the tables of a recipe's model, by logical name."""
    import torch

    from headway.capture.annotations import building
    from headway.run.strategy.split_tables import table_modules

    with torch.device("meta"), building():
        model = recipe.model()
    return {
        name: (module.num_embeddings, module.embedding_dim)
        for name, module in table_modules(model).items()
    }
