"""Storages that are alive, by category, and the moment at which they were most.

Invariant: a storage is counted from `add` until every holder has dropped it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Category = Literal[
    "parameters", "buffers", "batch", "gradients", "optimiser", "activations", "temporaries"
]


@dataclass(frozen=True)
class Moment:
    """Attributes:
    at: What runs: "backward of linear_3".
    bytes: By category.
    place: The number of the operator; -1: none.
    """

    at: str
    bytes: Mapping[Category, int]
    place: int = -1

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Peak:
    """Attributes:
    moment: The fullest one.
    curve: All of them, in order.
    """

    moment: Moment
    curve: tuple[Moment, ...]

    @property
    def bytes(self) -> int:
        return self.moment.total


@dataclass
class Ledger:
    """The storages.

    Attributes:
        place: The operator that runs, for the moments that are noted.
    """

    place: int = -1
    _sizes: dict[str, tuple[int, Category]] = field(default_factory=dict)
    _holders: dict[str, int] = field(default_factory=dict)
    _now: dict[Category, int] = field(default_factory=dict)
    _curve: list[Moment] = field(default_factory=list)

    def add(self, key: str, size: int, category: Category) -> None:
        """A storage with one holder."""
        self._sizes[key] = size, category
        self._holders[key] = 1
        self._now[category] = self._now.get(category, 0) + size

    def hold(self, key: str) -> None:
        """One holder more, of a storage that is counted."""
        if key in self._holders:
            self._holders[key] += 1

    def drop(self, key: str) -> None:
        """One holder less."""
        if key not in self._holders:
            return
        self._holders[key] -= 1
        if not self._holders[key]:
            size, category = self._sizes.pop(key)
            del self._holders[key]
            self._now[category] -= size

    def waits(self, key: str) -> None:
        """A gradient of a parameter for which another one will come."""
        size, category = self._sizes[key]
        self._sizes[key] = size, "gradients"
        self._now[category] -= size
        self._now["gradients"] = self._now.get("gradients", 0) + size

    def becomes_gradient(self, key: str, parameter: str, size: int) -> None:
        """A gradient arrives at its parameter: it is taken over, copied or added."""
        target = f"gradient of {parameter}"
        if target in self._holders:
            self.note(f"gradient of {parameter} is added")
        elif self._holders[key] == 1 and self._sizes[key][0] == size:
            self.drop(key)
            self.add(target, size, "gradients")
            return
        else:
            self.add(target, size, "gradients")
            self.note(f"gradient of {parameter} is copied")
        self.drop(key)

    def note(self, at: str, more: int = 0) -> None:
        """A moment at which `more` temporary bytes are there, too."""
        bytes_ = {category: size for category, size in self._now.items() if size}
        if more:
            bytes_["temporaries"] = bytes_.get("temporaries", 0) + more
        self._curve.append(Moment(at, bytes_, self.place))

    def peak(self) -> Peak:
        empty = Moment("", {})
        return Peak(max(self._curve, key=lambda m: m.total, default=empty), tuple(self._curve))
