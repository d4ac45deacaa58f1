"""Stages whose blocks were wrapped by FSDP2 (`fully_shard`) before the cut.

FSDP2 gathers a block's parameters in hooks around its forward and sums their gradients in hooks of
its backward. A split backward breaks the second: those hooks run with the gradients of the inputs,
before those of the weights are there. So inside a pipeline a block stays gathered from its first
forward to SYNC, its gradients pile up unsummed (all by FSDP2's public switches), and SYNC sums them
here: one reduce-scatter for each stage and step. Invariant: between steps all is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from headway.errors import PlanError
from headway.parallel.stages import Stage, Stages
from headway.schedule import Kind, PipelineSchedule

_OWN_WRAPPER = (
    "Wrap the model's blocks by fully_shard, each by itself and those at the beginning and end as "
    "well, and not the model."
)


def refuse_whole(model: nn.Module) -> None:
    """Refuse a model that is wrapped as a whole.

    Raises:
        PlanError: It is.
    """
    if isinstance(model, FSDPModule):
        raise PlanError(
            f"{type(model).__name__} cannot be cut into stages",
            problems=["fully_shard gathers its parameters around its forward, which no stage runs"],
            fix=_OWN_WRAPPER,
        )


def settled(stages: Stages) -> Stages:
    """The stages with all blocks sharded again, after their forwards have been run for the cut.

    Raises:
        PlanError: A stage uses a wrapped module's parameter otherwise than by calling the module.
    """
    reshard(stages.model)
    inside = {name for name, _ in managed(stages.model)}
    problems = [
        f"stage {stage.number} uses {name} outside of the module that fully_shard wrapped"
        for stage in stages
        for name in dict.fromkeys(n.target for n in stage.module.graph.nodes if n.op == "get_attr")
        if name in inside
    ]
    problems += [
        f"{name} is in the stages {', '.join(map(str, where))} and wrapped by fully_shard"
        for name, where in stages.shared.items()
        if name in inside
    ]
    if problems:
        raise PlanError("the model cannot be cut there", problems=problems, fix=_OWN_WRAPPER)
    now = dict(stages.model.named_parameters())
    renewed = tuple(
        replace(stage, parameters={name: now[name] for name in stage.parameters})
        for stage in stages
    )
    evaluating = stages.evaluating and settled(stages.evaluating)
    return replace(stages, stages=renewed, evaluating=evaluating)


def wrapped(module: nn.Module) -> list[FSDPModule]:
    """All parts that `fully_shard` was called with."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _module(part: FSDPModule) -> nn.Module:
    """Each is one: its class was made of the user's and FSDPModule."""
    assert isinstance(part, nn.Module)
    return part


def managed(module: nn.Module) -> Iterator[tuple[str, Place]]:
    """The parameters that FSDP2 shards, by name; they are sharded now."""
    inside = {id(part) for top in wrapped(module) for part in _module(top).modules()}
    for prefix, owner in module.named_modules():
        if id(owner) in inside:
            for key, parameter in owner.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    yield f"{prefix}.{key}".lstrip("."), Place(owner, key, parameter)


def reshard(module: nn.Module) -> None:
    """Free what has been gathered."""
    for part in wrapped(module):
        part.reshard()


def unfit(schedule: PipelineSchedule, stages: Stages, rank: int) -> list[str]:
    """Why a table for these stages cannot be carried out, where parts of them are wrapped."""
    if stages.unlike(schedule):
        return []
    hosted = sorted({stage for _, stage in schedule.hosted(rank)})
    split = [stage for stage in hosted if wrapped(stages[stage].module)]
    summed = {action.stage for action in schedule.order[rank] if action.kind == Kind.SYNC}
    problems = [
        f"stage {stage} is wrapped by fully_shard, and the table has no SYNC of it: lower(..., "
        "sync='eager')"
        for stage in split
        if stage not in summed
    ]
    if split and not schedule.flush:
        problems.append("it has no flush, and fully_shard keeps one version of the weights")
    kinds = {kinds for stage in split for kinds in _hidden(stages[stage].module)}
    problems += [
        f"gradients of fully_shard in {kept} that it reduces in {summed} are out of reach: give "
        "MixedPrecisionPolicy no reduce_dtype, and they are summed in the type of the parameters"
        for kept, summed in sorted(kinds, key=str)
    ]
    return problems


def _hidden(module: nn.Module) -> Iterator[tuple[torch.dtype, torch.dtype]]:
    """Types of gradients that FSDP2 casts, and then keeps, as soon as a backward has ended.

    Its policy is private: `tests/single/test_torch_private.py` says when it is elsewhere.
    """
    for part in wrapped(module):
        policy: Any = part._get_fsdp_state()._mp_policy
        for _, place in managed(_module(part)):
            kind = policy.param_dtype or place.sharded.dtype
            if policy.reduce_dtype not in (None, kind):
                yield kind, policy.reduce_dtype


def hold(stages: Iterable[Stage]) -> tuple[str, ...]:
    """Let blocks stay gathered, and their gradients unsummed, until SYNC.

    Returns:
        A remark for each stage that has such blocks.
    """
    remarks = []
    for stage in stages:
        for part in wrapped(stage.module):
            part.set_reshard_after_forward(False)
            part.set_reshard_after_backward(False)
            part.set_requires_gradient_sync(False)
        if wrapped(stage.module):
            remarks.append(
                f"stage {stage.number}: what fully_shard wraps stays gathered until the stage's "
                "gradients are summed; reshard_after_forward is off"
            )
    return tuple(remarks)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where FSDP2 puts a parameter, gathered or sharded.

    Attributes:
        owner: The module.
        key: Its name there.
        sharded: The sharded parameter.
    """

    owner: nn.Module
    key: str
    sharded: DTensor

    @property
    def now(self) -> Tensor:
        """The parameter as it is: gathered, or sharded."""
        # Not by getattr: modules of split layers answer with something else.
        held = self.owner.named_parameters(recurse=False, remove_duplicate=False)
        return dict(held)[self.key]

    @property
    def shard(self) -> tuple[int, ...]:
        """Which part this rank holds: its coordinates in the mesh where that splits."""
        mesh, placements = self.sharded.device_mesh, self.sharded.placements
        place = mesh.get_coordinate() or ()
        return tuple(c for c, p in zip(place, placements, strict=True) if not p.is_replicate())


def local(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor, split as another one is (by tensor parallelism)."""
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(like, DTensor) and not split_alike(tensor, like):
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()


def split_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether ranks hold the same parts of both."""
    if isinstance(tensor, DTensor) and isinstance(other, DTensor):
        return tensor.placements == other.placements
    return not isinstance(tensor, DTensor) and not isinstance(other, DTensor)
