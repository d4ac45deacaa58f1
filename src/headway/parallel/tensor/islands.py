"""Modules that are split over another grid of the same ranks than the rest of the model.

Between the grids activations are whole: an island cuts what enters it by samples, as its grid wants
it, and what leaves it is gathered. So a perceptron can lie on a cuboid in a model whose attention
is split in the classic form (Das et al. 2016: another number of groups for each layer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from headway.errors import PlanError
from headway.parallel.tensor.context import Context
from headway.parallel.tensor.hold import Entered
from headway.parallel.tensor.nested import mapped
from headway.parallel.tensor.split_tensor import SplitTensor, Undecided
from headway.plan.tensor_layout import TensorGrid


class Island(Entered):
    """The module itself: plain whole tensors enter and leave."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context: Context = self.__dict__["_headway_split"][1]
        result = super().__call__(*mapped(args, whole), **mapped(kwargs, whole))
        return mapped(result, lambda x: x.full_tensor() if _is_of(x, context) else x)


def whole(x: Any) -> Any:
    """What enters an island, as a plain tensor."""
    return x.context.leave(x) if isinstance(x, SplitTensor | Undecided) else x


def _is_of(x: Any, context: Context) -> bool:
    return isinstance(x, SplitTensor) and x.context is context


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether patterns mean a module or parameter, or a module that it is in."""
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)


def meant(model: nn.Module, patterns: Sequence[str], option: str) -> list[str]:
    """The parameters that patterns mean, each by its first name; a tied one has several.

    Raises:
        PlanError: A pattern means none.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = [(n, first[id(p)]) for n, p in model.named_parameters(remove_duplicate=False)]
    problems, found = [], []
    for pattern in patterns:
        hits = [own for name, own in named if matches(name, (pattern,))]
        if not hits:
            near = get_close_matches(pattern, [n for n, _ in model.named_modules()], n=2)
            hint = f"; there is {' and '.join(near)}" if near else ""
            problems.append(f"split.{option} {pattern}: no parameter has or lies under it{hint}")
        found += hits
    if problems:
        raise PlanError(
            f"{type(model).__name__} cannot be split so",
            problems=problems,
            fix="Name parameters, or modules that they lie in, as model.named_parameters() does.",
        )
    return found


def find_islands(
    model: nn.Module, by: Sequence[tuple[str, TensorGrid]]
) -> Mapping[str, TensorGrid]:
    """Name of each module that the patterns mean -> its grid; the first pattern counts.

    Raises:
        PlanError: A pattern means no module, or an island shares parameters with the rest.
    """
    found: dict[str, TensorGrid] = {}
    problems = []
    modules = dict(model.named_modules())
    for pattern, grid in by:
        hits = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not hits:
            problems.append(f"split.by {pattern}: no module has this name")
        for name in hits:
            if not any(name == other or name.startswith(f"{other}.") for other in found):
                found = {n: g for n, g in found.items() if not n.startswith(f"{name}.")}
                found[name] = grid
    for name in found:
        inside = {id(p) for p in modules[name].parameters()}
        problems += [
            f"{name}: {other} is shared with the rest of the model"
            for other, p in model.named_parameters(remove_duplicate=False)
            if id(p) in inside and not other.startswith(f"{name}.")
        ]
    if problems:
        raise PlanError(
            f"{type(model).__name__} cannot be split so",
            problems=problems,
            fix="Name modules as model.named_modules() does; tied weights belong to one grid.",
        )
    return found
