"""kill -9 of a worker: how long until the full world has done its next step, and what was lost.

The peer is torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it, it does not come back
at all on Gloo with torch 2.13) around the same training program.

    python benchmarks/recovery.py [runs]
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pairs import HERE, PYTHON, events

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 3
EVERY, KILL_AFTER = 5, 12
TRAIN = ("train", "language_model:recipe", "--set", "arguments.steps=40",
         "--set", f"checkpoint_every={EVERY}", "--device", "cpu")  # fmt: skip
OURS = (PYTHON, "-m", "headway", *TRAIN, "-n", "2")
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", "1", "-m", "headway", *TRAIN)  # fmt: skip


def workers(launcher: int) -> list[int]:
    """Process ids of the ranks: those that hold the file of their rank open for writing."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                names = [os.readlink(link) for link in (entry / "fd").iterdir()]
            except OSError:
                continue
            found += [int(entry.name) for name in names if "/ranks/rank-00001" in name]
    return found


def once(command: tuple[str, ...]) -> tuple[float, int]:
    """Seconds from the kill to the next step of the full world, and steps done twice."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        job = subprocess.Popen(
            (*command, "-d", str(run)), cwd=HERE, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while not (run / "events.jsonl").exists() or len(events(run, "step")) < KILL_AFTER:
            time.sleep(0.02)
        (victim,) = workers(job.pid)
        killed = time.time()
        before = events(run, "step")[-1]["step"]
        os.kill(victim, signal.SIGKILL)
        if job.wait(timeout=300):
            raise SystemExit(f"{' '.join(command)} did not come back: exit {job.returncode}")
        again = next(e for e in events(run, "step") if e["attempt"] > 0)
        return again["time"] - killed, int(before - again["step"] + 1)


if __name__ == "__main__":
    print(f"kill -9, {COUNT} runs each, {time.strftime('%Y-%m-%d')}, checkpoint every {EVERY}")
    times: dict[str, list[float]] = {"headway": [], "torchrun": []}
    for _ in range(COUNT):
        for name, command in (("headway", OURS), ("torchrun", TORCHRUN)):
            seconds, lost = once(command)
            times[name].append(seconds)
            print(
                f"  {name:<9} next step of the full world after {seconds:.2f} s, "
                f"{lost} steps done again   load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    ours, peer = (statistics.median(times[name]) for name in ("headway", "torchrun"))
    print(
        f"  median {ours:.2f} s (target at most 4), torchrun {peer:.2f} s, ratio {ours / peer:.2f}"
    )
