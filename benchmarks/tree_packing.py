"""All-reduces by packed trees against Gloo's ring, on meshes of point-to-point links.

    python benchmarks/tree_packing.py mesh [rounds]     # 4 nodes, 100 Mbit/s between each two
    python benchmarks/tree_packing.py slow [rounds]     # the same, the link b-c at 10 Mbit/s
    python benchmarks/tree_packing.py drift [steps]     # the link b-c becomes slow in mid-training
    python benchmarks/tree_packing.py table             # packings of published machines

Root for the first three: they make network namespaces, one rank on each. The chunk size is found by
`ChunkTuner` on the links. Both run in turn (A B B A) inside the same processes; the time of one run
is that of its slowest rank. Bytes are those that the kernel's shaper counted towards each node.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import emulated
import headway
from headway.cluster import Cluster
from headway.cluster.cluster import Pair
from headway.collective.generators import trees
from headway.collective.packing.pack import pack, packing_problem
from headway.collective.packing.tree import Packing
from headway.collective.program.program import CollectiveProgram, CollectiveTask
from headway.collective.topology import LinkGraph, NetworkTopology, dgx1p, dgx1v
from headway.planner.collective_algorithm import choose_all_reduce

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.chunk_tuner import ChunkTuner
from support.link_graphs import islands
from support.multiplicative_weights import pack_by_multiplicative_weights

ELEMENTS = 2 * 2**20
"""8 MiB."""
FRAMES = 1514 / 1448
"""Bytes on the wire for one of a long message."""


class Packed:
    """Chooses the program of packed trees: what `register_backend` takes."""

    def __init__(self, packing: Packing) -> None:
        self.weighted = [(tree.parent, tree.weight) for tree in packing.trees]
        self.chunk_bytes = 256 * 1024
        self.made: dict[int, CollectiveProgram] = {}

    def __call__(
        self, task: CollectiveTask, ranks: tuple[int, ...], element_bytes: int
    ) -> CollectiveProgram | None:
        if task.op != "all_reduce":
            return None
        chunk = max(1, self.chunk_bytes // element_bytes)
        self.made[task.elements] = trees(task, self.weighted, chunk=chunk)
        return self.made[task.elements]


def seconds(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """Of one all-reduce, on the slowest rank."""
    dist.barrier()
    time.sleep(0.05)  # whatever the barrier has left on the links
    began = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def sent(world: emulated.World) -> list[int]:
    """Bytes towards each rank so far."""
    assert world.emulated is not None
    counts = world.emulated.sent_to(world.node)
    return [counts.get(name, 0) for name in world.nodes]


def tuned(packed: Packed, group: dist.ProcessGroup) -> ChunkTuner:
    """The chunk size, by what the slowest rank measures; every probe has a size of its own, so that
    no program is taken from the cache."""
    tuner = ChunkTuner()
    while (chunk := tuner.next) is not None:
        packed.chunk_bytes = chunk
        tensor = torch.ones(ELEMENTS + 1 + len(tuner.measured))
        seconds(tensor, group)
        tuner = tuner.after(1 / min(seconds(tensor, group) for _ in range(2)))
    return tuner


def body(world: emulated.World, rounds: int, cluster: Cluster) -> list[str]:
    packing = pack(NetworkTopology.of_cluster(cluster).graph, "all_reduce")
    packed = Packed(packing)
    headway.register_backend(choose=packed)
    group = dist.new_group(backend="headway")
    assert group is not None
    tuner = tuned(packed, group)
    packed.chunk_bytes = tuner.best
    times: dict[str, list[float]] = {"gloo": [], "trees": []}
    expected = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(world.rank))
    found = expected.clone()
    seconds(expected, None)
    seconds(found, group)
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    counted, planned = [0] * world.size, packed.made[ELEMENTS].sent()
    for number in range(rounds):
        for name in ("gloo", "trees") if number % 2 else ("trees", "gloo"):
            before = sent(world)
            times[name].append(seconds(torch.ones(ELEMENTS), group if name == "trees" else None))
            if name == "trees":
                counted = [a - b for a, b in zip(sent(world), before, strict=True)]
    ratios = [a / b for a, b in zip(times["gloo"], times["trees"], strict=True)]
    links = [
        f"to {peer}: {counted[peer] / (4 * FRAMES * planned[world.rank, peer]):.3f}"
        for peer in range(world.size)
        if (world.rank, peer) in planned
    ]
    least = 4 * ELEMENTS * FRAMES / packing.rate
    head = [
        packing.explain(),
        f"chunks of {tuner.best // 1024} KiB after {len(tuner.measured)} probes",
        f"gloo   median {statistics.median(times['gloo']):.3f} s  best {min(times['gloo']):.3f} s",
        f"trees  median {statistics.median(times['trees']):.3f} s  best {min(times['trees']):.3f} s"
        f"  (bytes / rate of the packing, with headers: {least:.3f} s)",
        f"gloo / trees: median {statistics.median(ratios):.2f}  of {min(ratios):.2f} to "
        f"{max(ratios):.2f}  relative difference of the results {error:.1e}",
    ]
    tail = f"bytes counted / planned, {world.rank} {', '.join(links)}"
    return [*head, tail] if world.rank == 0 else [tail]


def drift(world: emulated.World, count: int, cluster: Cluster) -> list[str]:
    """Seconds per step of 8 MiB of gradients before and after the link b-c becomes ten times
    slower, by a program that stays and by one that follows the links."""
    carrying = choose_all_reduce("auto", NetworkTopology.of_cluster(cluster), 4 * ELEMENTS)
    lines = [f"program: {carrying.collective}"]
    for repack in (False, True):
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 512, bias=False) for _ in range(4)])
        exchange = headway.Exchange(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            collective=carrying.collective,
            carrier=carrying.carrier,
            repack=repack,
        )

        def steps(
            count: int,
            exchange: headway.Exchange = exchange,
            model: torch.nn.Sequential = model,
        ) -> float:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(count):
                sum(layer(torch.randn(2, 1024)).square().mean() for layer in model).backward()
                exchange.step()
            dist.barrier()
            return (time.perf_counter() - began) / count

        steps(5)
        before = steps(count)
        slow(world, 1.25e6)
        waited = time.perf_counter()
        taken = 0
        while repack and not any("re-packed" in each for each in exchange.remarks) and taken < 50:
            steps(1)
            taken += 1
        noticed = f", noticed after {taken} steps, {time.perf_counter() - waited:.1f} s"
        after = steps(count)
        slow(world, 12.5e6)
        lines.append(
            f"repack={repack}: {before:.3f} s per step before, {after:.3f} s after"
            f"{noticed * repack}"
        )
        lines += [f"    {each}" for each in exchange.remarks]
        exchange.close()
    return lines if world.rank == 0 else []


def slow(world: emulated.World, rate: float) -> None:
    """Give the link b-c a rate, bytes per second."""
    dist.barrier()
    if world.rank == 0:
        assert world.emulated is not None
        world.emulated.set_link("b", "c", rate)
    dist.barrier()


def table() -> Iterator[str]:
    """Packings of the specification's table beside the published method."""
    v = dgx1v()
    machines: dict[str, LinkGraph] = {
        "DGX-1V": v,
        "DGX-1P": dgx1p(),
        "DGX-1V 0-3": v.part(range(4)),
        "DGX-1V 0,1,4,5": v.part([0, 1, 4, 5]),
        "DGX-1V 0-5": v.part(range(6)),
        "DGX-1V 0-6": v.part(range(7)),
        "2 islands of 4": islands(2, 4, inside=10, across=1),
        "mesh of 4": LinkGraph.mesh(4),
        "one link / 10": LinkGraph.mesh(4).scaled(0.1, [(1, 2)]),
    }
    yield (
        f"{'links':<16}{'direction':<12}{'bound':>7}{'rate':>7}{'trees':>6}{'depth':>6}{'s':>7}"
        "   published method: rate, trees, s"
    )
    for name, graph in machines.items():
        for direction in ("broadcast", "all_reduce"):
            began = time.perf_counter()
            packing = pack(graph, direction)
            took = time.perf_counter() - began
            began = time.perf_counter()
            weights = pack_by_multiplicative_weights(packing_problem(graph, direction, 0))
            other = time.perf_counter() - began
            yield (
                f"{name:<16}{direction:<12}{packing.bound:>7.3f}{packing.rate:>7.3f}"
                f"{len(packing.trees):>6}{packing.depth:>6}{took:>7.2f}   "
                f"{sum(tree.weight for tree in weights):.3f} {len(weights):>4} {other:>6.2f}"
            )


def main(what: str, rounds: int) -> None:
    if what == "table":
        print("\n".join(table()))
        return
    cluster = Cluster.of(4, 1, rate="100 Mbit/s", fabric="mesh")
    if what == "slow":
        cluster = replace(cluster, links=(Pair(nodes=("b", "c"), rate=1.25e6),))
    run = drift if what == "drift" else body
    for lines in emulated.run(body=run, cluster=cluster, arguments=(rounds, cluster)):
        if lines:
            print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 5)
