"""HiTopKComm at 1 % against Gloo's all-reduce and our hierarchical one: 2 nodes of 2 ranks.

    python benchmarks/hierarchical.py [rounds]      # root: it makes network namespaces

All run in turn inside the same processes over the same links of 100 Mbit/s, 25 MiB each. The time
of one is that of its slowest rank; bytes are counted by the kernel on a node's interface, with
packet headers.
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
from headway.comm.algorithms.hierarchical import HierarchicalAllReduce
from headway.comm.algorithms.method import (
    AllReduce,
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    Route,
    complete,
)
from headway.comm.compress.sparsification import HierarchicalTopK
from headway.comm.lanes.routes import make_route

NUMEL, DENSITY, RATE = 25 * 2**18, 0.01, "100 Mbit/s"
MIB = 2**20


def once(
    method: ExchangeMethod,
    fused: FusedBuffer,
    values: torch.Tensor,
    route: Route,
    world: emulated.World,
) -> tuple[float, int]:
    """Seconds of the slowest rank; bytes that this node has sent."""
    fused.gradients.copy_(values)
    fused.flags.fill_(1.0)
    dist.barrier()
    time.sleep(0.05)  # whatever the barrier has left on the link
    sent = world.counters()[0]
    began = time.perf_counter()
    complete(method, fused, route)
    took = torch.tensor([time.perf_counter() - began])
    time.sleep(0.2)
    sent = world.counters()[0] - sent
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item(), sent


def body(world: emulated.World, rounds: int) -> dict[str, list[tuple[float, int]]]:
    torch.set_num_threads(1)
    route = make_route(None, Nodes.of(world.nodes), hierarchical=True)
    fused = FusedBuffer(torch.empty(NUMEL + 1), (GradientSlice("all", 0, NUMEL, (NUMEL,)),))
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(world.rank))
    methods = {
        "HiTopKComm": HierarchicalTopK(DENSITY),
        "gloo all_reduce": AllReduce(),
        "hierarchical": HierarchicalAllReduce(),
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        order = list(methods) if number % 2 else list(methods)[::-1]
        for name in order:
            found[name].append(once(methods[name], fused, values, route, world))
    return {name: runs[1:] for name, runs in found.items()}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    done = emulated.run(nodes=2, per_node=2, rate=RATE, body=body, arguments=(rounds,))
    found = done[0]
    formula = {
        "HiTopKComm": DENSITY * NUMEL * 8,
        "gloo all_reduce": 2 * 3 / 4 * NUMEL * 4,
        "hierarchical": NUMEL * 4,
    }
    print(f"25 MiB, 2 nodes x 2 ranks, {RATE}, {rounds} rounds   load {os.getloadavg()[0]:.1f}")
    times = {name: [seconds for seconds, _ in runs] for name, runs in found.items()}
    for name, runs in found.items():
        sent = statistics.median(count for _, count in runs)
        print(
            f"  {name:16} median {statistics.median(times[name]):.3f} s, "
            f"best {min(times[name]):.3f} s; node sends {sent / MIB:.3f} MiB, "
            f"formula {formula[name] / MIB:.3f} ({sent / formula[name] - 1:+.1%})"
        )
    ours = times["HiTopKComm"]
    for name, goal in (("gloo all_reduce", 19), ("hierarchical", 14)):
        ratios = [peer / own for peer, own in zip(times[name], ours, strict=True)]
        print(
            f"  {name} / HiTopKComm: median {statistics.median(ratios):.1f}x, best against best "
            f"{min(times[name]) / min(ours):.1f}x (goal at least {goal}x)"
        )


if __name__ == "__main__":
    main()
