"""Measures the links between ranks while training, each alone with its probe.

Gloo says that a message is through only to who waits for it, so transfers of the exchange itself
blame links that only stood behind a slow one. Here two ranks send to each other and nothing else.
Invariant: ranks meet in the rounds of `pairings`, which is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

from headway.collective.packing.graph import LinkGraph
from headway.collective.probing import BURST, pairings, probe_bytes
from headway.errors import HeadwayError, PeerLost, Stalled


def probe_links(
    group: dist.ProcessGroup,
    links: LinkGraph,
    *,
    doing: Callable[..., None] = lambda *_: None,
) -> LinkGraph:
    """The rates of all directions of all links, the same on all ranks; collective.

    Args:
        group: Of all ranks, on which nothing is under way; its time-out is that of a message.
        links: What is known of them: sizes follow from it, and pairs without a link are left out.
        doing: See `GradientExchange.doing`.

    Raises:
        PeerLost: Names the rank to which the connection broke.
        Stalled: Names the rank that did not come.
    """
    rank = dist.get_rank()
    rates = torch.zeros(links.ranks, links.ranks, dtype=torch.float64)
    for pairs in pairings(links):
        for peer in (sum(pair) - rank for pair in pairs if rank in pair):
            doing("waits for the probe of its link to rank %d", peer)
            out, into = probe_bytes(links.rates[rank][peer]), probe_bytes(links.rates[peer][rank])
            try:
                rates[peer, rank] = _swap(group, peer, out, into)
            except RuntimeError as error:
                raise _failed(rank, peer, error) from error
    dist.all_reduce(rates)  # of every number all ranks but one have 0: nothing is rounded
    return LinkGraph(tuple(map(tuple, rates.tolist())))


def _swap(group: dist.ProcessGroup, peer: int, out: int, into: int) -> float:
    """Bytes per second of a message of `into` bytes, while another one goes the other way.

    The clock starts when both are there, and before anything can arrive: a rank that has to wait
    for its processor measures too little by as much, and never too much.
    """
    _exchange(group, peer, 1, 1, 0)
    began = perf_counter()
    return (1 - BURST) * into / (_exchange(group, peer, out, into, 1) - began)


def _exchange(group: dist.ProcessGroup, peer: int, out: int, into: int, tag: int) -> float:
    """When what comes was there; returns when both are through. Receives first: Gloo would queue
    its notice behind what is sent."""
    received = torch.empty(into, dtype=torch.uint8)
    sent = torch.zeros(out, dtype=torch.uint8)
    arriving = dist.irecv(received, peer, group, tag)
    leaving = dist.isend(sent, peer, group, tag)
    assert arriving is not None
    assert leaving is not None
    arriving.wait()
    arrived = perf_counter()
    leaving.wait()
    return arrived


def _failed(rank: int, peer: int, error: RuntimeError) -> HeadwayError:
    why = str(error).strip().partition("\n")[0]
    where = f"rank {rank}, which measured the link between both"
    if "timed out" in why.lower() or "timeout" in why.lower():
        fix = "Look for what that rank does instead, or whether the link between both is cut."
        return Stalled(f"rank {peer} did not come", where=where, why=why, fix=fix)
    fix = "Its own error, or the signal that killed it, is the cause."
    return PeerLost(f"the connection to rank {peer} broke", where=where, why=why, fix=fix)


def slowest(*numbers: float) -> list[float]:
    """The largest of all ranks, number by number; collective."""
    shared = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    found: list[float] = shared.tolist()
    return found
