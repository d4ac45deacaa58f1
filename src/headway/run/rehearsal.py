"""What the operators of a split model send in a pass: found by carrying it out on stand-ins.

The executor's own rules, stages and cuts, with tensors without numbers and groups that move nothing
(`Grid.dry`, `run.spatial.dry_context`): no process but this one takes part, and nothing of the
model's size is allocated. Invariant: each kind of action is carried out twice, and the second time
counts, as in the steps of a run.
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
from headway.capture.fake import Pretence
from headway.collective.calls import Call, Part, Phase, Tell, merged
from headway.graph import TensorSpec
from headway.parallel import Stages, Team
from headway.parallel.layout import Layout
from headway.parallel.row import Calls as Called
from headway.parallel.row import Row
from headway.parallel.state_sharding import groups_of
from headway.parallel.tensor import Decisions, Grid, Home, Settings, Split, obey, survey
from headway.parallel.tensor.hold import hold
from headway.plan import Plan
from headway.plan.layer_split import SPACE, TENSOR
from headway.run.model_costs import example_of
from headway.run.parts import sum_and_count
from headway.run.recipe import Loss
from headway.run.recipe_file import load_recipe
from headway.run.spatial import SpatialInputs, dry_context
from headway.run.stage_cut import cut_as_planned
from headway.run.stage_layers import entering
from headway.run.trees import resize, to_device
from headway.schedule import Action, Kind, Pipe, PipelineSchedule

Found = Mapping[int, tuple[Part, ...]]
"""Samples of a micro-batch -> the stages."""
HALVES = (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
TWICE = 2
"""Micro-batches of a rehearsal that are carried out alike."""


def rehearsed(plan: Plan, model: nn.Module, loss: Loss, data: Any, *, rank: int = 0) -> Found:
    """What a rank's operators send, and what the stages hold and hand on, by micro-batch.

    Args:
        plan: A legal one.
        model: Whole, in training mode; it is not changed, and may be on the meta device.
        loss: Of the recipe.
        data: Of a micro-batch of any size.
        rank: Which.

    Raises:
        PlanError: The model cannot be split or cut so, or only by what is measured.
    """
    return _Rehearsal(plan, model, loss, data, rank).found()


def rehearsed_recipe(plan: Plan, reference: str, ranks: Sequence[int]) -> list[Found]:
    """The same of a recipe's model, rank by rank.

    Args:
        plan: A legal one.
        reference: As for `headway train`.
        ranks: Which.

    Raises:
        PlanError: As of `rehearsed`.
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference)
    with torch.device("meta"), building():
        model = recipe.model()
    data = example_of(recipe, 1)
    return [rehearsed(plan, model, recipe.loss, data, rank=rank) for rank in ranks]


@dataclass
class _Notes:
    """What was told, by stage and kind of action; an action carried out again counts anew."""

    calls: dict[tuple[int, str], list[Call]] = field(default_factory=dict)
    phase: Phase = "forward"
    _now: list[Call] = field(default_factory=list)

    def begin(self, stage: int, kind: str, phase: Phase, *, anew: bool = True) -> None:
        if anew:
            self.calls[stage, kind] = []
        self._now, self.phase = self.calls[stage, kind], phase

    def on(self, axis: str) -> Tell:
        """For operations along an axis of the plan's mesh."""

        def tell(kind: Any, ranks: int, size: float) -> None:
            self._now.append(Call(kind=kind, axis=axis, ranks=ranks, bytes=size, phase=self.phase))

        return tell

    def passes(self, stage: int) -> dict[str, tuple[Call, ...]]:
        return {kind: merged(calls) for (at, kind), calls in self.calls.items() if at == stage}


class _Rehearsal:
    def __init__(self, plan: Plan, model: nn.Module, loss: Loss, data: Any, rank: int) -> None:
        self._plan, self._loss, self._rank = plan, loss, rank
        self._notes, self._pretence = _Notes(), Pretence()
        self._model = self._pretence.model(model)
        self._model.train()
        self._dtype = torch.float64 if plan.memory.precision == "float64" else None
        if self._dtype is not None:
            with self._pretence.mode:
                _to_float64(self._model)
        self._example = data
        self._first = self._data(plan.micro_sizes(0)[0])
        self._inputs: Callable[[Any], Any] = lambda given: given
        self._own: tuple[Any, ...] = ()
        if plan.split.spatial:
            self._inputs = SpatialInputs(plan, dry_context(plan, rank, self._notes.on(SPACE)))

    def found(self) -> Found:
        """See `rehearsed`."""
        sizes = dict.fromkeys(self._plan.micro_sizes(self._rank))
        if self._plan.pipe_degree > 1:
            return self._staged(list(sizes))
        split = self._split(self._model) if self._plan.split.tensor else None
        return {size: (self._whole(size, split),) for size in sizes}

    def _data(self, samples: int) -> Any:
        given = to_device(resize(self._example, samples), torch.device("cpu"), self._dtype)
        return self._pretence.tree(given)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        if self._plan.memory.precision == "bfloat16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return nullcontext()

    # -- layers ----------------------------------------------------------------------------------

    def _decided(self) -> Decisions:
        said, grid = self._plan.split, self._plan.split.grid
        assert grid is not None
        return survey(
            self._model, self._loss, self._first, grid,
            whole=said.whole, only=said.only, by=said.others,
        )  # fmt: skip

    def _split(self, model: nn.Module, decisions: Decisions | None = None) -> Split:
        plan, tell = self._plan, self._notes.on(TENSOR)
        decided = decisions or self._decided()
        kinds = {decided.plan, *(other for _, other in plan.split.others)}
        grids = {one: Grid.dry(one, tell) for one in kinds}
        sharded = plan.memory.zero and plan.data_degree > 1
        own = grids[decided.plan]
        with self._pretence.mode:
            return obey(
                model, own, decided, home=Home.of(own), grids=grids,
                settings=Settings(ahead=plan.pipe_degree == 1 and not sharded),
            )  # fmt: skip

    # -- the whole model -------------------------------------------------------------------------

    def _whole(self, samples: int, split: Split | None) -> Part:
        data, notes = self._data(samples), self._notes
        for _ in range(TWICE):
            with self._pretence.mode:
                notes.begin(0, Kind.FORWARD, "forward")
                with self._arithmetic():
                    value = self._loss(self._model, self._inputs(data))
                    total, _ = sum_and_count(value, samples)
                notes.begin(0, Kind.BACKWARD, "backward")
                total.backward()
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        groups = [[names[p] for p in module.parameters()] for module in groups_of(self._model)]
        return self._part(dict(self._model.named_parameters()), 0, split, gathered=groups)

    def _part(
        self,
        parameters: Mapping[str, nn.Parameter],
        stage: int,
        split: Split | None,
        **more: Any,
    ) -> Part:
        specs = {name: _spec(parameter) for name, parameter in parameters.items()}
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        return Part(
            parameters={name: spec for name, spec in specs.items() if name in trained},
            frozen={name: spec for name, spec in specs.items() if name not in trained},
            passes=self._notes.passes(stage),
            cuts={} if split is None else {name: _axes(split, name) for name in specs},
            **more,
        )

    # -- stages ----------------------------------------------------------------------------------

    def _staged(self, sizes: Sequence[int]) -> Found:
        plan = self._plan
        assert plan.batch.parts is not None
        full = plan.pipeline.make(plan.pipe_degree, plan.batch.parts)
        stages = cut_as_planned(
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
            split = self._split(stages.model, self._decided())
            for stage in stages:
                hold(stage.module, split.context, split.keys, root=None)
        return {size: self._stages(size, stages, split, full) for size in sizes}

    def _stages(
        self, samples: int, stages: Stages, split: Split | None, full: PipelineSchedule
    ) -> tuple[Part, ...]:
        table, data = _alone(full, stages.skips), self._data(samples)

        def compute(model: Any, given: Any) -> Any:
            return self._loss(entering(model, split), self._inputs(given))

        def share(value: Any, _: int) -> Tensor:
            return sum_and_count(value, samples)[0]

        with self._pretence.mode:
            calls = Called(loss=compute, share=share, around=_Around(self._notes, self._arithmetic))
            row = Row(stages, table, Team(rank=0, ranks=(0,)), calls)
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
    """Tells the notes which action of `_alone` begins."""

    notes: _Notes
    arithmetic: Callable[[], AbstractContextManager[Any]]
    begun: set[tuple[int, int, Kind]] = field(default_factory=set)
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

    def _kind(self, stage: int, microbatch: int, phase: str) -> Kind:
        if phase == "forward":
            return Kind.FORWARD
        if microbatch < TWICE:
            return Kind.BACKWARD
        if (stage, microbatch) in self.inputs:
            return Kind.WEIGHT_GRAD
        if phase == "backward":
            self.inputs.add((stage, microbatch))
        return Kind.INPUT_GRAD


def _alone(full: PipelineSchedule, skips: Sequence[tuple[int, int]]) -> PipelineSchedule:
    """One rank that has all stages: two micro-batches one after the other, then two whose backward
    comes in halves, where the table has such."""
    ways: list[tuple[Kind, ...]] = [(Kind.BACKWARD,)] * TWICE
    if any(action.kind == Kind.INPUT_GRAD for _, action in full.actions()):
        ways += [HALVES] * TWICE
    order: list[Action] = []
    for number, kinds in enumerate(ways):
        order += [Action(Kind.FORWARD, "d0", stage, number) for stage in full.every_stage]
        for stage in reversed(full.every_stage):
            order += [Action(kind, "d0", stage, number) for kind in kinds]
    return PipelineSchedule(
        name="rehearsal",
        pipes=(Pipe("d0", (0,) * full.stages, tuple(range(len(ways)))),),
        order=(tuple(order),),
        recompute=full.recompute,
        blockwise=full.blockwise,
        skips=tuple(skips),
    )


def _messages(layout: Layout) -> list[tuple[int, bool]]:
    """The tensors of a message, and whether their gradients come back."""
    flows = [form.flows for form in layout.forms if form is not None]
    flows += [False] * (len(layout.packed) - len(flows))
    return [
        (math.prod(form.shape) * form.dtype.itemsize, back)
        for form, back in zip(layout.packed, flows, strict=True)
    ]


def _to_float64(model: nn.Module) -> None:
    """As `run.parts.to_float64`; torch cannot convert a module of stand-ins."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            tensor.data = tensor.data.to(wide)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _axes(split: Split, name: str) -> tuple[tuple[str, int], ...]:
    """Along which a parameter is cut, those of another grid under other names."""
    key = split.keys[name]
    held = [(axis, size) for axis, size in key.grid.plan.sizes if size > 1]
    cut = {axis for one in key.cuts for axis in one.axes}
    grid = "".join(f"{axis}{size}" for axis, size in held)
    return tuple((f"{grid}.{axis}", size) for axis, size in held if axis in cut)
