"""How a model is cut into stages, and in which order micro-batches go through them.

The pipeline's ranks lie on the mesh axis "pipe". The schedule is a name and its options, or a table
that the user wrote; both become the same `PipelineSchedule`. Invariant: the plan alone says who
does what in which order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator

from headway.documents import document, nearest
from headway.errors import DocumentError, PlanError
from headway.keywords import checks_keywords
from headway.schedule.check import check_schedule
from headway.schedule.csv_format import from_csv
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.pipeline_schedule import PipelineSchedule, common_update_groups

PIPE_AXIS = "pipe"


def _name(value: str) -> str:
    if value not in SCHEDULES:
        raise ValueError(f"no schedule {value!r}{nearest(value, list(SCHEDULES))}")
    return value


def _whole(value: int) -> int:
    if value < 1:
        raise ValueError(f"{value} is not a whole number of at least 1")
    return value


@checks_keywords
@document
class PipelinePlan:
    """Cut and schedule of a pipeline; without effect unless the axis "pipe" has several ranks.

    Attributes:
        schedule: A name of `headway schedule list`.
        microbatches: Of one pipeline in one step; None: twice its ranks, where there are samples.
        virtual: Of looped schedules: stages per rank.
        pipes: Of Chimera: pipes at once, half of them in each direction.
        mode: Of Chimera: how it goes on where there are more micro-batches than ranks.
        sync: When the gradients of a stage's copies are summed.
        recompute: What backward computes again, in place of keeping activations: "stages" (or
            true): a whole stage, from its inputs; "blocks": the modules that it calls, one at a
            time, each from its own inputs; false: nothing. None: as the schedule has it (of those
            with a name only Chimera's doubling does).
        recompute_stages: The stages that do so, from 0; empty: all.
        cut: Names of the modules with which the second and all later stages begin; empty: stages
            of about equal weight.
        balance: What the weight of a stage is: its number of parameters, or the time that its
            forward and backward take, which rank 0 measures when the model is cut.
        by_hand: "module:function", for a model whose forward cannot be followed: from the model it
            makes the chain of stages, for each a list of modules that are called one after the
            other (`headway.parallel.cut_module_chain`).
        table: The CSV text of a schedule, in place of its name.
        shared_memory: Ranks of one machine hand values and gradients over in memory that both
            share; else, and between machines and on GPUs, over the process group.
    """

    schedule: Annotated[str, AfterValidator(_name)] = "1f1b"
    microbatches: Annotated[int, AfterValidator(_whole)] | None = None
    virtual: int = 2
    pipes: int = 2
    mode: Literal["direct", "doubling", "halving"] = "direct"
    sync: Literal["post", "eager", "eager-opt"] = "eager-opt"
    recompute: bool | Literal["stages", "blocks"] | None = None
    recompute_stages: tuple[int, ...] = ()
    cut: tuple[str, ...] = ()
    balance: Literal["parameters", "time"] = "parameters"
    by_hand: str = ""
    table: str = ""
    shared_memory: bool = True

    def make(self, ranks: int, parts: int) -> PipelineSchedule:
        """The schedule of a step.

        Args:
            parts: Micro-batches that there are; in a ragged batch fewer than planned.

        Raises:
            PlanError: There is none with these numbers; the table is not valid.
            UsageError: No schedule has this name.
            DocumentError: The table cannot be read.
        """
        found = self._written(ranks, parts) if self.table else self._named(ranks, parts)
        if self.recompute is None:
            return found
        again = tuple(sorted(set(self.recompute_stages))) or found.every_stage
        return replace(
            found,
            recompute=again if self.recompute else (),
            blockwise=self.recompute == "blocks",
        )

    def _named(self, ranks: int, parts: int) -> PipelineSchedule:
        name, number, mode = self.schedule, parts, self.mode
        if self._halves:
            # Halving doubles the planned micro-batches, so a whole batch has an even number.
            if parts % 2:  # a ragged batch
                name, mode = SCHEDULES[name].variant_of or name, "direct"
            else:
                number = parts // 2
        return make_schedule(
            name,
            stages=ranks,
            microbatches=number,
            virtual=self.virtual,
            pipes=self.pipes,
            mode=mode,
        )

    @property
    def mode_of_schedule(self) -> str:
        """Chimera's mode, which the schedule's name may fix; "direct" for all other schedules."""
        kind = SCHEDULES.get(self.schedule)
        if kind is None:  # `problems` refuses it and names the nearest schedule
            return "direct"
        return kind.mode or (self.mode if "mode" in kind.options else "direct")

    @property
    def _halves(self) -> bool:
        return self.mode_of_schedule == "halving"

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
        """Micro-batches of one step of a pipeline with this many samples."""
        if self.table:
            return from_csv(self.table, where="pipeline.table").num_microbatches
        wanted = self.microbatches or 2 * ranks
        return min(wanted * (2 if self._halves else 1), samples)

    def problems(self, ranks: int, parts: int) -> list[str]:
        """Every problem of this pipeline, one line each; empty if it is legal."""
        found = self._contradictions()
        try:
            schedule = self.make(ranks, parts)
        except (PlanError, DocumentError) as error:
            return [*found, *(f"pipeline: {problem}" for problem in error.problems)]
        if not schedule.flush and common_update_groups(schedule) is None:
            found.append(
                f"pipeline.schedule {schedule.name}: its stages make their STEPs after different "
                "micro-batches, so the loss of an update is not defined; STEP after the same ones"
            )
        if self.cut and len(self.cut) != schedule.stages - 1:
            found.append(
                f"pipeline.cut has {len(self.cut)} names; {schedule.stages} stages need "
                f"{schedule.stages - 1}"
            )
        found.extend(
            f"pipeline.recompute_stages names stage {stage}; there are stages 0 to "
            f"{schedule.stages - 1}"
            for stage in self.recompute_stages
            if not 0 <= stage < schedule.stages
        )
        return found

    def _contradictions(self) -> list[str]:
        said = {
            "cut": self.cut,
            'balance = "time"': self.balance == "time",
            "by_hand": self.by_hand,
        }
        ways = [name for name, is_said in said.items() if is_said]
        found = []
        if len(ways) > 1:
            found.append(f"pipeline: {' and '.join(ways)} each say where to cut; keep one of them")
        module, _, function = self.by_hand.partition(":")
        if self.by_hand and not (module and function):
            found.append(f"pipeline.by_hand is {self.by_hand!r}; it has the form module:function")
        if self.recompute_stages and not self.recompute:
            found.append(
                "pipeline.recompute_stages says where; say what, too: "
                'recompute = "stages" or "blocks"'
            )
        return found
