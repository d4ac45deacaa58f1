"""Another program for an exchange whose links have drifted, found between two steps.

Twice in a second of steps ranks compare how long they stood still; a `Watch` decides from it
when links are measured. Rank 0 then packs, and tells the others. Invariant: all ranks compare,
measure and change after the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import cast

import torch.distributed as dist

from headway.collective.carrier import Carrier, Kind
from headway.collective.packing.graph import LinkGraph
from headway.collective.probing import Watch, probe_seconds, steps_to_vote
from headway.collective.repacking import Repacking, agreed, find_repacking, links_of, seen
from headway.comm.buckets import Bucket
from headway.comm.flight import Flight
from headway.comm.probe import probe_links, slowest
from headway.comm.routes import Routes
from headway.plan import Exchange

FIRST_VOTE = 3
"""Steps until the first comparison: the very first one pays for allocations."""


class LinkWatch:
    """Looks after the links of an exchange whose sums a program carries.

    Args:
        links: What the plan says of them.
        routes: Of this process.
        tell: Called with sentences about what has drifted.
        doing: See `GradientExchange.doing`.
    """

    def __init__(
        self,
        links: LinkGraph,
        routes: Routes,
        tell: Callable[[str], None],
        doing: Callable[..., None],
    ) -> None:
        self.links = links
        self.watch = Watch(probe_seconds(links))
        self._routes = routes
        self._tell = tell
        self._doing = doing
        self._vote_after = FIRST_VOTE
        self._flights: tuple[Flight, ...] = ()
        self._steps, self._exposed, self._began = 0, 0.0, perf_counter()

    @classmethod
    def of(
        cls,
        description: Exchange,
        routes: Routes,
        tell: Callable[[str], None],
        doing: Callable[..., None],
    ) -> LinkWatch | None:
        """None: this exchange keeps its program, nothing else could carry the sums, or the links
        are slowed down by ourselves, which a probe would not see."""
        links = links_of(description.carrier)
        if not (description.carried and description.repack) or links is None:
            return None
        if links.ranks < 3 or links.ranks != routes.size or routes.pace is not None:
            return None
        return cls(links, routes, tell, doing)

    def step(self, buckets: Sequence[Bucket]) -> bool:
        """A step is over: whether to measure now. Now and then collective.

        Args:
            buckets: Of the exchange. With priority their last waits are only known a step later.
        """
        self._exposed += sum(flight.waited for flight in self._flights)
        self._flights = tuple(bucket.flight for bucket in buckets)
        self._steps += 1
        if self._steps < self._vote_after:
            return False
        steps = self._steps
        seconds, exposed = slowest(perf_counter() - self._began, self._exposed)
        self._vote_after = steps_to_vote(seconds / steps)
        self._restart()
        return self.watch.vote(steps, seconds, exposed)

    def _restart(self) -> None:
        self._steps, self._exposed, self._began = 0, 0.0, perf_counter()

    def follow(
        self, description: Exchange, sizes: Sequence[int], element_bytes: int
    ) -> Exchange | None:
        """Measure all links; collective, while nothing is under way.

        Args:
            description: The exchange as it is.
            sizes: Bytes of the sums of a step.
            element_bytes: Of one element.

        Returns:
            The exchange from now on; None: as it is.
        """
        began = perf_counter()
        found = self._measured(description, sizes, element_bytes)
        (cost,) = slowest(perf_counter() - began)
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
        self, description: Exchange, sizes: Sequence[int], element_bytes: int
    ) -> Repacking | None:
        """Drift counts that two measurements show."""
        measured = self._probe(self.links)
        drifts, links = seen(self.links, measured)
        if drifts:
            measured = agreed(self.links, measured, self._probe(self.links))
            drifts, links = seen(self.links, measured)
        if not drifts:
            self.links = links
            return None
        decided: list[Repacking | None] = [None]
        if dist.get_rank() == 0:  # numbers are alike; libraries may not be
            kind, carrier = cast(Kind, description.collective), description.carrier or Carrier()
            decided = [find_repacking(kind, carrier, self.links, measured, sizes, element_bytes)]
        dist.broadcast_object_list(decided, src=0)
        (found,) = decided
        assert found is not None  # what drifted here did on rank 0
        self.links = found.links
        return found

    def _probe(self, links: LinkGraph) -> LinkGraph:
        return probe_links(self._routes.own().group, links, doing=self._doing)
