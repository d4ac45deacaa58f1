"""Repacks the all-reduce program of an exchange whose links have drifted.

Twice in a second of steps the ranks compare how long they were blocked, and from that decide when
to measure the links. Rank 0 then packs trees and broadcasts the program. All ranks compare, measure
and switch after the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import cast

import torch
import torch.distributed as dist

from headway.channel.facts import broadcast_facts
from headway.collective.all_reduce.algorithm import AllReduceKind, AllReduceOptions
from headway.collective.all_reduce.repacking import (
    PROBE_BURST_SHARE,
    ProbePolicy,
    Repacking,
    find_drift,
    find_repacking,
    links_of_options,
    pairings,
    probe_bytes,
    probe_seconds,
    reconcile_measurements,
    steps_to_vote,
)
from headway.collective.topology import LinkGraph
from headway.comm.lanes.buckets import Bucket, BucketTiming
from headway.comm.lanes.routes import RoutePool
from headway.errors import HeadwayError, PeerLost, Stalled
from headway.plans import ExchangePlan


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

    Raises:
        PeerLost: Names the rank to which the connection broke.
        Stalled: Names the rank that did not come.
    """
    # Two ranks at a time and nothing else: Gloo completes a message only for the rank that waits
    # for it, so that transfers of the exchange itself would blame links queued behind a slow one.
    rank = dist.get_rank()
    rates = torch.zeros(links.ranks, links.ranks, dtype=torch.float64)
    for pairs in pairings(links):
        for peer in (sum(pair) - rank for pair in pairs if rank in pair):
            doing("waits for the probe of its link to rank %d", peer)
            out, into = probe_bytes(links.rates[rank][peer]), probe_bytes(links.rates[peer][rank])
            try:
                rates[peer, rank] = _probe_pair(group, peer, out, into)
            except RuntimeError as error:
                raise _failed(rank, peer, error) from error
    dist.all_reduce(rates)  # all ranks but one have 0 for each number: nothing is rounded
    return LinkGraph(tuple(map(tuple, rates.tolist())))


def _probe_pair(group: dist.ProcessGroup, peer: int, out: int, into: int) -> float:
    """Bytes per second of a message of `into` bytes, while another one goes the other way."""
    # The clock starts when both ranks are there and before anything can arrive: a rank that waits
    # for its processor measures too low a rate, never too high a one.
    _exchange(group, peer, 1, 1, 0)
    began = perf_counter()
    return (1 - PROBE_BURST_SHARE) * into / (_exchange(group, peer, out, into, 1) - began)


def _exchange(group: dist.ProcessGroup, peer: int, out: int, into: int, tag: int) -> float:
    """Send and receive; returns the moment at which the received message was complete."""
    received = torch.empty(into, dtype=torch.uint8)
    sent = torch.zeros(out, dtype=torch.uint8)
    # The receive first: Gloo would queue its notice behind what is sent.
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


def max_over_ranks(*numbers: float, device: torch.device | None = None) -> list[float]:
    """The largest of all ranks, number by number; collective."""
    shared = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    found: list[float] = shared.tolist()
    return found


# Another program for an exchange whose links have drifted, found between two steps.


# Steps until the first comparison: step 1 also pays for allocations.
FIRST_VOTE = 3


class LinkMonitor:
    """Measures the links of an exchange that uses a collective program.

    Args:
        links: What the plan says of them.
        tell: Called with sentences about what has drifted.
        doing: See `GradientExchange.doing`.
    """

    def __init__(
        self,
        links: LinkGraph,
        routes: RoutePool,
        tell: Callable[[str], None],
        doing: Callable[..., None],
    ) -> None:
        self.links = links
        self.watch = ProbePolicy(probe_seconds(links))
        self._routes = routes
        self._tell = tell
        self._doing = doing
        self._vote_after = FIRST_VOTE
        self._flights: tuple[BucketTiming, ...] = ()
        self._steps, self._exposed, self._began = 0, 0.0, perf_counter()

    @classmethod
    def of(
        cls,
        description: ExchangePlan,
        routes: RoutePool,
        tell: Callable[[str], None],
        doing: Callable[..., None],
    ) -> LinkMonitor | None:
        """None: this exchange keeps its program, or no other one is possible."""
        links = links_of_options(description.carrier)
        if not (description.carried and description.repack) or links is None:
            return None
        # A probe would not see links that are slowed down by ourselves (`pace`).
        if links.ranks < 3 or links.ranks != routes.size or routes.pace is not None:
            return None
        return cls(links, routes, tell, doing)

    def step(self, buckets: Sequence[Bucket]) -> bool:
        """A step is over: whether to measure now. Now and then collective."""
        # With priority the last waits of a step are only known one step later.
        self._exposed += sum(flight.waited for flight in self._flights)
        self._flights = tuple(bucket.flight for bucket in buckets)
        self._steps += 1
        if self._steps < self._vote_after:
            return False
        steps = self._steps
        seconds, exposed = max_over_ranks(perf_counter() - self._began, self._exposed)
        self._vote_after = steps_to_vote(seconds / steps)
        self._restart()
        return self.watch.vote(steps, seconds, exposed)

    def _restart(self) -> None:
        self._steps, self._exposed, self._began = 0, 0.0, perf_counter()

    def follow(
        self, description: ExchangePlan, sizes: Sequence[int], element_bytes: int
    ) -> ExchangePlan | None:
        """Measure all links; collective, while nothing is under way.

        Args:
            sizes: Bytes of the sums of a step.

        Returns:
            The exchange from now on; None: as it is.
        """
        began = perf_counter()
        found = self._measured(description, sizes, element_bytes)
        (cost,) = max_over_ranks(perf_counter() - began)
        self.watch.measured(cost, changed=found is not None and found.changes)
        self._restart()
        self._flights = ()
        if found is None:
            return None
        for sentence in found.sentences():
            self._tell(sentence)
        if not found.changes:
            return None
        return replace(description, collective=found.after.kind, carrier=found.after.carrier)

    def _measured(
        self, description: ExchangePlan, sizes: Sequence[int], element_bytes: int
    ) -> Repacking | None:
        """Only drift that two measurements show counts."""
        measured = self._probe(self.links)
        drifts, links = find_drift(self.links, measured)
        if drifts:
            measured = reconcile_measurements(self.links, measured, self._probe(self.links))
            drifts, links = find_drift(self.links, measured)
        if not drifts:
            # At the present level of all links, which may have changed together.
            self.links = links
            return None
        decided: Repacking | None = None
        # All ranks have the same numbers, but their math libraries may round differently.
        if dist.get_rank() == 0:
            kind = cast(AllReduceKind, description.collective)
            carrier = description.carrier or AllReduceOptions()
            decided = find_repacking(kind, carrier, self.links, measured, sizes, element_bytes)
        found: Repacking | None = broadcast_facts(decided)
        assert found is not None  # rank 0 has seen the same drift
        self.links = found.links
        return found

    def _probe(self, links: LinkGraph) -> LinkGraph:
        return probe_links(self._routes.own().group, links, doing=self._doing)
