"""A recipe as a job of a Ray cluster: Ray finds the machines, starts the ranks and restarts them.

    import headway.ray

    trainer = headway.ray.trainer(recipe, processes=4, directory="/shared/runs/points")
    trainer.fit().metrics["loss"]

Needs the extra "ray". The ranks of Ray's `TorchTrainer` become headway's: each leaves the process
group that Ray has made, in which its ranks cannot be watched, and meets the others in headway's own
world. A rank that fails or dies ends Ray's workers, which Ray starts again (`restarts`); they
continue from the last checkpoint of the run directory, as under any other launcher.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headway.api.inputs import PlanInput, RecipeInput, resolve_plan, sendable_recipe
from headway.api.plan_selection import AUTO
from headway.api.training import TrainingResult, train
from headway.channel.job_secret import SECRET
from headway.checkpoint.directory import newest
from headway.errors import HeadwayError, MissingExtra, UsageError
from headway.keywords import checks_keywords
from headway.launch.restart_policy import RESTARTS
from headway.plans import Plan
from headway.run.recipe.check import check_recipe
from headway.run.recipe.sent_recipe import SentRecipe, send_recipe
from headway.run.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_LOG = logging.getLogger("headway")


@checks_keywords
def trainer(
    recipe: RecipeInput,
    *,
    processes: int,
    directory: str | Path,
    plan: PlanInput | None = None,
    overrides: Sequence[str] = (),
    restarts: int = RESTARTS,
    gpus: bool = False,
    resources: dict[str, float] | None = None,
) -> TorchTrainer:
    """A `ray.train.torch.TorchTrainer` that trains a recipe; `fit()` runs it.

    Args:
        recipe: As for `headway.train`. Workers import the module that it names; a `Recipe` object
            is sent to them.
        processes: Ranks: Ray's `ScalingConfig(num_workers=...)`.
        directory: The run directory, on a file system that all machines share. A run that is there
            is continued.
        plan: As for `headway.train`.
        overrides: "key=value" changes to the recipe.
        restarts: How often Ray starts all ranks again: `FailureConfig(max_failures=...)`.
        gpus: A GPU for each rank.
        resources: Of each rank: `ScalingConfig(resources_per_worker=...)`, as in {"CPU": 4}.

    Returns:
        The trainer. The metrics of its result are "loss", "validation", "steps" and the recipe's
        own; its checkpoint is the last of the run directory.

    Raises:
        MissingExtra: Ray is not installed.
        UsageError: The directory is not absolute: workers run in other folders.
        RecipeError: The recipe cannot be used, or not be sent to workers.
    """
    run = Path(directory)
    if not run.is_absolute():
        raise UsageError(
            f"the run directory {directory} is relative, and Ray's workers run in other folders",
            fix=f"Write directory={str(run.resolve())!r}, a folder that all machines share.",
        )
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        raise MissingExtra(
            "headway.ray needs the package ray, which is not installed",
            fix="pip install 'headway[ray]'",
        ) from None
    sent = send_recipe(sendable_recipe(_whole_path(recipe), overrides))
    if isinstance(sent, str):
        check_recipe(sent, overrides)  # here, before any worker is started
    job = _RayJob(
        recipe=sent,
        # An object has taken them in already.
        overrides=tuple(overrides) if isinstance(sent, str) else (),
        plan=plan if plan is None or plan == AUTO else resolve_plan(plan),
        directory=run,
        secret=secrets.token_hex(32),
    )
    return TorchTrainer(
        # Not as `train_loop_config`, which Ray writes down: it holds the secret.
        partial(_train_as_rank, job),
        # Of the group that is left at once: it needs no GPU.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=processes, use_gpu=gpus, resources_per_worker=resources
        ),
        # Ray's record beside headway's, so that the checkpoints there are Ray's without a copy.
        run_config=RunConfig(
            name=run.name,
            storage_path=str(run.parent),
            failure_config=FailureConfig(max_failures=restarts),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _RayJob:
    """What each worker of Ray is told."""

    recipe: SentRecipe | str
    overrides: tuple[str, ...]
    plan: Plan | str | Path | None
    directory: Path
    secret: str = field(repr=False)


def _whole_path(recipe: RecipeInput) -> RecipeInput:
    """The recipe; the path of a file from the root, as workers run in other folders."""
    is_file = isinstance(recipe, str | Path) and Path(recipe).is_file()
    return Path(recipe).resolve() if is_file else recipe  # type: ignore[arg-type]


def _train_as_rank(job: _RayJob) -> None:
    """What each worker of Ray does."""
    import torch.distributed as dist
    from ray.train import Checkpoint, CheckpointUploadMode, get_context, report

    dist.destroy_process_group()
    os.environ[SECRET] = job.secret
    # Workers that are started again do not know it; what exists may be resumed, also when empty.
    job.directory.mkdir(parents=True, exist_ok=True)
    result = train(
        job.recipe.open() if isinstance(job.recipe, SentRecipe) else job.recipe,
        plan=job.plan,
        overrides=job.overrides,
        directory=job.directory,
        resume=True,
        observer=_ErrorsForRay(),
    )
    checkpoint = None
    if get_context().get_world_rank() == 0:
        checkpoint = Checkpoint.from_directory(newest(RunDirectory(job.directory).path))
    report(
        _metrics(result),
        checkpoint=checkpoint,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def _metrics(result: TrainingResult) -> dict[str, Any]:
    facts = {"loss": result.loss, "validation": result.validation, "steps": result.steps}
    return {**facts, **result.metrics}


class _ErrorsForRay:
    """Raises a rank's error, so that `fit()` raises it again; a `TrainingObserver`.

    Ray ends the other workers then. Under other launchers the process ends instead.
    """

    def watch(self, directory: Path, *, launched: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def restarted(self, attempt: int, cause: str) -> None:
        """Ray says so itself."""

    def failed(self, error: HeadwayError) -> NoReturn:
        # Ray shows the log of workers while they run.
        _LOG.error("%s %s", error.code, error)
        raise error
