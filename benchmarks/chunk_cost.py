"""What Python costs for each chunk of the priority exchange: processor time, not waiting.

    python benchmarks/chunk_cost.py [chunks]

Two ranks on the loopback, chunks of 16 KiB, so that the work on the bytes themselves is small. The
progress thread's time is read from its own clock; the training thread's is that of all calls of the
exchange in a step (hooks included), against the same step without an exchange.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
from torch import nn

import emulated
import headway
from headway.comm.exchange.priority_exchange import BucketOptimizers
from headway.comm.tuning import autotuning

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 200
WIDTH, STEPS, ROUNDS = 64, 20, 5


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)])


def timed_slices() -> list[float]:
    """Seconds of processor time of each optimiser's step in the progress thread."""
    spent: list[float] = []
    original = BucketOptimizers.step

    def step(self: Any, *arguments: Any) -> None:
        start = time.thread_time()
        original(self, *arguments)
        spent.append(time.thread_time() - start)

    BucketOptimizers.step = step  # type: ignore[method-assign]
    return spent


def body(world: Any) -> list[tuple[float, float, float]]:
    torch.set_num_threads(1)
    spent = timed_slices()
    autotuning.REFIT_STEPS = 10**9  # one lane for the whole measurement
    model, alone = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    own = torch.optim.SGD(alone.parameters(), lr=1e-5)
    exchange = headway.Exchange(model, optimizer, priority=True, chunk="16 KiB")
    x = torch.randn(1, WIDTH)

    def with_exchange() -> None:
        model(x).square().mean().backward()
        exchange.step()

    def without() -> None:
        own.zero_grad()
        alone(x).square().mean().backward()
        own.step()

    def cpu(step: Any) -> float:
        start = time.thread_time()
        for _ in range(STEPS):
            step()
        return time.thread_time() - start

    for _ in range(6):
        with_exchange()
        without()
    (lane,) = [t for t in threading.enumerate() if t.name == "headway-lane"]
    clock = time.pthread_getcpuclockid(lane.ident)
    found = []
    for _ in range(ROUNDS):
        plain = cpu(without)
        spent.clear()
        before = time.clock_gettime(clock)
        here = cpu(with_exchange)
        exchange.flush()
        there = time.clock_gettime(clock) - before - sum(spent)
        chunks = STEPS * len(exchange.flights)
        rows = (here - plain, there, sum(spent))
        found.append(tuple(seconds / chunks * 1e6 for seconds in rows))
    exchange.close()
    return found


if __name__ == "__main__":
    rows = emulated.run(nodes=1, per_node=2, rate=None, body=body)[0]
    here, there, slices = (min(column) for column in zip(*rows, strict=True))
    print(f"{COUNT} chunks of 16 KiB, best of {ROUNDS} rounds, us of processor time per chunk:")
    print(f"  training thread: hooks, waits, hand-over                  {here:.0f}")
    print(f"  progress thread: sending, completing                      {there:.0f}")
    print(f"  progress thread: the optimiser's own step for each bucket {slices:.0f}")
    print("  goal for the exchange: at most 100")
