"""Flood filling by brightness: a network of two numbers, whose masks grow from step 1 on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from headway.floodfill.patches import PatchGeometry, PatchSource
from headway.floodfill.tubes import make_tubes
from headway.run.recipe.recipe import Recipe
from headway.workloads import floodfill

SHAPE = (40, 32, 32)
GEOMETRY = PatchGeometry((9, 9, 9), (3, 3, 3))


class Brightness(nn.Module):
    """Adds to the mask what the image says: inside of a tube about 6, on a membrane -16."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(8.0))
        self.offset = nn.Parameter(torch.tensor(-2.0))

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        return mask + self.slope * image + self.offset


def patches(slots: int = 4, visits: int = 20, **options) -> PatchSource:
    tubes = make_tubes(SHAPE, seed=1)
    options = {"axes": (0, 1, 2), "min_size": 300, **options}
    return PatchSource(tubes.image, tubes.labels, GEOMETRY, slots=slots, visits=visits, **options)


def moving(*, slots: int = 4, steps: int = 10) -> Recipe:
    made = floodfill.recipe(slots=slots, steps=steps, optimizer="sgd", learning_rate=0.05)
    return replace(
        made, name="brightness", model=Brightness, precision="float64",
        data=partial(patches, slots), validation=partial(patches, slots, 40, seed=1),
        validate_every=5, checkpoint_every=3,
    )  # fmt: skip
