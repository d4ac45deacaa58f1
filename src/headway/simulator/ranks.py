"""The ranks of a simulated step: price of a message, faults, and which ranks behave alike.

Ranks are numbered by axes with strides, node by node. A message is priced on the innermost
level that joins its two ends, a collective by the hierarchical network for its whole group.
Copies of a pipeline, and positions on the tensor axis, are one class exactly if all their ranks
have the same devices and speed and all their messages and collectives cost the same; simulating
one of each class is then the same as simulating all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from headway.cost.network import HierarchicalNetwork, LinkLevel


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """The ranks of a step.

    Attributes:
        data: d, copies of the pipeline.
        pipeline: p, ranks of one pipeline.
        strides: Of the three axes in this order; None: tensor innermost, then data, then pipeline.
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    strides: tuple[int, int, int] | None = None

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def apart(self) -> tuple[int, int, int]:
        """The strides."""
        return self.strides or (1, self.tensor, self.tensor * self.data)

    def rank(self, part: int, copy: int, place: int) -> int:
        """Of a position on the tensor axis, a copy, and a place in the pipeline."""
        one, two, three = self.apart
        return part * one + copy * two + place * three

    def place(self, rank: int) -> tuple[int, int, int]:
        """(part, copy, place) of a rank."""
        sizes = (self.tensor, self.data, self.pipeline)
        one, two, three = (
            rank // stride % size for stride, size in zip(self.apart, sizes, strict=True)
        )
        return one, two, three


@dataclass(frozen=True, kw_only=True)
class SlowPath:
    """A link between two sets of ranks that carries less.

    Attributes:
        factor: Its rate is divided by it.
    """

    ends: tuple[frozenset[int], frozenset[int]]
    factor: float

    def joins(self, members: Set[int]) -> bool:
        """Whether some of these ranks are on either side."""
        return all(members & end for end in self.ends)


@dataclass(frozen=True, kw_only=True)
class StepFaults:
    """What is wrong with the machine.

    Attributes:
        slow: By rank: its computations take so many times as long.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    paths: tuple[SlowPath, ...] = ()


NO_FAULTS = StepFaults()
Edge = tuple[int, int]
"""Places in a pipeline between which messages go."""
Price = tuple[float, float, str]
"""Of a message: seconds per byte, latency, level."""


@dataclass(frozen=True)
class SimulatedRanks:
    """The ranks on their network."""

    grid: RankGrid
    network: HierarchicalNetwork
    faults: StepFaults = NO_FAULTS

    def slowness(self, copy: int, place: int) -> float:
        """Of a tensor group: it goes at the pace of its slowest rank."""
        if not self.faults.slow:
            return 1.0
        parts = range(self.grid.tensor)
        slow = self.faults.slow
        return max(slow.get(self.grid.rank(part, copy, place), 1.0) for part in parts)

    def message(self, source: int, target: int) -> Price:
        """Between two ranks of a pipeline, while their neighbours send, too."""
        inner = 1.0
        found = self.network.levels[-1]
        for level in self.network.levels:
            found = level
            if source // level.width == target // level.width:
                break
            inner = level.width
        latency, cost = found.message_costs(self.grid.apart[2], inner)
        per_byte = float(cost)
        for path in self.faults.paths:
            if path.joins({source, target}):
                per_byte *= path.factor
        return per_byte, latency, found.name

    def group(self, part: int, places: Sequence[int]) -> HierarchicalNetwork:
        """The network as the ranks see it that sum the gradients of a stage.

        Args:
            places: In the pipeline that hold the stage.
        """
        if not self.faults.paths:
            return self.network
        copies = range(self.grid.data)
        members = {self.grid.rank(part, c, place) for place in places for c in copies}
        network = self.network
        for path in self.faults.paths:
            if path.joins(members):
                network = _slower(network, path)
        return network

    def links_of_tensor(self, copy: int, place: int) -> float:
        """By how much a slow link slows a tensor group's collectives, their latencies included."""
        members = {self.grid.rank(part, copy, place) for part in range(self.grid.tensor)}
        joined = [path.factor for path in self.faults.paths if path.joins(members)]
        return math.prod(joined)

    def shape(self, places: Sequence[int]) -> tuple[int, int]:
        """(size, stride) of the ranks that sum the gradients of a stage, of which a pipeline holds
        copies at these places."""
        _, data, pipeline = self.grid.apart
        size = self.grid.data * len(places)
        if self.grid.data > 1 or len(places) == 1:
            return size, data
        # Without copies of the pipeline a stage is summed over its places in it (Chimera), at their
        # mean distance.
        return size, pipeline * (max(places) - min(places)) // (len(places) - 1)

    def level_of(self, size: int, stride: int) -> LinkLevel:
        """The innermost level that joins a group."""
        far = (size - 1) * stride + 1
        levels = self.network.levels
        return next((level for level in levels if level.width >= far), levels[-1])


@dataclass(frozen=True, kw_only=True)
class EquivalentRanks:
    """Some that behave alike."""

    first: int
    count: int


@dataclass(frozen=True)
class RepresentativeRanks:
    """Who is played: of each class one, or everybody.

    Attributes:
        holders: Of each stage, the places that hold it.
        variant: Of each copy: those with the same number have the same devices; empty: all have.
    """

    world: SimulatedRanks
    edges: tuple[Edge, ...]
    holders: tuple[tuple[int, ...], ...]
    everybody: bool = False
    variant: tuple[int, ...] = ()

    @cached_property
    def parts(self) -> tuple[EquivalentRanks, ...]:
        """On the tensor axis."""
        copies = range(self.world.grid.data)

        def look(part: int) -> object:
            # A stage's group spans all copies: what it costs depends on the part alone.
            groups = tuple(_rates(self.world.group(part, places)) for places in self.holders)
            return tuple(self._messages(part, copy) for copy in copies), groups

        return self._classes(self.world.grid.tensor, look)

    @cached_property
    def copies(self) -> tuple[EquivalentRanks, ...]:
        """Of the pipeline."""
        world, places = self.world, range(self.world.grid.pipeline)

        def look(copy: int) -> object:
            slow = tuple(world.slowness(copy, place) for place in places)
            links = tuple(world.links_of_tensor(copy, place) for place in places)
            messages = tuple(self._messages(part.first, copy) for part in self.parts)
            # A slice, which is empty where all copies have the same devices.
            return self.variant[copy : copy + 1], slow, links, messages

        return self._classes(world.grid.data, look)

    def _messages(self, part: int, copy: int) -> tuple[Price, ...]:
        rank = self.world.grid.rank
        return tuple(
            self.world.message(rank(part, copy, a), rank(part, copy, b)) for a, b in self.edges
        )

    def _classes(self, number: int, look: Callable[[int], object]) -> tuple[EquivalentRanks, ...]:
        if self.everybody:
            return tuple(EquivalentRanks(first=one, count=1) for one in range(number))
        found: dict[object, list[int]] = {}
        for one in range(number):
            found.setdefault(look(one), []).append(one)
        return tuple(EquivalentRanks(first=alike[0], count=len(alike)) for alike in found.values())

    def __iter__(self) -> Iterator[tuple[EquivalentRanks, EquivalentRanks, int]]:
        """(copy, part, place) of every rank that is played."""
        for copy in self.copies:
            for place in range(self.world.grid.pipeline):
                for part in self.parts:
                    yield copy, part, place


def _rates(network: HierarchicalNetwork) -> tuple[float, ...]:
    """What faults can change about a network."""
    return tuple(level.link.rate for level in network.levels)


def _slower(network: HierarchicalNetwork, path: SlowPath) -> HierarchicalNetwork:
    """With the level slowed that joins both ends."""
    # One rank of either end is enough: the ranks of an end are on one node.
    first, second = (min(end) for end in path.ends)
    levels = list(network.levels)
    number = next(
        (n for n, level in enumerate(levels) if first // level.width == second // level.width),
        len(levels) - 1,
    )
    level = levels[number]
    link = replace(level.link, rate=level.link.rate / path.factor)
    levels[number] = replace(level, link=link)
    return HierarchicalNetwork(tuple(levels))
