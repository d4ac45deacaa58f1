"""A model cut into stages: what each computes, what enters it and what leaves it.

The stages share the model's own parameter and buffer objects, under the names that these have in
the whole model. Invariant: carried out one after the other, the stages compute what the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from headway.parallel.standin import ModelCall, check_structure
from headway.parallel.structure import Structure
from headway.schedule import PipelineSchedule

INPUT = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """A value that a stage takes.

    Attributes:
        name: In the graph.
        source: The stage that makes it, or INPUT.
        leaf: Of an INPUT: the number of the leaf of the model's call; else the number of the value
            among those that the source gives.
    """

    name: str
    source: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Exit:
    """A value that a stage gives to others.

    Attributes:
        name: In the graph.
        targets: The stages that take it, ascending.
    """

    name: str
    targets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the model.

    Attributes:
        number: From 0.
        module: Called with the values of `takes`; returns a tuple of those of `gives`, on the last
            stage the model's output. The keys of its state_dict are those of the whole model.
        takes: In the order of the module's arguments.
        gives: In the order of the module's results.
        calls: Names of the model's modules that it calls, in order.
        parameters: Logical name -> parameter; tied ones under their first name. The last stage
            also has those that no stage uses (a loss may).
        buffers: Logical name -> buffer.
        alters: Its forward changes a value that enters it in place.
        updates: Its forward in training changes its buffers.
    """

    number: int
    module: fx.GraphModule
    takes: tuple[Entry, ...]
    gives: tuple[Exit, ...]
    calls: tuple[str, ...]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    alters: bool = False
    updates: bool = False

    @property
    def uses_inputs(self) -> bool:
        """Whether it needs anything of the model's call."""
        return any(entry.source == INPUT for entry in self.takes)


@dataclass(frozen=True)
class Stages:
    """All stages of a model, in the mode in which it is trained.

    Attributes:
        model: The whole model.
        stages: In order.
        structure: Of the model's call.
        evaluating: The stages in eval mode, cut at the same places; the same ones where the model
            does not look at its mode outside of the modules that are called.
        checks: Refuse to go on where the model has changed in a way that the stages do not see.
    """

    model: nn.Module
    stages: tuple[Stage, ...]
    structure: Structure
    evaluating: Stages | None = None
    checks: tuple[Callable[[], None], ...] = field(default=(), compare=False)

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __getitem__(self, number: int) -> Stage:
        return self.stages[number]

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All (earlier, later) between which a value goes."""
        return tuple(
            sorted({(s.number, t) for s in self.stages for e in s.gives for t in e.targets})
        )

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The edges beyond those from a stage to the next: what a schedule has to be told."""
        return tuple((a, b) for a, b in self.edges if b != a + 1)

    @property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Logical name of each parameter -> the stages that use it."""
        found: dict[str, list[int]] = {}
        for stage in self.stages:
            for name in stage.parameters:
                found.setdefault(name, []).append(stage.number)
        return {name: tuple(where) for name, where in found.items()}

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Of parameters in more than one stage: their gradients are summed."""
        return {name: where for name, where in self.users.items() if len(where) > 1}

    @property
    def foreign(self) -> dict[Tensor, str]:
        """Parameters and buffers of all stages but the last, which a loss cannot use."""
        return {
            tensor: name
            for stage in self.stages[:-1]
            for name, tensor in (*stage.parameters.items(), *stage.buffers.items())
        }

    def unlike(self, schedule: PipelineSchedule) -> list[str]:
        """Why a table is for another cut; empty where the number of stages agrees."""
        if schedule.stages == len(self):
            return []
        return [f"it is for {schedule.stages} stages, and the model has {len(self)}"]

    def check(self) -> None:
        """Refuse to go on where the model has changed since it was cut, unseen by the stages.

        Raises:
            RunError: A plain attribute of the model has changed.
        """
        for check in self.checks:
            check()

    def leaves_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What varies in a call of the model.

        Raises:
            RunError: The call is of another form than the one by which the model was cut.
        """
        call = ModelCall.of(args, kwargs)
        check_structure(call, self.structure)
        return call.leaves

    def with_flags(self, alters: Mapping[int, bool], updates: Mapping[int, bool]) -> Stages:
        """The same stages, with what has been seen of them."""
        return replace(
            self,
            stages=tuple(
                replace(s, alters=alters[s.number], updates=updates[s.number]) for s in self.stages
            ),
        )


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The whole model in a mode; each module is put back into its own at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before
