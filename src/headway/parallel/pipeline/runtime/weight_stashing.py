"""Weight stashing: several versions of a stage's weights, for schedules without a flush.

After Narayanan et al. 2019 (PipeDream): a backward uses the weights of its forward. The live
parameters are always the newest version. One that is still needed when the optimiser steps
keeps the old memory, and the live parameters get new memory before the step: no version exists
twice. Gradients always end in the live parameters.

Which version an action uses is known from the schedule table before anything runs. Only a
version that an action behind its STEP still uses is kept, so schedules with a flush pay
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from headway.schedule.pipeline_schedule import (
    COMPUTE_KINDS,
    NO_NUMBER,
    Action,
    ActionKind,
    PipelineSchedule,
)

LIVE_VERSION = -1


class WeightVersions:
    """Of one stage on this rank.

    Args:
        module: Of a stage. Its parameters are changed by an optimiser, at the times of
            `begin_step`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._live = dict(module.named_parameters())
        self._kept: dict[int, dict[str, Tensor]] = {}

    def call(
        self, version: int, values: Sequence[Any], *, buffers: Mapping[str, Tensor] | None = None
    ) -> Any:
        """Run the stage.

        Args:
            version: Of the weights, or LIVE_VERSION.
            buffers: Used, and changed, in place of its own: it is run for the second time.
        """
        if version == LIVE_VERSION and not buffers:
            return self._module.forward(*values)
        weights = {} if version == LIVE_VERSION else self._weights(version)
        return functional_call(self._module, {**weights, **(buffers or {})}, tuple(values))

    def buffers(self) -> dict[str, Tensor]:
        """Copies, for a second run."""
        return {name: buffer.clone() for name, buffer in self._module.named_buffers()}

    def _weights(self, version: int) -> dict[str, Tensor]:
        """Of a version; made of the live ones while it is the newest."""
        if version not in self._kept:
            # `.data` shares the memory and not the count of changes: after the step that memory is
            # this version's alone.
            self._kept[version] = {
                name: p.data.requires_grad_(p.requires_grad) for name, p in self._live.items()
            }
        return self._kept[version]

    def collect(self, version: int) -> None:
        """Add the gradients of a version to those of the live parameters."""
        for name, weight in self._kept.get(version, {}).items():
            if weight.grad is not None:
                live = self._live[name]
                live.grad = weight.grad if live.grad is None else live.grad.add_(weight.grad)
                weight.grad = None

    def begin_step(self, version: int) -> None:
        """The live parameters are about to change; keep this version unless it is LIVE_VERSION."""
        if version != LIVE_VERSION:
            self._weights(version)
            # The version keeps the old memory. New memory, and not a new Parameter: the optimiser
            # refers to that.
            for parameter in self._live.values():
                parameter.data = parameter.data.clone()

    def drop(self, version: int) -> None:
        self._kept.pop(version, None)


# Which weights each action of a row uses, known from the table before anything runs.


_PipeStage = tuple[str, int]


class WeightVersionPlan:
    """Of one rank's row."""

    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        newest: dict[_PipeStage, int] = {}
        self._used: dict[int, int] = {}
        self._last: dict[tuple[_PipeStage, int], int] = {}
        self._end: dict[tuple[_PipeStage, int], int] = {}
        forward: dict[tuple[_PipeStage, int], int] = {}
        self._row = schedule.order[rank]
        for position, action in enumerate(self._row):
            key = action.pipe, action.stage
            now = newest.setdefault(key, 0)
            if action.kind == ActionKind.STEP:
                # A STEP ends the version that it finds; the one that it makes is the next.
                self._used[position] = now
                self._end[key, now] = position
                newest[key] = now + 1
            elif action.kind in COMPUTE_KINDS:
                if action.kind == ActionKind.FORWARD:
                    # Tables without a flush name the version: PipeDream-2BW does not take the
                    # newest.
                    given = now if action.version == NO_NUMBER else action.version
                    forward[key, action.microbatch] = given
                version = forward[key, action.microbatch]
                self._used[position] = version
                self._last[key, version] = position

    def version(self, position: int) -> int:
        """Of the weights that a compute action uses, or that a STEP ends.

        LIVE_VERSION: the live ones, or nothing uses it any more.
        """
        action, version = self._row[position], self._used[position]
        return version if self._is_kept(action, version) else LIVE_VERSION

    def dropped(self, position: int) -> list[int]:
        """Versions of a compute action's stage that nothing uses behind it."""
        action, version = self._row[position], self._used[position]
        last = self._last[(action.pipe, action.stage), version] == position
        return [version] if last and self._is_kept(action, version) else []

    def _is_kept(self, action: Action, version: int) -> bool:
        key = (action.pipe, action.stage), version
        # A version that no STEP of the row ends stays the live one.
        return self._last.get(key, NO_NUMBER) > self._end.get(key, len(self._row))
