"""The hosts of an elastic job: who is there, in which order, and who is excluded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.errors import UsageError


class Slot(NamedTuple):
    """Room for one worker on a host."""

    host: str
    number: int

    def __str__(self) -> str:
        return f"{self.host}[{self.number}]"


@dataclass
class ElasticHosts:
    """What is known of the hosts; times are seconds of a monotonic clock.

    Args:
        cooldown: How long a host in which a worker has failed is excluded: the first number, twice
            as long at each further failure, at most the second. None: for ever.
    """

    cooldown: tuple[float, float] | None = None
    _slots: dict[str, int] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _excluded: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)

    def update(self, found: Mapping[str, int] | None, now: float) -> None:
        """Take up what was discovered (None: nothing new), and hosts whose exclusion has ended."""
        if found is not None:
            self._slots = dict(found)
        self._excluded = {host: until for host, until in self._excluded.items() if now < until}
        there = [host for host in self._slots if host not in self._excluded]
        # Who has been there longest comes first: it has the state that others are given.
        self._order = [host for host in self._order if host in there]
        self._order += [host for host in there if host not in self._order]

    def exclude(self, host: str, now: float) -> None:
        """A worker on a host has failed."""
        seconds = float("inf")
        if self.cooldown is not None:
            least, most = self.cooldown
            seconds = min(most, least * 2 ** self._failures.get(host, 0))
        self._failures[host] = self._failures.get(host, 0) + 1
        self._excluded[host] = now + seconds
        if host in self._order:
            self._order.remove(host)

    @property
    def excluded(self) -> tuple[str, ...]:
        return tuple(self._excluded)

    @property
    def all_excluded(self) -> bool:
        """Whether all hosts are excluded for ever."""
        return bool(self._slots) and all(
            self._excluded.get(host) == float("inf") for host in self._slots
        )

    def slots(self, first: Collection[str] = (), most: int | None = None) -> tuple[Slot, ...]:
        """The slots in the order of ranks.

        Args:
            first: Hosts whose workers have the state: they come before all others.
            most: So many at most.
        """
        order = sorted(self._order, key=lambda host: host not in first)
        return tuple(Slot(host, number) for host in order for number in range(self._slots[host]))[
            :most
        ]


def parse_hosts(text: str, default: int) -> dict[str, int]:
    """The hosts in the output of a discovery script: a name in each line, or NAME:SLOTS.

    Args:
        default: Slots of a host without a number.

    Raises:
        UsageError: A line is something else.
    """
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, slots = line.rpartition(":") if ":" in line else (line, "", str(default))
        if not name or name.startswith("-") or any(map(str.isspace, name)) or not _whole(slots):
            raise UsageError(
                f"the discovery script says {line[:80]!r}",
                fix="It prints a host in each line, as HOST or HOST:SLOTS.",
            )
        found[name] = int(slots)
    return {name: slots for name, slots in found.items() if slots}


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7
