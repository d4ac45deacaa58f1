"""The data cache in front of a slow source: epoch times and hit rates, against what people write.

python benchmarks/data_cache.py [rounds]

The source sleeps: LATENCY per sample and its bytes at BANDWIDTH, as a loaded network file system.
Peers in the same run, interleaved: torch's DataLoader without a cache; the same over a data set
with a dictionary of all samples, and with an LRU dictionary for half of them (CommLib's setting:
the data do not fit). Then the law of the hit rate, by visiting the orders of headway itself.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from headway.data import CachedSource, Cursor, Loader, SampleOrder, as_source, cached
from headway.plans import BatchSplit

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
SAMPLES, SHAPE, BATCH = 240, (3, 224, 224), 16
LATENCY, BANDWIDTH = 5e-3, 200e6
BYTES = math.prod(SHAPE)


class Remote(Dataset):
    """Pictures of uint8 behind a slow link."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(LATENCY + BYTES / BANDWIDTH)
        return torch.full(SHAPE, index % 251, dtype=torch.uint8), index


class Kept(Dataset):
    """What people write: a dictionary around the data set; the least recently used goes."""

    def __init__(self, capacity: int) -> None:
        self.inner, self.capacity = Remote(), capacity
        self.kept: OrderedDict[int, tuple[torch.Tensor, int]] = OrderedDict()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.kept:
            self.kept.move_to_end(index)
            return self.kept[index]
        sample = self.kept[index] = self.inner[index]
        if len(self.kept) > self.capacity:
            self.kept.popitem(last=False)
        return sample


def torch_epoch(data: Dataset) -> float:
    start = time.perf_counter()
    for _ in DataLoader(data, batch_size=BATCH, shuffle=True):
        pass
    return time.perf_counter() - start


def headway_epoch(source: CachedSource, number: int) -> float:
    start = time.perf_counter()
    split = BatchSplit(samples=BATCH)
    cursor = Cursor(0, number)
    with Loader(
        as_source(source), split, rank=0, ranks=1, cursor=cursor, epochs=number + 1
    ) as loader:
        for _ in loader:
            pass
    return time.perf_counter() - start


def capacity(part: float) -> int:
    """Bytes of a level that holds this part of the samples, with index and headers."""
    return 16 * SAMPLES + round(part * SAMPLES) * (BYTES + 300)


def epochs(folder: Path) -> dict[str, float]:
    """Seconds of one epoch in each way; caches are filled by an epoch before."""
    found: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        found[name] = seconds

    whole, half = Kept(SAMPLES), Kept(SAMPLES // 2)
    memory = cached(Remote(), "memory", memory=capacity(1))
    disk = cached(Remote(), "disk", disk=folder / "disk")
    first = cached(Remote(), "half", memory=capacity(0.5))
    fill: list[Callable[[], None]] = [
        lambda: note("no cache, DataLoader", torch_epoch(Remote())),
        lambda: note("memory, first epoch", headway_epoch(memory, 0)),
        lambda: note("disk, first epoch", headway_epoch(disk, 0)),
        lambda: note("dictionary of all, first epoch", torch_epoch(whole)),
        lambda: note("half in memory, first epoch", headway_epoch(first, 0)),
        lambda: note("LRU dictionary of half, first epoch", torch_epoch(half)),
    ]
    later: list[Callable[[], None]] = [
        lambda: note("memory, later epochs", headway_epoch(memory, 1)),
        lambda: note("disk, later epochs", headway_epoch(disk, 1)),
        lambda: note("dictionary of all, later epochs", torch_epoch(whole)),
        lambda: note("half in memory, later epochs", headway_epoch(first, 1)),
        lambda: note("LRU dictionary of half, later epochs", torch_epoch(half)),
    ]
    for stage in (fill, later):
        for step in random.sample(stage, len(stage)):
            step()
    for source in (memory, disk, first):
        source.close()
    return found


def report() -> None:
    rounds = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(epochs(Path(folder)))
        print(f"  round {number + 1}: load {os.getloadavg()[0]:.1f}", flush=True)
    plain = "no cache, DataLoader"
    print(f"{'':40}{'median s':>10}{'best s':>10}{'no cache / this':>18}")
    for name in sorted(rounds[0], key=lambda name: -statistics.median(r[name] for r in rounds)):
        values = [r[name] for r in rounds]
        ratio = statistics.median(r[plain] / r[name] for r in rounds)
        print(f"{name:40}{statistics.median(values):10.3f}{min(values):10.3f}{ratio:17.2f}x")
    lru, ours = "LRU dictionary of half, later epochs", "half in memory, later epochs"
    pairs = [r[ours] / r[lru] for r in rounds]
    print(f"half the samples fit: headway / LRU dictionary {statistics.median(pairs):.3f}")
    kept = [r["memory, later epochs"] / r["dictionary of all, later epochs"] for r in rounds]
    print(f"all samples fit: headway / dictionary of one process {statistics.median(kept):.2f}")


# ---- the law of the hit rate ------------------------------------------------------------------


def visits(samples: int, count: int) -> Iterator[list[int]]:
    order = SampleOrder(samples, seed=1)
    for number in range(count):
        yield order.indices(number, 0, samples).tolist()


def simulate(rule: str, samples: int, part: float, count: int = 8) -> float:
    """Hit rate of the epochs from the fourth on."""
    most, hits, asked = round(part * samples), 0, 0
    held: OrderedDict[int, None] = OrderedDict()
    places: deque[int] = deque()
    slots: list[int] = []
    for number, order in enumerate(visits(samples, count)):
        for index in order:
            hit = index in held
            if number >= 3:
                hits, asked = hits + hit, asked + 1
            if hit:
                if rule == "LRU":
                    held.move_to_end(index)
                continue
            if len(held) < most:
                held[index] = None
                slots.append(index)
                places.append(index)
            elif rule == "LRU":
                held.popitem(last=False)
                held[index] = None
            elif rule == "FIFO":
                del held[places.popleft()]
                held[index] = None
                places.append(index)
            elif rule == "random":
                slot = random.randrange(most)
                del held[slots[slot]]
                held[index], slots[slot] = None, index
    return hits / asked


def law(rule: str, part: float) -> float | None:
    """What the hit rate should be (docs/data-cache.md); None: not known in closed form."""
    if rule == "keep first":
        return part
    if rule == "LRU":
        return part + (1 - part) * math.log(1 - part)
    if rule == "FIFO":
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # h = ((1 - exp(-k)) / k)^2 with k = (1 - h) / c
        rate = (low + high) / 2
        k = (1 - rate) / part
        low, high = (rate, high) if ((1 - math.exp(-k)) / k) ** 2 > rate else (low, rate)
    return rate


def laws() -> None:
    print("hit rate in later epochs, measured (law):")
    rules = ["keep first", "LRU", "random", "FIFO"]
    print(f"{'part that fits':>16}" + "".join(f"{rule:>18}" for rule in rules))
    for part in (0.25, 0.5, 0.75, 0.9):
        cells = []
        for rule in rules:
            measured = simulate(rule, 4000, part)
            known = law(rule, part)
            expected = "" if known is None else f" ({known:.3f})"
            cells.append(f"{measured:.3f}{expected}".rjust(18))
        print(f"{part:16.2f}" + "".join(cells))


if __name__ == "__main__":
    torch.set_num_threads(1)  # waking torch's threads costs milliseconds where cores are busy
    print(
        f"data cache, {SAMPLES} samples of {BYTES} bytes, {LATENCY * 1e3:g} ms and "
        f"{BANDWIDTH / 1e6:g} MB/s each, {ROUNDS} rounds, {time.strftime('%Y-%m-%d')}"
    )
    report()
    laws()
