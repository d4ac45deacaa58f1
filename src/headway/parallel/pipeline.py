"""Carries out one rank's part of a pipeline schedule: the executor for all tables.

What the table says is all that happens; this file knows no schedule by name. A step is one pass
over the row of this rank, made into bound calls once (`row`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.errors import PlanError
from headway.parallel.row import Calls, Row, Team, forwards
from headway.parallel.sharded import hold, reshard, unfit
from headway.parallel.stages import Stages
from headway.schedule import Action, PipelineSchedule
from headway.schedule.lowering import lower


class Pipeline:
    """One rank of a pipeline.

    Args:
        stages: Of the model; cut alike on all ranks.
        schedule: A checked table; messages are added where it has none.
        team: The ranks.
        calls: The user's and the caller's functions.

    Raises:
        PlanError: The table is for other stages, or needs what `calls` does not have.

    Attributes:
        remarks: What was set on the model for it to be right, for users to read.
    """

    def __init__(
        self, stages: Stages, schedule: PipelineSchedule, team: Team, calls: Calls
    ) -> None:
        self.stages = stages
        self.schedule = schedule if schedule.is_lowered else lower(schedule)
        _check(self.schedule, stages, team, calls)
        self._hosted = [stages[n] for n in sorted({n for _, n in schedule.hosted(team.rank)})]
        self.remarks = hold(self._hosted)
        self._team = team
        self._calls = calls
        self._training = Row(stages, self.schedule, team, calls)
        self._evaluating: dict[int, Row] = {}

    def run(self, microbatches: Sequence[Any]) -> dict[int, Tensor]:
        """One step: all actions of the row.

        Args:
            microbatches: The data of all micro-batches of the table, on every rank.

        Returns:
            Micro-batch -> what `share` made, of those whose last stage is on this rank.

        Raises:
            Stalled: Another rank does not come in time; names the cell in which this one stands.
            PeerLost: Another rank vanished.
        """
        wanted = self.schedule.num_microbatches
        if len(microbatches) != wanted:
            raise ValueError(f"{len(microbatches)} micro-batches for a table of {wanted}")
        return self._training.run(microbatches)

    def evaluate(self, microbatches: Sequence[Any]) -> dict[int, Tensor]:
        """The forwards alone, without gradients; returns what `run` does.

        Args:
            microbatches: At most as many as the table has; the model is in eval mode.

        Raises:
            Stalled: As of `run`.
            PeerLost: As of `run`.
        """
        count = len(microbatches)
        if count not in self._evaluating:
            self._evaluating[count] = Row(
                self.stages.evaluating or self.stages,
                forwards(self.schedule, count),
                self._team,
                self._calls,
            )
        with torch.no_grad():
            losses = self._evaluating[count].run(microbatches)
        for stage in self._hosted:
            reshard(stage.module)
        return losses

    @property
    def spans(self) -> list[tuple[Action, float, float]]:
        """The actions of the last step with start and end, in `perf_counter` seconds."""
        return self._training.spans

    @property
    def times(self) -> Sequence[float]:
        """When each action of this rank's row began; see `Row.times`."""
        return self._training.times

    def message_bytes(self, action: Action) -> int:
        """Of a SEND or RECV of this rank, as last seen."""
        return self._training.message_bytes(action)


def _check(schedule: PipelineSchedule, stages: Stages, team: Team, calls: Calls) -> None:
    problems = stages.unlike(schedule)
    if not problems and (missing := sorted(set(stages.edges) - set(schedule.edges))):
        problems += [
            f"it does not say that stage {a} gives values to stage {b}" for a, b in missing
        ]
    problems += calls.lacking(schedule, team.rank)
    if not schedule.flush and stages.shared:
        names = ", ".join(stages.shared)
        problems.append(
            f"it has no flush, and {names} would need one: several stages use it; take a schedule "
            "that ends with a flush, as 1f1b does"
        )
    problems += unfit(schedule, stages, team.rank)
    if problems:
        raise PlanError(
            f"the schedule {schedule.name} does not fit",
            problems=problems,
            fix="Make the table for this cut (skips = stages.skips), or cut the model elsewhere.",
        )
