"""Kills and stops processes of asynchronous, bounded and gossip runs at random moments.

    PYTHONPATH=src:benchmarks python benchmarks/worker_kills.py --runs 50 --seed 1 --log kills.jsonl
    PYTHONPATH=src:benchmarks python benchmarks/worker_kills.py --summary kills.jsonl

Each run has its own kind of agreement (`WAYS`), random delays before every sample, and is disturbed
at random moments, mostly behind its first step: processes are killed, or stopped for a while. A
signal that reaches a process of a run that has not ended counts. In the end

- every launch has ended, with exit code 0;
- workers that have died, and were not started again, are named in the events;
- `headway train --replay` of the run, without a kill and under other delays, ends with the same
  checkpoint, byte by byte.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 150.0
STEPS = 60
RANKS = 3
RESTARTS = 6
WAYS: dict[str, dict[str, Any]] = {
    "asynchronous": {"kind": "asynchronous"},
    "single": {"kind": "asynchronous", "topology": "single"},
    "downpour": {"kind": "asynchronous", "fetch_every": 3, "push_every": 2, "topology": "single"},
    "bounded": {"kind": "bounded", "delay_bound": 2},
    "bounded single": {"kind": "bounded", "delay_bound": 2, "topology": "single"},
    "eager": {
        "kind": "bounded", "delay_bound": 2, "remedy": "eager_push", "topology": "single"
    },
    "snapshot": {"kind": "bounded", "delay_bound": 2, "read": "snapshot", "topology": "single"},
    "value": {"kind": "bounded", "value_bound": 0.02, "topology": "single"},
    "compensation": {"kind": "asynchronous", "remedy": "delay_compensation"},
    "backups": {"topology": "single", "backup_workers": 1},
    "elastic": {"merge": "elastic", "kind": "asynchronous", "local_steps": 2},
    "tree": {
        "merge": "elastic", "kind": "asynchronous", "topology": "tree", "period_up": 2,
        "period_down": 3,
    },
    "pairs": {"merge": "pairwise", "kind": "asynchronous"},
    "gossip": {"merge": "push_sum", "kind": "asynchronous", "probability": 0.5},
}  # fmt: skip


def recipe(way: str = "single") -> Any:
    """A tiny model on samples that take a random while."""
    import torch
    from torch import nn

    import headway
    from headway.plans import Synchrony

    class Slow(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            draw = torch.Generator().manual_seed(3)
            self.x = torch.randn(50, 4, generator=draw)
            self.delays = random.Random(time.time_ns())

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, number: int) -> Any:
            time.sleep(self.delays.random() ** 4 * 0.05)
            return self.x[number], self.x[number].sum(0, keepdim=True).sin()

    return headway.Recipe(
        name="killed",
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        data=Slow,
        loss=nn.MSELoss(),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 20, 0.5),
        batch=12,
        stop=STEPS,
        synchrony=Synchrony(**WAYS[way]),
    )


def started(folder: Path, way: str, *more: str) -> subprocess.Popen[bytes]:
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    words = ["-m", "headway", "train", "worker_kills:recipe", "-n", str(RANKS), "--device", "cpu"]
    words += ["--set", f"arguments.way={way}", "--restarts", str(RESTARTS), *more]
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    with (folder / "err").open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, *words], cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        )  # fmt: skip


def notes(folder: Path, kind: str) -> dict[int, Path]:
    """Notes of the ranks of the present attempt."""
    attempts = sorted((folder / "tmp").glob("pymp-*/headway-*/attempt-*"), key=lambda p: p.name)
    found = attempts[-1].glob(f"{kind}-*") if attempts else ()
    return {int(note.name.partition("-")[2]): note for note in found}


def until(holds: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    while not holds() and job.poll() is None:
        time.sleep(0.005)


def disturb(
    job: subprocess.Popen[bytes], folder: Path, draw: random.Random, kills: int
) -> list[dict[str, Any]]:
    """Strike at random moments; what was done."""
    done: list[dict[str, Any]] = []
    for _ in range(kills):
        early, seconds = draw.random() < 0.1, draw.choice((0.3, 1.5)) * draw.random()
        until(lambda e=early: len(notes(folder, "pid" if e else "free")) == RANKS, job)  # type: ignore[misc]
        end = time.monotonic() + seconds
        until(lambda end=end: time.monotonic() > end, job)  # type: ignore[misc]
        rank, stops, still = draw.randrange(RANKS), draw.random() < 0.15, draw.random()
        try:
            pid = int(notes(folder, "pid")[rank].read_text())
            if job.poll() is not None:
                break
            os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
            if stops:
                time.sleep(still)
                os.kill(pid, signal.SIGCONT)
        except (OSError, KeyError, ValueError):  # it has died already
            continue
        done.append({"rank": rank, "kind": "stop" if stops else "kill"})
    return done


def end(job: subprocess.Popen[bytes]) -> int | None:
    try:
        return job.wait(LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        return None


def events(folder: Path) -> list[dict[str, Any]]:
    found = []
    for line in (folder / "run" / "events.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def checkpoint(folder: Path) -> dict[str, bytes]:
    root = folder / "checkpoints"
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*.safetensors")}


def one(number: int, seed: str, root: Path) -> dict[str, Any]:
    draw = random.Random(f"{seed}/{number}")
    way = draw.choice(list(WAYS))
    folder = root / f"run-{number}"
    folder.mkdir(parents=True)
    job = started(folder, way, "-d", "run")
    done = disturb(job, folder, draw, draw.choice((1, 2, 3, 4)))
    code = end(job)
    row: dict[str, Any] = {"number": number, "way": way, "done": done, "code": code}
    if code == 0:
        said = [e["text"] for e in events(folder) if e["event"] == "warning"]
        row["said"] = [text for text in said if re.match(r"(worker|server|centre) ", text)]
        row["attempts"] = 1 + max(event["attempt"] for event in events(folder))
        row["replay"] = end(started(folder, way, "-d", "again", "--replay", "run"))
        own = checkpoint(folder / "run")
        row["equal"] = bool(own) and own == checkpoint(folder / "again")
    if code == 0 and row["replay"] == 0 and row["equal"]:
        shutil.rmtree(folder)
    else:
        row["error"] = (folder / "err").read_text()[-3000:]
        row["folder"] = str(folder)
    return row


def summary(rows: list[dict[str, Any]]) -> str:
    kinds = collections.Counter(did["kind"] for row in rows for did in row["done"])
    ended = sum(row["code"] == 0 for row in rows)
    equal = sum(bool(row.get("equal")) for row in rows)
    whole = sum(row.get("attempts", 1) > 1 for row in rows)
    hung = sum(row["code"] is None or ("replay" in row and row["replay"] is None) for row in rows)
    lines = [
        f"{len(rows)} runs, {kinds['kill']} kills, {kinds['stop']} stops",
        f"ended with exit code 0: {ended}; without an end within {LIMIT:g} s: {hung}",
        f"started again as a whole: {whole}",
        f"replayed with equal checkpoints: {equal} of {ended}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--log", type=Path, default=Path("worker-kills.jsonl"))
    parser.add_argument("--summary", type=Path)
    given = parser.parse_args()
    if given.summary:
        print(summary([json.loads(line) for line in given.summary.read_text().splitlines()]))
        return
    root, began = Path(tempfile.mkdtemp(prefix="worker-kills-")), time.monotonic()
    rows = []
    with given.log.open("a") as log:
        for number in range(given.first, given.first + given.runs):
            if time.monotonic() - began > given.seconds:
                break
            rows.append(one(number, given.seed, root))
            log.write(json.dumps(rows[-1]) + "\n")
            log.flush()
    print(summary(rows))


if __name__ == "__main__":
    main()
