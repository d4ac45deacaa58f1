"""The backend "headway" against Gloo: unmodified FSDP2, single operations, two interfaces.

    python benchmarks/backend.py fsdp2 [rounds] [nodes] [rate]       # 2 "100 Mbit/s"; 4 "1 Gbit/s"
    python benchmarks/backend.py operations [rounds] [nodes] [rate] [MiB of a call]
    python benchmarks/backend.py stripes [rounds]

Root: it makes network namespaces, one rank on each. All run in turn (A B B A) inside the same
processes over the same links. The time of one run is that of its slowest rank; bytes are those that
the kernel counted on a node's interface, with packet headers; processor seconds are those of one
rank, Gloo's threads included. Two bounds stand beside them: those bytes at the link's rate, and the
processor seconds of all ranks shared out evenly over the cores. Calls of less than 25 MiB are made
25 MiB's worth in a row.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import emulated
import headway
from headway.launch.emulation import EmulatedCluster
from headway.launch.namespaces import run_batch
from headway.units import parse_rate

MIB = 2**20
ELEMENTS = 25 * 2**18
LAYERS, WIDTH = 24, 512
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Run:
    """Seconds of the slowest rank; of this one: processor seconds and bytes that its node sent."""

    seconds: float
    processor: float
    sent: int


Call = Callable[[], object]


def once(call: Call, world: emulated.World) -> Run:
    dist.barrier()
    time.sleep(0.1)  # whatever the barrier has left on the link
    sent, processor = world.counters()[0], time.process_time()
    began = time.perf_counter()
    call()
    took = torch.tensor([time.perf_counter() - began])
    processor = time.process_time() - processor
    time.sleep(0.1)
    sent = world.counters()[0] - sent
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return Run(took.item(), processor, sent)


def alternate(
    calls: Mapping[str, Call], rounds: int, world: emulated.World
) -> dict[str, list[Run]]:
    """`rounds` runs of each after one that does not count, in turn."""
    found: dict[str, list[Run]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        order = list(calls) if number % 2 else list(calls)[::-1]
        for name in order:
            found[name].append(once(calls[name], world))
    return {name: runs[1:] for name, runs in found.items()}


def groups() -> dict[str, dist.ProcessGroup]:
    """Ours first, then ours over Gloo's connections; of all ranks."""
    headway.register_backend(connections="gloo")
    lent = dist.new_group(backend="headway")
    headway.register_backend()
    own = dist.new_group(backend="headway")
    return {"headway": own, "over gloo": lent, "gloo": dist.new_group(backend="gloo")}


# ---- FSDP2 ------------------------------------------------------------------------------------


def fsdp2(world: emulated.World, rounds: int) -> tuple[dict[str, list[Run]], dict[str, float]]:
    calls: dict[str, Call] = {}
    models: dict[str, nn.Module] = {}
    for name, group in groups().items():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        models[name] = fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = torch.Generator().manual_seed(world.rank)
        calls[name] = lambda m=model, o=optimizer, b=batches: step(m, o, b)
    found = alternate(calls, rounds, world)
    sums = {}
    for name, model in models.items():
        total = torch.stack([p.to_local().double().abs().sum() for p in model.parameters()]).sum()
        dist.all_reduce(total)
        sums[name] = total.item()
    return found, sums


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Generator) -> None:
    model(torch.randn(4, WIDTH, generator=batches)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- single operations ------------------------------------------------------------------------


def operations(world: emulated.World, rounds: int, size: int) -> dict[str, dict[str, list[Run]]]:
    whole = torch.ones(size * 2**18 // world.size * world.size)
    times = max(1, ELEMENTS // whole.numel())
    share, other = whole.chunk(world.size)[0].clone(), torch.empty_like(whole)
    every = groups()

    def each(call: Callable[[dist.ProcessGroup], object]) -> dict[str, list[Run]]:
        def row(group: dist.ProcessGroup) -> None:
            for _ in range(times):
                call(group)

        return alternate(
            {name: lambda g=group: row(g) for name, group in every.items()}, rounds, world
        )

    return {
        "reduce_scatter": each(lambda g: reduce_scatter(share, whole, group=g)),
        "all_to_all": each(lambda g: dist.all_to_all_single(other, whole, group=g)),
        "all_gather": each(lambda g: all_gather(other, share, group=g)),
        "all_reduce": each(lambda g: dist.all_reduce(other, group=g)),
    }


# ---- two interfaces -----------------------------------------------------------------------------


def stripes(world: emulated.World, rounds: int) -> dict[str, dict[str, list[Run]]]:
    """All-reduce of Gloo's on one interface and of ours on two; ours of both kinds besides."""
    gloo = dist.new_group(backend="gloo")
    headway.register_backend()
    one = dist.new_group(backend="headway")
    headway.register_backend(interfaces=("eth0", "eth1"))
    two = dist.new_group(backend="headway")
    whole = torch.ones(ELEMENTS)
    share = torch.empty(ELEMENTS // 2)

    def scatter(group: dist.ProcessGroup) -> Tensor:
        reduce_scatter(share, whole, group=group)
        return share

    return {
        "all_reduce": alternate(
            {
                "headway": lambda: dist.all_reduce(whole, group=two),
                "gloo": lambda: dist.all_reduce(whole, group=gloo),
            },
            rounds,
            world,
        ),
        "reduce_scatter, one interface for the peer, too": alternate(
            {"headway": lambda: scatter(two), "gloo": lambda: scatter(one)}, rounds, world
        ),
    }


def second_interface(emulation: EmulatedCluster) -> None:
    """A second link between two nodes, of the same rate as the first."""
    first, second = emulation.nodes
    run_batch(
        "ip",
        [
            f"link add eth1 netns {first.namespace} type veth peer name eth1 "
            f"netns {second.namespace}"
        ],
    )
    for place, node in enumerate((first, second)):
        run_batch(
            "ip",
            [f"addr add 10.251.250.{place + 1}/24 dev eth1", "link set eth1 up"],
            namespace=node.namespace,
        )
        run_batch("tc", replace(node.shape, interface="eth1").commands(), namespace=node.namespace)


# ---- what is printed ----------------------------------------------------------------------------


def show(title: str, found: Mapping[str, list[Run]], nodes: int, rate: str) -> None:
    print(f"{title}   load {os.getloadavg()[0]:.1f}")
    cores = len(os.sched_getaffinity(0))
    for name, runs in found.items():
        seconds = [run.seconds for run in runs]
        processor = statistics.median(run.processor for run in runs)
        sent = statistics.median(run.sent for run in runs)
        print(
            f"  {name:9} median {statistics.median(seconds):.3f} s, best {min(seconds):.3f} s; "
            f"{processor:.3f} processor seconds, {sent / MIB:.1f} MiB sent; "
            f"the link alone {sent / parse_rate(rate):.3f} s, "
            f"the {cores} cores alone {nodes * processor / cores:.3f} s"
        )
    ours, theirs = ([run.seconds for run in found[name]] for name in ("headway", "gloo"))
    ratios = [peer / own for peer, own in zip(theirs, ours, strict=True)]
    print(
        f"  gloo / headway: median {statistics.median(ratios):.2f}x, best against best "
        f"{min(theirs) / min(ours):.2f}x, pairs {', '.join(f'{ratio:.2f}' for ratio in ratios)}",
        flush=True,
    )


def main() -> None:
    what = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    nodes = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    rate = sys.argv[4] if len(sys.argv) > 4 else "100 Mbit/s"
    where = f"{nodes} nodes, {rate}, {rounds} rounds, torch {torch.__version__}"
    if what == "fsdp2":
        done = emulated.run(nodes=nodes, rate=rate, body=fsdp2, arguments=(rounds,))
        found, sums = done[0]
        show(f"FSDP2, {LAYERS} layers of {WIDTH}^2, {where}: seconds of a step", found, nodes, rate)
        print(
            "  checksum of the parameters: " + ", ".join(f"{n} {s:.12g}" for n, s in sums.items())
        )
    elif what == "operations":
        size = int(sys.argv[5]) if len(sys.argv) > 5 else 25
        done = emulated.run(nodes=nodes, rate=rate, body=operations, arguments=(rounds, size))
        for name, found in done[0].items():
            show(f"{name}, {size} MiB, {where}", found, nodes, rate)
    else:
        done = emulated.run(
            nodes=2, rate=rate, body=stripes, arguments=(rounds,), prepare=second_interface
        )
        for name, found in done[0].items():
            title = f"{name} on two interfaces, {ELEMENTS * 4 / MIB:.0f} MiB, {where}"
            show(title, found, 2, rate)


if __name__ == "__main__":
    main()
