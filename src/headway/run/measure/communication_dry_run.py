"""Dry run of a plan: lists the operations that a split model would start in a pass.

Runs the executor's own rules, stages and cuts with fake tensors and groups that move nothing
(`Grid.dry`, `dry_run_spatial_context`): one process, and nothing of the model's size is allocated.
Each kind of action runs twice and the second time counts, because the first one also does what is
done only once in a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headway.capture.annotations import building
from headway.capture.fake_tensors import FakeContext
from headway.collective.collective_calls import (
    CallListener,
    CollectiveCall,
    CommunicatingStage,
    Phase,
    merge_calls,
)
from headway.graph.model_graph import TensorSpec
from headway.parallel.fsdp import fsdp_units
from headway.parallel.pipeline.runtime.executor import PipelineCallbacks as Called
from headway.parallel.pipeline.runtime.executor import PipelineRanks, RankActions
from headway.parallel.pipeline.runtime.p2p import MessageFormat
from headway.parallel.split_layers.parameters import ParameterPlacement, install_parameter_access
from headway.parallel.split_layers.split_model import SplitModel, apply_split_decisions
from headway.parallel.stages import ModelStages
from headway.parallel.tensor.grid import ProcessGrid
from headway.parallel.tensor.layer_context import SplitSettings
from headway.plans import Plan
from headway.plans.layer_split import SPACE, TENSOR
from headway.run.pipeline.stage_ownership import partition_model
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.recipe import Loss, sum_and_count
from headway.run.step.batch import (
    SpatialInputs,
    dry_run_spatial_context,
    example_batch,
    resize_batch,
    to_device,
)
from headway.run.step.forward_pass import autocast, float_dtype, to_float64
from headway.run.strategy.split_layers import infer_plan_split, with_split_inputs
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe

StagesBySamples = Mapping[int, tuple[CommunicatingStage, ...]]
"""Samples of a micro-batch -> the stages."""
HALVES = (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
REPEATS = 2  # the first micro-batch also does what is done once in a run; the second counts


def dry_run(
    plan: Plan, model: nn.Module, loss: Loss, data: Any, *, rank: int = 0
) -> StagesBySamples:
    """What a rank's operators send, and what the stages hold and hand on, by micro-batch.

    Args:
        model: Whole, in training mode; it is not changed, and may be on the meta device.

    Raises:
        PlanError: The model cannot be split or cut so, or only by what is measured.
    """
    return _DryRun(plan, model, loss, data, rank).found()


def dry_run_recipe(plan: Plan, reference: str, ranks: Sequence[int]) -> list[StagesBySamples]:
    """The same of a recipe's model, rank by rank.

    Raises:
        PlanError: As of `dry_run`.
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference)
    with torch.device("meta"), building():
        model = recipe.model()
    data = example_batch(recipe, 1)
    return [dry_run(plan, model, recipe.loss, data, rank=rank) for rank in ranks]


@dataclass
class _CallLog:
    """Collective calls by stage and kind of action; a repeated action replaces the earlier one."""

    calls: dict[tuple[int, str], list[CollectiveCall]] = field(default_factory=dict)
    phase: Phase = "forward"
    _now: list[CollectiveCall] = field(default_factory=list)

    def begin(self, stage: int, kind: str, phase: Phase, *, anew: bool = True) -> None:
        if anew:
            self.calls[stage, kind] = []
        self._now, self.phase = self.calls[stage, kind], phase

    def on(self, axis: str) -> CallListener:
        """For operations along an axis of the plan's mesh."""

        def tell(kind: Any, ranks: int, size: float) -> None:
            self._now.append(
                CollectiveCall(kind=kind, axis=axis, ranks=ranks, bytes=size, phase=self.phase)
            )

        return tell

    def passes(self, stage: int) -> dict[str, tuple[CollectiveCall, ...]]:
        return {kind: merge_calls(calls) for (at, kind), calls in self.calls.items() if at == stage}


class _DryRun:
    def __init__(self, plan: Plan, model: nn.Module, loss: Loss, data: Any, rank: int) -> None:
        self._plan, self._loss, self._rank = plan, loss, rank
        self._notes, self._pretence = _CallLog(), FakeContext()
        self._model = self._pretence.model(model)
        self._model.train()
        self._dtype = float_dtype(plan.memory.precision)
        if self._dtype is not None:
            with self._pretence.mode:
                to_float64(self._model)
        self._example = data
        self._first = self._data(plan.micro_sizes(0)[0])
        self._inputs: Callable[[Any], Any] = lambda given: given
        if plan.split.spatial:
            self._inputs = SpatialInputs(
                plan, dry_run_spatial_context(plan, rank, self._notes.on(SPACE))
            )

    def found(self) -> StagesBySamples:
        """See `dry_run`."""
        sizes = dict.fromkeys(self._plan.micro_sizes(self._rank))
        if self._plan.pipe_degree > 1:
            return self._staged(list(sizes))
        split = self._split(self._model) if self._plan.split.tensor else None
        return {size: (self._whole(size, split),) for size in sizes}

    def _data(self, samples: int) -> Any:
        given = to_device(resize_batch(self._example, samples), torch.device("cpu"), self._dtype)
        return self._pretence.tree(given)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return autocast(self._plan.memory.precision, torch.device("cpu"))

    # -- layers ----------------------------------------------------------------------------------

    def _split(self, model: nn.Module) -> SplitModel:
        plan, tell = self._plan, self._notes.on(TENSOR)
        decided = infer_plan_split(plan, self._model, self._loss, self._first)
        kinds = {decided.plan, *(other for _, other in plan.split.others)}
        grids = {one: ProcessGrid.dry(one, tell) for one in kinds}
        sharded = plan.memory.zero and plan.data_degree > 1
        own = grids[decided.plan]
        with self._pretence.mode:
            return apply_split_decisions(
                model, own, decided, home=ParameterPlacement.of(own), grids=grids,
                settings=SplitSettings(ahead=plan.pipe_degree == 1 and not sharded),
            )  # fmt: skip

    # -- the whole model -------------------------------------------------------------------------

    def _whole(self, samples: int, split: SplitModel | None) -> CommunicatingStage:
        data, notes = self._data(samples), self._notes
        for _ in range(REPEATS):
            with self._pretence.mode:
                notes.begin(0, ActionKind.FORWARD, "forward")
                with self._arithmetic():
                    value = self._loss(self._model, self._inputs(data))
                    total, _ = sum_and_count(value, samples)
                notes.begin(0, ActionKind.BACKWARD, "backward")
                total.backward()
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        groups = [[names[p] for p in module.parameters()] for module in fsdp_units(self._model)]
        return self._part(dict(self._model.named_parameters()), 0, split, gathered=groups)

    def _part(
        self,
        parameters: Mapping[str, nn.Parameter],
        stage: int,
        split: SplitModel | None,
        **more: Any,
    ) -> CommunicatingStage:
        specs = {name: _spec(parameter) for name, parameter in parameters.items()}
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        return CommunicatingStage(
            parameters={name: spec for name, spec in specs.items() if name in trained},
            frozen={name: spec for name, spec in specs.items() if name not in trained},
            passes=self._notes.passes(stage),
            cuts={} if split is None else {name: _axes(split, name) for name in specs},
            **more,
        )

    # -- stages ----------------------------------------------------------------------------------

    def _staged(self, sizes: Sequence[int]) -> StagesBySamples:
        plan = self._plan
        assert plan.batch.parts is not None
        full = plan.pipeline.make(plan.pipe_degree, plan.batch.parts)
        stages = partition_model(
            self._model,
            self._loss,
            self._first,
            how=plan.pipeline,
            stages=full.stages,
            arithmetic=self._arithmetic,
            remark=lambda text: None,
        )
        split = None
        if plan.split.tensor:
            split = self._split(stages.model)
            for stage in stages:
                install_parameter_access(stage.module, split.context, split.keys, root=None)
        return {size: self._stages(size, stages, split, full) for size in sizes}

    def _stages(
        self, samples: int, stages: ModelStages, split: SplitModel | None, full: PipelineSchedule
    ) -> tuple[CommunicatingStage, ...]:
        table, data = _alone(full, stages.skips), self._data(samples)

        def compute(model: Any, given: Any) -> Any:
            return self._loss(with_split_inputs(model, split), self._inputs(given))

        def share(value: Any, _: int) -> Tensor:
            return sum_and_count(value, samples)[0]

        with self._pretence.mode:
            calls = Called(loss=compute, share=share, around=_Around(self._notes, self._arithmetic))
            row = RankActions(stages, table, PipelineRanks(rank=0, ranks=(0,)), calls)
            row.run([data] * table.num_microbatches)
        sends = [
            {b: _messages(layout) for (a, b), layout in row.layouts.items() if a == stage.number}
            for stage in stages
        ]
        return tuple(
            self._part(stage.parameters, stage.number, split, sends=sends[stage.number])
            for stage in stages
        )


@dataclass
class _Around:
    """Tells the log which action of `_alone` begins."""

    notes: _CallLog
    arithmetic: Callable[[], AbstractContextManager[Any]]
    begun: set[tuple[int, int, ActionKind]] = field(default_factory=set)
    inputs: set[tuple[int, int]] = field(default_factory=set)

    @contextmanager
    def __call__(self, stage: int, microbatch: int, phase: str) -> Iterator[None]:
        kind = self._kind(stage, microbatch, phase)
        key = stage, microbatch, kind
        passing: Phase = "backward" if phase == "backward" else "forward"
        self.notes.begin(stage, kind, passing, anew=key not in self.begun)
        self.begun.add(key)
        with nullcontext() if phase == "backward" else self.arithmetic():
            yield

    def _kind(self, stage: int, microbatch: int, phase: str) -> ActionKind:
        if phase == "forward":
            return ActionKind.FORWARD
        if microbatch < REPEATS:
            return ActionKind.BACKWARD
        if (stage, microbatch) in self.inputs:
            return ActionKind.WEIGHT_GRAD
        if phase == "backward":
            self.inputs.add((stage, microbatch))
        return ActionKind.INPUT_GRAD


def _alone(full: PipelineSchedule, skips: Sequence[tuple[int, int]]) -> PipelineSchedule:
    """One rank that has all stages: two micro-batches one after the other, then two whose backward
    comes in halves, where the table has such."""
    ways: list[tuple[ActionKind, ...]] = [(ActionKind.BACKWARD,)] * REPEATS
    if any(action.kind == ActionKind.INPUT_GRAD for _, action in full.actions()):
        ways += [HALVES] * REPEATS
    order: list[Action] = []
    for number, kinds in enumerate(ways):
        order += [Action(ActionKind.FORWARD, "d0", stage, number) for stage in full.every_stage]
        for stage in reversed(full.every_stage):
            order += [Action(kind, "d0", stage, number) for kind in kinds]
    return PipelineSchedule(
        name="dry run",
        pipes=(SchedulePipe("d0", (0,) * full.stages, tuple(range(len(ways)))),),
        order=(tuple(order),),
        recompute=full.recompute,
        blockwise=full.blockwise,
        skips=tuple(skips),
    )


def _messages(layout: MessageFormat) -> list[tuple[int, bool]]:
    """The tensors of a message, and whether their gradients come back."""
    flows = [form.flows for form in layout.forms if form is not None]
    flows += [False] * (len(layout.packed) - len(flows))
    return [
        (math.prod(form.shape) * form.dtype.itemsize, back)
        for form, back in zip(layout.packed, flows, strict=True)
    ]


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _axes(split: SplitModel, name: str) -> tuple[tuple[str, int], ...]:
    """Along which a parameter is cut, those of another grid under other names."""
    key = split.keys[name]
    held = [(axis, size) for axis, size in key.grid.plan.sizes if size > 1]
    cut = {axis for one in key.cuts for axis in one.axes}
    grid = "".join(f"{axis}{size}" for axis, size in held)
    return tuple((f"{grid}.{axis}", size) for axis, size in held if axis in cut)
