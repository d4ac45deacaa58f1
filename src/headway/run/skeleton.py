"""A model without memory, kept beside the one that trains, and filled where that is wanted whole.

So a whole model can be made without undoing what has been done to the modules of the other one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import UsageError


def skeleton(model: nn.Module) -> nn.Module | None:
    """The model without memory for its parameters; None where it cannot be copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception:
        return None


def require(kept: nn.Module | None, model: nn.Module) -> nn.Module:
    """What `skeleton` made of a model.

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


def filled(kept: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a skeleton with these parameters (as such) and buffers, by name; no copies."""
    forms = dict((*kept.named_parameters(), *kept.named_buffers()))
    memory: dict[int, Any] = {id(forms[name]): tensor for name, tensor in tensors.items()}
    return copy.deepcopy(kept, memory)
