"""Local SGD on a slow link: headway against torch's PostLocalSGDOptimizer, and both against DDP.

    python benchmarks/local_sgd.py time ["100 Mbit/s"] [rounds]
    python benchmarks/local_sgd.py loss [steps] [seeds]

`time`: seconds per step of the 10 M parameter language model on two emulated nodes (root), all in
turn in the same processes, a period of eight steps at a time. `loss`: the validation loss after
equal samples of real text (bytes of Python's standard library), two ranks on the loopback.
"""

from __future__ import annotations

import statistics
import sys
import time
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import emulated
import headway
from headway.plans import Synchrony, data_parallel
from headway.workloads.transformer import text_file
from language_model import WINDOW, LanguageModel, loss

PERIOD, PER_RANK = 8, 4
OWN = {
    "headway local SGD": {"local_steps": PERIOD, "state": "keep"},
    "headway local SGD, state averaged": {"local_steps": PERIOD},
    "headway DiLoCo": {
        "local_steps": PERIOD, "state": "keep", "outer": "nesterov", "outer_rate": 0.7,
        "outer_momentum": 0.9,
    },
}  # fmt: skip
PEERS = ("DDP", "PostLocalSGDOptimizer")


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, at places that a seed decides."""

    def __init__(self, count: int, which: str = "train", seed: int = 1) -> None:
        path = text_file(which)
        self._text = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        draw = torch.Generator().manual_seed(seed)
        last = len(self._text) - WINDOW - 1
        self._starts = torch.randint(last, (count,), generator=draw).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        start = self._starts[number]
        row = self._text[start : start + WINDOW + 1].long()
        return row[:-1], row[1:]


def own(name: str, data: Windows, seed: int) -> Any:
    torch.manual_seed(seed)
    model = LanguageModel()
    ranks = dist.get_world_size()
    plan = data_parallel(
        PER_RANK * ranks, processes=ranks, synchrony=Synchrony(merge="mean", **OWN[name])
    )
    run = headway.Executor(
        model, torch.optim.AdamW(model.parameters(), lr=3e-4), loss=loss, plan=plan, seed=seed
    )
    batches = iter(run.batches(data, epochs=None))
    return model, lambda: run.step(next(batches)), run.finish


def peer(name: str, data: Windows, seed: int) -> Any:
    torch.manual_seed(seed)
    model: Any = LanguageModel()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if name == "DDP":
        model = DistributedDataParallel(model)
    else:
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    sampler = DistributedSampler(data, seed=seed)

    def forever() -> Any:
        while True:
            yield from DataLoader(data, PER_RANK, sampler=sampler)

    batches = forever()

    def step() -> None:
        optimizer.zero_grad()
        loss(model, next(batches)).backward()
        optimizer.step()

    return getattr(model, "module", model), step, lambda: None


def make(name: str, data: Windows, seed: int = 0) -> Any:
    return peer(name, data, seed) if name in PEERS else own(name, data, seed)


def timed(world: Any, rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    data = Windows(4096)
    names = [*PEERS, *OWN]
    runs = {name: make(name, data) for name in names}

    def seconds(name: str) -> float:
        _, step, _ = runs[name]
        dist.barrier()
        start = time.perf_counter()
        for _ in range(PERIOD):
            step()
        dist.barrier()
        return (time.perf_counter() - start) / PERIOD

    for name in names:
        seconds(name)
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(seconds(name))
    return found


def trained(world: Any, name: str, steps: int, seed: int) -> float:
    torch.set_num_threads(1)
    data = Windows(steps * PER_RANK * world.size, seed=seed)
    model, step, finish = make(name, data, seed)
    for _ in range(steps):
        step()
    finish()
    model.eval()
    valid = Windows(128, "validation", seed=7)
    with torch.no_grad():
        values = [float(loss(model, batch)) for batch in DataLoader(valid, 16)]
    return statistics.mean(values)


def report_times(rate: str, rounds: int) -> None:
    found = emulated.run(
        nodes=2, per_node=1, rate=rate, body=timed, arguments=(rounds,), timeout=1800.0
    )[0]
    today = time.strftime("%Y-%m-%d")
    print(f"10 M parameters, {PER_RANK} x {WINDOW} tokens per rank, tau {PERIOD}, {rate}, {today}")
    for name, values in found.items():
        against = [
            f"{p} / it: median {statistics.median(map(truediv, found[p], values)):.2f}"
            for p in PEERS
        ]
        print(f"  {name:34} {statistics.median(values):.3f} s per step; {', '.join(against)}")


def report_losses(steps: int, seeds: int) -> None:
    print(f"validation loss (nats/byte), {steps} steps of 2 x {PER_RANK} samples, {seeds} seeds")
    reference: list[float] = []
    for name in [*PEERS, *OWN]:
        values = [
            emulated.run(
                nodes=1, per_node=2, rate=None, body=trained, arguments=(name, steps, seed)
            )[0]
            for seed in range(seeds)
        ]
        reference = reference or values
        ratio = statistics.mean(v / r for v, r in zip(values, reference, strict=True))
        shown = " ".join(f"{v:.4f}" for v in values)
        print(f"  {name:34} {shown}   against DDP {ratio:.4f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["loss"]:
        report_losses(
            int(sys.argv[2]) if len(sys.argv) > 2 else 200,
            int(sys.argv[3]) if len(sys.argv) > 3 else 3,
        )
    else:
        report_times(
            sys.argv[2] if len(sys.argv) > 2 else "100 Mbit/s",
            int(sys.argv[3]) if len(sys.argv) > 3 else 3,
        )
