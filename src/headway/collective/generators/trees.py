"""Programs of weighted trees, each pipelined in chunks; parameter servers are stars.

The buffer is split by the weights of the trees. In an all-reduce chunk i goes up to the root
while chunk i - 1 comes down (Blink: Wang et al. 2020, section 4). Where the trees come from
does not matter here: packings, stars of parameter servers, chains, two-level trees of nodes;
the usual shapes are functions of this module.

A parameter server is a star-shaped tree with the server as its root, so that push, sum and pull
of different chunks overlap (Li et al. 2014; with all ranks as servers each byte is sent and
received once by everybody, as in BytePS, Jiang et al. 2020, section 3).

Every event has a virtual time. In a tree of height H a rank of depth d sums chunk c at c + H -
d, turns it round one unit later (what it sent up has left, so the result may be received into
its place) and sends the result on at c + H + d; without sums H counts as 0. Each rank performs
its events in the order of their virtual times, and both ends of a message begin it at earlier
times than whatever waits for it, so that no set of trees can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from headway.collective.generators.program_builder import (
    OUT,
    BufferArea,
    Part,
    ProgramBuilder,
    RankScript,
    check_operation,
    parts_of,
    piece_count,
    split_evenly,
)
from headway.collective.nodes import Nodes, Parents, children, depths
from headway.collective.program.program import (
    BufferSpan,
    CollectiveProgram,
    CollectiveTask,
    proportional_sizes,
)

RECEIVES_AHEAD = 2
"""Chunks for which a rank has begun to receive before it needs them."""
UP = frozenset({"all_reduce", "reduce", "reduce_scatter"})
DOWN = frozenset({"all_reduce", "broadcast", "all_gather"})


@dataclass(frozen=True, slots=True)
class TreeEvent:
    """Something that a rank does with a chunk at a virtual time."""

    time: int
    chunk: int
    act: Callable[[int], None]


class TreeSteps:
    """A rank in a tree of some height, `depth` links away from the root."""

    def __init__(
        self,
        collective: CollectiveTask,
        script: RankScript,
        rank: int,
        tag: int,
        pieces: Sequence[Part],
        *,
        parent: int | None,
        kids: Sequence[int],
        depth: int,
        height: int,
    ) -> None:
        self.script, self.tag, self.pieces = script, tag, pieces
        self.parent, self.kids = parent, kids
        self.up, self.down = collective.op in UP, collective.op in DOWN
        self.depth, self.height = depth, height if self.up else 0
        apart = collective.op in ("reduce_scatter", "all_gather")
        share = collective.borders[rank] if apart else 0
        self.own = OUT  # where its own numbers are
        self.final = OUT  # where, at the root, the sums belong
        if collective.op == "reduce_scatter":
            self.own, self.final = BufferArea("in"), BufferArea("out", share)
        elif collective.op == "all_gather":
            self.own = BufferArea("in", share)
        self.in_place = collective.op == "all_reduce"
        self.handles: dict[tuple[str, int], list[int]] = {}
        size = max(stop - start for start, stop in pieces)
        slots = RECEIVES_AHEAD if self.up else 0
        self.slots = [[script.room(size) for _ in range(slots)] for _ in kids]

    def begin(self) -> None:
        """Begin to receive the first chunks; nothing is sent yet."""
        for chunk in range(RECEIVES_AHEAD):
            if self.up:
                self._expect_sums(chunk)
            elif self.parent is not None:
                self._expect_result(chunk)

    def events(self) -> Iterator[TreeEvent]:
        """All that follows."""
        for chunk in range(len(self.pieces)):
            if self.up:
                yield TreeEvent(chunk + self.height - self.depth, chunk, self._sum)
                if self.parent is not None:
                    yield TreeEvent(chunk + self.height - self.depth + 1, chunk, self._turn)
            if self.down and (self.parent is not None or not self.up):
                yield TreeEvent(chunk + self.height + self.depth, chunk, self._hand_on)

    def rest(self) -> list[int]:
        """What is not waited for yet."""
        return [handle for handles in self.handles.values() for handle in handles]

    def _sum(self, chunk: int) -> None:
        """The children's sums are there: add them, and send the sum up, or at the root down."""
        piece = self.pieces[chunk]
        # The root sends results itself, so that its earlier sends must have left.
        old = self._old_results(chunk) if self.parent is None else []
        self.script.wait([*self._pop("sums", chunk), *old])
        sums = self._sums(chunk)
        if self.parent is None and sums != self.own.span(piece):
            self.script.copy(sums, self.own.span(piece))
        elif self._apart:
            self.script.combine(sums, self.own.span(piece))
        # Slot 0 holds the sums themselves if they are formed where the first child's arrive.
        for number in range(1 if self._apart else 0, len(self.kids)):
            self.script.combine(sums, self._slot(number, chunk))
        # Sums that are formed in a child's slot occupy it until they have left (`_turn`).
        if not self._apart:
            self._expect_sums(chunk + RECEIVES_AHEAD)
        if self.parent is not None:
            self.handles["up", chunk] = self.script.send(self.parent, self.tag, sums)
        elif self.down:
            self._send_down(chunk)

    def _turn(self, chunk: int) -> None:
        """What was sent up has left: its place is free."""
        self.script.wait(self._pop("up", chunk))
        if self._apart:
            self._expect_sums(chunk + RECEIVES_AHEAD)
        if self.down:
            self._expect_result(chunk)

    def _hand_on(self, chunk: int) -> None:
        """The result is there (at a root without sums, its own numbers are): send it down."""
        self.script.wait([*self._pop("result", chunk), *self._old_results(chunk)])
        if self.parent is None:
            piece = self.pieces[chunk]
            if self.own != OUT:
                self.script.copy(OUT.span(piece), self.own.span(piece))
        elif not self.up:
            self._expect_result(chunk + RECEIVES_AHEAD)
        self._send_down(chunk)

    @property
    def _apart(self) -> bool:
        """Whether sums are formed where the first child's arrive, as own numbers must stay."""
        return self.parent is not None and bool(self.kids) and not self.in_place

    def _sums(self, chunk: int) -> BufferSpan:
        if self._apart:
            return self._slot(0, chunk)
        area = self.final if self.parent is None else self.own
        return area.span(self.pieces[chunk])

    def _slot(self, kid: int, chunk: int) -> BufferSpan:
        start, stop = self.pieces[chunk]
        slot = self.slots[kid][chunk % RECEIVES_AHEAD]
        return BufferSpan("tmp", slot.start, slot.start + stop - start)

    def _expect_sums(self, chunk: int) -> None:
        if chunk < len(self.pieces):
            self.handles["sums", chunk] = [
                handle
                for number, kid in enumerate(self.kids)
                for handle in self.script.recv(kid, self.tag, self._slot(number, chunk))
            ]

    def _expect_result(self, chunk: int) -> None:
        if chunk < len(self.pieces) and self.parent is not None:
            into = OUT.span(self.pieces[chunk])
            self.handles["result", chunk] = self.script.recv(self.parent, self.tag, into)

    def _send_down(self, chunk: int) -> None:
        of = OUT.span(self.pieces[chunk])
        self.handles["down", chunk] = [
            handle for kid in self.kids for handle in self.script.send(kid, self.tag, of)
        ]

    def _old_results(self, chunk: int) -> list[int]:
        """Sends that must be through before more of them begin."""
        return self._pop("down", chunk - RECEIVES_AHEAD)

    def _pop(self, what: str, chunk: int) -> list[int]:
        return self.handles.pop((what, chunk), [])


# Trees by name, as the parent of every rank: what `trees` makes programs of.


def chain(order: Sequence[int]) -> Parents:
    """A line that begins at the root."""
    parents: list[int | None] = [None] * len(order)
    for parent, rank in pairwise(order):
        parents[rank] = parent
    return tuple(parents)


def star(ranks: int, root: int) -> Parents:
    """All others are children of the root."""
    return tuple(None if rank == root else root for rank in range(ranks))


def two_level(nodes: Nodes, root: int) -> Parents:
    """One rank of each node is joined to the root, the others of the node to that one.

    The rank of a node is the one with the root's place in it, so that roots of different places
    use different ranks.
    """
    home = nodes.inside(root)
    place = home.index(root)
    parents: list[int | None] = [None] * nodes.ranks
    for members in nodes.members:
        head = root if members == home else members[place % len(members)]
        for rank in members:
            parents[rank] = root if rank == head else head
    parents[root] = None
    return tuple(parents)


# Programs of weighted trees: the buffer is cut by their weights, each part runs in chunks.


OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
# Of each tree where nothing else is said: of n chunks filling the pipe costs (depth - 1) / n.
DEFAULT_CHUNKS = 16

Weighted = tuple[Parents, float]
"""A tree, as the parent of each rank (None: the root), and its weight in any unit."""


class _TreePart(NamedTuple):
    parents: Parents
    part: Part


def trees(
    collective: CollectiveTask,
    weighted: Sequence[Weighted],
    *,
    chunk: int | None = None,
    name: str = "trees",
) -> CollectiveProgram:
    """A program in which every tree carries its share, all at the same time.

    Args:
        collective: What it is for; not all_to_all. For broadcast and reduce all trees have the
            collective's root; for all_gather and reduce_scatter those of one root carry its share.
        chunk: Elements of a chunk of the heaviest tree; lighter ones have as many, smaller chunks.
            None: one 16th.

    Raises:
        PlanError: No such program for this operation.
        ValueError: Not trees of these ranks, not of these roots, or a weight that is not positive.
    """
    check_operation(collective, name, OPS)
    writer = ProgramBuilder(collective)
    placed = list(_tree_parts(collective, weighted))
    largest = max((part[1] - part[0] for _, part in placed), default=0)
    count = DEFAULT_CHUNKS if chunk is None else piece_count(largest, chunk)
    ways: list[list[TreeSteps]] = [[] for _ in range(collective.ranks)]
    for parents, part in placed:
        number = min(count, part[1] - part[0])
        tag, below, deep = writer.tag(), children(parents), depths(parents)
        for rank, script in enumerate(writer.ranks if number else ()):
            way = TreeSteps(
                collective,
                script,
                rank,
                tag,
                split_evenly(part, number),
                parent=parents[rank],
                kids=below[rank],
                depth=deep[rank],
                height=max(deep),
            )
            ways[rank].append(way)
    for rank, own in enumerate(ways):
        _write(writer, rank, own)
    return writer.program(name)


def _write(writer: ProgramBuilder, rank: int, ways: Sequence[TreeSteps]) -> None:
    """All events of a rank, in the order of their virtual times."""
    for way in ways:
        way.begin()
    events = [event for way in ways for event in way.events()]
    for event in sorted(events, key=lambda one: one.time):  # stable: of equals the first tree
        event.act(event.chunk)
    writer.ranks[rank].wait(handle for way in ways for handle in way.rest())


def _tree_parts(collective: CollectiveTask, weighted: Sequence[Weighted]) -> Iterator[_TreePart]:
    """Which elements of the whole each tree carries."""
    for parents, weight in weighted:
        if len(parents) != collective.ranks or not weight > 0:
            raise ValueError(f"the tree {parents} of weight {weight} for {collective.ranks} ranks")
    if collective.op in ("all_gather", "reduce_scatter"):
        for rank, share in enumerate(parts_of(collective.shares)):
            rooted = [one for one in weighted if one[0][rank] is None]
            yield from _shared(share, rooted, f"rank {rank}")
        return
    root = collective.root
    if root is not None and any(parents[root] is not None for parents, _ in weighted):
        raise ValueError(f"{collective.op} from rank {root} by trees of other roots")
    yield from _shared((0, collective.elements), weighted, "the buffer")


def _shared(part: Part, weighted: Sequence[Weighted], whose: str) -> Iterator[_TreePart]:
    size = part[1] - part[0]
    if not weighted and size:
        raise ValueError(f"no tree carries the part of {whose}")
    sizes = proportional_sizes(size, [weight for _, weight in weighted])
    for (parents, _), piece in zip(weighted, parts_of(sizes, part[0]), strict=True):
        yield _TreePart(parents, piece)


def servers(
    collective: CollectiveTask, ranks: Sequence[int] | None = None, *, chunk: int | None = None
) -> CollectiveProgram:
    """Shards of even size on these ranks.

    Args:
        ranks: Of the servers; None: all.
        chunk: Elements of a message; None: one 16th of a shard.

    Raises:
        PlanError: Another operation.
        ValueError: A server twice, or no server.
    """
    check_operation(collective, "servers", ("all_reduce",))
    chosen = list(range(collective.ranks) if ranks is None else ranks)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"servers on the ranks {chosen}")
    stars = [(star(collective.ranks, rank), 1.0) for rank in chosen]
    return trees(collective, stars, chunk=chunk, name="servers")
