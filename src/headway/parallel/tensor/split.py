"""The user's model, split over a grid in place; its code, the names of its parameters and their
shapes stay.

    grid = Grid.of(TensorGrid.classic(2))
    parts = split(model, grid, loss, batch)
    loss(model, batch).backward()

Parameters become DTensors on the grid's mesh, so that clipping, optimisers and torch's distributed
checkpoints treat them as any others. Invariant: `state_dict()` is that of the unsplit model,
whatever the split; a layer in blocks (queries, keys and values as one) is held in another order of
rows, and put right there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from headway.errors import UsageError
from headway.parallel.tensor.ahead import Ahead
from headway.parallel.tensor.context import Context, Settings
from headway.parallel.tensor.exchange import gathered, part
from headway.parallel.tensor.grid import Grid
from headway.parallel.tensor.hold import hold
from headway.parallel.tensor.rules.named import table
from headway.parallel.tensor.split_tensor import Cut, SplitTensor, real_cut
from headway.parallel.tensor.survey import Cuts, Decisions, survey


@dataclass(frozen=True, slots=True)
class Key:
    """What the context knows of a parameter.

    Attributes:
        name: Logical.
        cuts: One for each dimension, axes with one rank left out; none: it is whole.
        origin: For the rules.
    """

    name: str
    cuts: Cuts
    origin: frozenset[str]


class Running(Context):
    """Hands out the parts of parameters."""

    def parameter(self, parameter: nn.Parameter, key: Key | None) -> Any:
        """What a module's code gets: a split tensor, or a plain whole one."""
        if not isinstance(parameter, DTensor):
            return parameter
        local: Tensor = parameter.to_local()
        if key is None or not key.cuts:
            return local
        return SplitTensor(local, parameter.shape, key.cuts, self, key.origin, parameter=True)

    def __deepcopy__(self, memo: Any) -> Running:
        return self


@dataclass(frozen=True, eq=False, kw_only=True)
class Split:
    """A model that is split.

    Attributes:
        model: The user's, changed in place.
        context: Grid and settings.
        decisions: What is split, and how.
    """

    model: nn.Module
    context: Running
    decisions: Decisions

    @property
    def grid(self) -> Grid:
        return self.context.grid

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, its gradient or a state of the optimiser, as a DTensor in logical order.

        It differs from what is held only for layers in blocks. All ranks of the grid take part.
        """
        return _logical(self.grid, tensor, self.decisions.cuts.get(name, ()))

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `logical`; a plain whole tensor is cut."""
        return _held(self.grid, tensor, self.decisions.cuts.get(name, ()))

    def explain(self) -> str:
        """What is split and what is not, a line each."""
        lines = []
        for name, cuts in self.decisions.cuts.items():
            said = ", ".join(
                f"dim {dim} over {' then '.join(cut.axes)}"
                + (f" in {cut.blocks} blocks" if cut.blocks > 1 else "")
                for dim, cut in enumerate(cuts)
                if cut.axes
            )
            why = self.decisions.left.get(name, "")
            lines.append(f"{name}: {said or 'whole'}" + (f" ({why})" if why else ""))
        return "\n".join(lines)


def split(
    model: nn.Module,
    grid: Grid,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    whole: Sequence[str] = (),
    settings: Settings | None = None,
) -> Split:
    """Split a model over a grid of ranks, in place.

    Args:
        model: The same on all ranks of the grid, parameters included; in training mode.
        grid: The ranks.
        loss: `loss(model, batch)`; the survey runs it without numbers.
        batch: A micro-batch, the same on all ranks of the grid.
        whole: Names of parameters or modules, or patterns, that are not split.
        settings: How layers are carried out.

    Raises:
        PlanError: See `survey.survey`.
    """
    return obey(model, grid, survey(model, loss, batch, grid.plan, whole=whole), settings=settings)


def obey(
    model: nn.Module, grid: Grid, decisions: Decisions, *, settings: Settings | None = None
) -> Split:
    """Split a model as a survey has decided.

    Raises:
        UsageError: The decisions are for another grid or another model.
    """
    names = {name for name, _ in model.named_parameters()}
    if decisions.plan != grid.plan or names != set(decisions.cuts):
        raise UsageError(
            "these decisions are for another grid or another model",
            why=f"{len(names ^ set(decisions.cuts))} parameters differ.",
            fix="Take the survey of this model on this grid.",
        )
    _distribute(model, grid, decisions.cuts)
    context = Running(grid, settings or Settings(), table(), decisions.companions)
    keys = {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        logical = first[id(parameter)]
        cuts = tuple(real_cut(cut, context) for cut in decisions.cuts[logical])
        real = cuts if any(cut.axes for cut in cuts) else ()
        keys[name] = Key(logical, real, frozenset({logical}))
    if context.settings.ahead and grid.plan.form == "cuboid" and grid.size("i") > 1:
        held = dict(model.named_parameters())
        context.ahead = Ahead(grid, lambda name: _local(held[name]))
    hold(model, context, keys)
    _hook(model, grid, keys)
    return Split(model=model, context=context, decisions=decisions)


def _local(parameter: Tensor) -> Tensor:
    held: Any = parameter.detach()
    found: Tensor = held.to_local()
    return found


# -- parameters -------------------------------------------------------------------------------


def _distribute(model: nn.Module, grid: Grid, cuts: Mapping[str, Cuts]) -> None:
    """Every parameter becomes a DTensor; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    logical = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                held = _held(grid, parameter.detach(), cuts[logical[id(parameter)]])
                made[id(parameter)] = nn.Parameter(held, parameter.requires_grad)
            module.register_parameter(key, made[id(parameter)])


def _placements(grid: Grid, cuts: Cuts) -> list[Placement]:
    found: list[Placement] = []
    mesh = grid.held_on
    axes = [
        axis for axis in grid.plan.axes if mesh.ndim == len(grid.plan.axes) or axis in grid.groups
    ]
    for axis in axes:
        dims = [dim for dim, cut in enumerate(cuts) if axis in cut.axes]
        found.append(Shard(dims[0]) if dims else Replicate())
    return found


def _part(grid: Grid, whole: Tensor, cuts: Cuts) -> Tensor:
    for dim, cut in enumerate(cuts):
        if cut.axes:
            whole = part(whole, grid, cut.axes, dim, cut.blocks)
    return whole.clone(memory_format=torch.contiguous_format)


def _dtensor(grid: Grid, local: Tensor, shape: torch.Size, cuts: Cuts) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    found: Tensor = DTensor.from_local(
        local, grid.held_on, _placements(grid, cuts), run_check=False, shape=shape, stride=stride
    )
    return found


def _unblocked(cuts: Cuts) -> Cuts:
    return tuple(Cut(cut.axes) for cut in cuts)


def _held(grid: Grid, tensor: Tensor, cuts: Cuts) -> Tensor:
    if isinstance(tensor, DTensor):
        if cuts == _unblocked(cuts):
            return tensor
        tensor = tensor.full_tensor()
    return _dtensor(grid, _part(grid, tensor, cuts), tensor.shape, cuts)


def _logical(grid: Grid, tensor: Tensor, cuts: Cuts) -> Tensor:
    if cuts == _unblocked(cuts) or not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local().detach()
    for dim, cut in enumerate(cuts):
        local = gathered(local, grid, cut.axes, dim, cut.blocks)
    plain = _unblocked(cuts)
    return _dtensor(grid, _part(grid, local, plain), tensor.shape, plain)


# -- state_dict -------------------------------------------------------------------------------


def _hook(model: nn.Module, grid: Grid, keys: Mapping[str, Key]) -> None:
    """`state_dict` in logical order; `load_state_dict` of it, or of the unsplit model's."""

    def saved(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, key in keys.items():
            if prefix + name in state:
                state[prefix + name] = _logical(grid, state[prefix + name], key.cuts)

    def loaded(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, key in keys.items():
            if prefix + name in state:
                state[prefix + name] = _held(grid, state[prefix + name], key.cuts)

    model.register_state_dict_post_hook(saved)
    model.register_load_state_dict_pre_hook(loaded)
