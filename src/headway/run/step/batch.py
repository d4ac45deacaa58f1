"""The batches of a rank: pytree functions, data loader, spatial parts, padding batch.

A batch is any nesting of tuples, lists and dicts of tensors. `rank_loader` yields the samples that
a rank reads; where a plan splits samples and the data are slabs on disk, a rank reads its own part
of each sample only, and `SlabStore` has each part read once in all epochs. Other data are read
whole and cut by `SpatialInputs`. `PaddingBatch` is for passes that count nothing: with sharded
state all ranks must take part in every forward and backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel.facts import gather_facts
from headway.channel.gloo_listeners import drop_later_connections
from headway.collective.collective_calls import CallListener
from headway.data import (
    Cursor,
    Loader,
    MicroBatch,
    RankBatch,
    SampleParts,
    SlabCut,
    SlabSource,
    SlabStore,
    Source,
    StatefulSource,
)
from headway.data.examples import as_examples
from headway.errors import DataError
from headway.parallel.spatial.spatial_context import SpatialContext
from headway.parallel.split_tensor import SpatialAxis
from headway.plans import BatchSplit, Plan
from headway.plans.layer_split import SPACE
from headway.plans.plan import SHARD_AXIS
from headway.run.distributed.device_mesh import refined_mesh
from headway.run.recipe.recipe import Loss, Recipe
from headway.run.recipe.training_data import training_data
from headway.run.step.memory import share_of_memory
from headway.units import counted

if TYPE_CHECKING:
    from headway.run.distributed.world import World


def map_tensors(
    value: Any,
    function: Callable[[Tensor], Tensor],
    texts: Callable[[Any], Any] = lambda found: found,
) -> Any:
    """The same structure with `function` applied to every tensor, `texts` to lists of texts."""
    match value:
        case Tensor():
            return function(value)
        case dict():
            return {key: map_tensors(inner, function, texts) for key, inner in value.items()}
        # A named tuple is made of its fields one by one, not of an iterable.
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(map_tensors(inner, function, texts) for inner in value))
        case list() | tuple() if value and all(isinstance(inner, str | bytes) for inner in value):
            return texts(value)
        case list() | tuple():
            return type(value)(map_tensors(inner, function, texts) for inner in value)
        case _:
            return value


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Move every tensor; floating-point tensors also change type where `dtype` is given."""

    def move(tensor: Tensor) -> Tensor:
        wanted = tensor.dtype
        if dtype is not None and tensor.is_floating_point():
            wanted = dtype
        elif dtype is not None and tensor.is_complex():
            wanted = dtype.to_complex()
        return tensor.to(device=device, dtype=wanted, non_blocking=True)

    return map_tensors(value, move)


def resize_batch(value: Any, samples: int) -> Any:
    """The first sample of every tensor and list of texts, `samples` times along dimension 0."""

    def repeat(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:  # one number for the whole batch
            return tensor
        # `expand` alone repeats one memory, in which torch refuses the model's in-place operators.
        return tensor[:1].expand(samples, *tensor.shape[1:]).contiguous()

    return map_tensors(value, repeat, texts=lambda texts: type(texts)(texts[:1] * samples))


RankLoader = Loader | SlabStore
NO_SHOWCASE = "left out: it would read whole samples, of which no rank has one"


def reads_sample_parts(source: Source, plan: Plan) -> bool:
    """Whether a rank reads a part of each sample only."""
    return isinstance(source, SlabSource) and bool(plan.split.spatial)


def first_readers(source: Source, plan: Plan) -> tuple[int, ...]:
    """The ranks that read the samples of rank 0, by which a model is cut."""
    return plan.mesh.peers(0, SPACE) if reads_sample_parts(source, plan) else (0,)


def check_plan_of_slots(source: Source, plan: Plan) -> None:
    """Refuse plans under which outputs do not reach the rank that has read the examples in time.

    Raises:
        DataError: A stateful source with such a plan.
    """
    if not isinstance(source, StatefulSource):
        return
    found = {
        "a pipeline": plan.pipe_degree > 1,
        "split layers, samples or tables": plan.split.ranks > 1 or bool(plan.split.tables),
        "workers that do not agree at every step": not plan.synchrony.by_all_reduce,
    }
    problems = [name for name, there in found.items() if there]
    if problems:
        raise DataError(
            f"a {type(source).__name__} cannot be read with {' and '.join(problems)}",
            why="The next example of a slot depends on what the whole network makes of its last "
            "one.",
            fix="Use data parallelism, with zero where the model is large.",
        )


def rank_source(examples: Any, plan: Plan, rank: int) -> Source:
    """What a rank reads: a source itself, or this rank's part of one of slabs.

    Raises:
        DataError: It is no data set, or its samples cannot be cut so.
    """
    source = as_examples(examples)
    check_plan_of_slots(source, plan)
    if not (isinstance(source, SlabSource) and plan.split.spatial):
        return source
    return source.parted(SlabCut(plan.split.spatial, plan.mesh.coordinate(rank).get(SPACE, 0)))


def rank_loader(
    source: Source, plan: Plan, world: World, *, alone: bool = False, **options: Any
) -> RankLoader:
    """The batches of this rank; collective where parts of samples are kept in a store.

    Args:
        source: From `rank_source`.
        alone: Only this rank calls it: no store.
    """
    # No store where processes read ahead (`workers`): it lives in this one. Nor with uneven shares:
    # the store exchanges equal ones. Samples are read again in each epoch then.
    again = alone or options.get("workers") or plan.batch.shares
    if isinstance(source, SlabSource) and source.cut.parts > 1 and plan.split.spatial and not again:
        options.pop("workers", None)
        memory = source.memory
        return SlabStore(
            source,
            plan.batch,
            group=_ranks_of_the_part(plan, world),
            memory=share_of_memory(world.place.local_ranks) if memory is None else memory,
            keep=source.keep,
            timeout=world.timeout_seconds,
            **options,
        )
    rank, ranks = plan.data_rank(world.rank), plan.data_degree
    agree = None if alone else partial(check_agreement, world)
    # Of data parallelism alone: elsewhere ranks meet in the forward pass, by their samples.
    in_step = plan.data_degree == plan.ranks and not plan.meets_in_forward
    return Loader(
        source, plan.batch, rank=rank, ranks=ranks, agree=agree, in_step=in_step, **options
    )


def check_agreement(world: World, what: str, fact: Any) -> None:
    """Compare a fact about the data with those of the other ranks; collective.

    Raises:
        DataError: They differ; on all ranks.
    """
    if world.alone:
        return
    with world.explained(f"comparing the {what}"):
        found = gather_facts(fact)
    other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
    if other is not None:
        counts = f": {found[0]} and {found[other]}" if isinstance(fact, int) else ""
        raise DataError(
            f"ranks 0 and {other} do not have the same {what}{counts}",
            why="It must follow from the seed alone: from a generator of its own, or from the "
            "global ones of torch, numpy and random; not from the rank, the time or the process.",
            fix="Take the splitting over ranks out of the data (DistributedSampler, "
            "split_dataset_by_node, a rank asked for in __iter__): headway does it.",
        )


def _ranks_of_the_part(plan: Plan, world: World) -> dist.ProcessGroup:
    """The ranks that read the same part of other samples; collective."""

    def place(rank: int) -> Hashable:
        axes = plan.mesh.coordinate(rank).items()
        return tuple(c for axis, c in axes if axis not in (plan.exchange.axis, SHARD_AXIS))

    ranks: dict[Hashable, list[int]] = {}
    for rank in range(plan.ranks):
        ranks.setdefault(place(rank), []).append(rank)
    # Groups of their own: slabs are exchanged while gradients are summed on the others.
    with world.explained("making the groups that share slabs"), drop_later_connections():
        groups: dict[Hashable, dist.ProcessGroup] = {
            key: dist.new_group(each, backend="gloo") for key, each in ranks.items()
        }
    return groups[place(world.rank)]


def example_batch(recipe: Recipe, samples: int) -> Any:
    """The first samples of a recipe's data as one micro-batch, as its loss takes them."""
    with Loader(
        training_data(recipe),
        BatchSplit(samples=samples),
        rank=0,
        ranks=1,
        cursor=Cursor(seed=recipe.seed),
        epochs=1,
    ) as loader:
        return next(iter(loader)).micros[0].data


class PaddingBatch:
    """The last micro-batch that this rank had, for passes that count nothing."""

    def __init__(self, plan: Plan) -> None:
        self._wanted = plan.meets_in_forward
        self._ranks = plan.data_degree
        self._micro: MicroBatch | None = None
        self._met = False

    def note(self, batch: RankBatch) -> None:
        """Remember the last micro-batch of a batch that is about to be used.

        Raises:
            DataError: The very first one has no work for some rank; on all ranks.
        """
        if not self._wanted:
            return
        if not self._met and batch.samples < self._ranks:
            raise DataError(
                f"the first batch has {counted(batch.samples, 'sample')} "
                f"for {counted(self._ranks, 'rank')}",
                why="With sharded state, split tables or global statistics a rank without samples "
                "repeats its last micro-batch.",
                fix="Set drop_last, or begin at another batch.",
            )
        self._met = True
        if batch.micros:
            self._micro = batch.micros[-1]

    def lacking(self, batch: RankBatch) -> int:
        """The micro-batches that another rank has and this one lacks; 0 without sharded state."""
        return batch.passes - len(batch.micros) if self._wanted else 0

    @property
    def micro(self) -> MicroBatch:
        assert self._micro is not None
        return self._micro


def spatial_context(plan: Plan, world: World) -> SpatialContext:
    """This rank's, of a plan that splits samples; collective."""
    sizes = plan.split.spatial
    axes = {f"{SPACE}_{number}": size for number, size in enumerate(sizes)}
    with world.explained("making the groups that split samples"):
        mesh = refined_mesh(plan, world.device, SPACE, axes)
        groups = {
            number - len(sizes): mesh.get_group(name)
            for number, (name, size) in enumerate(axes.items())
            if size > 1
        }
        together = _together(plan, world) if len(groups) > 1 else None
    return SpatialContext.of(
        groups, min_width=plan.split.min_width, head=plan.split.head, together=together
    )


def _together(plan: Plan, world: World) -> dist.ProcessGroup | None:
    """All ranks that share this one's samples; collective."""
    if plan.split.head == "gathered":
        return None
    everyone = dict.fromkeys(plan.mesh.peers(rank, SPACE) for rank in range(plan.ranks))
    # `new_group` is collective over the world: all ranks make all groups, in the same order.
    with drop_later_connections():
        made: dict[tuple[int, ...], dist.ProcessGroup] = {
            ranks: dist.new_group(list(ranks)) for ranks in everyone
        }
    return made[plan.mesh.peers(world.rank, SPACE)]


def dry_run_spatial_context(plan: Plan, rank: int, tell: CallListener) -> SpatialContext:
    """The context of a rank whose collectives are only reported to `tell`."""
    sizes = plan.split.spatial
    place = plan.mesh.coordinate(rank)[SPACE]
    axes, left = {}, place
    for dim, size in zip(range(-1, -len(sizes) - 1, -1), reversed(sizes), strict=True):
        left, own = divmod(left, size)
        if size > 1:
            axes[dim] = SpatialAxis(None, size, own, tell)
    apart = len(axes) > 1 and plan.split.head != "gathered"
    return SpatialContext(
        axes=dict(sorted(axes.items())),
        min_width=plan.split.min_width,
        head=plan.split.head,
        together=SpatialAxis(None, math.prod(sizes), place, tell) if apart else None,
    )


class SpatialInputs:
    """Cuts those tensors of a batch that have the split dimensions, or adopts their parts.

    These have at least one dimension, the samples, in front of the split ones: [N, C, D, H, W] and
    labels [N, D, H, W], but not targets [N, 4].
    """

    def __init__(self, plan: Plan, context: SpatialContext) -> None:
        self._least = len(plan.split.spatial) + 1
        self.context = context

    def __call__(self, data: Any) -> Any:
        """This rank's parts of a micro-batch that it has whole, or has read in parts.

        Raises:
            PlanError: What it has read is not its part.
        """
        if isinstance(data, SampleParts):
            return map_tensors(data.data, partial(self._adopted, extents=data.extents))
        return map_tensors(data, self._cut)

    def _cut(self, tensor: Tensor) -> Any:
        return self.context.split(tensor) if tensor.ndim >= self._least else tensor

    def _adopted(self, tensor: Tensor, extents: tuple[int, ...]) -> Any:
        if tensor.ndim < self._least:
            return tensor
        return self.context.adopt(tensor, (*tensor.shape[: -len(extents)], *extents))


def spatial_loss(loss: Loss, plan: Plan, world: World) -> Loss:
    """The loss with inputs cut in space, where the plan splits samples (then collective)."""
    if not plan.split.spatial:
        return loss
    cut = SpatialInputs(plan, spatial_context(plan, world))
    return lambda model, batch: loss(model, cut(batch))
