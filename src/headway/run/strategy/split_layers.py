"""Layers that are split over ranks which share their samples (tensor parallelism).

The modules hold their parts as plain parameters, so that reducers treat them as those of a smaller
model. The optimiser has DTensors over the same memory, which know the whole that they are parts of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from headway.parallel.fsdp import full_tensor_of, rebind_optimizer_parameters
from headway.parallel.split_layers.parameters import ParameterPlacement, cut_inputs_by_samples
from headway.parallel.split_layers.split_inference import SplitDecisions, infer_split
from headway.parallel.split_layers.split_model import SplitModel, apply_split_decisions
from headway.parallel.tensor.grid import ProcessGrid
from headway.parallel.tensor.layer_context import SplitSettings
from headway.plans import Plan
from headway.plans.layer_split import TENSOR
from headway.plans.tensor_layout import TensorGrid
from headway.run.distributed.device_mesh import grid_axes, refined_mesh
from headway.run.strategy.growing_tables import GrowingTables

if TYPE_CHECKING:
    from headway.run.distributed.world import World


def infer_plan_split(
    plan: Plan, model: nn.Module, loss: Callable[[Any, Any], Any], data: Any
) -> SplitDecisions:
    """Decide how a plan splits a model, without changing it.

    Raises:
        PlanError: It cannot be split.
    """
    said, grid = plan.split, plan.split.grid
    assert grid is not None
    return infer_split(model, loss, data, grid, whole=said.whole, only=said.only, by=said.others)


class SplitLayers:
    """The split layers of this rank.

    Args:
        meshes: For each grid of the plan all ranks; the grid's axes come first.

    Attributes:
        growing: None: tables that grow cannot be trained by such a plan.
        split: None before `apply`.
        leaves: Logical name -> what the modules hold.
        named: Logical name -> the same memory, as the optimiser has it.
    """

    def __init__(self, plan: Plan, meshes: Mapping[TensorGrid, DeviceMesh]) -> None:
        assert plan.split.grid is not None
        self.growing: GrowingTables | None = None
        self.meshes = meshes
        self.grids = {
            one: ProcessGrid.of(one, mesh[tuple(grid_axes(one))]) for one, mesh in meshes.items()
        }
        self.grid = self.grids[plan.split.grid]
        self.split: SplitModel | None = None
        self.leaves: Mapping[str, nn.Parameter] = {}
        self.named: Mapping[str, nn.Parameter] = {}
        self._wrapped: dict[str, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, plan: Plan, world: World) -> SplitLayers:
        """The groups that a plan's split needs; collective."""
        # Each grid once, in the same order on all ranks, because making a mesh is collective.
        grids = dict.fromkeys((plan.split.grid, *(other for _, other in plan.split.others)))
        with world.explained("making the groups that split layers"):
            return cls(
                plan,
                {
                    one: refined_mesh(plan, world.device, TENSOR, grid_axes(one), first=True)
                    for one in grids
                    if one is not None
                },
            )

    def apply(
        self,
        model: nn.Module,
        decisions: SplitDecisions,
        *,
        ahead: bool,
        placement: Callable[[ProcessGrid], ParameterPlacement] = ParameterPlacement.of,
        away: Collection[str] = (),
    ) -> list[str]:
        """Split what this rank holds, in place; returns remarks.

        Args:
            ahead: Gather weights before they are needed.
        """
        placements = {plan: placement(grid) for plan, grid in self.grids.items()}
        self.split = apply_split_decisions(
            model,
            self.grid,
            decisions,
            settings=SplitSettings(ahead=ahead),
            home=placements[self.grid.plan],
            away=away,
            grids=self.grids,
        )
        for name, key in self.split.keys.items():
            self.split.homes[name] = placements[key.grid.plan]
        return [f"not split: {name} ({why})" for name, why in decisions.left.items()]

    def rebind(self, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        """Replace the optimiser's whole parameters by this rank's parts.

        Args:
            names: What it has -> logical name.
        """
        assert self.split is not None
        self.leaves = dict(self.split.model.named_parameters())
        self.named = {name: self._part(name, leaf) for name, leaf in self.leaves.items()}
        rebind_optimizer_parameters(optimizer, names, self.named, self.held)

    def _part(self, name: str, leaf: nn.Parameter) -> nn.Parameter:
        assert self.split is not None
        if name in self.split.away:
            # What is away has no memory that a DTensor could lie over.
            return leaf
        return nn.Parameter(self.split.wrapped(name, leaf), leaf.requires_grad)

    def follow(self) -> None:
        """Freeze or thaw the optimiser's DTensors as the user has done with the modules'."""
        for name, leaf in self.leaves.items():
            self.named[name].requires_grad_(leaf.requires_grad)

    def clear(self) -> None:
        for name, leaf in self.leaves.items():
            self.named[name].grad = leaf.grad = None

    def collect(self, trained: Mapping[str, nn.Parameter], *, reuse: bool) -> None:
        """Give the optimiser's parameters the gradients of the modules'.

        Args:
            reuse: Gradients have the same memory in each step (buckets), so that the DTensors over
                it can be kept. Else keeping them would keep the memory.
        """
        assert self.split is not None
        for name, parameter in trained.items():
            gradient = self.leaves[name].grad
            if gradient is None:
                parameter.grad = None
                continue
            # A DTensor over the same memory as in the last step need not be made again.
            known = self._wrapped.get(name)
            if known is None or known[0] is not gradient:
                known = gradient, self.split.wrapped(name, gradient)
            if reuse:
                self._wrapped[name] = known
            parameter.grad = known[1]

    def scale(self, factor: float) -> None:
        """Nothing: a reducer sums all of them."""

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in the order of the unsplit model; collective in the group."""
        return tensor if self.split is None else self.split.logical(name, tensor)

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `logical`."""
        return tensor if self.split is None else self.split.held(name, tensor)

    def complete(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of it, on every rank; collective."""
        return full_tensor_of(self.logical(name, tensor))

    def saved(self, name: str, tensor: Tensor) -> Tensor:
        """`state_dict` is that of the unsplit model already."""
        return tensor

    def target(self, name: str, tensor: Tensor) -> Tensor:
        """Itself, which `state_dict` has given as a DTensor."""
        return tensor

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """None: a DTensor makes its own."""
        return None


def with_split_inputs(model: Any, split: SplitModel | None) -> Any:
    """The object that a loss calls in place of a split model: it cuts inputs by samples."""
    return model if split is None else _SplitInputsModel(model, split.context)


class _SplitInputsModel:
    def __init__(self, model: Any, context: Any) -> None:
        self._model = model
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cut_inputs_by_samples(self._context, args, kwargs)
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
