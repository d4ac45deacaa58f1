"""Whether and how the norms of an optimiser are divided over ranks.

The division pays where T (1 - h) > latency, with T the time of all norms on one rank, h the fullest
rank's part of the work (1 / P at best) and the latency of one all-gather of the results (CommLib,
Shi et al. 2021, with h for 1 / P). Both are measured once, in the first steps. Invariant: all ranks
decide from the same numbers in the same step, and until then they compute everything themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from headway.optim.pto import ParallelOperator

WARM_STEPS = 2
"""Steps that are not timed: the first ones allocate."""
TIMED = 5
"""Steps and all-gathers that are timed; the median counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was decided, and from what.

    Attributes:
        pays: Whether the norms are divided.
        norm_seconds: All norms on one rank: the least over the ranks.
        gather_seconds: One all-gather of them: the most over the ranks.
        heaviest: The fullest rank's part of the work.
    """

    pays: bool
    norm_seconds: float
    gather_seconds: float
    heaviest: float


class SharedNorms:
    """The division of one optimiser's norms.

    Args:
        operator: Of the ranks that share.
        always: Divide without measuring.
    """

    def __init__(self, operator: ParallelOperator, *, always: bool = False) -> None:
        self.operator = operator
        self.choice: Choice | None = None
        self._always = always
        self._division = operator.division(())
        self._seconds: list[float] = []
        self._calls = 0

    def own(self, sizes: Sequence[int], device: torch.device) -> tuple[int, ...] | None:
        """The layers whose norms this rank computes in this step; None: all of them.

        Args:
            sizes: Elements of the step's layers; the same on all ranks.
            device: Where the norms are computed.
        """
        if not sizes:
            return None
        self._division = self.operator.division(sizes)
        if self._always:
            return self._division.own
        if self.choice is None:
            self._calls += 1
            if self._calls > WARM_STEPS + TIMED:
                self.choice = self._decide(device)
            elif self._calls > WARM_STEPS:
                self._seconds.append(0.0)
        return self._division.own if self.choice is not None and self.choice.pays else None

    def gather(self, rows: Tensor) -> Tensor:
        """The norms of all layers from those of the own ones, in the order of `own`."""
        return self.operator.gather(rows, self._division)

    def clock(self, device: torch.device) -> AbstractContextManager[None]:
        """Times what is done inside as part of this step's norms, while that is wanted."""
        if self.choice is not None or not self._seconds:
            return nullcontext()
        return self._timed(device)

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        _finish(device)
        start = perf_counter()
        yield
        _finish(device)
        self._seconds[-1] += perf_counter() - start

    def _decide(self, device: torch.device) -> Choice:
        """Collective: measure the all-gather, and agree."""
        rows = torch.zeros(len(self._division.own), 2, dtype=torch.float64, device=device)
        gathers = []
        for _ in range(WARM_STEPS + TIMED):
            start = perf_counter()
            self.gather(rows)
            _finish(device)
            gathers.append(perf_counter() - start)
        found = [statistics.median(gathers[WARM_STEPS:]), -statistics.median(self._seconds)]
        agreed = torch.tensor(found, dtype=torch.float64, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.operator.group)
        gather_seconds, norm_seconds = float(agreed[0]), -float(agreed[1])
        heaviest = self._division.heaviest
        return Choice(
            pays=norm_seconds * (1 - heaviest) > gather_seconds,
            norm_seconds=norm_seconds,
            gather_seconds=gather_seconds,
            heaviest=heaviest,
        )


def _finish(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
