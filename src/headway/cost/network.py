"""The time of collectives on a hierarchy of links, for many groups at once.

Ranks of a node are numbered consecutively. A group is a size and a stride: the tensor axis has
stride 1, the data axis the tensor degree, and so on. A level joins units of the level below (ranks
in a node, nodes in a cluster); groups that leave a unit side by side share its link. A collective
costs the cheapest of its algorithms, never less than its bytes over the slowest link.

Sources: Thakur, Rabenseifner and Gropp 2005 (ring, tree); Hockney's latency and rate per link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headway.cluster.cluster import Cluster
from headway.cluster.link import Level, Link
from headway.cost.device import Array, Number
from headway.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class LinkLevel:
    """One level of links.

    Attributes:
        width: Ranks that one domain of this level holds; `math.inf` for the outermost.
        link: Of one unit (a rank, or a node) to the others of its domain, in each direction, as
            collectives use it; its latency is that of one step of a collective.
        message: The same for one plain message between two ranks; None: as `link`.
    """

    name: str
    width: float
    link: Link
    message: Link | None = None
    source: Mapping[str, str] = field(default_factory=dict)

    def message_costs(self, stride: Number, inner: float) -> tuple[float, Number]:
        """Latency and seconds per byte of a message to the rank `stride` further on.

        All ranks of a domain of `inner` ranks send at the same time over its link to the others:
        each gets its share of the collective rate, and never more than a message does alone.
        """
        link = self.message or self.link
        return link.latency, np.maximum(1.0 / link.rate, np.minimum(stride, inner) / self.link.rate)


class _Crossing(NamedTuple):
    """How a group uses one level: branches, groups side by side, and the link."""

    branches: Array
    flows: Array
    below: Array
    link: Link


@dataclass(frozen=True)
class HierarchicalNetwork:
    """Levels from the innermost to the outermost."""

    levels: tuple[LinkLevel, ...]

    def __post_init__(self) -> None:
        problems = [p for level in self.levels for p in level.link.problems(f"level {level.name}")]
        widths = [level.width for level in self.levels]
        if not widths or widths != sorted(set(widths)) or widths[0] < 1:
            problems.append(f"widths {widths}: each level must hold more ranks than the one before")
        if problems:
            raise PlanError("no such network", problems=problems)

    def all_reduce(self, num_bytes: Number, size: Number, stride: Number = 1.0) -> Number:
        """Seconds to sum a buffer of this size over a group: the cheapest of three algorithms.

        Ring: 2 (n-1) alpha + 2 (n-1)/n S/beta of the slowest link. Tree: 2 alpha per doubling at
        each level + 2 S/beta. Levels: reduce-scatter inside, all-reduce of the shards across,
        all-gather inside.
        """
        n = np.asarray(size, dtype=float)
        steps, share, doublings = n - 1.0, (n - 1.0) / n, np.zeros_like(n * np.asarray(stride))
        slowest, latency, levelled = doublings, doublings, doublings
        for branches, flows, _, link in self._crossings(size, stride):
            used = branches > 1
            per_byte = np.where(used, flows / link.rate, 0.0)
            slowest = np.maximum(slowest, per_byte)
            latency = np.maximum(latency, np.where(used, link.latency, 0.0))
            doublings = doublings + 2.0 * np.log2(branches) * link.latency
            levelled = levelled + 2.0 * (branches - 1.0) * link.latency
            levelled = levelled + 2.0 * (branches - 1.0) / branches * num_bytes * per_byte
        ring = 2.0 * steps * latency + 2.0 * share * num_bytes * slowest
        tree = doublings + 2.0 * num_bytes * slowest
        # A group of one sends nothing, whatever the formulas say.
        return np.where(n > 1, np.minimum(np.minimum(ring, tree), levelled), 0.0)

    def all_gather(self, num_bytes: Number, size: Number, stride: Number = 1.0) -> Number:
        """Seconds until every rank has the whole buffer, of which it had one n-th: a ring, or
        levels; (n-1) alpha + (n-1)/n S/beta."""
        n = np.asarray(size, dtype=float)
        nothing = np.zeros_like(n * np.asarray(stride))
        slowest, latency, levelled = nothing, nothing, nothing
        for branches, flows, _, link in self._crossings(size, stride):
            per_byte = np.where(branches > 1, flows / link.rate, 0.0)
            slowest = np.maximum(slowest, per_byte)
            latency = np.maximum(latency, np.where(branches > 1, link.latency, 0.0))
            levelled = levelled + (branches - 1.0) * link.latency
            levelled = levelled + (branches - 1.0) / branches * num_bytes * per_byte
        ring = (n - 1.0) * latency + (n - 1.0) / n * num_bytes * slowest
        return np.where(n > 1, np.minimum(ring, levelled), 0.0)

    def reduce_scatter(self, num_bytes: Number, size: Number, stride: Number = 1.0) -> Number:
        """Seconds until every rank has the sum of its n-th: an all-gather backwards."""
        return self.all_gather(num_bytes, size, stride)

    def all_to_all(self, num_bytes: Number, size: Number, stride: Number = 1.0) -> Number:
        """Seconds to hand each other rank its n-th of a buffer of this size: (n-1) alpha, and what
        leaves each unit over its link."""
        n = np.asarray(size, dtype=float)
        slowest, latency = np.zeros_like(n * np.asarray(stride)), 0.0 * n
        for branches, flows, below, link in self._crossings(size, stride):
            # Each of a unit's `below` ranks sends what is for the n - below ranks outside over one
            # link.
            leaves = below * (n - below) / n * flows * num_bytes / link.rate
            slowest = np.maximum(slowest, np.where(branches > 1, leaves, 0.0))
            latency = np.maximum(latency, np.where(branches > 1, link.latency, 0.0))
        return np.where(n > 1, (n - 1.0) * latency + slowest, 0.0)

    def send(self, num_bytes: Number, stride: Number = 1.0) -> Number:
        """Seconds of one message to the rank `stride` further on, while its neighbours send too."""
        far = np.asarray(stride, dtype=float)
        found = np.zeros_like(far * np.asarray(num_bytes))
        inner = 1.0
        for level in self.levels:
            latency, per_byte = level.message_costs(far, inner)
            found = np.where(far >= inner, latency + num_bytes * per_byte, found)
            inner = level.width
        return np.asarray(found)

    def rate_of(self, size: Number, stride: Number = 1.0) -> Number:
        """Bytes/s with which a byte of the buffer passes the slowest link of a group; infinite
        for a group of one."""
        slowest = np.zeros_like(np.asarray(size, dtype=float) * np.asarray(stride))
        for branches, flows, _, link in self._crossings(size, stride):
            slowest = np.maximum(slowest, np.where(branches > 1, flows / link.rate, 0.0))
        with np.errstate(divide="ignore"):
            return np.asarray(1.0 / slowest)

    def _crossings(self, size: Number, stride: Number) -> Iterator[_Crossing]:
        """Level by level. A group that does not fill its domains evenly counts as if it did."""
        n = np.asarray(size, dtype=float)
        far = np.maximum(np.asarray(stride, dtype=float), 1.0)
        inside, inner = np.ones_like(n * far), 1.0
        for level in self.levels:
            members = np.maximum(np.minimum(n, np.floor(level.width / far)), inside)
            yield _Crossing(members / inside, np.minimum(far, inner), inside, level.link)
            inside, inner = members, level.width


def network_of(cluster: Cluster) -> HierarchicalNetwork:
    """The levels of a described cluster; of unequal nodes the least and the slowest count."""
    # A link of which nothing is said costs nothing. On a switch a node has one interface for all
    # that leaves it, in a mesh a link to each other node, of which a ring uses one. A level that
    # holds no more ranks than the one inside it takes its place.
    usual = cluster.processes
    least = min(usual if n.processes is None else n.processes for n in cluster.nodes)
    levels = [link_level(level, least) for level in cluster.link_levels]
    return HierarchicalNetwork(tuple({level.width: level for level in levels}.values()))


def link_level(level: Level, processes: int) -> LinkLevel:
    """A described level for the cost model."""
    joined = math.inf if level.nodes is None else level.nodes * processes
    alone = level.alone if level.oversubscription > 1 else level.message
    source = {"rate": "cluster", "latency": "cluster"} | level.source
    width = float(joined if level.ranks is None else min(level.ranks, processes))
    return LinkLevel(name=level.name, width=width, link=level.link, message=alone, source=source)
