"""What the kernel's traffic control is told so that a node's interface and its links have rates.

Pure text for `tc -batch`. Every node's own interface carries an htb qdisc: class 1:1 is the
interface's rate, below it one class per other node (its ceiling is the pair's rate) and one for the
rest. What arrives is limited a second time at the switch's port of the node, so that several
senders together cannot exceed the receiver's interface. Only htb and u32 are used: kernels of small
machines often lack netem, flower and iptables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

UNLIMITED = 12_500_000_000
"""Bytes per second (100 Gbit/s) that stand for "no limit" in a class: more than a veth carries."""

REST = 2
_FIRST_PEER = 10
_QUANTUM = 60_000


def burst(rate: float) -> int:
    """Bytes that may pass at once after a pause.

    A shaper that sleeps too long catches up from its burst: 128 KiB at 100 Mbit/s and 1 MB at
    1 Gbit/s, 8 to 10 ms, were needed to reach 0.93 of the rate with a second program on the cores.
    """
    return round(max(rate * 0.0084, min(131_072, rate * 0.0105), 16_384))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The limits of one node's sending side.

    Attributes:
        interface: Name of the interface inside of the node.
        rate: Bytes per second of the interface; None: no limit.
        peers: Address of every other node -> bytes per second to it; None: no own limit.
    """

    interface: str
    rate: float | None
    peers: Mapping[str, float | None]

    def class_of(self, address: str) -> str:
        """The id of the class through which everything to a peer goes."""
        return f"1:{_FIRST_PEER + list(self.peers).index(address):x}"

    @staticmethod
    def sent(text: str) -> dict[str, int]:
        """Bytes by class, from what `tc -s class show` says."""
        found = re.findall(r"^class \S+ (\S+) .*\n Sent (\d+) bytes", text, flags=re.MULTILINE)
        return {number: int(count) for number, count in found}

    def commands(self) -> Iterator[str]:
        """For `tc -batch` on an interface without a qdisc."""
        total, device = self.rate or UNLIMITED, self.interface
        yield f"qdisc add dev {device} root handle 1: htb default {REST}"
        yield f"class add dev {device} parent 1: classid 1:1 {_limits(total, total)}"
        yield self._class("add", f"1:{REST}", self._share, total)
        for address, rate in self.peers.items():
            number = self.class_of(address)
            yield self._class("add", number, *self._both(rate))
            yield (
                f"filter add dev {device} parent 1: protocol ip prio 1 u32 "
                f"match ip dst {address}/32 flowid {number}"
            )

    def limit(self, address: str, rate: float | None) -> Iterator[str]:
        """From now on this rate to a peer; also ends a cut."""
        number = self.class_of(address)
        yield self._class("change", number, *self._both(rate))
        yield f"qdisc replace dev {self.interface} parent {number} pfifo limit 1000"

    def cut(self, address: str) -> Iterator[str]:
        """From now on everything to a peer vanishes without an error, as on a pulled cable."""
        yield f"qdisc replace dev {self.interface} parent {self.class_of(address)} blackhole"

    @property
    def _share(self) -> float:
        """What a class has for itself before it borrows: all shares together are the interface."""
        return (self.rate or UNLIMITED) / (len(self.peers) + 1)

    def _both(self, rate: float | None) -> tuple[float, float]:
        ceiling = min(rate or UNLIMITED, self.rate or UNLIMITED)
        return min(self._share, ceiling), ceiling

    def _class(self, verb: str, number: str, share: float, ceiling: float) -> str:
        limits = _limits(share, ceiling)
        return f"class {verb} dev {self.interface} parent 1:1 classid {number} {limits}"


def receiving(interface: str, rate: float) -> Iterator[str]:
    """The limit of a node's receiving side, at the switch's port of this node."""
    yield f"qdisc add dev {interface} root handle 1: htb default 1"
    yield f"class add dev {interface} parent 1: classid 1:1 {_limits(rate, rate)}"


def _limits(share: float, ceiling: float) -> str:
    """Without an explicit quantum the kernel warns of classes as fast as these."""
    size = burst(ceiling)
    return (
        f"htb rate {round(share)}bps ceil {round(ceiling)}bps burst {size} cburst {size} "
        f"quantum {_QUANTUM}"
    )
