"""The gradients of a stage summed over the ranks that hold it: the plain way, one all-reduce each.

Every stage has a group of its own, so that ranks that hold different stages may start their sums in
any order. A parameter that several stages use is summed once, over the holders of all of them, when
the last of its stages on this rank is. One flag per parameter travels along: what no rank used has
no gradient afterwards, as in the serial run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.parallel.row import Team
from headway.parallel.stages import Stages
from headway.schedule import Kind, PipelineSchedule

Where = tuple[int, ...]
"""The stages that use a parameter."""


class StageSums:
    """Carries out SYNC and WAIT. Making it is collective over the default group.

    Args:
        stages: Of the model.
        schedule: The table.
        team: Its ranks.
        copies: The ranks of every copy of the whole pipeline, this one's among them; together all
            processes of the default group. None: this one is alone.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: PipelineSchedule,
        team: Team,
        *,
        copies: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        of_stages: dict[Where, dict[str, nn.Parameter]] = {}
        for name, where in _stages_of(stages).items():
            of_stages.setdefault(where, {})[name] = stages[where[0]].parameters[name]
        own = {stage for _, stage in schedule.hosted(team.rank)}
        order = [a.stage for a in schedule.order[team.rank] if a.kind == Kind.SYNC]
        self._at: dict[int, list[_Sum]] = {stage: [] for stage in own}
        for where, parameters in sorted(of_stages.items()):
            holders = {rank for stage in where for rank in schedule.holders(stage)}
            ranks = sorted(copy[rank] for copy in copies or [team.ranks] for rank in holders)
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            here = [stage for stage in where if stage in own]
            if group is not None and here:
                last = max(here, key=lambda s: _last(order, s))
                self._at[last].append(_Sum(parameters, group))

    def start(self, stage: int) -> None:
        for part in self._at[stage]:
            part.start()

    def wait(self, stage: int) -> None:
        for part in self._at[stage]:
            part.wait()


def _stages_of(stages: Stages) -> dict[str, Where]:
    found: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            found.setdefault(name, []).append(stage.number)
    return {name: tuple(where) for name, where in found.items()}


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
    """All gradients one after the other, then a flag for each."""
    chosen = list(parameters)
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in chosen]
    flags = torch.tensor([float(p.grad is not None) for p in chosen], dtype=parts[0].dtype)
    return torch.cat([*parts, flags.to(parts[0].device)])


def _spread(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    flags = flat[-len(parameters) :].abs().tolist()
    start = 0
    for parameter, flag in zip(parameters, flags, strict=True):
        part = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
        if flag and parameter.grad is None:
            parameter.grad = part.clone()
        elif flag and parameter.grad is not None:
            parameter.grad.copy_(part)
