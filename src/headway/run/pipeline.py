"""A step of a pipeline: the plan's schedule over the user's model, as one instruction.

The model is cut once, with data to call it with. All ranks of a pipeline read the same
micro-batches. Invariant: after `run`, the gradients of this rank's stages are the
sums over all micro-batches of the global batch, as in the serial run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from time import perf_counter, time
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from headway.data import Parts, RankBatch
from headway.errors import PlanError
from headway.parallel import Calls, Pipeline, Stages, StageSums, Team, with_streams
from headway.parallel.agreement import run_stages
from headway.parallel.cut import at_call
from headway.parallel.sharded import Place
from headway.parallel.spatial import SpatialContext
from headway.plan import Plan
from headway.plan.layer_split import SPACE
from headway.plan.pipeline import AXIS
from headway.plan.sharding import SHARD
from headway.run.group_means import GroupMeans
from headway.run.homes import Homes, homes_of
from headway.run.parts import sum_and_count
from headway.run.pipeline_notes import PipelineNotes, StageSum
from headway.run.randomness import Sites
from headway.run.recipe import Loss
from headway.run.record import StepRecord
from headway.run.routes import find_nodes
from headway.run.spatial import SpatialInputs, context_of
from headway.run.stage_cut import cut_as_planned
from headway.run.stage_evaluation import StageEvaluation
from headway.run.stage_randomness import StageRandomness
from headway.run.world import World
from headway.schedule import Action, Kind, PipelineSchedule
from headway.schedule.lowering import lower


class Hands(Protocol):
    """Of the stages' weights and gradients; see `StageGradients`."""

    def step(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        """STEP: updates a stage, where the table does that."""

    @property
    def own(self) -> tuple[Any, ...]:
        """What values between stages refer to, once the model is cut."""

    def keep_own(self, homes: Homes, stages: Stages, loss: Loss, data: Any) -> Mapping[str, Place]:
        """The model has been cut."""

    def entering(self, model: Any) -> Any:
        """What a loss calls in place of a stage."""

    def weights(self, *, each_action: bool = False) -> AbstractContextManager[None]:
        """Around a step, or a batch of a validation."""

    def at(self, stage: int) -> AbstractContextManager[None]:
        """Around one action of a stage."""


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
        hands: Of weights and gradients.
        probe: Finds the random draws of the whole model, from the data of a micro-batch and a loss.
        remark: Told what the user should know about the cut.
    """

    model: nn.Module
    loss: Loss
    plan: Plan
    world: World
    seed: int
    arithmetic: Callable[[], AbstractContextManager[Any]]
    prepare: Callable[[Any], Any]
    probe: Callable[[Any, Loss], Sites]
    remark: Callable[[str], None]
    hands: Hands


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
        self._inputs = (
            SpatialInputs(plan, context_of(plan, means.world)) if plan.split.spatial else None
        )
        self._team = Team(
            rank=plan.mesh.coordinate(rank)[AXIS],
            ranks=plan.mesh.peers(rank, AXIS),
            device=means.world.device,
            own=() if self._inputs is None else _own(self._inputs.context),
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
        self._copies = _copies(plan, rank)
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
        ragged = batch.samples != self._means.plan.batch.samples
        with self._means.hands.weights(each_action=not ragged):
            self._run(batch, record, node)

    def _run(self, batch: RankBatch, record: StepRecord, node: str) -> None:
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
        with self._means.hands.weights():
            return self._evaluation.run(batch.micros, self._means.prepare)

    # -- once ------------------------------------------------------------------------------------

    def cut(self, batch: RankBatch | None) -> None:
        """Cut the model by the first micro-batch of rank 0, which always has one; collective.

        This rank keeps what is its own. Of a sample that is read in parts each rank gets the one
        at its own place, so that no rank has the whole.

        Args:
            batch: Only that of rank 0 is looked at, and of those that share its samples.

        Raises:
            PlanError: The model cannot be cut so.
        """
        means, mesh = self._means, self._means.plan.mesh
        own = mesh.coordinate(means.world.rank).get(SPACE, 0)
        data = None
        for place, source in enumerate(mesh.peers(0, SPACE)):
            found = [batch.micros[0].data if batch is not None and batch.micros else None]
            dist.broadcast_object_list(found, src=source)
            if place in (0, own):
                data = found[0]
            if not isinstance(found[0], Parts):
                break
        in_parts = isinstance(data, Parts)
        if in_parts and means.plan.pipeline.balance == "time":
            raise PlanError(
                "the model cannot be cut into stages by measured time",
                problems=["samples are read in parts, and no rank has one to measure it with"],
                fix="Leave out pipeline.balance, name the cuts in pipeline.cut, or read whole "
                "samples.",
            )
        self._cut(means.prepare(data), self._in_parts if in_parts else means.loss)

    def _in_parts(self, model: Any, data: Any) -> Any:
        """The loss of a micro-batch that was read in parts."""
        assert self._inputs is not None
        return self._means.loss(model, self._inputs(data))

    def _cut(self, data: Any, loss: Loss) -> None:
        means, plan = self._means, self._means.plan
        assert plan.batch.parts is not None
        full = self._schedule(plan.batch.parts)
        self._stages = stages = cut_as_planned(
            means.model,
            loss,
            data,
            how=plan.pipeline,
            stages=full.stages,
            arithmetic=means.arithmetic,
            remark=means.remark,
        )
        full = replace(full, skips=stages.skips)
        sites = means.probe(data, loss)
        self._randomness = StageRandomness(
            replace(sites, in_backward=sites.in_backward or full.blockwise),
            stages,
            lambda: self._run_all(stages, loss, data),
            means.seed,
        )
        table = lower(full, sync=plan.pipeline.sync)
        self._syncs = tuple(a.stage for a in table.order[self._team.rank] if a.kind == Kind.SYNC)
        self.homes = homes_of(stages, full, self._copies, means.world.rank)
        kept = means.hands.keep_own(self.homes, stages, loss, data)
        self._team = replace(self._team, own=self._team.own + means.hands.own)
        self._team = self._with_streams(table)
        self._sums = StageSums(stages, table, self._team, copies=self._copies, kept=kept)
        self._summed = _summed(stages, table, len(self._copies))
        self._pipelines[table.num_microbatches] = self._make(stages, table)
        self._evaluation = StageEvaluation(
            stages,
            table,
            self._team,
            loss=self._loss,
            arithmetic=means.arithmetic,
            doing=self._doing,
        )

    def _with_streams(self, table: PipelineSchedule) -> Team:
        world = self._means.world
        if (
            not self._means.plan.pipeline.shared_memory
            or world.device.type != "cpu"
            or world.backend != "gloo"
        ):
            return self._team
        nodes = find_nodes(world)
        return with_streams(
            self._team, table, lambda a, b: b in nodes.inside(a), timeout=world.timeout_seconds
        )

    def _run_all(self, stages: Stages, loss: Loss, data: Any) -> None:
        with self._means.arithmetic():
            at_call(self._means.model, loss, data, lambda call: run_stages(stages, call))

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
            self._means.hands.step(stages[stage].parameters.values(), last=last)

        assert self._randomness is not None
        calls = Calls(
            loss=self._loss,
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
        if groups:
            return share * groups.factor(microbatch, count)
        return share / self._means.plan.mesh.degree(SPACE)  # all of them hold the whole loss

    def _loss(self, model: Any, data: Any) -> Any:
        model = self._means.hands.entering(model)
        return self._means.loss(model, data if self._inputs is None else self._inputs(data))

    def _around(self, stage: int, microbatch: int, phase: str) -> AbstractContextManager[Any]:
        assert self._randomness is not None
        stack = ExitStack()
        stack.enter_context(self._means.hands.at(stage))
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


def _own(context: SpatialContext) -> tuple[Any, ...]:
    everyone = () if context.everyone is None else (context.everyone,)
    return context, *context.axes.values(), *everyone


def _copies(plan: Plan, rank: int) -> list[tuple[int, ...]]:
    """The ranks of every copy of the pipeline that has this one's parts of layers."""
    place = plan.mesh.coordinate(rank)
    apart = [name for name in plan.mesh.names if name not in (plan.exchange.axis, SHARD, SPACE)]
    first = {name: 0 if name == AXIS else place[name] for name in apart}
    return [
        plan.mesh.peers(other, AXIS)
        for other in range(plan.ranks)
        if all(plan.mesh.coordinate(other)[name] == first[name] for name in apart)
    ]


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
