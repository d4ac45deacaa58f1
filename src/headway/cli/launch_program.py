"""`headway launch -np N python SCRIPT.py`: processes, started as by horovodrun."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.terminal.console import exit_code, note, warn
from headway.errors import UsageError
from headway.launch.horovodrun.arguments import (
    HorovodrunRequest,
    commands_by_host,
    parse_horovodrun,
)
from headway.run.distributed.launch_env import free_port


def launch_program(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> int:
    """Start a Python program on processes of this machine, with the arguments of horovodrun.

    headway launch -np 2 python train.py --lr 0.1
    headway launch -np 2 --min-np 1 --host-discovery-script ./hosts.sh python train.py

    Used: -np N, -H HOST:SLOTS, --hostfile FILE, --output-filename FOLDER (in place of the
    terminal), --reset-limit N, and what headway.horovod goes by: fusion, cycle time, time-outs,
    timeline. Options of horovodrun that headway does not need are named with the reason; those that
    it cannot do are refused. For other hosts than this one the command for each is printed.

    With --min-np N or --host-discovery-script COMMAND the job is elastic: workers start and end
    with the hosts that the command prints (HOST:SLOTS), other hosts than this one through ssh. Then
    also --max-np N, --slots-per-host N, --elastic-timeout SECONDS, --reset-limit N (changes of
    workers), --blacklist-cooldown-range MIN MAX, --network-interfaces NAME, -p PORT and -i FILE.

    Args:
        words: Options of horovodrun, then the program with its arguments.
    """
    request = parse_horovodrun(words)
    for line in request.notes:
        warn(line)
    _check_hosts(request)
    if request.command[0] != "-m" and not Path(request.command[0]).is_file():
        raise UsageError("there is no such file", where=request.command[0])
    output = None if request.output is None else request.output.absolute()
    if request.elastic is not None:
        from headway.launch.elastic.driver import run_elastic

        return exit_code(
            run_elastic(
                request.command,
                request.elastic,
                variables=request.variables,
                output=output,
                tell=note,
            )
        )
    from headway.launch.local import launch_local
    from headway.launch.restart_policy import RestartPolicy

    result = launch_local(
        "headway.launch.horovodrun.program:run_program",
        (
            request.command,
            # The ranks of a program meet at rank 0's port; workers of headway need none.
            {**request.variables, "MASTER_PORT": str(free_port())},
            output,
        ),
        processes=request.processes,
        policy=RestartPolicy(limit=request.restarts),
        on_restart=lambda attempt, cause: note(f"{cause}; attempt {attempt}"),
    )
    return exit_code(result.stopped_by)


def _check_hosts(request: HorovodrunRequest) -> None:
    """Refuse hosts that are not this machine, with what to run on each."""
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    if {name for name, _ in request.hosts} <= here:
        return
    lines = [f"on {name}: {command}" for name, command in commands_by_host(request)]
    raise UsageError(
        "headway launch starts processes of this machine only",
        why="\n  ".join(lines),
        fix="Run these commands, each on its host; `headway launch RECIPE --write slurm` makes a "
        "job file of a recipe.",
    )
