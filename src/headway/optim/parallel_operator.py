"""The parallel tensor operator (PTO): replicated work per layer, divided over the ranks.

Replicated computations such as the norms of LARS and LAMB are the same on every rank. Each rank
does its share of the layers, and one all-gather brings all results to all ranks: T / P plus a small
all-gather instead of T (CommLib, Shi et al. 2021). A result is computed by one rank with the serial
code and sent as it is, so the outcome is the serial one bit for bit.

`SharedNorms` decides whether that pays: T (1 - h) > latency, with T the time of all norms on one
rank and h the fullest rank's part of the work (1 / P at best). Both are measured in the first
steps, from which all ranks decide equally; until then each computes everything.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


def divide(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The rank of each item: the largest first, each to the rank with the least so far.

    Graham 1969 (longest processing time first): the fullest rank has at most 4/3 - 1/(3 P) times
    what the best division would give it. Ties go to the lower item and the lower rank, so that all
    ranks find the same.
    """
    loads = [(0, rank) for rank in range(ranks)]  # a heap: it begins sorted
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + sizes[item], rank))
        owners[item] = rank
    return tuple(owners)


@dataclass(frozen=True, slots=True)
class Division:
    """Who computes what.

    Attributes:
        places: Where each item's result stands after the all-gather of `most` rows per rank.
        heaviest: The fullest rank's part of all work; 1 / P at best.
    """

    owners: tuple[int, ...]
    own: tuple[int, ...]
    most: int
    places: tuple[int, ...]
    heaviest: float

    @staticmethod
    def of(sizes: Sequence[int], rank: int, ranks: int) -> Division:
        """The division of `divide`, seen by one rank."""
        owners = divide(sizes, ranks)
        counts, loads = [0] * ranks, [0] * ranks
        slots = []
        for size, owner in zip(sizes, owners, strict=True):
            slots.append(counts[owner])
            counts[owner] += 1
            loads[owner] += size
        most = max(counts)
        return Division(
            owners=owners,
            own=tuple(item for item, owner in enumerate(owners) if owner == rank),
            most=most,
            places=tuple(o * most + slot for o, slot in zip(owners, slots, strict=True)),
            heaviest=max(loads) / max(1, sum(loads)),
        )


class ParallelOperator:
    """Applies a function to every item, each on one rank, and gives all ranks all results.

    All ranks of the group must call it with the same sizes, and what they compute from must be the
    same on all of them (parameters and summed gradients of data parallelism are). No two threads
    may use one group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._sizes: tuple[int, ...] = ()
        self._division = Division.of((), self.rank, self.ranks)

    def division(self, sizes: Sequence[int]) -> Division:
        """Who computes what; kept for the next call with the same sizes."""
        if self._sizes != (asked := tuple(sizes)):
            self._division = Division.of(asked, self.rank, self.ranks)
            self._sizes = asked
        return self._division

    def map(
        self,
        function: Callable[[Item], Tensor],
        items: Sequence[Item],
        sizes: Sequence[int],
        *,
        like: Tensor,
    ) -> Tensor:
        """`function(item)` of all items, stacked: [items, *shape of a result].

        Args:
            function: Called for the items of this rank only.
            like: A tensor with shape, type and device of one result, for ranks without items.
        """
        division = self.division(sizes)
        own = [function(items[item]) for item in division.own]
        rows = torch.stack(own) if own else like.new_empty((0, *like.shape))
        return self.gather(rows.to(like), division)

    def gather(self, rows: Tensor, division: Division) -> Tensor:
        """One all-gather: the results of all items, from those of this rank's own.

        Args:
            rows: [own items, *shape], in the order of `division.own`.

        Returns:
            [items, *shape].
        """
        if not division.places:
            return rows
        # An all-gather needs equal sizes; ranks have shares of different length.
        padded = rows.new_zeros((division.most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        everything = rows.new_empty((self.ranks, *padded.shape))
        dist.all_gather(list(everything.unbind()), padded, group=self.group)
        places = torch.tensor(division.places, device=rows.device)
        return everything.flatten(0, 1).index_select(0, places)


WARM_STEPS = 2
"""Steps that are not timed: the first ones allocate."""
TIMED_STEPS = 5
"""Steps and all-gathers that are timed; the median counts."""


class SharedNorms:
    """The division of one optimiser's norms.

    Attributes:
        pays: Whether dividing them does; None: it is not measured yet.
    """

    def __init__(self, operator: ParallelOperator, *, always: bool = False) -> None:
        self.operator = operator
        self.pays: bool | None = None
        self._always = always
        self._division = operator.division(())
        self._seconds: list[float] = []
        self._calls = 0

    def own(self, sizes: Sequence[int], device: torch.device) -> tuple[int, ...] | None:
        """The layers whose norms this rank computes in this step; None: all of them.

        Args:
            sizes: Elements of the step's layers; the same on all ranks.
        """
        if not sizes:
            return None
        self._division = self.operator.division(sizes)
        if self._always:
            return self._division.own
        if self.pays is None:
            self._calls += 1
            if self._calls > WARM_STEPS + TIMED_STEPS:
                self.pays = self._decide(device)
            elif self._calls > WARM_STEPS:
                # One entry per timed step, to which `_timed` adds every chunk.
                self._seconds.append(0.0)
        return self._division.own if self.pays else None

    def gather(self, rows: Tensor) -> Tensor:
        """The norms of all layers from those of the own ones, in the order of `own`."""
        return self.operator.gather(rows, self._division)

    def clock(self, device: torch.device) -> AbstractContextManager[None]:
        """Times what is done inside as part of this step's norms, while that is wanted."""
        if self.pays is not None or not self._seconds:
            return nullcontext()
        return self._timed(device)

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        _finish(device)  # or what was queued before would be timed as well
        start = perf_counter()
        yield
        _finish(device)
        self._seconds[-1] += perf_counter() - start

    def _decide(self, device: torch.device) -> bool:
        """Measure the all-gather, and agree; collective."""
        rows = torch.zeros(len(self._division.own), 2, dtype=torch.float64, device=device)
        gathers = []
        for _ in range(WARM_STEPS + TIMED_STEPS):
            start = perf_counter()
            self.gather(rows)
            _finish(device)
            gathers.append(perf_counter() - start)
        # One all-reduce of maxima: the slowest all-gather counts, and of the norms (negated) the
        # least time, so that all ranks decide equally and divide only where every rank gains.
        found = [statistics.median(gathers[WARM_STEPS:]), -statistics.median(self._seconds)]
        agreed = torch.tensor(found, dtype=torch.float64, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.operator.group)
        gather_seconds, norm_seconds = float(agreed[0]), -float(agreed[1])
        return norm_seconds * (1 - self._division.heaviest) > gather_seconds


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
