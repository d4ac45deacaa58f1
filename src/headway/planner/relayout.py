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

import numpy as np
from numpy.typing import NDArray

from headway.cost.network import Network

Sides = tuple[tuple[str, str], ...]
"""A placement of a tensor and one of its gradient for each choice."""


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
        self._pairs: dict[tuple[Sides, Sides], tuple[tuple[str, ...], np.ndarray]] = {}

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

    def table(self, sources: Sides, targets: Sides, size: float) -> NDArray[np.float64]:
        """(sources, targets, 2): seconds of both passes.

        Args:
            sources: How each choice of the maker lays the tensor, and wants its gradient.
            targets: How each choice of the user needs the tensor, and gives its gradient.
            size: Bytes of the tensor.
        """
        key = sources, targets
        if key not in self._pairs:
            self._pairs[key] = self._kinds(sources, targets)
        kinds, numbers = self._pairs[key]
        prices = np.array([0.0, *(self._price(kind, size) for kind in kinds)])
        return prices.take(numbers)

    def _kinds(self, sources: Sides, targets: Sides) -> tuple[tuple[str, ...], np.ndarray]:
        """Collectives of pairs, and for each pair the number of its own, from 1; 0: it is free."""
        kinds: dict[str, int] = {}
        numbers = np.zeros((len(sources), len(targets), 2), dtype=np.int64)
        for one, (lies, wants) in enumerate(sources):
            for two, (needs, gives) in enumerate(targets):
                for part, pair in enumerate(((lies, needs), (gives, wants))):
                    found = self.needed(*pair, 1.0)
                    if found is not None:
                        numbers[one, two, part] = kinds.setdefault(found.kind, len(kinds) + 1)
        return tuple(kinds), numbers

    def _price(self, kind: str, size: float) -> float:
        """Of a collective on a tensor of so many bytes."""
        found = Collective(kind, size / self.size if kind == "all_to_all" else size)
        if found not in self._known:
            price = getattr(self.network, kind)
            self._known[found] = float(price(found.bytes, self.size))
        return self._known[found]

    def seconds(self, source: str, target: str, num_bytes: float) -> float:
        """Of one re-layout."""
        found = self.needed(source, target, num_bytes)
        return 0.0 if found is None else self._price(found.kind, num_bytes)


def wanted(placement: str) -> str:
    """How the maker of a tensor wants its gradient: as the tensor lies, whole for a pending one."""
    return "R" if placement.startswith("P") else placement
