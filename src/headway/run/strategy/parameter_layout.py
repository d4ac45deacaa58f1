"""What strategies and checkpoints ask of parameters that a rank does not hold as they are saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from headway.run.strategy.growing_tables import GrowingTables


class ParameterLayout(Protocol):
    """How this rank holds the parameters of a split model.

    Attributes:
        named: Logical name -> parameter, as the optimiser has it.
    """

    @property
    def growing(self) -> GrowingTables | None:
        """Tables without a number of rows; None: the model has none."""

    @property
    def named(self) -> Mapping[str, nn.Parameter]: ...

    def follow(self) -> None:
        """Adopt what the user has frozen or thawed."""

    def clear(self) -> None:
        """Drop gradients that no reducer drops."""

    def collect(self, trained: Mapping[str, nn.Parameter], *, reuse: bool) -> None:
        """Give the optimiser's parameters their gradients; see `HeldParameters.collect`."""

    def scale(self, factor: float) -> None:
        """Multiply the gradients that no reducer sums."""

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        """What has the form of a parameter, or numbers of its rows, as a checkpoint has it: a
        DTensor or a `TensorPart` in the order of the unsplit model; collective."""

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `logical`; of a plain whole tensor this rank's part."""

    def complete(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of it, on every rank; collective."""

    def saved(self, name: str, tensor: Tensor) -> Tensor:
        """What `state_dict` gives of a parameter or buffer, as a checkpoint has it; collective."""

    def target(self, name: str, tensor: Tensor) -> Tensor:
        """Where a parameter or buffer is read to: itself, or new memory of its form in a
        checkpoint; on the meta device where this rank reads nothing of it."""

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """New memory for this rank's part of something of a parameter that a checkpoint has in this
        shape; None: no different from what a rank without a layout takes."""
