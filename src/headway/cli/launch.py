"""`headway launch RECIPE --write slurm|kubernetes`: a job file for a cluster's own launcher."""

from __future__ import annotations

import os
import secrets
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from cyclopts import Parameter

from headway.cli.terminal.console import say
from headway.errors import UsageError
from headway.launch.job_files.kubernetes import kubernetes_manifest
from headway.launch.job_files.request import LaunchRequest
from headway.launch.job_files.slurm import slurm_script
from headway.plans import Plan
from headway.units import counted


def launch(
    recipe: str,
    /,
    *,
    write: Literal["slurm", "kubernetes"],
    nodes: int,
    directory: Annotated[str, Parameter(alias="-d")],
    processes: Annotated[int, Parameter(alias="-n")] = 1,
    gpus: Annotated[bool, Parameter(negative="")] = False,
    plan: str | None = None,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    time: str | None = None,
    partition: str | None = None,
    image: str | None = None,
    claim: str | None = None,
    memory: str = "8Gi",
    cpus: int | None = None,
) -> None:
    """Print a job file that trains a recipe on several machines; nothing is started.

    The job continues the run in its directory, each time that it is started.

    Args:
        recipe: As for `headway train`; the machines must be able to import it.
        write: Whose file: an sbatch script, or a Kubernetes manifest.
        nodes: Machines.
        directory: The run directory, on a file system that all machines share.
        processes: On each machine.
        gpus: A GPU for each process.
        plan: A plan.json, as the machines see it.
        overrides: KEY=VALUE, a change to the recipe; may be repeated.
        time: For Slurm: the time limit, as in 1-00:00:00.
        partition: For Slurm.
        image: For Kubernetes: the container image, with headway and the recipe's module.
        claim: For Kubernetes: the persistent volume claim that holds the run directory's parent.
        memory: For Kubernetes: the limit of a machine's pod.
        cpus: For Kubernetes: the limit of a machine's pod; by default one for each process.
    """
    if min(nodes, processes) < 1:
        raise UsageError("a job needs at least one machine and one process on each")
    place = PurePosixPath(os.path.normpath(directory))
    if not place.is_absolute() or len(place.parts) < 3:
        raise UsageError(
            f"the run directory {directory} is no absolute path below a shared folder",
            fix="Write --directory /SHARED/NAME, on a file system that all machines share.",
        )
    _check_plan(plan, nodes * processes)
    request = LaunchRequest(
        recipe=recipe,
        nodes=nodes,
        processes=processes,
        gpus=gpus,
        directory=place,
        plan=plan,
        overrides=overrides,
    )
    if write == "slurm":
        _refuse(write, {"--image": image, "--claim": claim, "--cpus": cpus})
        say(slurm_script(request, time=time, partition=partition).rstrip())
        return
    _refuse(write, {"--time": time, "--partition": partition})
    if image is None or claim is None:
        raise UsageError(
            "a Kubernetes job needs a container image and a volume that all pods share",
            fix="Add --image REGISTRY/NAME:TAG --claim NAME of a ReadWriteMany claim.",
        )
    manifest = kubernetes_manifest(
        request,
        image=image,
        claim=claim,
        secret=secrets.token_hex(32),
        memory=memory,
        cpus=processes if cpus is None else cpus,
    )
    say(manifest.rstrip())


def _check_plan(plan: str | None, ranks: int) -> None:
    """Refuse a plan for another number of processes, where it is seen from here."""
    if plan is None or not Path(plan).is_file():
        return
    made_for = Plan.load(Path(plan)).ranks
    if made_for != ranks:
        raise UsageError(
            f"the plan is for {counted(made_for, 'process')}, not for {ranks}",
            where=plan,
            fix="The machines times the processes on each must be the plan's number.",
        )


def _refuse(write: str, options: dict[str, object]) -> None:
    """Refuse options that the file of this launcher has no place for."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(f"{given[0]} is not for --write {write}", fix=f"Leave {given[0]} out.")
