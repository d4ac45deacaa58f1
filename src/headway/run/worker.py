"""One rank's whole life: join the world, train, leave; and what is said when it fails."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from headway.errors import HeadwayError, WorkerFailed
from headway.run.failure import brief
from headway.run.job import Outcome, TrainJob
from headway.run.place import Place
from headway.run.reference import importable, user_frame
from headway.run.signals import StopRequest
from headway.run.training import StepCounter, Training
from headway.run.world import World


def train(place: Place, job: TrainJob) -> Outcome:
    """Train as one rank of the world found at `place`.

    Raises:
        HeadwayError: With rank and step; exceptions of the user's code become `WorkerFailed`.
    """
    step = StepCounter()
    world: World | None = None
    folders = [Path.cwd(), *([Path(job.recipe).parent] if job.recipe.endswith(".toml") else [])]
    try:
        with importable(*folders), ExitStack() as stack:
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
            brief(error),
            where=f"rank {place.rank}, step {step.current}",
            why=f"Raised at {place_in_code}: {source}",
            fix="Mend the cause, then go on with --resume.",
        ) from error
