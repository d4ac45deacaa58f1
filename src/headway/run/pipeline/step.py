"""One step of a pipeline: the plan's schedule over the user's model.

The model is cut once, by its first micro-batch. All ranks of a pipeline read the same
micro-batches. After `PipelineRunner.run` with a flush, the gradients of this rank's stages are the
sums over all micro-batches of the global batch, as in the serial run.

Without a flush every update uses the gradients of a group of micro-batches, and its loss is the
mean of that group (`UpdateGroupWeights`), as in a serial run whose batch is one group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from headway.data import MicroBatch, RankBatch, SampleParts
from headway.errors import PlanError, RecipeError
from headway.parallel.pipeline.data_parallel import StageGradientSync
from headway.parallel.pipeline.partition.cut import (
    check_metrics_call,
    run_at_model_call,
    run_stages,
)
from headway.parallel.pipeline.runtime.executor import (
    Pipeline,
    PipelineCallbacks,
    PipelineRanks,
    forward_only_schedule,
    open_shared_memory_streams,
)
from headway.parallel.spatial.spatial_context import SpatialContext
from headway.parallel.stages import LOSS, METRICS, ModelStages
from headway.plans import Plan
from headway.plans.layer_split import SPACE
from headway.plans.pipeline import PIPE_AXIS
from headway.plans.plan import SHARD_AXIS
from headway.run.distributed.process_groups import find_nodes
from headway.run.pipeline.batch_broadcast import broadcast_batch
from headway.run.pipeline.stage_ownership import (
    ParameterOwnership,
    parameter_ownership,
    partition_model,
)
from headway.run.recipe.recipe import Loss, Metrics, sum_and_count
from headway.run.step.batch import SpatialInputs, spatial_context
from headway.run.step.forward_pass import ForwardPass
from headway.run.step.randomness import StageRandomness
from headway.run.step.record import PipelineTrace, StageGradientSum, StepRecord
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import (
    Action,
    ActionKind,
    Groups,
    PipelineSchedule,
    common_update_groups,
)

if TYPE_CHECKING:
    from headway.parallel.fsdp import ShardedParameterSite
    from headway.run.distributed.world import World


class PipelineEvaluation:
    """Forward passes of a pipeline in eval mode, on one rank.

    Args:
        table: The lowered table of a step; its forwards are used.
        function: A loss, or metrics; `caller` is what messages call it.
    """

    def __init__(
        self,
        stages: ModelStages,
        table: PipelineSchedule,
        team: PipelineRanks,
        *,
        function: Loss | Metrics,
        caller: str,
        arithmetic: Callable[[], AbstractContextManager[Any]],
        doing: Callable[[Action], None],
    ) -> None:
        self._most = table.num_microbatches
        self._micros: tuple[MicroBatch, ...] = ()
        self._found: list[tuple[Any, int]] = []
        calls = PipelineCallbacks(
            loss=function,
            share=self._keep,
            around=lambda *_: arithmetic(),
            doing=doing,
            caller=caller,
        )
        self._pipeline = Pipeline(stages, forward_only_schedule(table, self._most), team, calls)

    def run(
        self, micros: tuple[MicroBatch, ...], prepare: Callable[[Any], Any]
    ) -> list[tuple[Any, int]]:
        """For each micro-batch that ends on this rank what the function returns, and its samples.

        Args:
            micros: Of this rank's pipeline, the same on all its ranks; any number of them.
        """
        self._found = []
        # A batch of more micro-batches than the table has goes through in several runs.
        for first in range(0, len(micros), self._most):
            self._micros = micros[first : first + self._most]
            self._pipeline.evaluate([prepare(micro.data) for micro in self._micros])
        self._micros = ()
        return self._found

    def _keep(self, value: Any, microbatch: int) -> Tensor:
        self._found.append((value, len(self._micros[microbatch].positions)))
        return torch.zeros(())  # there is no backward


class UpdateGroupWeights:
    """The weight of each micro-batch's loss where a pipeline updates its weights within a step."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[int, Groups] = {}
        self._samples = 0
        self._own: list[int] = []
        self._group: dict[int, int] = {}
        self._sizes: list[int] = []
        self._alone: list[bool] = []
        self._per_sample: dict[int, float] = {}

    def begin(self, batch: RankBatch) -> None:
        """Begin a step of the recipe.

        Raises:
            PlanError: Copies of the pipeline have different numbers of micro-batches.
        """
        sizes = microbatch_sizes(self._plan, batch.samples)
        groups = self._groups(len(batch.micros))
        self._samples = batch.samples
        self._own = [len(micro.positions) for micro in batch.micros]
        self._group = {m: number for number, group in enumerate(groups) for m in group}
        # Over all copies: their gradients are summed, and the mean is over the samples of all.
        self._sizes = [sum(copy[m] for copy in sizes for m in group) for group in groups]
        self._alone = [len(sizes) * len(group) == 1 for group in groups]
        self._per_sample.clear()

    def _groups(self, parts: int) -> Groups:
        if parts not in self._known:
            found = common_update_groups(self._plan.pipeline.make(self._plan.pipe_degree, parts))
            assert found is not None  # the plan's check
            self._known[parts] = found
        return self._known[parts]

    def factor(self, microbatch: int, count: Tensor | float) -> float:
        """The factor from a share of the batch's mean loss to a share of the group's mean.

        Args:
            count: What the loss is a sum over: samples, or something else, such as words.

        Raises:
            RecipeError: Counts per sample differ within the group, or may do so on another rank.
        """
        group = self._group[microbatch]
        share = self._samples / self._sizes[group]
        # Gradients leave before the counts of the other micro-batches are known: the group's mean
        # is known only where every sample counts 1, the group is this micro-batch alone, or all
        # counts of this rank's only pipeline are equal.
        per_sample = float(count) / self._own[microbatch]
        if per_sample == 1.0:
            known = self._per_sample.setdefault(group, 1.0) == 1.0
        elif self._alone[group]:
            known = True
        else:
            first = self._per_sample.setdefault(group, per_sample)
            known = self._plan.data_degree == 1 and first == per_sample
        if not known:
            raise RecipeError(
                "this loss cannot be used where a step has updates from groups of micro-batches",
                why="It returns a sum and a count that differs between micro-batches; the count of "
                "all is only known after the gradients have been made.",
                fix="Return the mean over samples, or use pipedream in one pipeline, or a schedule "
                "with a flush.",
            )
        return share / per_sample if per_sample else share


def microbatch_sizes(plan: Plan, samples: int) -> list[list[int]]:
    """For each copy of the pipeline the samples of its micro-batches.

    Args:
        samples: Of the global batch; fewer than planned where it is ragged.

    Raises:
        PlanError: The copies have different numbers of micro-batches: they would make different
            numbers of steps.
    """
    copies, split = plan.data_degree, plan.batch
    shares = [split.share(copy, copies, samples) for copy in range(copies)]
    sizes = [[len(part) for part in split.microbatches(share)] for share in shares]
    if len({len(copy) for copy in sizes}) > 1:
        numbers = " and ".join(map(str, sorted({len(copy) for copy in sizes})))
        raise PlanError(
            "a batch cannot be cut into the same micro-batches for all copies of the pipeline",
            problems=[f"{samples} samples give them {numbers} micro-batches; without a "
                      "flush all must make the same updates"],
            fix="Set drop_last = true, so that no epoch ends with a smaller batch.",
        )  # fmt: skip
    return sizes


def check_last_batch(plan: Plan, length: int | None) -> None:
    """Check the ragged last batch before the first step, not at the end of the first epoch.

    Args:
        length: Samples of an epoch; None: it ends where a stream ends.

    Raises:
        PlanError: As `microbatch_sizes`, or the last batch is not known.
    """
    if not plan.flushes and length is None:
        raise PlanError(
            "the schedule has no flush, and the stream has no length",
            problems=[
                "Without a flush all batches have the same micro-batches; how large the last batch "
                "of an epoch is, is not known."
            ],
            fix="Set drop_last, or give data=headway.data.StreamSource(stream, length=...).",
        )
    if length is not None and not plan.flushes and length % plan.batch.samples:
        microbatch_sizes(plan, length % plan.batch.samples)


class StageWeights(Protocol):
    """The parameters of this rank's stages, as its strategy holds them (`StageParameters`)."""

    # A protocol, because the room of the strategies imports this one.
    @property
    def own(self) -> tuple[Any, ...]: ...
    def keep_own(
        self, ownership: ParameterOwnership, stages: ModelStages, loss: Loss, data: Any
    ) -> Mapping[str, ShardedParameterSite]: ...
    def weights(self, *, each_action: bool = False) -> AbstractContextManager[None]: ...
    def at(self, stage: int) -> AbstractContextManager[None]: ...
    def entering(self, model: Any) -> Any: ...


class PipelineRunner:
    """Runs the steps of a pipeline on this rank.

    Attributes:
        losses: Shares of the global loss of the last step, of the micro-batches that end here.
        metrics: Which validation will compute; set before the cut, they are tried there.
        ownership: Which rank holds which parameter; None before the model is cut.
        stages: None before the model is cut.
    """

    def __init__(
        self,
        forward: ForwardPass,
        plan: Plan,
        world: World,
        *,
        seed: int,
        remark: Callable[[str], None],
        weights: StageWeights,
        update_stage: Callable[[Iterable[nn.Parameter], bool], None],
    ) -> None:
        self._forward = forward
        self._plan = plan
        self._world = world
        self._seed = seed
        self._remark = remark
        self._weights = weights
        self._update_stage = update_stage
        rank = world.rank
        self._inputs = (
            SpatialInputs(plan, spatial_context(plan, world)) if plan.split.spatial else None
        )
        self._team = PipelineRanks(
            rank=plan.mesh.coordinate(rank)[PIPE_AXIS],
            ranks=plan.mesh.peers(rank, PIPE_AXIS),
            device=world.device,
            own=() if self._inputs is None else _own(self._inputs.context),
        )
        self.losses: list[Tensor] = []
        self.counts: list[Tensor | float] = []
        self.metrics: Metrics | None = None
        self.ownership: ParameterOwnership | None = None
        self.stages: ModelStages | None = None
        self._randomness: StageRandomness | None = None
        self._sums: StageGradientSync | None = None
        self._syncs: tuple[int, ...] = ()
        self._pipelines: dict[int, Pipeline] = {}
        self._notes: dict[int, PipelineTrace] = {}
        self._summed: dict[int, StageGradientSum] = {}
        self._evaluations: dict[str, tuple[Loss | Metrics, PipelineEvaluation]] = {}
        self._copies = _copies(plan, rank)
        self._batch: RankBatch | None = None
        self._shares: dict[int, tuple[Tensor, Tensor | float]] = {}
        self._groups = None if plan.flushes else UpdateGroupWeights(plan)

    def run(self, batch: RankBatch, record: StepRecord, node: str) -> None:
        """Run from the first forward to the summed gradients.

        Args:
            batch: Of this rank's pipeline; it may be empty in a ragged global batch.
        """
        assert self._randomness is not None
        self._batch = batch
        self._randomness.begin(batch)
        self._shares.clear()
        self.losses, self.counts = [], []
        if self._groups is not None:
            self._groups.begin(batch)
        # In a ragged batch copies may have different tables, so actions cannot gather together.
        ragged = batch.samples != self._plan.batch.samples
        with self._weights.weights(each_action=not ragged):
            self._run(batch, record, node)

    def _run(self, batch: RankBatch, record: StepRecord, node: str) -> None:
        if not batch.micros:
            # The other copies wait in their sums for this rank, even if it has nothing to add.
            self._sum_late()
            return
        pipeline = self._pipeline_of(len(batch.micros))
        offset = time() - perf_counter()
        losses = pipeline.run([self._forward.prepare(micro.data) for micro in batch.micros])
        if self._groups is None and len(batch.micros) != self._plan.batch.parts:
            self._sum_late()
        shares = [self._shares[number] for number in sorted(losses)]
        self.losses = [share for share, _ in shares]
        self.counts = [count for _, count in shares]
        notes = self._notes[len(batch.micros)]
        record.spans += notes.spans(offset, node)
        record.messages += notes.messages()
        record.flights += notes.flights()

    def evaluate(self, batch: RankBatch, metrics: Metrics | None = None) -> list[tuple[Any, int]]:
        """What the loss, or metrics, return for the micro-batches that end here; in eval mode.

        Returns:
            Each with the number of samples.
        """
        function = self._forward.loss if metrics is None else metrics
        caller = LOSS if metrics is None else METRICS
        known, evaluation = self._evaluations.get(caller, (None, None))
        if evaluation is None or known is not function:
            evaluation = self._evaluate_with(function, caller)
            self._evaluations[caller] = function, evaluation
        with self._weights.weights():
            return evaluation.run(batch.micros, self._forward.prepare)

    def _evaluate_with(self, function: Loss | Metrics, caller: str) -> PipelineEvaluation:
        assert self.stages is not None
        return PipelineEvaluation(
            self.stages,
            self._pipelines[self._parts].schedule,
            self._team,
            function=partial(self._compute, function),
            caller=caller,
            arithmetic=self._forward.arithmetic,
            doing=self._doing,
        )

    # -- once ------------------------------------------------------------------------------------

    def cut(self, batch: RankBatch | None) -> None:
        """Cut the model by the first micro-batch of rank 0, which always has one; collective.

        Args:
            batch: Only that of rank 0, and of ranks that share its samples, is used.

        Raises:
            PlanError: The model cannot be cut so.
        """
        mesh = self._plan.mesh
        if not self._forward.model.training:
            self._forward.model.train()
        own = mesh.coordinate(self._world.rank).get(SPACE, 0)
        data = None
        # Of a sample that is read in parts each rank gets the part at its own place, so that no
        # rank needs memory for the whole sample.
        for place, source in enumerate(mesh.peers(0, SPACE)):
            own_data = batch.micros[0].data if batch is not None and batch.micros else None
            found = broadcast_batch(own_data, source)
            if place in (0, own):
                data = found
            # Whole samples are the same at all of these places: one broadcast is enough.
            if not isinstance(found, SampleParts):
                break
        in_parts = isinstance(data, SampleParts)
        if in_parts and self._plan.pipeline.balance == "time":
            raise PlanError(
                "the model cannot be cut into stages by measured time",
                problems=["samples are read in parts, and no rank has a whole one to measure with"],
                fix="Leave out pipeline.balance, name the cuts in pipeline.cut, or read whole "
                "samples.",
            )
        # `_loss` adopts the parts; of a model without split layers it calls the model itself.
        self._cut(self._forward.prepare(data), self._loss if in_parts else self._forward.loss)

    def _cut(self, data: Any, loss: Loss) -> None:
        forward, plan = self._forward, self._plan
        full = self._schedule(self._parts)
        self.stages = stages = partition_model(
            forward.model,
            loss,
            data,
            how=plan.pipeline,
            stages=full.stages,
            arithmetic=forward.arithmetic,
            remark=self._remark,
        )
        if self.metrics is not None:
            with forward.arithmetic():
                check_metrics_call(stages, self.metrics, data)
        full = replace(full, skips=stages.skips)
        sites = forward.probe(data, loss)
        self._randomness = StageRandomness(
            # Blockwise recomputation is the schedule's: a probe of the whole model does not see it.
            replace(sites, in_backward=sites.in_backward or full.blockwise),
            stages,
            lambda: self._run_all(stages, loss, data),
            self._seed,
        )
        table = lower(full, sync=plan.pipeline.sync)
        self._syncs = tuple(
            a.stage for a in table.order[self._team.rank] if a.kind == ActionKind.SYNC
        )
        self.ownership = parameter_ownership(stages, full, self._copies, self._world.rank)
        # From here on this rank has memory for its own stages only: the probes needed all.
        kept = self._weights.keep_own(self.ownership, stages, loss, data)
        self._team = replace(self._team, own=self._team.own + self._weights.own)
        self._team = self._with_streams(table)
        self._sums = StageGradientSync(stages, table, self._team, copies=self._copies, kept=kept)
        self._summed = _summed(stages, table, len(self._copies))
        self._pipelines[table.num_microbatches] = self._make(stages, table)

    def _with_streams(self, table: PipelineSchedule) -> PipelineRanks:
        world = self._world
        if (
            not self._plan.pipeline.shared_memory
            or world.device.type != "cpu"
            or world.backend != "gloo"
        ):
            return self._team
        nodes = find_nodes(world)
        return open_shared_memory_streams(
            self._team, table, lambda a, b: b in nodes.inside(a), timeout=world.timeout_seconds
        )

    def _run_all(self, stages: ModelStages, loss: Loss, data: Any) -> None:
        with self._forward.arithmetic():
            run_at_model_call(
                self._forward.model, loss, data, lambda call: run_stages(stages, call)
            )

    @property
    def _parts(self) -> int:
        """Micro-batches of a full batch."""
        assert self._plan.batch.parts is not None
        return self._plan.batch.parts

    def _schedule(self, parts: int) -> PipelineSchedule:
        return self._plan.pipeline.make(self._plan.pipe_degree, parts)

    def _pipeline_of(self, parts: int) -> Pipeline:
        if parts not in self._pipelines:
            assert self.stages is not None
            schedule = replace(self._schedule(parts), skips=self.stages.skips)
            # In a ragged batch copies may have different tables, and a SYNC in one would wait for a
            # different stage in another: with a flush they sum afterwards (`_sum_late`). Without a
            # flush all have the same table (`check_last_batch`).
            sync = "none" if schedule.flush else self._plan.pipeline.sync
            self._pipelines[parts] = self._make(self.stages, lower(schedule, sync=sync))
        return self._pipelines[parts]

    def _make(self, stages: ModelStages, table: PipelineSchedule) -> Pipeline:
        row = table.order[self._team.rank]
        steps = Counter(action.stage for action in row if action.kind == ActionKind.STEP)
        made: Counter[int] = Counter()

        def step(stage: int) -> None:
            made[stage] += 1
            # The count runs on over all steps of the recipe, as the pipeline is kept.
            last = made[stage] % steps[stage] == 0
            if self._groups is not None:  # with a flush the strategy updates all stages at once
                self._update_stage(stages[stage].parameters.values(), last)

        assert self._randomness is not None
        calls = PipelineCallbacks(
            loss=self._loss,
            share=self._share,
            around=self._around,
            entering=self._randomness.entering,
            sync=self._sums,
            step=step,
            doing=self._doing,
        )
        pipeline = Pipeline(stages, table, self._team, calls)
        self._notes[table.num_microbatches] = PipelineTrace(
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
        return share / self._plan.mesh.degree(SPACE)  # each of these ranks has the whole loss

    def _loss(self, model: Any, data: Any) -> Any:
        return self._compute(self._forward.loss, model, data)

    def _compute(self, function: Loss | Metrics, model: Any, data: Any) -> Any:
        model = self._weights.entering(model)
        return function(model, data if self._inputs is None else self._inputs(data))

    def _around(self, stage: int, microbatch: int, phase: str) -> AbstractContextManager[Any]:
        assert self._randomness is not None
        stack = ExitStack()
        stack.enter_context(self._weights.at(stage))
        # torch wants autocast around forward passes only: backward runs in their types.
        if phase != "backward":
            stack.enter_context(self._forward.arithmetic())
        stack.enter_context(self._randomness.around(stage, microbatch, phase))
        return stack

    def _sum_late(self) -> None:
        """Sum over the copies of this rank's stages, where the table does not."""
        assert self._sums is not None
        for stage in self._syncs:
            self._sums.start(stage)
        for stage in self._syncs:
            self._sums.wait(stage)

    def _doing(self, action: Action) -> None:
        self._world.doing("waits in cell %s", action)


def _own(context: SpatialContext) -> tuple[Any, ...]:
    everyone = () if context.everyone is None else (context.everyone,)
    return context, *context.axes.values(), *everyone


def _copies(plan: Plan, rank: int) -> list[tuple[int, ...]]:
    """The ranks of every copy of the pipeline with the same parts of layers as this rank."""
    place = plan.mesh.coordinate(rank)
    apart = [
        name for name in plan.mesh.names if name not in (plan.exchange.axis, SHARD_AXIS, SPACE)
    ]
    # One rank stands for each pipeline: the one on its first place.
    first = {name: 0 if name == PIPE_AXIS else place[name] for name in apart}
    return [
        plan.mesh.peers(other, PIPE_AXIS)
        for other in range(plan.ranks)
        if all(plan.mesh.coordinate(other)[name] == first[name] for name in apart)
    ]


def _summed(
    stages: ModelStages, table: PipelineSchedule, copies: int
) -> dict[int, StageGradientSum]:
    """The gradient sums of stages with several copies."""
    found = {}
    for stage in stages:
        holders = copies * len(table.holders(stage.number))
        trained = {n: p for n, p in stage.parameters.items() if p.requires_grad}
        if holders > 1 and trained:
            size = sum(p.numel() * p.element_size() for p in trained.values())
            found[stage.number] = StageGradientSum(tuple(trained), size, holders)
    return found
