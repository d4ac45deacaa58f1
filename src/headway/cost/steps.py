"""Training steps as a table: what was measured, or what is to be predicted.

Invariant: `take` and `spread` depend on the plans alone, never on measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cost.device import Array
from headway.cost.transformer import Split, Transformer


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of plans; fields are arrays of one length, or numbers that all share.

    Attributes:
        model: What is trained.
        split: How.
    """

    model: Transformer
    split: Split

    def __len__(self) -> int:
        """How many; all numbers: 1."""
        return max(int(np.size(value)) for value in self._values().values())

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> Steps:
        """Some of them, by number."""

        def part(item: Transformer | Split) -> dict[str, Any]:
            values = {field.name: getattr(item, field.name) for field in fields(item)}
            return {k: np.asarray(v)[rows] if np.ndim(v) else v for k, v in values.items()}

        return Steps(model=Transformer(**part(self.model)), split=Split(**part(self.split)))

    def shapes(self) -> Array:
        """What the time of a layer depends on (h, a, s, ffn, b, t), as logarithms to base 2."""
        return self._logarithms(
            "hidden", "heads", "sequence", "ffn", "microbatch", "tensor", "sequence_parallel"
        )

    def spread(self, count: int) -> list[int]:
        """The numbers of `count` steps that differ most, which are worth to be measured.

        Each next one is farthest from those before, in doublings; of equals the first. The first
        one is that in the middle.
        """
        places = np.concatenate(
            [self.shapes(), self._logarithms("layers", "microbatches", "data", "pipeline")], axis=1
        )
        middle = np.abs(places - np.median(places, axis=0)).sum(axis=1)
        chosen = [int(np.argmin(middle))]
        apart = np.full(len(self), np.inf)
        while len(chosen) < min(count, len(self)):
            apart = np.minimum(apart, np.abs(places - places[chosen[-1]]).sum(axis=1))
            chosen.append(int(np.argmax(apart)))
        return chosen

    def _values(self) -> dict[str, Any]:
        items = (self.model, self.split)
        return {f.name: getattr(item, f.name) for item in items for f in fields(item)}

    def _logarithms(self, *names: str) -> Array:
        values = self._values()
        columns = [np.broadcast_to(np.asarray(values[name]), (len(self),)) for name in names]
        return np.stack(
            [column * 1.0 if column.dtype == bool else np.log2(column) for column in columns],
            axis=1,
        )
