"""Parameters of split layers: DTensor placements, and modules that hand out their parts.

Parameters are held as DTensors on the grid's mesh. A part that the grid cuts can be cut once
more, by rows, over ranks that hold the same part (ZeRO on split layers): the mesh then has
dimensions behind the grid's, and its order is the order of cutting, so that torch's placements
say what lies where. A layer in blocks (queries, keys and values as one) is held in another
order of rows than that of the unsplit model; `logical` and `held` convert.

Each module's class is replaced by a derived one that answers `self.weight` with what the rules
work on, a split tensor or a whole one. `parameters()` and `state_dict()` see the parameters as
they are held. The model itself also cuts its inputs by samples where the grid wants it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from headway.parallel.fsdp import full_tensor_of, part_as_dtensor
from headway.parallel.split_tensor import WHOLE_DIMENSION, DimensionCut, SplitTensor
from headway.parallel.tensor.grid import (
    ProcessGrid,
    gather_from_ranks,
    local_slice,
    scatter_to_ranks,
)
from headway.parallel.tensor.layer_context import LayerContext
from headway.plans.tensor_layout import AxisDivisor, check_divisibility

DimensionCuts = tuple[DimensionCut, ...]


@dataclass(frozen=True, eq=False)
class ParameterPlacement:
    """How parameters lie.

    Attributes:
        mesh: The grid's axes that have more than one rank (all, where none has), then others. None:
            of a dry grid, on which nothing is held.
        inner: For each of the others, how a grid's part lies on it: in rows, or as copies.
    """

    grid: ProcessGrid
    mesh: DeviceMesh | None
    inner: tuple[Placement, ...] = ()

    @staticmethod
    def of(grid: ProcessGrid) -> ParameterPlacement:
        """On the grid alone."""
        return ParameterPlacement(grid, None if grid.mesh is None else grid.held_on)

    def wrapped(self, local: Tensor, shape: torch.Size, cuts: DimensionCuts) -> Tensor:
        """This rank's memory as a part of the whole; nothing is copied.

        Args:
            cuts: One for each dimension, or none.
        """
        return self._made(local, shape, self._outer(cuts) + self._inner(shape))

    def held(self, tensor: Tensor, cuts: DimensionCuts) -> Tensor:
        """The inverse of `logical`; a plain whole tensor is cut, without a message."""
        if isinstance(tensor, DTensor):
            if cuts == _unblocked(cuts):
                return tensor
            tensor = full_tensor_of(tensor)
        return self._cut(tensor, tensor.shape, cuts)

    def logical(self, tensor: Tensor, cuts: DimensionCuts) -> Tensor:
        """In the order of the unsplit model; collective for layers in blocks."""
        if cuts == _unblocked(cuts) or not isinstance(tensor, DTensor):
            return tensor
        inner: list[Placement] = [Replicate() for _ in self.inner]
        here = tensor.redistribute(placements=self._outer(cuts) + inner)
        local = here.to_local().detach()
        for dim, cut in enumerate(cuts):
            local = gather_from_ranks(local, self.grid, cut.axes, dim, cut.blocks)
        return self._cut(local, tensor.shape, _unblocked(cuts))

    def _cut(self, full: Tensor, shape: torch.Size, cuts: DimensionCuts) -> Tensor:
        local = cut_to_grid(self.grid, full, cuts)
        copies: list[Placement] = [Replicate() for _ in self.inner]
        found = self._made(local, shape, self._outer(cuts) + copies)
        if not self.inner:
            return found
        assert isinstance(found, DTensor)
        return found.redistribute(placements=self._outer(cuts) + self._inner(shape))

    def _made(self, local: Tensor, shape: torch.Size, placements: list[Placement]) -> Tensor:
        assert self.mesh is not None
        return part_as_dtensor(local, self.mesh, placements, shape)

    def _outer(self, cuts: DimensionCuts) -> list[Placement]:
        # The axes that `ProcessGrid.held_on` has, in its order.
        axes = [a for a in self.grid.plan.axes if a in self.grid.groups] or self.grid.plan.axes
        found: list[Placement] = []
        for axis in axes:
            dims = [dim for dim, cut in enumerate(cuts) if axis in cut.axes]
            found.append(Shard(dims[0]) if dims else Replicate())
        return found

    def _inner(self, shape: torch.Size) -> list[Placement]:
        # A tensor without dimensions has no rows to deal out.
        return list(self.inner) if shape else [Replicate() for _ in self.inner]


def cut_to_grid(grid: ProcessGrid, whole: Tensor, cuts: DimensionCuts) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own."""
    for dim, cut in enumerate(cuts):
        if cut.axes:
            whole = local_slice(whole, grid, cut.axes, dim, cut.blocks)
    return whole.clone(memory_format=torch.contiguous_format)


def _unblocked(cuts: DimensionCuts) -> DimensionCuts:
    return tuple(DimensionCut(cut.axes) for cut in cuts)


# A model whose modules hand out their parameters as parts; its code, names and structure stay.


class SplitParameterModule:
    """Before a module's own class: parameters on demand."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(value, nn.Parameter):
            # Past this method itself, which an attribute that is not found would call again.
            keys, context = self.__dict__["_headway_split"]
            return context.parameter(value, keys.get(name))
        return value


class SplitInputModule(SplitParameterModule):
    """The model itself: its inputs are cut by samples."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context: LayerContext = self.__dict__["_headway_split"][1]
        args, kwargs = cut_inputs_by_samples(context, args, kwargs)
        if context.ahead is not None:
            context.ahead.begin()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def install_parameter_access(
    model: nn.Module,
    context: Any,
    keys: Mapping[str, Any] | None = None,
    *,
    root: type[SplitParameterModule] | None = SplitInputModule,
) -> None:
    """Replace the classes of the model's modules, but for those where that has been done.

    Args:
        model: Changed in place; its own class is replaced as well.
        context: Answers for parameters: `context.parameter(parameter, key)`.
        keys: Logical name of a parameter -> what the context wants to know.
        root: Of the model itself, whose inputs are cut; None: it only uses modules of the model's.
    """
    classes: dict[type, type] = {}
    for prefix, module in model.named_modules():
        if "_headway_split" in module.__dict__:
            continue
        own = {
            name: (keys or {}).get(f"{prefix}.{name}".lstrip("."))
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        module.__dict__["_headway_split"] = own, context
        kind = type(module)
        base: type = root if module is model and root else SplitParameterModule
        # A submodule of the same class must not get the class that cuts inputs.
        if module is model or kind not in classes:
            made = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
            if module is not model:
                classes[kind] = made
            module.__class__ = made
        else:
            module.__class__ = classes[kind]


def cut_inputs_by_samples(
    context: LayerContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model with every tensor cut by samples, along dimension 0.

    Those are samples along which the first tensor's dimension 0 runs; a tensor with another size
    there is left whole.

    Raises:
        PlanError: The number of samples is not divisible.
    """
    grid = context.grid
    axes = "".join(axis for axis in grid.plan.resident.rows if grid.size(axis) > 1)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim]
    if not axes or not tensors:
        return args, kwargs
    samples = tensors[0].shape[0]
    check_divisibility(grid.plan, [AxisDivisor(axes, samples, "samples of a micro-batch")])

    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim or x.shape[0] != samples:
            return x
        cuts = (DimensionCut(axes), *(WHOLE_DIMENSION,) * (x.ndim - 1))
        return SplitTensor(scatter_to_ranks(x, grid, axes, 0), x.shape, cuts, context)

    return tuple(map(cut, args)), {key: cut(x) for key, x in kwargs.items()}
