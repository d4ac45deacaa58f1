"""Plans on devices of several types: as `Plan`, as point, their traffic, and their simulation.
Rank r of a plan stands on a device of type `ranks_of[r]`. A stage in a class of copies sends what
the same stage sends where all copies are of that class; the simulator gives each class the seconds
of its own devices and micro-batches. These are the counterparts of the conversions for equal
devices, and are to become one with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headway.collective.collective_calls import CollectiveCalls
from headway.errors import PlanError
from headway.planner.estimate.partition import border_name
from headway.planner.explain.hardware_changes import HardwareChange, faster_networks, other_devices
from headway.planner.export.to_simulation import (
    grid_of,
    grid_of_plan,
    place_reductions,
    stages_of,
    table_of,
    table_of_degrees,
)
from headway.planner.search.mixed_candidate import DeviceCells, MixedCombination, MixedPoint
from headway.planner.search.mixed_search import MixedSearch, MixedSearchResult, search_mixed
from headway.planner.search.plan_conversion import (
    borders_of,
    check_executor,
    degrees_of,
    executor_lacks,
    recomputed_of,
    zero_of,
)
from headway.planner.search.plan_point import Point
from headway.planner.search.request import MixedPlanRequest
from headway.planner.traffic.estimate import collectives_of
from headway.plans import Axis, BatchSplit, Mesh, PipelinePlan, Plan
from headway.plans.batch import largest_remainder_shares
from headway.plans.plan import MemoryPolicy
from headway.schedule.generators.registry import PLAIN
from headway.schedule.pipeline_schedule import PipelineSchedule
from headway.simulator.ranks import RankGrid
from headway.simulator.work import StageWork, StepWork


def shares_of(outcome: MixedSearchResult, point: MixedPoint) -> tuple[int, ...]:
    """Samples of a step that each copy takes, in proportion to its micro-batches."""
    cells = point.combination.cells
    sizes = {kinds: size for (kinds, _), size in zip(cells.classes, point.sizes, strict=True)}
    return largest_remainder_shares(
        outcome.question.batch, [sizes[kinds] for kinds in cells.copies]
    )


def ranks_of(point: MixedPoint) -> tuple[str, ...]:
    """The type of each rank's device, in the order of the plan's mesh (of `to_mixed_plan`)."""
    combination = point.combination
    t, d, p = combination.tensor, combination.data, combination.pipeline
    copies = combination.cells.copies
    if combination.cells.order == "tpd":
        return tuple(copies[c][s] for c in range(d) for s in range(p) for _ in range(t))
    return tuple(copies[c][s] for s in range(p) for c in range(d) for _ in range(t))


def missing_for_mixed(point: MixedPoint) -> str:
    """What the executor lacks for a point; "" where it can run it."""
    degrees = point.combination.degrees(1)
    found = [executor_lacks(degrees, any(stage.recompute for stage in point.stages))]
    if degrees.tensor > 1:
        found.append("tensor axis on unequal devices")
    if degrees.zero:
        found.append(f"ZeRO {degrees.zero} on unequal devices")
    return ", ".join(filter(None, found))


def to_mixed_plan(outcome: MixedSearchResult, point: MixedPoint) -> Plan:
    """The plan of a point.

    Raises:
        PlanError: Today's executor cannot run it.
    """
    check_executor(missing_for_mixed(point))
    combination, row = point.combination, outcome.search.engine.row
    again = tuple(n for n, stage in enumerate(point.stages) if stage.recompute)
    axes = [Axis(name="data", size=combination.data)]
    if combination.pipeline > 1:
        axes.append(Axis(name="pipe", size=combination.pipeline))
    if combination.cells.order == "tdp":
        axes.reverse()  # the last axis of a mesh varies fastest
    shares = shares_of(outcome, point)
    plan = Plan(
        mesh=Mesh(axes=tuple(axes)),
        batch=BatchSplit(
            samples=outcome.question.batch,
            parts=min(combination.microbatches, *shares),
            shares=shares if len(set(shares)) > 1 else (),
        ),
        pipeline=PipelinePlan(
            microbatches=combination.microbatches if combination.pipeline > 1 else None,
            recompute="blocks" if again else None,
            recompute_stages=again,
            cut=tuple(
                border_name(row[stage.start], outcome.question.force) for stage in point.stages[1:]
            ),
        ),
        memory=MemoryPolicy(
            precision="bfloat16" if outcome.question.precision == "bfloat16" else "float32",
            zero=zero_of(combination.degrees(1)),
        ),
    )
    plan.check()
    return plan


# What the ranks of a plan on devices of several types send in one step.


@dataclass(frozen=True, kw_only=True)
class EqualRanks:
    """Equal ranks.

    Attributes:
        copies: Copies of the model in which they are.
        microbatch: Samples of their largest micro-batch.
    """

    stage: int
    kind: str
    copies: int
    microbatch: int
    calls: CollectiveCalls


def collectives_of_mixed(search: MixedSearch, point: MixedPoint) -> tuple[EqualRanks, ...]:
    """Stage by stage, and class by class of the copies.

    Args:
        point: On the devices of its question.
    """
    found = []
    for number, (kinds, copies) in enumerate(point.combination.cells.classes):
        for kind in dict.fromkeys(kinds):
            lists = collectives_of(search.engines[kind], uniform_point(point, number, kind))
            found += [
                EqualRanks(
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


def uniform_point(point: MixedPoint, number: int, kind: str) -> Point:
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


# A plan as a point of the search on devices of several types, and what other hardware would do.


def mixed_point_of(plan: Plan, search: MixedSearch, kinds: Sequence[str]) -> MixedPoint:
    """The plan's price.

    Args:
        search: Of its model, batch and cluster.
        kinds: The type of each rank's device.

    Raises:
        PlanError: The search has no price for it, or the model has no such borders.
    """
    degrees = degrees_of(plan)
    several = degrees.pipeline > 1 and degrees.schedule != PLAIN.name
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
    cells = DeviceCells(copies=copies, order=degrees.order)
    combination = MixedCombination(
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


def fastest_of(question: MixedPlanRequest) -> MixedPoint | None:
    """Of the plans that today's executor can run; None: nothing fits."""
    try:
        return search_mixed(question).best
    except PlanError:
        return None


def mixed_changes(
    plan: Plan, question: MixedPlanRequest, kinds: Sequence[str], best: MixedPoint | None
) -> Iterator[HardwareChange[MixedPoint]]:
    """Each level of links 2 and 4 times faster, of each type memory and compute twice and launches
    in half the time, one at a time.

    Args:
        plan: As for `mixed_point_of`.
        kinds: As for `mixed_point_of`.
        best: The answer on the hardware as it is.
    """
    for name, other in _others(question, len(kinds)):
        found = fastest_of(other)
        own = mixed_point_of(plan, MixedSearch(other), kinds).seconds
        yield HardwareChange(
            name=name, own=own, best=found, changed=_identity(found) != _identity(best)
        )


def _identity(point: MixedPoint | None) -> object:
    """What makes it another plan."""
    return point and (point.combination, point.sizes, [stage.recompute for stage in point.stages])


def _others(question: MixedPlanRequest, ranks: int) -> Iterator[tuple[str, MixedPlanRequest]]:
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


# A plan on devices of several types, or a point of their search, as a step for the simulator.


def step_of_mixed_plan(
    plan: Plan, search: MixedSearch, kinds: Sequence[str]
) -> tuple[StepWork, MixedPoint]:
    """A step as today's executor carries out the plan, and its price.

    Args:
        search: Of its model, batch and cluster.
        kinds: The type of each rank's device.

    Raises:
        PlanError: The search has no price for it, or the model has no such borders.
    """
    point = mixed_point_of(plan, search, kinds)
    work = _step(search, point, table_of(plan), grid_of_plan(plan))
    return place_reductions(work, plan, ""), point


def step_of_mixed_point(point: MixedPoint, search: MixedSearch) -> StepWork:
    """A step of a plan that was found, as `played.step_of_point` makes it."""
    degrees = point.combination.degrees(1)
    again = tuple(number for number, stage in enumerate(point.stages) if stage.recompute)
    work = _step(search, point, table_of_degrees(degrees, again), grid_of(degrees))
    return place_reductions(work, None, executor_lacks(degrees, bool(again)))


def _step(
    search: MixedSearch, point: MixedPoint, table: PipelineSchedule, grid: RankGrid
) -> StepWork:
    machines, cells = search.question.machines, point.combination.cells
    first, *others = (_class(search, point, number) for number in range(len(cells.classes)))
    numbers = {kinds: number for number, (kinds, _) in enumerate(cells.classes)}
    return StepWork(
        table=table,
        stages=first,
        others=tuple(others),
        variant=tuple(numbers[kinds] for kinds in cells.copies),
        grid=grid,
        network=next(iter(machines.values())).network,
        zero=point.combination.zero,
        overlap=min(machines[kind].device.overlap for kind in set().union(*numbers)),
    )


def _class(search: MixedSearch, point: MixedPoint, number: int) -> tuple[StageWork, ...]:
    """The stages of a class of copies, each on its own device."""
    kinds, _ = point.combination.cells.classes[number]
    on = {
        kind: stages_of(search.engines[kind], uniform_point(point, number, kind))
        for kind in dict.fromkeys(kinds)
    }
    return tuple(on[kind][stage] for stage, kind in enumerate(kinds))
