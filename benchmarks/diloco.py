"""DiLoCo between two sites, data parallelism inside them: bytes on the link, and loss, against DDP.

    python benchmarks/diloco.py [steps] [seeds] [rate]

Two emulated sites (root) of two ranks, 100 Mbit/s between them (another rate changes neither bytes
nor losses); the ranks of a site share its
memory. A small language model on real text (bytes of Python's standard library), AdamW, tau 32,
outer Nesterov. All get the same samples from the same start. Counted are the bytes that the
interface of each site has sent, from the first step to the last; beside them the closed form.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import emulated
import headway
from headway.plans import Synchrony, data_parallel
from language_model import LanguageModel, loss
from local_sgd import Windows

PERIOD, PER_RANK = 32, 2
DILOCO = {
    "merge": "mean", "local_steps": PERIOD, "state": "keep", "copies": 2, "outer": "nesterov",
    "outer_rate": 0.7, "outer_momentum": 0.9,
}  # fmt: skip
OWN = {
    "DiLoCo": DILOCO,
    "DiLoCo, int8": {**DILOCO, "compress": "int8"},
    "DiLoCo, topk:0.25": {**DILOCO, "compress": "topk:0.25"},
    "DiLoCo, topk:0.05": {**DILOCO, "compress": "topk:0.05"},
}
NAMES = ("DDP", *OWN)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(world: Any, name: str, steps: int, seed: int) -> tuple[float, int, int]:
    """Validation loss, bytes that this site has sent for the steps, and parameters."""
    data = Windows(steps * PER_RANK * world.size, seed=seed)
    torch.manual_seed(seed)
    model: Any = LanguageModel(layers=2, width=128)
    batch = PER_RANK * world.size
    rules = Synchrony(**OWN[name]) if name in OWN else None
    run = None
    if rules is None:
        ddp = DistributedDataParallel(model)
        optimizer = adamw(ddp)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
        mine = [order[n] for n in range(len(order)) if n % world.size == world.rank]
        batches = iter(DataLoader(torch.utils.data.Subset(data, mine), PER_RANK))
    else:
        plan = data_parallel(batch, processes=world.size, synchrony=rules)
        run = headway.Executor(model, adamw(model), loss=loss, plan=plan, seed=seed)
        batches = iter(run.batches(data, epochs=1))
    dist.barrier()
    before = world.counters()[0]
    for _ in range(steps):
        if run is not None:
            run.step(next(batches))
            continue
        optimizer.zero_grad()
        loss(ddp, next(batches)).backward()
        optimizer.step()
    if run is not None:
        run.finish()
    dist.barrier()
    sent = world.counters()[0] - before
    model.eval()
    with torch.no_grad():
        valid = DataLoader(Windows(128, "validation", seed=7), 16)
        value = statistics.mean(float(loss(model, one)) for one in valid)
    return value, sent, sum(p.numel() for p in model.parameters())


def closed_form(name: str, parameters: int) -> float:
    """Bytes that a site sends for a step."""
    if name == "DDP":  # a ring of four: 2 (n - 1) / n of the gradients over each edge
        return 2 * 3 / 4 * 4 * parameters
    if name.endswith("int8"):  # from one rank of each site; a scale for 256 values
        return parameters * (1 + 4 / 256) / PERIOD
    if "topk" in name:  # a value and a place
        return parameters * float(name.rpartition(":")[2]) * 8 / PERIOD
    return 2 * 4 * parameters / PERIOD  # both ranks of a site, the whole model each


def main(steps: int, seeds: int, rate: str) -> None:
    print(f"{steps} steps of 4 x {PER_RANK} windows, tau {PERIOD}, {rate}, {seeds} seeds,"
          f" {time.strftime('%Y-%m-%d')}")  # fmt: skip
    losses: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}
    for seed in range(seeds):
        for name in NAMES:
            found = emulated.run(
                nodes=2, per_node=2, rate=rate, body=trained, arguments=(name, steps, seed)
            )
            value, _, parameters = found[0]
            losses.setdefault(name, []).append(value)
            sent.setdefault(name, []).append(max(found[0][1], found[2][1]) / steps)
            print(f"  seed {seed} {name:20} loss {value:.4f}, {sent[name][-1]:.0f} bytes a step",
                  flush=True)  # fmt: skip
    for name in NAMES:
        fewer = [d / own for d, own in zip(sent["DDP"], sent[name], strict=True)]
        ratio = [own / d for d, own in zip(losses["DDP"], losses[name], strict=True)]
        form = closed_form(name, parameters)
        print(
            f"  {name:20} {statistics.median(sent[name]) / 1e3:.1f} kB a step and site (closed form"
            f" {form / 1e3:.1f}), {statistics.median(fewer):.1f} x fewer than DDP; loss / DDP's "
            + ", ".join(f"{r:.4f}" for r in ratio)
        )


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 256,
        int(sys.argv[2]) if len(sys.argv) > 2 else 2,
        sys.argv[3] if len(sys.argv) > 3 else "100 Mbit/s",
    )
