"""The tally of a step: what all ranks must know together, summed in one small exchange.

It starts as soon as the last forward pass has the loss and travels while backward computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Tally:
    """Loss, count and votes of one step.

    Args:
        shares: Of this rank's micro-batches: loss sum divided by the samples of the global batch.
        counts: What the loss of each micro-batch is a sum over.
        vote: Whether this rank wants to stop after the step.
        device: Of this rank.
        together: Whether there are other ranks.
    """

    def __init__(
        self,
        shares: Sequence[Tensor],
        counts: Sequence[Tensor | float],
        *,
        vote: bool,
        device: torch.device,
        together: bool,
    ) -> None:
        self._sums = torch.stack(
            [
                _total(shares, device),
                _total(counts, device),
                torch.tensor(float(vote), dtype=torch.float64, device=device),
            ]
        )
        self._work = dist.all_reduce(self._sums, async_op=True) if together else None
        self._read: tuple[float, float, int] | None = None

    def read(self) -> tuple[float, float, int]:
        """Wait; returns the loss share, the count, and the number of votes of all ranks."""
        if self._read is None:
            if self._work is not None:
                self._work.wait()
            share, count, votes = self._sums.tolist()
            self._read = share, count, round(votes)
        return self._read


def _total(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for value in values:
        total += value.detach() if isinstance(value, Tensor) else value
    return total
