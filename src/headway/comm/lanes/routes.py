"""Process groups of an exchange, created once and reused: one route per chunk in flight.

Creating groups is collective over all ranks of the world, so every rank asks for the same routes in
the same order; existing routes are kept when parameters are frozen, buckets re-cut or plans
changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from headway.channel.gloo_listeners import drop_later_connections
from headway.collective.nodes import Nodes
from headway.comm.algorithms.method import Route, check_uniform_nodes
from headway.comm.backend.process_group import (
    ChooseProgram,
    HeadwayGroup,
    register_exchange_backend,
)
from headway.comm.traffic_shaper import TrafficShaper

RankPartition = tuple[tuple[int, ...], ...]
"""Groups of ranks, each rank in exactly one."""


class RoutePool:
    """All routes of this process.

    Args:
        nodes: Which ranks share a node; None: all ranks are on one node.
        pace: The emulated interface of this node; None: links are what they are.
        among: Who exchanges with whom, where nothing else is said: the ranks that hold the same
            parts of layers; None: all with all. Collective then.
        choose: Of the programs that carry the sums; None: Gloo's own all-reduce.
        timeout: Longest wait of an operation; None: torch's half an hour.
    """

    def __init__(
        self,
        nodes: Nodes | None = None,
        pace: TrafficShaper | None = None,
        among: RankPartition | None = None,
        choose: ChooseProgram | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.pace = pace
        self.nodes = nodes or Nodes.one(dist.get_world_size())
        self._among = among
        self._choose = choose
        self._timeout = timeout
        self._own = None if among is None else self._make(among, hierarchical=False)
        self._made: dict[tuple[RankPartition | None, bool], list[Route]] = {}

    @property
    def size(self) -> int:
        """Ranks over which gradients are summed, where nothing else is said."""
        return self.nodes.ranks if self._own is None else self._own.size

    def own(self) -> Route:
        """The route of those ranks. Where these are all and no program performs the sums, it uses
        the world's own group, hence only for the thread that uses that one."""
        if self._own is not None:
            return self._own
        if self._choose is not None:
            return self.get(1)[0]
        ranks = tuple(range(dist.get_world_size()))
        group = dist.group.WORLD
        assert group is not None
        return Route(ranks, dist.get_rank(), group, self.nodes)

    def get(
        self, count: int, partition: RankPartition | None = None, *, hierarchical: bool = False
    ) -> tuple[Route, ...]:
        """One route for each chunk in flight; collective where they have not been made before.

        Args:
            partition: Who exchanges with whom; None: as `among` says.
            hierarchical: With the groups inside and across nodes.

        Raises:
            PlanError: See `make_route`.
        """
        partition = partition or self._among
        made = self._made.setdefault((partition, hierarchical), [])
        while len(made) < count:
            made.append(self._make(partition, hierarchical=hierarchical))
        return tuple(made[:count])

    def choose_by(self, choose: ChooseProgram | None) -> None:
        """Use other programs from now on; on all ranks, while nothing is under way."""
        self._choose = choose
        for group in self._carrying():
            group.choose_by(choose)

    def rest(self) -> None:
        """End the threads of all groups, until programs are started again."""
        for group in self._carrying():
            group.rest()

    def _carrying(self) -> Iterator[HeadwayGroup]:
        """The groups that perform sums by programs."""
        for routes in self._made.values():
            for route in routes:
                if isinstance(route.group, HeadwayGroup):
                    yield route.group

    def _make(self, partition: RankPartition | None, *, hierarchical: bool) -> Route:
        own: Route | None = None
        # Every rank makes the groups of all parts: new_group is collective over the world.
        for ranks in partition or (None,):
            route = make_route(
                ranks,
                self.nodes,
                hierarchical=hierarchical,
                choose=self._choose,
                timeout=self._timeout,
            )
            own = route or own
        assert own is not None  # a plan's partition holds every rank
        return own


def make_route(
    ranks: Sequence[int] | None,
    nodes: Nodes,
    *,
    hierarchical: bool = False,
    choose: ChooseProgram | None = None,
    timeout: timedelta | None = None,
) -> Route | None:
    """Make the groups of a route; collective over all ranks of the world, in the same order.

    Args:
        ranks: Who exchanges; None: all ranks of the world.
        hierarchical: Make the groups inside and across nodes, too.
        choose: As of `RoutePool`, like `timeout`.

    Returns:
        None where this process is not one of `ranks`.

    Raises:
        PlanError: A hierarchical route over nodes with unequal numbers of its ranks.
    """
    chosen = tuple(range(dist.get_world_size())) if ranks is None else tuple(sorted(ranks))
    own = dist.get_rank()
    here = nodes.among(chosen)
    if hierarchical:
        check_uniform_nodes(here)
    fake = dist.get_backend() == "fake"
    # Gloo on CPUs; where there are GPUs, and in a fake world, the default of the world.
    backend = None if fake or torch.cuda.is_available() else "gloo"
    own_backend = backend if fake or choose is None else register_exchange_backend(choose)
    with drop_later_connections():
        group = dist.new_group(list(chosen), backend=own_backend, timeout=timeout)
    inside = across = None
    if hierarchical:
        # Every rank makes the groups of all nodes, its own or not: new_group is collective.
        for members in here.members:
            with drop_later_connections():
                made = dist.new_group(list(members), backend=backend, timeout=timeout)
            inside = made if own in members and len(members) > 1 else inside
        for first in here.members[0]:
            column = here.across(first)
            with drop_later_connections():
                made = dist.new_group(list(column), backend=backend, timeout=timeout)
            across = made if own in column and len(column) > 1 else across
    if own not in chosen:
        return None
    return Route(chosen, own, group, here, inside, across)
