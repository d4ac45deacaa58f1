"""A forward pass: its precision, and what the executor lends to whoever runs one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.run.recipe.recipe import Loss

if TYPE_CHECKING:
    from headway.run.step.randomness import RandomDraws


@dataclass(frozen=True)
class ForwardPass:
    """What a strategy needs that looks at the model, cuts it, or runs it by itself.

    Attributes:
        arithmetic: The context of a forward pass (autocast).
        probe: Finds the random draws of the whole model, from the data of a micro-batch and a loss.
    """

    model: nn.Module
    loss: Loss
    arithmetic: Callable[[], AbstractContextManager[Any]]
    prepare: Callable[[Any], Any]
    probe: Callable[[Any, Loss], RandomDraws]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The arithmetic of a forward pass: bfloat16 where it pays, else that of the parameters."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def float_dtype(precision: str) -> torch.dtype | None:
    """To which the tensors of model and data are converted; None: they stay as they are."""
    return torch.float64 if precision == "float64" else None


def to_float64(model: nn.Module) -> nn.Module:
    """The model in double precision; also of fake tensors.

    Not by `nn.Module.to`: it would drop imaginary parts, and torch 2.14 cannot convert a module
    whose parameters are fake tensors.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            tensor.data = tensor.data.to(wide)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants its weights in one piece; see RNNBase._apply
    return model
