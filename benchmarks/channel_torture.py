"""A million tensors through channels whose ends are killed at random moments.

    python benchmarks/channel_torture.py [provider [tensors [seed]]]

Two processes put and get tensors of random size with random delays, both ways; after a random time
one of them is killed (SIGKILL), and two others go on. Every tensor is checked: number, size, and a
sum in its last 8 bytes. Prints how many came, how long the survivor took to notice, and what is
left in /dev/shm. With "mpi" nobody is killed, because MPI's launcher ends both; start
that one as `mpiexec -n 2 python benchmarks/channel_torture.py mpi`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from headway.channel import Channel
from headway.errors import PeerLost

WORDS = (2, 3, 17, 128, 300, 5000)
SECONDS = (0.2, 6.0)
"""Of a life, from the first put."""


def swap(channel: Channel, rank: int, seed: int, most: int) -> int:
    """Put and get until the other end is gone, or `most` have come; how many came."""
    mine, theirs = random.Random(seed * 2 + rank), random.Random(seed * 2 + 1 - rank)
    delays = random.Random(seed + 7919 * rank)
    number = 0
    try:
        while number < most:
            words = mine.choice(WORDS)
            tensor = channel.empty((words,), torch.int64).fill_(number)
            tensor[-1] = number * (words - 1)
            channel.put(tensor)
            if delays.random() < 0.001:
                time.sleep(delays.random() * 0.001)
            with channel.get() as came:
                expected = number * (len(came) - 1)
                if len(came) != theirs.choice(WORDS) or came[-1].item() != expected:
                    raise SystemExit(f"tensor {number} is lost, doubled or torn")
                if came.sum().item() != 2 * expected:
                    raise SystemExit(f"tensor {number} is torn")
            number += 1
    except PeerLost:
        pass
    return number


def one_end(tell: Connection, rank: int, provider: str, folder: str, seed: int, most: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    channel = Channel(1 - rank, provider=provider, store=store, rank=rank, timeout=60)
    tell.send(None)  # it is open
    came = swap(channel, rank, seed, most)
    tell.send((came, time.monotonic()))
    os._exit(0)


def life(provider: str, seed: int, most: int) -> tuple[int, float]:
    """Tensors that came to the survivor, and its seconds from the kill to the error."""
    draw = random.Random(seed)
    start = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [start.Pipe(duplex=False) for _ in range(2)]
        ends = [
            start.Process(target=one_end, args=(tell, rank, provider, folder, seed, most))
            for rank, (_, tell) in enumerate(pipes)
        ]
        for end in ends:
            end.start()
        for _, tell in pipes:
            tell.close()
        for hear, _ in pipes:
            hear.recv()
        time.sleep(draw.uniform(*SECONDS))
        mortal = draw.randrange(2)
        ends[mortal].kill()
        killed = time.monotonic()
        hear = pipes[1 - mortal][0]
        if not hear.poll(90):
            raise SystemExit("the survivor never noticed")
        came, at = hear.recv()
        for end in ends:
            end.join()
        if ends[1 - mortal].exitcode:
            raise SystemExit("the survivor failed")
    return came, at - killed


def under_mpi(most: int, seed: int) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    torch.set_num_threads(1)
    with Channel(1 - rank, provider="mpi", timeout=60) as channel:
        came = swap(channel, rank, seed, most // 2)
        MPI.COMM_WORLD.Barrier()
    if rank == 0:
        print(f"mpi: {2 * came} tensors, none lost, doubled or torn")


def main() -> None:
    provider = (sys.argv[1:] or ["shared_memory"])[0]
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    if provider == "mpi":
        under_mpi(most, seed)
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "headway.channel"])
    before = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
    came, delays = 0, []
    while came < most:
        count, delay = life(provider, seed + len(delays), most)
        came += 2 * count  # as many came to the other end, but for the last ones
        delays.append(delay)
        print(
            f"  life {len(delays)}: {came} tensors, noticed after {delay * 1e3:.1f} ms", flush=True
        )
    after = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
    after = [name for name in after if not name.startswith("sem.mp-")]  # locks of other programs
    print(
        f"{provider}: {came} tensors, {len(delays)} kills, none lost, doubled or torn; noticed "
        f"after {statistics.median(delays) * 1e3:.1f} ms, at most {max(delays) * 1e3:.1f}; "
        f"left in /dev/shm: {sorted(set(after) - set(before)) or 'nothing'}"
    )


if __name__ == "__main__":
    main()
