"""Chooses the algorithm of a collective for a network: all of them, simulated side by side.

Each kind of program is made for the network (a ring in the best order, packed trees, nodes of the
cluster) in several chunk sizes, checked, simulated, and measured against the bound. The choice
depends on the arguments alone, so that ranks with the same numbers choose the same.
`choose_all_reduce` makes that choice for the sums of a plan's gradient exchange, as data that the
plan carries: the executor does not look at the network again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, cast

from headway.cluster import find_cluster
from headway.collective.all_reduce.algorithm import (
    ALL_REDUCE_KINDS,
    AllReduceOptions,
    PlanTree,
    all_reduce_program,
)
from headway.collective.all_reduce.repacking import MESSAGE_SECONDS
from headway.collective.generators import direct, halving_doubling, hierarchical, ring, servers
from headway.collective.generators.rings import ring_order
from headway.collective.generators.trees import Weighted, star, trees, two_level
from headway.collective.model.link_fit import LinkFit, fit_link
from headway.collective.nodes import set_partitions
from headway.collective.packing.pack import highest_rate, pack
from headway.collective.packing.tree import root_tree
from headway.collective.program.check import check_program
from headway.collective.program.program import CollectiveProgram, CollectiveTask
from headway.collective.topology import LINK_GRAPHS, Direction, NetworkTopology
from headway.documents import nearest
from headway.errors import PlanError, UsageError
from headway.plans.exchange import AllReduceName
from headway.simulator.collective import (
    FREE_HOST,
    HOST_RATE,
    HostCosts,
    SimulatedCollective,
    simulate_collective,
)
from headway.units import format_bytes

INTERPRETED = HostCosts(HOST_RATE, HOST_RATE, MESSAGE_SECONDS)
"""An interpreter in Python on a processor; assumed."""
# Into how many chunks a part is cut; the best is kept.
PIECES = (1, 4, 16, 64)
# More messages are not simulated, if there is a program with larger chunks.
MOST_MESSAGES = 20_000
# Trees are packed into shared wires of so many ranks: every pair has a share then, and more of them
# take too long for an interactive answer.
MOST_PACKED = 16
# Smaller chunks must be faster by so much for even smaller ones to be tried.
WORTH = 0.005


@dataclass(frozen=True)
class PricedProgram:
    """A program with its price.

    Attributes:
        least: Seconds: the bound for any program.
        trees: Along which it sends, if it is made of trees.
        chunk: Elements of a message, where they were chosen.
        order: Of the ranks along a ring.
    """

    program: CollectiveProgram
    played: SimulatedCollective
    least: float
    trees: tuple[Weighted, ...] = field(default=(), repr=False)
    chunk: int | None = None
    order: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def seconds(self) -> float:
        return self.played.seconds

    @property
    def share(self) -> float:
        """Of the bound that is reached: 1 is the fastest that can be."""
        return self.least / self.seconds if self.seconds else 1.0


class ProgramCandidate(NamedTuple):
    """A program with what it was made of; see `PricedProgram`."""

    program: CollectiveProgram
    trees: Sequence[Weighted] = ()
    chunk: int | None = None
    order: tuple[int, ...] = ()


Families = Iterator[Iterator[ProgramCandidate]]
"""Families of programs; in each of them the chunks become smaller."""


def parse_wires(text: str, *, nodes: int | None = None) -> NetworkTopology:
    """The network that a command line names: a cluster.toml, a preset, or one of
    `LINK_GRAPHS`, the NVLinks inside a machine.

    Raises:
        UsageError: There is no such preset.
        DocumentError: The file has problems.
    """
    if text in LINK_GRAPHS:
        return NetworkTopology.of_links(LINK_GRAPHS[text])
    return NetworkTopology.of_cluster(find_cluster(text, nodes=nodes))


def price_programs(
    collective: CollectiveTask,
    wires: NetworkTopology,
    *,
    names: Sequence[str] = (),
    element_bytes: int = 4,
    host: HostCosts = FREE_HOST,
) -> tuple[list[PricedProgram], dict[str, str]]:
    """All programs, the fastest first, of equally fast ones that with fewer messages; and of each
    that cannot be made the reason.

    Args:
        wires: On which network; of as many ranks.
        host: What sums, copies and messages cost the ranks.

    Raises:
        UsageError: No such program.
        PlanError: The network does not join the ranks.
    """
    for name in names:
        if name not in PROGRAMS:
            raise UsageError(f"no program {name!r}{nearest(name, list(PROGRAMS))}")
    least = collective_lower_bound(collective, wires, element_bytes)
    found: list[PricedProgram] = []
    refused: dict[str, str] = {}
    for name in names or PROGRAMS:
        try:
            tried = [
                one
                for family in PROGRAMS[name](collective, wires)
                for one in _falling(family, wires, least, element_bytes, host)
            ]
        except PlanError as error:
            refused[name] = "; ".join([error.what, *error.problems])
            continue
        found.append(min(tried, key=_order))
        check_program(found[-1].program)
    return sorted(found, key=_order), refused


def _falling(
    family: Iterator[ProgramCandidate],
    wires: NetworkTopology,
    least: float,
    element_bytes: int,
    host: HostCosts,
) -> Iterator[PricedProgram]:
    """Simulated, until smaller chunks no longer help."""
    best = math.inf
    for program, weighted, chunk, order in family:
        if best < math.inf and program.messages() > MOST_MESSAGES:
            return
        played = simulate_collective(program, wires, element_bytes, host=host)
        yield PricedProgram(program, played, least, tuple(weighted), chunk, order)
        if played.seconds > best * (1 - WORTH):
            return
        best = played.seconds


def _order(priced: PricedProgram) -> tuple[float, int]:
    seconds = priced.seconds
    # To nine digits, so that rounding of sums does not decide between equal programs.
    rounded = seconds and round(seconds, 9 - math.floor(math.log10(seconds)))
    return rounded, priced.program.messages()


# -- the kinds ---------------------------------------------------------------------------------


def _chunks(elements: int) -> list[int]:
    """Sizes of a chunk of a part of so many elements, all different."""
    return list(dict.fromkeys(max(1, -(-elements // pieces)) for pieces in PIECES))


def _ring(collective: CollectiveTask, wires: NetworkTopology) -> Families:
    order = ring_order(wires.graph)
    part = collective.elements
    if collective.root is None:
        part = -(-part // collective.ranks)
    yield (
        ProgramCandidate(ring(collective, chunk=chunk, order=order), (), chunk, order)
        for chunk in _chunks(part)
    )


def _direct(collective: CollectiveTask, wires: NetworkTopology) -> Families:
    yield iter([ProgramCandidate(direct(collective))])


def _halving(collective: CollectiveTask, wires: NetworkTopology) -> Families:
    yield iter([ProgramCandidate(halving_doubling(collective))])


def _hierarchical(collective: CollectiveTask, wires: NetworkTopology) -> Families:
    nodes = wires.nodes
    if nodes.count == 1 or nodes.count == wires.ranks:
        raise PlanError(
            "there are no levels here",
            problems=["all ranks are on one node, or each has a node of its own"],
        )
    sizes = _chunks(collective.elements)
    yield (
        ProgramCandidate(hierarchical(collective, nodes, chunk=chunk), (), chunk) for chunk in sizes
    )


def _servers(collective: CollectiveTask, wires: NetworkTopology) -> Families:
    stars = [(star(wires.ranks, rank), 1.0) for rank in range(wires.ranks)]
    sizes = _chunks(-(-collective.elements // wires.ranks))
    yield (ProgramCandidate(servers(collective, chunk=chunk), stars, chunk) for chunk in sizes)


def _trees(collective: CollectiveTask, wires: NetworkTopology) -> Families:
    """Packed into the links; where wires are shared, also trees of two levels."""
    leveled = wires.shared and wires.nodes.count > 1
    if not wires.shared or wires.ranks <= MOST_PACKED:
        yield _grown(collective, _packed(collective, wires))
    elif not leveled or collective.op in ("all_gather", "reduce_scatter"):
        raise PlanError(
            f"{wires.ranks} ranks that share wires are too many to pack",
            problems=[f"at most {MOST_PACKED}, but for two-level trees between nodes"],
        )
    if leveled and collective.op == "all_reduce":
        roots = [members[place] for place, members in _turning(wires)]
        yield _grown(collective, [(two_level(wires.nodes, root), 1.0) for root in roots])
    elif leveled and collective.root is not None:
        yield _grown(collective, [(two_level(wires.nodes, collective.root), 1.0)])


def _grown(collective: CollectiveTask, weighted: Sequence[Weighted]) -> Iterator[ProgramCandidate]:
    heaviest = max((weight for _, weight in weighted), default=1.0)
    share = heaviest / (math.fsum(weight for _, weight in weighted) or 1.0)
    # Chunks are parts of what the heaviest tree carries: it has the most to send one by one.
    for chunk in _chunks(math.ceil(collective.elements * share)):
        yield ProgramCandidate(trees(collective, weighted, chunk=chunk), weighted, chunk)


def _turning(wires: NetworkTopology) -> Iterator[tuple[int, tuple[int, ...]]]:
    """A place and a node for each place: roots of different places are on different nodes."""
    members = wires.nodes.members
    for place in range(min(map(len, members))):
        yield place, members[place % len(members)]


def _packed(collective: CollectiveTask, wires: NetworkTopology) -> list[Weighted]:
    n, op = wires.ranks, collective.op
    if n == 1:
        return [((None,), 1.0)]
    if op in ("broadcast", "reduce"):
        way = pack(
            wires.graph, "broadcast" if op == "broadcast" else "reduce", collective.root or 0
        )
        return [(tree.parent, tree.weight) for tree in way.trees]
    found = pack(wires.graph, "all_reduce").trees
    if op == "all_reduce":
        return [(tree.parent, tree.weight) for tree in found]
    # each rank's share goes along the same links, turned so that the rank is the root
    return [
        (root_tree(sorted(tree.links), n, root), tree.weight) for root in range(n) for tree in found
    ]


PROGRAMS: Mapping[str, Callable[[CollectiveTask, NetworkTopology], Families]] = MappingProxyType(
    {
        "ring": _ring,
        "direct": _direct,
        "halving-doubling": _halving,
        "hierarchical": _hierarchical,
        "servers": _servers,
        "trees": _trees,
    }
)
"""By name; each makes its programs for a network."""


# 256 KiB to 16 MiB, as buckets have, from which a program's time is fitted. Buckets smaller than a
# chunk do not lie on their line.
SIZES = tuple(2**power for power in range(18, 25, 2))


@dataclass(frozen=True)
class AllReduceChoice:
    """What was found.

    Attributes:
        collective: For `ExchangePlan.collective`.
        carrier: For `ExchangePlan.carrier`.
        chosen: The program, priced for one bucket.
        others: Slower ones, the fastest first.
    """

    collective: AllReduceName
    carrier: AllReduceOptions | None
    chosen: PricedProgram
    others: tuple[PricedProgram, ...] = ()


def choose_all_reduce(
    name: str,
    wires: NetworkTopology,
    num_bytes: int,
    *,
    element_bytes: int = 4,
    host: HostCosts = INTERPRETED,
) -> AllReduceChoice:
    """The fastest program for a bucket, or the one of this name as it fits the network best.

    Args:
        name: Of `PROGRAMS`, or "auto".
        host: What messages and sums cost the ranks.

    Raises:
        PlanError: No such program on this network.
        UsageError: No such program.
    """
    names = [name]
    if name == "auto":
        # Levels of nodes are carried out by the exchange "hierarchical", which needs as many ranks
        # on each.
        names = [each for each in PROGRAMS if each != "hierarchical" or wires.nodes.uniform]
    task = CollectiveTask.of("all_reduce", wires.ranks, max(1, num_bytes // element_bytes))
    found, refused = price_programs(
        task, wires, names=names, element_bytes=element_bytes, host=host
    )
    if not found:
        raise PlanError(
            "no program carries the sums on this network",
            problems=[f"{other}: {why}" for other, why in refused.items()],
            fix="Ask for another collective, or leave it out: Gloo finds its own ways.",
        )
    rates = () if wires.shared else wires.graph.rates
    collective, carrier = _as_data(found[0], element_bytes, rates, automatic=name == "auto")
    return AllReduceChoice(collective, carrier, found[0], tuple(found[1:]))


def _as_data(
    priced: PricedProgram,
    element_bytes: int,
    rates: tuple[tuple[float, ...], ...],
    *,
    automatic: bool,
) -> tuple[AllReduceName, AllReduceOptions | None]:
    usual = tuple(range(priced.program.ranks))
    if automatic and priced.name == "ring" and priced.order == usual:
        # A ring by number is what Gloo's own all-reduce is, without an interpreter.
        return "all_reduce", None
    name = cast(AllReduceName, priced.name)
    if name not in ALL_REDUCE_KINDS:
        return name, None
    carrier = AllReduceOptions(
        chunk="" if priced.chunk is None else format_bytes(priced.chunk * element_bytes),
        order=() if priced.order == usual else priced.order,
        trees=tuple(
            PlanTree.of(parents, weight)
            for parents, weight in (priced.trees if name == "trees" else ())
        ),
        rates=rates,
    )
    return name, None if carrier == AllReduceOptions() else carrier


def fit_all_reduce(
    collective: str,
    carrier: AllReduceOptions | None,
    wires: NetworkTopology,
    *,
    element_bytes: int = 4,
    host: HostCosts = INTERPRETED,
    sizes: Sequence[int] = SIZES,
) -> LinkFit:
    """Latency and seconds per byte of the sums of a program, from its simulations.

    Args:
        collective: Of `ALL_REDUCE_KINDS`.
        host: What messages and sums cost the ranks.
    """
    samples = []
    for size in sizes:
        program = all_reduce_program(
            collective, carrier, wires.ranks, max(1, size // element_bytes), element_bytes
        )
        seconds = simulate_collective(program, wires, element_bytes, host=host).seconds
        samples.append((float(size), seconds))
    return fit_link(samples, ranks=wires.ranks)


# A lower bound on the time of a collective on a network, whatever the program. For each set of
# ranks something must leave it: as much of its sums as the others need, or of what only it has. For
# an all-reduce of D bytes 2 (p - 1) D must cross between the parts of any partition into p parts
# (Tutte and Nash-Williams 1961; for n ranks with one port each this is the ring's 2 (n - 1) / n,
# Patarasuk and Yuan 2009). For a broadcast the sets give Edmonds' bound (1973).


# Up to so many ranks all sets and partitions are looked at; of more ranks those by ranks and
# nodes, and, where links are not shared, the exact bounds of tree packing.
ALL_SETS = 8


def collective_lower_bound(
    collective: CollectiveTask, wires: NetworkTopology, element_bytes: int = 4
) -> float:
    """The bound in seconds, without latency; infinite where ranks are not joined."""
    if collective.ranks == 1 or not collective.elements:
        return 0.0
    if collective.op == "all_reduce":
        return _all_reduce_bound(collective.elements * element_bytes, wires)
    if collective.root is not None and not wires.shared:
        way: Direction = "broadcast" if collective.op == "broadcast" else "reduce"
        rate = highest_rate(wires.graph, way, collective.root)
        return collective.elements * element_bytes / rate
    worst = 0.0
    for inside in _rank_sets(wires):
        needed = _elements_leaving(collective, frozenset(inside)) * element_bytes
        if needed:
            worst = max(worst, _crossing_seconds(needed, _rate_out(wires, frozenset(inside))))
    return worst


def _crossing_seconds(needed: float, rate: float) -> float:
    return needed / rate if rate else math.inf


def _elements_leaving(collective: CollectiveTask, inside: frozenset[int]) -> int:
    """Elements that must leave a set of ranks."""
    shares = collective.shares
    if collective.op == "all_gather":
        return sum(shares[rank] for rank in inside)
    if collective.op == "reduce_scatter":
        return sum(share for rank, share in enumerate(shares) if rank not in inside)
    if collective.op == "all_to_all":
        return sum(
            count
            for rank in inside
            for other, count in enumerate(collective.table[rank])
            if other not in inside
        )
    sender = collective.op == "broadcast"
    return collective.elements if (collective.root in inside) == sender else 0


def _rate_out(wires: NetworkTopology, inside: frozenset[int]) -> float:
    return wires.across((i, j) for i, j in wires.ways if i in inside and j not in inside)


def _rank_sets(wires: NetworkTopology) -> Iterator[Iterable[int]]:
    n = wires.ranks
    if n <= ALL_SETS:
        for mask in range(1, (1 << n) - 1):
            yield [rank for rank in range(n) if mask >> rank & 1]
        return
    groups = [*((rank,) for rank in range(n)), *wires.nodes.members]
    for group in groups:
        if len(group) < n:
            yield group
            # The rest as well: what leaves it is what has to reach the group.
            yield [rank for rank in range(n) if rank not in group]


def _all_reduce_bound(num_bytes: float, wires: NetworkTopology) -> float:
    if not wires.shared:
        return num_bytes / highest_rate(wires.graph, "all_reduce")
    worst = 0.0
    for inside in _rank_sets(wires):
        # What a set of ranks contributes has to leave it once, summed: D in this direction alone.
        worst = max(worst, _crossing_seconds(num_bytes, _rate_out(wires, frozenset(inside))))
    for home in _rank_partitions(wires):
        # Both directions: the sums of p parts come together, and the result goes back to p - 1.
        crossing = wires.across(pair for pair in wires.ways if home[pair[0]] != home[pair[1]])
        # Parts are numbered from 0: p - 1 is the largest number.
        worst = max(worst, _crossing_seconds(2 * max(home) * num_bytes, crossing))
    return worst


def _rank_partitions(wires: NetworkTopology) -> Iterator[Sequence[int]]:
    """The part of each rank: all partitions of few ranks; of many into ranks and into nodes."""
    if wires.ranks <= ALL_SETS:
        yield from (labels for labels in set_partitions(wires.ranks) if max(labels))
        return
    yield range(wires.ranks)
    if wires.nodes.count > 1:
        members = wires.nodes.members
        homes = {rank: number for number, ranks in enumerate(members) for rank in ranks}
        yield [homes[rank] for rank in range(wires.ranks)]
