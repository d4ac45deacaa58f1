"""The headway command as a user runs it, or in the test's process, and what its run left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

import headway as headway_package
from headway.cli.main import main
from support.patience import patient
from support.ranks import warm_up
from support.warm_commands import warm_path

HERE = Path(__file__).parent.parent
HEADWAY = (sys.executable, "-m", "headway")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def environment(**changes: str) -> dict[str, str]:
    """The variables of the test's process, with the tests and the same headway importable."""
    path = os.pathsep.join((str(HERE), str(Path(headway_package.__file__).parent.parent)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def warm_variables() -> dict[str, str]:
    """By these `headway`, `python` and `torchrun` are processes forked from a warm one (Linux)."""
    folder = warm_path() if sys.platform == "linux" else Path(sys.executable).parent
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "PYTHON_EXEC": str(folder / "python")}  # torchrun starts workers by it


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


def command(
    *words: str, cwd: Path, timeout: float = 120, variables: Mapping[str, str] | None = None
) -> Done:
    """Run a command to its end."""
    start = time.monotonic()
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment(**(variables or {})),
        capture_output=True,
        text=True,
        timeout=patient(timeout),
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def headway(*words: str, cwd: Path, timeout: float = 120) -> Done:
    """Run a command in a process of its own, forked from a warm one."""
    return command("headway", *words, cwd=cwd, timeout=timeout, variables=warm_variables())


def headway_here(*words: str, cwd: Path) -> Done:
    """Run a command in this process; its workers are forked from the one that ranks come from.

    Spares the start of a command: ten seconds of processor time for two imports of torch. What the
    workers themselves print is neither in `out` nor in `err`.
    """
    warm_up()
    out, err = io.StringIO(), io.StringIO()
    start = time.monotonic()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.resetwarnings()  # as in a process of its own
        code = main(words)
    return Done(code, out.getvalue(), err.getvalue(), time.monotonic() - start)


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The whole lines of events.jsonl, of one kind or all."""
    path = run / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    found = [json.loads(line) for line in lines if line]
    return [event for event in found if kind in (None, event["event"])]


def wait_for_step(run: Path, step: int, job: subprocess.Popen[str], seconds: float = 90) -> None:
    """Until the run has done a step; fails if the job ends before."""
    deadline = time.monotonic() + patient(seconds)
    while not any(event["step"] >= step for event in events(run, "step")):
        assert job.poll() is None, f"the job ended early:\n{job.communicate()}"
        assert time.monotonic() < deadline, "the job is too slow"
        time.sleep(0.01)


def newest_tensors(run: Path) -> dict[str, Any]:
    """Logical name -> tensor of the newest checkpoint, read without headway's own code."""
    found: dict[str, Any] = {}
    newest = max((run / "checkpoints").glob("step-????????"))
    for path in sorted(newest.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def processes_of(run: Path) -> list[int]:
    """Processes whose command line or open files name the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            names = [os.readlink(link) for link in (entry / "fd").iterdir()]
            names.append((entry / "cmdline").read_text())
        except OSError:
            continue
        if any(str(run) in name for name in names):
            found.append(int(entry.name))
    return found


def none_left(run: Path, seconds: float = 6) -> bool:
    """Whether all processes of a run end within some seconds."""
    deadline = time.monotonic() + patient(seconds)
    while processes_of(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def resumed(
    cwd: Path, recipe: str, stages: Iterable[tuple[int, int, tuple[str, ...]]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last checkpoints of a run in stages, and of one process throughout; float64.

    Args:
        cwd: Gets both run directories.
        recipe: Its last step is that of the last stage.
        stages: (step at which it stops, processes, settings) of each.
    """
    double = "precision='float64'"
    for number, (steps, processes, settings) in enumerate(stages):
        words = [w for v in (double, f"stop={steps}", *settings) for w in ("--set", v)]
        done = headway_here(
            "train", recipe, "-n", str(processes), "-d", "parts", *words,
            *(["--resume"] if number else []), cwd=cwd,
        )  # fmt: skip
        assert done.code == 0, done.err
    done = headway_here("train", recipe, "-n", "1", "-d", "whole", "--set", double, cwd=cwd)
    assert done.code == 0, done.err
    return newest_tensors(cwd / "parts"), newest_tensors(cwd / "whole")
