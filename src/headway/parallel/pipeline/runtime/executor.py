"""The pipeline executor: runs one rank's part of any schedule table.

What the table says is all that happens; no schedule is known by name. `RankActions` binds the
rank's actions to calls once, and a step is one pass over them. Every message has a tag of its
own, a receive is posted where the table says POST, and a sent buffer is released as soon as the
table proves that it has arrived (`schedule.retirement`).

Two ranks with shared memory may exchange values through it. Both decide alike, because all
ranks ask the same about the table and the machines, and streams are opened in one order on all
ranks, which rules out a deadlock. An error of torch.distributed is reported with the action at
which this rank stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel.stream import TensorStream, open_streams
from headway.comm.exchange_errors import is_exchange_error, is_timeout
from headway.errors import TIMEOUT_SECONDS, HeadwayError, PeerLost, PlanError, Stalled
from headway.parallel.fsdp import defer_gradient_sync, explain_fsdp_conflicts, reshard_fsdp_modules
from headway.parallel.pipeline.runtime.p2p import (
    LocalStageLink,
    MessageFormat,
    MicrobatchKeys,
    PendingTransfers,
    RemoteStageLink,
    StageConnection,
    wait_for_transfers,
)
from headway.parallel.pipeline.runtime.recomputation import RecomputedStage
from headway.parallel.pipeline.runtime.stage_execution import (
    BackwardScalar,
    ComputeContext,
    ForwardHook,
    StageExecutor,
)
from headway.parallel.pipeline.runtime.weight_stashing import WeightVersionPlan, WeightVersions
from headway.parallel.stages import LOSS, LossFunction, ModelStages
from headway.schedule.lowering import completed_sends, lower
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule

_WAITING = frozenset(
    {ActionKind.RECV, ActionKind.SEND, ActionKind.POST, ActionKind.SYNC, ActionKind.WAIT}
)


def explain_distributed_error(
    error: Exception, row: Sequence[Action], position: int, rank: int
) -> HeadwayError | None:
    """The error to raise in its place; None, and a note, where no other rank is the cause.

    Args:
        position: Of the action that raised it; behind the last one: sends were awaited.
    """
    cell = "the end of its row, where it waits until its last messages have arrived"
    if position < len(row):
        cell = f"{row[position]} (action {position + 1} of {len(row)})"
    where = f"rank {rank} of the pipeline stands at {cell}"
    # Another rank can only be the cause where this one waits for it.
    ours = position >= len(row) or row[position].kind in _WAITING
    text = str(error).partition("\n")[0]
    of_group = is_exchange_error(error)
    of_stream = isinstance(error, PeerLost | Stalled)
    if not (ours and (of_group or of_stream)):
        error.add_note(where)
        return None
    if isinstance(error, Stalled) or (of_group and is_timeout(error)):
        return Stalled(
            f"{where}, and what it waits for does not come",
            why=text,
            fix="Look for what the rank at the other end does instead, or allow more time.",
        )
    return PeerLost(
        f"another rank vanished while {where}",
        why=text,
        fix="Its own error, or the signal that killed it, is the cause.",
    )


# One rank's row of a lowered table, made into bound calls once and carried out many times.


BoundCall = Callable[[], None]


class GradientSync(Protocol):
    """Sums the gradients of a stage over the ranks that hold it."""

    def start(self, stage: int) -> None:
        """SYNC: this rank's gradients of the stage are complete."""

    def wait(self, stage: int) -> None:
        """WAIT: until `.grad` holds the sums."""


@dataclass(frozen=True, kw_only=True)
class PipelineRanks:
    """Who carries out a table, as one rank sees it.

    Attributes:
        rank: Of this process in the table.
        ranks: Global rank of each rank of the table.
        group: To which all of them belong; used for messages between two ranks only. None: the
            default group.
        own: What values between stages refer to and each rank has its own of.
        streams: By global rank: to those with whom memory is shared.
    """

    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    own: tuple[Any, ...] = ()
    streams: Mapping[int, TensorStream] = field(default_factory=dict)

    def wire(self, rank: int) -> StageConnection:
        peer = self.ranks[rank]
        return StageConnection(self.group, peer, self.device, self.own, self.streams.get(peer))


@dataclass(frozen=True, kw_only=True)
class PipelineCallbacks:
    """What the executor calls.

    Attributes:
        share: (what the loss returned, micro-batch) -> the number on which backward is called.
            Called twice for a micro-batch whose forward is computed again.
        around: (stage, micro-batch, phase) -> contexts of a forward ("forward"), of one that is
            run again ("again") and of a backward ("backward"): random numbers, autocast. Where a
            stage is computed again block by block, the last one is also that of these forwards:
            its random numbers are found by the states of torch's generators.
        entering: Told the stage where its own part of a forward, in these contexts, begins.
        step: STEP: update the stage's parameters by their `.grad`, and clear that.
        doing: Told the action for which this rank is about to wait.
        caller: What messages call `loss`.
    """

    loss: LossFunction
    share: BackwardScalar = lambda value, _: value
    around: ComputeContext | None = None
    entering: ForwardHook | None = None
    sync: GradientSync | None = None
    step: Callable[[int], None] | None = None
    doing: Callable[[Action], None] | None = None
    caller: str = LOSS


class RankActions:
    """What one rank does.

    Args:
        stages: In the mode that is run.

    Attributes:
        times: When each action of the last step began, in `perf_counter` seconds; behind them, when
            the last had ended, and when all that was sent had left.
    """

    def __init__(
        self,
        stages: ModelStages,
        schedule: PipelineSchedule,
        team: PipelineRanks,
        calls: PipelineCallbacks,
    ) -> None:
        count = schedule.num_microbatches
        self._stages = stages
        self._team = team
        self._calls = calls
        self._schedule = schedule
        self._row = schedule.order[team.rank]
        self._data: list[Any] = [None] * count
        self._keys: list[Hashable] = [None] * count
        self._signatures = MicrobatchKeys(stages.model)
        self._local: dict[tuple[str, int, int], LocalStageLink] = {}
        self._remote: dict[tuple[str, int, int], RemoteStageLink] = {}
        self._make_links()
        self._versions = {key: self._make_versions(key[1]) for key in schedule.hosted(team.rank)}
        self._runs = {key: self._make_run(*key) for key in self._versions}
        self._sent: dict[int, PendingTransfers] = {}
        self.times: Sequence[float] = ()
        self._do = self._bind()

    def run(self, microbatches: Sequence[Any]) -> dict[int, Tensor]:
        self._stages.check()
        # Bound calls hold these lists: they are filled anew and never replaced.
        self._data[:] = microbatches
        self._keys[:] = self._signatures.of(microbatches)
        self.times = times = [perf_counter()]
        try:
            for do in self._do:
                do()
                times.append(perf_counter())
            # What the table does not prove to have arrived.
            while self._sent:
                wait_for_transfers(self._sent.popitem()[1])
            times.append(perf_counter())
        except Exception as error:
            # `times` has the beginning, then one entry for each finished action.
            trouble = explain_distributed_error(error, self._row, len(times) - 1, self._team.rank)
            if trouble is None:
                raise
            raise trouble from error
        # The batch must not stay alive until the next step.
        self._data[:] = [None] * len(self._data)
        for link in (*self._local.values(), *self._remote.values()):
            link.forget(self._signatures.unseen)
        losses: dict[int, Tensor] = {}
        for run in self._runs.values():
            losses.update(run.losses)
            run.losses.clear()
        return losses

    @property
    def spans(self) -> list[tuple[Action, float, float]]:
        """The actions of the last step with start and end, in `perf_counter` seconds."""
        # `times` has two entries more than the row.
        return list(zip(self._row, self.times, self.times[1:], strict=False))

    def message_bytes(self, action: Action) -> int:
        """Of a SEND or RECV, as last seen."""
        return self._link_of(action).size(gradients=action.carries_gradient)

    def bytes_given(self) -> dict[int, int]:
        """For each stage the bytes that it gives to others for one micro-batch, as last seen."""
        found = dict.fromkeys(self._schedule.stages_on(self._team.rank), 0)
        for (_, stage, _), link in (*self._local.items(), *self._remote.items()):
            if stage in found:
                found[stage] += link.size(gradients=False)
        return found

    @property
    def layouts(self) -> dict[tuple[int, int], MessageFormat]:
        """(earlier, later) stage -> of the newest message between them; those of this rank."""
        found = {}
        for (_, a, b), link in (*self._local.items(), *self._remote.items()):
            if link.newest is not None:
                found[a, b] = link.newest
        return found

    # -- what the row needs ------------------------------------------------------------------

    def _make_links(self) -> None:
        rank, tag = self._team.rank, 0
        for pipe in self._schedule.pipes:
            for a, b in self._schedule.edges:
                source, target = pipe.placement[a], pipe.placement[b]
                key, name = (pipe.name, a, b), f"{pipe.name}: stage {a} to stage {b}"
                if source == target == rank:
                    self._local[key] = LocalStageLink(name, self._keys)
                elif rank in (source, target):
                    wire = self._team.wire(target if rank == source else source)
                    self._remote[key] = RemoteStageLink(name, self._keys, wire, tag)
                # Counted for edges between other ranks, too: both ends must come to the same tag.
                tag += 2 * len(self._keys)

    def _make_versions(self, stage: int) -> WeightVersions:
        schedule = self._schedule
        if not (schedule.blockwise and stage in schedule.recompute):
            return WeightVersions(self._stages[stage].module)
        return WeightVersions(
            RecomputedStage(self._stages[stage], self._team.device, flush=schedule.flush)
        )

    def _make_run(self, pipe: str, stage: int) -> StageExecutor:
        links = {**self._local, **self._remote}
        return StageExecutor(
            self._stages,
            stage,
            {a: link for (name, a, b), link in links.items() if name == pipe and b == stage},
            {b: link for (name, a, b), link in links.items() if name == pipe and a == stage},
            data=self._data,
            loss=self._calls.loss,
            share=self._calls.share,
            around=self._calls.around,
            entering=self._calls.entering,
            recompute=stage in self._schedule.recompute and not self._schedule.blockwise,
            versions=self._versions[pipe, stage],
            device=self._team.device,
            caller=self._calls.caller,
        )

    # -- bound calls -------------------------------------------------------------------------

    def _bind(self) -> list[BoundCall]:
        plan = WeightVersionPlan(self._schedule, self._team.rank)
        retired = completed_sends(self._schedule, self._team.rank)
        return [
            self._bind_one(position, action, plan, retired.get(position, []))
            for position, action in enumerate(self._row)
        ]

    def _bind_one(
        self, position: int, action: Action, plan: WeightVersionPlan, retired: list[int]
    ) -> BoundCall:
        match action.kind:
            case ActionKind.FORWARD:
                run = self._runs[action.pipe, action.stage]
                return partial(run.forward, action.microbatch, plan.version(position))
            case ActionKind.BACKWARD | ActionKind.INPUT_GRAD | ActionKind.WEIGHT_GRAD:
                return self._bind_backward(action, plan.dropped(position))
            case ActionKind.SEND:
                return self._bind_send(position, action)
            case ActionKind.POST:
                post = self._link_of(action).post
                return partial(post, action.microbatch, gradients=action.carries_gradient)
            case ActionKind.RECV:
                return self._bind_receive(action, retired)
            case ActionKind.STEP:
                return self._bind_step(action, plan.version(position))
            case ActionKind.SYNC:
                assert self._calls.sync is not None
                return partial(self._calls.sync.start, action.stage)
            case ActionKind.WAIT:
                assert self._calls.sync is not None
                return self._with_report(partial(self._calls.sync.wait, action.stage), action)

    def _bind_backward(self, action: Action, dropped: list[int]) -> BoundCall:
        run = self._runs[action.pipe, action.stage]
        versions = self._versions[action.pipe, action.stage]
        methods = {
            ActionKind.BACKWARD: run.backward,
            ActionKind.INPUT_GRAD: run.input_gradient,
            ActionKind.WEIGHT_GRAD: run.weight_gradient,
        }
        bare: BoundCall = partial(methods[action.kind], action.microbatch)
        if not dropped:
            return bare

        def do() -> None:
            bare()
            for version in dropped:
                versions.drop(version)

        return do

    def _bind_send(self, position: int, action: Action) -> BoundCall:
        link, sent, microbatch = self._link_of(action), self._sent, action.microbatch
        gradients = action.carries_gradient

        def do() -> None:
            sent[position] = link.send(microbatch, gradients=gradients)

        return do

    def _bind_receive(self, action: Action, retired: list[int]) -> BoundCall:
        link, sent = self._link_of(action), self._sent
        bare: BoundCall = partial(
            link.receive, action.microbatch, gradients=action.carries_gradient
        )

        def do() -> None:
            bare()
            for position in retired:
                wait_for_transfers(sent.pop(position))

        return self._with_report(do if retired else bare, action)

    def _bind_step(self, action: Action, version: int) -> BoundCall:
        versions, stage = self._versions[action.pipe, action.stage], action.stage
        step = self._calls.step
        assert step is not None

        def do() -> None:
            versions.begin_step(version)
            step(stage)

        return do

    def _with_report(self, do: BoundCall, action: Action) -> BoundCall:
        """Report first what is waited for."""
        doing = self._calls.doing
        if doing is None:
            return do

        def report_and_do() -> None:
            doing(action)
            do()

        return report_and_do

    def _link_of(self, action: Action) -> RemoteStageLink:
        # A gradient's action names the same edge from its other end.
        ends = sorted((action.stage, action.other))
        return self._remote[action.pipe, ends[0], ends[1]]


def forward_only_schedule(schedule: PipelineSchedule, count: int) -> PipelineSchedule:
    """The table without backwards, and of the first micro-batches only."""

    def stays(action: Action) -> bool:
        if action.microbatch >= count:
            return False
        is_message = action.kind in (ActionKind.SEND, ActionKind.POST, ActionKind.RECV)
        return action.kind == ActionKind.FORWARD or (is_message and not action.carries_gradient)

    return replace(
        schedule,
        order=tuple(tuple(filter(stays, actions)) for actions in schedule.order),
        pipes=tuple(
            replace(pipe, microbatches=tuple(m for m in pipe.microbatches if m < count))
            for pipe in schedule.pipes
        ),
        recompute=(),
    )


# Which ranks of a pipeline hand values over in memory that both share, and how that is opened.


_PER_MICROBATCH = 2
"""Messages of a micro-batch over an edge in one direction, at most (Chimera's halves)."""


def open_shared_memory_streams(
    team: PipelineRanks,
    schedule: PipelineSchedule,
    together: Callable[[int, int], bool],
    *,
    timeout: float = TIMEOUT_SECONDS,
) -> PipelineRanks:
    """The team with a stream to each rank it exchanges with and shares memory with; collective.

    Args:
        schedule: With all edges; the streams serve all tables with at most as many micro-batches.
        together: Whether two global ranks are on one machine; the same on all ranks.
        timeout: Seconds that a wait may take.

    Raises:
        PeerLost: Another rank is gone.
        Stalled: It does not come in time.
    """
    ahead: dict[tuple[int, int], int] = {}
    for pair, edges in _edges_between_ranks(schedule).items():
        a, b = sorted(team.ranks[rank] for rank in pair)
        if together(a, b):
            # Room for all headers of a step, so that no put waits.
            ahead[a, b] = edges * _PER_MICROBATCH * schedule.num_microbatches
    opened = open_streams(ahead, group=team.group, timeout=timeout)
    return replace(team, streams={**team.streams, **opened})


def _edges_between_ranks(schedule: PipelineSchedule) -> Counter[tuple[int, int]]:
    """How many edges there are between each two ranks of a table."""
    found: Counter[tuple[int, int]] = Counter()
    for pipe in schedule.pipes:
        for a, b in schedule.edges:
            source, target = sorted((pipe.placement[a], pipe.placement[b]))
            if source != target:
                found[source, target] += 1
    return found


# Carries out one rank's part of a pipeline schedule: the executor for all tables.


class Pipeline:
    """One rank of a pipeline.

    Args:
        stages: Of the model; cut alike on all ranks.
        schedule: A checked table; messages are added where it has none.
        calls: The user's and the caller's functions.

    Raises:
        PlanError: The table is for other stages, or needs what `calls` does not have.

    Attributes:
        remarks: What was set on the model for it to be right, for users to read.
    """

    def __init__(
        self,
        stages: ModelStages,
        schedule: PipelineSchedule,
        team: PipelineRanks,
        calls: PipelineCallbacks,
    ) -> None:
        self.stages = stages
        self.schedule = schedule if schedule.is_lowered else lower(schedule)
        _check_pipeline(self.schedule, stages, team, calls)
        self._hosted = [stages[n] for n in schedule.stages_on(team.rank)]
        self.remarks = defer_gradient_sync(self._hosted)
        self._team = team
        self._calls = calls
        self._training = RankActions(stages, self.schedule, team, calls)
        self._evaluating: dict[int, RankActions] = {}

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
        """
        count = len(microbatches)
        # Calls are bound for a number of micro-batches; the last batch may have fewer.
        if count not in self._evaluating:
            self._evaluating[count] = RankActions(
                self.stages.evaluating or self.stages,
                forward_only_schedule(self.schedule, count),
                self._team,
                self._calls,
            )
        with torch.no_grad():
            losses = self._evaluating[count].run(microbatches)
        # There is no SYNC here, which frees in training what fully_shard has gathered.
        for stage in self._hosted:
            reshard_fsdp_modules(stage.module)
        return losses

    @property
    def spans(self) -> list[tuple[Action, float, float]]:
        """The actions of the last step with start and end, in `perf_counter` seconds."""
        return self._training.spans

    @property
    def times(self) -> Sequence[float]:
        """When each action of this rank's row began; see `RankActions.times`."""
        return self._training.times

    def message_bytes(self, action: Action) -> int:
        """Of a SEND or RECV of this rank, as last seen."""
        return self._training.message_bytes(action)


def _check_pipeline(
    schedule: PipelineSchedule, stages: ModelStages, team: PipelineRanks, calls: PipelineCallbacks
) -> None:
    problems = stages.unlike(schedule)
    if not problems and (missing := sorted(set(stages.edges) - set(schedule.edges))):
        problems += [
            f"it does not say that stage {a} gives values to stage {b}" for a, b in missing
        ]
    kinds = {action.kind for action in schedule.order[team.rank]}
    if kinds & {ActionKind.SYNC, ActionKind.WAIT} and calls.sync is None:
        problems.append("it has SYNC, and nobody was given who sums gradients")
    if ActionKind.STEP in kinds and calls.step is None:
        problems.append("it has STEP, and nobody was given who makes steps")
    if not schedule.flush and stages.shared:
        names = ", ".join(stages.shared)
        problems.append(
            f"it has no flush, and {names} would need one: several stages use it; take a schedule "
            "that ends with a flush, as 1f1b does"
        )
    problems += explain_fsdp_conflicts(schedule, stages, team.rank)
    if problems:
        raise PlanError(
            f"the schedule {schedule.name} does not fit",
            problems=problems,
            fix="Make the table for this cut (skips = stages.skips), or cut the model elsewhere.",
        )
