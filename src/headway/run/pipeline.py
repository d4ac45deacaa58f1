"""A step of a pipeline: the plan's schedule over the user's model, as one instruction.

The model is cut once, with data to call it with. All ranks of a pipeline read the same
micro-batches. Invariant: after `run`, the gradients of this rank's stages are the
sums over all micro-batches of the global batch, as in the serial run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from time import perf_counter, time
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from headway.data import RankBatch
from headway.parallel import Calls, Pipeline, Stages, StageSums, Team
from headway.parallel.agreement import run_stages
from headway.parallel.cut import at_call
from headway.plan import Plan
from headway.plan.pipeline import AXIS
from headway.run.group_means import GroupMeans
from headway.run.homes import Homes, homes_of
from headway.run.parts import sum_and_count
from headway.run.pipeline_notes import PipelineNotes, StageSum
from headway.run.randomness import Sites
from headway.run.recipe import Loss
from headway.run.record import StepRecord
from headway.run.stage_cut import cut_as_planned
from headway.run.stage_evaluation import StageEvaluation
from headway.run.stage_randomness import StageRandomness
from headway.run.world import World
from headway.schedule import Action, Kind, PipelineSchedule
from headway.schedule.lowering import lower


class Step(Protocol):
    """STEP: updates a stage, where the table does that; see `LateGradients.step`."""

    def __call__(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None: ...


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
        step: Updates a stage.
        probe: Finds the random draws of the whole model, from the data of a micro-batch.
        remark: Told what the user should know about the cut.
    """

    model: nn.Module
    loss: Loss
    plan: Plan
    world: World
    seed: int
    arithmetic: Callable[[], AbstractContextManager[Any]]
    prepare: Callable[[Any], Any]
    probe: Callable[[Any], Sites]
    remark: Callable[[str], None]
    step: Step


class PipelineSteps:
    """All steps of a pipeline on this rank.

    Args:
        means: Of the executor.

    Attributes:
        losses: Of the last step: shares of the global loss, of the micro-batches that end here.
        counts: What those are sums over.
        homes: Who holds what; None before the model is cut.
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
        self._notes: dict[int, PipelineNotes] = {}
        self._summed: dict[int, StageSum] = {}
        self._evaluation: StageEvaluation | None = None
        self._batch: RankBatch | None = None
        self._shares: dict[int, tuple[Tensor, Tensor | float]] = {}
        self._groups = None if plan.flushes else GroupMeans(plan)

    @property
    def stages(self) -> Stages | None:
        """None before the first step."""
        return self._stages

    def run(self, batch: RankBatch, record: StepRecord, node: str) -> None:
        """Everything from the first forward to the summed gradients.

        Args:
            batch: Of this rank's pipeline; it may be empty in a ragged global batch.
            record: Is told what was done when.
            node: "step 12".
        """
        assert self._randomness is not None
        self._batch = batch
        self._randomness.begin(batch)
        self._shares.clear()
        self.losses, self.counts = [], []
        if self._groups is not None:
            self._groups.begin(batch)
        if not batch.micros:
            self._sum_late()
            return
        pipeline = self._pipeline_of(len(batch.micros))
        offset = time() - perf_counter()
        losses = pipeline.run([self._means.prepare(micro.data) for micro in batch.micros])
        if self._groups is None and len(batch.micros) != self._means.plan.batch.parts:
            self._sum_late()
        shares = [self._shares[number] for number in sorted(losses)]
        self.losses = [share for share, _ in shares]
        self.counts = [count for _, count in shares]
        notes = self._notes[len(batch.micros)]
        record.spans += notes.spans(offset, node)
        record.messages += notes.messages()
        record.flights += notes.flights()

    def evaluate(self, batch: RankBatch) -> Tensor:
        """Sums over what of a batch ends here: loss, what it is over, samples; in eval mode."""
        assert self._evaluation is not None
        return self._evaluation.run(batch.micros, self._means.prepare)

    # -- once ------------------------------------------------------------------------------------

    def cut(self, batch: RankBatch | None) -> Homes:
        """Cut the model by the first micro-batch of rank 0, which always has one; collective.

        Args:
            batch: Only that of rank 0 is looked at.
        """
        found = [batch.micros[0].data if batch is not None and batch.micros else None]
        dist.broadcast_object_list(found, src=0)
        self.homes = self._cut(self._means.prepare(found[0]))
        return self.homes

    def _cut(self, data: Any) -> Homes:
        means, plan = self._means, self._means.plan
        assert plan.batch.parts is not None
        full = self._schedule(plan.batch.parts)
        self._stages = stages = cut_as_planned(
            means.model,
            means.loss,
            data,
            how=plan.pipeline,
            stages=full.stages,
            arithmetic=means.arithmetic,
            remark=means.remark,
        )
        full = replace(full, skips=stages.skips)
        sites = means.probe(data)
        self._randomness = StageRandomness(
            replace(sites, in_backward=sites.in_backward or full.blockwise),
            stages,
            lambda: self._run_all(stages, data),
            means.seed,
        )
        table = lower(full, sync=plan.pipeline.sync)
        self._syncs = tuple(a.stage for a in table.order[self._team.rank] if a.kind == Kind.SYNC)
        copies = [plan.mesh.peers(rank, AXIS) for rank in plan.mesh.peers(0, plan.exchange.axis)]
        self._sums = StageSums(stages, table, self._team, copies=copies)
        self._summed = _summed(stages, table, len(copies))
        self._pipelines[table.num_microbatches] = self._make(stages, table)
        self._evaluation = StageEvaluation(
            stages,
            table,
            self._team,
            loss=means.loss,
            arithmetic=means.arithmetic,
            doing=self._doing,
        )
        return homes_of(stages, full, copies, means.world.rank)

    def _run_all(self, stages: Stages, data: Any) -> None:
        with self._means.arithmetic():
            at_call(
                self._means.model, self._means.loss, data, lambda call: run_stages(stages, call)
            )

    def _schedule(self, parts: int) -> PipelineSchedule:
        return self._means.plan.pipeline.make(self._means.plan.pipe_degree, parts)

    def _pipeline_of(self, parts: int) -> Pipeline:
        """Of the planned number of micro-batches; in a ragged batch made when met.

        Then copies may have different tables, and their sums come behind them; without a flush all
        have the same.
        """
        if parts not in self._pipelines:
            assert self._stages is not None
            schedule = replace(self._schedule(parts), skips=self._stages.skips)
            sync = "none" if schedule.flush else self._means.plan.pipeline.sync
            self._pipelines[parts] = self._make(self._stages, lower(schedule, sync=sync))
        return self._pipelines[parts]

    def _make(self, stages: Stages, table: PipelineSchedule) -> Pipeline:
        row = table.order[self._team.rank]
        steps = Counter(action.stage for action in row if action.kind == Kind.STEP)
        made: Counter[int] = Counter()

        def step(stage: int) -> None:
            made[stage] += 1
            last = made[stage] % steps[stage] == 0
            self._means.step(stages[stage].parameters.values(), last=last)

        assert self._randomness is not None
        calls = Calls(
            loss=self._means.loss,
            share=self._share,
            around=self._around,
            entering=self._randomness.entering,
            sync=self._sums,
            step=step,
            doing=self._doing,
        )
        pipeline = Pipeline(stages, table, self._team, calls)
        self._notes[table.num_microbatches] = PipelineNotes(
            pipeline,
            table,
            self._team,
            sums=self._summed,
            steps=self._groups is not None,
        )
        return pipeline

    # -- in a step -------------------------------------------------------------------------------

    def _share(self, value: Any, microbatch: int) -> Tensor:
        assert self._batch is not None
        micro, groups = self._batch.micros[microbatch], self._groups
        total, count = sum_and_count(value, len(micro.positions))
        share = total / self._batch.samples
        self._shares[microbatch] = share.detach(), count
        return share * groups.factor(microbatch, count) if groups else share

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


def _summed(stages: Stages, table: PipelineSchedule, copies: int) -> dict[int, StageSum]:
    """The stages of which there are several copies."""
    found = {}
    for stage in stages:
        holders = copies * len(table.holders(stage.number))
        trained = {n: p for n, p in stage.parameters.items() if p.requires_grad}
        if holders > 1 and trained:
            size = sum(p.numel() * p.element_size() for p in trained.values())
            found[stage.number] = StageSum(tuple(trained), size, holders)
    return found
