"""3-D U-Nets: a label for every voxel.

Two variants. `CicekUNet` is that of LBANN's applications (Cicek et al. 2016, "3D U-Net: Learning
Dense Volumetric Segmentation from Sparse Annotation", with padding, so that sizes stay): batch
normalisation, maxima on the way down. `MLPerfUNet` is that of MLPerf training: instance
normalisation, strided convolutions on the way down.

Names of shapes: N samples, C channels or classes, D H W depth, height, width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

# ruff: noqa: N803, N806 (shape suffixes)


CICEK_WIDTH = 32
MLPERF_WIDTHS = (32, 64, 128, 256, 320, 320)
SMALL_WIDTHS = (8, 16, 32)

Norm = Callable[[int], nn.Module]


def _instance_norm(channels: int) -> nn.Module:
    return nn.InstanceNorm3d(channels, affine=True)


def _convolution(entering: int, leaving: int, norm: Norm, stride: int = 1) -> nn.Sequential:
    """Convolution 3^3 without a bias, norm, ReLU."""
    return nn.Sequential(
        nn.Conv3d(entering, leaving, 3, stride=stride, padding=1, bias=False),
        norm(leaving),
        nn.ReLU(),
    )


def _pair(entering: int, middle: int, leaving: int, norm: Norm, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        _convolution(entering, middle, norm, stride), _convolution(middle, leaving, norm)
    )


class _UNet(nn.Module):
    """The way down, and up again beside what was found on the way down.

    Args:
        down: From the finest level to the coarsest.
        up: Doubles the width, from the coarsest level to the finest; one fewer than `down`.
        mix: Behind each of `up`, over its result and the level's own.
    """

    def __init__(
        self,
        down: Sequence[nn.Module],
        up: Sequence[nn.Module],
        mix: Sequence[nn.Module],
        last: nn.Module,
    ) -> None:
        super().__init__()
        self.down = nn.ModuleList(down)
        self.up = nn.ModuleList(up)
        self.mix = nn.ModuleList(mix)
        self.last = last

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Scores of each class at each voxel; a softmax over dimension 1 makes them shares.

        Args:
            x_NCDHW: Volumes; each side is a multiple of 2^(levels - 1).

        Returns:
            scores_NCDHW: of the same width.

        Raises:
            ValueError: A side is no such multiple.
        """
        factor, sides = 2 ** len(self.up), tuple(x_NCDHW.shape[2:])
        if any(side % factor for side in sides):
            raise ValueError(f"sides of {sides} voxels; each must be a multiple of {factor}")
        levels = []
        x = x_NCDHW
        for part in self.down:
            x = part(x)
            levels.append(x)
        for up, mix, level in zip(self.up, self.mix, reversed(levels[:-1]), strict=True):
            x = mix(torch.cat((up(x), level), dim=1))
        scores_NCDHW: Tensor = self.last(x)
        return scores_NCDHW


class CicekUNet(_UNet):
    """Four levels of (w, 2w), (2w, 4w), ... channels, batch normalisation.

    With 32 channels, one channel in and three classes it has 19,070,560 parameters.

    Args:
        levels: At least 1.
    """

    def __init__(
        self, channels: int = 1, classes: int = 3, *, width: int = CICEK_WIDTH, levels: int = 4
    ) -> None:
        sizes = [width << level for level in range(levels + 1)]
        entering = (channels, *sizes[1:-1])
        norm: Norm = nn.BatchNorm3d
        pairs = [
            _pair(into, middle, leaving, norm)
            for into, (middle, leaving) in zip(entering, pairwise(sizes), strict=True)
        ]
        down = [pairs[0], *(nn.Sequential(nn.MaxPool3d(2), pair) for pair in pairs[1:])]
        rising = sizes[:1:-1]
        super().__init__(
            down,
            [nn.ConvTranspose3d(size, size, 2, stride=2, bias=False) for size in rising],
            [_pair(size + size // 2, size // 2, size // 2, norm) for size in rising],
            nn.Conv3d(sizes[1], classes, 1, bias=False),
        )


class MLPerfUNet(_UNet):
    """One level for each of `widths`, instance normalisation.

    `MLPerfUNet()` is the benchmark's; `MLPerfUNet(2, 4, widths=SMALL_WIDTHS)` (two images of a
    head, four classes, 85,420 parameters) trains on a CPU.

    Args:
        widths: Channels of each level, the finest first.
    """

    def __init__(
        self, channels: int = 1, classes: int = 3, *, widths: Sequence[int] = MLPERF_WIDTHS
    ) -> None:
        norm: Norm = _instance_norm
        down = [_pair(channels, widths[0], widths[0], norm)]
        down += [_pair(a, b, b, norm, stride=2) for a, b in pairwise(widths)]
        rising = list(pairwise(reversed(widths)))
        super().__init__(
            down,
            [nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in rising],
            [_pair(2 * b, b, b, norm) for _, b in rising],
            nn.Conv3d(widths[0], classes, 1),
        )
