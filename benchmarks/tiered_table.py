"""A table of four times the memory allowed, against the same table in memory.

    python benchmarks/tiered_table.py                  # the table and a small network behind it
    python benchmarks/tiered_table.py --top 0 --pairs 5

Of the lookups 90 % are of 5 % of the rows, which lie anywhere in the table; the others are of any
row. The table in memory is `torch.nn.EmbeddingBag` with sparse gradients, and also headway's own
lookups in memory; the faster of the two counts. Runs alternate, each in its own process.

Memory is limited twice: what the process adds to its size before the table is made is sampled, and
must stay below the limit; where control groups can be made (root, version 1), the run is in one
that holds the process before the table plus the limit, page cache included. Without a group the
kernel's page cache may hold the whole file: the figures of the two together say what it adds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

COLUMNS, BATCH, BAG, WARM = 64, 2048, 10, 10


def frequent_rows(rows: int) -> Tensor:
    every = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    return every[: rows // 20].clone()  # a slice would keep all of them


def batches(rows: int, steps: int) -> Iterator[Tensor]:
    """int64 [batch, bag]."""
    draw, frequent = torch.Generator().manual_seed(2), frequent_rows(rows)
    for _ in range(steps):
        often = frequent[torch.randint(len(frequent), (BATCH, BAG), generator=draw)]
        other = torch.randint(rows, (BATCH, BAG), generator=draw)
        # One in twenty of the others is frequent as well.
        yield torch.where(torch.rand(BATCH, BAG, generator=draw) < 0.8947, often, other)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Group:
    """A control group of this process below its own; does nothing where none can be made."""

    def __init__(self, limit: int) -> None:
        self.path: Path | None = None
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line.split(":")[2] for line in lines if ":memory:" in line), None)
        if own is None:
            return
        self.parent = Path("/sys/fs/cgroup/memory" + own)
        path = self.parent / f"tiered-table-{os.getpid()}"
        with suppress(OSError):
            path.mkdir()
            (path / "memory.limit_in_bytes").write_text(str(limit))
            (path / "cgroup.procs").write_text(str(os.getpid()))
            self.path = path

    def leave(self) -> dict[str, int]:
        if self.path is None:
            return {}
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        peak = int((self.path / "memory.max_usage_in_bytes").read_text())
        (self.parent / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):
            self.path.rmdir()
        return {"group_peak": peak, "page_cache": int(stat["cache"])}


def network(width: int) -> nn.Module:
    if not width:
        return nn.Identity()
    return nn.Sequential(
        nn.Linear(COLUMNS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 1),
    )


def run(options: argparse.Namespace) -> dict[str, object]:
    from headway.channel.mapped_memory import large_tensors_in_files
    from headway.optim import RowWiseAdagrad
    from headway.parallel.tables import split_tables
    from headway.parallel.tables.tiered_table import tier_tables
    from headway.plans.tables import TableSplit, place_tables

    torch.set_num_threads(1)
    limit = options.rows * COLUMNS * 4 // 4
    torch.manual_seed(0)
    top, source = network(options.top), batches(options.rows, options.steps + WARM)
    following = next(source)
    small = nn.EmbeddingBag(1000, COLUMNS, mode="sum", sparse=True)
    warm = RowWiseAdagrad(small.parameters(), lr=0.1)
    for _ in range(3):  # what a step takes without the table, and imports
        top(small(following % 1000)).square().mean().backward()
        warm.step()
        warm.zero_grad()
    base = resident()
    tiers = options.kind == "tiers"
    group = Group(base + limit) if tiers and options.group else None
    peak, done = [base], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], resident())

    threading.Thread(target=sample, daemon=True).start()
    model = nn.Module()
    if tiers:
        with large_tensors_in_files(1 << 24, options.folder):
            model.bag = nn.EmbeddingBag(options.rows, COLUMNS, mode="sum", sparse=True)
    else:
        model.bag = nn.EmbeddingBag(options.rows, COLUMNS, mode="sum", sparse=True)
    table = None
    if options.kind != "torch":
        hot = f"{int(limit * options.share)} B" if tiers else ""
        split = TableSplit(way="table", hot=hot, cold=options.folder)
        placed = place_tables([split], {"bag.weight": (options.rows, COLUMNS)}, 1)
        tables = split_tables(model, placed, touched=["bag.weight"])
    weight = model._parameters.get("bag.weight") or next(model.parameters())
    optimizer = RowWiseAdagrad([weight], lr=0.1)
    dense = torch.optim.SGD(top.parameters(), lr=0.01) if options.top else None
    if tiers:
        known = {"bag.weight": frequent_rows(options.rows)} if options.known else {}
        (table,), _ = tier_tables(tables, optimizer, known)
    seconds: list[float] = []
    reads = disk_reads()
    while following is not None:
        ids, following = following, next(source, None)
        if len(seconds) == WARM:
            reads = disk_reads()
        start = time.perf_counter()
        loss = top(model.bag(ids)).square().mean()
        # A lookup is made when its value is needed, so this comes after the forward pass.
        if table is not None and following is not None:
            table.ahead(following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dense is not None:
            dense.step()
            dense.zero_grad()
        seconds.append(time.perf_counter() - start)
    done.set()
    found = {
        "step_ms": statistics.median(seconds[WARM:]) * 1e3,
        "mean_ms": statistics.mean(seconds[WARM:]) * 1e3,
        "added": peak[0] - base,
        "limit": limit,
        "disk_reads_per_step": (disk_reads() - reads) / options.steps / mmap.PAGESIZE,
        "rows_per_step": table.rows.brought / len(seconds) if table is not None else 0,
    }
    return found | (group.leave() if group is not None else {})


def disk_reads() -> int:
    """Bytes that this process has had read from disks."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes"):
            return int(line.split()[1])
    return 0


def disk_rate(folder: str) -> dict[str, float]:
    """Pages that the disk itself reads per second, past the page cache."""
    size = 256 << 20
    with tempfile.NamedTemporaryFile(dir=folder or None) as file:
        for _ in range(16):
            file.write(os.urandom(size // 16))
        file.flush()
        os.fsync(file.fileno())
        descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)

        def read(count: int, seed: int) -> None:
            draw, page = random.Random(seed), mmap.mmap(-1, mmap.PAGESIZE)
            for _ in range(count):
                os.preadv(descriptor, [page], draw.randrange(size // mmap.PAGESIZE) * mmap.PAGESIZE)

        found = {}
        for threads in (1, 16):
            all_of = [
                threading.Thread(target=read, args=(4000 // threads, n)) for n in range(threads)
            ]
            start = time.perf_counter()
            for each in all_of:
                each.start()
            for each in all_of:
                each.join()
            found[f"{threads} at a time"] = 4000 / (time.perf_counter() - start)
        os.close(descriptor)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4 << 20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--top", type=int, default=512, help="width of the network; 0: none")
    parser.add_argument("--share", type=float, default=0.35, help="of the limit, for hot rows")
    parser.add_argument("--known", type=int, default=1, help="frequent rows are known before")
    parser.add_argument("--group", type=int, default=1, help="limit the page cache as well")
    parser.add_argument("--folder", default="", help="of the table's file")
    parser.add_argument("--kind", choices=("torch", "memory", "tiers"))
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(run(options)))
        return
    print("disk, pages of 4 KiB per second:", disk_rate(options.folder))
    times: dict[str, list[float]] = {}
    for pair in range(options.pairs):
        for kind in ("torch", "memory", "tiers"):
            command = [sys.executable, __file__, *sys.argv[1:], "--kind", kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            times.setdefault(kind, []).append(found["mean_ms"])
            if kind == "tiers":
                assert found["added"] <= found["limit"], f"{found['added']} bytes are resident"
            print(pair, kind, {k: round(v, 1) for k, v in found.items()}, flush=True)
    faster = min(("torch", "memory"), key=lambda kind: statistics.median(times[kind]))
    ratios = [a / b for a, b in zip(times[faster], times["tiers"], strict=True)]
    print(
        f"speed over that of the table in memory ({faster}): median {statistics.median(ratios):.2f}"
    )
    print(f"from {min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs")


if __name__ == "__main__":
    main()
