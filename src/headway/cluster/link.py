"""Links and link levels: bandwidth and latency, and which ranks each level of the network joins.

Levels go from the innermost outwards: ranks of a socket, of a node, nodes of a rack, racks. A
*domain* is what one switch of a level joins; its *units* are the domains of the level below. The
domains of a level lie inside those of the next one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from pydantic import BeforeValidator

from headway.documents import document
from headway.units import format_rate, format_seconds, parse_rate, parse_seconds


def from_text(parse: Callable[[str], object], what: str) -> BeforeValidator:
    """A validator of an amount that a file states as a text with its unit.

    Args:
        what: The end of the sentence for a value that is no text: 'no size; write it as "80 GiB"'.
    """

    def parsed(value: object) -> object:
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is {what}")
        return parse(value)

    return BeforeValidator(parsed)


Rate = Annotated[float, from_text(parse_rate, 'no rate; write it as "100 Mbit/s" or "3 GB/s"')]
"""Bytes per second; in a file a text with its unit."""

Seconds = Annotated[float, from_text(parse_seconds, 'no duration; write it as "50 us" or "2 ms"')]
"""Seconds; in a file a text with its unit."""


@document
class Link:
    """A link, the same in both directions, which do not disturb each other.

    Attributes:
        rate: Bytes per second, of one direction.
        latency: Seconds from one end to the other for the first byte.
    """

    rate: Rate
    latency: Seconds = 0.0

    @staticmethod
    def of(rate: str, latency: str = "0 s") -> Link:
        """From texts: Link.of("100 Mbit/s", "50 us").

        Raises:
            ValueError: No such unit.
        """
        return Link(rate=parse_rate(rate), latency=parse_seconds(latency))

    def seconds(self, num_bytes: float) -> float:
        """Time of one message: latency + bytes / rate (Hockney's model)."""
        return self.latency + num_bytes / self.rate

    def problems(self, name: str) -> list[str]:
        """What is impossible about it, one line each."""
        found = []
        if not self.rate > 0:
            found.append(f"{name}: a rate of {format_rate(self.rate)} carries nothing")
        if self.latency < 0:
            found.append(f"{name}: a latency of {format_seconds(self.latency)} is negative")
        return found

    def __str__(self) -> str:
        latency = f", {format_seconds(self.latency)}" if self.latency else ""
        return f"{format_rate(self.rate)}{latency}"


# The levels of a cluster's links: which ranks a level joins, and what its links carry.


@document
class Level:
    """One level.

    Attributes:
        name: As people call it: "node", "rack", "cluster".
        ranks: How many ranks of a node one domain joins (a socket); None: see `nodes`.
        nodes: How many nodes one domain joins, its radix; None, and no `ranks`: all.
        rate: Bytes/s of one unit to the others of its domain, in each direction, as collectives
            reach it.
        latency: Seconds of one step of a collective.
        oversubscription: By how much less each unit gets where all of them send at once, which they
            do in a collective.
        message: The link of one plain message between two ranks, where it differs.
        source: Of "rate", "latency", "message".
    """

    name: str
    ranks: int | None = None
    nodes: int | None = None
    rate: Rate
    latency: Seconds = 0.0
    oversubscription: float = 1.0
    message: Link | None = None
    source: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def link(self) -> Link:
        """Of one unit while all of them send."""
        return Link(rate=self.rate / self.oversubscription, latency=self.latency)

    @property
    def alone(self) -> Link:
        """Of one message while nobody else sends."""
        return self.message or Link(rate=self.rate, latency=self.latency)

    @property
    def in_node(self) -> bool:
        """Whether it joins ranks of one node only."""
        return self.ranks is not None or self.nodes == 1

    def domain(self, node: int, local: int) -> tuple[int, ...]:
        """In which domain a rank is, from the number of its node and its own one there."""
        if self.ranks is not None:
            return (node, local // self.ranks)
        # Without a radix all nodes are in one domain.
        return () if self.nodes is None else (node // self.nodes,)

    def problems(self, key: str) -> Iterator[str]:
        """What is impossible about it, one line each."""
        yield from Link(rate=self.rate, latency=self.latency).problems(key)
        if self.message is not None:
            yield from self.message.problems(f"{key}.message")
        if self.ranks is not None and self.nodes is not None:
            yield f"{key}: it joins ranks of a node or whole nodes; leave ranks or nodes out"
        for name, value in (("ranks", self.ranks), ("nodes", self.nodes)):
            if value is not None and value < 1:
                yield f"{key}.{name}: {value}; at least 1"
        if not 1 <= self.oversubscription < math.inf:
            yield f"{key}.oversubscription: {self.oversubscription:g}; at least 1 (1: none)"


def level_order_problems(levels: Sequence[Level], nodes: int) -> Iterator[str]:
    """What is wrong between levels: twice the same, in disorder, not all nodes joined."""
    for number, level in enumerate(levels):
        key = f"levels.{number}"
        if level.name in [other.name for other in levels[:number]]:
            yield f"{key}.name: {level.name!r} stands twice"
        if number and not _domains_nest(levels[number - 1], level):
            yield (
                f"{key}: {level.name} does not hold whole domains of {levels[number - 1].name}; "
                "levels go from the innermost outwards, each a multiple of the one before"
            )
    last = levels[-1] if levels else None
    if last and nodes > 1 and (last.in_node or (last.nodes or nodes) < nodes):
        yield (
            f"levels: {last.name} is the last one and does not join all {nodes} nodes; write "
            "a last level without nodes"
        )


def _domains_nest(inner: Level, outer: Level) -> bool:
    if outer.ranks is not None:
        return _multiple(outer.ranks, inner.ranks)
    # All nodes hold any smaller domain, and whole nodes hold whole sockets.
    if outer.nodes is None or inner.ranks is not None:
        return inner.ranks is not None or inner.nodes is not None
    return _multiple(outer.nodes, inner.nodes)


def _multiple(outer: int, inner: int | None) -> bool:
    # Fewer than 1 is a problem of its own, which `Level.problems` names.
    return inner is not None and outer > inner and (inner < 1 or outer % inner == 0)
