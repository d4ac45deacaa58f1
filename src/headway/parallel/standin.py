"""What a loss gets in place of the model, where a rank holds only a stage of it.

`loss(model, data)` is the user's function and may do anything around its one call of the model.
Every stage therefore carries it out: the stand-in's call runs the stage. On the last stage it
returns the model's output, and the loss goes on; on all others it unwinds the loss. So a stage runs
in the same contexts (autocast, say) as the whole model would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import RecipeError, RunError
from headway.parallel.structure import Structure, flatten

Loss = Callable[[Any, Any], Any]
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_SETTINGS = (type(None), bool, str, bytes, Enum, torch.dtype, torch.device, torch.memory_format)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What a model is called with.

    Attributes:
        leaves: What may be another for each micro-batch: tensors, numbers, objects of the user's.
        structure: Of (args, kwargs); it holds what is the same each time: None, flags, texts.
    """

    leaves: tuple[Any, ...]
    structure: Structure

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


class Passed(BaseException):
    """Unwinds a loss once the stage has run; no exception of a user's is of this kind."""


class StandIn:
    """Looks like the model to a loss that calls it once.

    Args:
        model: The whole model.
        run: What the call does.
        foreign: Parameters and buffers that other stages hold, with a name to show.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        foreign: Mapping[Tensor, str] | None = None,
    ) -> None:
        self._model = model
        self._run = run
        self._foreign = foreign or {}
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise RecipeError(
                "the loss calls the model more than once",
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
            raise _reads(name, f"{self._foreign[elsewhere]} is in another stage.")
        if getattr(value, "__self__", None) is self._model:
            raise _reads(name, "It is a method of the whole model, and no rank holds all of that.")
        return value

    def compute(self, loss: Loss, data: Any) -> Any:
        """The loss of a micro-batch; None where the loss was unwound.

        Raises:
            RecipeError: It does not call the model exactly once, or uses it in another way.
        """
        self.calls = 0
        try:
            value = loss(self, data)
        except Passed:
            return None
        if not self.calls:
            raise RecipeError(
                "the loss does not call the model",
                why="A pipeline finds the model's inputs by watching that call: model(...).",
                fix="Call the model that the loss is given: output = model(inputs).",
            )
        return value


def record_call(loss: Loss, model: nn.Module, data: Any) -> ModelCall:
    """What a loss calls the model with; nothing behind the call is run.

    Args:
        loss: `loss(model, data)`.
        model: The whole model; it is not run.
        data: Of one micro-batch.

    Raises:
        RecipeError: The loss does not call the model, or uses it in another way.
    """
    found: list[ModelCall] = []

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.append(ModelCall.of(args, kwargs))
        raise Passed

    StandIn(model, run).compute(loss, data)
    return found[0]


def check_structure(call: ModelCall, expected: Structure) -> None:
    """Refuse a call that differs from that by which the model was cut in more than its leaves.

    Raises:
        RunError: It does.
    """
    if call.structure != expected:
        raise RunError(
            "the loss calls the model in another way than with the first micro-batch",
            where=user_line(),
            why="The stages were made for the same arguments, the same keys of dicts and the same "
            "flags; only the sizes of tensors, and numbers, may change.",
            fix="Call the model alike for every micro-batch.",
        )


def user_line() -> str:
    """File and line of the innermost frame that is neither torch's nor of this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_users_file(file: str) -> bool:
    """Whether a frame of this file may be shown as the place of a fault."""
    return not file.startswith((_HERE, _TORCH, "<"))


def _reads(name: str, why: str) -> RecipeError:
    return RecipeError(
        f"the loss uses model.{name}, which it cannot in a pipeline",
        where=user_line(),
        why=f"Each rank holds only its stage of the model. {why}",
        fix="Compute what the loss needs in the model's forward and return it with the output.",
    )
