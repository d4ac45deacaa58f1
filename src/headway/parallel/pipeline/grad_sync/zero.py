"""ZeRO for pipeline stages: parameters sharded between steps, gathered within a step.

A parameter's rows are dealt out as FSDP2 does it (`torch.chunk`). Between steps the model and
the optimiser hold shards (DTensors); in a step the stages' own parameters have their memory
back, and SYNC reduces gradients into the shards. A parameter that is not gathered has no memory
and is nowhere in the model. Source: Rajbhandari et al. 2020 (ZeRO), section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from headway.parallel.fsdp import ShardedParameterSite
from headway.parallel.stages import ModelStages

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
    found: list[list[_Key]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, sorted(keys))
    made = {}
    within = torch.arange(math.prod(group.values()), dtype=torch.int)
    # A DeviceMesh makes process groups, for which all processes have to come in the same order.
    for key in sorted({key for of_rank in found for key in of_rank}):
        rows = torch.tensor(key[1], dtype=torch.int)
        # A row names the first rank of each group; the others of the group follow it directly.
        ranks = within.view(*group.values(), 1, 1) + rows
        stages = "_".join(map(str, key[0]))
        sizes = {**group, f"copies_{stages}": len(rows), f"parts_{stages}": rows.shape[1]}
        sizes = {name: size for name, size in sizes.items() if size > 1}
        names = tuple(sizes)
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
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    # The parts may be uneven; torch would assume that the others are as large as this one.
    stride = torch.empty(whole.shape, device="meta").stride()
    held = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=stride
    )
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
