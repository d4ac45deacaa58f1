"""The ranks that split layers, and what they say to each other; every element received is counted.

One process group for each axis of the grid. Sums on CPUs are all-to-all and a sum in the order of
ranks: Gloo's own reduce-scatter is an all-reduce, which moves twice as much. A dry grid moves
nothing and returns tensors of the right shapes: the survey of a model runs on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.collective.calls import Kind, Tell, untold
from headway.errors import UsageError
from headway.plan.tensor_layout import TensorGrid

# Since torch 2.13 the names that 2.11 has are deprecated.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True)
class Pending:
    """A result on its way.

    Attributes:
        work: What is waited for; None: it is there.
        finish: Makes the result.
    """

    work: dist.Work | None
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.finish()


def _done(result: Tensor) -> Pending:
    return Pending(None, lambda: result)


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid:
    """This rank's place among those that split layers.

    Attributes:
        plan: Form and sizes.
        mesh: The same ranks as torch's mesh, its dims named and ordered as the plan's axes; None
            for a dry grid.
        place: Coordinate along each axis.
        groups: Process group of each axis.
        received: Elements by (operation, axis).
        tell: Told what a dry grid would start: kind, ranks, bytes as of a `collective.calls.Call`.
    """

    plan: TensorGrid
    mesh: DeviceMesh | None
    place: dict[str, int]
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    tell: Tell = untold

    @staticmethod
    def of(plan: TensorGrid, mesh: DeviceMesh | None = None, *, device: str = "cpu") -> Grid:
        """The grid of a plan.

        Args:
            plan: Form and sizes.
            mesh: Part of a larger mesh with one dim for each axis of the plan, in its order; None:
                all ranks of the world.
            device: Type of the devices, without a mesh.

        Raises:
            UsageError: The mesh has other sizes.
        """
        sizes = tuple(size for _, size in plan.sizes)
        if mesh is None:
            if dist.get_world_size() != plan.ranks:
                raise UsageError(
                    f"a tensor grid of {plan.ranks} ranks does not fit {dist.get_world_size()}",
                    fix="Give the part of your device mesh that splits layers.",
                )
            names = tuple(f"tensor_{axis}" for axis in plan.axes)
            mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
        if tuple(mesh.shape) != sizes:
            raise UsageError(
                f"a mesh of {tuple(mesh.shape)} is no tensor grid of {sizes}",
                why=f"Its dims are the axes {', '.join(plan.axes)}, in this order.",
                fix="Name one dim of the mesh for each axis, those of size 1 as well.",
            )
        place = mesh.get_coordinate()
        assert place is not None
        groups = {
            axis: mesh.get_group(number)
            for number, (axis, size) in enumerate(plan.sizes)
            if size > 1
        }
        return Grid(
            plan=plan, mesh=mesh, place=dict(zip(plan.axes, place, strict=True)), groups=groups
        )

    @staticmethod
    def dry(plan: TensorGrid, tell: Tell = untold) -> Grid:
        """One that moves nothing, seen from its first rank; all of them start the same."""
        return Grid(plan=plan, mesh=None, place=dict.fromkeys(plan.axes, 0), tell=tell)

    @property
    def held_on(self) -> DeviceMesh:
        """The mesh of parameters, without axes of one rank: DTensor's planning grows with dims."""
        assert self.mesh is not None
        names = self.mesh.mesh_dim_names or ()
        real = tuple(n for n, size in zip(names, self.mesh.shape, strict=False) if size > 1)
        return self.mesh[real] if real and real != names else self.mesh

    def size(self, axes: Iterable[str]) -> int:
        return self.plan.size(axes)

    def index(self, axes: Iterable[str]) -> int:
        """This rank's number among the parts that the axes make, the major axis first."""
        number = 0
        for axis in axes:
            number = number * self.size(axis) + self.place[axis]
        return number

    @property
    def count(self) -> int:
        """Elements received by this rank so far."""
        return sum(self.received.values())

    def _note(self, operation: str, axis: str, elements: int) -> None:
        self.received[operation, axis] += elements

    # -- collectives along one axis ------------------------------------------------------------

    def gather(self, x: Tensor, axis: str, dim: int = 0) -> Pending:
        """All parts, one behind the other along a dimension."""
        size = self.size(axis)
        if size == 1:
            return _done(x)
        self._note("gather", axis, (size - 1) * x.numel())
        if self.mesh is None:
            self.tell("all_gather", size, x.nbytes * size)
            return _done(torch.cat([x] * size, dim))
        x = x.contiguous()
        out = x.new_empty((size, *x.shape))
        work = _ALL_GATHER(
            out.view(-1, *x.shape[1:]) if x.ndim else out, x, group=self.groups[axis], async_op=True
        )
        return Pending(work, lambda: _strung(out, dim))

    def scatter_sum(self, x: Tensor, axis: str, dim: int = 0) -> Pending:
        """Sum over the ranks, of which each gets its part along a dimension."""
        size = self.size(axis)
        if size == 1:
            return _done(x)
        self._note("reduce-scatter", axis, (size - 1) * (x.numel() // size))
        if self.mesh is None:
            kind: Kind = "all_to_all" if x.device.type == "cpu" else "reduce_scatter"
            self.tell(kind, size, x.nbytes)
            return _done(x.chunk(size, dim)[0].clone())
        sent = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
        if x.device.type != "cpu":
            out = torch.empty_like(sent[0])
            work = _REDUCE_SCATTER(out, sent.flatten(0, 1), group=self.groups[axis], async_op=True)
            return Pending(work, lambda: out)
        parts = torch.empty_like(sent)
        work = dist.all_to_all_single(parts, sent, group=self.groups[axis], async_op=True)
        return Pending(work, lambda: _summed(parts, sent))

    def all_reduce(self, x: Tensor, axis: str, *, largest: bool = False) -> Pending:
        """Sum (or maximum) over the ranks, in place."""
        size = self.size(axis)
        if size == 1:
            return _done(x)
        self._note("all-reduce", axis, 2 * (size - 1) * x.numel() // size)
        if self.mesh is None:
            self.tell("all_reduce", size, x.nbytes)
            return _done(x)
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work = dist.all_reduce(x, operation, group=self.groups[axis], async_op=True)
        return Pending(work, lambda: x)

    def all_reduce_over(self, x: Tensor, axes: Iterable[str], *, largest: bool = False) -> Tensor:
        """The same along several axes; x is dense and may be overwritten."""
        for axis in axes:
            x = self.all_reduce(x, axis, largest=largest).wait()
        return x

    def broadcast(self, x: Tensor | None, like: Tensor, axis: str, source: int) -> Pending:
        """One rank's tensor on all of them; `like` has its shape and type."""
        mine = self.place[axis] == source
        if not mine:
            self._note("broadcast", axis, like.numel())
        if mine:
            assert x is not None
            buffer = x.contiguous()
        else:
            buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
        if self.size(axis) == 1 or self.mesh is None:
            self.tell("broadcast", self.size(axis), buffer.nbytes)
            return _done(buffer)
        group = self.groups[axis]
        work = dist.broadcast(buffer, group=group, group_src=source, async_op=True)
        return Pending(work, lambda: buffer)

    def reduce(self, x: Tensor, axis: str, target: int) -> Pending:
        """Sum at one rank; what the others get is of no use. Overwrites x."""
        if self.place[axis] == target:
            self._note("reduce", axis, (self.size(axis) - 1) * x.numel())
        if self.size(axis) == 1 or self.mesh is None:
            self.tell("reduce", self.size(axis), x.nbytes)
            return _done(x)
        group = self.groups[axis]
        work = dist.reduce(x, group_dst=target, group=group, async_op=True)
        return Pending(work, lambda: x)


def _strung(parts: Tensor, dim: int) -> Tensor:
    """[ranks, ...] -> the parts one behind the other along a dimension of theirs."""
    return parts.flatten(0, 1) if dim == 0 else parts.movedim(0, dim).flatten(dim, dim + 1)


def _summed(parts: Tensor, _alive: Tensor) -> Tensor:
    """The second argument is what is being sent: it must live until now."""
    return parts[0].add_(parts[1]) if len(parts) == 2 else parts.sum(0)
