"""`headway train RECIPE`: the options, the progress display, and the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headway.api.plan_selection import MEASURE, CollectiveName
from headway.api.training import PATIENCE, TIMEOUT, TRACE_STEPS, TrainingResult
from headway.api.training import train as train_recipe
from headway.cli.terminal.console import exit_code, say, say_json
from headway.cli.terminal.progress import RunDisplay
from headway.launch.restart_policy import RESTARTS
from headway.run.distributed.launch_env import LaunchEnv


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
    restarts: int = RESTARTS,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout: str = TIMEOUT,
    patience: str = PATIENCE,
    emulate: Path | None = None,
    faults: Annotated[tuple[str, ...], Parameter(name="--fault", negative="")] = (),
    replay: Path | None = None,
    trace_steps: int = TRACE_STEPS,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a recipe on one process or many.

    Args:
        recipe: A recipe.toml, module:function that returns a Recipe, or a bundled workload's name.
        processes: Local processes; by default those of the plan, else the recipe's stages.
        directory: The run directory; by default the next free runs/NAME-001.
        resume: Continue from the last checkpoint; without --directory, of the newest run.
        plan: A plan.json, or auto: the fastest that a search finds for this machine; by default
            data parallelism over all processes.
        cluster: For --plan auto and --collective: a cluster.toml or preset; by default --plan auto
            measures this machine.
        fallback: For --plan auto: train data parallel where no plan can be found.
        collective: Which all-reduce algorithm to use for gradients: auto, all_reduce,
            hierarchical, ring, direct, halving-doubling, servers, trees; by default the plan's.
        schedule: A CSV file with a pipeline schedule, one row per rank; it sets the stages.
        overrides: KEY=VALUE, a change to the recipe; may be repeated.
        restarts: Most restarts of dead workers without a new checkpoint in between.
        timeout: Longest wait for another process, such as "30 s" or "5 min".
        patience: Declare a worker lost after this long without a heartbeat; "0 s": never.
        emulate: A cluster.toml: run as if on its nodes, with its links; needs root for all of it.
        faults: Faults to inject, as in "kill rank 3 at step 7", "rank 3 2x slower" or, with
            --emulate, "link a-b 10x slower from step 20" and "cut link a-b at step 5"; may be
            repeated.
        replay: A run directory of an asynchronous run, whose plan and history are repeated.
        trace_steps: Steps between detailed timelines; 0: only the first steps.
        device: Where to compute; auto: on GPUs where there are some.
    """
    result = train_recipe(
        recipe,
        processes=processes,
        directory=directory,
        resume=resume,
        # A text: "auto" is a word, not the path that the parser makes of it.
        plan=None if plan is None else str(plan),
        cluster=cluster,
        fallback=fallback,
        collective=collective,
        schedule=schedule,
        overrides=overrides,
        restarts=restarts,
        device=device,
        timeout=timeout,
        patience=patience,
        emulate=emulate,
        faults=faults,
        replay=replay,
        trace_steps=trace_steps,
        observer=RunDisplay(),
    )
    place = LaunchEnv.here()
    # Under torchrun every rank runs this command; one of them speaks.
    if place.rank == 0:
        _print_result(result, json=json)
    # Launchers take any other code for a failed rank, and kill or restart the job.
    return 0 if place.found_world else exit_code(result.stopped_by)


def _print_result(result: TrainingResult, *, json: bool) -> None:
    if json:
        facts: dict[str, object] = {
            "directory": str(result.directory),
            "steps": result.steps,
            "loss": result.loss,
            "validation": result.validation,
            "stopped_by": result.stopped_by,
            "attempts": result.attempts,
        }
        say_json(facts)
        return
    say(f"run directory  {result.directory}")
    if result.stopped_by is None:
        say(f"next           headway report {result.directory}")
