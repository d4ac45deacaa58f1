"""The collectives of encoded payloads, under the names that each version of torch has for them.

Only operations with a future, no point-to-point ones: a lane with several buckets in flight must
not block in one of them.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from headway.comm.method import Route


def all_reduce(payload: Tensor, route: Route) -> dist.Work:
    """Start to sum a tensor over the ranks in place."""
    work: dist.Work = dist.all_reduce(payload, group=route.group, async_op=True)
    return work


def all_gather(rows: Tensor, payload: Tensor, route: Route) -> dist.Work:
    """Start to gather every rank's payload.

    Args:
        rows: uint8[ranks, bytes].
        payload: uint8[bytes].
        route: Row r is that of `route.ranks[r]`.
    """
    # torch 2.13 has a new name and warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(rows.view(-1), payload, group=route.group, async_op=True)
    return work


def all_to_all(rows: Tensor, payloads: Tensor, route: Route) -> dist.Work:
    """Start to send row r of `payloads` to rank r, and to receive its row for this rank.

    Args:
        rows: uint8[ranks, bytes]; row r comes from rank r.
        payloads: uint8[ranks, bytes].
        route: See `all_gather`.
    """
    out, own = rows.view(-1), payloads.view(-1)
    work: dist.Work = dist.all_to_all_single(out, own, group=route.group, async_op=True)
    return work


def place(route: Route) -> int:
    """Which row is this rank's."""
    return route.ranks.index(route.rank)
