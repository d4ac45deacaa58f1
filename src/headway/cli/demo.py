"""`headway demo`: train a small language model on two processes, verify it, write its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.main import run_command
from headway.cli.terminal.console import say
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.training.run_directory import choose_directory

RECIPE = "headway.workloads.transformer:demo"


def demo(
    *,
    processes: Annotated[int, Parameter(alias="-n")] = 2,
    directory: Annotated[Path | None, Parameter(alias="-d")] = None,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
) -> int:
    """Train a byte-level transformer on the standard library's source; verify and report it.

    Args:
        processes: Local processes.
        directory: The run directory; by default the next free runs/demo-001.
        overrides: KEY=VALUE, a change to the recipe; may be repeated.
    """
    # Chosen here, so that all three commands have the same one.
    path = choose_directory("demo", directory, LaunchEnv.here(), resume=False)
    changes = [f"--set={change}" for change in overrides]
    say(f"1/3  Train a transformer on the Python standard library, {processes} processes\n")
    words = ["train", RECIPE, f"--processes={processes}", f"--directory={path}", *changes]
    stopped = run_command(words)
    if stopped:
        # A signal is no error: the exit code alone says that the rest is left out.
        return stopped
    say(f"\n2/3  Compare {processes} processes with the serial run (float64)\n")
    words = ["verify", RECIPE, f"--processes=1,{processes}", "--steps=3", f"--directory={path}"]
    run_command([*words, *changes])
    say("\n3/3  Report\n")
    return run_command(["report", str(path)])
