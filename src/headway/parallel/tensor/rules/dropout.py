"""Dropout on split tensors: the mask is drawn for the whole tensor and each rank takes its part.

Ranks that split a layer have the same random numbers, so the result is that of the serial run;
a mask drawn for the part alone would differ between grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.parallel.tensor.grid import local_slice
from headway.parallel.tensor.split_tensor import (
    DimensionCut,
    RuleRefused,
    SplitContext,
    SplitTensor,
    shape_of,
    wrap_local_part,
)


def dropout(
    context: SplitContext,
    func: Any,
    input: SplitTensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not training or p == 0:
        return input
    if inplace:
        raise RuleRefused("dropout in place")
    return wrap_local_part(
        dropout_of_part(context, input.local, input.cuts, p), input.cuts, context
    )


def dropout_of_part(
    context: SplitContext, x: Tensor, cuts: Sequence[DimensionCut], p: float
) -> Tensor:
    """A part of a tensor, with this rank's part of the whole tensor's mask."""
    whole = torch.ones(shape_of(x, cuts, context), dtype=x.dtype, device=x.device)
    mask = torch.nn.functional.dropout(whole, p)
    for dim, cut in enumerate(cuts):
        if cut.axes:
            mask = local_slice(mask, context.grid, cut.axes, dim, cut.blocks)
    return x * mask
