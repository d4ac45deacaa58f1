"""How a model is cut into stages, and in which order micro-batches go through them.

The pipeline's ranks lie on the mesh axis "pipe". The schedule is a name and its options, or a table
that the user wrote; both become the same `PipelineSchedule`. Invariant: the plan alone says who
does what in which order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from headway.documents import document
from headway.errors import DocumentError, PlanError, UsageError
from headway.schedule import PipelineSchedule
from headway.schedule.check import check_schedule
from headway.schedule.named import make_schedule
from headway.schedule.table import from_csv

AXIS = "pipe"


@document
class Pipeline:
    """Cut and schedule; without an axis "pipe" of more than one rank it has no effect.

    Attributes:
        schedule: A name of `headway schedule list`.
        microbatches: Of one pipeline in one step; None: twice its ranks, where there are samples.
        virtual: Of looped schedules: stages per rank.
        pipes: Of Chimera: pipes at once, half of them in each direction.
        mode: Of Chimera: how it goes on where there are more micro-batches than ranks.
        sync: When the gradients of a stage's copies are summed.
        recompute: Backward computes the forward again, and activations are not kept; None: as the
            schedule has it (only Chimera's doubling does).
        cut: Names of the modules with which the second and all later stages begin; empty: stages
            of about equal numbers of parameters.
        table: The CSV text of a schedule, in place of its name.
    """

    schedule: str = "1f1b"
    microbatches: int | None = None
    virtual: int = 2
    pipes: int = 2
    mode: Literal["direct", "doubling", "halving"] = "direct"
    sync: Literal["post", "eager", "eager-opt"] = "eager-opt"
    recompute: bool | None = None
    cut: tuple[str, ...] = ()
    table: str = ""

    def make(self, ranks: int, parts: int) -> PipelineSchedule:
        """The schedule of a step.

        Args:
            ranks: Of the pipeline.
            parts: Micro-batches that there are; in a ragged batch fewer than planned.

        Raises:
            PlanError: There is none with these numbers; the table is not valid.
            UsageError: No schedule has this name.
            DocumentError: The table cannot be read.
        """
        found = self._written(ranks, parts) if self.table else self._named(ranks, parts)
        return found if self.recompute is None else replace(found, recompute=self.recompute)

    def _named(self, ranks: int, parts: int) -> PipelineSchedule:
        number, mode = parts, self.mode
        if self._halves:
            if parts % 2:  # a ragged batch
                mode = "direct"
            else:
                number = parts // 2
        name = "chimera" if mode != self.mode else self.schedule
        return make_schedule(
            name,
            stages=ranks,
            microbatches=number,
            virtual=self.virtual,
            pipes=self.pipes,
            mode=mode,
        )

    @property
    def _halves(self) -> bool:
        return self.schedule == "chimera-halving" or (
            self.schedule == "chimera" and self.mode == "halving"
        )

    def _written(self, ranks: int, parts: int) -> PipelineSchedule:
        schedule = from_csv(self.table, where="pipeline.table")
        check_schedule(schedule)
        problems = []
        if schedule.ranks != ranks:
            problems.append(f"the table has {schedule.ranks} ranks; the plan's pipeline {ranks}")
        if schedule.num_microbatches != parts:
            problems.append(
                f"the table has {schedule.num_microbatches} micro-batches; this batch gives {parts}"
            )
        if problems:
            raise PlanError(
                "the schedule's table does not fit",
                problems=problems,
                fix="Set pipeline.microbatches to the table's, and drop_last = true.",
            )
        return schedule

    def parts(self, ranks: int, samples: int) -> int:
        """Micro-batches of one step, where a pipeline has so many samples."""
        if self.table:
            return from_csv(self.table, where="pipeline.table").num_microbatches
        wanted = self.microbatches or 2 * ranks
        return min(wanted * (2 if self._halves else 1), samples)

    def problems(self, ranks: int, parts: int) -> list[str]:
        """Every reason why this pipeline cannot be, one line each; empty if it can."""
        found = []
        if self.microbatches is not None and self.microbatches < 1:
            return [f"pipeline.microbatches is {self.microbatches}; at least 1"]
        try:
            schedule = self.make(ranks, parts)
        except (PlanError, DocumentError) as error:
            return [f"pipeline: {problem}" for problem in error.problems]
        except UsageError as error:
            return [f"pipeline.schedule: {error.what}"]
        if not schedule.flush:
            found.append(
                f"pipeline.schedule {schedule.name} steps without a flush; training makes one step "
                "for all stages at its end: use one with a flush, such as 1f1b"
            )
        if self.cut and len(self.cut) != schedule.stages - 1:
            found.append(
                f"pipeline.cut has {len(self.cut)} names; {schedule.stages} stages need "
                f"{schedule.stages - 1}"
            )
        return found
