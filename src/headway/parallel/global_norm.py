"""Batch normalisation over the global batch: the statistics of the samples of all ranks.

What torch's `SyncBatchNorm` does, on CPUs too and without another module: while `GlobalNorm` is
active, every `torch.nn.functional.batch_norm` in training, which all modules call, takes mean and
variance over the ranks, with one exchange in the forward pass and one in the backward pass. Each
rank's share must go through the model at once: a micro-batch knows nothing of those that follow.
Source: Ioffe and Szegedy, Batch Normalization, ICML 2015, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headway.parallel.spatial.pointwise_and_reductions import batch_norm_over
from headway.parallel.split_tensor import SpatialAxis
from headway.parallel.tables import taken


class GlobalNorm(TorchFunctionMode):
    """Inside, batch normalisation in training is over the samples of a group of ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._axis = SpatialAxis.of(group)
        self._counted = True

    @contextmanager
    def over(self, *, counted: bool) -> Iterator[None]:
        """A forward or backward pass of this rank.

        Args:
            counted: Whether its samples belong to the batch; else it takes part and adds nothing.
        """
        self._counted = counted
        # What Dynamo has compiled does not ask a mode.
        with torch.compiler.set_stance("force_eager"), self:
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        if func is functional.batch_norm:
            return self._batch_norm(*args, **keywords)
        return func(*args, **keywords)

    def _batch_norm(
        self,
        input: Tensor,  # noqa: A002 - torch's name
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return functional.batch_norm(
                input, running_mean, running_var, weight, bias, False, momentum, eps
            )
        running, x = (running_mean, running_var), taken(input)
        return batch_norm_over(self._axis, self._counted, x, running, weight, bias, momentum, eps)
