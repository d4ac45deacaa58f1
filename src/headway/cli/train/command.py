"""`headway train RECIPE`: the options, the run directory, and the start of workers.

What can be checked without torch is checked first. Then this process either joins the world that
torchrun, srun or mpirun has started, or starts local workers through torch's elastic agent.
"""

from __future__ import annotations

import re
import signal
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headway.cli.terminal.console import note, say, say_json, show_error, warn
from headway.cli.terminal.progress import JsonLinesTail, ProgressDisplay
from headway.cli.train.emulation import count_ranks, read_emulation_options
from headway.cli.train.plan_selection import (
    AUTO,
    MEASURE,
    AutoPlanSearch,
    CollectiveName,
    CollectiveOption,
)
from headway.cluster import Fault
from headway.errors import HeadwayError, RunDirectoryTaken, UsageError
from headway.launch.emulation import EmulatedCluster, PacedCluster
from headway.launch.faults import FaultInjector
from headway.launch.forkserver import start_forkserver
from headway.plan import Plan, data_parallel_groups, pipelined
from headway.plan.plan import check_executable
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.check import CheckedRecipe, check_recipe
from headway.run.recipe.schema import RecipeDocument
from headway.run.training.job import TrainingOutcome, TrainJob
from headway.run.training.run_directory import RunDirectory
from headway.units import parse_seconds

RUNS = Path("runs")


@dataclass(frozen=True)
class _Result:
    """How the run ended, wherever it ran."""

    outcome: TrainingOutcome | None
    stopped_by: str | None
    attempts: int = 1


def train(
    recipe: str,
    /,
    *,
    processes: Annotated[int | None, Parameter(alias="-n")] = None,
    directory: Annotated[Path | None, Parameter(alias="-d")] = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    plan: Path | None = None,
    cluster: str = MEASURE,
    fallback: Annotated[bool, Parameter(negative="")] = False,
    collective: CollectiveName | None = None,
    schedule: Path | None = None,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    restarts: int = 3,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout: str = "5 min",
    patience: str = "5 s",
    emulate: Path | None = None,
    faults: Annotated[tuple[str, ...], Parameter(name="--fault", negative="")] = (),
    trace_steps: int = 50,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a recipe on one process or many.

    Args:
        recipe: A recipe.toml, module:function that returns a Recipe, or a bundled workload's name.
        processes: Local processes; by default those of the plan, else the recipe's stages.
        directory: The run directory; by default the next free runs/NAME-001.
        resume: Go on from the last checkpoint; without --directory, of the newest run.
        plan: A plan.json, or auto: the fastest that a search finds for this machine; by default
            data parallelism over all processes.
        cluster: For --plan auto and --collective: a cluster.toml or preset; by default --plan auto
            measures this machine.
        fallback: For --plan auto: train data parallel where no plan can be found.
        collective: Which program carries the sums of gradients: auto, all_reduce, hierarchical,
            ring, direct, halving-doubling, servers, trees; by default what the plan says.
        schedule: A CSV file with the table of a pipeline, one row per rank; it decides the stages.
        overrides: KEY=VALUE, a change to the recipe; may be repeated.
        restarts: How often dead workers are started again without a new checkpoint between.
        timeout: Longest wait for another process, such as "30 s" or "5 min".
        patience: A process of which nothing is heard for so long is lost; "0 s": never.
        emulate: A cluster.toml: run as if on its nodes, with its links; needs root for all of it.
        faults: What breaks, as in "kill rank 3 at step 7", "rank 3 2x slower" or, with --emulate,
            "link a-b 10x slower from step 20" and "cut link a-b at step 5"; may be repeated.
        trace_steps: Steps between detailed timelines; 0: only the first steps.
    """
    overrides += _schedule_overrides(schedule, plan)
    checked = check_recipe(recipe, overrides)
    place = LaunchEnv.here()
    scene = read_emulation_options(emulate, faults, place, device)
    network = None if cluster == MEASURE else cluster
    carried = CollectiveOption(name=collective, cluster=network, emulate=emulate)
    if plan != AUTO and collective is not None:
        cluster = MEASURE  # it is for the collective alone
    auto = _auto_plan(recipe, overrides, plan, cluster, scene.device, fallback=fallback)
    if auto is not None:
        plan = None
        default = auto.ranks(processes)
    else:
        default = _default_ranks(checked, plan)
    ranks = count_ranks(place, processes, default, scene.cluster)
    scene.check(ranks)
    known = _check_plan(checked, plan, ranks)
    seconds = _seconds("--timeout", timeout)
    patience_seconds = _seconds("--patience", patience)
    with scene.nodes() as emulated:
        path = choose_directory(checked.name, directory, place, resume=resume)
        find = None
        if not place.found_world:
            start_forkserver(ranks)  # its import of torch runs beside the one here
            if auto is not None:
                plan = auto.find(RunDirectory(path), ranks, emulated, resume=resume)
        elif auto is not None:
            find = partial(auto.find_in, directory=path, resume=resume)
        if auto is not None and plan is not None:
            known = Plan.load(plan)
        told = place.rank == 0
        by, carrier = carried.find(RunDirectory(path), known, ranks, resume=resume, told=told)
        job = TrainJob(
            recipe=recipe,
            overrides=overrides,
            directory=path,
            plan=plan,
            find=find,
            collective=by,
            carrier=carrier,
            resume=resume,
            device=scene.device,
            timeout_seconds=seconds,
            patience_seconds=patience_seconds,
            trace_every=trace_steps,
        )
        if place.found_world:
            result = _train_as_rank(place, job)
        else:
            result = _launch(job, ranks, restarts, scene.faults, emulated)
    if place.rank == 0:
        _print_result(path, result, json=json)
    return 0 if place.found_world else _exit_code(result.stopped_by)


def _auto_plan(
    recipe: str,
    overrides: tuple[str, ...],
    plan: Path | None,
    cluster: str,
    device: str,
    *,
    fallback: bool,
) -> AutoPlanSearch | None:
    """The search that --plan auto asks for; None: no search."""
    if plan == AUTO:
        return AutoPlanSearch(
            recipe=recipe, overrides=overrides, cluster=cluster, device=device, fallback=fallback
        )
    if cluster != MEASURE or fallback:
        option = "--fallback" if fallback else f"--cluster {cluster}"
        needs = "--plan auto" if fallback else "--plan auto or --collective"
        raise UsageError(f"{option} needs {needs}", fix="Add it, or leave this option out.")
    return None


def _schedule_overrides(schedule: Path | None, plan: Path | None) -> tuple[str, ...]:
    """What a table on the command line changes in the recipe."""
    if schedule is None:
        return ()
    if plan is not None:
        raise UsageError(
            f"--schedule {schedule} contradicts --plan {plan}: a plan has its own pipeline",
            fix="Leave one of them out.",
        )
    from headway.cli.schedule.show import recipe_overrides

    return recipe_overrides(schedule)


def _default_ranks(checked: CheckedRecipe, plan: Path | None) -> int:
    """Processes where nobody says how many: those of the plan, or one pipeline."""
    return _executable_plan(plan).ranks if plan else checked.document.stages or 1


def _check_plan(checked: CheckedRecipe, plan: Path | None, ranks: int) -> Plan | None:
    """Find now, without torch, what every worker would find seconds later; the plan, if known."""
    if plan is not None:
        found = Plan.load(plan)
        if found.ranks != ranks:
            raise UsageError(
                f"the plan is for {found.ranks} processes, not for {ranks}",
                where=str(plan),
                fix=f"Use --processes {found.ranks}, or another plan.",
            )
        return found
    if isinstance(checked.document, RecipeDocument):
        document = checked.document
        if document.tokens_per_sample is None:  # as the recipe that is made of it has it
            document = replace(document, tokens_per_sample=document.data.window)
        made = pipelined(
            resolve_batch(document),
            processes=ranks,
            microbatch=document.microbatch,
            exchange=document.exchange,
            stages=document.stages or 1,
            pipeline=document.pipeline,
            shares=document.shares or (),
            zero=document.zero or 0,
            shards=document.shards,
            split=document.split,
        )
        check_executable(made)
        return made
    stages, layers = checked.document.stages or 1, checked.document.split
    parts = layers.ranks if layers else 1  # all else is known when the function has been called
    data_parallel_groups(
        ranks, stages * parts, "ranks that split layers" if parts > 1 else "ranks of a pipeline"
    )
    return None


def _executable_plan(path: Path) -> Plan:
    """A plan that can be carried out."""
    plan = Plan.load(path)
    check_executable(plan)
    return plan


def _seconds(option: str, text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def choose_directory(name: str, given: Path | None, place: LaunchEnv, *, resume: bool) -> Path:
    """The run directory. In a world of another launcher all ranks must come to the same one, so
    that it is runs/NAME there, without a number."""
    if given is None and place.found_world:
        given = RUNS / name
    if given is None:
        return _newest(name) if resume else _next_free(name)
    if place.attempt == 0 and place.rank == 0:
        RunDirectory(given).check_free(resume=resume)
        if resume and not RunDirectory(given).recipe_file.exists():
            note(f"{given} holds no run yet; starting at step 0")
    return given


def _numbered(name: str) -> dict[int, Path]:
    """The run directories of this name, by number."""
    pattern = re.compile(re.escape(name) + r"-(\d{3,})")
    found = {}
    for path in RUNS.iterdir() if RUNS.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match:
            found[int(match.group(1))] = path
    return found


def _newest(name: str) -> Path:
    runs = {n: p for n, p in _numbered(name).items() if RunDirectory(p).recipe_file.exists()}
    if not runs:
        raise UsageError(
            f"there is no run of {name} to resume",
            where=str(RUNS),
            fix="Name it with --directory, or leave --resume out.",
        )
    return runs[max(runs)]


def _next_free(name: str) -> Path:
    """Creates the directory, so that a run started at the same moment gets another one."""
    RUNS.mkdir(exist_ok=True)
    number = max(_numbered(name), default=0) + 1
    for candidate in range(number, number + 100):
        path = RUNS / f"{name}-{candidate:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise RunDirectoryTaken("no free name for the run", where=str(RUNS / name))


def _train_as_rank(place: LaunchEnv, job: TrainJob) -> _Result:
    """Train as one rank of the world that another launcher has made; rank 0 shows the progress."""
    from headway.launch.worker import run_rank_here
    from headway.run.training.loop import train as train_rank

    display = ProgressDisplay(job.directory, live=False) if place.rank == 0 else nullcontext()

    def tell(error: HeadwayError) -> None:
        if isinstance(display, ProgressDisplay):
            display.close()
        show_error(error, trace=False)

    with display:
        outcome = run_rank_here(train_rank, (job,), place=place, directory=job.directory, tell=tell)
    return _Result(outcome, outcome.stopped_by)


def _launch(
    job: TrainJob,
    processes: int,
    restarts: int,
    faults: tuple[Fault, ...] = (),
    emulated: EmulatedCluster | PacedCluster | None = None,
) -> _Result:
    """Train in local workers of our own."""
    from headway.launch.local import launch_local
    from headway.launch.restart_policy import RestartPolicy

    causes: dict[int, str] = {}
    display = ProgressDisplay(job.directory, cause=lambda attempt: causes.get(attempt, ""))
    first = _next_attempt(RunDirectory(job.directory)) if job.resume else 0
    if faults:
        happening = FaultInjector(
            faults=faults, directory=job.directory, first_attempt=first, emulated=emulated
        )
        job = replace(job, before_step=happening)
    with display:
        result = launch_local(
            # By name: imported here, it would double the seconds of the start.
            "headway.run.training.loop:train",
            (job,),
            processes=processes,
            directory=job.directory,
            policy=RestartPolicy(limit=restarts),
            first_attempt=first,
            emulated=emulated,
            on_restart=causes.__setitem__,
        )
    if result.killed:
        warn(f"ranks {', '.join(map(str, result.killed))} did not stop in time and were killed")
    outcome = next((value for value in result.results if value is not None), None)
    stopped_by = result.stopped_by or (outcome.stopped_by if outcome else None)
    return _Result(outcome, stopped_by, result.attempts)


def _next_attempt(run: RunDirectory) -> int:
    """A resumed run goes on counting, so that the history knows which step was done last."""
    return (
        max(
            (event.get("attempt") or 0 for event in JsonLinesTail(run.events_file).read()),
            default=-1,
        )
        + 1
    )


def _print_result(path: Path, result: _Result, *, json: bool) -> None:
    outcome = result.outcome
    if json:
        facts: dict[str, object] = {
            "directory": str(path),
            "steps": outcome.steps if outcome else None,
            "loss": outcome.loss if outcome else None,
            "validation": outcome.validation if outcome else None,
            "stopped_by": result.stopped_by,
            "attempts": result.attempts,
        }
        say_json(facts)
        return
    say(f"run directory  {path}")
    if result.stopped_by is None:
        say(f"next           headway report {path}")


def _exit_code(stopped_by: str | None) -> int:
    """0, or 128 + the number of the signal that asked for the end, as shells have it."""
    if stopped_by is None:
        return 0
    number = getattr(signal, stopped_by, None)
    return 128 + int(number) if number is not None else 130
