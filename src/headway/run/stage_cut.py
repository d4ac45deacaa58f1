"""Where a model is cut: as the plan says, evenly by parameters or by time, by names, or by hand.

Invariant: all ranks cut alike. What only one rank can know, measured time, is rank 0's and told to
the others. The model and the random generators are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from headway.documents import nearest
from headway.errors import PlanError
from headway.parallel import Stages, cut, cut_by_hand, even_parts, weigh_units
from headway.plan import Pipeline
from headway.run.randomness import generators_restored
from headway.run.recipe import Loss
from headway.run.reference import call, importable, resolve, user_line
from headway.units import format_seconds

_KEY = "pipeline.by_hand"
Arithmetic = Callable[[], AbstractContextManager[Any]]


def cut_as_planned(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    how: Pipeline,
    stages: int,
    arithmetic: Arithmetic,
    remark: Callable[[str], None],
) -> Stages:
    """The stages of a model; collective where they are balanced by time.

    Args:
        model: The whole model, on its device.
        loss: The recipe's.
        data: Of one micro-batch, the same on all ranks.
        how: Of the plan.
        stages: How many the schedule has.
        arithmetic: The context of a forward pass (autocast).
        remark: Told what was measured.

    Raises:
        PlanError: The model cannot be cut there; a chain by hand is wrong.
        RecipeError: The function of a cut by hand is missing or raises.
    """
    with generators_restored():
        if how.by_hand:
            chain = chain_by_hand(how.by_hand, model, stages)
            with arithmetic():
                return cut_by_hand(model, loss, data, chain)
        weights = None
        if how.balance == "time":
            weights = _measured(model, loss, data, stages, arithmetic)
            remark(_in_words(weights, stages))
        number = None if how.cut else stages
        with arithmetic():
            return cut(model, loss, data, stages=number, weights=weights, at=how.cut or None)


# -- by measured time ----------------------------------------------------------------------------


def _measured(
    model: nn.Module, loss: Loss, data: Any, stages: int, arithmetic: Arithmetic
) -> Mapping[str, float]:
    """Seconds of the units; those of rank 0, while the others wait and leave it the machine."""
    found: list[Mapping[str, float]] = [{}]
    if dist.get_rank() == 0:
        found[0] = weigh_units(model, loss, data, stages, arithmetic=arithmetic)
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _in_words(weights: Mapping[str, float], stages: int) -> str:
    """What the even cut makes of the measured times; the names can be written down as `cut`."""
    names, seconds = list(weights), list(weights.values())
    starts = even_parts(seconds, stages)
    ends = [*starts[1:], len(names)]
    times = (format_seconds(sum(seconds[a:b])) for a, b in zip(starts, ends, strict=True))
    begins = ", ".join(f'"{names[start]}"' for start in starts[1:])
    return f"cut by measured time into stages of {', '.join(times)}: cut = [{begins}]"


# -- by hand -------------------------------------------------------------------------------------


def chain_by_hand(
    reference: str, model: nn.Module, stages: int
) -> Sequence[Sequence[str | nn.Module]]:
    """The chain that the user's function makes of a model, checked.

    Args:
        reference: "module:function".
        model: The whole model.
        stages: How many the schedule has.

    Raises:
        RecipeError: The function is missing or raises.
        PlanError: Its chain is wrong; lists what is.
    """
    with importable(Path.cwd()):
        function = resolve(reference, where=_KEY)
        chain = call(function, model, where=_KEY)
    problems = _problems(chain, model, stages)
    if problems:
        raise PlanError(
            f"{reference} makes no chain of {stages} stages",
            where=user_line(function) or _KEY,
            problems=problems,
            fix=_FIX,
        )
    return chain  # type: ignore[no-any-return]


_FIX = (
    "It gets the model and returns for each stage a list of modules, or of their names: "
    'lambda model: [["enter", "blocks.0"], ["blocks.1", "leave"]]'
)


def _problems(chain: object, model: nn.Module, stages: int) -> list[str]:
    if not isinstance(chain, Sequence) or isinstance(chain, str):
        return [f"it returned {type(chain).__name__}, not a list of lists"]
    names = [name for name, _ in model.named_modules() if name]
    found = [] if len(chain) == stages else [f"it has {len(chain)} stages"]
    for number, modules in enumerate(chain):
        if not isinstance(modules, Sequence) or isinstance(modules, str):
            found.append(f"stage {number} is {type(modules).__name__}, not a list of modules")
        elif not modules:
            found.append(f"stage {number} is empty")
        else:
            wrong = (_wrong(module, names) for module in modules)
            found += [f"stage {number}: {problem}" for problem in wrong if problem]
    return found


def _wrong(module: object, names: list[str]) -> str:
    """What is wrong with an entry; whose a module's parameters are is seen when it is cut."""
    if isinstance(module, nn.Module):
        return ""
    if not isinstance(module, str):
        return f"{module!r} is neither a module nor the name of one"
    return "" if module in names else f"there is no module {module}{nearest(module, names)}"
