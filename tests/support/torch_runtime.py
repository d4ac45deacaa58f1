"""Carries out headway's tables on torch's own pipelining runtime: a second, independent executor.

The one file that touches torch's private `_PipelineScheduleRuntime`. Torch sends the messages, runs
the backwards and splits them in two; ours are the table, the stages, the loss and the sums. It is
there to be compared with `headway.parallel.Pipeline`, whose interface it has: `run` leaves the same
losses and gradients, or the table is refused with all reasons. Source of what is used here:
torch.distributed.pipelining (schedules.py, stage.py) of torch 2.11 to 2.14.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from headway.errors import PlanError, RunError
from headway.parallel import record_call
from headway.parallel.fsdp import defer_gradient_sync, explain_fsdp_conflicts
from headway.parallel.pipeline.partition.tracing import preserve_model_state
from headway.parallel.pipeline.runtime.executor import PipelineCallbacks, PipelineRanks
from headway.parallel.pipeline.runtime.stage_execution import Phase
from headway.parallel.stages import (
    MODEL_INPUT,
    ModelCall,
    ModelProxy,
    ModelStages,
    Stage,
    StageCompleted,
    TreeSpec,
    flatten,
    is_payload,
)
from headway.schedule.csv_format import to_torch_csv
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import ActionKind, PipelineSchedule, SchedulePipe

_HAVE = "torch 2.11 to 2.14 have it"
_Passed = tuple[tuple[Tensor, ...], TreeSpec]
"""The tensors that a stage gives to the next, and of what they are part."""
_NOTHING: _Passed = (), flatten([], is_payload)[1]
_RUNTIME: Any = getattr(schedules, "_PipelineScheduleRuntime", None)
_TURNS = torch.__version__ >= "2.12"
"""Whether a rank may hold two neighbouring stages; before, torch sends itself a message."""
_WITHOUT_GRADIENT = torch.__version__ >= "2.13"
"""Whether torch passes tensors that need no gradient; before, it waits for one all the same."""


class TorchPipeline:
    """One rank of a pipeline, on torch's runtime.

    Args:
        stages: Of the model; cut alike on all ranks. Stages pass tensors, to the next stage only.
        schedule: A checked table with a flush; its messages are placed anew.
        team: The ranks; its group consists of them, in their order.
        calls: The user's and the caller's functions; `doing` is not called.

    Raises:
        PlanError: What torch's runtime cannot do, all of it.
        RunError: This torch does not have the runtime.
    """

    def __init__(
        self,
        stages: ModelStages,
        schedule: PipelineSchedule,
        team: PipelineRanks,
        calls: PipelineCallbacks,
    ) -> None:
        if _RUNTIME is None:
            raise RunError(
                f"torch {torch.__version__} has no _PipelineScheduleRuntime",
                why=f"It is private, and {_HAVE}.",
                fix="Use headway.parallel.Pipeline, which needs public interfaces only.",
            )
        _check(stages, schedule, team, calls)
        self.stages = stages
        self.remarks = defer_gradient_sync(
            [stages[number] for _, number in schedule.hosted(team.rank)]
        )
        # Torch's messages have no tags: both ranks of a pair go through them in one order.
        self.schedule = lower(schedule, tags=False)
        self._team = team
        self._calls = calls
        self._data: list[Any] = [None] * schedule.num_microbatches
        self._runtime: Any = None
        self._running: list[_Stage] = []

    def run(self, microbatches: Sequence[Any]) -> dict[int, Tensor]:
        """One step; see `Pipeline.run`.

        Args:
            microbatches: All of the table, on every rank; of the same sizes in all steps.

        Returns:
            Micro-batch -> what `share` made, of those whose last stage is on this rank.
        """
        wanted = self.schedule.num_microbatches
        if len(microbatches) != wanted:
            raise ValueError(f"{len(microbatches)} micro-batches for a table of {wanted}")
        self.stages.check()
        self._data[:] = microbatches
        if self._runtime is None:
            self._make(microbatches[0])
        for stage in self._running:
            stage.has_backward = True
            stage.clear_runtime_states()
        kwargs = [{"number": n} for n in range(len(self.schedule.pipes[0].microbatches))]
        # Not `step`, which cuts tensors into micro-batches: ours are whatever the loss takes.
        self._runtime._step_microbatches([()] * len(kwargs), kwargs, None, None, False)
        self._finish()
        self._data[:] = [None] * wanted
        losses: dict[int, Tensor] = {}
        for stage in self._running:
            losses.update(stage.part.losses)
            stage.part.losses.clear()
        return losses

    def _make(self, data: Any) -> None:
        """The runtime, once an example has shown what goes from stage to stage."""
        passed = _passed(self.stages, record_call(self._calls.loss, self.stages.model, data))
        schedule, team = self.schedule, self._team
        pipes = {pipe.name: pipe for pipe in schedule.pipes}
        share: _Passed = (torch.empty((), device=team.device),), _NOTHING[1]
        for name, number in schedule.hosted(team.rank):
            before = passed[number - 1] if number else _NOTHING
            after = passed[number] if number < len(passed) else share
            part = _Part(self.stages, number, pipes[name], self._calls, self._data, before[1])
            first = list(pipes).index(name) * schedule.stages
            self._running.append(
                _Stage(
                    part,
                    first + number,
                    schedule.stages * len(pipes),
                    team.device,
                    input_args=before[0],
                    output_args=after[0],
                    group=team.group,
                )
            )
        self._running.sort(key=lambda stage: stage.stage_index)
        count = len(schedule.pipes[0].microbatches)
        self._runtime = _Runtime(self._running, count)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "table.csv")
            file.write_text(to_torch_csv(schedule), encoding="utf-8")
            self._runtime._load_csv(str(file), format="compute_comms")

    def _finish(self) -> None:
        """What torch's tables leave out: WAIT and STEP, in the order of the row."""
        for action in self.schedule.order[self._team.rank]:
            if action.kind == ActionKind.WAIT:
                assert self._calls.sync is not None
                self._calls.sync.wait(action.stage)
            elif action.kind == ActionKind.STEP:
                assert self._calls.step is not None
                self._calls.step(action.stage)


class _Runtime(_RUNTIME or object):  # type: ignore[misc]
    """Torch's, where the last stage has computed the loss (and kept it) in its forward."""

    def __init__(self, stages: list[_Stage], num_microbatches: int) -> None:
        super().__init__(stages, num_microbatches, loss_fn=_no_loss, scale_grads=False)

    def _maybe_compute_loss(self, *_: Any) -> None:
        pass

    def _maybe_get_loss(self, stage: _Stage, mb_index: int) -> Tensor | None:
        return stage.fwd_cache[mb_index][0][0] if stage.is_last else None


def _no_loss(output: Any, target: Any) -> Any:
    """Torch has to be given one, and does not call it."""


class _Part(nn.Module):
    """A stage as torch sees it: tensors in, tensors out, the loss at the end.

    Args:
        number: Of the stage in its pipe.
        data: Of all micro-batches; filled by each step.
        structure: Of what comes from the stage before.

    Attributes:
        losses: Micro-batch -> what `share` made.
    """

    def __init__(
        self,
        stages: ModelStages,
        number: int,
        pipe: SchedulePipe,
        calls: PipelineCallbacks,
        data: list[Any],
        structure: TreeSpec,
    ) -> None:
        super().__init__()
        self.stage: Stage = stages[number]
        self.module = self.stage.module
        held = {name for name, _ in self.module.named_parameters()}
        others = [p for name, p in self.stage.parameters.items() if name not in held]
        self.of_loss = nn.ParameterList(others)
        self.number = number
        self.losses: dict[int, Tensor] = {}
        self._stages, self._pipe, self._calls, self._data = stages, pipe, calls, data
        self._is_last = number == len(stages) - 1
        self._stand_in = ModelProxy(stages.model, self._run, stages.foreign)
        self._structure = structure
        self._values: Sequence[Any] = ()

    def around(self, number: int, phase: Phase) -> AbstractContextManager[Any]:
        if self._calls.around is None:
            return nullcontext()
        return self._calls.around(self.number, self._pipe.microbatches[number], phase)

    def sync(self) -> None:
        assert self._calls.sync is not None
        self._calls.sync.start(self.number)

    def forward(self, *values: Tensor, number: int) -> Any:
        """The tensors for the next stage; on the last one the share of the loss.

        Args:
            number: Of the micro-batch in its pipe.
        """
        microbatch = self._pipe.microbatches[number]
        # What torch hands over are leaves, which a stage may not change in place.
        own = [v.clone() for v in values] if self.stage.alters else values
        self._values = self._structure.rebuild(own)
        with self.around(number, "forward"):
            value = self._stand_in.compute(self._calls.loss, self._data[microbatch])
            if not self._is_last:
                return tuple(map(_whole, flatten(list(self._values), is_payload)[0]))
            share = self._calls.share(value, microbatch)
            self.losses[microbatch] = share.detach().clone()
            # Torch 2.11 wants the type it was told; the gradient is 1 in any.
            return _whole(share.float())

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs: Sequence[Any] = ()
        if self.stage.uses_inputs:
            inputs = self._stages.leaves_of(args, kwargs)
        if self._calls.entering is not None:
            self._calls.entering(self.number)
        result = self.module.forward(*_entering(self.stage, inputs, self._values))
        if self._is_last:
            return result
        self._values = result
        raise StageCompleted


def _entering(stage: Stage, inputs: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """A stage's arguments; all that the stage before gives comes here, in that order."""
    return [inputs[e.leaf] if e.source == MODEL_INPUT else before[e.leaf] for e in stage.takes]


def _whole(tensor: Tensor) -> Tensor:
    """Neither a view (torch detaches in place what a stage returns) nor with gaps in memory."""
    if tensor._is_view() or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class _Stage(PipelineStage):
    """A stage of one of several pipes; torch numbers them through.

    What torch gives to the next number on this rank is dropped where that is in another pipe.
    """

    part: _Part

    def __init__(self, part: _Part, *args: Any, **kwargs: Any) -> None:
        self.part = part  # torch asks for the properties below while it is built
        super().__init__(part, *args, **kwargs)

    @property
    def is_first(self) -> bool:
        return self.part.number == 0

    @property
    def is_last(self) -> bool:
        return self.part._is_last

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if not self.is_first:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        if self.is_first:
            return None
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self.is_last:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        outputs, inputs = self.fwd_cache[bwd_chunk_id]
        # Before 2.13 torch asks every input for its gradient, the number of the micro-batch, too.
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        self.fwd_cache[bwd_chunk_id] = (outputs, tensors)
        with self.part.around(bwd_chunk_id, "backward"):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        found = self.bwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in found)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        # Torch takes number 0 for the only stage without inputs; every pipe has one.
        index, self.stage_index = self.stage_index, self.part.number
        with self.part.around(bwd_chunk_id, "backward"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.stage_index = index

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.part.sync()


def _passed(stages: ModelStages, call: ModelCall) -> list[_Passed]:
    """What each stage but the last gives to the next, for an example.

    Raises:
        PlanError: Something that this torch does not pass.
    """
    found: list[Sequence[Any]] = []
    with torch.enable_grad(), preserve_model_state(stages.model):
        for stage in stages.stages[:-1]:
            values = _entering(stage, call.leaves, found[-1] if found else ())
            found.append(stage.module.forward(*values))
    return [_tensors(number, given) for number, given in enumerate(found)]


def _tensors(number: int, given: Sequence[Any]) -> _Passed:
    leaves, structure = flatten(list(given), is_payload)
    others = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)})
    problems = []
    if others:
        problems.append(f"stage {number} gives {', '.join(others)}; torch passes tensors only")
    elif not (_WITHOUT_GRADIENT or all(leaf.requires_grad for leaf in leaves)):
        problems.append(
            f"stage {number} gives a tensor without a gradient; torch {torch.__version__} passes "
            "only tensors with one, torch 2.13 passes both"
        )
    if problems:
        raise PlanError(
            "torch's runtime cannot carry out this cut",
            problems=problems,
            fix="Use headway.parallel.Pipeline, or cut the model elsewhere.",
        )
    return tuple(_whole(v).detach().requires_grad_(v.requires_grad) for v in leaves), structure


def _check(
    stages: ModelStages, schedule: PipelineSchedule, team: PipelineRanks, calls: PipelineCallbacks
) -> None:
    """Refuse what torch's runtime cannot do.

    Raises:
        PlanError: All of it.
    """
    problems = stages.unlike(schedule)
    skips = sorted({*stages.skips, *schedule.skips})
    problems += [f"stage {a} gives values to stage {b}, torch only to the next" for a, b in skips]
    if not schedule.flush:
        problems.append("it has no flush, and torch has no versions of the weights")
    if schedule.recompute:
        problems.append("it recomputes, and torch has no action for that")
    counts = sorted({len(pipe.microbatches) for pipe in schedule.pipes})
    if len(counts) > 1:
        problems.append(f"its pipes have {counts} micro-batches, and torch wants equal numbers")
    if not _TURNS and any(a == b for p in schedule.pipes for a, b in pairwise(p.placement)):
        problems.append(
            f"a rank holds two neighbouring stages; torch {torch.__version__} cannot, 2.12 can"
        )
    kinds = {str(action.kind) for action in schedule.order[team.rank]}
    if kinds & {"SYNC", "WAIT"} and calls.sync is None:
        problems.append("it has SYNC, and nobody was given who sums gradients")
    if "STEP" in kinds and calls.step is None:
        problems.append("it has STEP, and nobody was given who makes steps")
    ranks = tuple(dist.get_process_group_ranks(team.group or dist.group.WORLD))
    if ranks != team.ranks:
        problems.append(f"the group has the ranks {list(ranks)}, the team {list(team.ranks)}")
    problems += explain_fsdp_conflicts(schedule, stages, team.rank)
    if problems:
        raise PlanError(
            f"torch's runtime cannot carry out the schedule {schedule.name}",
            problems=problems,
            fix="Use headway.parallel.Pipeline, which can.",
        )
