"""A Python program as the workers of one machine: each runs it as `python` would."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.errors import WorkerFailed
from headway.run.distributed.launch_env import LaunchEnv


def run_program(place: LaunchEnv, command: Sequence[str], output: Path | None) -> None:
    """Run a script, or "-m" and a module, as __main__; rank and world are in the environment.

    Args:
        output: A folder in which this rank's output goes to rank.N/stdout and rank.N/stderr.

    Raises:
        WorkerFailed: The program ended with another status than 0.
    """
    if output is not None:
        _redirect(output / f"rank.{place.rank}")
    module = command[0] == "-m"
    name, *arguments = command[1:] if module else command
    sys.argv = [name, *arguments]
    # As the interpreter does: the script's folder, or the current one for a module.
    sys.path.insert(0, os.getcwd() if module else str(Path(name).resolve().parent))
    try:
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise WorkerFailed(f"the program called sys.exit({error.code!r})") from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _redirect(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
