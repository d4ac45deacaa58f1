"""A plan as a point of the search: the same cost model prices what somebody has decided already.

Invariant: a plan that `runnable.to_plan` has made of a point becomes that point again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.errors import PlanError
from headway.plan import Plan
from headway.plan.layer_split import TENSOR
from headway.plan.sharding import SHARD
from headway.planner.borders import start_of
from headway.planner.candidate import Candidate, Point
from headway.planner.degrees import Degrees
from headway.planner.overlap import BUCKETS
from headway.planner.row import Unit
from headway.planner.schemes import PLAIN, SCHEMES, scheme_of
from headway.planner.search import Search

PRICED = tuple(dict.fromkeys(scheme.name for scheme in SCHEMES))
"""Schedules of which the search knows the price."""


def degrees_of(plan: Plan) -> Degrees:
    """Its degrees, with the micro-batches of the largest share.

    Raises:
        PlanError: The search has no price for such a plan.
    """
    pipeline, several = plan.pipeline, plan.pipe_degree > 1
    problems = []
    grid = plan.split.grid
    if plan.split.spatial:
        problems.append("split.spatial")
    if grid is not None and (grid.form != "classic" or plan.split.by):
        problems.append(f"split.tensor: {plan.split}; only 1-D, the same for all modules")
    if several and pipeline.table:
        problems.append("pipeline.table: a table of one's own")
    elif several and pipeline.schedule not in PRICED:
        problems.append(f"pipeline.schedule: {pipeline.schedule}")
    elif several and pipeline.schedule == "chimera" and pipeline.mode != "direct":
        problems.append(f"pipeline.mode: {pipeline.mode}")
    if problems:
        raise PlanError(
            "the search has no price for this plan",
            problems=problems,
            fix=f"Take {' or '.join(PRICED)}; `headway schedule compare` has the others' bubbles.",
        )
    parts = plan.batch.microbatches(max(_shares(plan), key=len))
    scheme = scheme_of(pipeline.schedule, pipeline.virtual, pipeline.pipes) if several else PLAIN
    names = [name for name in plan.mesh.names if name != TENSOR]
    inside = several and plan.data_degree > 1 and names[-1] == plan.exchange.axis
    return Degrees(
        tensor=plan.mesh.degree(TENSOR),
        data=plan.data_degree,
        pipeline=plan.pipe_degree,
        microbatch=len(parts[0]),
        microbatches=len(parts),
        schedule=scheme.name,
        virtual=scheme.virtual,
        pipes=scheme.pipes,
        zero=plan.memory.zero if plan.data_degree > 1 else 0,
        order="tdp" if inside else "tpd",
    )


def candidate_of(search: Search, degrees: Degrees) -> Candidate:
    """A combination of degrees on the tables of a search."""
    return search.candidate(degrees)


def point_of(plan: Plan, search: Search) -> Point:
    """The plan's price. A plan that names no cut gets the fastest that needs the least memory; how
    a tensor axis splits layers, and what crosses its stages, is what is fastest within the memory.

    Args:
        plan: A legal one.
        search: Of its model, batch and cluster.

    Raises:
        PlanError: The search has no price for it, or the model has no such borders.
    """
    degrees = degrees_of(plan)
    candidate = candidate_of(search, degrees)
    borders = borders_of(plan, search.row, candidate)
    recompute = recomputed_of(plan, len(borders) - 1)
    bucket = plan.exchange.bucket_bytes
    buckets = BUCKETS if bucket is None else (float(bucket),)
    overlap = plan.exchange.overlap
    point = candidate.planned(borders, recompute, buckets=buckets, overlap=overlap)
    fits = point.bytes <= search.question.cap
    if degrees.tensor == 1 or (degrees.pipeline == 1 and fits):
        return point
    found = _fastest_split(plan, search, degrees)
    return found if found is not None and _alike(found, point) else point


def _fastest_split(plan: Plan, search: Search, degrees: Degrees) -> Point | None:
    """What the search takes where stages must begin as the plan says; None: nothing fits."""
    cut = tuple((name, "stage") for name in plan.pipeline.cut if plan.pipe_degree > 1)
    question = search.question
    engine = Search(replace(question, force=(*question.force, *cut))) if cut else search
    return candidate_of(engine, degrees).fastest(question.cap)


def _alike(one: Point, other: Point) -> bool:
    """Whether both cut the model alike, and compute the same stages again."""
    first, second = (
        [(stage.start, stage.stop, stage.recompute) for stage in point.stages]
        for point in (one, other)
    )
    return first == second


def recomputed_of(plan: Plan, stages: int) -> tuple[int, ...]:
    """Numbers of the stages that compute again in backward."""
    again = plan.pipeline.recompute_stages or tuple(range(stages))
    return again if plan.pipe_degree > 1 and plan.pipeline.recompute else ()


def borders_of(plan: Plan, row: tuple[Unit, ...], candidate: Candidate) -> tuple[int, ...]:
    """The first unit of each stage, and the number of units.

    Raises:
        PlanError: The model has no such borders, or too few.
    """
    if plan.pipe_degree == 1:
        return 0, len(row)
    if not plan.pipeline.cut:
        free = candidate.fastest(float("inf"))
        if free is None:
            raise PlanError(
                "the model cannot be cut into so many stages",
                problems=[
                    f"{len(row)} units for {candidate.degrees.stages} stages of "
                    f"{plan.pipeline.schedule}"
                ],
                fix="Take fewer stages, or a number of micro-batches that the schedule can have.",
            )
        return 0, *(stage.stop for stage in free.stages)
    starts = [start_of(name, row) for name in plan.pipeline.cut]
    problems = [
        f"pipeline.cut: no border in front of {name}"
        for name, start in zip(plan.pipeline.cut, starts, strict=True)
        if start is None
    ]
    found = (0, *(start for start in starts if start is not None), len(row))
    if not problems and list(found) != sorted(set(found)):
        problems.append(f"pipeline.cut: {', '.join(plan.pipeline.cut)} are not in order")
    if problems:
        names = ", ".join(dict.fromkeys(unit.module for unit in row[1:] if unit.module))
        raise PlanError(
            "this model cannot be cut there",
            problems=problems,
            fix=f"The recipe may be another one. Its borders: {names}.",
        )
    return found


def simplified(plan: Plan, *, unlike: bool = False) -> Iterator[str]:
    """What of a plan the price does not count, one sentence each.

    Args:
        plan: Any.
        unlike: Devices are of several types: every share has a price of its own.
    """
    exchange = plan.exchange
    sizes = [[len(part) for part in plan.batch.microbatches(own)] for own in _shares(plan)]
    if unlike:
        if any(len({*own}) > 1 for own in sizes):
            yield "micro-batches of a share are not all alike: all count as its largest"
    elif len({tuple(own) for own in sizes}) > 1 or len({*sizes[0]}) > 1:
        yield "shares or micro-batches are not all alike: all count as the largest"
    special = exchange.compress != "none" or exchange.parts or exchange.priority or exchange.carried
    if special and plan.exchange_degree > 1:
        yield "the exchange counts as a plain sum: no compression, no priority, no program"
    if plan.split.tensor:
        between = "; so are tensors between stages, which are sent whole" * (plan.pipe_degree > 1)
        yield f"which layers the tensor axis splits, and how, is taken as what is fastest{between}"
    if plan.memory.zero and plan.mesh.degree(SHARD) > 1:
        yield "hybrid sharding counts as sharding over all ranks that share the batch"
    if plan.pipe_degree > 1:
        if not plan.pipeline.cut:
            yield "the plan names no cut: the fastest one counts"
        if plan.pipeline.recompute in (True, "stages"):
            yield "recomputation of whole stages counts as that of blocks, which holds less"
    if plan.memory.precision == "bfloat16":
        yield "autocast to bfloat16 counts for products; activations count in 32 bits"


def _shares(plan: Plan) -> tuple[range, ...]:
    """The samples of each data rank."""
    ranks = plan.data_degree
    return tuple(plan.batch.share(rank, ranks) for rank in range(ranks))
