"""Validation through a pipeline: forwards alone, the model in eval mode, no gradients.

Invariant: the sums over all pipelines are those that one process finds, whatever the number of
samples and of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from headway.data import MicroBatch
from headway.parallel import Calls, Pipeline, Stages, Team
from headway.parallel.row import forwards
from headway.run.parts import sum_and_count
from headway.run.recipe import Loss
from headway.schedule import Action, PipelineSchedule


class StageEvaluation:
    """One rank's part of it.

    Args:
        stages: Of the model.
        table: The lowered table of a step; its forwards are used.
        team: The ranks.
        loss: The recipe's.
        arithmetic: The context of a forward pass (autocast).
        doing: Told the action for which this rank is about to wait.
    """

    def __init__(
        self,
        stages: Stages,
        table: PipelineSchedule,
        team: Team,
        *,
        loss: Loss,
        arithmetic: Callable[[], AbstractContextManager[Any]],
        doing: Callable[[Action], None],
    ) -> None:
        self._most = table.num_microbatches
        self._micros: tuple[MicroBatch, ...] = ()
        self._totals = torch.zeros(3, dtype=torch.float64)
        calls = Calls(
            loss=loss, share=self._add, around=lambda *_: arithmetic(), doing=doing, step=None
        )
        self._pipeline = Pipeline(stages, forwards(table, self._most), team, calls)

    def run(self, micros: tuple[MicroBatch, ...], prepare: Callable[[Any], Any]) -> Tensor:
        """Sums over the micro-batches that end on this rank: loss, what it is over, samples.

        Args:
            micros: Of this rank's pipeline, the same on all its ranks; any number of them.
            prepare: Puts the data of a micro-batch on the device.
        """
        self._totals = torch.zeros(3, dtype=torch.float64)
        for first in range(0, len(micros), self._most):
            self._micros = micros[first : first + self._most]
            self._pipeline.evaluate([prepare(micro.data) for micro in self._micros])
        self._micros = ()
        return self._totals

    def _add(self, value: Any, microbatch: int) -> Tensor:
        samples = len(self._micros[microbatch].positions)
        total, count = sum_and_count(value, samples)
        found = float(total), float(count), samples
        self._totals += torch.tensor(found, dtype=torch.float64)
        return total
