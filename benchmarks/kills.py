"""Kills ranks or the launcher at random moments, from the first millisecond on.

    PYTHONPATH=src:tests python benchmarks/kills.py --kills 40 --seed 1 [--families ddp zero-3]

Every run must end with the parameters of an undisturbed one, bit by bit (after --resume where the
launcher was killed), and leave neither processes nor files in its directory for temporary files.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from support.commands import newest_tensors

FAMILIES: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "fp16": ("exchange.compress='fp16'",),
    "top-k": ("exchange.compress='topk:0.1'",),
    "priority": ("exchange.priority=true",),
    "zero-1": ("zero=1",),
    "zero-2": ("zero=2",),
    "zero-3": ("zero=3",),
    "pipeline": ("stages=2",),
}
TESTS = Path(__file__).resolve().parent.parent / "tests"
LIMIT = 240.0


def start(folder: Path, family: str, *words: str) -> subprocess.Popen[str]:
    settings = [word for setting in FAMILIES[family] for word in ("--set", setting)]
    path = os.pathsep.join((str(TESTS), str(TESTS.parent / "src")))
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "headway", "train", "support.recipes:trapped", "-n", "2",
         "--device", "cpu", "-d", "run", *settings, *words],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
    )  # fmt: skip


def finished(job: subprocess.Popen[str]) -> tuple[int | None, str]:
    try:
        _, err = job.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        job.kill()
        return None, f"no end within {LIMIT:g} s"
    return job.returncode, err


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def workers(launcher: int) -> list[int]:
    """The forkserver's children; none before the first has been forked."""
    return [rank for child in children(launcher) for rank in children(child)]


def left_behind(folder: Path) -> list[str]:
    """Processes and files of a run that has ended."""
    mark = f"TMPDIR={folder / 'tmp'}".encode()
    deadline = time.monotonic() + 20
    while True:
        found = [
            *map(str, (folder / "tmp").glob("pymp-*")),
            *map(str, (folder / "tmp").glob("headway-*")),
        ]
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(f"process {entry.name}")
            except OSError:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def disturbed(folder: Path, family: str, moment: float, victim: str) -> str:
    """What is wrong after one kill; empty: nothing."""
    job = start(folder, family)
    time.sleep(moment)
    killed = [job.pid] if victim == "launcher" else workers(job.pid)
    while victim == "rank" and not killed and job.poll() is None:
        time.sleep(0.001)  # the first millisecond of a rank
        killed = workers(job.pid)
    if killed and job.poll() is None:
        os.kill(random.choice(killed), signal.SIGKILL)
    code, err = finished(job)
    left = left_behind(folder)
    if left:
        return f"left behind: {left}"
    if victim == "launcher":
        code, err = finished(start(folder, family, "--resume"))
    return "" if code == 0 else f"exit code {code}: {err[-1500:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    asked = parser.parse_args()
    random.seed(asked.seed)
    expected: dict[str, dict[str, torch.Tensor]] = {}
    seconds: dict[str, float] = {}
    failures = 0
    for number in range(asked.kills):
        family = asked.families[number % len(asked.families)]
        with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            if family not in expected:
                begin = time.monotonic()
                code, err = finished(start(folder, family))
                if code != 0:
                    raise SystemExit(f"{family} fails undisturbed: {err}")
                seconds[family] = time.monotonic() - begin
                expected[family] = newest_tensors(folder / "run")
                subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
            moment = random.uniform(0.0, seconds[family])
            victim = random.choice(["rank", "rank", "launcher"])
            wrong = disturbed(folder, family, moment, victim)
            if not wrong:
                got, want = newest_tensors(folder / "run"), expected[family]
                different = [key for key in want if not torch.equal(want[key], got[key])]
                wrong = f"differs: {different[:3]}" if different else ""
            failures += bool(wrong)
            print(f"{family:9} {victim:8} at {moment:6.3f} s: {wrong or 'equal'}", flush=True)
    print(f"{asked.kills - failures} of {asked.kills} ended bit-identical and left nothing")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
