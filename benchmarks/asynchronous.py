"""Four workers of which one is three times as slow: all-reduce against servers that do not wait.

    python benchmarks/asynchronous.py [one|any] [seconds] [seeds]

The computation of a step is a nap, so that four workers fit on two cores: 40 ms, and 120 ms where
it is slow: always the last worker ("one"), or each worker in every fourth step, at random ("any").
With "one" a bounded run cannot be faster than its slowest worker for long; the limit of each way is
what virtual clocks make of the same naps with messages that take no time. Each way trains for so
many seconds, in turn in the same processes; then all-reduce makes as many samples as each has made,
from the same start, for the loss at equal samples.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import emulated
import headway
from headway.plans import Synchrony, data_parallel
from headway.simulator.synchrony import VirtualMachines, simulate_run
from headway.synchrony.programs import make_run, server_places
from support.plain_replicas import Descent, Shares

WAYS = {
    "asynchronous servers": {"kind": "asynchronous"},
    "one asynchronous server": {"kind": "asynchronous", "topology": "single"},
    "asynchronous servers, ahead": {"kind": "asynchronous", "read": "ahead"},
    "SSP(4)": {"kind": "bounded", "delay_bound": 4},
    "SSP(4), ahead": {"kind": "bounded", "delay_bound": 4, "read": "ahead"},
    "synchronous servers": {"topology": "colocated"},
    "gossip": {"merge": "push_sum", "kind": "asynchronous", "probability": 0.25},
}
NAP, SLOWER, PER_RANK, WORKERS = 0.04, 3.0, 16, 4


def data(seed: int, samples: int) -> TensorDataset:
    """A function of 32 numbers with noise, the same for all seeds; a seed decides the samples."""
    law = torch.Generator().manual_seed(1)
    weights = torch.randn(32, 8, generator=law)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 32, generator=draw)
    y = (x @ weights).tanh().sum(1, keepdim=True)
    return TensorDataset(x, y + 0.3 * torch.randn(samples, 1, generator=draw))


def executor(words: dict[str, Any] | None, ranks: int, seed: int) -> headway.Executor:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    plan = data_parallel(
        PER_RANK * ranks,
        processes=ranks,
        synchrony=None if words is None else Synchrony(**words),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return headway.Executor(
        model, optimizer, loss=headway.criterion(nn.MSELoss()), plan=plan, seed=seed
    )


def train(
    run: headway.Executor,
    examples: TensorDataset,
    *,
    nap: Callable[[int], float],
    seconds: float | None = None,
    steps: int | None = None,
) -> tuple[int, float]:
    """Steps of this worker, and how long they took."""
    start, made = time.perf_counter(), 0
    for batch in run.batches(examples, epochs=None):
        if steps is not None and made >= steps:
            break
        if seconds is not None and time.perf_counter() - start > seconds:
            break
        time.sleep(nap(made))
        run.step(batch)
        made += 1
    taken = time.perf_counter() - start
    run.finish()
    return made, taken


def loss(model: nn.Module) -> float:
    x, y = data(99, 4096).tensors
    model.eval()
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(x), y))


def nap_of(which: str, seed: int, worker: int, step: int) -> float:
    slow = worker == WORKERS - 1
    if which == "any":
        slow = random.Random(f"{seed} {worker} {step}").random() < 0.25
    return NAP * (SLOWER if slow else 1.0)


def limit(words: dict[str, Any], which: str, seconds: float, seed: int) -> float:
    """Samples per second if nothing took time but the naps, of a way with servers."""
    count = len(server_places(Synchrony(**words), WORKERS))
    run = make_run(
        Synchrony(**words),
        [Shares((0.0,) * count) for _ in range(WORKERS)],
        [Descent(0.0) for _ in range(count)],
    )
    machines = VirtualMachines(compute=lambda worker, step: nap_of(which, seed, worker, step))
    return sum(simulate_run(run, machines, seconds=seconds).steps) * PER_RANK / seconds


def body(
    world: Any, which: str, seconds: float, seed: int
) -> dict[str, tuple[float, float, float]]:
    """Of each way: samples of this worker per second, loss, and that of as many by all-reduce."""
    torch.set_num_threads(1)
    examples = data(seed, 8192)

    def nap(step: int) -> float:
        return nap_of(which, seed, world.rank, step)

    found = {}
    # All-reduce cannot end by the clock: ranks would disagree.
    steps = int(seconds / (NAP * SLOWER))
    made, taken = train(executor(None, world.size, seed), examples, nap=nap, steps=steps)
    found["all-reduce"] = (made * PER_RANK / taken, 0.0, 0.0)
    for name, words in WAYS.items():
        run = executor(words, world.size, seed)
        limits = {"steps": steps} if name == "synchronous servers" else {"seconds": seconds}
        made, taken = train(run, examples, nap=nap, **limits)
        total = torch.tensor([float(made)])
        torch.distributed.all_reduce(total)
        equal = executor(None, world.size, seed)
        train(equal, examples, nap=lambda step: 0.0, steps=round(float(total) / world.size))
        found[name] = made * PER_RANK / taken, loss(run.model), loss(equal.model)
    return found


if __name__ == "__main__":
    which = sys.argv[1] if len(sys.argv) > 1 else "one"
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    seeds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    rates: dict[str, list[float]] = {}
    losses: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        per_rank = emulated.run(
            nodes=1, per_node=WORKERS, rate=None, body=body, arguments=(which, seconds, seed)
        )
        for name, (_, own, equal) in per_rank[0].items():
            rates.setdefault(name, []).append(sum(found[name][0] for found in per_rank))
            losses.setdefault(name, []).append((own, equal))
    today = time.strftime("%Y-%m-%d")
    who = "the last" if which == "one" else "each in every fourth step"
    print(f"4 workers, {who} {SLOWER:g}x slower, {PER_RANK} samples each, {seeds} seeds, {today}")
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, rates["all-reduce"], strict=True))
        said = f"  {name:28} {statistics.median(values):7.0f} samples/s, {ratio:.2f} x all-reduce"
        if name in WAYS and Synchrony(**WAYS[name]).has_servers:
            most = [limit(WAYS[name], which, seconds, seed) for seed in range(seeds)]
            said += f" (limit {statistics.median(most):.0f})"
        pairs = [(own, equal) for own, equal in losses[name] if equal]
        if pairs:
            worse = statistics.mean(own / equal for own, equal in pairs)
            said += (
                f"; loss at equal samples {worse:.3f} of it ({pairs[0][0]:.4f}, {pairs[0][1]:.4f})"
            )
        print(said)
