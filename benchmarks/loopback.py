"""On an unshaped loopback nothing is gained by overlap: headway must not be slower than DDP.

    python benchmarks/loopback.py [pairs]

Small and large models, paired in turn in the same two processes; goal at most 1.03.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import emulated
import headway
from language_model import VOCABULARY, WINDOW, LanguageModel, loss

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 15


class Small(nn.Sequential):
    """68 k parameters in 8 tensors."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 256), nn.ReLU(),
            nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, 10),
        )  # fmt: skip


def small_loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(64, 64)).square().mean()


def large_loss(model: nn.Module) -> torch.Tensor:
    words = torch.randint(VOCABULARY, (4, WINDOW + 1))
    return loss(model, (words[:, :-1], words[:, 1:]))


MODELS = {
    "MLP, 68 k": (Small, small_loss, 100),
    "language model, 10 M": (LanguageModel, large_loss, 2),
}
CHOICES = {
    "default": {},
    "bucket auto": {"bucket": "auto"},
    "priority": {"priority": True},
}


def body(world: Any, name: str) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    build, lose, steps = MODELS[name]

    def peer() -> Any:
        torch.manual_seed(0)
        model = DistributedDataParallel(build())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            lose(model).backward()
            optimizer.step()

        return step, lambda: None

    def own(**choices: Any) -> Any:
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        exchange = headway.Exchange(model, optimizer, **choices)

        def step() -> None:
            lose(model).backward()
            exchange.step()

        return step, exchange.flush

    runs = {"DDP": peer()} | {key: own(**choices) for key, choices in CHOICES.items()}

    def seconds(step: Any, finish: Any) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        finish()
        dist.barrier()
        return (time.perf_counter() - start) / steps

    for run in runs.values():
        for _ in range(3):
            seconds(*run)
    found: dict[str, list[float]] = {key: [] for key in runs}
    for number in range(COUNT):
        order = list(runs.items())
        for key, run in order if number % 2 else reversed(order):
            found[key].append(seconds(*run))
    return found


if __name__ == "__main__":
    for name in MODELS:
        found = emulated.run(nodes=1, per_node=2, rate=None, body=body, arguments=(name,))[0]
        peer_ms = statistics.median(found["DDP"]) * 1e3
        print(f"{name}: DDP {peer_ms:.2f} ms   load {os.getloadavg()[0]:.1f}")
        for key in CHOICES:
            ratios = sorted(a / b for a, b in zip(found[key], found["DDP"], strict=True))
            quarter = len(ratios) // 4
            print(
                f"  headway {key:12} / DDP: median {statistics.median(ratios):.3f}, middle half "
                f"{ratios[quarter]:.3f} to {ratios[-quarter - 1]:.3f}, best / best "
                f"{min(found[key]) / min(found['DDP']):.3f} (goal 1.03)"
            )
