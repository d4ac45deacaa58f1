"""The 10 M parameter language model on a slow link: every exchange, real computation, real losses.

    python benchmarks/slow_link.py time ["100 Mbit/s"] [rounds]
    python benchmarks/slow_link.py loss [steps] [seeds]

`time`: seconds per step on two emulated nodes (root), all in turn in the same processes. `loss`:
the validation loss after equal steps on real text (bytes of Python's standard library), two ranks
on the loopback, against DDP without compression.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import emulated
import headway
from headway.workloads.transformer import text_file
from language_model import VOCABULARY, WINDOW, LanguageModel, loss

OWN: dict[str, dict[str, Any]] = {
    "headway exact, priority": {"priority": True},
    "headway fp16": {"compress": "fp16", "bucket": "auto"},
    "headway powersgd:1": {"compress": "powersgd:1"},
    "headway powersgd:2": {"compress": "powersgd:2"},
    "headway powersgd:4": {"compress": "powersgd:4"},
    "headway topk:0.01": {"compress": "topk:0.01"},
    "headway auto": {"compress": "auto"},
}
PEERS = ("DDP", "DDP fp16 hook", "DDP PowerSGD 1", "DDP PowerSGD 2", "DDP PowerSGD 4")


def peer(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    # torch's PowerSGD aborts on Gloo with more than one bucket.
    options = {"bucket_cap_mb": 200} if "PowerSGD" in name else {}
    model = DistributedDataParallel(LanguageModel(), **options)
    if name == "DDP fp16 hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if "PowerSGD" in name:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(name[-1]), start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    return model.module, step, lambda: None


def own(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    exchange = headway.Exchange(model, optimizer, **OWN[name])

    def step(batch: tuple[Tensor, Tensor]) -> None:
        loss(model, batch).backward()
        exchange.step()

    step.exchange = exchange  # type: ignore[attr-defined]
    return model, step, exchange.flush


def make(name: str, seed: int = 0) -> Any:
    return peer(name, seed) if name in PEERS else own(name, seed)


def timed(world: Any, names: list[str], rounds: int) -> Any:
    torch.set_num_threads(1)
    runs = {name: make(name) for name in names}
    draw = torch.Generator().manual_seed(world.rank)

    def batch() -> tuple[Tensor, Tensor]:
        words = torch.randint(VOCABULARY, (4, WINDOW + 1), generator=draw)
        return words[:, :-1], words[:, 1:]

    def seconds(name: str, steps: int) -> float:
        _, step, finish = runs[name]
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step(batch())
        finish()
        dist.barrier()
        return (time.perf_counter() - start) / steps

    for name in names:
        seconds(name, 5)
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(seconds(name, 2 if name == "DDP" else 3))
    said = {n: runs[n][1].exchange.remarks for n in names if n in OWN}
    return found, said


def text() -> tuple[Tensor, Tensor]:
    """Training and validation bytes."""
    return tuple(
        torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        for path in (text_file("train"), text_file("validation"))
    )


def trained(world: Any, name: str, steps: int, seed: int) -> float:
    torch.set_num_threads(1)
    train, valid = text()
    model, step, finish = make(name, seed)
    draw = torch.Generator().manual_seed(1000 * seed + world.rank)

    def windows(source: Tensor, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(source) - WINDOW - 1, (count,), generator=draw)
        rows = torch.stack([source[s : s + WINDOW + 1] for s in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    for _ in range(steps):
        step(windows(train, 4, draw))
    finish()
    model.eval()
    fixed = torch.Generator().manual_seed(7)
    with torch.no_grad():
        values = [float(loss(model, windows(valid, 16, fixed))) for _ in range(8)]
    return statistics.mean(values)


def report_times(rate: str, rounds: int) -> None:
    names = [*PEERS, *OWN]
    found, said = emulated.run(
        nodes=2, per_node=1, rate=rate, body=timed, arguments=(names, rounds), timeout=1800.0
    )[0]
    today = time.strftime("%Y-%m-%d")
    print(f"10 M parameters, 4 x {WINDOW} tokens per rank, 2 nodes at {rate}, {today}")
    for name in names:
        ratios = [a / b for a, b in zip(found["DDP"], found[name], strict=True)]
        print(
            f"  {name:24} {statistics.median(found[name]):.3f} s (best {min(found[name]):.3f}); "
            f"DDP / it: median {statistics.median(ratios):.2f}"
        )
        for sentence in said.get(name, []):
            print(f"      {sentence}")


def report_losses(steps: int, seeds: int, names: list[str]) -> None:
    print(f"validation loss (nats/byte) after {steps} steps, {seeds} seeds")
    reference: list[float] = []
    for name in names:
        values = [
            emulated.run(nodes=1, per_node=2, rate=None, body=trained, arguments=(name, steps, s))[
                0
            ]
            for s in range(seeds)
        ]
        reference = reference or values
        ratio = statistics.mean(v / r for v, r in zip(values, reference, strict=True))
        shown = " ".join(f"{v:.4f}" for v in values)
        print(f"  {name:24} {shown}   against DDP {ratio:.4f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["loss"]:
        steps = int(sys.argv[2]) if len(sys.argv) > 2 else 150
        seeds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
        lossy = [name for name in OWN if "exact" not in name and "auto" not in name]
        wanted = sys.argv[4:] or ["DDP", "DDP PowerSGD 1", *lossy]
        report_losses(steps, seeds, wanted)
    else:
        rate = sys.argv[2] if len(sys.argv) > 2 else "100 Mbit/s"
        report_times(rate, int(sys.argv[3]) if len(sys.argv) > 3 else 3)
