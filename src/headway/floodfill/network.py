"""The flood-filling network: image and current mask in, an updated mask out.

Januszewski et al. 2018, "High-precision automated reconstruction of neurons with flood-filling
networks", and their reference implementation (google/ffn, `convstack_3d`). Masks are logits. All
convolutions are padded with zeros, so that nothing changes its size:

    h = conv0_b(relu(conv0_a([image, mask])))
    h = h + convI_b(relu(convI_a(relu(h))))     for I = 1 ... depth - 1
    new mask = mask + conv_lom(relu(h))

Names of shapes: N fields of view, Z Y X their size in voxels. Everywhere in this folder sizes and
positions are in the order z, y, x.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Triple = tuple[int, int, int]
"""Three numbers of voxels, for z, y, x."""

INITIAL_DEVIATION = 0.01
IMAGE_MEAN, IMAGE_DEVIATION = 128.0, 33.0
"""Of the grey values that the published weights were trained on."""


def scale_image(voxels: NDArray[Any]) -> NDArray[np.float32]:
    """Grey values, 0 to 255, as the network takes them."""
    scaled: NDArray[np.float32] = voxels.astype(np.float32)
    scaled -= IMAGE_MEAN
    scaled /= IMAGE_DEVIATION
    return scaled


class ResidualModule(nn.Module):
    """Two convolutions of 3 x 3 x 3 voxels, each after a ReLU, added to what entered."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.a = nn.Conv3d(features, features, 3, padding=1)
        self.b = nn.Conv3d(features, features, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, features, Z, Y, X] to the same shape."""
        update: Tensor = self.b(functional.relu(self.a(functional.relu(hidden))))
        return hidden + update


class FloodFillingNetwork(nn.Module):
    """The residual stack, and the geometry that it is trained for.

    Args:
        depth: Pairs of convolutions. 9 is the default of the reference implementation; the
            published weights for the FIB-25 volume are of depth 12 (638,433 parameters).
        fov: Size of the field of view.
        deltas: How far the field of view moves along each dimension.
        features: Channels of the hidden layers.
    """

    def __init__(
        self,
        depth: int = 9,
        *,
        fov: Triple = (33, 33, 33),
        deltas: Triple = (8, 8, 8),
        features: int = 32,
    ) -> None:
        super().__init__()
        self.depth, self.fov, self.deltas, self.features = depth, fov, deltas, features
        self.conv0_a = nn.Conv3d(2, features, 3, padding=1)
        self.conv0_b = nn.Conv3d(features, features, 3, padding=1)
        self.residual = nn.ModuleList(ResidualModule(features) for _ in range(depth - 1))
        self.conv_lom = nn.Conv3d(features, 1, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As published: normal with deviation 0.01, cut off at two deviations; no bias."""
        for module in self.modules():
            if isinstance(module, nn.Conv3d):
                limit = 2 * INITIAL_DEVIATION
                nn.init.trunc_normal_(module.weight, std=INITIAL_DEVIATION, a=-limit, b=limit)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        """The new mask.

        Args:
            image: [N, 1, Z, Y, X], scaled by `scale_image`.
            mask: [N, 1, Z, Y, X], logits.

        Returns:
            [N, 1, Z, Y, X], logits.
        """
        hidden = self.hidden(torch.cat((image, mask), dim=1))
        update: Tensor = self.conv_lom(functional.relu(hidden))
        return mask + update

    def hidden(self, given: Tensor) -> Tensor:
        """What the residual stack makes of image and mask, [N, 2, Z, Y, X], before the last ReLU.

        Returns:
            [N, features, Z, Y, X].
        """
        hidden: Tensor = self.conv0_b(functional.relu(self.conv0_a(given)))
        for module in self.residual:
            hidden = module(hidden)
        return hidden
