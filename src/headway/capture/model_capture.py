"""`capture`: any torch.nn.Module as a `ModelGraph`, without allocating its tensors.

The forward is traced with fake tensors (`aten_trace`), then replayed call by call to learn what
autograd saves and needs (`operator_recorder`). Models with long stacks of equal blocks are traced
with a few blocks of each (`block_stacks`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from headway.capture.block_stacks import capture_by_blocks
from headway.capture.fake_tensors import DataIndependentValues, FakeContext
from headway.capture.operator_recorder import record_graph
from headway.errors import PlanError
from headway.graph.model_graph import ModelGraph
from headway.user_frames import innermost_user_frame

Loss = Callable[[nn.Module, Any], Any]


class _Called(nn.Module):
    """The model, and how it is called: a loss of the recipe, or the arguments of its forward."""

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, example: Any) -> Any:
        if self.loss is not None:
            return self.loss(self.model, example)
        if isinstance(example, dict):
            return self.model(**example)
        return self.model(*example) if isinstance(example, tuple | list) else self.model(example)


def capture(model: nn.Module, example: Any, *, loss: Loss | None = None) -> ModelGraph:
    """The graph of a model's forward, with what its backward costs and keeps.

    Nothing is allocated and nothing computed: a model on the meta device serves as well as a real
    one. It is captured in its mode (training or not) and stays as it is.

    Args:
        example: What `loss` gets as its data; without a loss, the arguments of the model: a tensor,
            a tuple, or a table of keywords. Only shapes and types matter.
        loss: `loss(model, data)`; may return a tuple (sum, count).

    Raises:
        PlanError: The forward cannot be followed; it names the module and says what to do.
    """

    def called_with(fakes: FakeContext, spared: Collection[nn.Module] = ()) -> _Called:
        return _Called(fakes.model(model, spared), loss)

    few = capture_by_blocks(model, example, called_with)
    if few is not None:
        few.check()
        return few
    fakes = FakeContext()
    try:
        called = called_with(fakes)
    except Exception as error:
        raise _refusal(model, "", error) from error
    data = (fakes.tree(example),)
    try:
        graph = record_graph(called, data, fakes)
    except Exception as error:
        raise _refusal(model, _culprit(called, data, fakes), error) from error
    graph.check()
    return graph


def _culprit(called: _Called, data: tuple[Any, ...], fakes: FakeContext) -> str:
    """The innermost module whose forward raises when it is called with fake tensors."""
    inside: list[str] = []

    def leave(*_: Any) -> None:
        inside.pop()

    # Hooks that nobody removes: the copy of the model is thrown away.
    for name, module in called.model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        module.register_forward_hook(leave)
    try:
        with fakes.mode, torch.enable_grad(), DataIndependentValues():
            called(*data)
    except Exception:
        return inside[-1] if inside else ""
    return ""


def _refusal(model: nn.Module, module: str, error: Exception) -> PlanError:
    # The user's own line: those of torch and headway say nothing to them.
    frame = innermost_user_frame(traceback.extract_tb(error.__traceback__))
    line = f"{frame.filename}:{frame.lineno}" if frame else ""
    name = type(model).__name__
    kind = type(dict(model.named_modules()).get(module, model)).__name__
    who = f"module {module} ({kind}) of {name}" if module else f"the forward of {name}"
    problems = [f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"]
    if isinstance(error, TypeError) and "FakeTensor" in problems[0]:
        problems.insert(
            0,
            "torch takes a number from a tensor here, as a recurrent module does from the lengths "
            "of a packed sequence (pack_padded_sequence): give it padded sequences, and mask after "
            "it",
        )
    return PlanError(
        f"{who} cannot be captured",
        problems=problems,
        where=line,
        fix="A graph is followed without numbers: replace decisions by the numbers in a tensor "
        "(.item(), `if tensor`, masks of unknown length) by torch.where or by sizes, and give "
        "data as tensors in tuples, lists or tables.",
    )
