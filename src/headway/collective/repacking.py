"""A program for links as they are now: which links have drifted, what carries the sums from now on.

Only what differs from link to link counts: links that are all as much slower than described need no
other program. Invariant: the result depends on the arguments alone; a link that has not drifted
keeps its rate, so that noise of a measurement changes no tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from headway.collective.carried import make_program
from headway.collective.carrier import Carrier, Kind, Tree
from headway.collective.generators.trees import CHUNKS
from headway.collective.packing.drift import drifted, repacked
from headway.collective.packing.graph import LinkGraph
from headway.collective.packing.pack import pack
from headway.collective.packing.tree import Packing
from headway.collective.packing.tree import Tree as PackedTree
from headway.collective.program import Recv, Send
from headway.units import format_bytes, format_rate, format_seconds

WORTH = 0.1
"""By so much another program must be faster; less would be lost in what is measured."""
MESSAGE_SECONDS = 30e-6
"""To begin a message in an interpreter in Python; assumed, by the planner, too."""
TREES: Kind = "trees"
_MOST_CHUNKS, _LEAST_CHUNK = 64.0, 16 * 1024
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Drift:
    """One direction of a link that is no longer what it was.

    Attributes:
        sender: Rank.
        receiver: Rank.
        before: Bytes per second that were expected, at the level of the links that stayed.
        now: Measured.
    """

    sender: int
    receiver: int
    before: float
    now: float

    def __str__(self) -> str:
        """As in "rank 1 to rank 2: 10 Mbit/s, was 100 Mbit/s"."""
        now, before = format_rate(self.now), format_rate(self.before)
        return f"rank {self.sender} to rank {self.receiver}: {now}, was {before}"


@dataclass(frozen=True, slots=True)
class Carrying:
    """A program as the plan says it, and its price.

    Attributes:
        kind: `Exchange.collective`.
        carrier: `Exchange.carrier`.
        seconds: Of one step's sums on the links as they are now, predicted.
    """

    kind: Kind
    carrier: Carrier
    seconds: float

    def __str__(self) -> str:
        """As in "trees (5 of them)"."""
        text = str(self.carrier)
        return f"{self.kind} ({text})" if text else self.kind


@dataclass(frozen=True, slots=True)
class Repacking:
    """What a measurement has shown, and what follows.

    Attributes:
        drifts: Directions of links that have drifted, ascending.
        links: All links as they are now, bytes per second.
        before: The program in use.
        after: The program from now on; the same where none is worth the change.
    """

    drifts: tuple[Drift, ...]
    links: LinkGraph
    before: Carrying
    after: Carrying

    @property
    def changes(self) -> bool:
        """Whether the program becomes another one."""
        return self.after is not self.before

    def sentences(self) -> Iterator[str]:
        """What drifted, and what is done about it."""
        yield "links have drifted: " + "; ".join(map(str, self.drifts))
        took = f"{format_seconds(self.before.seconds)} for the sums of a step predicted"
        if self.changes:
            yield (
                f"re-packed: {self.before} would take {took}; "
                f"{self.after}: {format_seconds(self.after.seconds)}"
            )
        else:
            yield f"{self.before} stays, {took}: no trees are {WORTH:.0%} faster"


def links_of(carrier: Carrier | None) -> LinkGraph | None:
    """What a program was made for; None: the plan does not say."""
    return LinkGraph(carrier.rates) if carrier is not None and carrier.rates else None


def seen(old: LinkGraph, measured: LinkGraph) -> tuple[tuple[Drift, ...], LinkGraph]:
    """Which links have drifted against the others, and all links as they are now.

    Args:
        old: What was known, of the same ranks; 0 where there is no link, which is not looked at.
        measured: The rates of all its directions.
    """
    expected = old.scaled(_level(old, measured))
    arcs = drifted(expected, measured)
    found = tuple(Drift(i, j, expected.rates[i][j], measured.rates[i][j]) for i, j in arcs)
    rates = [list(row) for row in expected.rates]
    for i, j in arcs:
        rates[i][j] = measured.rates[i][j]
    return found, LinkGraph(tuple(map(tuple, rates)))


def agreed(old: LinkGraph, first: LinkGraph, second: LinkGraph) -> LinkGraph:
    """Of two measurements of each direction the one nearer to what is expected, which stands where
    one is above and the other below it: other programs on the machines disturb one of them."""
    levels = _level(old, first), _level(old, second)
    rates = [[0.0] * old.ranks for _ in range(old.ranks)]
    for i, j in old.arcs:
        known = old.rates[i][j]
        shares = (
            table.rates[i][j] / level / known
            for table, level in zip((first, second), levels, strict=True)
        )
        rates[i][j] = levels[1] * known * median((1.0, *shares))
    return LinkGraph(tuple(map(tuple, rates)))


def _level(old: LinkGraph, measured: LinkGraph) -> float:
    """By which the usual link is faster than it was."""
    return median(measured.rates[i][j] / old.rates[i][j] for i, j in old.arcs)


def carried_seconds(
    kind: str, carrier: Carrier | None, links: LinkGraph, num_bytes: float, element_bytes: int = 4
) -> float:
    """Seconds of sums: what the busiest link needs, and for trees to fill their pipe; or what the
    messages of a rank need to begin. `simulator.collective` plays both, and latency.

    Args:
        kind: Of `CARRIED`.
        carrier: Of the exchange.
        links: Bytes per second.
        num_bytes: Of the buffer.
        element_bytes: Of an element.
    """
    elements = max(1, round(num_bytes / element_bytes))
    program = make_program(kind, carrier, links.ranks, elements, element_bytes)
    sent = program.traffic(element_bytes).sent
    busiest = max(
        (size / links.rates[i][j] if links.rates[i][j] else math.inf)
        for (i, j), size in sent.items()
    )
    begun = max(sum(isinstance(s, Recv | Send) for s in steps) for steps in program.steps)
    fill = _fill(carrier or Carrier(), elements * element_bytes) if kind == TREES else 1.0
    return max(busiest * fill, begun * MESSAGE_SECONDS)


def _fill(carrier: Carrier, num_bytes: int) -> float:
    """How much longer trees take than their bytes: with k chunks and depth h (k + 2 h - 1) / k."""
    total, heaviest = sum(t.weight for t in carrier.trees), max(t.weight for t in carrier.trees)
    size, part = carrier.chunk_bytes, num_bytes * heaviest / total
    chunks = max(1.0, part // size) if size else CHUNKS
    depth = max(tree.depth for tree in _packed(carrier))
    return (chunks + 2 * depth - 1) / chunks


def find_repacking(
    kind: Kind,
    carrier: Carrier,
    old: LinkGraph,
    measured: LinkGraph,
    sizes: Sequence[int],
    element_bytes: int = 4,
) -> Repacking | None:
    """What to do about measured links; None: none has drifted.

    Trees in use get new weights and new trees beside them only where those do not reach the new
    bound (`repacked`); for any other program trees are packed.

    Args:
        kind: `Exchange.collective`.
        carrier: Of the exchange.
        old: The links as they were known.
        measured: As they are now.
        sizes: Bytes of the sums of a step, one by one.
        element_bytes: Of a gradient.

    Raises:
        PlanError: The links no longer join all ranks.
    """
    drifts, links = seen(old, measured)
    if not drifts:
        return None
    packing = _repacked(kind, carrier, links)
    trees = Carrier(
        chunk=format_bytes(_chunk(packing, max(sizes))),
        trees=tuple(Tree.of(tree.parent, tree.weight) for tree in packing.trees),
        rates=links.rates,
    )
    before, after = (
        Carrying(name, own, step_seconds(name, own, links, sizes, element_bytes))
        for name, own in ((kind, replace(carrier, rates=links.rates)), (TREES, trees))
    )
    worth = after.seconds < (1 - WORTH) * before.seconds
    return Repacking(drifts, links, before, after if worth else before)


def step_seconds(
    kind: Kind,
    carrier: Carrier | None,
    links: LinkGraph,
    sizes: Sequence[int],
    element_bytes: int = 4,
) -> float:
    """`carried_seconds` of all sums of a step, after the largest one of them."""
    largest = max(sizes)
    return carried_seconds(kind, carrier, links, largest, element_bytes) * sum(sizes) / largest


def _repacked(kind: Kind, carrier: Carrier, links: LinkGraph) -> Packing:
    if kind != TREES:
        return pack(links, "all_reduce", attempts=_ATTEMPTS)
    return repacked(Packing(links, "all_reduce", _packed(carrier), 0.0), links)


def _chunk(packing: Packing, num_bytes: int) -> int:
    """Bytes of a message of the heaviest tree: with k chunks filling the pipe costs T (2 h - 1) / k
    and their messages k o m, least with k = sqrt(T (2 h - 1) / (o m)).

    T: seconds of all bytes, h: depth, o: `MESSAGE_SECONDS`, m: messages of the busiest rank.
    """
    ends = [0] * packing.graph.ranks
    for tree in packing.trees:
        for pair in tree.edges:
            for rank in pair:
                ends[rank] += 2  # each link is sent along both ways
    fill = num_bytes / packing.rate * (2 * packing.depth - 1)
    chunks = min(max(1.0, math.sqrt(fill / (MESSAGE_SECONDS * max(ends)))), _MOST_CHUNKS)
    return max(_LEAST_CHUNK, math.ceil(num_bytes * packing.fractions[0] / chunks))


def _packed(carrier: Carrier) -> tuple[PackedTree, ...]:
    return tuple(PackedTree(tree.parent, tree.weight) for tree in carrier.trees)
