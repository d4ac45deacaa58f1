"""The parallel tensor operator: work per layer with small results, divided over ranks.

Replicated computations such as the norms of LARS and LAMB are the same on every rank. Each rank
does them for its share of the layers only, and one all-gather brings all results to all ranks:
T / P plus a small all-gather instead of T (CommLib, Shi et al. 2021, "parallel tensor operator").
Invariant: a result is computed by one rank with the code that the serial run has, and is sent as it
is, so that the outcome is the serial one bit for bit, however the layers are divided.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    Args:
        sizes: Work of each item, in any unit.
        ranks: Number of ranks P.
    """
    loads = [(0, rank) for rank in range(ranks)]
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
        owners: The rank of each item.
        own: The items of this rank, ascending.
        most: The largest number of items that a rank has.
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

    Args:
        group: The ranks that share the work; None: all.
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
            items: On every rank, in the same order.
            sizes: Work of each item, in any unit.
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
            division: From `self.division`.

        Returns:
            [items, *shape].
        """
        if not division.places:
            return rows
        padded = rows.new_zeros((division.most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        everything = rows.new_empty((self.ranks, *padded.shape))
        dist.all_gather(list(everything.unbind()), padded, group=self.group)
        places = torch.tensor(division.places, device=rows.device)
        return everything.flatten(0, 1).index_select(0, places)
