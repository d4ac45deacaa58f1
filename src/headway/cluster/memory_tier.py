"""Memory behind that of a device: what a rank can hold there, and how fast its rows come from it.

Tiers go from the one next to the device outwards: a host's DRAM, then a file on its NVMe drives
that is mapped into memory. The device's own memory (`Device.memory`) is the tier before all of
them; it is called `DEVICE_TIER`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated

from headway.cluster.link import Link, Rate, from_text
from headway.documents import document
from headway.units import format_rate, parse_bytes

Bytes = Annotated[
    float, from_text(lambda text: float(parse_bytes(text)), 'no size; write it as "80 GiB"')
]
"""In a file a text with its unit."""

DEVICE_TIER = "device"
"""The tier of a device's own memory."""


@document
class MemoryTier:
    """One tier, as one rank has it: of memory that the ranks of a node share, its part.

    Attributes:
        name: As people call it: "DRAM", "NVMe".
        memory: Bytes.
        rate: Bytes/s at which it reads and writes rows of tables.
        link: To the tier before it, on the way to the device; None: as fast as the tier.
        mapped: Whether it is a file that is mapped into memory, as on NVMe drives.
        source: Of these numbers.
    """

    name: str
    memory: Bytes
    rate: Rate
    link: Link | None = None
    mapped: bool = False
    source: str = ""

    def problems(self, key: str) -> Iterator[str]:
        """What is impossible about it, one line each."""
        if not 0 < self.memory < math.inf:
            yield f"{key}.memory: {self.memory:g} bytes; it must be positive"
        if not self.rate > 0:
            yield f"{key}.rate: {format_rate(self.rate)} carries nothing"
        if self.link is not None:
            yield from self.link.problems(f"{key}.link")


def tier_problems(tiers: Sequence[MemoryTier], key: str) -> Iterator[str]:
    """What is wrong with the tiers of a device, one line each."""
    names = [DEVICE_TIER, *(tier.name for tier in tiers)]
    for number, tier in enumerate(tiers):
        yield from tier.problems(f"{key}.{number}")
        if not tier.name:
            yield f"{key}.{number}.name: a tier needs a name"
        if tier.name in names[: number + 1]:
            own = " (the device's own memory)" if tier.name == DEVICE_TIER else ""
            yield f"{key}.{number}.name: {tier.name!r} stands twice{own}"


def reached_rates(tiers: Sequence[MemoryTier]) -> tuple[float, ...]:
    """Bytes/s with which the device reaches each tier: no more than any link on the way."""
    found, way = [], math.inf
    for tier in tiers:
        way = min(way, tier.link.rate if tier.link else math.inf)
        found.append(min(way, tier.rate))
    return tuple(found)
