"""A made volume whose objects any network finds, and weights that do: bright balls on black."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from headway.floodfill.network import FloodFillingNetwork

FOV, DELTAS = (9, 9, 9), (3, 3, 3)
RADIUS = 4
BRIGHT = 250


def bubbles(shape: tuple[int, int, int], count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Balls, some of them close enough to be taken for one object."""
    rng = np.random.default_rng(seed)
    image = np.zeros(shape, dtype=np.uint8)
    grid = np.indices(shape)
    for centre in rng.integers(RADIUS + 1, np.array(shape) - RADIUS - 1, (count, 3)):
        away = ((grid - centre[:, None, None, None]) ** 2).sum(axis=0)
        image[away < RADIUS**2] = BRIGHT
    return image


def write_brightness_weights(path: Path, *, features: int = 2, depth: int = 2) -> None:
    """Of a network whose update is high where the image is bright, and low elsewhere."""
    network = FloodFillingNetwork(depth, fov=FOV, deltas=DELTAS, features=features)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        for module in (network.conv0_a, network.conv0_b):
            module.weight[0, 0, 1, 1, 1] = 1.0
        # The image is (v - 128) / 33: 3.7 in a ball, below 0 outside.
        network.conv_lom.weight[0, 0] = 3.0
        network.conv_lom.bias.fill_(-3.0)
    save_file(network.state_dict(), path)
