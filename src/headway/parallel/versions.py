"""The weights of a stage under several versions at once, for schedules without a flush.

The live parameters are always the newest version. One that is still needed when the optimiser's
step comes (a backward is under way with it) keeps the old memory, and the live parameters get new
memory before the step: no version exists twice. Gradients always end in the live parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

LIVE = -1


class Versions:
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
            version: Of the weights, or LIVE.
            values: Its arguments.
            buffers: Used, and changed, in place of its own: it is run for the second time.
        """
        if version == LIVE and not buffers:
            return self._module.forward(*values)
        weights = {} if version == LIVE else self._weights(version)
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
        """The live parameters are about to change; keep this version unless it is LIVE."""
        if version != LIVE:
            self._weights(version)
            for parameter in self._live.values():
                parameter.data = parameter.data.clone()

    def drop(self, version: int) -> None:
        """Nothing will use this version again."""
        self._kept.pop(version, None)
