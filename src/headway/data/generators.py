"""The global random generators of a process: torch (CPU), numpy and random."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class Generators:
    """The state of the three generators at one moment: were they used since, and put it back.

    Taking and comparing it costs about 0.2 ms each, most of it numpy's.
    """

    def __init__(self) -> None:
        self._state = _now()
        self._moved = True

    def used(self) -> bool:
        """Whether any of the generators has moved."""
        self._moved = not _same(self._state, _now())
        return self._moved

    def seed(self, seed: int) -> None:
        """Start the generators from 64 bits.

        Not with `torch.manual_seed`: that also seeds every accelerator, or queues doing so, on each
        call.
        """
        self._moved = True
        torch.default_generator.manual_seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        random.seed(seed)

    def restore(self) -> None:
        """Put the generators back, unless `used` has just said that they did not move."""
        if self._moved:
            torch.set_rng_state(self._state["torch"])
            np.random.set_state(self._state["numpy"])
            random.setstate(self._state["python"])


def _now() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def _same(one: Any, other: Any) -> bool:
    """Equality of nested states; tuples compare whole, which is fast for Python's 625 words."""
    if isinstance(one, dict):
        return all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
