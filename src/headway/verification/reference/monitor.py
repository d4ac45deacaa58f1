"""What a checkpoint must know of the monitored metric, worked out from the validations alone.

Early stopping is switched off in proofs: all runs make the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headway.run.recipe.recipe import Recipe


class SerialMonitor:
    """The validations so far."""

    def __init__(self, recipe: Recipe, scheduler: LRScheduler | None) -> None:
        self.plateau = scheduler if isinstance(scheduler, ReduceLROnPlateau) else None
        self._recipe = recipe
        self._seen: list[tuple[int, float]] = []

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a validation."""
        value = values.get(self._recipe.monitor, float("nan"))
        self._seen.append((step, value))
        if self.plateau is not None:
            self.plateau.step(value)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must say; nothing where nothing is monitored."""
        if not (self.plateau or self._recipe.keep_best):
            return {}
        numbers = [(value, -step) for step, value in self._seen if value == value]
        pick = min if self._recipe.monitor_mode == "min" else max
        # Of equal values the first one is the best.
        best = pick((value for value, _ in numbers), default=None)
        first = min((-step for value, step in numbers if value == best), default=None)
        later = [step for step, _ in self._seen if first is None or step > first]
        last = self._seen[-1][0] if self._seen else 0
        state = {"best": best, "best_step": first, "bad": len(later), "validated": last}
        return {"monitor": state}
