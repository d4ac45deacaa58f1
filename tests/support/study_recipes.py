"""Recipes for studies of batch sizes and rates: a quadratic with noisy samples, whose law is known.

The loss of a sample is |w - x|^2 / 2 with x normal around 0, so that a step of SGD is
w - lr (w - mean of x): without momentum and with B samples the distance to the optimum shrinks by
(1 - lr) a step, and the noise adds lr^2 s^2 / B. A small distance is reached with a rate in
proportion to the batch, and a large batch is limited by lr < 2.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import TensorDataset

from headway import Recipe

DIMENSIONS, DEVIATION, SAMPLES = 16, 2.0, 8192


class Point(nn.Module):
    """w; the output is the squared distance to it."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((DIMENSIONS,), start))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x).square().mean(1) + self.b.square()


def clouds(count: int = SAMPLES, deviation: float = DEVIATION) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(deviation * torch.randn(count, DIMENSIONS, generator=draw))


def distance(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).mean() * DIMENSIONS / 2
    return loss


def error(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The distance to the optimum, as it is and as a value that grows."""
    found = float(model(batch[0]).mean())
    return {"error": found, "score": -found}


@dataclass(frozen=True)
class Pause:
    """A callback that makes each step last longer."""

    seconds: float

    def on_step_end(self, run: Any) -> None:
        time.sleep(self.seconds)


def quadratic(
    *, two_groups: bool = False, scheduler: str = "", pause: float = 0.0, **more: Any
) -> Recipe:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        if two_groups:
            groups = [{"params": [model.w]}, {"params": [model.b], "lr": 0.001}]
            return torch.optim.SGD(groups, lr=0.08)
        return torch.optim.SGD(model.parameters(), lr=0.08)

    schedulers: dict[str, Any] = {
        "cosine": lambda o: CosineAnnealingLR(o, 10_000),
        "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=1000),
    }
    given: dict[str, Any] = {
        "name": "quadratic",
        "model": Point,
        "data": clouds,
        "loss": distance,
        "optimizer": optimizer,
        "scheduler": schedulers.get(scheduler),
        "batch": 4,
        "stop": "6000 samples",
        "validation": lambda: clouds(1, 0.0),
        "metrics": error,
        "callbacks": (Pause(pause),) if pause else (),
        **more,
    }
    return Recipe(**given)


def no_validation() -> Recipe:
    return quadratic(validation=None, metrics=None)


def no_rate() -> Recipe:
    class Halving(torch.optim.Optimizer):
        """An optimiser without a rate."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            pass

    return quadratic(optimizer=lambda model: Halving(model.parameters()))
