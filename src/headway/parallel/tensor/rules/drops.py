"""Dropout: the mask is drawn for the whole tensor, as the serial run draws it, and each rank takes
its part.

Ranks that split a layer have the same random numbers (`run.randomness` keys them by sample); a mask
drawn for the part alone would be another one for each grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.parallel.tensor.context import Context, Refused
from headway.parallel.tensor.exchange import part
from headway.parallel.tensor.split_tensor import Cut, SplitTensor, made, shape_of


def dropout(
    context: Context,
    func: Any,
    input: SplitTensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not training or p == 0:
        return input
    if inplace:
        raise Refused("dropout in place")
    return made(dropped(context, input.local, input.cuts, p), input.cuts, context)


def dropped(context: Context, x: Tensor, cuts: Sequence[Cut], p: float) -> Tensor:
    """A part of a tensor, with this rank's part of the whole tensor's mask."""
    whole = torch.ones(shape_of(x, cuts, context), dtype=x.dtype, device=x.device)
    mask = torch.nn.functional.dropout(whole, p)
    for dim, cut in enumerate(cuts):
        if cut.axes:
            mask = part(mask, context.grid, cut.axes, dim, cut.blocks)
    return x * mask


RULES = {"dropout": dropout}
