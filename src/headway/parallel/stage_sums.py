"""The gradients of a stage summed over the ranks that hold it: the plain way, one all-reduce each.

Every stage has a group of its own, so that ranks that hold different stages may start their sums in
any order. A parameter that several stages use is summed once, over the holders of all of them, when
the last of its stages on this rank is. One flag per parameter travels along: what no rank used has
no gradient afterwards, as in the serial run. What is kept in
parts is summed by `shard_sums`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.errors import PlanError
from headway.parallel.row import Team
from headway.parallel.shard_sums import ShardSum
from headway.parallel.sharded import Place, local, managed, reshard, split_alike
from headway.parallel.stages import Stages
from headway.schedule import Kind, PipelineSchedule

Where = tuple[int, ...]
"""The stages that use a parameter."""
Wanted = tuple[Where, tuple[int, ...]]
"""A group: for which stages, of which ranks."""


class StageSums:
    """Carries out SYNC and WAIT. Making it is collective over the default group.

    Args:
        stages: Of the model.
        schedule: The table.
        team: Its ranks.
        copies: The ranks of every copy of the whole pipeline, this one's among them. With tensor
            parallelism: those at this rank's place in it. None: this one is alone.
        kept: Logical name -> place, of parameters that `StageShards` keeps in parts.

    Raises:
        PlanError: The table is for another number of stages; `fully_shard` was called, and
            `copies` was not given.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: PipelineSchedule,
        team: Team,
        *,
        copies: Sequence[tuple[int, ...]] | None = None,
        kept: Mapping[str, Place] | None = None,
    ) -> None:
        if problems := stages.unlike(schedule):
            raise PlanError(
                f"the schedule {schedule.name} does not fit",
                problems=problems,
                fix="Make the table for this cut, or cut the model into as many stages.",
            )
        own = sorted({stage for _, stage in schedule.hosted(team.rank)})
        places = {stage: dict(managed(stages[stage].module)) for stage in own}
        if copies is None and any(places.values()):
            raise PlanError(
                "the gradients of the stages cannot be summed",
                problems=["fully_shard splits their parameters over copies of the pipeline"],
                fix="Say which ranks these are: StageSums(..., copies=[...]).",
            )
        for stage in own:
            names = stages[stage].parameters
            places[stage] |= {n: place for n, place in (kept or {}).items() if n in names}
        self._modules = {stage: stages[stage].module for stage in own}
        self._at: dict[int, list[_Sum | ShardSum]] = {stage: [] for stage in own}
        contributors = _Contributors(schedule, copies or [team.ranks])
        plain, sharded = _by_ranks(stages, places, contributors)
        groups = _new_groups([*plain, *sharded])
        order = [a.stage for a in schedule.order[team.rank] if a.kind == Kind.SYNC]

        def last(where: Where) -> int:
            return max((s for s in where if s in own), key=lambda s: _last(order, s))

        for key, parameters in plain.items():
            if key in groups:
                self._at[last(key[0])].append(_Sum(parameters, groups[key]))
        for key, found in sharded.items():
            stage = last(key[0])
            self._at[stage].append(ShardSum(self._modules[stage], found, groups.get(key)))

    def start(self, stage: int) -> None:
        for part in self._at[stage]:
            part.start()
        reshard(self._modules[stage])

    def wait(self, stage: int) -> None:
        for part in self._at[stage]:
            part.wait()


class _Contributors:
    """Whose gradients belong together.

    Args:
        schedule: The table.
        copies: The ranks of every copy of the pipeline.
    """

    def __init__(self, schedule: PipelineSchedule, copies: Sequence[tuple[int, ...]]) -> None:
        self._schedule = schedule
        self._copies = copies

    def of(self, where: Where) -> tuple[int, ...]:
        """All ranks that hold one of these stages."""
        holders = {rank for stage in where for rank in self._schedule.holders(stage)}
        return tuple(sorted({copy[rank] for copy in self._copies for rank in holders}))


def _by_ranks(
    stages: Stages, places: Mapping[int, Mapping[str, Place]], contributors: _Contributors
) -> tuple[dict[Wanted, dict[str, nn.Parameter]], dict[Wanted, list[Place]]]:
    """This rank's parameters by the ranks over which they are summed: whole ones, sharded ones."""
    shards = {name: place.shard for found in places.values() for name, place in found.items()}
    everywhere: list[dict[str, tuple[int, ...]]] = _gathered(shards)
    plain: dict[Wanted, dict[str, nn.Parameter]] = {}
    sharded: dict[Wanted, list[Place]] = {}
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


def _new_groups(wanted: Iterable[Wanted]) -> dict[Wanted, dist.ProcessGroup]:
    """A group for each that has several ranks; all processes make all groups, in one order."""
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


class _Sum:
    """One group of parameters over one group of ranks."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
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
                _spread(chosen, flat)
        self._works, self._flats = [], {}


def _fuse(parameters: Iterable[nn.Parameter]) -> Tensor:
    """All gradients one after the other, this rank's parts of them, then a flag for each."""
    chosen = list(parameters)
    parts = [
        (local(torch.zeros_like(p), p) if p.grad is None else local(p.grad, p)).reshape(-1)
        for p in chosen
    ]
    flags = torch.tensor([float(p.grad is not None) for p in chosen], dtype=parts[0].dtype)
    return torch.cat([*parts, flags.to(parts[0].device)])


def _spread(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    flags = flat[-len(parameters) :].abs().tolist()
    start = 0
    for parameter, flag in zip(parameters, flags, strict=True):
        shape = local(parameter, parameter).shape
        part = flat[start : start + shape.numel()].view(shape)
        start += shape.numel()
        if flag:
            if parameter.grad is None or not split_alike(parameter.grad, parameter):
                parameter.grad = torch.empty_like(parameter)
            local(parameter.grad, parameter).copy_(part)
