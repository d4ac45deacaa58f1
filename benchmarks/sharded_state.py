"""A step with sharded state (ZeRO) beside torch's own on Gloo, two ranks, step by step.

    torchrun --standalone --nproc-per-node 2 benchmarks/sharded_state.py [--steps 40] [--zero 3]

Both models live in the same processes and take turns, so that what disturbs the machine disturbs
both. The peer is FSDP2 as its tutorial has it: `fully_shard` on each block and on the model, blocks
resharded after forward (ZeRO 3) or not (ZeRO 1, 2); with `--peer redundancy` DDP with
`ZeroRedundancyOptimizer`, torch's own ZeRO 1. A transformer of 4.8 M parameters, really computed.
Bar: at most 1.05.

With `--alone headway` or `--alone peer` one of them runs by itself, and what is printed is the peak
of its memory above that before the model was made: of the process, largest of the ranks.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.plans import data_parallel
from headway.workloads.transformer import TransformerConfig, TransformerLM

BATCH, WINDOW, VOCABULARY = 16, 64, 256
CONFIG = TransformerConfig(vocabulary=VOCABULARY, window=WINDOW, width=256, layers=6, heads=4)
WARM = 4


class Words(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(index)
        words = torch.randint(VOCABULARY, (WINDOW + 1,), generator=made)
        return words[:-1], words[1:]


def loss(model: nn.Module, batch: Any) -> Tensor:
    words, following = batch
    return nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def peer_of(zero: int, name: str, config: TransformerConfig) -> Callable[[], None]:
    torch.manual_seed(0)
    model: nn.Module = TransformerLM(config)
    optimizer: torch.optim.Optimizer
    if name == "redundancy":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=zero == 3)
        fully_shard(model, reshard_after_forward=False)
        optimizer = adamw(model)
    share = BATCH // dist.get_world_size()
    batches = iter(
        torch.utils.data.DataLoader(
            Words(), share, sampler=torch.utils.data.DistributedSampler(Words())
        )
    )

    def step() -> None:
        value = loss(model, next(batches))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        value.item()

    return step


def product_of(zero: Any, config: TransformerConfig) -> Callable[[], None]:
    torch.manual_seed(0)
    model = TransformerLM(config)
    plan = data_parallel(BATCH, processes=dist.get_world_size(), zero=zero)
    run = headway.Executor(model, adamw(model), loss=loss, plan=plan)
    batches = run.batches(Words(), epochs=None)

    def step() -> None:
        run.step(next(batches))

    return step


def timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak() -> float:
    """MiB that the process has held at most, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_alone(make: Callable[[], Callable[[], None]], words: str) -> None:
    before = peak()
    step = make()
    for _ in range(WARM):
        step()
    most = torch.tensor(peak() - before)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{words}: {most:.0f} MiB above {before:.0f} MiB ({time.strftime('%Y-%m-%d')})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--zero", type=int, choices=[1, 2, 3], default=3)
    parser.add_argument("--peer", choices=["fully_shard", "redundancy"], default="fully_shard")
    parser.add_argument("--alone", choices=["headway", "peer"])
    parser.add_argument("--width", type=int, default=CONFIG.width)
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = replace(CONFIG, width=chosen.width)
    makers = {
        "headway": partial(product_of, chosen.zero, config),
        "peer": partial(peer_of, chosen.zero, chosen.peer, config),
    }
    if chosen.alone is not None:
        words = f"ZeRO {chosen.zero}, {chosen.alone} ({chosen.peer}), width {chosen.width}"
        run_alone(makers[chosen.alone], words)
        dist.destroy_process_group()
        return
    product, peer = makers["headway"](), makers["peer"]()
    for _ in range(WARM):
        timed(product), timed(peer)
    pairs = []
    for number in range(chosen.steps):
        order = (product, peer) if number % 2 else (peer, product)
        times = {step: timed(step) for step in order}
        pairs.append((times[product], times[peer]))
    if dist.get_rank() == 0:
        ratios = sorted(a / b for a, b in pairs)
        best = [min(column) * 1e3 for column in zip(*pairs, strict=True)]
        print(
            f"ZeRO {chosen.zero}, {dist.get_world_size()} ranks: headway / {chosen.peer}: median "
            f"{statistics.median(ratios):.3f}, quartiles {ratios[len(ratios) // 4]:.3f} to "
            f"{ratios[3 * len(ratios) // 4]:.3f}; best {best[0]:.1f} / {best[1]:.1f} ms "
            f"({time.strftime('%Y-%m-%d')})"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
