"""`headway.train`: one process or many, here or in a world that another launcher has made.

Everything that can be checked or decided without torch (options, plan, emulated nodes) happens
before workers start. Then this process either joins the world that torchrun, srun or mpirun has
started, or starts local workers through torch's elastic agent.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from headway.api.emulation import count_ranks, read_emulation_options
from headway.api.inputs import ClusterInput, PlanInput, RecipeInput, resolve_plan, sendable_recipe
from headway.api.plan_request import parse_duration
from headway.api.plan_selection import (
    AUTO,
    MEASURE,
    AutoPlanSearch,
    CollectiveName,
    CollectiveOption,
)
from headway.api.schedule_table import recipe_overrides
from headway.cluster import Fault, check_faults
from headway.errors import TIMEOUT_SECONDS, HeadwayError, UsageError
from headway.keywords import checks_keywords
from headway.launch.emulation import EmulatedCluster, PacedCluster
from headway.launch.faults import FaultInjector
from headway.launch.forkserver import start_forkserver
from headway.launch.restart_policy import RESTARTS
from headway.plans import Plan, data_parallel_groups, pipelined
from headway.plans.plan import check_device, check_executable
from headway.run.distributed.launch_env import HEARTBEAT_TIMEOUT_SECONDS, LaunchEnv
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.check import check_recipe
from headway.run.recipe.schema import RecipeDocument, RecipeReference
from headway.run.training.job import TrainingOutcome, TrainJob
from headway.run.training.run_directory import RunDirectory, choose_directory
from headway.units import counted

if TYPE_CHECKING:
    from headway.run.recipe.recipe import Recipe
    from headway.run.recipe.sent_recipe import SentRecipe

_LOG = logging.getLogger("headway")

# Defaults of `headway.train` and of the command.
TIMEOUT = f"{TIMEOUT_SECONDS / 60:g} min"
PATIENCE = f"{HEARTBEAT_TIMEOUT_SECONDS:g} s"
TRACE_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """How a training run ended.

    Attributes:
        directory: The run directory: plan, events, checkpoints; `headway report` draws it.
        steps: Optimiser steps since the beginning of the run; None: no rank said.
        loss: Mean over the samples of the last step's global batch; None: no rank said.
        validation: Loss of the last validation; None where the recipe has no validation data.
        metrics: The recipe's metrics of the last validation, by name.
        best_step: Of the best validation, where the recipe monitors it (`keep_best`,
            `early_stopping`).
        stopped_by: Name of the signal that stopped the run in order; None: it is complete.
        attempts: How often workers were started.
    """

    directory: Path
    steps: int | None
    loss: float | None
    validation: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best_step: int | None = None
    stopped_by: str | None
    attempts: int

    @property
    def plan(self) -> Plan:
        """The plan by which the run trained."""
        return Plan.load(RunDirectory(self.directory).plan_file)


class TrainingObserver(Protocol):
    """Follows a run while it lasts; the command line shows its progress so."""

    def watch(self, directory: Path, *, launched: bool) -> AbstractContextManager[object]:
        """Entered before the first step, left after the last.

        Args:
            directory: The run directory; it may not exist yet.
            launched: Whether workers are started here; else this process is rank 0.
        """
        ...

    def restarted(self, attempt: int, cause: str) -> None:
        """Dead workers are started again, for the attempt of this number."""
        ...

    def failed(self, error: HeadwayError) -> None:
        """An error of this rank, in a world of another launcher: the process ends after this."""
        ...


@checks_keywords
def train(
    recipe: RecipeInput,
    *,
    processes: int | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
    plan: PlanInput | None = None,
    cluster: ClusterInput = MEASURE,
    fallback: bool = False,
    collective: CollectiveName | None = None,
    schedule: str | Path | None = None,
    overrides: Sequence[str] = (),
    restarts: int = RESTARTS,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout: str | float = TIMEOUT,
    patience: str | float = PATIENCE,
    emulate: ClusterInput | None = None,
    faults: Sequence[str] = (),
    replay: str | Path | None = None,
    trace_steps: int = TRACE_STEPS,
    callbacks: Sequence[object] = (),
    observer: TrainingObserver | None = None,
) -> TrainingResult:
    """Train a recipe on one process or many.

    Workers import the modules that the recipe names. A `Recipe` object is sent to them; what a
    notebook, a script or a function defines goes along. A script is not run again in workers.

    Args:
        recipe: A `Recipe`, "module:function", the path of a recipe.toml, or a bundled workload's
            name.
        processes: Local processes; by default those of the plan, else the recipe's stages.
        directory: The run directory; by default the next free runs/NAME-001.
        resume: Go on from the last checkpoint; without `directory`, of the newest run.
        plan: A `Plan`, the path of a plan.json, or "auto": the fastest that a search finds for
            this machine; by default data parallelism over all processes.
        cluster: For `plan="auto"` and `collective`: a `Cluster`, a cluster.toml or a preset; by
            default `plan="auto"` measures this machine.
        fallback: For `plan="auto"`: train data parallel where no plan can be found.
        collective: Which all-reduce algorithm to use for gradients: auto, all_reduce,
            hierarchical, ring, direct, halving-doubling, servers, trees; by default the plan's.
        schedule: A CSV file with the table of a pipeline, one row per rank; it decides the stages.
        overrides: "key=value" changes to the recipe.
        restarts: How often dead workers are started again without a new checkpoint between.
        timeout: Longest wait for another process in seconds, or as in "5 min".
        patience: Declare a worker lost after this long without a heartbeat; 0: never.
        emulate: A `Cluster` or a cluster.toml: run as if on its nodes, with its links; needs root
            for all of it.
        faults: What breaks, as in "kill rank 3 at step 7", "rank 3 2x slower" or, with `emulate`,
            "link a-b 10x slower from step 20" and "cut link a-b at step 5".
        replay: A run directory, whose plan and history are repeated: an asynchronous run, bit by
            bit.
        trace_steps: Steps between detailed timelines; 0: only the first steps.
        callbacks: Called after those of the recipe; see `headway.run.training.callbacks`.
        observer: Follows the run.

    Returns:
        The run directory, and how the run ended; also after an orderly stop by a signal.

    Raises:
        UsageError: Options that contradict each other, or a run directory that is taken.
        RecipeError: The recipe cannot be used, or not be sent to workers.
        DocumentError: A file has problems; all are listed.
        PlanError: There can be no such plan, or the executor cannot run it.
        RunError: The run stopped: diverged, an exception in a rank (`WorkerFailed`), a lost rank.
        CheckpointError: A checkpoint cannot be written or used.
        Stalled: A wait ran into its time-out.
    """
    overrides = (*overrides, *_schedule_overrides(schedule, plan))
    recorded = None if replay is None else RunDirectory(Path(replay))
    if recorded is not None:
        if not recorded.history.is_dir():
            raise UsageError(
                f"{replay} has no history to replay",
                why="A run has one whose workers push, pull or meet whenever they come to it, and "
                "that has come to its end; others give the same numbers each time.",
                fix="Name the directory of a complete asynchronous, bounded or gossip run.",
            )
        if resume:
            raise UsageError(
                "a replay begins where its run began, and resumes nothing",
                where=str(replay),
                fix="Leave out --resume or --replay.",
            )
        plan = plan or recorded.plan_file
    reference = sendable_recipe(recipe, overrides)
    # An object has taken them in already.
    overrides = overrides if isinstance(reference, str) else ()
    place = LaunchEnv.here()
    name, source = _recipe_source(reference, overrides, called=not place.found_world)
    scene = read_emulation_options(emulate, faults, place, device)
    network = None if cluster == MEASURE else cluster
    option = CollectiveOption(name=collective, cluster=network, emulate=emulate)
    if plan != AUTO and collective is not None:
        cluster = MEASURE  # it is for the collective alone
    auto, known = None, None
    if plan == AUTO:
        auto = AutoPlanSearch(
            recipe=reference,
            overrides=overrides,
            cluster=cluster,
            device=scene.device,
            fallback=fallback,
        )
        default = auto.ranks(processes)
    else:
        _check_needs_auto(cluster, fallback=fallback)
        known = None if plan is None else resolve_plan(plan)
        default = source.stages or 1
        if known is not None:
            # Before any process starts: a plan may be legal, priced and simulated, and yet not run.
            check_executable(known)
            default = known.ranks
    ranks = count_ranks(place, processes, default, scene.cluster)
    # A fault that can never strike would look like a job that survived it.
    check_faults(scene.faults, ranks, scene.cluster)
    if known is None:
        known = default_plan(source, ranks)
    elif known.ranks != ranks:
        raise UsageError(
            f"the plan is for {counted(known.ranks, 'process')}, not for {ranks}",
            where="" if isinstance(plan, Plan) else str(plan),
            fix=f"Use --processes {known.ranks}, or another plan.",
        )
    if known is not None and scene.device == "cuda":  # "auto" is known to the ranks only
        check_device(known, scene.device)
    seconds, patience_seconds = _seconds("--timeout", timeout), _seconds("--patience", patience)
    # Before the run directory: nodes that cannot be emulated leave none behind.
    with scene.nodes() as emulated:
        path = choose_directory(name, directory, place, resume=resume)
        given = None if plan is None or plan == AUTO else plan
        find = None
        if not place.found_world:
            start_forkserver(ranks)  # its import of torch runs beside the one here
            if auto is not None:
                given = auto.find(RunDirectory(path), ranks, emulated, resume=resume)
                known = known if given is None else resolve_plan(given)
        elif auto is not None:
            # Here this process is one rank of many: the search waits until they have met.
            find = partial(auto.find_in, directory=path, resume=resume)
        algorithm, carrier = option.find(
            RunDirectory(path), known, ranks, resume=resume, told=place.rank == 0
        )
        job = TrainJob(
            recipe=reference,
            overrides=overrides,
            directory=path,
            plan=Path(given) if isinstance(given, str) else given,
            find=find,
            collective=algorithm,
            carrier=carrier,
            resume=resume,
            replay=None if recorded is None else recorded.path,
            device=scene.device,
            timeout_seconds=seconds,
            patience_seconds=patience_seconds,
            trace_every=trace_steps,
            callbacks=tuple(callbacks),
        )
        if place.found_world:
            return _train_as_rank(place, job, observer)
        guarded = known is None or known.survives
        return _launch(job, ranks, restarts, scene.faults, emulated, observer, guarded=guarded)


def _recipe_source(
    reference: Recipe | str, overrides: Sequence[str], *, called: bool
) -> tuple[str, RecipeDocument | RecipeReference | Recipe]:
    """The run's name, and what says how a recipe is split, as far as it is known without torch.

    Args:
        called: Call the recipe's function where it decides who agrees with whom: a mistake in that
            is told before anything starts.
    """
    if isinstance(reference, str):
        checked = check_recipe(reference, overrides)
        if called and checked.hides_synchrony:
            from headway.run.recipe.factory import load_recipe

            return checked.name, load_recipe(reference, overrides)
        return checked.name, checked.document
    # The name becomes part of a path, and an object's may hold anything.
    return re.sub(r"[^A-Za-z0-9_.-]", "-", reference.name), reference


def _check_needs_auto(cluster: ClusterInput, *, fallback: bool) -> None:
    if cluster != MEASURE or fallback:
        option = "--fallback" if fallback else f"--cluster {cluster}"
        needs = "--plan auto" if fallback else "--plan auto or --collective"
        raise UsageError(f"{option} needs {needs}", fix="Add it, or leave this option out.")


def _schedule_overrides(schedule: str | Path | None, plan: PlanInput | None) -> tuple[str, ...]:
    """What the table of a pipeline changes in the recipe."""
    if schedule is None:
        return ()
    if plan is not None:
        named = "" if isinstance(plan, Plan) else f" {plan}"
        raise UsageError(
            f"--schedule {schedule} contradicts --plan{named}: a plan has its own pipeline",
            fix="Leave one of them out.",
        )
    return recipe_overrides(Path(schedule))


def default_plan(source: RecipeDocument | RecipeReference | Recipe, ranks: int) -> Plan | None:
    """The plan of a recipe where none is given: what every worker would find seconds later.

    Args:
        source: A reference says what it is only when its function has been called: degrees that
            overrides name are checked, the plan is not known.

    Raises:
        PlanError: There can be no such plan for so many ranks.
    """
    if isinstance(source, RecipeReference):
        stages, layers = source.stages or 1, source.split
        parts = layers.ranks if layers else 1
        data_parallel_groups(
            ranks, stages * parts, "ranks that split layers" if parts > 1 else "ranks of a pipeline"
        )
        return None
    if isinstance(source, RecipeDocument):
        if source.tokens_per_sample is None:  # as the recipe that is made of it has it
            source = replace(source, tokens_per_sample=source.data.window)
        made = pipelined(
            resolve_batch(source),
            processes=ranks,
            microbatch=source.microbatch,
            exchange=source.exchange,
            stages=source.stages or 1,
            pipeline=source.pipeline,
            shares=source.shares or (),
            zero=source.zero or 0,
            shards=source.shards,
            split=source.split,
            norm=source.norm or "local",
            synchrony=source.synchrony,
        )
    else:
        # They import torch, as the object has done.
        from headway.run.recipe.training_data import with_loader_batch
        from headway.run.step.setup import recipe_plan

        made = recipe_plan(with_loader_batch(source), None, ranks)
    check_executable(made)
    return made


def _seconds(option: str, said: str | float) -> float:
    try:
        return parse_duration(said)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _train_as_rank(
    place: LaunchEnv, job: TrainJob, observer: TrainingObserver | None
) -> TrainingResult:
    """Train as one rank of the world that another launcher has made; rank 0 is observed."""
    from headway.launch.worker import run_rank_here
    from headway.run.training.loop import train as train_rank

    def tell(error: HeadwayError) -> None:
        # The process ends at once after this: without an observer the log is the only witness.
        _LOG.error("%s %s", error.code, error) if observer is None else observer.failed(error)

    watched = place.rank == 0 and observer is not None
    with observer.watch(job.directory, launched=False) if observer and watched else nullcontext():
        outcome = run_rank_here(train_rank, (job,), place=place, directory=job.directory, tell=tell)
    return _result(job, outcome, outcome.stopped_by)


def train_to_prove(
    recipe: Recipe | SentRecipe | str,
    plan: Plan,
    *,
    overrides: Sequence[str],
    directory: Path,
    resume: bool,
    validate_every: int,
) -> None:
    """Train by a plan on CPUs for `headway verify --whole`; see `TrainJob.proving`."""
    from headway.run.recipe.sent_recipe import SentRecipe

    reference = recipe if isinstance(recipe, SentRecipe) else sendable_recipe(recipe, overrides)
    job = TrainJob(
        recipe=reference,
        # An object that is sent here has taken them in; one that was sent before has not.
        overrides=tuple(overrides) if isinstance(reference, str | SentRecipe) else (),
        directory=directory,
        plan=plan,
        resume=resume,
        device="cpu",
        timeout_seconds=_seconds("--timeout", TIMEOUT),
        patience_seconds=_seconds("--patience", PATIENCE),
        trace_every=0,
        validate_every=validate_every,
        proving=True,
    )
    start_forkserver(plan.ranks)
    _launch(job, plan.ranks)


def _launch(
    job: TrainJob,
    processes: int,
    restarts: int = 0,
    faults: tuple[Fault, ...] = (),
    emulated: EmulatedCluster | PacedCluster | None = None,
    observer: TrainingObserver | None = None,
    *,
    guarded: bool = False,
) -> TrainingResult:
    """Train in local workers of our own."""
    from headway.launch.local import launch_local
    from headway.launch.restart_policy import RestartPolicy
    from headway.run.recipe.sent_recipe import send_recipe

    job = replace(job, recipe=send_recipe(job.recipe))
    first = RunDirectory(job.directory).next_attempt if job.resume else 0
    if faults:
        happening = FaultInjector(
            faults=faults, directory=job.directory, first_attempt=first, emulated=emulated
        )
        job = replace(job, before_step=happening)
    with observer.watch(job.directory, launched=True) if observer else nullcontext():
        result = launch_local(
            # By name: imported here, it would double the seconds of the start.
            "headway.run.training.loop:train",
            (job,),
            processes=processes,
            directory=job.directory,
            policy=RestartPolicy(limit=restarts),
            first_attempt=first,
            emulated=emulated,
            on_restart=None if observer is None else observer.restarted,
            stopped_seconds=2 * job.patience_seconds or None,
            guarded=guarded,
        )
    if result.killed:
        ranks = ", ".join(map(str, result.killed))
        warnings.warn(f"ranks {ranks} did not stop in time and were killed", stacklevel=2)
    # Of any rank that lived to say it; those that were killed said nothing.
    outcomes = [value for value in result.results if value is not None]
    outcome = next(iter(outcomes), None)
    # Who has not itself heard of a death says nothing of it: a worker that came back, for one.
    for text in max((each.lost for each in outcomes), key=len, default=()):
        warnings.warn(text, stacklevel=2)
    stopped_by = result.stopped_by or (outcome.stopped_by if outcome else None)
    return _result(job, outcome, stopped_by, result.attempts)


def _result(
    job: TrainJob, outcome: TrainingOutcome | None, stopped_by: str | None, attempts: int = 1
) -> TrainingResult:
    return TrainingResult(
        directory=job.directory,
        steps=outcome.steps if outcome else None,
        loss=outcome.loss if outcome else None,
        validation=outcome.validation if outcome else None,
        metrics=outcome.metrics if outcome else {},
        best_step=outcome.best_step if outcome else None,
        stopped_by=stopped_by,
        attempts=attempts,
    )
