"""Large batches: rates scaled by rule and LARS, LAMB; and what dividing the norms over ranks gives.

python benchmarks/large_batch.py [loss|norms]

loss: the next byte of the standard library's source files after 12 others, a small perceptron, the
same samples for every run. Reference runs at batch 32; at batch 1024 SGD and AdamW with the
reference rate scaled by the linear and by the square-root rule, and all four optimisers with the
best of four rates each (chosen with seed 0, reported for seeds 0 to 2).
norms: 4 processes; the norms of weights and gradients of many layers on every rank, against the
own share and one all-gather, in turn; and whole steps of LARS and LAMB.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from headway.optim import LAMB, LARS, ParallelOperator, WarmUp, linear, parallel_norms, square_root
from headway.optim.layerwise import norms
from headway.optim.parallel_operator import Division
from headway.workloads.transformer import text_file
from pairs import torchrun

CONTEXT, SAMPLES, REFERENCE, LARGE = 12, 98_304, 32, 1024
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=1e-4),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.01),
    "LARS": lambda p, lr: LARS(p, lr, trust=0.02, weight_decay=1e-4),
    "LAMB": lambda p, lr: LAMB(p, lr, weight_decay=0.01),
}
BEST_AT_REFERENCE = {"SGD": 0.1, "AdamW": 0.003}
GRID = {
    "SGD": (0.3, 0.6, 1.0, 1.5),
    "AdamW": (0.01, 0.017, 0.03, 0.05),
    "LARS": (0.8, 1.2, 1.6, 2.4),
    "LAMB": (0.03, 0.05, 0.07, 0.1),
}


def windows(split: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Contexts int64[count, CONTEXT] and the bytes that follow."""
    text = torch.from_numpy(np.fromfile(text_file(split), dtype=np.uint8))
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    found = text[at + torch.arange(CONTEXT + 1)].long()
    return found[:, :-1], found[:, -1]


class Task:
    """The data, and one training run through all of it."""

    def __init__(self) -> None:
        self.inputs, self.targets = windows("train", SAMPLES, 1)
        self.validation = windows("validation", 8192, 2)

    def loss(self, kind: str, rate: float, batch: int, seed: int = 0) -> float:
        """Validation loss in nats per byte; infinite where training diverges."""
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU(),
            nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 256),
        )  # fmt: skip
        optimizer = MAKERS[kind](model.parameters(), rate)
        steps = SAMPLES // batch
        scheduler = WarmUp(optimizer, steps // 10, then=lambda o: CosineAnnealingLR(o, steps))
        entropy = nn.functional.cross_entropy
        for inputs, targets in zip(
            self.inputs.split(batch), self.targets.split(batch), strict=True
        ):
            loss = entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            value = entropy(model(self.validation[0]), self.validation[1]).item()
        return value if math.isfinite(value) else math.inf


def losses() -> None:
    torch.set_num_threads(1)
    task, start = Task(), time.process_time()
    print(f"validation loss, {SAMPLES} samples, {time.strftime('%Y-%m-%d')}")
    for kind, rate in BEST_AT_REFERENCE.items():
        found = task.loss(kind, rate, REFERENCE)
        print(f"  {kind:6} batch {REFERENCE:5}  rate {rate:<7g} {found:.3f}", flush=True)
        for rule in (linear, square_root):
            scaled = rule(rate, batch=LARGE, reference=REFERENCE)
            found = task.loss(kind, scaled, LARGE)
            name = f"{rule.__name__} rule"
            print(
                f"  {kind:6} batch {LARGE:5}  rate {scaled:<7.3g} {found:.3f}  {name}", flush=True
            )
    for kind, rates in GRID.items():
        first = {rate: task.loss(kind, rate, LARGE) for rate in rates}
        best = min(rates, key=lambda rate: first[rate])
        three = [first[best], *(task.loss(kind, best, LARGE, seed) for seed in (1, 2))]
        shown = ", ".join(f"{value:.3f}" for value in sorted(three))
        print(
            f"  {kind:6} batch {LARGE:5}  rate {best:<7g} {statistics.median(three):.3f}  "
            f"best of {len(rates)} rates; three seeds {shown}",
            flush=True,
        )
    print(f"  {time.process_time() - start:.0f} s of CPU time")


# -- norms ---------------------------------------------------------------------------------------

CASES = {"200 layers of 128 x 128": (200, 128), "24 layers of 640 x 640": (24, 640)}
PAIRS = 9


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds from when all ranks begin until the last has ended; CPU seconds of all ranks."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    work()
    spent = torch.tensor(time.process_time() - used)
    dist.all_reduce(spent)
    return time.perf_counter() - start, float(spent)


def norm_pairs(file: Path) -> None:
    """One rank of four."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights and gradients on all ranks
    operator = ParallelOperator()
    results: dict[str, list[tuple[tuple[float, float], tuple[float, float]]]] = {}
    for name, (count, width) in CASES.items():
        weights = [nn.Parameter(torch.randn(width, width)) for _ in range(count)]
        for weight in weights:
            weight.grad = torch.randn(width, width)
        sizes = [weight.numel() for weight in weights]
        division = operator.division(sizes)
        gradients = [weight.grad for weight in weights]

        def whole(weights: list[nn.Parameter] = weights, gradients: list = gradients) -> Tensor:
            with torch.no_grad():
                return torch.stack([norms(weights), norms(gradients)], dim=1)

        def divided(
            weights: list = weights, gradients: list = gradients, division: Division = division
        ) -> Tensor:
            with torch.no_grad():
                own = [[part[item] for item in division.own] for part in (weights, gradients)]
                rows = torch.stack([norms(part) for part in own], dim=1)
                return operator.gather(rows, division)

        assert torch.equal(whole(), divided())
        results[f"norms, {name}"] = [(timed(divided), timed(whole)) for _ in range(PAIRS)]
        for kind in (LARS, LAMB):
            serial, parallel = kind(weights, 1e-6), kind(weights, 1e-6)
            parallel_norms(parallel, always=True)
            serial.step()
            parallel.step()
            results[f"{kind.__name__} step, {name}"] = [
                (timed(parallel.step), timed(serial.step)) for _ in range(PAIRS)
            ]
    if dist.get_rank() == 0:
        file.write_text(json.dumps(results))
    dist.destroy_process_group()


def norm_report() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.json"
        torchrun("large_batch.py", "rank", str(file), processes=4)
        results = json.loads(file.read_text())
    print(
        f"divided over 4 ranks / on every rank, {os.cpu_count()} cores, {PAIRS} pairs, "
        f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}"
    )
    for name, pairs in results.items():
        for number, what in enumerate(("time", "CPU ")):
            both = [(divided[number], whole[number]) for divided, whole in pairs]
            ratios = sorted(divided / whole for divided, whole in both)
            divided, whole = (
                1000 * statistics.median(column) for column in zip(*both, strict=True)
            )
            print(
                f"  {name if not number else '':36} {what} {divided:8.2f} ms / {whole:8.2f} ms = "
                f"{statistics.median(ratios):.3f}   best {ratios[0]:.3f}"
            )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["rank", name]:
            norm_pairs(Path(name))
        case ["loss"]:
            losses()
        case ["norms"]:
            norm_report()
        case _:
            losses()
            norm_report()
