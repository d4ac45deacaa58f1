"""A recommender on a stream of many days: memory, rows and checkpoints, day by day.

python benchmarks/stream_recommender.py --days 20
torchrun --nproc-per-node 2 benchmarks/stream_recommender.py --days 20

Every day has `--new` ids that were never seen before, and a stock of old ones. A key that has not
been seen for `--keep` days is forgotten (`--keep 0`: never). A checkpoint is saved at the end of
each day. Memory is the resident set of rank 0 after that, and its peak so far.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import IterableDataset

import headway
from headway.nn import DynamicEmbeddingBag

DIM, KEYS, BATCH = 16, 8, 512


class Days(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples of KEYS keys and a label that depends on them; without an end."""

    def __init__(self, samples: int, new: int, stock: int) -> None:
        self.samples, self.new, self.stock = samples, new, stock

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        day = 0
        while True:
            draw = torch.Generator().manual_seed(day)
            fresh = torch.randint(self.new, (self.samples, KEYS), generator=draw)
            fresh += self.stock + day * self.new
            old = torch.randint(self.stock, (self.samples, KEYS), generator=draw)
            keys = torch.where(torch.rand(fresh.shape, generator=draw) < 0.5, fresh, old)
            labels = (keys % 3 == 0).float().mean(1).gt(0.33).float()
            yield from zip((keys * 0x9E3779B97F4A7C1).unbind(), labels.unbind(), strict=True)
            day += 1


class Clicks(nn.Module):
    """Means of vectors, and a small tower."""

    def __init__(self, evict_after: int | None) -> None:
        super().__init__()
        self.bag = DynamicEmbeddingBag(DIM, mode="mean", evict_after=evict_after)
        self.tower = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, keys: Tensor) -> Tensor:
        logits: Tensor = self.tower(self.bag(keys))[:, 0]
        return logits


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40, help="of a day")
    parser.add_argument("--new", type=int, default=40_000, help="ids of each day")
    parser.add_argument("--stock", type=int, default=40_000, help="ids of all days")
    parser.add_argument("--keep", type=int, default=2, help="days; 0: for ever")
    parser.add_argument("--folder", type=Path, help="of checkpoints, on a disk that all ranks see")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Clicks(given.keep * given.steps or None)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    run = headway.Executor(
        model, optimizer, batch=BATCH,
        loss=lambda m, b: binary_cross_entropy_with_logits(m(b[0]), b[1]),
    )  # fmt: skip
    first = run.world.rank == 0
    folder = given.folder or Path(tempfile.gettempdir()) / "stream_recommender"
    if first:
        shutil.rmtree(folder, ignore_errors=True)
        print("day  loss    rows here  rows made  resident MiB  peak MiB  save ms  checkpoint MiB")
    source = Days(BATCH * given.steps, given.new, given.stock)
    lost, began = 0.0, time.perf_counter()
    for step, batch in enumerate(run.batches(source), 1):
        lost += run.step(batch) / given.steps
        if step % given.steps:
            continue
        began = time.perf_counter()
        run.save(folder, keep=1)
        saving = 1e3 * (time.perf_counter() - began)
        if first:
            day = step // given.steps
            made = given.stock + day * given.new
            size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 2**20
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{day:3}  {lost:.4f}  {len(model.bag.table):9,}  {made:9,}  {resident():12.0f}"
                  f"  {peak:8.0f}  {saving:7.0f}  {size:14.1f}", flush=True)  # fmt: skip
        lost = 0.0
        if step == given.days * given.steps:
            break
    run.close()


if __name__ == "__main__":
    main()
