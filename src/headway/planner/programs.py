"""Which program carries out a collective fastest on a cluster: all of them, played side by side.

Each kind of program is made for the network (a ring in the best order, packed trees, nodes of the
cluster) in several chunk sizes, checked, played, and measured against the bound. Invariant: the
choice depends on the arguments alone, so that ranks with the same numbers choose the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from headway.cluster import Cluster, find_cluster
from headway.collective.generators import direct, halving_doubling, hierarchical, ring, servers
from headway.collective.generators.shapes import star, two_level
from headway.collective.generators.trees import Weighted, trees
from headway.collective.packing.machines import dgx1p, dgx1v
from headway.collective.packing.pack import pack
from headway.collective.packing.tree import rooted
from headway.collective.program import CollectiveProgram
from headway.collective.program_bound import least_seconds
from headway.collective.program_check import check_program
from headway.collective.repacking import MESSAGE_SECONDS
from headway.collective.ring_order import ring_order
from headway.collective.task import Collective, Op
from headway.collective.wires import Wires
from headway.documents import nearest
from headway.errors import PlanError, UsageError
from headway.simulator.collective import (
    HOST_RATE,
    IDEAL,
    Host,
    PlayedCollective,
    play_collective,
)

NVLINK: Mapping[str, float] = MappingProxyType({"dgx-1p": 20e9, "dgx-1v": 25e9})
"""Bytes per second of one link in each direction, by machine: NVLink 1 of a P100, 2 of a V100."""
INTERPRETED = Host(HOST_RATE, HOST_RATE, MESSAGE_SECONDS)
"""An interpreter in Python on a processor; assumed."""
PIECES = (1, 4, 16, 64)
"""Into how many chunks a part is cut; the best is kept."""
MOST_MESSAGES = 20_000
"""Programs with more are not played, if there is one with larger chunks."""
MOST_PACKED = 16
"""Ranks on shared wires into which trees are packed: every pair has a share then, and there are too
many of them for a short answer."""
WORTH = 0.005
"""By so much smaller chunks must be faster for even smaller ones to be tried."""


@dataclass(frozen=True)
class Priced:
    """A program with its price.

    Attributes:
        program: Checked.
        played: On the network.
        least: Seconds: the bound for any program.
        trees: Along which it sends, if it is made of trees.
        chunk: Elements of a message, where they were chosen.
        order: Of the ranks along a ring.
    """

    program: CollectiveProgram
    played: PlayedCollective
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


class Candidate(NamedTuple):
    """A program with what it was made of; see `Priced`."""

    program: CollectiveProgram
    trees: Sequence[Weighted] = ()
    chunk: int | None = None
    order: tuple[int, ...] = ()


Make = Callable[[Collective, Wires], Iterator[Iterator[Candidate]]]
"""Families of programs; in each of them the chunks become smaller."""


def wires_of(text: str, *, nodes: int | None = None) -> Wires:
    """The network that a command line names: a cluster.toml, a preset, or dgx-1p, dgx-1v: the
    NVLinks of one such machine.

    Raises:
        UsageError: There is no such preset.
        DocumentError: The file has problems.
    """
    if text in NVLINK:
        make = dgx1p if text == "dgx-1p" else dgx1v
        return Wires.of_links(make(NVLINK[text]))
    return Wires.of_cluster(find_cluster(text, nodes=nodes))


def price_programs(
    collective: Collective,
    wires: Wires,
    *,
    names: Sequence[str] = (),
    element_bytes: int = 4,
    host: Host = IDEAL,
) -> tuple[list[Priced], dict[str, str]]:
    """All programs, the fastest first; of equally fast ones that with fewer messages.

    Args:
        collective: What is to be done.
        wires: On which network; of as many ranks.
        names: Of `PROGRAMS`; none: all.
        element_bytes: Of an element.
        host: What sums, copies and messages cost the ranks.

    Returns:
        The programs, and of each that cannot be made the reason.

    Raises:
        UsageError: No such program.
        PlanError: The network does not join the ranks.
    """
    for name in names:
        if name not in PROGRAMS:
            raise UsageError(f"no program {name!r}{nearest(name, list(PROGRAMS))}")
    least = least_seconds(collective, wires, element_bytes)
    found: list[Priced] = []
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


def choose(
    op: Op,
    num_bytes: int,
    cluster: Cluster,
    *,
    element_bytes: int = 4,
    root: int | None = None,
    host: Host = INTERPRETED,
) -> CollectiveProgram:
    """The fastest program.

    Args:
        op: Which operation.
        num_bytes: Of the whole.
        cluster: On which machine, all of its ranks.
        element_bytes: Of an element.
        root: Of a broadcast or a reduction.
        host: What sums, copies and messages cost the ranks.

    Raises:
        PlanError: The cluster does not join its ranks.
    """
    wires = Wires.of_cluster(cluster)
    collective = Collective.of(op, wires.ranks, num_bytes // element_bytes, root=root)
    found, _ = price_programs(collective, wires, element_bytes=element_bytes, host=host)
    return found[0].program


def _falling(
    family: Iterator[Candidate], wires: Wires, least: float, element_bytes: int, host: Host
) -> Iterator[Priced]:
    """Played, until smaller chunks no longer help."""
    best = math.inf
    for program, weighted, chunk, order in family:
        if best < math.inf and program.messages() > MOST_MESSAGES:
            return
        played = play_collective(program, wires, element_bytes, host=host)
        yield Priced(program, played, least, tuple(weighted), chunk, order)
        if played.seconds > best * (1 - WORTH):
            return
        best = played.seconds


def _order(priced: Priced) -> tuple[float, int]:
    seconds = priced.seconds
    rounded = seconds and round(seconds, 9 - math.floor(math.log10(seconds)))
    return rounded, priced.program.messages()


# -- the kinds ---------------------------------------------------------------------------------


def _chunks(elements: int) -> list[int]:
    """Sizes of a chunk of a part of so many elements, all different."""
    return list(dict.fromkeys(max(1, -(-elements // pieces)) for pieces in PIECES))


def _ring(collective: Collective, wires: Wires) -> Iterator[Iterator[Candidate]]:
    order = ring_order(wires.graph)
    part = collective.elements
    if collective.root is None:
        part = -(-part // collective.ranks)
    yield (
        Candidate(ring(collective, chunk=chunk, order=order), (), chunk, order)
        for chunk in _chunks(part)
    )


def _direct(collective: Collective, wires: Wires) -> Iterator[Iterator[Candidate]]:
    yield iter([Candidate(direct(collective))])


def _halving(collective: Collective, wires: Wires) -> Iterator[Iterator[Candidate]]:
    yield iter([Candidate(halving_doubling(collective))])


def _hierarchical(collective: Collective, wires: Wires) -> Iterator[Iterator[Candidate]]:
    nodes = wires.nodes
    if nodes.count == 1 or nodes.count == wires.ranks:
        raise PlanError(
            "there are no levels here",
            problems=["all ranks are on one node, or each has a node of its own"],
        )
    sizes = _chunks(collective.elements)
    yield (Candidate(hierarchical(collective, nodes, chunk=chunk), (), chunk) for chunk in sizes)


def _servers(collective: Collective, wires: Wires) -> Iterator[Iterator[Candidate]]:
    stars = [(star(wires.ranks, rank), 1.0) for rank in range(wires.ranks)]
    sizes = _chunks(-(-collective.elements // wires.ranks))
    yield (Candidate(servers(collective, chunk=chunk), stars, chunk) for chunk in sizes)


def _trees(collective: Collective, wires: Wires) -> Iterator[Iterator[Candidate]]:
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


def _grown(collective: Collective, weighted: Sequence[Weighted]) -> Iterator[Candidate]:
    heaviest = max((weight for _, weight in weighted), default=1.0)
    share = heaviest / (math.fsum(weight for _, weight in weighted) or 1.0)
    for chunk in _chunks(math.ceil(collective.elements * share)):
        yield Candidate(trees(collective, weighted, chunk=chunk), weighted, chunk)


def _turning(wires: Wires) -> Iterator[tuple[int, tuple[int, ...]]]:
    """A place and a node for each place: roots of different places are on different nodes."""
    members = wires.nodes.members
    for place in range(min(map(len, members))):
        yield place, members[place % len(members)]


def _packed(collective: Collective, wires: Wires) -> list[Weighted]:
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
        (rooted(sorted(tree.links), n, root), tree.weight) for root in range(n) for tree in found
    ]


PROGRAMS: Mapping[str, Make] = MappingProxyType(
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
