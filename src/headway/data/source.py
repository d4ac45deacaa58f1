"""Where samples come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Source(Protocol):
    """Random access to samples; knows nothing about ranks, order or batches."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def read(self, indices: Sequence[int]) -> Any:
        """The samples at `indices` as one batch: tensors (or tuples, lists, dicts of tensors) whose
        dimension 0 has one entry per index."""
        ...
