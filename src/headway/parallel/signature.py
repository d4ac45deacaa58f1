"""What the sizes of messages between stages depend on, known to every rank without asking.

All ranks read the batch, so the shapes of a micro-batch, the model's mode and which parameters are
trained are a key under which both ends of a link remember a layout. Data whose shapes cannot be
seen (objects of the user's) gets a new key every time, and so its layouts are announced.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.parallel.structure import flatten

_PLAIN = (int, float, complex, str, bytes, type(None))


class Signatures:
    """Makes keys that are equal on all ranks.

    Args:
        model: The whole model.

    Attributes:
        unseen: Keys of the last step that will not come again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers = itertools.count()
        self.unseen: list[Hashable] = []

    def of(self, microbatches: Sequence[Any]) -> list[Hashable]:
        """A key for each micro-batch of a step."""
        state = (
            self._model.training,
            torch.is_grad_enabled(),
            tuple(p.requires_grad for p in self._model.parameters()),
        )
        self.unseen = []
        common = hash(state)
        return [self._key(common, data) for data in microbatches]

    def _key(self, common: int, data: Any) -> Hashable:
        leaves, _ = flatten(data, lambda _: True)
        if any(not isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            self.unseen.append((common, next(self._numbers)))
            return self.unseen[-1]
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
        return common, tuple(shapes)
