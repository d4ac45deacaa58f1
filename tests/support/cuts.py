"""Models that are cut into stages by time or by hand, their recipes, and chains right and wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headway import Recipe
from support.recipes import adamw
from support.tiny_models import CLASSES, FEATURES, Points, cross_entropy


class Slow(nn.Linear):
    """Few parameters, much time."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(150):
            x = torch.tanh(super().forward(x))
        return x


class Uneven(nn.Sequential):
    """The parameters are in front, the time is spent at the end."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, 96),
            nn.Linear(96, 8),
            nn.Dropout(0.2),
            nn.LayerNorm(8),
            nn.Linear(8, 8),
            Slow(8, 8),
            nn.Linear(8, CLASSES),
        )


class Deciding(nn.Module):
    """Its forward depends on values, so that it cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 8)
        self.middle = nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8))
        self.leave = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(self.middle(x) if float(x.detach().abs().max()) < 1e6 else x)


def _recipe(model: type[nn.Module]) -> Recipe:
    return Recipe(
        name=model.__name__.lower(),
        model=model,
        data=Points,
        loss=cross_entropy,
        optimizer=adamw,
        batch=12,
        microbatch=4,
        stop=3,
        seed=5,
        stages=2,
    )


def uneven() -> Recipe:
    return _recipe(Uneven)


def deciding() -> Recipe:
    return _recipe(Deciding)


# -- chains --------------------------------------------------------------------------------------


def in_two(model: nn.Module) -> list[list[str | nn.Module]]:
    """Names and modules may be mixed."""
    assert isinstance(model, Deciding)
    return [["enter", model.middle[0]], ["middle.1", model.middle[2], "leave"]]


def misspelt(model: nn.Module) -> list[list[object]]:
    return [["entre", 3], [], ["leave"]]


def nothing(model: nn.Module) -> None:
    return None


def raising(model: nn.Module) -> list[list[str]]:
    raise KeyError("my own")


def foreign(model: nn.Module) -> list[list[str | nn.Module]]:
    return [["enter"], ["middle", nn.Linear(8, CLASSES)]]


number = 3
