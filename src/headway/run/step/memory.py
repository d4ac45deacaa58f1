"""Memory of a rank: its share of the machine's, and that of parameters that other ranks hold.

For these: `release_storage`, which frees a tensor but keeps its name, shape, type and identity; and
`meta_copy`, a copy of the model on the meta device from which a whole model is made later.

A released tensor reads as NaN (integers: as the smallest number), never as a plausible value of the
model. `PartialModelGuard` refuses to run or save a model of which this rank has a part only.
"""

from __future__ import annotations

import copy
import resource
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.cluster.local_machine import memory_bytes
from headway.errors import UsageError


def share_of_memory(local_ranks: int) -> int:
    """Bytes that a rank may fill with samples: half of its share of what this machine gives."""
    # These are limits of each process, and not divided by the ranks.
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    own = (limit for limit in limits if limit != resource.RLIM_INFINITY)
    return min((memory_bytes() // local_ranks, *own)) // 2


def release_storage(tensor: Tensor) -> None:
    """Free a tensor's memory but for one element, which stands for all."""
    if tensor.numel():
        nothing = torch.full((), _nothing(tensor.dtype), device=tensor.device).to(tensor.dtype)
        tensor.data = nothing.expand(tensor.shape)


def is_storage_released(tensor: Tensor) -> bool:
    """Whether `release_storage` has been called on a tensor of more than one element."""
    return tensor.layout == torch.strided and tensor.numel() > 1 and not any(tensor.stride())


def _nothing(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


class PartialModelGuard:
    """Refuses to use or save as a whole a model of which this rank has a part only.

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
        """Refuse the optimiser's step from now on, and a model that is not `whole`."""
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


def meta_copy(model: nn.Module) -> nn.Module | None:
    """The model without memory for its parameters; None where it cannot be copied."""
    # `deepcopy` takes an entry of its memo for a copy made already, and copies no parameter.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception:
        return None


def require_meta_copy(kept: nn.Module | None, model: nn.Module) -> nn.Module:
    """What `meta_copy` made of a model.

    Raises:
        UsageError: It could not be copied.
    """
    if kept is None:
        raise UsageError(
            f"{type(model).__name__} cannot be made whole",
            why="A copy of it is needed, and copy.deepcopy fails.",
            fix="Let the model be copied, or save a checkpoint and convert that.",
        )
    return kept


def fill_meta_copy(
    form: nn.Module,
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
) -> nn.Module:
    """A model of these tensors, frozen and in training or eval mode as `model`.

    Args:
        form: From `meta_copy`.
        tensors: All parameters and buffers; the new model takes over their memory.
    """
    # Tied tensors are one object in the copy, too: one entry replaces all their occurrences.
    forms = dict((*form.named_parameters(), *form.named_buffers()))
    memory: dict[int, Any] = {
        id(forms[name]): nn.Parameter(tensor, named[name].requires_grad)
        if name in named
        else tensor
        for name, tensor in tensors.items()
    }
    return copy.deepcopy(form, memory).train(model.training)
