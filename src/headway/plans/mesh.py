"""The grid of ranks: named axes, row-major, the last axis varies fastest."""

from __future__ import annotations

import math

from headway.documents import document


@document
class Axis:
    """One direction of the grid; `name` is a word such as "data", "pipe" or "tensor"."""

    name: str
    size: int


@document
class Mesh:
    """All ranks as a grid of named axes.

    Rank r has the coordinate (c_0, ..., c_k) with r = ((c_0 * n_1 + c_1) * n_2 + c_2) ...
    """

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def degree(self, name: str) -> int:
        """The size of the axis `name`; 1 where the mesh has no such axis."""
        return next((axis.size for axis in self.axes if axis.name == name), 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of `rank` on each axis.

        Raises:
            ValueError: The mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on a mesh of {self.size} ranks")
        place: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, place[axis.name] = divmod(rank, axis.size)
        return {name: place[name] for name in self.names}

    def peers(self, rank: int, name: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along the axis `name`, in order along it."""
        mine = self.coordinate(rank)
        others = [axis for axis in self.names if axis != name]
        return tuple(
            peer
            for peer in range(self.size)
            if all(self.coordinate(peer)[axis] == mine[axis] for axis in others)
        )
