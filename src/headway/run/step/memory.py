"""Memory of a rank: of the process, and of parameters that other ranks hold.

Three things: how much memory the process holds and whether malloc keeps what it has freed;
`release_storage`, which frees a tensor but keeps its name, shape, type and identity; and
`meta_copy`, a copy of the model on the meta device from which a whole model is made later.

A released tensor reads as NaN (integers: as the smallest number), never as a plausible value of the
model. `PartialModelGuard` refuses to run or save a model of which this rank has a part only.
"""

from __future__ import annotations

import copy
import ctypes
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.cluster.local_machine import memory_bytes
from headway.errors import UsageError


def resident_bytes(device: torch.device) -> int:
    """Bytes: allocated on a CUDA device; on the CPU the resident set of the process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        # Not Linux: the largest resident set so far, which getrusage gives in KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def share_of_memory(local_ranks: int) -> int:
    """Bytes that a rank may fill with samples: half of its share of what this machine gives."""
    # These are limits of each process, and not divided by the ranks.
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    own = (limit for limit in limits if limit != resource.RLIM_INFINITY)
    return min((memory_bytes() // local_ranks, *own)) // 2


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3), from malloc.h of glibc."""


def keep_freed_memory() -> None:
    """Let malloc keep freed memory for the next step instead of returning it to the kernel.

    Nothing happens where the C library does not know the setting (musl, macOS).
    """
    mallopt = _malloc("mallopt")
    if mallopt is None:
        return
    # A step frees its activations and gradients and allocates the same again. Returned to the
    # kernel, each page faults anew: 5,600 faults, 60 ms, in a step of 0.6 s with 10 M parameters.
    # 32 MiB is the most that glibc accepts for the second; both must be set, because setting one
    # stops glibc from adapting the other.
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_MMAP_THRESHOLD, 32 * 2**20)


def give_back_freed_memory() -> None:
    """Return free memory to the kernel, once something large has been freed for good."""
    trim = _malloc("malloc_trim")
    if trim is not None:
        trim(0)


def _malloc(name: str) -> Callable[..., int] | None:
    """A function of glibc's malloc."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)


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
