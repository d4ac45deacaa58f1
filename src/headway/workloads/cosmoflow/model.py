"""CosmoFlow: four parameters of a universe from a cube of its matter at four redshifts.

Two variants: that of LBANN's applications (Oyama et al. 2020, "The Case for Strong Scaling in Deep
Learning: Training Large 3D CNNs with Hybrid Parallelism") and that of MLPerf HPC. Both halve the
cube until 4^3 entries are left and end in three layers over all of it.

Names of shapes: N samples, C channels, D H W depth, height, width, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

# ruff: noqa: N803, N806 (shape suffixes)


REDSHIFTS = 4
PARAMETERS = 4
LAST_WIDTH = 4
SLOPE = 0.3
OUTPUT_RANGE = 1.2
"""The output is 1.2 tanh(x): targets of -1 and 1 are reached by finite x."""

FIRST_OUTPUT = 0.3
"""Deviation of what goes into tanh at first: it learns nothing far from 0."""

Pooling = Literal["average", "max"]


@dataclass(frozen=True, kw_only=True)
class CosmoFlowConfig:
    """The sizes of a model; `lbann`, `mlperf` and `small` make the usual ones.

    Attributes:
        width: Entries along each side of the cube: a power of two, at least 8.
        channels: Of the first block; each further block has twice as many.
        pooling: "average" (3, stride 2, padding 1) or "max" (2).
        hidden: Outputs of the two hidden layers behind the blocks.
        batch_norm: Normalise behind each convolution, which then has no bias.
        dropout: Share of the hidden layers' outputs that is dropped in training.

    Raises:
        ValueError: A size is none of these, or `dropout` is outside [0, 1).
    """

    width: int
    channels: int
    most_channels: int
    pooling: Pooling
    hidden: tuple[int, int]
    batch_norm: bool = False
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.width < 2 * LAST_WIDTH or self.width & (self.width - 1):
            raise ValueError(f"width is {self.width}; it must be a power of two, at least 8")
        for name in ("channels", "most_channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if min(self.hidden) < 1:
            raise ValueError(f"hidden is {self.hidden}; layers have at least one output")
        if self.pooling not in ("average", "max"):
            raise ValueError(f"pooling is {self.pooling!r}; it must be 'average' or 'max'")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    @property
    def features(self) -> tuple[int, ...]:
        """Channels of each of the log2(width) - 2 blocks."""
        blocks = self.width.bit_length() - 1 - 2
        return tuple(min(self.channels << i, self.most_channels) for i in range(blocks))


def lbann(width: int, *, batch_norm: bool = False) -> CosmoFlowConfig:
    """LBANN's variant: 16 to 256 channels, average pooling, layers of 2048 and 256."""
    return CosmoFlowConfig(
        width=width,
        channels=16,
        most_channels=256,
        pooling="average",
        hidden=(2048, 256),
        batch_norm=batch_norm,
    )


def mlperf(width: int) -> CosmoFlowConfig:
    """MLPerf HPC's variant: 32 to 512 channels, maxima, layers of 128 and 64."""
    return CosmoFlowConfig(
        width=width, channels=32, most_channels=512, pooling="max", hidden=(128, 64)
    )


def small(width: int = 32, *, dropout: float = 0.0) -> CosmoFlowConfig:
    """LBANN's blocks with MLPerf's small layers: trains on a CPU."""
    return CosmoFlowConfig(
        width=width,
        channels=16,
        most_channels=256,
        pooling="average",
        hidden=(128, 64),
        dropout=dropout,
    )


class CosmoFlowBlock(nn.Sequential):
    """Convolution 3^3, perhaps a norm, LeakyReLU, pooling: half the width."""

    def __init__(self, entering: int, leaving: int, config: CosmoFlowConfig) -> None:
        layers: list[nn.Module] = [
            nn.Conv3d(entering, leaving, 3, padding=1, bias=not config.batch_norm)
        ]
        if config.batch_norm:
            layers.append(nn.BatchNorm3d(leaving, momentum=0.01))
        layers.append(nn.LeakyReLU(SLOPE))
        average = config.pooling == "average"
        layers.append(nn.AvgPool3d(3, stride=2, padding=1) if average else nn.MaxPool3d(2))
        super().__init__(*layers)


class CosmoFlow(nn.Module):
    """Blocks, then three layers over what is left of the cube."""

    def __init__(self, config: CosmoFlowConfig) -> None:
        super().__init__()
        self.config = config
        channels = (REDSHIFTS, *config.features)
        self.blocks = nn.Sequential(*(CosmoFlowBlock(a, b, config) for a, b in pairwise(channels)))
        first, second = config.hidden
        self.head = nn.Sequential(
            nn.Linear(channels[-1] * LAST_WIDTH**3, first),
            nn.LeakyReLU(SLOPE),
            nn.Dropout(config.dropout),
            nn.Linear(first, second),
            nn.LeakyReLU(SLOPE),
            nn.Dropout(config.dropout),
            nn.Linear(second, PARAMETERS),
        )
        initialise(self)

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Parameters, scaled as their targets.

        Args:
            x_NCDHW: log(1 + matter) at the four redshifts, `width` entries along each side.

        Returns:
            y_NP: in (-1.2, 1.2).

        Raises:
            ValueError: The cube has another shape.
        """
        shape, width = tuple(x_NCDHW.shape[1:]), self.config.width
        if shape != (REDSHIFTS, width, width, width):
            raise ValueError(f"samples of shape {shape} do not fit a cube of {width}^3 x 4")
        hidden = self.head(self.blocks(x_NCDHW).flatten(1))
        y_NP: Tensor = OUTPUT_RANGE * torch.tanh(hidden)
        return y_NP


@torch.no_grad()
def fit(model: CosmoFlow, x_NCDHW: Tensor) -> None:
    """Shift and scale the initial weights: results of each layer get mean 0 and deviation 1.

    Universes differ by a few percent, so that He's initial weights give results of which nearly all
    is common to all samples, and gradients that are nearly all noise about it: for hundreds of
    steps nothing is learned. Layer by layer, over samples and places, as Krähenbühl et al. 2016,
    "Data-dependent Initializations of Convolutional Neural Networks", section 3.1; the last layer
    gets deviation `FIRST_OUTPUT`.

    Args:
        model: Without batch normalisation, which does this in every step. Not on the meta device.
        x_NCDHW: Samples.
    """
    x, training = x_NCDHW, model.training
    model.eval()
    blocks = (layer for block in model.blocks for layer in block.children())
    for layer in (*blocks, nn.Flatten(), *model.head):
        if isinstance(layer, nn.Conv3d | nn.Linear):
            assert layer.bias is not None
            y = layer(x).transpose(0, 1).flatten(1)
            deviation = y.std(dim=1)
            wanted = FIRST_OUTPUT if layer is model.head[-1] else 1.0
            scale = torch.where(deviation > 0, wanted / deviation, 1.0)
            layer.weight.mul_(scale.view(-1, *(1,) * (layer.weight.ndim - 1)))
            layer.bias.sub_(y.mean(dim=1)).mul_(scale)
        x = layer(x)
    model.train(training)


def initialise(model: nn.Module) -> None:
    """Weights normal with variance 2 / inputs of a sum (He et al. 2015, eq. 10), biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
