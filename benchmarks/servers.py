"""How many parameter servers: the lemma's number beside the one that is measured best; needs root.

    python benchmarks/servers.py [rounds] [steps]

Four workers on four emulated nodes, k = 1 to 4 of which hold a share of the parameters each, on
three links. The computation of a step is a nap, so that four workers fit on two cores. All numbers
of servers run in turn in the same processes, in every round.

Zou et al. 2017, Lemma 2, asks for the fewest servers whose traffic, gradients in and parameters
out, takes no longer than the computation. "ahead" hides it: parameters are fetched while the step
before is computed; best is the fewest servers within 5 % of the fastest step. Synchronous servers
hide nothing: a step is the nap and the traffic; best is the fewest whose traffic takes no longer
than the nap. Either way a worker asks for parameters behind its push, so that the two ways of a
link are used in turn, as the lemma counts them.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import emulated
import headway
from headway.planner.guidelines.zou import parameter_servers
from headway.plans import Synchrony, data_parallel
from headway.units import parse_rate

WORKERS, NAP = 4, 0.4
LAYERS, WIDTH = 12, 221
BYTES = LAYERS * WIDTH * WIDTH * 4
LINKS = ("1 Gbit/s", "300 Mbit/s", "100 Mbit/s")
WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "ahead": {"kind": "bounded", "delay_bound": 2, "read": "ahead"},
}
NEAR = 1.05


def executor(way: str, servers: int, ranks: int) -> headway.Executor:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    words = {"topology": "sharded", "servers": servers, **WAYS[way]}
    plan = data_parallel(ranks, processes=ranks, synchrony=Synchrony(**words))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = headway.criterion(nn.MSELoss())
    return headway.Executor(model, optimizer, loss=loss, plan=plan)


def seconds(way: str, servers: int, ranks: int, steps: int) -> float:
    """Of a step, after two that are not counted."""
    data = TensorDataset(torch.randn(64, WIDTH), torch.randn(64, WIDTH))
    run = executor(way, servers, ranks)
    batches = iter(run.batches(data, epochs=None))
    for step in range(steps + 2):
        if step == 2:
            start = time.perf_counter()
        time.sleep(NAP)
        run.step(next(batches))
    found = (time.perf_counter() - start) / steps
    run.finish()
    return found


def body(world: Any, rounds: int, steps: int) -> dict[tuple[str, int], list[float]]:
    torch.set_num_threads(1)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for way in WAYS:
            for servers in range(1, world.size + 1):
                taken = torch.tensor([seconds(way, servers, world.size, steps)])
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                found.setdefault((way, servers), []).append(float(taken))
    return found


def best(way: str, times: dict[int, float]) -> int | None:
    """The fewest servers that do; None: more than there are."""
    enough = 2 * NAP if way == "synchronous" else NEAR * min(times.values())
    return next((k for k, taken in sorted(times.items()) if taken <= enough), None)


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    print(
        f"{WORKERS} workers, {BYTES / 1e6:.2f} MB, naps of {NAP} s, {rounds} rounds of {steps} "
        f"steps, {time.strftime('%Y-%m-%d')}"
    )
    for link in LINKS:
        found = emulated.run(
            nodes=WORKERS, rate=link, body=body, arguments=(rounds, steps), timeout=1800.0
        )[0]
        print(link)
        for way in WAYS:
            said, exact = parameter_servers(BYTES, WORKERS, parse_rate(link), NAP)
            times = {k: statistics.median(v) for (w, k), v in found.items() if w == way}
            shown = ", ".join(f"{k}: {taken:.3f}" for k, taken in sorted(times.items()))
            k = best(way, times)
            print(
                f"  {way:12} the lemma's k {said} ({exact:.2f}), measured "
                f"{k or f'above {WORKERS}'}; s per step: {shown}",
                flush=True,
            )
