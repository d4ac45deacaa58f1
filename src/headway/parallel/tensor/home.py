"""Where the parts of parameters are held: as DTensors on the grid's mesh, and those of a data axis.

A part that the grid cuts can be cut once more, by rows, over ranks that hold the same part (ZeRO on
split layers): the mesh then has dims behind the grid's. Invariant: the order of mesh dims is the
order of cutting, so that torch's own placements say what lies where. A layer in blocks (queries,
keys and values as one) is held in another order of rows than it is named.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from headway.parallel.state_sharding import whole
from headway.parallel.tensor.exchange import gathered, part
from headway.parallel.tensor.grid import Grid
from headway.parallel.tensor.split_tensor import Cut

Cuts = tuple[Cut, ...]


@dataclass(frozen=True, eq=False)
class Home:
    """How parameters lie.

    Attributes:
        grid: The ranks that split layers.
        mesh: The grid's axes that have more than one rank (all, where none has), then others. None:
            of a dry grid, on which nothing is held.
        inner: For each of the others, how a grid's part lies on it: in rows, or as copies.
    """

    grid: Grid
    mesh: DeviceMesh | None
    inner: tuple[Placement, ...] = ()

    @staticmethod
    def of(grid: Grid) -> Home:
        """On the grid alone."""
        return Home(grid, None if grid.mesh is None else grid.held_on)

    def wrapped(self, local: Tensor, shape: torch.Size, cuts: Cuts) -> Tensor:
        """This rank's memory as a part of the whole; nothing is copied.

        Args:
            local: The part.
            shape: Of the whole.
            cuts: One for each dimension, or none.
        """
        return self._made(local, shape, self._outer(cuts) + self._inner(shape))

    def held(self, tensor: Tensor, cuts: Cuts) -> Tensor:
        """The inverse of `logical`; a plain whole tensor is cut, without a message."""
        if isinstance(tensor, DTensor):
            if cuts == _unblocked(cuts):
                return tensor
            tensor = whole(tensor)
        return self._cut(tensor, tensor.shape, cuts)

    def logical(self, tensor: Tensor, cuts: Cuts) -> Tensor:
        """In the order of the unsplit model; collective for layers in blocks."""
        if cuts == _unblocked(cuts) or not isinstance(tensor, DTensor):
            return tensor
        inner: list[Placement] = [Replicate() for _ in self.inner]
        here = tensor.redistribute(placements=self._outer(cuts) + inner)
        local = here.to_local().detach()
        for dim, cut in enumerate(cuts):
            local = gathered(local, self.grid, cut.axes, dim, cut.blocks)
        return self._cut(local, tensor.shape, _unblocked(cuts))

    def _cut(self, full: Tensor, shape: torch.Size, cuts: Cuts) -> Tensor:
        local = grid_part(self.grid, full, cuts)
        copies: list[Placement] = [Replicate() for _ in self.inner]
        found = self._made(local, shape, self._outer(cuts) + copies)
        if not self.inner:
            return found
        assert isinstance(found, DTensor)
        return found.redistribute(placements=self._outer(cuts) + self._inner(shape))

    def _made(self, local: Tensor, shape: torch.Size, placements: list[Placement]) -> Tensor:
        assert self.mesh is not None
        stride = torch.empty(shape, device="meta").stride()
        found: Tensor = DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return found

    def _outer(self, cuts: Cuts) -> list[Placement]:
        axes = [a for a in self.grid.plan.axes if a in self.grid.groups] or self.grid.plan.axes
        found: list[Placement] = []
        for axis in axes:
            dims = [dim for dim, cut in enumerate(cuts) if axis in cut.axes]
            found.append(Shard(dims[0]) if dims else Replicate())
        return found

    def _inner(self, shape: torch.Size) -> list[Placement]:
        return list(self.inner) if shape else [Replicate() for _ in self.inner]


def grid_part(grid: Grid, whole: Tensor, cuts: Cuts) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own."""
    for dim, cut in enumerate(cuts):
        if cut.axes:
            whole = part(whole, grid, cut.axes, dim, cut.blocks)
    return whole.clone(memory_format=torch.contiguous_format)


def _unblocked(cuts: Cuts) -> Cuts:
    return tuple(Cut(cut.axes) for cut in cuts)
