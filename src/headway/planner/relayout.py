"""What it costs to bring a tensor from one placement to another on one axis of a mesh.

| from \\ to | R | S | pending |
|---|---|---|---|
| R | - | slice, free | all but one part put zeros, free |
| S | all-gather | all-to-all | free |
| pending | all-reduce | reduce-scatter | - |

Invariant: no re-layout sends less than this table says, and equal placements cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.cost.network import Network


class Collective(NamedTuple):
    """One operation on the whole axis: its kind, and the bytes of the buffer it works on."""

    kind: str
    bytes: float


class Relayout:
    """Prices for an axis of neighbouring ranks; each (kind, bytes) is computed once."""

    def __init__(self, network: Network, size: int) -> None:
        self.network = network
        self.size = size
        self._known: dict[Collective, float] = {}

    def needed(self, source: str, target: str, num_bytes: float) -> Collective | None:
        """The collective between two placements of a tensor of so many bytes; None: it is free."""
        if source == target or source == "R" or self.size == 1:
            return None
        if source.startswith("P"):
            if target.startswith("P") and target != source:
                return Collective("all_reduce", num_bytes)
            kind = "reduce_scatter" if target.startswith("S") else "all_reduce"
            return Collective(kind, num_bytes)
        if target == "R":
            return Collective("all_gather", num_bytes)
        return Collective("all_to_all", num_bytes / self.size) if target[0] == "S" else None

    def seconds(self, source: str, target: str, num_bytes: float) -> float:
        """Of one re-layout."""
        found = self.needed(source, target, num_bytes)
        if found is None:
            return 0.0
        if found not in self._known:
            price = getattr(self.network, found.kind)
            self._known[found] = float(price(found.bytes, self.size))
        return self._known[found]


def wanted(placement: str) -> str:
    """How the maker of a tensor wants its gradient: as the tensor lies, whole for a pending one."""
    return "R" if placement.startswith("P") else placement
