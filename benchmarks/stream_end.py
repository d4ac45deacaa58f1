"""A step over a stream without a length against one with a length, in turn, on two processes:

    torchrun --nproc-per-node 2 --local-ranks-filter 0 benchmarks/stream_end.py

Where such a stream ends the ranks compare in every step. Two processes on two virtual cores shared
with other work, 24 November 2026, median of 300 pairs, model of 85 000 parameters: an exchange of
its own for that 1.60 of the step with a length (12.6 and 7.9 ms); in the step's reduction 1.10 (5.9
and 5.5 ms).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import headway
from headway.data import RankBatch, StreamSource

PAIRS, WARM = 300, 20


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            yield torch.randn(64, generator=generator), torch.tensor(1)


def started(length: int | None) -> tuple[headway.Executor, Iterator[RankBatch]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    run = headway.Executor(model, optimizer, loss=nn.CrossEntropyLoss(), batch=64)
    return run, iter(run.batches(StreamSource(Numbers(), length)))


def timed(run: headway.Executor, batches: Iterator[RankBatch]) -> float:
    """Milliseconds of reading a batch and of its step."""
    dist.barrier()
    start = time.perf_counter()
    run.step(next(batches))
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    torch.set_num_threads(1)
    without, known = started(None), started(10**6)
    pairs = [(timed(*without), timed(*known)) for _ in range(WARM + PAIRS)][WARM:]
    if dist.get_rank() == 0:
        ratio = statistics.median(a / b for a, b in pairs)
        a, b = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(f"without a length {a:.2f} ms, with one {b:.2f} ms, paired ratio {ratio:.3f}")
