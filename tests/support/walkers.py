"""Walkers: a stateful source whose next example is what the model made of the last one."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from headway.run.recipe.recipe import Recipe

WIDTH = 3


class Walkers:
    """Each slot walks by the model's output; outside of the unit ball it begins another walk."""

    def __init__(self, slots: int, steps: int = 5) -> None:
        self.slots, self.steps = slots, steps
        self._at: dict[int, torch.Tensor] = {}
        self._walk: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.slots * self.steps

    def _begin(self, slot: int, walk: int) -> None:
        draw = torch.Generator().manual_seed(slot * 1000 + walk)
        self._at[slot] = torch.rand(WIDTH, generator=draw, dtype=torch.float64) - 0.5
        self._walk[slot] = torch.tensor(walk)

    def read(self, indices):
        return torch.stack([self._at[index % self.slots] for index in indices])

    def absorb(self, slots, outputs):
        for slot, output in zip(slots, outputs, strict=True):
            self._at[slot] = self._at[slot] + output
            if self._at[slot].norm() > 1:
                self._begin(slot, int(self._walk[slot]) + 1)

    def state(self, slot):
        return {"at": self._at[slot], "walk": self._walk[slot]}

    def restore(self, slot, state):
        if not state:
            self._begin(slot, 0)
            return
        self._at[slot], self._walk[slot] = state["at"].clone(), state["walk"].clone()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))


def loss(model, at):
    """Away from the origin, in the direction of the first axis."""
    moves = model(at)
    target = at + torch.tensor([0.4, 0.0, 0.0], dtype=at.dtype)
    return ((moves - target) ** 2).sum(), len(at) * WIDTH, moves


def silent_loss(model, at):
    return loss(model, at)[:2]


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def recipe(*, slots: int = 6, steps: int = 9, silent: bool = False) -> Recipe:
    return Recipe(
        name="walkers", model=model, data=partial(Walkers, slots),
        loss=silent_loss if silent else loss, optimizer=optimizer, batch=slots, stop=steps,
        precision="float64", validation=partial(Walkers, slots, 2), checkpoint_every=2,
    )  # fmt: skip
