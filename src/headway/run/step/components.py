"""Checks and conversions of the user's model, optimiser, scheduler and loss value.

Each check stands for a mistake that would otherwise end as an error of torch from deep inside a
step, or as ranks that silently drift apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.errors import RecipeError, UsageError
from headway.run.step.memory import is_storage_released


def check_components(
    model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, ranks: int
) -> None:
    """Refuse what a step cannot drive.

    Raises:
        RecipeError: The optimiser wants a closure, the scheduler wants a number, or the optimiser
            holds parameters of something other than the model.
        UsageError: The model is not whole.
    """
    for name, parameter in model.named_parameters():
        if is_storage_released(parameter):
            raise UsageError(
                f"the model is not whole: this rank has no memory for {name}",
                why="It was a stage of a pipeline; Executor.close makes it whole on rank 0 only.",
                fix="Build the model anew, and give it the weights of rank 0.",
            )
    kind = type(optimizer).__name__
    if wanted := _required(type(optimizer).step):
        raise RecipeError(
            f"the optimiser {kind} cannot be used: its step needs {wanted}",
            why="It computes the loss several times per step; a step here computes it once.",
            fix="Use an optimiser whose step() needs nothing, such as AdamW or SGD.",
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and ranks > 1:
        raise RecipeError(
            f"the optimiser {kind} cannot be used by {ranks} processes",
            why="It takes sparse gradients only; they are summed over the ranks as dense ones.",
            fix="Use another optimiser, or one process. nn.Embedding(sparse=True) itself is fine.",
        )
    if scheduler is not None and (wanted := _required(type(scheduler).step)):
        raise RecipeError(
            f"the scheduler {type(scheduler).__name__} cannot be used: its step needs {wanted}",
            why="Schedulers are stepped after every optimiser step, by its number alone.",
            fix="Use one that follows a curve, such as CosineAnnealingLR; in a loop of your own, "
            "leave it out of the Executor and step it yourself, alike on every rank.",
        )
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in known:
                raise RecipeError(
                    f"group {number} of the optimiser {kind} holds a parameter of shape "
                    f"{list(parameter.shape)} that the model does not have",
                    why="Only gradients of the model's parameters are summed over the ranks.",
                    fix="Register it on the model (a loss with parameters: as a submodule).",
                )


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Give state that the optimiser has made already the device and type of its parameters."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and back in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def sum_and_count(value: Any, samples: int) -> tuple[Tensor, Tensor | float]:
    """What a loss returned, as a sum and what it is a sum over.

    Args:
        value: A mean over the samples, or a pair (sum, count).
        samples: Of the micro-batch.

    Raises:
        RecipeError: It is neither.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value * samples, float(samples)
    if isinstance(value, tuple) and len(value) == 2:
        total, count = value
        if isinstance(total, Tensor) and total.numel() == 1 and _is_count(count):
            return total, count
    raise RecipeError(
        f"the loss returned {_described(value)}",
        why="It must return the mean over the samples of the batch, a tensor with one number, or a "
        "pair (sum, count).",
        fix="For example loss.mean(), or (loss.sum(), mask.sum()).",
    )


def _is_count(count: Any) -> bool:
    return count.numel() == 1 if isinstance(count, Tensor) else isinstance(count, int | float)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(map(_described, value)) or 'nothing'}"
    return "None" if value is None else f"a {type(value).__name__}"


def _required(method: Callable[..., Any]) -> str:
    """The arguments that a method cannot do without, as text."""
    _, *rest = inspect.signature(method).parameters.values()
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(
        p.name for p in rest if p.default is inspect.Parameter.empty and p.kind not in fixed
    )
