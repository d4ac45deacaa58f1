"""Layer norm and RMS norm of rows whose columns are cut over an axis.

Mean and variance of a row come from those of its parts (Chan et al. 1979), gathered in one message:
sums of squares, as in the paper's formula, lose the digits in which a large mean and a small
variance differ. The backward sums two numbers for each row. Weights are cut as the columns are;
their gradients are summed over the axes of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from headway.parallel.tensor.grid import Grid


@dataclass(frozen=True, eq=False, slots=True)
class Rule:
    """How to norm.

    Attributes:
        grid: The ranks.
        rows: Axes that cut the rows.
        columns: The axis that cuts what is normed.
        eps: Added to the variance.
        centred: Layer norm; if not, RMS norm.
    """

    grid: Grid
    rows: str
    columns: str
    eps: float
    centred: bool


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: Rule
    ) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance = _moments(wide, rule)
        scale = torch.rsqrt(variance + rule.eps)
        normed = (wide - mean) * scale if rule.centred else wide * scale
        ctx.save_for_backward(normed, scale, weight)  # type: ignore[arg-type]
        ctx.rule = rule  # type: ignore[attr-defined]
        y = normed if weight is None else normed * weight
        y = y if bias is None else y + bias
        return y.to(x.dtype).clone() if y is normed else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        normed, scale, weight = ctx.saved_tensors
        rule: Rule = ctx.rule
        grid, size = rule.grid, normed.shape[-1] * rule.grid.size(rule.columns)
        dy = gradients[0].to(normed.dtype)
        g = dy if weight is None else dy * weight
        sums = torch.stack([(g * normed).sum(-1), g.sum(-1)]) / size
        along, mean = grid.all_reduce(sums, rule.columns).wait().unsqueeze(-1)
        dx = g - normed * along
        dx = (dx - mean if rule.centred else dx) * scale
        dw = db = None
        if any(ctx.needs_input_grad[1:3]):
            flat = dy.flatten(0, -2)
            both = torch.stack([(flat * normed.flatten(0, -2)).sum(0), flat.sum(0)])
            both = both if ctx.needs_input_grad[2] else both[:1].clone()
            both = grid.all_reduce_over(both, rule.rows)
            dw = both[0] if ctx.needs_input_grad[1] else None
            db = both[1] if ctx.needs_input_grad[2] else None
        return dx.to(gradients[0].dtype), dw, db, None


def _moments(x: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Mean and variance of whole rows; without centring 0 and the mean square."""
    grid, axis = rule.grid, rule.columns
    if not rule.centred:
        square = x.square().mean(-1, keepdim=True) / grid.size(axis)
        return x.new_zeros(()), grid.all_reduce(square, axis).wait()
    part = torch.stack([x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)])
    parts = grid.gather(part.unsqueeze(0), axis).wait()
    means, variances = parts.unbind(1)
    return means.mean(0), variances.mean(0) + means.var(0, correction=0)


def split_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: Rule) -> Tensor:
    """Norm over the last dimension, of which this rank has a part; result as x."""
    result: Tensor = _Norm.apply(x, weight, bias, rule)  # type: ignore[no-untyped-call]
    return result
