"""Emulated nodes for anybody: no namespaces; the exchange itself waits as long as a link would.

All ranks talk over the loopback, and what a rank sends to another node is held back until the
interface of its node would have sent it (`comm.pacing`). Emulated is the rate of each node's
interface, for the bytes of gradients; everything else passes at the speed of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.cluster import Cluster
from headway.run.place import LOOPBACK
from headway.units import format_rate


@dataclass(frozen=True, kw_only=True)
class Paced:
    """Nodes that share this machine's loopback; pickles.

    Attributes:
        cluster: What is emulated.
    """

    cluster: Cluster

    @property
    def interface(self) -> str:
        """For GLOO_SOCKET_IFNAME."""
        return "lo"

    @property
    def host(self) -> str:
        """Where the launcher's store is."""
        return LOOPBACK

    def enter(self, name: str) -> None:
        """Nodes have no place of their own here."""

    def pace(self, name: str, folder: Path) -> tuple[Path, float] | None:
        """File and rate of a node's interface, for `Place.pace`; None: no limit.

        Args:
            name: Of the node.
            folder: That all ranks of this launch share, and that is removed after it.
        """
        rate = self.rate(name)
        return None if rate is None else (folder / f"pace-{name}", rate)

    def rate(self, name: str) -> float | None:
        """Bytes per second of a node: of its slowest link, as only the node as a whole is paced."""
        others = (other for other in self.cluster.names if other != name)
        links = (self.cluster.link(name, other) for other in others)
        return min((link.rate for link in links if link is not None), default=None)

    def set_link(self, first: str, second: str, rate: float | None, folder: Path) -> None:
        """Change the rate of both nodes, for all that they send.

        Args:
            first: A node.
            second: Another one.
            rate: Bytes per second; None: as it was in the beginning.
            folder: As for `pace`.
        """
        from headway.comm.pacing import Pace  # here: `comm` imports torch

        for name in (first, second):
            found = self.pace(name, folder)
            if found is not None:
                with Pace.of(*found) as pace:
                    pace.set_rate(found[1] if rate is None else min(rate, found[1]))


def what_is_paced(cluster: Cluster) -> Iterator[str]:
    """What is emulated without root and what is not, one sentence each."""
    paced = Paced(cluster=cluster)
    rates = {name: paced.rate(name) for name in cluster.names}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    told = ", ".join(f"{name} {format_rate(rate)}" for name, rate in known.items()) or "none"
    yield (
        "without root the nodes are emulated inside of the exchange: gradients wait as long as the "
        f"interface of their node would take ({told}); store, checkpoints, heartbeats and "
        "everything that bypasses headway's exchange are not slowed down, no packet header is "
        "counted, and latency is not emulated"
    )
    if cluster.links or cluster.fabric == "mesh":
        yield (
            "the links of a node are emulated as one interface, at the rate of the slowest of them"
        )
