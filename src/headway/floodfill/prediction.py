"""The network as inference calls it: one field of view, few passes over memory, in a precision.

Convolutions of 32 channels take nearly all of the time; channels last they run near the processor's
peak, and what lies between them is done by them.
"""

from __future__ import annotations

import copy
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.floodfill.canvas import Mask
from headway.floodfill.network import FloodFillingNetwork, ResidualModule

Precision = Literal["float32", "bfloat16"]
_GEOMETRY = ([1, 1, 1], [1, 1, 1], [1, 1, 1], 1)
"""Padding, stride, dilation and groups of a convolution."""


class FovPredictor:
    """Calls a network on one field of view (`canvas.Predict`).

    Args:
        precision: Of the layers. The mask is kept in float32 in either case, so that updates add up
            exactly; bfloat16 is inexact: see docs/floodfill.md for what it changes.
    """

    def __init__(self, network: FloodFillingNetwork, precision: Precision = "float32") -> None:
        self._dtype = getattr(torch, precision)
        self._fused = _can_fuse(self._dtype)
        self._network = (
            copy.deepcopy(network).eval().to(self._dtype).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        )
        self._input = torch.empty((1, 2, *network.fov), dtype=self._dtype).contiguous(
            memory_format=torch.channels_last_3d
        )

    @torch.inference_mode()
    def __call__(self, image: Mask, mask: Mask) -> Mask:
        """New logits [z, y, x] of an image and a mask of that shape."""
        old = torch.from_numpy(mask)
        self._input[0, 0].copy_(torch.from_numpy(np.ascontiguousarray(image)))
        self._input[0, 1].copy_(old)
        update = self._update(self._input)[0, 0]
        new: Mask = (old + update).numpy()
        return new

    def _update(self, given: Tensor) -> Tensor:
        """`FloodFillingNetwork.forward` without the mask's addition."""
        network = self._network
        hidden = _hidden(network, given) if self._fused else network.hidden(given)
        # In float32, as the mask is. Not with torch's convolution of one voxel, which takes 9 ms in
        # place of 1, nor its product with a vector: the last bits depend on the number of threads.
        weight, bias = (part.float().view(-1) for part in network.conv_lom.parameters())
        voxels = (hidden.relu_().permute(0, 2, 3, 4, 1).float() * weight).sum(dim=-1)
        update: Tensor = (voxels + bias).unsqueeze(1)
        return update


# -- oneDNN's convolutions with what follows them, which torch has for its compiler alone ----------


def _can_fuse(dtype: torch.dtype) -> bool:
    mkldnn = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and (
        dtype == torch.float32 or bool(mkldnn._is_mkldnn_bf16_supported())
    )


def _hidden(network: FloodFillingNetwork, given: Tensor) -> Tensor:
    """`FloodFillingNetwork.hidden`, with fewer passes over memory.

    In bfloat16 the ReLU and the addition after a convolution, each a pass of its own, take a third
    of the time.
    """
    hidden = _convolve(network.conv0_b, _convolve(network.conv0_a, given, "relu"))
    for module in network.residual:
        assert isinstance(module, ResidualModule)
        update, b = _convolve(module.a, functional.relu(hidden), "relu"), module.b
        torch.ops.mkldnn._convolution_pointwise_.binary(
            hidden, update, b.weight, b.bias, *_GEOMETRY, "add", 1.0, None, [], None
        )
    return hidden


def _convolve(layer: nn.Conv3d, given: Tensor, then: str = "none") -> Tensor:
    made: Tensor = torch.ops.mkldnn._convolution_pointwise(
        given, layer.weight, layer.bias, *_GEOMETRY, then, [], ""
    )
    return made
