"""Data parallelism of stages: gradients summed over the ranks that hold a stage, and ZeRO.

Every stage has process groups of its own, so that ranks that hold different stages may start
their sums in any order. A parameter that several stages use is summed once, over the holders of
all of them, when the last of its stages on this rank is. A flag per parameter travels along:
what no rank used has no gradient afterwards, as in the serial run.

Whole parameters are summed by an all-reduce, sharded ones by a reduce-scatter. FSDP2 splits
dimension d of a parameter over n ranks in chunks of ceil(size / n), the last ones smaller or
empty (`torch.chunk`); all chunks of one rank, padded to equal sizes, are one row of what is
reduce-scattered. Where several ranks hold equal shards, these are then summed.

With ZeRO a parameter's rows are dealt out as FSDP2 does it. Between steps the model and the
optimiser hold shards (DTensors); in a step the stages' own parameters have their memory back, and
SYNC reduces gradients into the shards. A parameter that is not gathered has no memory and is
nowhere in the model. Source: Rajbhandari et al. 2020 (ZeRO), section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from headway.channel.facts import gather_facts
from headway.channel.gloo_listeners import drop_later_connections
from headway.errors import PlanError
from headway.parallel.fsdp import (
    ShardedParameterSite,
    fsdp_modules_in,
    fsdp_parameters_in,
    local_part_like,
    part_as_dtensor,
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
        own = list(schedule.stages_on(team.rank))
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

        def contributors(where: StagesUsing) -> tuple[int, ...]:
            """All ranks that hold one of these stages: their gradients belong together."""
            holders = {holder for stage in where for holder in schedule.holders(stage)}
            pipelines = copies or [team.ranks]
            return tuple(sorted({ranks[holder] for ranks in pipelines for holder in holders}))

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


def _by_ranks(
    stages: ModelStages,
    places: Mapping[int, Mapping[str, ShardedParameterSite]],
    contributors: Callable[[StagesUsing], tuple[int, ...]],
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
        ranks = contributors(where)
        if here and name not in shards:
            plain.setdefault((where, ranks), {})[name] = stages[where[0]].parameters[name]
        elif here:
            equal = tuple(r for r in ranks if everywhere[r].get(name) == shards[name])
            sharded.setdefault((where, equal), []).append(places[here[0]][name])
    return plain, sharded


def _new_groups(wanted: Iterable[ReductionGroup]) -> dict[ReductionGroup, dist.ProcessGroup]:
    # `new_group` is collective: every process makes every group, in one order.
    several = [key for key in wanted if len(key[1]) > 1]
    every = sorted({key for found in _gathered(several) for key in found})
    with drop_later_connections():
        groups = {key: dist.new_group(list(key[1])) for key in every}
    return {key: groups[key] for key in several}


def _gathered(thing: Any) -> list[Any]:
    """The same of all processes, by rank."""
    return gather_facts(thing)


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
        # One buffer for each type of elements: `torch.cat` would promote the narrower ones.
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


def _fuse(chosen: Sequence[nn.Parameter]) -> Tensor:
    """All gradients one after the other, this rank's parts of them, then a flag for each."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
    parts = [local_part_like(g, p).reshape(-1) for g, p in zip(gradients, chosen, strict=True)]
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


# ZeRO: parameters sharded between steps, gathered within a step.


ShardingRanks = tuple[tuple[int, ...], ...]
"""Ranks that train a parameter: those of one row keep parts of it, rows are copies. Where layers
are split they are the first ones of their groups, which lie next to each other."""
_Key = tuple[tuple[int, ...], ShardingRanks]


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A parameter.

    Attributes:
        whole: Of the stages; without memory where it is not gathered.
        place: Of the part, in the model.
        sites: All (module, key) of the model that hold it.
    """

    stages: tuple[int, ...]
    whole: nn.Parameter
    place: ShardedParameterSite
    sites: tuple[tuple[nn.Module, str], ...]


class ShardedStageParameters:
    """Of this rank; making it is collective over the default group.

    Args:
        stages: Of the model, cut.
        rows: Logical name -> who keeps it, of what this rank trains and keeps in parts.
        group: Names and sizes of the axes of ranks that split layers.

    Attributes:
        meshes: Logical name -> all its ranks: axes of the group, copies and parts, those of one
            rank left out.
        places: Logical name -> where its part is; for `StageGradientSync`.
    """

    def __init__(
        self,
        stages: ModelStages,
        rows: Mapping[str, ShardingRanks],
        group: Mapping[str, int] | None = None,
    ) -> None:
        wholes = dict(stages.model.named_parameters())
        where = stages.users
        keys: dict[_Key, list[str]] = {}
        for name, ranks in rows.items():
            keys.setdefault((where[name], ranks), []).append(name)
        meshes = _meshes(keys, group or {}, next(iter(wholes.values())).device.type)
        self.meshes = {name: meshes[key] for key, names in keys.items() for name in names}
        sites = _sites(stages.model)
        # Sorted as on all other ranks: to gather is one collective after the other.
        self._groups = [
            [
                _keep(wholes[name], key[0], _parts(meshes[key]), sites[wholes[name]])
                for name in names
            ]
            for key, names in sorted(keys.items())
        ]
        self.places = {
            name: kept.place
            for (_, names), group in zip(sorted(keys.items()), self._groups, strict=True)
            for name, kept in zip(names, group, strict=True)
        }
        self._each_action = False
        self.release()

    @contextmanager
    def gathered(self, *, each_action: bool = False) -> Iterator[None]:
        """The stages can be run inside; collective.

        Args:
            each_action: Gather what a stage needs in `at` only: all ranks of a row must carry out
                the same actions.
        """
        self.gather(each_action=each_action)
        try:
            yield
        finally:
            self.release()

    def gather(self, *, each_action: bool = False) -> None:
        """Let the model hold the stages' parameters, as `gathered` does; collective."""
        self._each_action = each_action
        for group in self._groups:
            _exchange(group, to_whole=True)
            if not each_action:
                _gather(group)

    def release(self) -> None:
        """Undo `gather`; numbers that have changed since are forgotten."""
        for group in self._groups:
            _exchange(group, to_whole=False)
            _free(group)

    @contextmanager
    def at(self, stage: int) -> Iterator[None]:
        """One action of a stage."""
        own = [g for g in self._groups if stage in g[0].stages] if self._each_action else []
        for group in own:
            _gather(group)
        try:
            yield
        finally:
            for group in own:
                _free(group)


def _meshes(keys: Iterable[_Key], group: Mapping[str, int], device: str) -> dict[_Key, DeviceMesh]:
    """One for each, also where two have the same ranks: their sums may come in any order.

    Dims are named by the stages: DTensor takes meshes of equal ranks and names for each other.
    """
    made = {}
    within = torch.arange(math.prod(group.values()), dtype=torch.int)
    # A DeviceMesh makes process groups, for which all processes have to come in the same order.
    for key in sorted({key for of_rank in _gathered(sorted(keys)) for key in of_rank}):
        rows = torch.tensor(key[1], dtype=torch.int)
        # A row names the first rank of each group; the others of the group follow it directly.
        ranks = within.view(*group.values(), 1, 1) + rows
        stages = "_".join(map(str, key[0]))
        sizes = {**group, f"copies_{stages}": len(rows), f"parts_{stages}": rows.shape[1]}
        sizes = {name: size for name, size in sizes.items() if size > 1}
        names = tuple(sizes)
        with drop_later_connections():
            made[key] = DeviceMesh(device, ranks.reshape(*sizes.values()), mesh_dim_names=names)
    return made


def _parts(mesh: DeviceMesh) -> DeviceMesh:
    """Of the ranks at this one's place in its group."""
    names = mesh.mesh_dim_names or ()
    own = tuple(name for name in names if name.startswith(("copies_", "parts_")))
    return mesh if own == names else mesh[own]


def _sites(model: nn.Module) -> dict[Tensor, tuple[tuple[nn.Module, str], ...]]:
    found: dict[Tensor, tuple[tuple[nn.Module, str], ...]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found[parameter] = (*found.get(parameter, ()), (module, key))
    return found


def _keep(
    whole: nn.Parameter,
    stages: tuple[int, ...],
    mesh: DeviceMesh,
    sites: tuple[tuple[nn.Module, str], ...],
) -> _Kept:
    whole.data = whole.data.clone()  # memory of its own, which can be given back
    size, number = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    # A copy: `_free` takes the memory of the whole away, and that of its views.
    part = _chunk(whole.data, size, number).clone(memory_format=torch.contiguous_format)
    # The last dimension of the mesh has the parts, the one before it the copies (`_meshes`).
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    held = part_as_dtensor(part, mesh, placements, whole.shape)
    owner, key = sites[0]
    sharded: DTensor = nn.Parameter(held, whole.requires_grad)  # type: ignore[assignment]
    return _Kept(stages, whole, ShardedParameterSite(owner, key, sharded), sites)


def _chunk(whole: Tensor, size: int, number: int) -> Tensor:
    """The rows of one of so many ranks; none for the last ones of a small tensor."""
    each = -(-whole.shape[0] // size)
    start = min(number * each, whole.shape[0])
    return whole[start : start + each]


def _exchange(group: Iterable[_Kept], *, to_whole: bool) -> None:
    """Let the model hold the stages' parameters, or the parts."""
    for kept in group:
        if to_whole:
            # Between steps users see the sharded parameter, and freeze or unfreeze that.
            kept.whole.requires_grad_(kept.place.sharded.requires_grad)
        held = kept.whole if to_whole else kept.place.sharded
        for module, key in kept.sites:
            module.register_parameter(key, held)  # type: ignore[arg-type]


def _free(group: Iterable[_Kept]) -> None:
    for kept in group:
        # The Parameter itself stays: the stage's module and graph refer to it.
        kept.whole.untyped_storage().resize_(0)


def _gather(group: list[_Kept]) -> None:
    """Memory for the parameters, and their numbers: one message for each type of elements."""
    for dtype in dict.fromkeys(kept.whole.dtype for kept in group):
        chosen = [kept for kept in group if kept.whole.dtype == dtype]
        mesh = chosen[0].place.sharded.device_mesh
        size = mesh.size(mesh.ndim - 1)
        shapes = (kept.whole.shape for kept in chosen)
        widths = [-(-shape[0] // size) * shape[1:].numel() for shape in shapes]
        row = chosen[0].whole.data.new_zeros(sum(widths))
        for kept, space in zip(chosen, row.split(widths), strict=True):
            local = kept.place.sharded.detach().to_local().reshape(-1)  # type: ignore[attr-defined]
            space[: local.numel()] = local
        rows = row.new_empty(size, len(row))
        dist.all_gather(list(rows.unbind()), row, group=mesh.get_group(mesh.ndim - 1))
        for kept, parts in zip(chosen, rows.split(widths, dim=1), strict=True):
            _fill(kept.whole.data, parts)


def _fill(whole: Tensor, parts: Tensor) -> None:
    # Autograd does not count a change of `.data`, and need not: the numbers are the ones before.
    whole.untyped_storage().resize_(whole.numel() * whole.element_size())
    for number, part in enumerate(parts):
        rows = _chunk(whole, len(parts), number)
        rows.copy_(part[: rows.numel()].view(rows.shape))
