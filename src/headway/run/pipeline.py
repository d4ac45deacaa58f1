"""A step of a pipeline: the plan's schedule over the user's model, as one instruction.

The model is cut at the first step, when there are data to call it with. All ranks of a pipeline
read the same micro-batches. Invariant: after `run`, the gradients of this rank's stages are the
sums over all micro-batches of the global batch, as in the serial run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from time import perf_counter, time
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from headway.data import RankBatch
from headway.parallel import Calls, Pipeline, Stages, StageSums, Team, cut
from headway.parallel.agreement import run_stages
from headway.parallel.cut import at_call
from headway.plan import Plan
from headway.plan.pipeline import AXIS
from headway.run.parts import sum_and_count
from headway.run.randomness import Sites, generators_restored
from headway.run.recipe import Loss
from headway.run.stage_gradients import Homes
from headway.run.stage_randomness import StageRandomness
from headway.run.world import World
from headway.schedule import Action, Kind, PipelineSchedule
from headway.schedule.lowering import lower
from headway.timeline import Span

_KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward",
    Kind.WEIGHT_GRAD: "backward",
    Kind.RECV: "wait",
    Kind.WAIT: "wait",
}


@dataclass(frozen=True)
class Means:
    """What the executor lends to a pipeline.

    Attributes:
        model: The whole model.
        loss: The recipe's.
        plan: With an axis "pipe".
        world: The processes.
        seed: Of the run.
        arithmetic: The context of a forward pass (autocast).
        prepare: Puts the data of a micro-batch on the device.
        probe: Finds the random draws of the whole model, from the data of a micro-batch.
    """

    model: nn.Module
    loss: Loss
    plan: Plan
    world: World
    seed: int
    arithmetic: Callable[[], AbstractContextManager[Any]]
    prepare: Callable[[Any], Any]
    probe: Callable[[Any], Sites]


class PipelineSteps:
    """All steps of a pipeline on this rank.

    Args:
        means: Of the executor.

    Attributes:
        losses: Of the last step: shares of the global loss, of the micro-batches that end here.
        counts: What those are sums over.
        homes: Who trains what; None before the first step.
    """

    def __init__(self, means: Means) -> None:
        self._means = means
        plan, rank = means.plan, means.world.rank
        self._team = Team(
            rank=plan.mesh.coordinate(rank)[AXIS],
            ranks=plan.mesh.peers(rank, AXIS),
            device=means.world.device,
        )
        self.losses: list[Tensor] = []
        self.counts: list[Tensor | float] = []
        self.homes: Homes | None = None
        self._stages: Stages | None = None
        self._randomness: StageRandomness | None = None
        self._sums: StageSums | None = None
        self._syncs: tuple[int, ...] = ()
        self._pipelines: dict[int, Pipeline] = {}
        self._batch: RankBatch | None = None
        self._count_of: dict[int, Tensor | float] = {}

    def run(self, batch: RankBatch) -> list[Span]:
        """Everything from the first forward to the summed gradients; returns what was done when.

        Args:
            batch: Of this rank's pipeline; it may be empty in a ragged global batch.
        """
        if self._stages is None:
            self._cut(self._means.prepare(self._example(batch)))
        assert self._randomness is not None
        self._batch = batch
        self._randomness.begin(batch)
        self._count_of.clear()
        self.losses, self.counts = [], []
        if not batch.micros:
            self._sum_late()
            return []
        pipeline = self._pipeline_of(len(batch.micros))
        offset = time() - perf_counter()
        losses = pipeline.run([self._means.prepare(micro.data) for micro in batch.micros])
        if len(batch.micros) != self._means.plan.batch.parts:
            self._sum_late()
        self.losses = [losses[number].detach() for number in sorted(losses)]
        self.counts = [self._count_of[number] for number in sorted(losses)]
        return [self._span(offset, *row) for row in pipeline.spans if row[0].kind in _KINDS]

    # -- at the first step -----------------------------------------------------------------------

    def _example(self, batch: RankBatch) -> Any:
        """The first micro-batch of rank 0, which always has one; the same for all ranks."""
        found = [batch.micros[0].data if batch.micros else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def _cut(self, data: Any) -> None:
        means, plan = self._means, self._means.plan
        assert plan.batch.parts is not None
        full = self._schedule(plan.batch.parts)
        names = plan.pipeline.cut
        with generators_restored(), means.arithmetic():
            self._stages = stages = cut(
                means.model,
                means.loss,
                data,
                stages=None if names else full.stages,
                at=names or None,
            )
        full = replace(full, skips=stages.skips)
        self._randomness = StageRandomness(
            means.probe(data),
            stages,
            lambda: self._run_all(stages, data),
            means.seed,
        )
        table = lower(full, sync=plan.pipeline.sync)
        self._syncs = tuple(a.stage for a in table.order[self._team.rank] if a.kind == Kind.SYNC)
        copies = [plan.mesh.peers(rank, AXIS) for rank in plan.mesh.peers(0, plan.exchange.axis)]
        self._sums = StageSums(stages, table, self._team, copies=copies)
        self._pipelines[table.num_microbatches] = self._make(stages, table)
        self.homes = _homes(stages, full, copies, self._team)

    def _run_all(self, stages: Stages, data: Any) -> None:
        with self._means.arithmetic():
            at_call(
                self._means.model, self._means.loss, data, lambda call: run_stages(stages, call)
            )

    def _schedule(self, parts: int) -> PipelineSchedule:
        return self._means.plan.pipeline.make(self._means.plan.pipe_degree, parts)

    def _pipeline_of(self, parts: int) -> Pipeline:
        """Of the planned number of micro-batches; in a ragged batch without sums, made when met."""
        if parts not in self._pipelines:
            assert self._stages is not None
            schedule = replace(self._schedule(parts), skips=self._stages.skips)
            self._pipelines[parts] = self._make(self._stages, lower(schedule))
        return self._pipelines[parts]

    def _make(self, stages: Stages, table: PipelineSchedule) -> Pipeline:
        calls = Calls(
            loss=self._means.loss,
            share=self._share,
            around=self._around,
            sync=self._sums,
            step=lambda _: None,  # one step for all stages, by the executor
            doing=self._doing,
        )
        return Pipeline(stages, table, self._team, calls)

    # -- in a step -------------------------------------------------------------------------------

    def _share(self, value: Any, microbatch: int) -> Tensor:
        assert self._batch is not None
        micro = self._batch.micros[microbatch]
        total, count = sum_and_count(value, len(micro.positions))
        self._count_of[microbatch] = count
        return total / self._batch.samples

    def _around(self, stage: int, microbatch: int, phase: str) -> AbstractContextManager[Any]:
        assert self._randomness is not None
        stack = ExitStack()
        if phase != "backward":
            stack.enter_context(self._means.arithmetic())
        stack.enter_context(self._randomness.around(stage, microbatch, phase))
        return stack

    def _sum_late(self) -> None:
        """The sums over the copies of this rank's stages, where the table has none."""
        assert self._sums is not None
        for stage in self._syncs:
            self._sums.start(stage)
        for stage in self._syncs:
            self._sums.wait(stage)

    def _doing(self, action: Action) -> None:
        self._means.world.doing("waits in cell %s", action)

    def _span(self, offset: float, action: Action, start: float, end: float) -> Span:
        return Span(
            rank=self._means.world.rank,
            lane="compute",
            kind=_KINDS[action.kind],
            label=str(action),
            start=offset + start,
            end=offset + end,
        )


def _homes(
    stages: Stages, schedule: PipelineSchedule, copies: list[tuple[int, ...]], team: Team
) -> Homes:
    owner: dict[str, int] = {}
    holders: dict[str, set[int]] = {}
    own: set[str] = set()
    hosted = {stage for _, stage in schedule.hosted(team.rank)}
    for stage in stages:
        places = schedule.holders(stage.number)
        for name in (*stage.parameters, *stage.buffers):
            owner.setdefault(name, copies[0][places[0]])
        for name in stage.parameters:
            holders.setdefault(name, set()).update(places)
            if stage.number in hosted:
                own.add(name)
    counts = {name: len(ranks) * len(copies) for name, ranks in holders.items()}
    return Homes(owner, frozenset(own), counts)
