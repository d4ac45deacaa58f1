"""What a rank does not hold of a model keeps its name, shape, type and identity, and no memory.

Invariant: a tensor that was let go reads as NaN everywhere (of integers: as the smallest number),
never as something that could be taken for the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.errors import UsageError


def let_go(tensor: Tensor) -> None:
    """Give a tensor's memory back, but for one element, which stands for all."""
    if tensor.numel():
        nothing = torch.full((), _nothing(tensor.dtype), device=tensor.device).to(tensor.dtype)
        tensor.data = nothing.expand(tensor.shape)


def is_let_go(tensor: Tensor) -> bool:
    """Whether `let_go` has been called on a tensor of more than one element."""
    return tensor.layout == torch.strided and tensor.numel() > 1 and not any(tensor.stride())


def _nothing(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


class Guard:
    """Refuses to use or save as a whole what is here in part only.

    Args:
        model: Its forward and its state_dict are refused, unless that is asked for live tensors
            (keep_vars), as a checkpoint does it.
        optimizer: Its state_dict is refused, and after `close` its step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.lifted = False
        self._optimizer = optimizer
        self._of_model = [
            model.register_forward_pre_hook(lambda *_: self._refuse("its forward")),
            model.register_state_dict_pre_hook(self._saved),
        ]
        optimizer.register_state_dict_pre_hook(lambda _: _refuse_optimizer())

    def close(self, *, whole: bool) -> None:
        """The executor leaves.

        Args:
            whole: The model is complete on this rank.
        """
        self._optimizer.register_step_pre_hook(lambda *_: _refuse_optimizer())
        if whole:
            for handle in self._of_model:
                handle.remove()

    def _saved(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            self._refuse("its state_dict")

    def _refuse(self, what: str) -> None:
        if not self.lifted:
            raise UsageError(
                f"a rank of a pipeline holds its own stages only: {what} cannot be used here",
                why="The other stages have no memory on this rank.",
                fix="Use Executor.evaluate, or Executor.whole and the model on rank 0, where it "
                "also is whole after Executor.close.",
            )


def _refuse_optimizer(*_: Any) -> None:
    raise UsageError(
        "a rank of a pipeline holds the optimiser's state of its own stages only",
        why="It is never put together on one rank.",
        fix="Save and resume by checkpoints of headway train; to go on with the weights alone, "
        "make a new optimiser.",
    )
