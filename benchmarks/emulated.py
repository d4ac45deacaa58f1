"""Runs a function on the ranks of emulated nodes; needs root unless rate=None (plain loopback).

    import emulated

    def body(world, count):
        ...                      # torch.distributed's default group is there, over the links
        return seconds

    if __name__ == "__main__":
        done = emulated.run(nodes=2, per_node=1, rate="100 Mbit/s", body=body, arguments=(3,))
        print(done[0], done.sent["a"])

Every call makes fresh processes (from a forkserver that has imported torch) and fresh links.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from headway.cluster import Cluster
from headway.launch.emulation import EmulatedCluster, Emulation
from support.interface_bytes import interface_bytes


@dataclass(frozen=True, kw_only=True)
class World:
    """What a rank knows.

    Attributes:
        rank: Its number.
        size: The number of ranks.
        node: Name of its node.
        local_rank: Its number on the node.
        nodes: The node's name of each rank.
        emulated: The links, to change or to cut; None: plain loopback.
    """

    rank: int
    size: int
    node: str
    local_rank: int
    nodes: tuple[str, ...]
    emulated: EmulatedCluster | None

    def counters(self) -> tuple[int, int]:
        """Bytes that this node's interface (or the loopback) has sent and received so far."""
        return interface_bytes("lo" if self.emulated is None else self.emulated.interface)


class Results(list[Any]):
    """What the body returned, by rank; bytes of each node's interface while the body ran."""

    def __init__(self, values: list[Any], sent: dict[str, int], received: dict[str, int]) -> None:
        super().__init__(values)
        self.sent = sent
        self.received = received


def run(
    *,
    body: Callable[..., Any],
    nodes: int = 2,
    per_node: int = 1,
    rate: str | None = "100 Mbit/s",
    cluster: Cluster | None = None,
    arguments: tuple[Any, ...] = (),
    timeout: float = 600.0,
    threads: int = 1,
    prepare: Callable[[EmulatedCluster], None] | None = None,
) -> Results:
    """Run body(world, *arguments) on every rank; raises what a rank raised.

    Args:
        body: A function at the top level of its module.
        nodes: Like nodes a, b, ...
        per_node: Ranks of each.
        rate: Of every node's interface; None: no namespaces, everything on the loopback.
        cluster: Instead of the three.
        arguments: Anything that pickles, as must the results.
        timeout: Seconds for everything.
        threads: Of torch, in each rank.
        prepare: Called with the links before any rank starts.
    """
    given = cluster or Cluster.of(nodes, per_node, rate=rate)
    with ExitStack() as stack:
        emulated = None
        if cluster is not None or rate is not None:
            emulated = stack.enter_context(Emulation(given))
            if prepare is not None:
                prepare(emulated)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
        job = _Job(given, emulated, folder, body, arguments, threads)
        _wait(job, timeout)
        found = [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(given.ranks)]
    sent, received = {}, {}
    for rank, (_, (out, into)) in enumerate(found):
        sent.setdefault(given.nodes_of_ranks[rank], out)
        received.setdefault(given.nodes_of_ranks[rank], into)
    return Results([value for value, _ in found], sent, received)


@dataclass(frozen=True)
class _Job:
    cluster: Cluster
    emulated: EmulatedCluster | None
    folder: Path
    body: Callable[..., Any]
    arguments: tuple[Any, ...]
    threads: int


def _wait(job: _Job, timeout: float) -> None:
    """Start all ranks and wait for them; none is left, whatever happens."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    os.environ.setdefault("OMP_NUM_THREADS", str(job.threads))
    ranks = [
        context.Process(target=_live, args=(job, rank), name=f"rank {rank}", daemon=True)
        for rank in range(job.cluster.ranks)
    ]
    try:
        for process in ranks:
            process.start()
        deadline, running = time.monotonic() + timeout, {p.sentinel: p for p in ranks}
        while running:
            ready = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the ranks did not end within {timeout:g} s")
            for sentinel in ready:
                process = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    time.sleep(0.2)
                    said = [p.read_text() for p in sorted(job.folder.glob("error-*"))]
                    raise RuntimeError(
                        f"{process.name} ended with {process.exitcode}\n" + "\n".join(said)
                    )
    finally:
        for process in ranks:
            if process.pid is not None and process.is_alive():
                process.kill()
        for process in ranks:
            if process.pid is not None:
                process.join()


def _live(job: _Job, rank: int) -> None:
    threading.Thread(target=_end_with_parent, args=(job,), daemon=True).start()
    try:
        result = pickle.dumps(_work(job, rank))
        (job.folder / f"{rank}").write_bytes(result)
    except BaseException:
        (job.folder / f"error-{rank}").write_text(f"---- rank {rank}\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # without waiting for what the body may have left behind


def _end_with_parent(job: _Job) -> None:
    """A rank never outlives the benchmark, however that ends, nor do its files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(job.folder, ignore_errors=True)
    os._exit(1)


def _work(job: _Job, rank: int) -> tuple[Any, tuple[int, int]]:
    import torch
    import torch.distributed as dist

    name = job.cluster.nodes_of_ranks[rank]
    if job.emulated is not None:
        job.emulated.enter(name)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if job.emulated is None else job.emulated.interface
    torch.set_num_threads(job.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder / 'rendezvous'}",
        rank=rank,
        world_size=job.cluster.ranks,
        timeout=timedelta(seconds=600),
    )
    world = World(
        rank=rank,
        size=job.cluster.ranks,
        node=name,
        local_rank=job.cluster.ranks_of(name).index(rank),
        nodes=job.cluster.nodes_of_ranks,
        emulated=job.emulated,
    )
    dist.barrier()
    before = world.counters()
    value = job.body(world, *job.arguments)
    dist.barrier()
    after = world.counters()
    dist.destroy_process_group()
    return value, (after[0] - before[0], after[1] - before[1])
