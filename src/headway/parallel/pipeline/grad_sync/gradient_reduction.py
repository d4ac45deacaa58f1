"""Summing a stage's gradients over the ranks that hold it: all-reduce and reduce-scatter.

Every stage has process groups of its own, so that ranks that hold different stages may start
their sums in any order. A parameter that several stages use is summed once, over the holders of
all of them, when the last of its stages on this rank is. A flag per parameter travels along:
what no rank used has no gradient afterwards, as in the serial run.

Whole parameters are summed by an all-reduce, sharded ones by a reduce-scatter. FSDP2 splits
dimension d of a parameter over n ranks in chunks of ceil(size / n), the last ones smaller or
empty (`torch.chunk`); all chunks of one rank, padded to equal sizes, are one row of what is
reduce-scattered. Where several ranks hold equal shards, these are then summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.errors import PlanError
from headway.parallel.fsdp import (
    ShardedParameterSite,
    fsdp_modules_in,
    fsdp_parameters_in,
    local_part_like,
    reshard_fsdp_modules,
    same_placements,
)
from headway.parallel.pipeline.runtime.executor import PipelineRanks
from headway.parallel.stages import ModelStages
from headway.schedule.pipeline_schedule import ActionKind, PipelineSchedule


@dataclass(slots=True)
class _Bucket:
    """Parameters that go together.

    Attributes:
        widths: Elements of each in a row.
    """

    places: Sequence[ShardedParameterSite]
    widths: Sequence[int]
    flat: Tensor
    work: dist.Work


class ShardedGradientSync:
    """Carries out SYNC and WAIT for what FSDP2 shards of one stage.

    Args:
        module: The stage's.
        places: Its parameters whose equal shards are on the same ranks.
        equal: Ranks with equal shards; None: this one alone.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[ShardedParameterSite],
        equal: dist.ProcessGroup | None,
    ) -> None:
        self._module = module
        self._places = places
        self._equal = equal
        self._buckets: list[_Bucket] = []

    def start(self) -> None:
        """Waits for the ranks of the shards, which stand at the same place of the same row."""
        for part in fsdp_modules_in(self._module):
            part.unshard()  # nothing to do but for a block that no micro-batch came to
        together: dict[tuple[str, torch.dtype], list[ShardedParameterSite]] = {}
        for place in self._places:
            if not place.sharded.requires_grad:
                continue
            # One reduce-scatter for all parameters of a group of ranks and a type of elements.
            group = _group(place)[0]
            together.setdefault((group.group_name, place.sharded.dtype), []).append(place)
        self._buckets = [_scatter_sums(places) for places in together.values()]
        # A rank's row is complete, and can be summed with its copies, behind the reduce-scatter.
        for bucket in self._buckets if self._equal is not None else ():
            bucket.work.wait()
            work = dist.all_reduce(bucket.flat, group=self._equal, async_op=True)
            assert work is not None
            bucket.work = work

    def wait(self) -> None:
        for bucket in self._buckets:
            bucket.work.wait()
            _add_to_shards(bucket)
        self._buckets = []


def _group(place: ShardedParameterSite) -> tuple[dist.ProcessGroup, int, int]:
    """Over which the parameter is sharded; its size; the dimension of the tensor.

    It is the mesh's last dimension but those of tensor parallelism, which the gathered parameter
    has still.
    """
    now, mesh = place.now, place.sharded.device_mesh
    number = mesh.ndim - 1 - (now.device_mesh.ndim if isinstance(now, DTensor) else 0)
    return mesh.get_group(number), mesh.size(number), place.sharded.placements[number].dim  # type: ignore[attr-defined]


def _scatter_sums(places: Sequence[ShardedParameterSite]) -> _Bucket:
    """Start the sum; the gathered gradients are free afterwards."""
    group, size, _ = _group(places[0])
    rows, flags = [], []
    for place in places:
        now = place.now
        gradient, now.grad = now.grad, None
        flags.append(float(gradient is not None))
        # Rows must be equally long on all ranks, so that an unused parameter is sent as zeros; its
        # flag says so.
        full = local_part_like(torch.zeros_like(now) if gradient is None else gradient, now)
        rows.append(_padded_chunks(full.detach(), size, _group(place)[2]))
    kind = places[0].sharded
    # A rank receives one row only, so that every row needs the flags.
    flag = torch.tensor(flags, device=rows[0].device).expand(size, -1)
    # Concatenation with the float32 flags has promoted half precision, which is undone here.
    packed = torch.cat([*rows, flag], dim=1).to(kind.dtype)
    flat = packed.new_empty(packed.shape[1])
    work = dist.reduce_scatter(flat, list(packed.unbind()), group=group, async_op=True)
    assert work is not None
    return _Bucket(places, [row.shape[1] for row in rows], flat, work)


def _padded_chunks(full: Tensor, size: int, dim: int) -> Tensor:
    """A parameter's chunks, one for each rank, each filled up to the first one's length."""
    chunks = torch.chunk(full, size, dim)
    found = full.new_zeros(size, chunks[0].numel())
    # Of a small tensor `torch.chunk` makes fewer chunks than ranks; the other rows stay zero.
    for row, chunk in zip(found, chunks, strict=False):
        row[: chunk.numel()] = chunk.reshape(-1)
    return found


def _add_to_shards(bucket: _Bucket) -> None:
    """Add this rank's row to `.grad` of the sharded parameters that anybody used."""
    # The flags are summed as well: 0 where no rank has used the parameter.
    used = bucket.flat[-len(bucket.places) :].tolist()
    start = 0
    for place, width, flag in zip(bucket.places, bucket.widths, used, strict=True):
        parameter = place.sharded
        if flag:
            gradient = torch.zeros_like(parameter)
            own = local_part_like(gradient, parameter)
            own.copy_(bucket.flat[start : start + own.numel()].view(own.shape))
            so_far = parameter.grad
            parameter.grad = gradient if so_far is None else so_far + gradient
        start += width


# The gradients of a stage summed over the ranks that hold it: the plain way, one all-reduce
# each.


StagesUsing = tuple[int, ...]
"""The stages that use a parameter."""
ReductionGroup = tuple[StagesUsing, tuple[int, ...]]
"""A group: for which stages, of which ranks."""


class StageGradientSync:
    """Carries out SYNC and WAIT. Making it is collective over the default group.

    Args:
        copies: The ranks of every copy of the whole pipeline, this one's among them. With tensor
            parallelism: those at this rank's place in it. None: this one is alone.
        kept: Logical name -> place, of parameters that `ShardedStageParameters` keeps in parts.

    Raises:
        PlanError: The table is for another number of stages; `fully_shard` was called, and
            `copies` was not given.
    """

    def __init__(
        self,
        stages: ModelStages,
        schedule: PipelineSchedule,
        team: PipelineRanks,
        *,
        copies: Sequence[tuple[int, ...]] | None = None,
        kept: Mapping[str, ShardedParameterSite] | None = None,
    ) -> None:
        if problems := stages.unlike(schedule):
            raise PlanError(
                f"the schedule {schedule.name} does not fit",
                problems=problems,
                fix="Make the table for this cut, or cut the model into as many stages.",
            )
        own = sorted({stage for _, stage in schedule.hosted(team.rank)})
        places = {stage: dict(fsdp_parameters_in(stages[stage].module)) for stage in own}
        if copies is None and any(places.values()):
            raise PlanError(
                "the gradients of the stages cannot be summed",
                problems=["fully_shard splits their parameters over copies of the pipeline"],
                fix="Say which ranks these are: StageGradientSync(..., copies=[...]).",
            )
        for stage in own:
            names = stages[stage].parameters
            places[stage] |= {n: place for n, place in (kept or {}).items() if n in names}
        self._modules = {stage: stages[stage].module for stage in own}
        self._at: dict[int, list[_FlatAllReduce | ShardedGradientSync]] = {
            stage: [] for stage in own
        }
        contributors = _Contributors(schedule, copies or [team.ranks])
        plain, sharded = _by_ranks(stages, places, contributors)
        groups = _new_groups([*plain, *sharded])
        order = [a.stage for a in schedule.order[team.rank] if a.kind == ActionKind.SYNC]

        def last(where: StagesUsing) -> int:
            # A parameter of several stages has its whole gradient at the last SYNC of them.
            return max((s for s in where if s in own), key=lambda s: _last(order, s))

        for key, parameters in plain.items():
            # There is no group where only one rank holds the parameters: nothing has to be summed.
            if key in groups:
                self._at[last(key[0])].append(_FlatAllReduce(parameters, groups[key]))
        for key, found in sharded.items():
            stage = last(key[0])
            self._at[stage].append(
                ShardedGradientSync(self._modules[stage], found, groups.get(key))
            )

    def start(self, stage: int) -> None:
        for part in self._at[stage]:
            part.start()
        # Gradients are packed by now, so that the memory of gathered parameters can be freed.
        reshard_fsdp_modules(self._modules[stage])

    def wait(self, stage: int) -> None:
        for part in self._at[stage]:
            part.wait()


class _Contributors:
    """Whose gradients belong together.

    Args:
        copies: The ranks of every copy of the pipeline.
    """

    def __init__(self, schedule: PipelineSchedule, copies: Sequence[tuple[int, ...]]) -> None:
        self._schedule = schedule
        self._copies = copies

    def of(self, where: StagesUsing) -> tuple[int, ...]:
        """All ranks that hold one of these stages."""
        holders = {rank for stage in where for rank in self._schedule.holders(stage)}
        return tuple(sorted({copy[rank] for copy in self._copies for rank in holders}))


def _by_ranks(
    stages: ModelStages,
    places: Mapping[int, Mapping[str, ShardedParameterSite]],
    contributors: _Contributors,
) -> tuple[
    dict[ReductionGroup, dict[str, nn.Parameter]], dict[ReductionGroup, list[ShardedParameterSite]]
]:
    """This rank's parameters by the ranks over which they are summed: whole ones, sharded ones."""
    shards = {name: place.shard for found in places.values() for name, place in found.items()}
    everywhere: list[dict[str, tuple[int, ...]]] = _gathered(shards)
    plain: dict[ReductionGroup, dict[str, nn.Parameter]] = {}
    sharded: dict[ReductionGroup, list[ShardedParameterSite]] = {}
    for name, where in stages.users.items():
        here = [stage for stage in where if stage in places]
        if here and name not in shards:
            key = where, contributors.of(where)
            plain.setdefault(key, {})[name] = stages[where[0]].parameters[name]
        elif here:
            ranks = contributors.of(where)
            equal = tuple(r for r in ranks if everywhere[r].get(name) == shards[name])
            sharded.setdefault((where, equal), []).append(places[here[0]][name])
    return plain, sharded


def _new_groups(wanted: Iterable[ReductionGroup]) -> dict[ReductionGroup, dist.ProcessGroup]:
    # `new_group` is collective: every process makes every group, in one order.
    several = [key for key in wanted if len(key[1]) > 1]
    every = sorted({key for found in _gathered(several) for key in found})
    groups = {key: dist.new_group(list(key[1])) for key in every}
    return {key: groups[key] for key in several}


def _gathered(thing: Any) -> list[Any]:
    """The same of all processes, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def _last(order: Sequence[int], stage: int) -> int:
    return max((n for n, other in enumerate(order) if other == stage), default=-1)


class _FlatAllReduce:
    """One group of parameters over one group of ranks."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        # In one order on all ranks, also where a parameter came first by another stage.
        self._parameters = [parameters[name] for name in sorted(parameters)]
        self._group = group
        self._works: list[dist.Work] = []
        self._flats: dict[torch.dtype, tuple[list[nn.Parameter], Tensor]] = {}

    def start(self) -> None:
        self._flats = {}
        for dtype in dict.fromkeys(p.dtype for p in self._parameters if p.requires_grad):
            chosen = [p for p in self._parameters if p.requires_grad and p.dtype == dtype]
            self._flats[dtype] = chosen, _fuse(chosen)
        self._works = []
        for _, flat in self._flats.values():
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        with torch.no_grad():
            for chosen, flat in self._flats.values():
                _unfuse(chosen, flat)
        self._works, self._flats = [], {}


def _fuse(parameters: Iterable[nn.Parameter]) -> Tensor:
    """All gradients one after the other, this rank's parts of them, then a flag for each."""
    chosen = list(parameters)
    parts = [
        (
            local_part_like(torch.zeros_like(p), p)
            if p.grad is None
            else local_part_like(p.grad, p)
        ).reshape(-1)
        for p in chosen
    ]
    flags = torch.tensor([float(p.grad is not None) for p in chosen], dtype=parts[0].dtype)
    return torch.cat([*parts, flags.to(parts[0].device)])


def _unfuse(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    flags = flat[-len(parameters) :].abs().tolist()
    start = 0
    for parameter, flag in zip(parameters, flags, strict=True):
        shape = local_part_like(parameter, parameter).shape
        part = flat[start : start + shape.numel()].view(shape)
        start += shape.numel()
        if flag:
            # Autograd may have left the gradient in other placements than the parameter's.
            if parameter.grad is None or not same_placements(parameter.grad, parameter):
                parameter.grad = torch.empty_like(parameter)
            local_part_like(parameter.grad, parameter).copy_(part)
