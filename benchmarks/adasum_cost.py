"""Time of Adasum against a plain all-reduce: 25 MiB in 25 layers, 4 ranks, 100 Mbit/s and 1 Gbit/s.

    python benchmarks/adasum_cost.py [pairs]        # root: it makes network namespaces

Both run in turn inside the same processes over the same links (A B, B A, ...). A pair's time is
that of its slowest rank. Prints the error against the tree in float64, too.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import emulated
from headway.collective.nodes import Nodes
from headway.comm.algorithms.adasum import Adasum, adasum_tree
from headway.comm.algorithms.method import (
    AllReduce,
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    Route,
    complete,
)
from headway.comm.lanes.routes import make_route

LAYERS, SIZE, RANKS = 25, 2**18, 4
TARGET, ERROR = 1.05, 1e-7


def gradients(rank: int) -> torch.Tensor:
    """A common part and one's own."""
    common = torch.randn(LAYERS * SIZE, generator=torch.Generator().manual_seed(0))
    own = torch.randn(LAYERS * SIZE, generator=torch.Generator().manual_seed(rank + 1))
    return common + own


def seconds(
    method: ExchangeMethod, fused: FusedBuffer, values: torch.Tensor, route: Route
) -> float:
    fused.gradients.copy_(values)
    fused.flags.fill_(1.0)
    dist.barrier()
    began = time.perf_counter()
    complete(method, fused, route)
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def body(world: emulated.World, pairs: int) -> tuple[list[tuple[float, float]], float]:
    torch.set_num_threads(1)
    route = make_route(None, Nodes.one(world.size))
    pieces = tuple(GradientSlice(str(n), n * SIZE, (n + 1) * SIZE, (SIZE,)) for n in range(LAYERS))
    fused, values = FusedBuffer(torch.empty(LAYERS * (SIZE + 1)), pieces), gradients(world.rank)
    plain, ours = AllReduce(), Adasum()
    times = []
    for number in range(pairs + 1):  # the first pair makes connections and memory
        order = [plain, ours] if number % 2 else [ours, plain]
        took = {method: seconds(method, fused, values, route) for method in order}
        times.append((took[ours], took[plain]))
    seconds(ours, fused, values, route)
    error = 0.0
    if world.rank == 0:
        expected = adasum_tree([gradients(rank) for rank in range(world.size)], pieces)
        error = ((fused.gradients - expected).norm() / expected.norm()).item()
    return times[1:], error


def main() -> None:
    for rate, pairs in (("1 Gbit/s", 12), ("100 Mbit/s", 5)):
        pairs = int(sys.argv[1]) if len(sys.argv) > 1 else pairs
        done = emulated.run(nodes=RANKS, per_node=1, rate=rate, body=body, arguments=(pairs,))
        times, error = done[0]
        ratios = [ours / plain for ours, plain in times]
        ours, plain = zip(*times, strict=True)
        print(f"Adasum / all-reduce, 25 MiB, {LAYERS} layers, {RANKS} ranks, {rate}, {pairs} pairs")
        print(f"  pairs {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
        print(
            f"  median {statistics.median(ratios):.3f}, best against best "
            f"{min(ours) / min(plain):.3f} (target at most {TARGET}); "
            f"best {min(ours):.3f} s / {min(plain):.3f} s, error {error:.1e} (at most {ERROR:.0e})"
            f"   load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
