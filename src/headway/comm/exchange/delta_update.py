"""Exchange of optimizer updates (deltas) instead of gradients, as Adasum needs it.

Each rank's optimizer steps from the common parameters w with the rank's own gradient; the
differences w' - w are combined (Adasum: Maleki et al. 2021, section 3.3; so momentum, Adam and LAMB
work unchanged), and every rank sets w plus the combination. The optimizer's state stays local.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.comm.exchange.gradient_exchange import GradientExchange


class DeltaUpdate:
    """The two halves of a combined update.

    Args:
        optimizer: Makes this rank's own update.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._starts: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def propose(
        self,
        exchange: GradientExchange | None,
        parameters: Iterable[nn.Parameter],
        factor: float,
    ) -> None:
        """Step from the common parameters; put the differences into the exchange.

        Args:
            exchange: None in a world of one rank.
            factor: Turns this rank's gradients into those of the mean over its own samples.
        """
        self._starts = {p: p.detach().clone() for p in parameters if p.grad is not None}
        for parameter in self._starts:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        self._optimizer.step()
        if exchange is None:
            return
        for bucket in exchange.buckets:
            for index, (parameter, view) in enumerate(
                zip(bucket.parameters, bucket.views, strict=True)
            ):
                start = self._starts.get(parameter)
                bucket.arrived[index] = start is not None
                if start is not None:
                    torch.sub(parameter, start, out=view)

    @torch.no_grad()
    def adopt(self, exchange: GradientExchange | None) -> None:
        """Set every parameter to its start plus the combined difference."""
        if exchange is None:
            return
        for bucket in exchange.buckets:
            for parameter, view, used in zip(
                bucket.parameters, bucket.views, bucket.used, strict=True
            ):
                start = self._starts.get(parameter)
                if start is not None:
                    parameter.copy_(start)
                if used:
                    parameter.add_(view)
        self._starts.clear()
