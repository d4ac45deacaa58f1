"""A step of 1F1B whose values go over the process group, or in shared memory; one host.

    python benchmarks/pipeline_messages.py [ranks [rounds [sizes ...]]]     # sizes as "1 MiB"

Eight micro-batches; a stage multiplies its values by a vector, so that messages are most of the
work. The two ways take turns; the median of the ratios. More ranks than cores: whoever waits must
not take a core from those that compute.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from headway.parallel import (
    Pipeline,
    PipelineCallbacks,
    PipelineRanks,
    cut,
    open_shared_memory_streams,
)
from headway.schedule.generators.registry import make_schedule
from headway.schedule.lowering import lower
from headway.units import parse_bytes
from pipelines import timed

MICROBATCHES, ROWS = 8, 16
SIZES = ["16 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB"]


class Times(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.01))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def mean(model: Any, data: Tensor) -> Tensor:
    return model(data).mean()


def steps(size: int) -> dict[str, Callable[[], Any]]:
    ranks, width = dist.get_world_size(), size // 4 // ROWS
    table = lower(make_schedule("1f1b", stages=ranks, microbatches=MICROBATCHES))
    group = PipelineRanks(rank=dist.get_rank(), ranks=tuple(range(ranks)))
    found = {}
    for name, team in (
        ("group", group),
        ("shared memory", open_shared_memory_streams(group, table, lambda a, b: True)),
    ):
        model = nn.Sequential(*(Times(width) for _ in range(ranks)))
        data = [torch.ones(ROWS, width) for _ in range(MICROBATCHES)]
        stages = cut(model, mean, data[0], at=[str(n) for n in range(1, ranks)])
        pipeline = Pipeline(stages, table, team, PipelineCallbacks(loss=mean))
        found[name] = lambda p=pipeline, d=data: p.run(d)
    return found


def work(rank: int, folder: str, ranks: int, rounds: int, sizes: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=ranks)  # fmt: skip
    for size in sizes:
        ways = steps(parse_bytes(size))
        for step in (*ways.values(), *ways.values()):
            timed(step)
        table: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in ways if number % 2 == 0 else reversed(ways):
                table[name].append(timed(ways[name]))
        if rank == 0:
            group, shared = table.values()
            ratios = [a / b for a, b in zip(group, shared, strict=True)]
            print(
                f"{size:8} group {statistics.median(group) * 1e3:8.2f} ms, shared memory "
                f"{statistics.median(shared) * 1e3:8.2f} ms; group / shared memory: "
                f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    sizes = sys.argv[3:] or SIZES
    print(f"{ranks} ranks, {os.cpu_count()} cores, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, ranks, rounds, sizes), nprocs=ranks)


if __name__ == "__main__":
    main()
