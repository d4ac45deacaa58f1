"""A million tensors through channels whose ends are killed at random moments.

    python benchmarks/channel_torture.py [provider [tensors [seed]]]

Two processes put and get tensors both ways, in bursts of random length with random delays, until
one of them is killed (SIGKILL) at a random moment; two others go on. Each pair draws whether its
channel is dynamic (random sizes) or static, and how many slots it has; each tensor, whether it is
made in the region or copied there. Every tensor is checked: number, size, and a sum in its last 8
bytes. Prints how many came, how long the survivors took to notice, and what is left in /dev/shm.

With "mpi" (MPICH: `pip install mpi4py mpich`) each pair is a job of two processes behind shells
that stay, because MPICH's launcher ends all others when it sees that one has died; at the end some
jobs without such shells show that it does. What MPICH itself leaves in /dev/shm is removed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.channel import Channel
from headway.errors import PeerLost

WORDS = (*(2, 3, 17, 128, 300, 5000) * 100, 100_000)
SLOTS = (1, 2, 3, 16)
SECONDS = (0.0, 4.0)
"""Of a life, from the first put."""
SOON = 5.0
"""Seconds in which a death has to be noticed."""
JOBS = 3
"""Of MPI that end as a whole."""
STAY = '"$0" "$@"; while [ -d "$3" ]; do sleep 0.05; done'
"""A shell: runs a program, and stays as long as there is the folder that is its third argument."""


class Torn(Exception):
    """A tensor is not what was put."""


def draw_form(seed: int) -> tuple[int | None, int]:
    """The words of all tensors of a life (None: each has its own), and the slots."""
    draw = random.Random(seed)
    return draw.choice([None, None, draw.choice(WORDS)]), draw.choice(SLOTS)


def give(channel: Channel, words: int, fixed: bool, inside: bool, number: int) -> None:
    """Put a tensor of so many words, made in the region or copied into it."""
    if not inside:
        tensor = torch.empty(words, dtype=torch.int64)
    else:
        tensor = channel.buffer if fixed else channel.empty((words,), torch.int64)
    tensor.fill_(number)
    tensor[-1] = number * (words - 1)
    channel.put(tensor)


def check(came: torch.Tensor, words: int, number: int) -> None:
    expected = number * (words - 1)
    if len(came) != words or came[-1].item() != expected:
        raise Torn(f"tensor {number} is lost, doubled or torn")
    if came.sum().item() != 2 * expected:
        raise Torn(f"tensor {number} is torn")


def swap(channel: Channel, rank: int, seed: int) -> int:
    """Put and get until the other end is gone; how many came.

    Neither end is ever more than its slots ahead, so that none waits for the other in a circle.
    """
    fixed, slots = draw_form(seed)
    mine, theirs = random.Random(seed * 2 + rank), random.Random(seed * 2 + 1 - rank)
    own = random.Random(seed + 7919 * rank)
    sent = got = 0
    try:
        while True:
            for _ in range(own.randint(1, slots + got - sent)):
                inside = own.random() < 0.5
                give(channel, fixed or mine.choice(WORDS), bool(fixed), inside, sent)
                sent += 1
            if own.random() < 0.002:
                time.sleep(own.random() * 0.001)
            for _ in range(own.randint(1, sent - got)):
                with channel.get() as came:
                    check(came, fixed or theirs.choice(WORDS), got)
                got += 1
    except PeerLost:
        return got


def one_end(provider: str, folder: str, seed: int, rank: int) -> None:
    """A process: writes `open.RANK`, then `came.RANK`, or `torn.RANK`."""
    torch.set_num_threads(1)
    fixed, slots = draw_form(seed)
    store = None if provider == "mpi" else dist.FileStore(f"{folder}/store", 2)
    channel = Channel(
        1 - rank,
        shape=None if fixed is None else (fixed,),
        dtype=torch.int64,
        provider=provider,
        slots=slots,
        store=store,
        rank=rank,
        timeout=60,
        capacity=8 * WORDS[-1],
    )
    say(folder, f"open.{rank}", str(os.getpid()))
    try:
        came = swap(channel, rank, seed)
        say(folder, f"came.{rank}", f"{came} {time.monotonic()}")
    except Exception as error:  # Torn, or what the channel itself has found
        say(folder, f"torn.{rank}", f"rank {rank}: {type(error).__name__}: {error}")
    os._exit(0)


def say(folder: str, name: str, text: str) -> None:
    """A file that is there as a whole or not at all."""
    (Path(folder) / f"{name}.part").write_text(text)
    (Path(folder) / f"{name}.part").rename(Path(folder) / name)


def hear(folder: str, name: str, seconds: float) -> str:
    """A file that a process writes; ends the whole program where it does not come in time."""
    deadline = time.monotonic() + seconds
    while not (Path(folder) / name).exists():
        stop_if_torn(folder)
        if time.monotonic() > deadline:
            raise SystemExit(f"{name} did not come within {seconds:g} s")
        time.sleep(0.002)
    return (Path(folder) / name).read_text()


def stop_if_torn(folder: str) -> None:
    for torn in Path(folder).glob("torn.?"):
        raise SystemExit(torn.read_text())


def begin(provider: str, folder: str, seed: int, *before: str) -> Callable[[], Any]:
    """Start both ends, of MPI with some words before their command; returns what waits for them."""
    if provider == "mpi":
        beside = Path(sys.executable).parent / "mpiexec"
        launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
        end = [sys.executable, __file__, "--end", folder, str(seed)]
        quiet = subprocess.DEVNULL
        command = [str(launcher), "-n", "2", *before, *end]
        job = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        return lambda: job.wait(SOON)
    start = multiprocessing.get_context("forkserver")
    ends = [start.Process(target=one_end, args=(provider, folder, seed, r)) for r in (0, 1)]
    for end in ends:
        end.start()
    return lambda: [end.join(SOON) for end in ends]


def of_mpich(process: int) -> list[Path]:
    """The segments in /dev/shm that MPICH has made for a process."""
    lines = Path(f"/proc/{process}/maps").read_text().split("\n")
    return [Path(name) for name in {line.split()[-1] for line in lines if "/mpich_shm" in line}]


def life(provider: str, seed: int) -> tuple[int, float]:
    """Tensors that came, and the seconds from the kill to the error of the survivor."""
    draw = random.Random(seed)
    slots = draw_form(seed)[1]
    with tempfile.TemporaryDirectory() as folder:
        wait = begin(provider, folder, seed, "sh", "-c", STAY)
        ends = [int(hear(folder, f"open.{rank}", 60)) for rank in (0, 1)]
        time.sleep(draw.uniform(*SECONDS))
        mortal = draw.randrange(2)
        stop_if_torn(folder)
        segments = of_mpich(ends[mortal])
        os.kill(ends[mortal], signal.SIGKILL)
        killed = time.monotonic()
        came, at = hear(folder, f"came.{1 - mortal}", SOON).split()
        stop_if_torn(folder)
    wait()
    for segment in segments:
        segment.unlink(missing_ok=True)
    return 2 * int(came) - slots, float(at) - killed  # the dead end had at least so many


def job_that_ends(seed: int) -> float:
    """Seconds from the kill of a process of MPI to the end of the whole job."""
    with tempfile.TemporaryDirectory() as folder:
        wait = begin("mpi", folder, seed)
        ends = [int(hear(folder, f"open.{rank}", 60)) for rank in (0, 1)]
        time.sleep(random.Random(seed).uniform(0.1, 1.0))
        segments = of_mpich(ends[0])
        os.kill(ends[seed % 2], signal.SIGKILL)
        killed = time.monotonic()
        wait()
        took = time.monotonic() - killed
        for segment in segments:
            segment.unlink(missing_ok=True)
        if any(Path(f"/proc/{end}").exists() for end in ends):
            raise SystemExit("a process of an MPI job that has ended is still there")
    return took


def left() -> set[str]:
    """What is in /dev/shm, but for multiprocessing's locks in other programs."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.mp-")}


def main() -> None:
    if sys.argv[1:2] == ["--end"]:
        from mpi4py import MPI

        one_end("mpi", sys.argv[2], int(sys.argv[3]), MPI.COMM_WORLD.rank)
    provider = (sys.argv[1:] or ["shared_memory"])[0]
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "headway.channel"])
    before, began = left(), time.monotonic()
    came, delays = 0, list[float]()
    while came < most:
        count, delay = life(provider, seed + len(delays))
        came += count
        delays.append(delay)
        passed, form = time.monotonic() - began, draw_form(seed + len(delays) - 1)
        how = f"{form} {came} tensors, {passed:.0f} s"
        print(f"  life {len(delays)}: {how}, noticed after {delay * 1e3:.1f} ms", flush=True)
    new = sorted(left() - before)
    print(
        f"{provider}: {came} tensors, {len(delays)} kills, none lost, doubled or torn; noticed "
        f"after {statistics.median(delays) * 1e3:.1f} ms, at most {max(delays) * 1e3:.1f}; "
        f"left in /dev/shm: {new or 'nothing'}"
    )
    if provider == "mpi":
        ended = [job_that_ends(seed + number) for number in range(JOBS)]
        print(f"plain mpiexec: all ended {', '.join(f'{s * 1e3:.0f}' for s in ended)} ms after")


if __name__ == "__main__":
    main()
