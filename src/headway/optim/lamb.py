"""LAMB: Adam whose step has, layer by layer, the length of the weights.

You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
algorithm 2:
    m = b1 m + (1 - b1) g;      v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    x = x - lr phi(|x|) / |r + lambda x| (r + lambda x)
Invariant: without clamp, every adapted layer moves by exactly lr |x|.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from headway.optim.layerwise import (
    LayerChunk,
    LayerStep,
    Layerwise,
    add_,
    add_product_,
    add_quotient_,
    check_range,
    lerp_,
    scale_,
    scaled,
    shift_,
    square_roots,
)


class LAMB(Layerwise):
    """Layer-wise adaptive moments.

    The ratio phi(|x|) / |r + lambda x| is 1 where it has no use: where phi(|x|) is 0 (the weight
    would never move) and where |r + lambda x| is 0 (the step is 0 anyway).

    Args:
        params: Parameters or param groups; every option may differ from group to group.
        lr: The rate.
        betas: b1 and b2.
        eps: Added to the root, outside of it.
        weight_decay: lambda, in the direction and so in its norm.
        clamp: phi(z) = min(max(z, low), high) with these two numbers; None: phi(z) = z.
        bias_correction: The divisions by 1 - b^t; False leaves them out.
        adapt: See `Layerwise`.
        exclude_1d: See `Layerwise`.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clamp: tuple[float, float] | None = None,
        bias_correction: bool = True,
        adapt: bool = True,
        exclude_1d: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "clamp": clamp,
            "bias_correction": bias_correction,
            "adapt": adapt,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: A number is out of its range.
        """
        group = {**self.defaults, **param_group}
        check_range("lr", float(group["lr"]), 0)
        check_range("eps", group["eps"], 0)
        check_range("weight_decay", group["weight_decay"], 0)
        for name, beta in zip(("betas[0]", "betas[1]"), group["betas"], strict=True):
            check_range(name, beta, 0, 1)
        if group["clamp"] is not None:
            low, high = group["clamp"]
            check_range("clamp[0]", low, 0)
            check_range("clamp[1]", high, low)
        super().add_param_group(param_group)

    def _begin(self, state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
        state["step"] = 0
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _direct(self, chunk: LayerChunk) -> Sequence[Tensor]:
        """r + lambda x, with one root and one quotient per element.

        r = c m / (sqrt(v) + eps s), where s = sqrt(1 - b2^t) and c = s / (1 - b1^t).
        """
        group = chunk.group
        first, second = group["betas"]
        means, squares = chunk.states("exp_avg"), chunk.states("exp_avg_sq")
        lerp_(means, chunk.gradients, 1 - first)
        scale_(squares, float(second))
        add_product_(squares, chunk.gradients, chunk.gradients, 1 - second)
        corrections = [_advance(layer) for layer in chunk.layers]
        below = square_roots(squares)
        shift_(below, [group["eps"] * root for _, root in corrections])
        directions = scaled(chunk.weights, chunk.decay)
        factors = [root / bias for bias, root in corrections]
        add_quotient_(directions, means, below, factors)
        return directions

    def _ratios(self, chunk: LayerChunk, weights: Tensor, directions: Tensor) -> Tensor:
        if chunk.group["clamp"] is not None:
            weights = weights.clamp(*chunk.group["clamp"])
        defined = (weights > 0) & (directions > 0)
        return (weights / directions.where(defined, 1.0)).where(defined, 1.0)

    def _update(
        self, chunk: LayerChunk, directions: Sequence[Tensor], ratios: Sequence[Tensor] | None
    ) -> None:
        if ratios is not None:
            scale_(directions, ratios)
        add_(chunk.weights, directions, -float(chunk.group["lr"]))


def _advance(layer: LayerStep) -> tuple[float, float]:
    """Count the step t of a layer; 1 - b1^t and sqrt(1 - b2^t), or 1 and 1 if not wanted."""
    layer.state["step"] += 1
    if not layer.group["bias_correction"]:
        return 1.0, 1.0
    first, second = layer.group["betas"]
    step = layer.state["step"]
    return 1 - first**step, math.sqrt(1 - second**step)
