"""The process grid of split layers, and differentiable collectives over its axes.

One process group per axis; every element received is counted. Sums on CPUs are an all-to-all
and a sum in the order of ranks: Gloo's own reduce-scatter is an all-reduce, which moves twice
as much. A dry grid moves nothing and returns tensors of the right shapes; inferring how a model
can be split runs on it.

A gradient is cut as its value is, and where the value is whole on several ranks, its gradient
is whole and equal there. So a use of a whole value by ranks that compute different things sums
in backward (`copy_to_ranks`), and a sum over ranks passes its gradient through
(`reduce_from_ranks`): the conjugate pair f and g of Shoeybi et al. 2019 (Megatron), section 3,
and their relatives.

`WeightPrefetch` gathers the weight of the next layer while this one computes. The next layer is
the one that came next in the previous pass; a gathered weight is used only if it has not
changed since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.channel.gloo_listeners import drop_later_connections
from headway.collective.collective_calls import CallKind, CallListener, ignore_call
from headway.errors import UsageError
from headway.plans.tensor_layout import TensorGrid

# Since torch 2.13 the names that 2.11 has are deprecated.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A result on its way.

    Attributes:
        work: What is waited for; None: it is there.
    """

    work: dist.Work | None
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.finish()


def completed(result: Tensor) -> PendingCollective:
    """What is there already, as a result on its way."""
    return PendingCollective(None, lambda: result)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProcessGrid:
    """This rank's place among those that split layers.

    Attributes:
        mesh: The same ranks as torch's mesh, its dims named and ordered as the plan's axes; None
            for a dry grid.
        received: Elements by (operation, axis).
        tell: Told what a dry grid would start: kind, ranks, bytes as of a `collective.calls.Call`.
    """

    plan: TensorGrid
    mesh: DeviceMesh | None
    place: dict[str, int]
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    tell: CallListener = ignore_call

    @staticmethod
    def of(plan: TensorGrid, mesh: DeviceMesh | None = None, *, device: str = "cpu") -> ProcessGrid:
        """The grid of a plan.

        Args:
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
            with drop_later_connections():
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
        return ProcessGrid(
            plan=plan, mesh=mesh, place=dict(zip(plan.axes, place, strict=True)), groups=groups
        )

    @staticmethod
    def dry(plan: TensorGrid, tell: CallListener = ignore_call) -> ProcessGrid:
        """One that moves nothing, seen from its first rank; all of them start the same."""
        return ProcessGrid(plan=plan, mesh=None, place=dict.fromkeys(plan.axes, 0), tell=tell)

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

    def gather(self, x: Tensor, axis: str, dim: int = 0) -> PendingCollective:
        """All parts, one behind the other along a dimension."""
        size = self.size(axis)
        if size == 1:
            return completed(x)
        self.received["gather", axis] += (size - 1) * x.numel()
        if self.mesh is None:
            self.tell("all_gather", size, x.nbytes * size)
            return completed(torch.cat([x] * size, dim))
        x = x.contiguous()
        out = x.new_empty((size, *x.shape))
        work = _ALL_GATHER(
            out.view(-1, *x.shape[1:]) if x.ndim else out, x, group=self.groups[axis], async_op=True
        )
        return PendingCollective(work, lambda: _concatenated(out, dim))

    def scatter_sum(self, x: Tensor, axis: str, dim: int = 0) -> PendingCollective:
        """Sum over the ranks, of which each gets its part along a dimension."""
        size = self.size(axis)
        if size == 1:
            return completed(x)
        self.received["reduce-scatter", axis] += (size - 1) * (x.numel() // size)
        if self.mesh is None:
            kind: CallKind = "all_to_all" if x.device.type == "cpu" else "reduce_scatter"
            self.tell(kind, size, x.nbytes)
            return completed(x.chunk(size, dim)[0].clone())
        sent = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
        if x.device.type != "cpu":
            out = torch.empty_like(sent[0])
            work = _REDUCE_SCATTER(out, sent.flatten(0, 1), group=self.groups[axis], async_op=True)
            return PendingCollective(work, lambda: out)
        # Gloo's own reduce-scatter is an all-reduce, which moves twice as much.
        parts = torch.empty_like(sent)
        work = dist.all_to_all_single(parts, sent, group=self.groups[axis], async_op=True)
        return PendingCollective(work, lambda: _summed(parts, sent))

    def all_reduce(self, x: Tensor, axis: str, *, largest: bool = False) -> PendingCollective:
        """Sum (or maximum) over the ranks, in place."""
        size = self.size(axis)
        if size == 1:
            return completed(x)
        # Twice: as much as a reduce-scatter and an all-gather.
        self.received["all-reduce", axis] += 2 * (size - 1) * x.numel() // size
        if self.mesh is None:
            self.tell("all_reduce", size, x.nbytes)
            return completed(x)
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work = dist.all_reduce(x, operation, group=self.groups[axis], async_op=True)
        return PendingCollective(work, lambda: x)

    def all_reduce_over(self, x: Tensor, axes: Iterable[str], *, largest: bool = False) -> Tensor:
        """The same along several axes; x is dense and may be overwritten."""
        for axis in axes:
            x = self.all_reduce(x, axis, largest=largest).wait()
        return x

    def broadcast(self, x: Tensor, axis: str, source: int) -> PendingCollective:
        """One rank's tensor on all of them; the others' have its shape and type."""
        if self.place[axis] == source:
            buffer = x.contiguous()
        else:
            self.received["broadcast", axis] += x.numel()
            buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
        if self.size(axis) == 1 or self.mesh is None:
            self.tell("broadcast", self.size(axis), buffer.nbytes)
            return completed(buffer)
        group = self.groups[axis]
        work = dist.broadcast(buffer, group=group, group_src=source, async_op=True)
        return PendingCollective(work, lambda: buffer)

    def reduce(self, x: Tensor, axis: str, target: int) -> PendingCollective:
        """Sum at one rank; what the others get is of no use. Overwrites x."""
        if self.place[axis] == target:
            self.received["reduce", axis] += (self.size(axis) - 1) * x.numel()
        if self.size(axis) == 1 or self.mesh is None:
            self.tell("reduce", self.size(axis), x.nbytes)
            return completed(x)
        group = self.groups[axis]
        work = dist.reduce(x, group_dst=target, group=group, async_op=True)
        return PendingCollective(work, lambda: x)


def _concatenated(parts: Tensor, dim: int) -> Tensor:
    """[ranks, ...] -> the parts one behind the other along a dimension of theirs."""
    return parts.flatten(0, 1) if dim == 0 else parts.movedim(0, dim).flatten(dim, dim + 1)


def _summed(parts: Tensor, _alive: Tensor) -> Tensor:
    """The second argument is what is being sent: it must live until now."""
    return parts[0].add_(parts[1]) if len(parts) == 2 else parts.sum(0)


# The weight of the next layer is gathered while this one computes.


class WeightPrefetch:
    """Gathers under way, of weights by name.

    Args:
        grid: The ranks; weights are gathered along i.
        local: Name -> this rank's part of the weight, as it is now.
    """

    def __init__(self, grid: ProcessGrid, local: Callable[[str], Tensor]) -> None:
        self._grid, self._local = grid, local
        self._coming: dict[str, tuple[int, PendingCollective]] = {}
        self._next: dict[tuple[str, bool], str] = {}
        self._last: dict[bool, str] = {}

    def begin(self) -> None:
        """A forward pass of the model begins: no layer comes before its first."""
        self._last.clear()

    def gather(self, name: str, weight: Tensor, *, backward: bool) -> PendingCollective:
        """The whole weight of a layer; the one that followed the last time is started as well."""
        version, found = self._coming.pop(name, (-1, None))
        # An optimiser's step or a checkpoint may have changed the weight since it was gathered.
        if found is None or version != weight._version:
            found = self._grid.gather(weight, "i")
        last = self._last.get(backward)
        if last is not None:
            self._next[last, backward] = name
        self._last[backward] = name
        following = self._next.get((name, backward))
        if following is not None and following not in self._coming:
            part = self._local(following)
            self._coming[following] = part._version, self._grid.gather(part, "i")
        return found


# What a gradient meets on its way back through an exchange; five pairs of forward and backward.


class _Exchange(torch.autograd.Function):
    """A linear exchange and its adjoint."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = back  # type: ignore[attr-defined]
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return ctx.back(gradients[0]), None, None


def _apply(
    x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return there(x)
    result: Tensor = _Exchange.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


def _dense(x: Tensor) -> Tensor:
    """A copy that may be overwritten."""
    # Collectives overwrite it, and autograd may have given one gradient to several.
    return x.clone(memory_format=torch.contiguous_format)


def copy_to_ranks(x: Tensor, grid: ProcessGrid, axes: str) -> Tensor:
    """A whole value, used differently along the axes: its gradients are summed."""
    axes = _real(grid, axes)
    if not axes:
        return x
    # view_as: a function may not return its input itself.
    return _apply(x, lambda t: t.view_as(t), lambda g: grid.all_reduce_over(_dense(g), axes))


def reduce_from_ranks(x: Tensor, grid: ProcessGrid, axes: str) -> Tensor:
    """The sum of partial values; its gradient is that of each part."""
    axes = _real(grid, axes)
    if not axes:
        return x
    return _apply(x, lambda t: grid.all_reduce_over(_dense(t), axes), lambda g: g)


def maximum_over_ranks(x: Tensor, grid: ProcessGrid, axes: str) -> Tensor:
    """The maximum over the ranks, without a gradient."""
    axes = _real(grid, axes)
    return grid.all_reduce_over(_dense(x.detach()), axes, largest=True) if axes else x.detach()


def reduce_scatter_to_ranks(x: Tensor, grid: ProcessGrid, axis: str, dim: int = 0) -> Tensor:
    """The sum of partial values, of which each rank keeps its part along a dimension."""
    if grid.size(axis) == 1:
        return x
    return _apply(
        x,
        lambda t: grid.scatter_sum(t, axis, dim).wait(),
        lambda g: grid.gather(g, axis, dim).wait(),
    )


def gather_for_partial_use(x: Tensor, grid: ProcessGrid, axis: str, dim: int = 0) -> Tensor:
    """All parts along a dimension, for a use that is different on each rank of the axis."""
    if grid.size(axis) == 1:
        return x
    return _apply(
        x,
        lambda t: grid.gather(t, axis, dim).wait(),
        lambda g: grid.scatter_sum(g, axis, dim).wait(),
    )


def gather_from_ranks(x: Tensor, grid: ProcessGrid, axes: str, dim: int, blocks: int = 1) -> Tensor:
    """All parts along a dimension; what follows is the same on all ranks."""
    if not _real(grid, axes):
        return x
    return _apply(
        x,
        lambda t: _gather(t, grid, axes, dim, blocks),
        lambda g: local_slice(g, grid, axes, dim, blocks),
    )


def scatter_to_ranks(x: Tensor, grid: ProcessGrid, axes: str, dim: int, blocks: int = 1) -> Tensor:
    """This rank's part of a whole value; its gradient is put together again."""
    if not _real(grid, axes):
        return x
    return _apply(
        x,
        lambda t: local_slice(t, grid, axes, dim, blocks),
        lambda g: _gather(g.contiguous(), grid, axes, dim, blocks),
    )


def local_slice(x: Tensor, grid: ProcessGrid, axes: str, dim: int, blocks: int = 1) -> Tensor:
    """This rank's part along a dimension.

    Blocks: of each of so many consecutive blocks its piece over the first axis, one behind the
    other; the other axes cut what this gives.
    """
    if blocks > 1:
        apart = x.unflatten(dim, (blocks, grid.size(axes[:1]), -1))
        x = apart.select(dim + 1, grid.index(axes[:1])).flatten(dim, dim + 1)
        axes = axes[1:]
    length = x.shape[dim] // grid.size(axes)
    found: Tensor = x.narrow(dim, grid.index(axes) * length, length)
    return found


def _gather(x: Tensor, grid: ProcessGrid, axes: str, dim: int, blocks: int) -> Tensor:
    # The minor axis first: its parts lie next to each other.
    for axis in reversed(axes):
        x = grid.gather(x, axis, dim).wait()
    if blocks == 1:
        return x
    # Gathered parts are ordered by rank, then block; the whole tensor by block, then rank.
    apart = x.unflatten(dim, (grid.size(axes[:1]), blocks, -1))
    found: Tensor = apart.transpose(dim, dim + 1).flatten(dim, dim + 2)
    return found


def _real(grid: ProcessGrid, axes: str) -> str:
    return "".join(axis for axis in axes if grid.size(axis) > 1)
