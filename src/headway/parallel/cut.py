"""The user's model cut into stages: evenly, or at named modules; the model is not changed.

The model is traced with chosen modules as leaves, the coarsest ones that still leave enough places
to cut at, and the stages are compared with the model on the example before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from headway.errors import PlanError
from headway.parallel.agreement import check_agreement, run_stages
from headway.parallel.examples import left_as_it_was
from headway.parallel.plain_state import has_hooks
from headway.parallel.sharded import refuse_whole, settled
from headway.parallel.splitting import split
from headway.parallel.stages import Stage, Stages, in_mode
from headway.parallel.standin import Loss, ModelCall, Passed, StandIn
from headway.parallel.tracing import IsLeaf, Trace, trace
from headway.parallel.units import cut_at, cut_evenly, labels, units_of

Weights = Mapping[str, float]
T = TypeVar("T")


def cut(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    stages: int | None = None,
    weights: Weights | None = None,
    at: Sequence[str] | None = None,
    relay: bool = False,
) -> Stages:
    """Cut a model into stages.

    Args:
        model: Any module, on its device. Its parameters, buffers, modes and attributes stay as
            they are; it must have no hooks of its own (its submodules may).
        loss: `loss(model, data)`, which calls the model once; it is unwound there.
        data: Of one micro-batch, as the loss gets it.
        stages: How many, for a cut into parts of even weight.
        weights: Unit -> weight for the even cut, as `Stages.calls` and `list_units` name them
            (measured seconds, say); None: the number of parameters.
        at: In place of `stages`: names of the modules with which the second and all later stages
            begin, with the wildcards of a shell.
        relay: Stages give values to the next stage only, for schedules without skips.

    Raises:
        PlanError: The model's forward cannot be followed, has too few parts, or cannot be cut at
            these places; or the stages would not compute what the model does.
        RecipeError: The loss does not call the model exactly once.
    """
    if (stages is None) == (at is None):
        raise ValueError("give either stages or at")

    def choose(call: ModelCall) -> Stages:
        if at is not None:
            traced = trace(model, call, _down_to(at))
            return _finish(traced, lambda found: cut_at(found, at), relay)
        assert stages is not None
        traced = trace_units(model, call, stages)
        return _finish(traced, lambda found: _even(found, stages, weights), relay)

    return settled(check_loss(at_call(model, loss, data, choose), loss, data))


def check_cut(model: nn.Module, loss: Loss, data: Any, at: Sequence[str]) -> None:
    """Whether the stages of a cut at named modules can be made; they are not compared, so that
    tensors may be stand-ins without numbers. Arguments as those of `cut`.

    Raises:
        PlanError: As `cut`.
        RecipeError: Likewise.
    """

    def choose(call: ModelCall) -> None:
        for training in (True, False):
            with in_mode(model, training):
                traced = trace(model, call, _down_to(at))
                with traced.examples:
                    split(traced, cut_at(traced, at), relay=False)

    at_call(model, loss, data, choose)


def list_units(model: nn.Module, loss: Loss, data: Any, stages: int) -> tuple[str, ...]:
    """The names of the units between which a cut into so many stages chooses, in order."""

    def names(call: ModelCall) -> tuple[str, ...]:
        return tuple(unit.name for unit in units_of(trace_units(model, call, stages)))

    return at_call(model, loss, data, names)


def at_call(model: nn.Module, loss: Loss, data: Any, do: Callable[[ModelCall], T]) -> T:
    """Do something where a loss calls the model, in the contexts (autocast) that it has made."""
    refuse_whole(model)
    done: list[T] = []

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done.append(do(ModelCall.of(args, kwargs)))
        raise Passed

    StandIn(model, run).compute(loss, data)
    return done[0]


def check_loss(stages: Stages, loss: Loss, data: Any) -> Stages:
    """The stages, after a loss has been computed with them: every rank sees what one would.

    Raises:
        RecipeError: The loss uses the model otherwise than by one call.
    """

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_stages(stages, ModelCall.of(args, kwargs))

    with left_as_it_was(stages.model):
        StandIn(stages.model, run, stages.foreign).compute(loss, data)
    return stages


def trace_units(model: nn.Module, call: ModelCall, stages: int) -> Trace:
    """The model traced at the coarsest level that has enough units.

    Raises:
        PlanError: No level has.
    """
    deepest = max(_level(model, name) for name, _ in model.named_modules())
    most = 0
    closed: dict[str, str] = {}
    for level in range(1, deepest + 1):
        found = trace(model, call, _at_level(model, level))
        units = [unit.name for unit in units_of(found)]
        if len(units) >= stages:
            return found
        most, closed = max(most, len(units)), {**closed, **found.closed}
    raise PlanError(
        f"{type(model).__name__} cannot be cut into {stages} stages",
        problems=[
            f"it has {most} parts with parameters that are carried out one after the other",
            *(f"{name} is one part, because {why}" for name, why in closed.items()),
        ],
        fix=f"Use {max(most, 1)} stages or fewer.",
    )


def _finish(found: Trace, choose: Callable[[Trace], list[int]], relay: bool) -> Stages:
    """The stages of a trace, compared with the model, in both modes."""
    model, call = found.model, found.call
    starts = choose(found)
    stages = _stages(found, starts, relay)
    mode = model.training
    with in_mode(model, not mode):
        other = trace(model, call, lambda name, _: name not in found.opened)
        if str(other.graph) == str(found.graph):
            return stages
        names = labels(found)
        opposite = _stages(other, cut_at(other, [names[start] for start in starts[1:]]), relay)
    if mode:
        return replace(stages, evaluating=opposite)
    return replace(opposite, evaluating=stages)


def _stages(found: Trace, starts: Sequence[int], relay: bool) -> Stages:
    with found.examples:
        parts = split(found, starts, relay=relay)
        found.examples.forget()
    stages = Stages(found.model, with_unused(found.model, parts), found.call.structure)
    return replace(check_agreement(stages, found.call), checks=(found.check(),))


def with_unused(model: nn.Module, parts: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The last stage gets the parameters that none uses: only a loss can."""
    used = {name for stage in parts for name in stage.parameters}
    rest = {name: p for name, p in model.named_parameters() if name not in used}
    last = replace(parts[-1], parameters={**parts[-1].parameters, **rest})
    return (*parts[:-1], last)


def _even(found: Trace, stages: int, weights: Weights | None) -> list[int]:
    units = units_of(found)
    of_unit = [u.parameters if weights is None else weights.get(u.name, 0.0) for u in units]
    return cut_evenly(units, of_unit, stages)


# -- which modules are one call --------------------------------------------------------------------


def _at_level(model: nn.Module, level: int) -> IsLeaf:
    """Modules of this level, where chains and lists do not count as one."""

    def is_leaf(name: str, module: nn.Module) -> bool:
        opens = _is_chain(module) or (_level(model, name) < level and any(module.children()))
        return has_hooks(module) or not opens

    return is_leaf


def _down_to(patterns: Sequence[str]) -> IsLeaf:
    """As coarse as possible, so that there are calls that match the patterns."""
    paths = [pattern.partition("#")[0].split(".") for pattern in patterns]

    def holds(name: str) -> bool:
        parts = name.split(".")
        return any(len(path) > len(parts) and all(map(fnmatchcase, parts, path)) for path in paths)

    def is_leaf(name: str, module: nn.Module) -> bool:
        return has_hooks(module) or not (_is_chain(module) or holds(name))

    return is_leaf


def _level(model: nn.Module, name: str) -> int:
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[: n + 1])) for n in range(len(parts)))
    return sum(not _is_chain(module) for module in above)


def _is_chain(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
