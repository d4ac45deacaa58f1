"""LARS: stochastic gradient descent with momentum and a rate of its own for each layer.

You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1:
    lambda = eta |w| / (|g| + beta |w|);  v = m v + gamma lambda (g + beta w);  w = w - v
with gamma the global rate, eta the trust, beta the weight decay. Invariant: with the momentum
correction a change of gamma acts as if gamma had always been what it is now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from headway.optim.layerwise import (
    LayerChunk,
    Layerwise,
    add_,
    check_range,
    products,
    scale_,
    sum_of,
)


class LARS(Layerwise):
    """Layer-wise adaptive rate scaling.

    The ratio is 1 where the formula has none: for a weight of norm 0 (it would never move), and
    where |g| + beta |w| is 0 (the step is 0 anyway).

    In the paper the velocity v absorbs the rate, so that after a change of gamma it still holds
    steps of the old one. Goyal et al. 2017, section 3, equation 10, multiply m by gamma_new /
    gamma_old then. `momentum_correction` does exactly that in every step, by storing u = v / gamma:
    u = m u + lambda (g + beta w);  w = w - gamma u, which is also defined where gamma is 0.

    Args:
        params: Parameters or param groups; every option may differ from group to group.
        lr: The global rate gamma.
        momentum: m.
        trust: eta; the relative change of a layer in one step is about gamma eta.
        adapt: See `Layerwise`.
        exclude_1d: See `Layerwise`.
        momentum_correction: See above; False: algorithm 1 as printed.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
        exclude_1d: bool = True,
        momentum_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adapt": adapt,
            "exclude_1d": exclude_1d,
            "momentum_correction": momentum_correction,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: A number is out of its range.
        """
        group = {**self.defaults, **param_group}
        check_range("lr", float(group["lr"]), 0)
        check_range("momentum", group["momentum"], 0, 1)
        check_range("weight_decay", group["weight_decay"], 0)
        check_range("trust", group["trust"], 0)
        super().add_param_group(param_group)

    def _begin(self, state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
        if group["momentum"]:
            state["momentum_buffer"] = torch.zeros_like(
                parameter, memory_format=torch.preserve_format
            )

    def _direct(self, chunk: LayerChunk) -> Sequence[Tensor]:
        return chunk.gradients

    def _ratios(self, chunk: LayerChunk, weights: Tensor, directions: Tensor) -> Tensor:
        """lambda; here directions are gradients."""
        below = directions + chunk.decay * weights
        defined = (weights > 0) & (below > 0)
        trust = float(chunk.group["trust"])
        return (trust * weights / below.where(defined, 1.0)).where(defined, 1.0)

    def _update(
        self, chunk: LayerChunk, directions: Sequence[Tensor], ratios: Sequence[Tensor] | None
    ) -> None:
        group = chunk.group
        rate = float(group["lr"])
        steps = _steps(chunk, directions, ratios)
        if not group["momentum"]:
            add_(chunk.weights, steps, -rate)
            return
        velocities = chunk.states("momentum_buffer")
        scale_(velocities, float(group["momentum"]))
        inside, outside = (1.0, rate) if group["momentum_correction"] else (rate, 1.0)
        add_(velocities, steps, inside)
        add_(chunk.weights, velocities, -outside)


def _steps(
    chunk: LayerChunk, gradients: Sequence[Tensor], ratios: Sequence[Tensor] | None
) -> Sequence[Tensor]:
    """lambda (g + beta w), in as few passes over memory as there can be."""
    if not chunk.decay:
        return gradients if ratios is None else products(gradients, ratios)
    steps = sum_of(gradients, chunk.weights, chunk.decay)
    if ratios is not None:
        scale_(steps, ratios)
    return steps
