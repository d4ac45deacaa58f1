"""The list of what the ranks of a plan send in a step, as `headway explain` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.collective.calls import Calls, Part
from headway.errors import PlanError
from headway.plan import Plan
from headway.plan.layer_split import SPACE
from headway.plan.pipeline import AXIS
from headway.planner.candidate import Point
from headway.planner.collectives_plan import collectives_of_plan, parts_of
from headway.planner.search import Search


def collectives(
    plan: Plan, engine: Search, point: Point, recipe: str | None, *, clip: bool
) -> tuple[Calls, ...]:
    """Of the ranks that share the first samples, in order; of ranks that split layers one.

    Args:
        plan: Any.
        engine: With its model.
        point: The plan, priced.
        recipe: Of the model, as for `headway train`; None: it is not known.
        clip: Whether the norm of the gradients is limited.

    Returns:
        Empty where they are not known.
    """
    if plan.group_degree > 1:
        return split_collectives(plan, recipe, clip=clip)
    gathered = _gathered(plan, recipe)
    sizes = dict.fromkeys(plan.micro_sizes(0))
    captured = {size: parts_of(engine, point, gathered, samples=size) for size in sizes}
    return _listed(plan, dict.fromkeys(shown(plan), captured), clip=clip)


def split_collectives(plan: Plan, recipe: str | None, *, clip: bool) -> tuple[Calls, ...]:
    """The same of a plan that splits layers or samples, which need not have a price; empty for
    others."""
    if plan.group_degree == 1 or recipe is None:
        return ()
    try:
        found = _rehearsed(plan, recipe)
    except PlanError:
        return ()
    return _listed(plan, found, clip=clip)


def _listed(
    plan: Plan, found: Mapping[int, Mapping[int, Sequence[Part]]], *, clip: bool
) -> tuple[Calls, ...]:
    try:
        return tuple(
            collectives_of_plan(plan, parts, rank=rank, clip=clip) for rank, parts in found.items()
        )
    except PlanError:
        return ()


def shown(plan: Plan) -> list[int]:
    """The ranks."""
    known = {AXIS, SPACE}
    places = (plan.mesh.coordinate(rank) for rank in range(plan.ranks))
    return [
        rank
        for rank, place in enumerate(places)
        if not any(number for axis, number in place.items() if axis not in known)
    ]


def _gathered(plan: Plan, recipe: str | None) -> list[list[str]] | None:
    if recipe is None or not plan.memory.zero or plan.pipe_degree > 1:
        return None
    from headway.run.model_graph import gathered_of  # imports torch

    return gathered_of(recipe)


def _rehearsed(plan: Plan, recipe: str) -> Mapping[int, Mapping[int, Sequence[Part]]]:
    """By rank; those at one place of the split samples have the same."""
    from headway.run.rehearsal import rehearsed_recipe  # imports torch

    ranks = shown(plan)
    place = {rank: plan.mesh.coordinate(rank).get(SPACE, 0) for rank in ranks}
    first = {place[rank]: rank for rank in reversed(ranks)}
    found = dict(zip(first, rehearsed_recipe(plan, recipe, list(first.values())), strict=True))
    return {rank: found[place[rank]] for rank in ranks}
