"""`headway launch -np N python SCRIPT.py`: processes of this machine, started as by horovodrun."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.terminal.console import exit_code, note, warn
from headway.errors import UsageError
from headway.launch.horovodrun import HorovodrunRequest, commands_by_host, parse_horovodrun


def launch_program(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> int:
    """Start a Python program on processes of this machine, with the arguments of horovodrun.

    headway launch -np 2 python train.py --lr 0.1

    Used: -np N, -H HOST:SLOTS, --hostfile FILE, --output-filename FOLDER, --reset-limit N. Options
    of horovodrun that headway does not need are named with the reason; those that it cannot do are
    refused. For hosts other than this one the command for each of them is printed.

    Args:
        words: Options of horovodrun, then the program with its arguments.
    """
    request = parse_horovodrun(words)
    for line in request.notes:
        warn(line)
    _check_hosts(request)
    if request.command[0] != "-m" and not Path(request.command[0]).is_file():
        raise UsageError("there is no such file", where=request.command[0])
    from headway.launch.local import launch_local
    from headway.launch.restart_policy import RestartPolicy

    result = launch_local(
        "headway.launch.program:run_program",
        (request.command, None if request.output is None else request.output.absolute()),
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
