"""The stages of a model beside the model itself, on one micro-batch, in one process.

Values are copied on their way from stage to stage, as messages are; so whatever a cut would change
silently (a value altered in place, state outside of modules) shows as another output here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.capture.fake import is_stand_in
from headway.errors import PlanError
from headway.parallel.examples import left_as_it_was
from headway.parallel.stages import INPUT, Stage, Stages
from headway.parallel.standin import ModelCall
from headway.parallel.structure import flatten, is_payload

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""By type, relative to the largest element; 1e-2 for the others: sums in another order."""


def check_agreement(stages: Stages, call: ModelCall) -> Stages:
    """The stages with what has been seen of them: whether they alter inputs, update buffers.

    Args:
        stages: Of a model in the mode that they were cut for.
        call: The example.

    Raises:
        PlanError: The output is not the model's, or two stages update one buffer.
    """
    model = stages.model
    with torch.no_grad():
        with left_as_it_was(model):
            args, kwargs = call.arguments(_copies(call.leaves))
            expected = model(*args, **kwargs)
        with left_as_it_was(model):
            found, alters, updates = _run(stages, call)
    problem = _difference(expected, found)
    if problem:
        raise PlanError(
            f"cut like this, {type(model).__name__} computes something else",
            problems=[f"the output of the stages differs from the model's: {problem}"],
            fix="Look for values that are changed in place after a cut, or for state outside of "
            "modules; or cut elsewhere.",
        )
    _check_buffers(stages, updates)
    return stages.with_flags(alters, {n: bool(names) for n, names in updates.items()})


def run_stages(
    stages: Stages, call: ModelCall, *, before: Callable[[int], None] = lambda _: None
) -> Any:
    """The output of the stages, one after the other in this process.

    Args:
        stages: Of a model.
        call: What it is called with.
        before: Called with the number of each stage before it is run.
    """
    return _run(stages, call, before)[0]


def _run(
    stages: Stages, call: ModelCall, before_stage: Callable[[int], None] = lambda _: None
) -> tuple[Any, dict[int, bool], dict[int, set[str]]]:
    """The output; for each stage whether it alters what enters it; which buffers it updates."""
    given: list[Sequence[Any]] = []
    alters: dict[int, bool] = {}
    updates: dict[int, set[str]] = {}
    for stage in stages:
        before_stage(stage.number)
        values = _copies(_entering(stage, given, call))
        inside = flatten(list(values), is_payload)[0]
        _check_whole(stage.number, inside)
        before = [t._version for t in inside if isinstance(t, Tensor)]
        versions = {name: buffer._version for name, buffer in stage.buffers.items()}
        given.append(stage.module.forward(*values))
        after = [t._version for t in inside if isinstance(t, Tensor)]
        alters[stage.number] = before != after
        updates[stage.number] = {
            name for name, buffer in stage.buffers.items() if buffer._version != versions[name]
        }
    return given[-1], alters, updates


def _check_whole(stage: int, entering: Sequence[Any]) -> None:
    if any(isinstance(value, DTensor) for value in entering):
        raise PlanError(
            "the model cannot be cut there",
            problems=[f"a DTensor enters stage {stage}, and its parts cannot be sent"],
            fix="Let the module before it return plain tensors (use_local_output=True).",
        )


def _entering(stage: Stage, given: list[Sequence[Any]], call: ModelCall) -> tuple[Any, ...]:
    return tuple(
        call.leaves[entry.leaf] if entry.source == INPUT else given[entry.source][entry.leaf]
        for entry in stage.takes
    )


def _copies(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values with tensors of their own."""
    leaves, structure = flatten(list(values), is_payload)
    return tuple(structure.rebuild([v.clone() if isinstance(v, Tensor) else v for v in leaves]))


def _check_buffers(stages: Stages, updates: dict[int, set[str]]) -> None:
    for name in {name for names in updates.values() for name in names}:
        holders = [stage.number for stage in stages if name in stage.buffers]
        if len(holders) > 1:
            raise PlanError(
                "the model cannot be cut there",
                problems=[
                    f"the buffer {name} is updated in the forward, and the stages {holders} use it"
                ],
                fix="Cut so that all calls of its module are in one stage.",
            )


def _difference(expected: Any, found: Any) -> str:
    """How two outputs differ; empty if they do not."""
    a, shape = flatten(expected, lambda _: True)
    b, other = flatten(found, lambda _: True)
    if shape != other or len(a) != len(b):
        return "it is put together in another way"
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x, Tensor):
            if not isinstance(y, Tensor) or x.shape != y.shape or x.dtype != y.dtype:
                return f"tensor {number} has another shape or type"
            if not _close(x, y):
                return f"tensor {number} by up to {float((x - y).abs().max()):.1e}"
        elif is_payload(x) and x != y:
            return f"number {number} is {y} in place of {x}"
    return ""


def _close(x: Tensor, y: Tensor) -> bool:
    if not x.numel() or is_stand_in(x) or torch.equal(x, y):
        return True
    if not (x.is_floating_point() or x.is_complex()):
        return False
    largest = float(x.abs().nan_to_num(0.0, posinf=1.0).max())
    return torch.allclose(
        x, y, rtol=0.0, atol=TOLERANCE.get(x.dtype, 1e-2) * largest, equal_nan=True
    )
