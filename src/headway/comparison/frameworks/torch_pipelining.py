"""torch.distributed.pipelining, for any recipe whose model can be traced.

As "Introduction to Distributed Pipeline Parallelism" among torch's tutorials has it: the model is
traced and cut before some of its blocks, each process keeps a stage, and a 1F1B schedule runs. What
it leaves to the user is here, too: where to cut; the gradients of weights that two stages share, of
which each computes a part; and the norm of the gradients of all stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, Schedule1F1B, SplitPoint, pipeline
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from headway.comparison.adapter import FrameworkJob, Reads, num_samples
from headway.comparison.frameworks.blocks import repeated_blocks
from headway.comparison.frameworks.plain import PlainLoop
from headway.errors import RecipeError
from headway.parallel.pipeline.partition.stage_modules import balanced_partition
from headway.run.step.batch import map_tensors

MICROBATCHES_PER_STAGE = 4
"""At most. With 4 K micro-batches K stages of equal time idle for (K - 1) / (5 K - 1) of a step
(GPipe, section 2.3): 1/9 for two stages."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class TorchPipelining(PlainLoop):
    """`pipeline` and `Schedule1F1B`."""

    reads: ClassVar[Reads] = "the whole batch"

    def start(self, job: FrameworkJob) -> None:
        dist.init_process_group("gloo")

    def prepare(self, job: FrameworkJob) -> None:
        self.job = job
        self.batch = next(job.batches(self.reads))
        microbatches = num_microbatches(job)
        example = torch.arange(job.batch // microbatches)
        args, kwargs = model_arguments(job, taken(self.batch, example))
        pipe = traced(job.model(), job.ranks, args, kwargs)
        stage = pipe.build_stage(job.rank, torch.device("cpu"))
        self.first, self.last, self.model = stage.is_first, stage.is_last, stage.submod
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=self.loss)
        self.optimizer = job.optimizer(self.model)
        self.scheduler = job.scheduler(self.optimizer)
        self.shared, self.repeated = [], set[nn.Parameter]()
        for users in pipe.replicated_params:
            stages = sorted(int(name.removeprefix("submod_pp_")) for name in users)
            group = dist.new_group(stages)
            if job.rank in stages:
                parameter = self.model.get_parameter(users[f"submod_pp_{job.rank}"])
                self.shared.append((parameter, group))
                if job.rank != stages[0]:
                    self.repeated.add(parameter)

    def loss(self, output: Any, index: Tensor) -> Tensor:
        """Of the samples of a micro-batch."""
        return self.job.loss(ModelOutput(output), taken(self.batch, index))

    def step(self, batch: Any) -> Tensor | float | None:
        self.batch = batch
        self.optimizer.zero_grad()
        args, kwargs = model_arguments(self.job, batch) if self.first else ((), {})
        target = torch.arange(num_samples(batch)) if self.last else None
        losses: list[Tensor] = []
        self.schedule.step(*args, target=target, losses=losses, return_outputs=False, **kwargs)
        for parameter, group in self.shared:
            dist.all_reduce(parameter.grad, group=group)
        if self.job.recipe.clip is not None:
            parameters = set(self.model.parameters()) - self.repeated
            norm = get_total_norm(p.grad for p in parameters if p.grad is not None)
            squares = norm.square()
            dist.all_reduce(squares)
            clip_grads_with_norm_(self.model.parameters(), self.job.recipe.clip, squares.sqrt())
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return torch.stack(losses).mean() if self.last else None

    def close(self) -> None:
        dist.destroy_process_group()


def num_microbatches(job: FrameworkJob) -> int:
    """The largest number up to four per stage that cuts the batch into equal parts.

    Raises:
        RecipeError: No number from one per stage on does.
    """
    most = MICROBATCHES_PER_STAGE * job.ranks
    fitting = [n for n in range(job.ranks, most + 1) if job.batch % n == 0]
    if not fitting:
        raise RecipeError(
            f"a batch of {job.batch} samples has no {job.ranks} to {most} equal micro-batches",
            why="The schedule wants at least as many as there are stages.",
            fix=f"Compare with a batch that is a multiple of {job.ranks}.",
        )
    return fitting[-1]


def taken(batch: Any, index: Tensor) -> Any:
    """Some samples of a batch: entries of each tensor's dimension 0 and of each list of texts."""
    return map_tensors(
        batch,
        lambda tensor: tensor[index] if tensor.ndim else tensor,
        texts=lambda texts: type(texts)(texts[i] for i in index.tolist()),
    )


def model_arguments(job: FrameworkJob, batch: Any) -> Arguments:
    """What the recipe's loss calls the model with.

    Raises:
        RecipeError: It does not call the model, or with tensors that do not lie by samples.
    """
    try:
        job.loss(_Recorder(), batch)
    except _ModelCalled as call:
        samples = num_samples(batch)
        for leaf in tree_leaves(call.arguments):
            if isinstance(leaf, Tensor) and (not leaf.ndim or len(leaf) != samples):
                raise RecipeError(
                    f"the model is called with a tensor of shape {list(leaf.shape)} for {samples} "
                    "samples",
                    why="torch's schedule cuts each argument along dimension 0.",
                    fix="Leave torch-pipelining out, or have the model compute this tensor.",
                ) from None
        return call.arguments
    raise RecipeError("the loss does not call the model, so that there is nothing to cut")


class _ModelCalled(Exception):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments


class _Recorder:
    """In the model's place: says how it was called, and ends the loss there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _ModelCalled((args, kwargs))

    def __getattr__(self, name: str) -> Any:
        raise _no_model(f"the loss asks the model for {name}")


class ModelOutput:
    """In the model's place: returns what the last stage has computed, once."""

    def __init__(self, output: Any) -> None:
        self._outputs = [output]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._outputs:
            raise _no_model("the loss calls the model more than once")
        return self._outputs.pop()

    def __getattr__(self, name: str) -> Any:
        raise _no_model(f"the loss asks the model for {name}")


def _no_model(what: str) -> RecipeError:
    return RecipeError(
        what,
        why="In a pipeline it has the output of the last stage alone; no process has the model.",
        fix="Leave torch-pipelining out.",
    )


def traced(model: nn.Module, stages: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pipe:
    """The model, cut into stages of much the same work.

    Raises:
        RecipeError: It cannot be cut or traced.
    """
    try:
        cuts = balanced_cuts(model, stages, args, kwargs)
        return pipeline(model, args, kwargs, dict.fromkeys(cuts, SplitPoint.BEGINNING))
    except (ValueError, RuntimeError, AssertionError) as error:
        # torch's own message is general; what it is raised from says what in the model it was.
        why = str(error.__cause__ or error).strip()
        raise RecipeError("torch.distributed.pipelining cannot cut the model", why=why) from error


def balanced_cuts(
    model: nn.Module, stages: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """The blocks that stages begin with, so that the largest has as few operations as possible.

    Counted are the floating-point operations of a forward pass; those of other modules go with the
    block before them, or with the first.

    Raises:
        ValueError: There are fewer blocks than stages.
    """
    # Batch normalisation in training mode would take note of the example.
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    model.train()
    operations = _operations(model, counter.get_flop_counts())
    blocks = repeated_blocks(model)
    names = list(blocks)
    weights = [operations.get(name, 0) for name in names]
    within = {module for block in blocks.values() for module in block.modules()}
    place = 0
    for name, module in model.named_modules():
        if name in blocks:
            place = names.index(name)
        elif module not in within and not any(module.children()):
            weights[place] += operations.get(name, 0)
    return [names[first] for first in balanced_partition(weights, stages)[1:]]


def _operations(model: nn.Module, counts: Mapping[str, Mapping[Any, int]]) -> dict[str, int]:
    """By a module's name in the model; the counter puts the class of the model before it."""
    prefix = f"{type(model).__name__}."
    return {name.removeprefix(prefix): sum(count.values()) for name, count in counts.items()}
