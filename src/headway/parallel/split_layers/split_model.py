"""A model split over a process grid, in place; code, parameter names and shapes stay.

    grid = ProcessGrid.of(TensorGrid.classic(2))
    parts = split_model(model, grid, loss, batch)
    loss(model, batch).backward()

Parameters become DTensors on the grid's mesh, so that clipping, optimisers and torch's
distributed checkpoints treat them as any others. `state_dict()` is that of the unsplit model,
whatever the split; a layer in blocks (queries, keys and values as one) is held in another order
of rows, and put right there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.errors import UsageError
from headway.parallel.fsdp import part_as_dtensor
from headway.parallel.operator_rules import RULES
from headway.parallel.split_layers.parameters import (
    DimensionCuts,
    ParameterPlacement,
    SplitInputModule,
    cut_to_grid,
    install_parameter_access,
)
from headway.parallel.split_layers.split_inference import (
    SplitDecisions,
    SubmoduleOnOwnGrid,
    infer_split,
)
from headway.parallel.split_tensor import (
    RuleRefused,
    SplitTensor,
    qualified_torch_name,
    split_tensors_in,
    unsupported_operator,
)
from headway.parallel.tensor.grid import ProcessGrid, WeightPrefetch
from headway.parallel.tensor.layer_context import LayerContext, SplitSettings
from headway.plans.tensor_layout import TensorGrid


@dataclass(frozen=True, slots=True)
class ParameterSplit:
    """What the context knows of a parameter.

    Attributes:
        cuts: One for each dimension, axes with one rank left out; none: it is whole.
    """

    name: str
    shape: torch.Size
    cuts: DimensionCuts
    origin: frozenset[str]
    grid: ProcessGrid


class ExecutionContext(LayerContext):
    """Hands out the parts of parameters.

    Attributes:
        plain: Modules hold parts as plain tensors; a DTensor among them is one whose rows are away.
    """

    rules = RULES["layers"]
    plain = False

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a function of torch on split tensors.

        Raises:
            PlanError: It has no rule, or none for tensors that are cut so.
        """
        try:
            return self.run_rule(func, args, kwargs)
        except RuleRefused as refusal:
            x = split_tensors_in(args, kwargs)[0]
            raise unsupported_operator(qualified_torch_name(func), x, refusal.why) from None

    def leave(self, x: Any) -> Any:
        return x.full_tensor()

    def parameter(self, parameter: nn.Parameter, key: ParameterSplit | None) -> Any:
        """What a module's code gets: a split tensor, or a plain whole one."""
        away = isinstance(parameter, DTensor)
        if key is None or away is self.plain:
            return parameter
        local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not key.cuts:
            return local
        return SplitTensor(local, key.shape, key.cuts, self, key.origin, parameter=True)

    def __deepcopy__(self, memo: Any) -> ExecutionContext:
        # It refers to process groups, which cannot be copied.
        return self


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitModel:
    """A model that is split.

    Attributes:
        model: The user's, changed in place.
        decisions: What is split, and how.
        keys: Of all parameters, tied ones under each of their names.
        away: Parameters that this rank does not hold: they are left as they are.
        homes: By name, of parameters that are held elsewhere.
    """

    model: nn.Module
    context: ExecutionContext
    decisions: SplitDecisions
    home: ParameterPlacement
    keys: Mapping[str, ParameterSplit]
    away: Collection[str] = ()
    homes: dict[str, ParameterPlacement] = field(default_factory=dict)

    @property
    def grid(self) -> ProcessGrid:
        return self.context.grid

    def wrapped(self, name: str, part: Tensor) -> Tensor:
        """What a module holds of a parameter, or its gradient, as the DTensor that it is a part of;
        the same memory."""
        key = self.keys[name]
        return self._home(name).wrapped(local_of_held(part), key.shape, key.cuts)

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, its gradient or a state of the optimiser, as a DTensor in logical order.

        It differs from what is held only for layers in blocks. All ranks of the grid take part.
        """
        return self._home(name).logical(tensor, self._cuts(name))

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `logical`; a plain whole tensor is cut."""
        return self._home(name).held(tensor, self._cuts(name))

    def _home(self, name: str) -> ParameterPlacement:
        return self.homes.get(name, self.home)

    def _cuts(self, name: str) -> DimensionCuts:
        return self.keys[name].cuts if name in self.keys else ()

    def explain(self) -> str:
        """What is split and what is not, a line each."""
        lines = []
        for name, cuts in self.decisions.cuts.items():
            said = ", ".join(f"dim {dim} {cut}" for dim, cut in enumerate(cuts) if cut.axes)
            why = self.decisions.left.get(name, "")
            lines.append(f"{name}: {said or 'whole'}" + (f" ({why})" if why else ""))
        return "\n".join(lines)


def split_model(
    model: nn.Module,
    grid: ProcessGrid,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    whole: Sequence[str] = (),
    settings: SplitSettings | None = None,
) -> SplitModel:
    """Split a model over a grid of ranks, in place.

    Args:
        model: The same on all ranks of the grid, parameters included; in training mode.
        loss: `loss(model, batch)`; it is run without numbers.
        batch: A micro-batch, the same on all ranks of the grid.
        whole: Names of parameters or modules, or patterns, that are not split.
    """
    return apply_split_decisions(
        model, grid, infer_split(model, loss, batch, grid.plan, whole=whole), settings=settings
    )


def apply_split_decisions(
    model: nn.Module,
    grid: ProcessGrid,
    decisions: SplitDecisions,
    *,
    settings: SplitSettings | None = None,
    home: ParameterPlacement | None = None,
    away: Collection[str] = (),
    grids: Mapping[TensorGrid, ProcessGrid] | None = None,
) -> SplitModel:
    """Split a model as `infer_split` has decided.

    Args:
        model: The same on all ranks of the grid.
        home: Where parameters are held. Modules then hold plain parts of them, which may be cut
            further: `SplitModel.wrapped` makes DTensors. None: modules hold DTensors on the grid.
        away: Names of parameters that this rank does not hold.
        grids: The same ranks as the grids of what is split otherwise (`SplitDecisions.islands`).

    Raises:
        UsageError: The decisions are for another grid or another model.
    """
    names = {name for name, _ in model.named_parameters()}
    if decisions.plan != grid.plan or names != set(decisions.cuts):
        raise UsageError(
            "these decisions are for another grid or another model",
            why=f"{len(names ^ set(decisions.cuts))} parameters differ.",
            fix="Infer the split of this model on this grid: infer_split(...).",
        )
    known = {grid.plan: grid, **(grids or {})}
    contexts = {
        name: _context(known[plan], settings, decisions, plain=home is not None)
        # The model itself last: in `_keys` the first name that fits decides.
        for name, plan in {**decisions.islands, "": grid.plan}.items()
    }
    keys = _keys(model, decisions, contexts)
    _distribute(model, keys, plain=home is not None, away=away)
    held = dict(model.named_parameters())
    for (
        name,
        context,
    ) in contexts.items():  # `install_parameter_access` leaves alone what is held already
        if context.settings.ahead and context.grid.plan.form == "cuboid":
            context.ahead = _weight_prefetch(context.grid, held)
        inside = f"{name}." if name else ""
        own = {n.removeprefix(inside): k for n, k in keys.items() if n.startswith(inside)}
        install_parameter_access(
            model.get_submodule(name),
            context,
            own,
            root=SubmoduleOnOwnGrid if name else SplitInputModule,
        )
    found = SplitModel(
        model=model,
        context=contexts[""],
        decisions=decisions,
        home=home or ParameterPlacement.of(grid),
        keys=keys,
        away=away,
        homes={n: ParameterPlacement.of(k.grid) for n, k in keys.items() if k.grid is not grid},
    )
    _hook(found)
    return found


def _context(
    grid: ProcessGrid, settings: SplitSettings | None, decisions: SplitDecisions, *, plain: bool
) -> ExecutionContext:
    context = ExecutionContext(grid, settings or SplitSettings(), decisions.companions)
    context.plain = plain
    return context


def _weight_prefetch(grid: ProcessGrid, held: Mapping[str, nn.Parameter]) -> WeightPrefetch | None:
    return (
        WeightPrefetch(grid, lambda name: local_of_held(held[name])) if grid.size("i") > 1 else None
    )


def _keys(
    model: nn.Module, decisions: SplitDecisions, contexts: Mapping[str, ExecutionContext]
) -> dict[str, ParameterSplit]:
    """By name; the contexts are those of islands, and of the rest last."""
    keys = {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        logical = first[id(parameter)]
        context = next(c for n, c in contexts.items() if not n or name.startswith(f"{n}."))
        cuts = tuple(context.without_unit_axes(cut) for cut in decisions.cuts[logical])
        real = cuts if any(cut.axes for cut in cuts) else ()
        keys[name] = ParameterSplit(
            logical, parameter.shape, real, frozenset({logical}), context.grid
        )
    return keys


def local_of_held(parameter: Tensor) -> Tensor:
    """The memory of what a module holds, without a gradient."""
    held: Any = parameter.detach()
    found: Tensor = held.to_local() if isinstance(held, DTensor) else held
    return found


# -- parameters -------------------------------------------------------------------------------


def _distribute(
    model: nn.Module,
    keys: Mapping[str, ParameterSplit],
    *,
    plain: bool,
    away: Collection[str],
) -> None:
    """Every parameter becomes a plain part and stays the same object, or becomes a DTensor; tied
    ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            known = keys[f"{prefix}.{key}".lstrip(".")]
            if id(parameter) in made:
                module.register_parameter(key, made[id(parameter)])
            elif plain:
                if known.name not in away:
                    parameter.data = cut_to_grid(known.grid, parameter.data, known.cuts)
                made[id(parameter)] = parameter
            else:
                held = ParameterPlacement.of(known.grid).held(parameter.detach(), known.cuts)
                made[id(parameter)] = nn.Parameter(held, parameter.requires_grad)
                module.register_parameter(key, made[id(parameter)])


# -- state_dict -------------------------------------------------------------------------------


def _hook(split: SplitModel) -> None:
    """`state_dict` in logical order; `load_state_dict` of it, or of the unsplit model's."""

    def saved(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        made: dict[str, Tensor] = {}
        for name, key in split.keys.items():
            if prefix + name in state and key.name not in split.away:
                if key.name not in made:  # tied ones stay the same object
                    part = state[prefix + name]
                    held = split.wrapped(name, part) if split.context.plain else part
                    made[key.name] = split.logical(key.name, held)
                state[prefix + name] = made[key.name]

    def loaded(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, key in split.keys.items():
            if prefix + name in state and key.name not in split.away:
                held = split.held(key.name, state[prefix + name])
                if split.context.plain:
                    held = _beside(parameters[name], local_of_held(held))
                state[prefix + name] = held

    split.model.register_state_dict_post_hook(saved)
    split.model.register_load_state_dict_pre_hook(loaded)


def _beside(parameter: Tensor, local: Tensor) -> Tensor:
    """A part in the form in which a module holds a parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return part_as_dtensor(local, parameter.device_mesh, parameter.placements, parameter.shape)
