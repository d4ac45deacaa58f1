"""Entry point of one rank of `headway train`: join the world, train, leave, report errors."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from headway.errors import HeadwayError, WorkerFailed
from headway.run.distributed.failure_record import summarize_exception
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.stop_request import StopRequest
from headway.run.distributed.world import World
from headway.run.recipe.user_code import importable_folders, user_frame
from headway.run.training.job import TrainingOutcome, TrainJob
from headway.run.training.loop import StepCounter, Training


def train(place: LaunchEnv, job: TrainJob) -> TrainingOutcome:
    """Train as one rank of the world found at `place`.

    Raises:
        HeadwayError: With rank and step; exceptions of the user's code become `WorkerFailed`.
    """
    step = StepCounter()
    world: World | None = None
    folders = [Path.cwd()]
    if isinstance(job.recipe, str) and job.recipe.endswith(".toml"):
        folders.append(Path(job.recipe).parent)
    try:
        with importable_folders(*folders), ExitStack() as stack:
            world = stack.enter_context(
                World.join(
                    place,
                    device=job.device,
                    timeout_seconds=job.timeout_seconds,
                    patience_seconds=job.patience_seconds,
                )
            )
            stop = stack.enter_context(StopRequest())
            return Training(job, world, stop, step, stack).run()
    except HeadwayError as error:
        error.where = error.where or f"rank {place.rank}, step {step.current}"
        raise
    except Exception as error:
        lost = world.lost() if world is not None else None
        if lost is not None:  # whatever a broken connection looks like from the inside
            raise lost from error
        place_in_code, source = user_frame(error)
        raise WorkerFailed(
            summarize_exception(error),
            where=f"rank {place.rank}, step {step.current}",
            why=f"Raised at {place_in_code}: {source}",
            fix="Mend the cause, then go on with --resume.",
        ) from error
