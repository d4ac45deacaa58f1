"""What each way to hold a table costs each rank of a machine with tiers of memory.

A rank that holds a piece reads its rows once for every lookup and updates the different ones, at
the rate of the tier in which each lies; it receives ids, sends vectors, and receives their
gradients. The bytes are those of `demand`, at the cost that `cost.network` gives collectives: what
passes the link of the holder counts, as that of the samples' side is never fuller than the mean.

    seconds = sum over tiers of bytes / rate + (ids + vectors + gradients) * all-to-all per byte
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headway.cluster.cluster import Cluster
from headway.cluster.memory_tier import DEVICE_TIER, reached_rates
from headway.cost.device import Array, DeviceModel
from headway.cost.machines import device_of
from headway.cost.network import HierarchicalNetwork, network_of
from headway.errors import PlanError
from headway.planner.tables.choices import Form, Option, PlacementProblem
from headway.planner.tables.demand import ID_BYTES, SAMPLE_BYTES, TableDemand, travels

HOT_SHARES = (0.5, 0.8, 0.9, 0.99)
"""Of the lookups: hot rows that take so much of them are what may lie in a faster tier."""
_STAGING = 1.25
"""Times the rows that a step is expected to use: steps differ."""
_SAMPLE = 2**30
"""Bytes with which the cost of one byte of an exchange is found."""


@dataclass(frozen=True, kw_only=True)
class TierMachine:
    """Ranks, their memory, and what joins them.

    Attributes:
        tiers: Names, the device's own first.
        mapped: Of each tier, whether it is a mapped file.
        capacity: Bytes by tier and rank; 0 where a rank has no such tier.
        rates: Bytes/s by tier and rank.
        nodes: Ranks of each node.
    """

    tiers: tuple[str, ...]
    mapped: tuple[bool, ...]
    capacity: Array
    rates: Array
    network: HierarchicalNetwork
    nodes: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        return int(self.capacity.shape[1])

    def per_byte(self) -> float:
        """Seconds of one more byte of a buffer that is handed out to all ranks."""
        some, none = (float(self.network.all_to_all(n, self.ranks)) for n in (_SAMPLE, 0))
        return (some - none) / _SAMPLE

    def gathered(self, num_bytes: float) -> float:
        """Seconds, without latency, to gather a buffer of so many bytes of all ranks."""
        return float(self.network.all_gather(num_bytes, self.ranks)) - self.latencies[1]

    @property
    def latencies(self) -> tuple[float, float]:
        """Of the exchanges of split tables (ids, vectors, gradients), and of the gradients of
        copies."""
        handed = 3 * float(self.network.all_to_all(0.0, self.ranks))
        return handed, float(self.network.all_gather(0.0, self.ranks))


def tier_machine(
    cluster: Cluster, *, ranks: int | None = None, reserved: float = 0.0, limit: float | None = None
) -> TierMachine:
    """The first ranks of a described cluster.

    Args:
        ranks: That share the batch; None: all.
        reserved: Bytes of each device's own memory that are not for tables.
        limit: Bytes of a device's own memory that may be used at all; None: all.

    Raises:
        PlanError: Nothing is known of a device, or there are fewer ranks.
    """
    count = cluster.ranks if ranks is None else ranks
    kinds = cluster.devices_of_ranks[:count]
    if None in kinds or count > cluster.ranks:
        raise PlanError(
            "the memory of the ranks is not known",
            problems=[f"{cluster.ranks} ranks, devices: {', '.join(cluster.devices) or 'none'}"],
            fix='Write [devices.NAME] with preset = "...", for as many ranks as the tables lie on.',
        )
    devices = {name: device_of(cluster.devices[name], name) for name in {*kinds} if name}
    tiers = {DEVICE_TIER: False}
    for device in devices.values():
        tiers |= {tier.name: tier.mapped for tier in device.tiers}
    capacity, rates = np.zeros((len(tiers), count)), np.zeros((len(tiers), count))
    for rank, kind in enumerate(kinds):
        for name, (size, rate) in _memory(devices[str(kind)], reserved, limit).items():
            capacity[list(tiers).index(name), rank] = size
            rates[list(tiers).index(name), rank] = rate
    nodes = (tuple(r for r in cluster.ranks_of(name) if r < count) for name in cluster.names)
    return TierMachine(
        tiers=tuple(tiers),
        mapped=tuple(tiers.values()),
        capacity=capacity,
        rates=rates,
        network=network_of(cluster),
        nodes=tuple(node for node in nodes if node),
    )


def _memory(
    device: DeviceModel, reserved: float, limit: float | None
) -> dict[str, tuple[float, float]]:
    """Bytes and rate by tier."""
    own = device.memory if limit is None else min(limit, device.memory)
    found = {DEVICE_TIER: (max(0.0, own - reserved), device.memory_rate)}
    for tier, rate in zip(device.tiers, reached_rates(device.tiers), strict=True):
        found[tier.name] = (tier.memory, rate)
    return found


def tier_problem(
    demands: Sequence[TableDemand], machine: TierMachine, *, samples: int
) -> PlacementProblem:
    """The choice of ways, ranks and tiers of all tables.

    Args:
        samples: Of one rank.
    """
    return PlacementProblem(
        names=tuple(demand.table for demand in demands),
        options=tuple(tuple(_options(demand, machine, samples)) for demand in demands),
        tiers=machine.tiers,
        capacity=machine.capacity,
        latencies=machine.latencies,
    )


def _options(demand: TableDemand, machine: TierMachine, samples: int) -> Iterator[Option]:
    price = _Price(demand, machine, samples)
    every = tuple(range(machine.ranks))
    yield price.copies(every)
    yield price.option("table", every, pieces=1)
    if machine.ranks == 1:
        return
    for ranges in column_counts(demand.columns, machine.ranks) if demand.divides else ():
        yield price.option("column", every, pieces=ranges, columns=ranges)
    yield from _row_options(price, demand, machine, every)


def _row_options(
    price: _Price, demand: TableDemand, machine: TierMachine, every: tuple[int, ...]
) -> Iterator[Option]:
    if demand.rows < machine.ranks:
        return
    yield price.option("row", every, parts=machine.ranks)
    if demand.accesses.ranges:
        # Where nothing is known of the ranges, a hash evens out nothing: the price is that of
        # "row", and frequent rows that lie side by side are why one takes it all the same.
        yield price.option("hash", every, parts=machine.ranks)
    sizes = {len(node) for node in machine.nodes}
    if len(machine.nodes) < 2 or max(sizes) < 2:
        return
    for node in machine.nodes:
        yield price.option("table_row", node, parts=len(node))
    nodes = len(machine.nodes)
    if demand.divides and len(sizes) == 1 and demand.columns % nodes == 0 < demand.columns - nodes:
        yield price.option("grid", every, columns=len(machine.nodes), parts=max(sizes))


def column_counts(columns: int, ranks: int) -> list[int]:
    """Numbers of equal ranges of several columns: powers of two, and one for each rank."""
    powers = (2**n for n in range(1, ranks.bit_length()))
    counts = (n for n in {*powers, ranks} if 1 < n <= ranks and columns % n == 0)
    return sorted(n for n in counts if n < columns)


class _Price:
    """Of one table on a machine."""

    def __init__(self, demand: TableDemand, machine: TierMachine, samples: int) -> None:
        self.demand, self.machine, self.samples = demand, machine, samples
        self.skew = demand.accesses
        self.batch = samples * machine.ranks
        self.others = (machine.ranks - 1) / machine.ranks
        self.hot = {*self._hot_rows()}

    def _hot_rows(self) -> Iterator[int]:
        if not self.skew.top:
            yield self.demand.rows // 2
        for share in HOT_SHARES if self.skew.top else ():
            yield self.skew.rows_for(share)

    def copies(self, ranks: tuple[int, ...]) -> Option:
        """A copy on every rank. All update what any of them has looked up."""
        d, count = self.demand, self.machine.ranks
        unique = self.skew.unique(self.samples * d.bag)
        sent = count * unique * (ID_BYTES + d.columns * d.itemsize)
        seconds = self.machine.gathered(sent) if count > 1 else 0.0
        lookups = self.samples * d.bag
        forms = self._forms(1, 1, seconds, lookups=lookups, shares=[1.0] * count, whole=count > 1)
        return Option(
            way="copies",
            pieces=count,
            ranks=ranks,
            forms=forms,
            exchange=1 if count > 1 else None,
        )

    def option(
        self,
        way: str,
        ranks: tuple[int, ...],
        *,
        pieces: int | None = None,
        columns: int = 1,
        parts: int = 1,
    ) -> Option:
        """Pieces of so many ranges of columns and parts of rows."""
        seconds = self._exchanged(columns, parts) * self.machine.per_byte()
        shares = [1.0 / parts] * self.machine.ranks
        if parts > 1 and way != "hash":
            for place, rank in enumerate(ranks):
                part = place % parts
                start, stop = (n * self.demand.rows // parts for n in (part, part + 1))
                shares[rank] = self.skew.range_share(start, stop)
        forms = self._forms(
            columns, parts, seconds, lookups=self.batch * self.demand.bag, shares=shares
        )
        return Option(
            way=way,
            pieces=len(ranks) if pieces is None else pieces,
            ranks=ranks,
            forms=forms,
            exchange=0 if self.machine.ranks > 1 else None,
            columns=columns,
            parts=parts,
        )

    def _exchanged(self, columns: int, parts: int) -> float:
        """Bytes of the buffers through which the holder of a piece exchanges ids, vectors and
        gradients; of each, its own n-th stays."""
        d = self.demand
        row = d.columns / columns * d.itemsize
        lookups = self.batch * d.bag / parts
        if travels(d, self.machine.ranks, self.samples, parts) == "sums":
            name = ID_BYTES + (SAMPLE_BYTES if parts > 1 else 0)
            return name * lookups + 2 * self.batch * row
        unique = self.skew.unique(self.samples * d.bag)
        return ID_BYTES * lookups + 2 * self.machine.ranks * unique / parts * row

    def _forms(
        self,
        columns: int,
        parts: int,
        exchange: float,
        *,
        lookups: float,
        shares: Sequence[float],
        whole: bool = False,
    ) -> tuple[Form, ...]:
        """Every tier alone, and every two of them with the hot rows in the faster one. No piece
        lies in a mapped file alone, nor where a step updates rows that this rank has not looked
        up: all of them, or with copies (`whole`) those of other ranks.
        """
        mapped = self.machine.mapped
        tiers = [n for n, far in enumerate(mapped) if not far or (self.demand.sparse and not whole)]
        staged = self._staged(parts, max(shares))
        pairs = [(tier, tier, 0) for tier in tiers if not mapped[tier]]
        for fast in tiers:
            counts = {*self.hot, self._filling(columns, parts, fast), staged}
            for slow in (tier for tier in tiers if tier > fast and not mapped[fast]):
                least = staged if mapped[slow] else 1
                pairs += [(fast, slow, n) for n in counts if least <= n < self.demand.rows]
        return tuple(
            self._form(columns, parts, exchange, lookups, shares, fast, slow, hot)
            for fast, slow, hot in sorted(pairs)
        )

    def _staged(self, parts: int, share: float) -> int:
        """Hot rows of which a piece holds as many as a step uses: what comes from a mapped file is
        in memory while it is used."""
        used = self.skew.unique(self.batch * self.demand.bag) * share
        return parts * int(_STAGING * used + 1)

    def _filling(self, columns: int, parts: int, tier: int) -> int:
        """Hot rows whose piece fills a tier: of a table too large for it as much as it holds."""
        room = self.machine.capacity[tier]
        least = float(np.where(room > 0, room, np.inf).min())
        fitting = least / self.demand.row_bytes(self.demand.columns / columns)
        return parts * int(min(fitting, self.demand.rows))

    def _form(
        self,
        columns: int,
        parts: int,
        exchange: float,
        lookups: float,
        shares: Sequence[float],
        fast: int,
        slow: int,
        hot: int,
    ) -> Form:
        d, machine = self.demand, self.machine
        rows = -(-d.rows // parts)
        kept = rows if fast == slow else min(rows, -(-hot // parts))
        hit = 1.0 if fast == slow else self.skew.share(hot)
        width = d.columns / columns
        own = np.asarray(shares)
        read = lookups * width * d.itemsize * own
        updated = self.skew.unique(self.batch * d.bag)
        updated_hot = updated if fast == slow else self.skew.unique(self.batch * d.bag, hot)
        row = 2 * d.row_bytes(width)
        touched = [
            (fast, hit * read, updated_hot * own if d.sparse else kept),
            (slow, (1.0 - hit) * read, (updated - updated_hot) * own if d.sparse else rows - kept),
        ]
        seconds = np.zeros_like(machine.rates)
        sizes = np.zeros_like(machine.rates)
        with np.errstate(divide="ignore", invalid="ignore"):
            for tier, looked_up, changed in touched if fast != slow else touched[:1]:
                seconds[tier] += (looked_up + changed * row) / machine.rates[tier]
        sizes[fast] += kept * d.row_bytes(width)
        sizes[slow] += (rows - kept) * d.row_bytes(width)
        # A tier that a rank does not have has no rate; what reads nothing there divides 0 by 0.
        absent = (machine.rates[[fast, slow]] <= 0).any(axis=0)
        seconds[:, absent] = np.inf
        return Form(
            seconds=seconds.sum(axis=0) + exchange,
            bytes=sizes,
            fast=fast,
            slow=slow,
            hot=0 if fast == slow else kept,
            exchange=exchange,
            lookups=seconds,
        )
