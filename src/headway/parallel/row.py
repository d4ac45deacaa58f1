"""One rank's row of a lowered table, made into bound calls once and carried out many times.

Every message has a tag of its own, a receive is posted where the table says POST, and what was sent
is let go as soon as the table proves that it has arrived (`schedule.retirement`). An action costs
one call; everything that can be known from the table is worked out when the row is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel import Stream
from headway.parallel.blocks import Blocks
from headway.parallel.layout import Layout
from headway.parallel.links import LocalLink, RemoteLink, Sent, Wire, let_go
from headway.parallel.signature import Signatures
from headway.parallel.stage_run import Around, Entering, Share, StageRun
from headway.parallel.stages import Stages
from headway.parallel.standin import Loss
from headway.parallel.trouble import explained
from headway.parallel.version_plan import VersionPlan
from headway.parallel.versions import Versions
from headway.schedule import Action, Kind, PipelineSchedule
from headway.schedule.retirement import retirements

Do = Callable[[], None]


class Sync(Protocol):
    """Sums the gradients of a stage over the ranks that hold it."""

    def start(self, stage: int) -> None:
        """SYNC: this rank's gradients of the stage are complete."""

    def wait(self, stage: int) -> None:
        """WAIT: until `.grad` holds the sums."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """Who carries out a table, as one rank sees it.

    Attributes:
        rank: Of this process in the table.
        ranks: Global rank of each rank of the table.
        group: To which all of them belong; used for messages between two ranks only. None: the
            default group.
        device: Of this rank.
        own: What values between stages refer to and each rank has its own of; see `links.Wire`.
        streams: By global rank: to those with whom memory is shared; see `streams.with_streams`.
    """

    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    own: tuple[Any, ...] = ()
    streams: Mapping[int, Stream] = field(default_factory=dict)

    def wire(self, rank: int) -> Wire:
        """To a rank of the table."""
        peer = self.ranks[rank]
        return Wire(self.group, peer, self.device, self.own, self.streams.get(peer))


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What the executor calls.

    Attributes:
        loss: The recipe's `loss(model, data)`.
        share: (what the loss returned, micro-batch) -> the number on which backward is called.
            Called twice for a micro-batch whose forward is computed again.
        around: (stage, micro-batch, phase) -> contexts of a forward ("forward"), of one that is
            run again ("again") and of a backward ("backward"): random numbers, autocast. Where a
            stage is computed again block by block, the last one is also that of these forwards:
            its random numbers are found by the states of torch's generators.
        entering: Told the stage where its own part of a forward, in these contexts, begins.
        sync: Carries out SYNC and WAIT.
        step: STEP: update the stage's parameters by their `.grad`, and clear that.
        doing: Told the action for which this rank is about to wait.
    """

    loss: Loss
    share: Share = lambda value, _: value
    around: Around | None = None
    entering: Entering | None = None
    sync: Sync | None = None
    step: Callable[[int], None] | None = None
    doing: Callable[[Action], None] | None = None

    def lacking(self, schedule: PipelineSchedule, rank: int) -> list[str]:
        """What a rank's row of a table needs and is not here."""
        kinds = {action.kind for action in schedule.order[rank]}
        found = []
        if kinds & {Kind.SYNC, Kind.WAIT} and self.sync is None:
            found.append("it has SYNC, and nobody was given who sums gradients")
        if Kind.STEP in kinds and self.step is None:
            found.append("it has STEP, and nobody was given who makes steps")
        return found


class Row:
    """What one rank does.

    Args:
        stages: In the mode that is run.
        schedule: Lowered.
        team: The ranks.
        calls: What is called.
    """

    def __init__(
        self, stages: Stages, schedule: PipelineSchedule, team: Team, calls: Calls
    ) -> None:
        count = schedule.num_microbatches
        self._stages = stages
        self._team = team
        self._calls = calls
        self._schedule = schedule
        self._row = schedule.order[team.rank]
        self._data: list[Any] = [None] * count
        self._keys: list[Hashable] = [None] * count
        self._signatures = Signatures(stages.model)
        self._local: dict[tuple[str, int, int], LocalLink] = {}
        self._remote: dict[tuple[str, int, int], RemoteLink] = {}
        self._make_links()
        self._versions = {key: self._make_versions(key[1]) for key in schedule.hosted(team.rank)}
        self._runs = {key: self._make_run(*key) for key in self._versions}
        self._sent: dict[int, Sent] = {}
        self._times: list[float] = []
        self._do = self._bind()

    def run(self, microbatches: Sequence[Any]) -> dict[int, Tensor]:
        """Carry it out; see `Pipeline.run`."""
        self._stages.check()
        self._data[:] = microbatches
        self._keys[:] = self._signatures.of(microbatches)
        self._times = times = [perf_counter()]
        try:
            for do in self._do:
                do()
                times.append(perf_counter())
            while self._sent:
                let_go(self._sent.popitem()[1])
            times.append(perf_counter())
        except Exception as error:
            trouble = explained(error, self._row, len(times) - 1, self._team.rank)
            if trouble is None:
                raise
            raise trouble from error
        self._data[:] = [None] * len(self._data)
        for link in (*self._local.values(), *self._remote.values()):
            link.forget(self._signatures.unseen)
        losses: dict[int, Tensor] = {}
        for run in self._runs.values():
            losses.update(run.losses)
            run.losses.clear()
        return losses

    @property
    def times(self) -> Sequence[float]:
        """When each action of the last step began, in `perf_counter` seconds.

        Behind them: when the last had ended, and when all that was sent had left.
        """
        return self._times

    @property
    def spans(self) -> list[tuple[Action, float, float]]:
        """The actions of the last step with start and end, in `perf_counter` seconds."""
        times = self._times
        return list(zip(self._row, times, times[1:], strict=False))

    def message_bytes(self, action: Action) -> int:
        """Of a SEND or RECV, as last seen."""
        return self._link_of(action).size(gradients=action.carries_gradient)

    def bytes_given(self) -> dict[int, int]:
        """For each stage the bytes that it gives to others for one micro-batch, as last seen."""
        found = {stage: 0 for _, stage in self._schedule.hosted(self._team.rank)}
        for (_, stage, _), link in (*self._local.items(), *self._remote.items()):
            if stage in found:
                found[stage] += link.bytes
        return found

    @property
    def layouts(self) -> dict[tuple[int, int], Layout]:
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
                    self._local[key] = LocalLink(name, self._keys)
                elif rank in (source, target):
                    wire = self._team.wire(target if rank == source else source)
                    self._remote[key] = RemoteLink(name, self._keys, wire, tag)
                tag += 2 * len(self._keys)

    def _make_versions(self, stage: int) -> Versions:
        schedule = self._schedule
        if not (schedule.blockwise and stage in schedule.recompute):
            return Versions(self._stages[stage].module)
        return Versions(Blocks(self._stages[stage], self._team.device, flush=schedule.flush))

    def _make_run(self, pipe: str, stage: int) -> StageRun:
        links = {**self._local, **self._remote}
        return StageRun(
            self._stages,
            stage,
            {a: link for (name, a, b), link in links.items() if name == pipe and b == stage},
            {b: link for (name, a, b), link in links.items() if name == pipe and a == stage},
            loss=self._calls.loss,
            share=self._calls.share,
            around=self._calls.around,
            entering=self._calls.entering,
            recompute=stage in self._schedule.recompute and not self._schedule.blockwise,
            versions=self._versions[pipe, stage],
            device=self._team.device,
        )

    # -- bound calls -------------------------------------------------------------------------

    def _bind(self) -> list[Do]:
        plan = VersionPlan(self._schedule, self._team.rank)
        retired = retirements(self._schedule, self._team.rank)
        return [
            self._bind_one(position, action, plan, retired.get(position, []))
            for position, action in enumerate(self._row)
        ]

    def _bind_one(self, position: int, action: Action, plan: VersionPlan, retired: list[int]) -> Do:
        match action.kind:
            case Kind.FORWARD:
                return self._bind_forward(action, plan.version(position))
            case Kind.BACKWARD | Kind.INPUT_GRAD | Kind.WEIGHT_GRAD:
                return self._bind_backward(action, plan.dropped(position))
            case Kind.SEND:
                return self._bind_send(position, action)
            case Kind.POST:
                return self._bind_post(action)
            case Kind.RECV:
                return self._bind_receive(action, retired)
            case Kind.STEP:
                return self._bind_step(action, plan.ended(position))
            case Kind.SYNC:
                assert self._calls.sync is not None
                return partial(self._calls.sync.start, action.stage)
            case Kind.WAIT:
                assert self._calls.sync is not None
                return self._told(partial(self._calls.sync.wait, action.stage), action)

    def _bind_forward(self, action: Action, version: int) -> Do:
        run, microbatch, data = self._run_of(action), action.microbatch, self._data

        def do() -> None:
            run.forward(microbatch, data[microbatch], version)

        return do

    def _bind_backward(self, action: Action, dropped: list[int]) -> Do:
        run, microbatch, data = self._run_of(action), action.microbatch, self._data
        versions = self._versions[action.pipe, action.stage]
        if action.kind == Kind.WEIGHT_GRAD:
            bare: Do = partial(run.weight_gradient, microbatch)
        else:
            whole = action.kind == Kind.BACKWARD
            method = run.backward if whole else run.input_gradient

            def bare() -> None:
                method(microbatch, data[microbatch])

        if not dropped:
            return bare

        def do() -> None:
            bare()
            for version in dropped:
                versions.drop(version)

        return do

    def _bind_send(self, position: int, action: Action) -> Do:
        link, sent, microbatch = self._link_of(action), self._sent, action.microbatch
        send = link.send_back if action.carries_gradient else link.send

        def do() -> None:
            sent[position] = send(microbatch)

        return do

    def _bind_post(self, action: Action) -> Do:
        link = self._link_of(action)
        return partial(link.post_back if action.carries_gradient else link.post, action.microbatch)

    def _bind_receive(self, action: Action, retired: list[int]) -> Do:
        link, sent = self._link_of(action), self._sent
        receive = link.receive_back if action.carries_gradient else link.receive
        bare: Do = partial(receive, action.microbatch)

        def do() -> None:
            bare()
            for position in retired:
                let_go(sent.pop(position))

        return self._told(do if retired else bare, action)

    def _bind_step(self, action: Action, version: int) -> Do:
        versions, stage = self._versions[action.pipe, action.stage], action.stage
        step = self._calls.step
        assert step is not None

        def do() -> None:
            versions.begin_step(version)
            step(stage)

        return do

    def _told(self, do: Do, action: Action) -> Do:
        """Say first what is waited for."""
        doing = self._calls.doing
        if doing is None:
            return do

        def told() -> None:
            doing(action)
            do()

        return told

    def _run_of(self, action: Action) -> StageRun:
        return self._runs[action.pipe, action.stage]

    def _link_of(self, action: Action) -> RemoteLink:
        ends = sorted((action.stage, action.other))
        return self._remote[action.pipe, ends[0], ends[1]]


def forwards(schedule: PipelineSchedule, count: int) -> PipelineSchedule:
    """The table without backwards, and of the first micro-batches only."""

    def stays(action: Action) -> bool:
        if action.microbatch >= count:
            return False
        is_message = action.kind in (Kind.SEND, Kind.POST, Kind.RECV)
        return action.kind == Kind.FORWARD or (is_message and not action.carries_gradient)

    return replace(
        schedule,
        order=tuple(tuple(filter(stays, actions)) for actions in schedule.order),
        pipes=tuple(
            replace(pipe, microbatches=tuple(m for m in pipe.microbatches if m < count))
            for pipe in schedule.pipes
        ),
        recompute=(),
    )
