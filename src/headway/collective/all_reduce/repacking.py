"""Links measured during training: when to probe, which drifted, which program to use now.

Probing: pairs of ranks send to each other in rounds, one partner at a time, so that every link
is alone with its message. It may cost a small share of the time, or what was lost because
exchanges take longer than they did; the decision depends on numbers that all ranks share.

Repacking: only differences between links count, because links that are all equally slower than
described need no other program. A link that has not drifted keeps its rate, so that the noise
of a measurement changes no tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from headway.collective.all_reduce.algorithm import (
    AllReduceKind,
    AllReduceOptions,
    PlanTree,
    all_reduce_program,
)
from headway.collective.generators.trees import DEFAULT_CHUNKS
from headway.collective.packing.pack import drifted_links, pack, repack_trees
from headway.collective.packing.tree import Packing, WeightedTree
from headway.collective.program.program import Recv, Send
from headway.collective.topology import LinkGraph
from headway.units import format_bytes, format_rate, format_seconds

# By so much another program must be faster; less would be lost in what is measured.
REPACK_GAIN = 0.1
# To begin a message in an interpreter in Python; assumed, by the planner, too.
MESSAGE_SECONDS = 30e-6
TREES: AllReduceKind = "trees"
_MOST_CHUNKS, _LEAST_CHUNK = 64.0, 16 * 1024
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class LinkDrift:
    """One direction of a link that is no longer what it was.

    Attributes:
        before: Bytes per second that were expected, at the level of the links that stayed.
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
class PricedAllReduce:
    """A program as the plan says it, and its price.

    Attributes:
        seconds: Of one step's sums on the links as they are now, predicted.
    """

    kind: AllReduceKind
    carrier: AllReduceOptions
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
        after: The program from now on; the same where none is worth the change.
    """

    drifts: tuple[LinkDrift, ...]
    links: LinkGraph
    before: PricedAllReduce
    after: PricedAllReduce

    @property
    def changes(self) -> bool:
        """Whether the program becomes another one."""
        return self.after != self.before

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
            yield f"{self.before} stays, {took}: no trees are {REPACK_GAIN:.0%} faster"


def links_of_options(carrier: AllReduceOptions | None) -> LinkGraph | None:
    """What a program was made for; None: the plan does not say."""
    return LinkGraph(carrier.rates) if carrier is not None and carrier.rates else None


def find_drift(old: LinkGraph, measured: LinkGraph) -> tuple[tuple[LinkDrift, ...], LinkGraph]:
    """Which links have drifted against the others, and all links as they are now.

    Args:
        old: What was known, of the same ranks; 0 where there is no link, which is not looked at.
        measured: The rates of all its directions.
    """
    # Links that are all equally slower or faster call for no other program.
    expected = old.scaled(_level(old, measured))
    arcs = drifted_links(expected, measured)
    found = tuple(LinkDrift(i, j, expected.rates[i][j], measured.rates[i][j]) for i, j in arcs)
    rates = [list(row) for row in expected.rates]
    for i, j in arcs:
        rates[i][j] = measured.rates[i][j]
    return found, LinkGraph(tuple(map(tuple, rates)))


def reconcile_measurements(old: LinkGraph, first: LinkGraph, second: LinkGraph) -> LinkGraph:
    """Of two measurements of each direction the one nearer to what is expected; the expected rate
    itself where it lies between them."""
    # Other programs on the machines disturb one measurement, hardly ever both.
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
    """How many times faster the usual link is than it was."""
    return median(measured.rates[i][j] / old.rates[i][j] for i, j in old.arcs)


def all_reduce_seconds(
    kind: str,
    carrier: AllReduceOptions | None,
    links: LinkGraph,
    num_bytes: float,
    element_bytes: int = 4,
) -> float:
    """Seconds of sums: what the busiest link needs, and for trees to fill their pipe; or what the
    messages of a rank need to begin. `simulator.collective` simulates both, and latency."""
    elements = max(1, round(num_bytes / element_bytes))
    program = all_reduce_program(kind, carrier, links.ranks, elements, element_bytes)
    sent = program.traffic(element_bytes).sent
    busiest = max(
        (size / links.rates[i][j] if links.rates[i][j] else math.inf)
        for (i, j), size in sent.items()
    )
    begun = max(sum(isinstance(s, Recv | Send) for s in steps) for steps in program.steps)
    if kind == TREES and carrier is not None:
        busiest *= _pipeline_fill_factor(carrier, elements * element_bytes)
    return max(busiest, begun * MESSAGE_SECONDS)


def _pipeline_fill_factor(carrier: AllReduceOptions, num_bytes: int) -> float:
    """How much longer trees take than their bytes: with k chunks and depth h (k + 2 h - 1) / k."""
    total, heaviest = sum(t.weight for t in carrier.trees), max(t.weight for t in carrier.trees)
    size, part = carrier.chunk_bytes, num_bytes * heaviest / total
    chunks = max(1.0, part // size) if size else DEFAULT_CHUNKS
    depth = max(tree.depth for tree in _packed(carrier))
    return (chunks + 2 * depth - 1) / chunks


def find_repacking(
    kind: AllReduceKind,
    carrier: AllReduceOptions,
    old: LinkGraph,
    measured: LinkGraph,
    sizes: Sequence[int],
    element_bytes: int = 4,
) -> Repacking | None:
    """What to do about measured links; None: none has drifted.

    Trees in use get new weights and new trees beside them only where those do not reach the new
    bound (`repack_trees`); for any other program trees are packed.

    Args:
        old: The links as they were known.
        sizes: Bytes of the sums of a step, one by one.

    Raises:
        PlanError: The links no longer join all ranks.
    """
    drifts, links = find_drift(old, measured)
    if not drifts:
        return None
    if kind == TREES:
        # Only its trees and direction are used; the bound is computed for the new links.
        packing = repack_trees(Packing(links, "all_reduce", _packed(carrier), 0.0), links)
    else:
        packing = pack(links, "all_reduce", attempts=_ATTEMPTS)
    largest = max(sizes)
    trees = AllReduceOptions(
        chunk=format_bytes(_chunk(packing, largest)),
        trees=tuple(PlanTree.of(tree.parent, tree.weight) for tree in packing.trees),
        rates=links.rates,
    )
    before, after = (
        PricedAllReduce(
            name,
            own,
            all_reduce_seconds(name, own, links, largest, element_bytes) * sum(sizes) / largest,
        )
        for name, own in ((kind, replace(carrier, rates=links.rates)), (TREES, trees))
    )
    worth = after.seconds < (1 - REPACK_GAIN) * before.seconds
    return Repacking(drifts, links, before, after if worth else before)


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


def _packed(carrier: AllReduceOptions) -> tuple[WeightedTree, ...]:
    return tuple(WeightedTree(tree.parent, tree.weight) for tree in carrier.trees)


# When and how links are measured while training: who sends to whom, how much, how often.


PROBE_TIME_SHARE = 0.005
"""Of the time that measuring may take."""
# Of a message: what shaped links let pass at once, about 10 ms of their rate.
PROBE_BURST_SHARE = 0.1
# Of a message, at the known rate: many latencies long, and longer than a rank is kept waiting for
# its processor.
_SECONDS = 0.1
_SMALLEST_PROBE, _LARGEST_PROBE = 64 * 1024, 16 * 2**20
# Longer exchanges than this, times what is usual, count as lost time.
_USUAL = 1.5
_PATIENCE = 16.0
# Between two moments at which ranks compare their clocks; a sum of three numbers.
_VOTE_SECONDS, _MOST_STEPS = 0.5, 1000

Pairs = tuple[tuple[int, int], ...]


def pairings(links: LinkGraph) -> tuple[Pairs, ...]:
    """Rounds of pairs (i < j) in which every two ranks that a link joins meet once: n - 1 rounds of
    n / 2 pairs, for odd n with one rank at rest (the circle method of tournaments)."""
    n = links.ranks + links.ranks % 2
    seats = [*range(n)]
    joined = {*links.links}
    rounds = []
    for _ in range(n - 1):
        facing = zip(seats[: n // 2], reversed(seats[n // 2 :]), strict=True)
        pairs = tuple(pair for a, b in facing if (pair := (min(a, b), max(a, b))) in joined)
        rounds += [pairs] * bool(pairs)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def probe_bytes(rate: float) -> int:
    """Of the message by which a link of this rate, bytes per second, is measured."""
    return round(min(max(rate * _SECONDS, _SMALLEST_PROBE), _LARGEST_PROBE))


def probe_seconds(links: LinkGraph) -> float:
    """What all rounds take on links that are what they were."""
    return sum(
        max(
            probe_bytes(rate) / rate
            for i, j in pairs
            for rate in (links.rates[i][j], links.rates[j][i])
        )
        for pairs in pairings(links)
    )


@dataclass(slots=True)
class ProbePolicy:
    """Decides at votes whether to measure, on every rank alike.

    Attributes:
        cost: Seconds of the last measurement; before the first one what is expected.
        patience: Grows with every measurement that changes nothing, up to 16; then it takes so many
            times longer, or so many times the lost time, to the next one.
        usual: Seconds of a step's exchange for which the training thread stands still.
        lost: Seconds beyond that, since the last measurement.
        since: Seconds since the last measurement.
    """

    cost: float
    patience: float = 1.0
    usual: float | None = None
    lost: float = 0.0
    since: float = 0.0

    def vote(self, steps: int, seconds: float, exposed: float) -> bool:
        """Whether to measure now.

        Args:
            seconds: That the steps took, on the slowest rank.
            exposed: Seconds of these for which the slowest rank waited for the exchange.
        """
        level = exposed / steps
        if self.usual is None:
            self.usual = level
        self.lost += steps * max(0.0, level - _USUAL * self.usual)
        # The least so far, so that a link that has become slow does not turn into the usual case.
        self.usual = min(self.usual, level)
        self.since += seconds
        price = self.patience * self.cost
        # A steady share of the time, or at once if waiting has cost as much as a measurement.
        return self.since * PROBE_TIME_SHARE >= price or self.lost >= price

    def measured(self, cost: float, *, changed: bool) -> None:
        """A measurement took `cost` seconds on the slowest rank; `changed`: the program is new."""
        self.patience = 1.0 if changed else min(_PATIENCE, 2 * self.patience)
        self.cost = cost
        self.usual, self.lost, self.since = None, 0.0, 0.0


def steps_to_vote(seconds: float) -> int:
    """Steps until ranks compare their clocks again, from the seconds of a step: half a second."""
    return max(1, min(_MOST_STEPS, round(_VOTE_SECONDS / seconds))) if seconds else _MOST_STEPS
