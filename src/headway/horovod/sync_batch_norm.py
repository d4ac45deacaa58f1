"""`SyncBatchNorm`: batch normalisation over the samples of all ranks.

Mean and variance are those of the joined batch, taken in two passes (the mean, then the mean square
of the differences), with as many samples as each rank has; both are summed in float64. The
exchanges are all-reduces with gradients, so that backward is the derivative of the sum of the
ranks' losses.
Source: Ioffe and Szegedy, Batch Normalization, ICML 2015, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from headway.horovod.autograd import allreduce
from headway.horovod.basics import size
from headway.horovod.exceptions import InvalidArgument
from headway.horovod.operations import Sum


class SyncBatchNorm(_BatchNorm):
    """As torch's `BatchNorm1d` to `3d`, over all ranks; arguments are theirs.

    All ranks must run it equally often, in the same order.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _check_joined(self, input: Tensor, total: int) -> None:  # noqa: A002 - torch's name
        """What all ranks know after the first exchange, and so raise together."""
        fixed = self.affine or self.running_mean is not None
        if fixed and input.shape[1] != self.num_features:
            raise InvalidArgument(
                f"SyncBatchNorm of {self.num_features} channels takes (samples, "
                f"{self.num_features}, ...), not {tuple(input.shape)}"
            )
        if total == 1:
            raise InvalidArgument(
                "SyncBatchNorm needs more than 1 value per channel in the batch of all ranks; "
                f"this rank's part is {tuple(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise (samples, channels, ...).

        Raises:
            ValueError: The input has other channels or is not of floating-point numbers, or the
                statistics would be those of one value.
        """
        self._check_input_dim(input)
        local = self.running_mean is not None and not self.training
        if local or size() == 1:
            return super().forward(input)
        if not input.is_floating_point():
            raise InvalidArgument(
                f"SyncBatchNorm takes tensors of floating-point numbers, not of {input.dtype}"
            )
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        # Sums of 16 bits lose digits.
        x = input.float() if input.element_size() < 4 else input
        wide = torch.float64
        count = x.new_tensor([input.numel() / max(input.shape[1], 1)], dtype=wide)
        sums = allreduce(torch.cat((x.sum(dims, dtype=wide), count)), op=Sum)
        total = sums[-1].detach()
        self._check_joined(input, int(total))
        mean = sums[:-1] / total
        centred = x - mean.to(x.dtype).view(shape)
        variance = allreduce(centred.square().sum(dims, dtype=wide), op=Sum) / total
        out = centred * torch.rsqrt(variance + self.eps).to(x.dtype).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        if self.training and self.track_running_stats:
            self._update(mean.detach(), variance.detach() * (total / (total - 1)), int(total))
        return out.to(input.dtype)

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor, total: int) -> None:
        """Running statistics; their variance is unbiased, that of the normalisation is not."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if not total:  # of no samples there are no statistics
            return
        momentum = self.momentum
        if momentum is None:
            assert self.num_batches_tracked is not None
            momentum = 1.0 / float(self.num_batches_tracked)
        for held, now in ((self.running_mean, mean), (self.running_var, variance)):
            if held is not None:
                held.lerp_(now.to(held.dtype), momentum)
