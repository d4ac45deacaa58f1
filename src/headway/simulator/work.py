"""The input of the step simulator: stages, their schedule, and how gradients are summed.

Seconds of stages are those of a healthy device; links and faults are priced when the step is
built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.cost.network import HierarchicalNetwork
from headway.errors import PlanError
from headway.schedule.lowering import SyncPlacement, lower
from headway.schedule.pipeline_schedule import MESSAGE_KINDS, PipelineSchedule
from headway.schedule.stage_costs import StageCosts
from headway.simulator.ranks import NO_FAULTS, RankGrid, StepFaults
from headway.simulator.table_work import TableWork


@dataclass(frozen=True, kw_only=True)
class StageSegment:
    """A stretch of a stage, in the order of the forward pass.

    Attributes:
        forward: Seconds of one micro-batch.
        backward: Seconds of one micro-batch, without what is computed again.
        params: Bytes of parameters, and of their gradients, on one device.
    """

    forward: float
    backward: float
    params: float


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """One stage on one tensor group, for one micro-batch of the plan.

    Attributes:
        forward: Seconds, with the collectives of the tensor axis.
        input_grad: Seconds of the gradient of what enters, with half of backward's collectives.
        weight_grad: Seconds of the gradients of the weights, with the other half.
        pieces: Its stretches; empty: it is one. They share out the seconds of the stage.
        leaving: (number of the piece whose backward makes the last of them, bytes) of each bucket
            of gradients, in order; empty: as `StepWork.bucket` says.
        collectives: Seconds of the tensor axis within forward, and within backward.
        message: Bytes that it hands to the next stage; gradients of the same size come back.
        params: Bytes of parameters, and of their gradients, on one device.
        step: Seconds of a step in which gradients of whole parameters are summed over the tensor
            axis.
        update: Seconds of the optimiser.
        host: Seconds of a step before its first pass: samples put together, and what the host does
            beside kernels; a rank with several stages does it once.
        state: Bytes of weights, gradients and optimiser.
        kept: Bytes of one micro-batch from its forward to its backward.
        again: Bytes that come with its backward and stay until its weight gradients are there.
        transient: Bytes while a backward runs.
        gradients: Of `state`, bytes that the first backward of a step makes; 0: they are always
            there.
        first: As `transient`, in that backward, beside its gradients; may be below 0.
        passing: Bytes while the optimiser runs.
    """

    forward: float
    input_grad: float
    weight_grad: float
    pieces: tuple[StageSegment, ...] = ()
    leaving: tuple[tuple[int, float], ...] = ()
    collectives: tuple[float, float] = (0.0, 0.0)
    message: float = 0.0
    params: float = 0.0
    step: float = 0.0
    update: float = 0.0
    host: float = 0.0
    state: float = 0.0
    kept: float = 0.0
    again: float = 0.0
    transient: float = 0.0
    gradients: float = 0.0
    first: float = 0.0
    passing: float = 0.0

    @property
    def early(self) -> float:
        """Bytes of state before the first backward."""
        return self.state - self.gradients

    @property
    def more(self) -> float:
        """Bytes beside the first backward's gradients, above what other backwards take."""
        return self.first - self.transient


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One step of all ranks.

    Attributes:
        table: Of one pipeline, without messages; a single stage where there is none.
        stages: Of one pipe of the table.
        sync: When the table sums the gradients of a stage.
        bucket: Bytes after which gradients leave while backward still makes others; 0: with every
            piece; None: a stage's together, where the table says so.
        zero: Stage of ZeRO over the data axis.
        overlap: Share of a sum under way that computation beside it does not feel.
        shared: All that a rank sends over one level of links shares them evenly; else each
            message to a rank, and the collectives, have their own stream.
        others: The stages of copies on other devices, or with other micro-batches; each holds the
            same parameters.
        variant: Of each copy of the pipeline: 0, it has `stages`; n, the n-th of `others`. Empty:
            all have `stages`.
        tables: Lookups in split tables, of a step without stages and tensor axis; None: none are
            split.
    """

    table: PipelineSchedule
    stages: tuple[StageWork, ...]
    grid: RankGrid
    network: HierarchicalNetwork
    sync: SyncPlacement = "eager-opt"
    bucket: float | None = None
    zero: int = 0
    overlap: float = 1.0
    shared: bool = False
    faults: StepFaults = NO_FAULTS
    others: tuple[tuple[StageWork, ...], ...] = ()
    variant: tuple[int, ...] = ()
    tables: TableWork | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{len(stages)} stages for a table of {self.table.stages}"
            for stages in (self.stages, *self.others)
            if len(stages) != self.table.stages
        ]
        if len(self.variant) not in (0, self.grid.data):
            problems.append(f"devices of {len(self.variant)} copies, of which {self.grid.data} are")
        if self.grid.pipeline != self.table.ranks:
            problems.append(f"a pipeline of {self.grid.pipeline} for {self.table.ranks} ranks")
        if self.zero and len(self.table.pipes) > 1:
            problems.append(f"ZeRO {self.zero} with {len(self.table.pipes)} pipes")
        if self.tables is not None and self.grid.ranks != self.grid.data:
            problems.append("split tables beside stages or a tensor axis")
        if self.tables is not None and self.tables.ranks != self.grid.data:
            problems.append(f"tables of {self.tables.ranks} ranks, of which {self.grid.data} are")
        if problems:
            raise PlanError("there is no such step", problems=problems)

    @property
    def alike(self) -> tuple[StepWork, ...]:
        """The step as if all copies were like some of them, for each of `variant`."""
        every = (self.stages, *self.others)
        return tuple(replace(self, stages=one, others=(), variant=()) for one in every)

    @property
    def costs(self) -> StageCosts:
        """Of one micro-batch of the table; messages in bytes, which take no time here."""
        stages = self.stages
        found = StageCosts(
            forward=tuple(stage.forward for stage in stages),
            input_grad=tuple(stage.input_grad for stage in stages),
            weight_grad=tuple(stage.weight_grad for stage in stages),
            message=tuple(stage.message for stage in stages),
            activation=tuple(stage.kept + stage.again for stage in stages),
            kept=tuple(stage.kept for stage in stages),
            weight=tuple(stage.state for stage in stages),
        )
        return found.halved() if self.table.halves else found

    def lowered(self) -> PipelineSchedule:
        """The table with its sums where the executor has them; messages follow from the edges, and
        without a price of their own the actions that send and take them need not stand in it."""
        eager = self.bucket is not None and self.sync != "post"
        table = lower(self.table, sync="eager" if eager else self.sync)
        rows = (tuple(a for a in row if a.kind not in MESSAGE_KINDS) for row in table.order)
        return replace(table, order=tuple(rows))
