"""What goes from stage to stage of a plan: its tensors, their sizes, their protocol in a channel.

Invariant: nothing is decided here; `place_tensors` says it, from the graph that the search
has priced and the borders of the plan, at the sizes of the plan's micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headway.graph import ModelGraph
from headway.graph.operator import TensorSpec
from headway.graph.placement import Placed, Placement, place_tensors
from headway.plan import Plan
from headway.planner.candidate import Point
from headway.planner.operators import Workload
from headway.planner.search import Search
from headway.units import format_bytes


def placement_of(plan: Plan, engine: Search, point: Point) -> Placement:
    """The tensors that cross the borders of a plan's stages, in one micro-batch.

    Args:
        plan: The plan.
        engine: Of its model.
        point: The plan's price, with its stages.
    """
    ranks = range(plan.data_degree)
    shares = [plan.batch.share(rank, plan.data_degree) for rank in ranks]
    sizes = {len(part) for share in shares for part in plan.batch.microbatches(share)}
    work = engine.question.work
    largest, *others = (_with_samples(work, size) for size in sorted(sizes, reverse=True))
    starts = [engine.row[stage.start].start for stage in point.stages[1:]]
    return place_tensors(largest, starts, *others)


def in_lines(placement: Placement) -> Iterator[str]:
    """The same for people; nothing where nothing crosses."""
    if placement.tensors:
        yield ""
        yield "tensors from stage to stage, of a micro-batch:"
        yield from (f"  {_of_tensor(one)}" for one in placement.tensors)


def _of_tensor(one: Placed) -> str:
    shape = ", ".join("varies" if size is None else str(size) for size in one.shape)
    made = f"made by {one.site}" if one.site else "copied: nothing makes it as a whole there"
    return (
        f"{one.source} to {one.target}: {one.tensor} [{shape}] {one.dtype}, "
        f"{format_bytes(one.bytes)}, {one.protocol}; {made}"
    )


def _with_samples(work: Workload, samples: int) -> ModelGraph:
    """The graph as a micro-batch of so many samples would be captured."""

    def scaled(tensor: str, spec: TensorSpec) -> TensorSpec:
        dim = work.batch_dims.get(tensor)
        if dim is None:
            return spec
        size = spec.shape[dim] * samples // work.samples
        return replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))

    values = {tensor: scaled(tensor, spec) for tensor, spec in work.graph.values.items()}
    return replace(work.graph, values=values)
