"""What a compressor keeps back, through a checkpoint: training with an inexact exchange, resumed.

A training run with its compressor is recorded and replayed as in `replay`. Its checkpoint must hold
the sum over the ranks of what each has kept back; in a run that resumes from it, each rank begins
with an equal share of this sum, however many ranks there are. The replay goes on from there, so
that what is lost, counted twice or read by another name is a difference in the next exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from headway.checkpoint.directory import read_manifest
from headway.data import Cursor
from headway.plans import Plan
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.training.job import TrainJob
from headway.run.training.loop import Training
from headway.run.training.stop_request import StopRequest
from headway.verification.distributed_run import RecordedRun, on_two_nodes
from headway.verification.exchange_recording import RecordedExchange, exchange_file
from headway.verification.recording import Recording, VerifyJob
from headway.verification.replay import Replay, save_replay
from headway.verification.whole_run import read_tensor


def record_training(place: LaunchEnv, job: VerifyJob, target: Path, *, train: TrainJob) -> None:
    """Train as one rank, and record the steps and what every rank exchanges in them."""
    with ExitStack() as stack:
        world = stack.enter_context(
            World.join(place, device="cpu", timeout_seconds=job.timeout_seconds)
        )
        assert isinstance(train.plan, Plan)
        plan = train.plan
        world = on_two_nodes(world, plan)
        recorded: list[RecordedRun] = []

        def before(_: LaunchEnv, step: int) -> None:
            if recorded:
                recorded[0].take(step - 1, training.executor.record.loss)
            else:
                trained, executor = training.trained, training.executor
                recorded.append(RecordedRun(world, job, plan, trained, executor))
            recorded[0].watch(step)

        stop = stack.enter_context(StopRequest())
        training = Training(replace(train, before_step=before), world, stop, stack)
        outcome = training.run()
        recorded[0].take(outcome.steps, outcome.loss)
        recorded[0].write(target, ended=False)


@dataclass(frozen=True)
class ResumedRun:
    """A recorded training run.

    Attributes:
        target: Its recording.
        plan: By which it was made.
    """

    target: Path
    plan: Plan

    def replay(self, job: VerifyJob) -> Replay:
        ranks = range(self.plan.ranks)
        exchanges = [RecordedExchange.load(exchange_file(self.target, rank)) for rank in ranks]
        return Replay(job.load(), self.plan, job, Recording.load(self.target), exchanges)


def record_replays(
    _: LaunchEnv,
    job: VerifyJob,
    target: Path,
    *,
    first: ResumedRun,
    checkpoint: Path,
    resumed: Sequence[ResumedRun],
) -> None:
    """Make a training run again, and from its checkpoint each of those that were resumed."""
    steps = job.steps
    begun = first.replay(job)
    after = begun.make_steps(Cursor(seed=job.load().seed), 1, steps)
    saved = {
        name.removeprefix("exchange."): read_tensor(checkpoint, entry)
        for name, entry in read_manifest(checkpoint).tensors.items()
        if name.startswith("exchange.")
    }
    begun.compare_saved(steps, saved)
    save_replay(begun, first.target)
    for run in resumed:
        replay = run.replay(job)
        replay.resume(begun)
        replay.make_steps(after, steps + 1, 2 * steps)
        save_replay(replay, run.target)
