"""Where a model is cut into stages, and which ranks hold each parameter afterwards.

Cuts are balanced by parameters or by measured time, given by name, or made by the user's function.
All ranks cut in the same way. The model and the random generators are left as they were.

`ParameterOwnership` is equal on all ranks: every parameter and buffer has an owner, the first rank
that holds its first stage; where several ranks hold a tensor, the owner's values count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from headway.documents import nearest
from headway.errors import PlanError
from headway.parallel.pipeline.partition.cut import cut, cut_module_chain
from headway.parallel.pipeline.partition.stage_modules import balanced_partition
from headway.parallel.pipeline.runtime.stage_profile import measure_unit_seconds
from headway.parallel.stages import ModelStages
from headway.plans import PipelinePlan
from headway.run.distributed.world import broadcast_from_rank0
from headway.run.recipe.recipe import Loss
from headway.run.recipe.user_code import (
    call_user_function,
    importable_folders,
    resolve_reference,
    user_line,
)
from headway.run.step.randomness import generators_restored
from headway.schedule.pipeline_schedule import PipelineSchedule
from headway.units import format_seconds

_KEY = "pipeline.by_hand"
Arithmetic = Callable[[], AbstractContextManager[Any]]


def partition_model(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    how: PipelinePlan,
    stages: int,
    arithmetic: Arithmetic,
    remark: Callable[[str], None],
) -> ModelStages:
    """The stages of a model; collective where they are balanced by time.

    Args:
        data: Of one micro-batch, the same on all ranks.

    Raises:
        PlanError: The model cannot be cut there; a chain by hand is wrong.
        RecipeError: The function of a cut by hand is missing or raises.
    """
    with generators_restored():
        if how.by_hand:
            chain = user_partition(how.by_hand, model, stages)
            with arithmetic():
                return cut_module_chain(model, loss, data, chain)
        weights = None
        if how.balance == "time":
            weights = _measured(model, loss, data, stages, arithmetic)
            remark(_in_words(weights, stages))
        number = None if how.cut else stages
        with arithmetic():
            return cut(model, loss, data, stages=number, weights=weights, at=how.cut or None)


def _measured(
    model: nn.Module, loss: Loss, data: Any, stages: int, arithmetic: Arithmetic
) -> Mapping[str, float]:
    # On rank 0 alone: times differ between ranks, and the others, waiting, leave it the machine.
    return broadcast_from_rank0(
        dist.get_rank(),
        lambda: measure_unit_seconds(model, loss, data, stages, arithmetic=arithmetic),
        nullcontext(),
    )


def _in_words(weights: Mapping[str, float], stages: int) -> str:
    """A remark on the stages of the even cut, with the names to write down as `cut`."""
    names, seconds = list(weights), list(weights.values())
    starts = balanced_partition(seconds, stages)
    ends = [*starts[1:], len(names)]
    times = (format_seconds(sum(seconds[a:b])) for a, b in zip(starts, ends, strict=True))
    begins = ", ".join(f'"{names[start]}"' for start in starts[1:])
    return f"cut by measured time into stages of {', '.join(times)}: cut = [{begins}]"


def user_partition(
    reference: str, model: nn.Module, stages: int
) -> Sequence[Sequence[str | nn.Module]]:
    """The checked chain of stages that the user's function makes of a model.

    Raises:
        RecipeError: The function is missing or raises.
        PlanError: Its chain is wrong; lists what is.
    """
    with importable_folders(Path.cwd()):
        function = resolve_reference(reference, where=_KEY)
        chain = call_user_function(function, model, where=_KEY)
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
    """The problem of an entry; the cut itself checks which parameters it covers."""
    if isinstance(module, nn.Module):
        return ""
    if not isinstance(module, str):
        return f"{module!r} is neither a module nor the name of one"
    return "" if module in names else f"there is no module {module}{nearest(module, names)}"


@dataclass(frozen=True)
class ParameterOwnership:
    """Which ranks hold and train the tensors of a model that is cut into stages.

    Attributes:
        holders: Logical name of each parameter and buffer -> the ranks that hold it, first its
            owner.
        trainers: Logical name of each parameter -> the ranks that make its gradient; the others
            that hold it use it in evaluation only.
    """

    rank: int
    holders: Mapping[str, tuple[int, ...]]
    trainers: Mapping[str, tuple[int, ...]]

    def holds(self, name: str) -> bool:
        """Whether this rank holds a parameter or buffer."""
        return self.rank in self.holders[name]

    def owns(self, name: str) -> bool:
        """Whether this rank's values are those that count."""
        return self.rank == self.holders[name][0]

    @property
    def trained(self) -> tuple[str, ...]:
        """The parameters whose gradient this rank computes."""
        return tuple(name for name, ranks in self.trainers.items() if self.rank in ranks)

    def varies(self, name: str) -> bool:
        """Whether a tensor may differ between the ranks that hold it."""
        # Where all holders train it, their gradients are summed and the copies stay equal.
        return self.holders[name] != self.trainers.get(name)

    def copied(self) -> dict[tuple[int, int], list[str]]:
        """Tensors that may differ from the owner's, mostly buffers: (owner, holder) -> names."""
        found: dict[tuple[int, int], list[str]] = {}
        for name, (owner, *others) in sorted(self.holders.items()):
            if self.varies(name):
                for rank in others:
                    found.setdefault((owner, rank), []).append(name)
        return dict(sorted(found.items()))


def parameter_ownership(
    stages: ModelStages, schedule: PipelineSchedule, copies: Sequence[tuple[int, ...]], rank: int
) -> ParameterOwnership:
    """The ownership of all tensors of a model.

    Args:
        copies: For each pipeline the global rank of each rank of the schedule.
    """
    training: dict[str, dict[int, None]] = {}
    using: dict[str, dict[int, None]] = {}
    for stage in stages:
        for name in (*stage.parameters, *stage.buffers):
            training.setdefault(name, {}).update(dict.fromkeys(schedule.holders(stage.number)))
    names = _names(stages)
    for stage in stages.evaluating or stages:
        held = {id(t) for t in (*stage.module.parameters(), *stage.module.buffers())}
        for name in (name for number, name in names.items() if number in held):
            using.setdefault(name, {}).update(dict.fromkeys(schedule.holders(stage.number)))
    # A loss may use buffers that no stage uses, on any rank where a pipe ends.
    everywhere = dict.fromkeys(reversed(range(len(copies[0]))))
    return ParameterOwnership(
        rank,
        {
            name: _ranks({**training.get(name, {}), **using.get(name, {})} or everywhere, copies)
            for name in names.values()
        },
        {
            name: _ranks(training[name], copies)
            for name, _ in stages.model.named_parameters()
            if name in training
        },
    )


def _names(stages: ModelStages) -> dict[int, str]:
    """id() -> logical name of all parameters and buffers; tied ones under the first name."""
    model = stages.model
    return {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}


def _ranks(places: Iterable[int], copies: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(copy[place] for copy in copies for place in places)
