"""Stages of a model: inputs, outputs, the call of the model, and the values in between.

The stages share the model's own parameter and buffer objects, under the names that these have
in the whole model. Run one after the other, they compute what the model computes.

`loss(model, data)` is the user's function and may do anything around its single call of the
model, so every stage runs it with a `ModelProxy`, whose call runs the stage. On the last stage
the proxy returns the model's output and the loss continues; on all others it unwinds the loss.
A stage so runs in the same contexts (autocast, say) as the whole model would.

What a model is called with, and what goes from stage to stage, is rarely one tensor. `flatten`
and `TreeSpec.rebuild` take tuples, dicts and dataclasses apart and put them together again, as
torch's pytrees do; two values have equal specs exactly if they differ in leaves alone.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from headway.errors import RecipeError, RunError
from headway.schedule.pipeline_schedule import PipelineSchedule
from headway.user_frames import is_user_file


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """How a value is put together.

    A dataclass with a class attribute `whole_in_messages` that is true is a constant.

    Attributes:
        kind: "leaf", "constant", "tuple", "list", "dict", "named" (tuples with names), "object"
            (dataclasses) or "record" (dataclasses that are dicts, as outputs of `transformers`).
        keys: Of a dict, in its order; the fields of a dataclass.
        constant: What is neither a container nor a leaf, as it is.
        example: A dataclass of this type, without its fields.
    """

    kind: str
    type: type | None = None
    keys: tuple[Any, ...] = ()
    parts: tuple[TreeSpec, ...] = ()
    constant: Any = None
    # Not compared: each call of `flatten` makes another example.
    example: Any = field(default=None, compare=False)

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The value with these leaves in place of its own."""
        if self.kind == "leaf":
            return leaves[0]
        return _build(self, iter(leaves))

    @property
    def possible(self) -> bool:
        """Whether a value can be put together so; one of another rank may have any attributes."""
        if self.kind in ("leaf", "constant"):
            return True
        known = isinstance(self.keys, tuple) and isinstance(self.parts, tuple)
        if not known or not all(isinstance(part, TreeSpec) for part in self.parts):
            return False
        keyed = self.kind in ("dict", "object", "record")
        if keyed and len(self.keys) != len(self.parts):
            return False
        return _is_container(self) and all(part.possible for part in self.parts)

    @property
    def leaves(self) -> int:
        return 1 if self.kind == "leaf" else sum(part.leaves for part in self.parts)


LEAF_SPEC = TreeSpec("leaf")


def is_payload(value: Any) -> bool:
    """The leaves of what goes from stage to stage: tensors, and numbers, which may change."""
    # By the exact type: a bool is a flag, which must not change.
    return isinstance(value, Tensor) or type(value) in (int, float)


def flatten(
    value: Any, is_leaf: Callable[[Any], bool], *, open_parts: bool = True
) -> tuple[list[Any], TreeSpec]:
    """The leaves of a value in order, and its structure.

    Args:
        is_leaf: Asked for everything that is not a tuple, list, dict or dataclass; what is no leaf
            is a constant.
        open_parts: A dataclass that answers for functions of torch (this rank's part of a tensor)
            is taken apart as well; it is a leaf otherwise.
    """
    leaves: list[Any] = []

    def is_one(found: Any) -> bool:
        closed = not open_parts and is_tensor_like(found)
        return closed or isinstance(found, Tensor)

    return leaves, _take_apart(value, is_leaf, is_one, leaves)


def is_tensor_like(value: Any) -> bool:
    """Whether functions of torch can be called on it."""
    return hasattr(type(value), "__torch_function__")


def _take_apart(
    value: Any,
    is_leaf: Callable[[Any], bool],
    is_one: Callable[[Any], bool],
    leaves: list[Any],
) -> TreeSpec:
    if is_one(value):
        leaves.append(value)
        return LEAF_SPEC
    kind = _kind(value)
    if not kind:
        if is_leaf(value):
            leaves.append(value)
            return LEAF_SPEC
        return TreeSpec("constant", constant=value)
    keys: tuple[Any, ...] = ()
    inner: Sequence[Any] = value
    if kind == "dict":
        keys, inner = tuple(value), list(value.values())
    elif kind in ("object", "record"):
        keys = tuple(entry.name for entry in dataclasses.fields(value))
        inner = [getattr(value, key) for key in keys]
    parts = tuple(_take_apart(part, is_leaf, is_one, leaves) for part in inner)
    # Without its fields, whose tensors the structure would keep alive.
    example = _like(value, dict.fromkeys(keys)) if kind == "object" else None
    return TreeSpec(kind, type(value), keys, parts, example=example)


def _kind(value: Any) -> str:
    """Of a container; empty for everything else."""
    # By the exact type: a named tuple is built of single arguments.
    if type(value) is tuple:
        return "tuple"
    if type(value) is list:
        return "list"
    if isinstance(value, dict):
        return "record" if dataclasses.is_dataclass(value) else "dict"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "named"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "" if getattr(type(value), "whole_in_messages", False) else "object"
    return ""


def _build(structure: TreeSpec, leaves: Iterator[Any]) -> Any:
    if structure.kind == "leaf":
        return next(leaves)
    if structure.kind == "constant":
        return structure.constant
    parts = [_build(part, leaves) for part in structure.parts]
    kind = structure.type
    assert kind is not None
    match structure.kind:
        case "dict":
            return kind(zip(structure.keys, parts, strict=True))
        case "named":
            return kind(*parts)
        case "record":
            return kind(**dict(zip(structure.keys, parts, strict=True)))
        case "object":
            return _like(structure.example, dict(zip(structure.keys, parts, strict=True)))
        case _:
            return kind(parts)


def _is_container(structure: TreeSpec) -> bool:
    kind, example = structure.type, structure.example
    if not isinstance(kind, type):
        return False
    match structure.kind:
        case "tuple" | "list":
            return kind is (tuple if structure.kind == "tuple" else list)
        case "dict":
            return issubclass(kind, dict)
        case "record":
            return issubclass(kind, dict) and dataclasses.is_dataclass(kind)
        case "named":
            return issubclass(kind, tuple) and len(getattr(kind, "_fields", ())) == len(
                structure.parts
            )
        case "object":
            names = all(isinstance(key, str) for key in structure.keys)
            return names and dataclasses.is_dataclass(kind) and type(example) is kind
        case _:
            return False


def _like(example: Any, fields: dict[str, Any]) -> Any:
    """A dataclass with other fields, whatever its constructor wants."""
    value = copy.copy(example)
    for name, content in fields.items():
        object.__setattr__(value, name, content)  # frozen dataclasses refuse setattr
    return value


# What a loss gets in place of the model, where a rank holds only a stage of it.


LossFunction = Callable[[Any, Any], Any]
LOSS, METRICS = "the loss", "the metrics function"
"""Who calls the model, in messages."""
_SETTINGS = (type(None), bool, str, bytes, Enum, torch.dtype, torch.device, torch.memory_format)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What a model is called with.

    Attributes:
        leaves: What may be another for each micro-batch: tensors, numbers, objects of the user's.
        structure: Of (args, kwargs); it holds what is the same each time: None, flags, texts.
    """

    leaves: tuple[Any, ...]
    structure: TreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelCall:
        leaves, structure = flatten((args, dict(kwargs)), _varies, open_parts=False)
        return ModelCall(tuple(leaves), structure)

    def arguments(self, leaves: tuple[Any, ...] | None = None) -> tuple[Any, dict[str, Any]]:
        """The arguments, with other leaves if there are any."""
        args, kwargs = self.structure.rebuild(self.leaves if leaves is None else leaves)
        return args, kwargs


def _varies(value: Any) -> bool:
    return not isinstance(value, _SETTINGS)


class StageCompleted(BaseException):
    """Unwinds a loss once the stage has run; no exception of a user's is of this kind."""


class ModelProxy:
    """Looks like the model to a loss, or to metrics, that call it once.

    Args:
        foreign: Parameters and buffers that other stages hold, with a name to show.
        caller: Whom messages name.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        foreign: Mapping[Tensor, str] | None = None,
        *,
        caller: str = LOSS,
    ) -> None:
        self._model = model
        self._run = run
        self._foreign = foreign or {}
        self._caller = caller
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise RecipeError(
                f"{self._caller} calls the model more than once",
                where=user_line(),
                why="In a pipeline, a micro-batch goes through the stages once.",
                fix="Call the model once, with the inputs of both calls concatenated, or move the "
                "second call into the model's own forward.",
            )
        return self._run(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if isinstance(value, nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
        else:
            tensors = [value] if isinstance(value, Tensor) else []
        elsewhere = next((t for t in tensors if t in self._foreign), None)
        if elsewhere is not None:
            raise self._forbidden(name, f"{self._foreign[elsewhere]} is in another stage.")
        # A method of the model would run all of it, past the stages.
        if getattr(value, "__self__", None) is self._model:
            raise self._forbidden(
                name, "It is a method of the whole model, and no rank holds all of that."
            )
        return value

    def _forbidden(self, name: str, why: str) -> RecipeError:
        return RecipeError(
            f"{self._caller} uses model.{name}, which it cannot in a pipeline",
            where=user_line(),
            why=f"Each rank holds only its stage of the model. {why}",
            fix=f"Compute what {self._caller} needs in the model's forward and return it with the "
            "output.",
        )

    def compute(self, loss: LossFunction, data: Any) -> Any:
        """What a loss makes of a micro-batch; None where it was unwound.

        Raises:
            RecipeError: It does not call the model exactly once, or uses it in another way.
        """
        # One proxy serves all micro-batches.
        self.calls = 0
        try:
            value = loss(self, data)
        except StageCompleted:
            return None
        if not self.calls:
            raise RecipeError(
                f"{self._caller} does not call the model",
                why="A pipeline finds the model's inputs by watching that call: model(...).",
                fix=f"Call the model that {self._caller} is given: output = model(inputs).",
            )
        return value


def user_line() -> str:
    """File and line of the innermost frame that is neither torch's nor headway's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# A model cut into stages: what each computes, what enters it and what leaves it.


MODEL_INPUT = -1


@dataclass(frozen=True, slots=True)
class StageInput:
    """A value that a stage takes.

    Attributes:
        source: The stage that makes it, or MODEL_INPUT.
        leaf: Of a MODEL_INPUT: number of the leaf of the model's call; else of the value among
            those that the source gives.
    """

    name: str
    source: int
    leaf: int


@dataclass(frozen=True, slots=True)
class StageOutput:
    """A value that a stage gives to others.

    Attributes:
        targets: The stages that take it, ascending.
    """

    name: str
    targets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the model.

    Attributes:
        module: Called with the values of `takes`; returns a tuple of those of `gives`, on the last
            stage the model's output. The keys of its state_dict are those of the whole model.
        takes: In the order of the module's arguments.
        gives: In the order of the module's results.
        calls: Names of the model's modules that it calls, in order.
        parameters: Logical name -> parameter; tied ones under their first name. The last stage
            also has those that no stage uses (a loss may).
        alters: Its forward changes a value that enters it in place.
        updates: Its forward in training changes its buffers.
    """

    number: int
    module: fx.GraphModule
    takes: tuple[StageInput, ...]
    gives: tuple[StageOutput, ...]
    calls: tuple[str, ...]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    alters: bool = False
    updates: bool = False

    @property
    def uses_inputs(self) -> bool:
        """Whether it needs anything of the model's call."""
        return any(entry.source == MODEL_INPUT for entry in self.takes)


@dataclass(frozen=True)
class ModelStages:
    """All stages of a model, in the mode in which it is trained.

    Attributes:
        evaluating: The stages in eval mode, cut at the same places; the same ones where the model
            does not look at its mode outside of the modules that are called.
        checks: Refuse to go on where the model has changed in a way that the stages do not see.
    """

    model: nn.Module
    stages: tuple[Stage, ...]
    structure: TreeSpec
    evaluating: ModelStages | None = None
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

    def leaves_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], caller: str = LOSS
    ) -> tuple[Any, ...]:
        """What varies in a call of the model.

        Raises:
            RunError: The call is of another form than the one by which the model was cut.
        """
        call = ModelCall.of(args, kwargs)
        if call.structure != self.structure:
            raise RunError(
                f"{caller} calls the model in another way than "
                f"{'with the first micro-batch' if caller == LOSS else LOSS + ' does'}",
                where=user_line(),
                why="The stages were made for the same arguments, the same keys of dicts and the "
                "same flags; only the sizes of tensors, and numbers, may change.",
                fix="Call the model alike for every micro-batch.",
            )
        return call.leaves


@contextmanager
def training_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The whole model in a mode; each module is put back into its own at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            # Not by `train`, which would set all modules below as well.
            module.training = before
