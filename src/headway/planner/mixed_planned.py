"""A plan as a point of the search on devices of several types, and what other hardware would do.

Invariant: a plan that `mixed_plan.to_plan` has made of a point costs what the point says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from headway.errors import PlanError
from headway.plan import Plan
from headway.planner.binding import Change, faster_networks, other_devices
from headway.planner.mixed import MixedSearch, search_mixed
from headway.planner.mixed_mesh import Cells
from headway.planner.mixed_point import Combination, MixedPoint
from headway.planner.mixed_question import MixedQuestion
from headway.planner.planned import borders_of, degrees_of, recomputed_of


def mixed_point_of(plan: Plan, search: MixedSearch, kinds: Sequence[str]) -> MixedPoint:
    """The plan's price.

    Args:
        plan: A legal one.
        search: Of its model, batch and cluster.
        kinds: The type of each rank's device.

    Raises:
        PlanError: The search has no price for it, or the model has no such borders.
    """
    degrees = degrees_of(plan)
    several = degrees.pipeline > 1 and degrees.schedule != "1f1b"
    problems = [f"pipeline.schedule: {degrees.schedule}, and only 1f1b has a price"] * several
    if degrees.tensor > 1:
        problems.append("split.tensor: which devices form a group is not known")
    if problems:
        raise PlanError("there is no price on devices of several types", problems=problems)
    copies = _copies(plan, kinds)
    used = Counter(kinds)
    largest: dict[tuple[str, ...], int] = {}
    for copy, own in enumerate(copies):
        share = plan.batch.share(copy, plan.data_degree)
        size = max(len(part) for part in plan.batch.microbatches(share))
        largest[own] = max(size, largest.get(own, 0))
    cells = Cells(copies=copies, order=degrees.order)
    combination = Combination(
        amounts=tuple((kind, used[kind]) for kind in search.question.machines if used[kind]),
        tensor=1,
        data=degrees.data,
        pipeline=degrees.pipeline,
        microbatches=degrees.microbatches,
        zero=degrees.zero,
        cells=cells,
    )
    sharing = search.sharing(combination, tuple(largest[own] for own, _ in cells.classes))
    some = sharing.of(next(iter(cells.types_of(0))))
    borders = borders_of(plan, search.engine.row, some)
    return sharing.planned(borders, recomputed_of(plan, len(borders) - 1))


def _copies(plan: Plan, kinds: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each copy of the model the types of its stages."""
    found = {}
    for rank, kind in enumerate(kinds):
        place = plan.mesh.coordinate(rank)
        found[place.get(plan.exchange.axis, 0), place.get("pipe", 0)] = kind
    return tuple(
        tuple(found[copy, stage] for stage in range(plan.pipe_degree))
        for copy in range(plan.data_degree)
    )


def fastest_of(question: MixedQuestion) -> MixedPoint | None:
    """Of the plans that today's executor can run; None: nothing fits."""
    try:
        return search_mixed(question).best
    except PlanError:
        return None


def mixed_changes(
    plan: Plan, question: MixedQuestion, kinds: Sequence[str], best: MixedPoint | None
) -> Iterator[Change[MixedPoint]]:
    """Each level of links 2 and 4 times faster, of each type memory and compute twice and launches
    in half the time, one at a time.

    Args:
        plan: As for `mixed_point_of`.
        question: About plans that run today.
        kinds: As for `mixed_point_of`.
        best: The answer on the hardware as it is.
    """
    for name, other in _others(question, len(kinds)):
        found = fastest_of(other)
        own = mixed_point_of(plan, MixedSearch(other), kinds).seconds
        yield Change(name=name, own=own, best=found, changed=_identity(found) != _identity(best))


def _identity(point: MixedPoint | None) -> object:
    """What makes it another plan."""
    return point and (point.combination, point.sizes, [stage.recompute for stage in point.stages])


def _others(question: MixedQuestion, ranks: int) -> Iterator[tuple[str, MixedQuestion]]:
    """What may be used of a device's memory counts as all it has, so that twice is more."""
    machines = {
        kind: replace(one, device=replace(one.device, memory=question.caps[kind]))
        for kind, one in question.machines.items()
    }
    question = replace(question, machines=machines, memory=None)
    network = next(iter(machines.values())).network
    for name, changed in faster_networks(network, ranks):
        faster = {kind: replace(one, network=changed) for kind, one in machines.items()}
        yield name, replace(question, machines=faster)
    for kind, machine in machines.items():
        for name, device in other_devices(machine.device):
            other = machines | {kind: replace(machine, device=device)}
            yield f"{kind} {name}", replace(question, machines=other)
