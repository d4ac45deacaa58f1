"""One level of a cluster's network: how fast bytes flow, and how long the first one takes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from headway.documents import document
from headway.units import format_rate, format_seconds, parse_rate, parse_seconds


def _rate(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} is no rate; write it as "100 Mbit/s" or "3 GB/s"')
    return parse_rate(value)


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} is no duration; write it as "50 us" or "2 ms"')
    return parse_seconds(value)


Rate = Annotated[float, BeforeValidator(_rate)]
"""Bytes per second; in a file a text with its unit."""

Seconds = Annotated[float, BeforeValidator(_seconds)]
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
