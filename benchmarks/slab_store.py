"""The slab store against reading again: bytes from files and seconds of an epoch.

    python benchmarks/slab_store.py [rounds]

Four ranks, two for each sample (depth halved), samples of 4 x 64^3 int16 in one HDF5 file each, in
batches of 4, three epochs. The peer is a Loader over the same SlabSource: it reads each slab in
each epoch. In the cases "cold" the files are thrown out of the page cache before every epoch; in
"gzip" they are compressed. What is computed with a batch is nothing: the exchange is not hidden.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist

from headway.data import Cursor, Hdf5Slabs, Loader, RankBatch, SlabCut, SlabSource, SlabStore
from headway.plans import BatchSplit
from pairs import torchrun

RANKS, PARTS, SAMPLES, BATCH, EPOCHS, SHAPE = 4, 2, 24, 4, 3, (4, 64, 64, 64)
KINDS = {"plain": None, "gzip": "gzip"}
SLAB = 2 * int(np.prod(SHAPE)) // PARTS


def write(folder: Path) -> None:
    """Counts of particles, as the universes of CosmoFlow: small numbers, many zeros."""
    draw = np.random.default_rng(0)
    for name, compression in KINDS.items():
        for number in range(SAMPLES):
            with h5py.File(folder / f"{name}-{number}.hdf5", "w") as file:
                data = draw.poisson(0.5, SHAPE).astype(np.int16)
                chunks = None if compression is None else (1, 16, 64, 64)
                file.create_dataset("full", data=data, compression=compression, chunks=chunks)


def throw_out(paths: list[Path]) -> None:
    """Have the kernel forget what it holds of the files."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def batches(way: str, source: SlabSource, group: dist.ProcessGroup) -> Iterator[RankBatch]:
    split, cursor = BatchSplit(samples=BATCH), Cursor(seed=0)
    if way == "store":
        yield from SlabStore(source, split, group=group, cursor=cursor, epochs=EPOCHS)
        return
    rank, partitions = dist.get_rank() // PARTS, RANKS // PARTS
    with Loader(source, split, rank=rank, ranks=partitions, cursor=cursor, epochs=EPOCHS) as loader:
        yield from loader


def timed(way: str, kind: str, cold: bool, folder: Path, group: dist.ProcessGroup) -> list[float]:
    """Seconds of each epoch, and the bytes that this rank has read from files."""
    paths = [folder / f"{kind}-{number}.hdf5" for number in range(SAMPLES)]
    cut = SlabCut((PARTS, 1, 1), dist.get_rank() % PARTS)
    source = SlabSource(Hdf5Slabs(paths, "full"), cut=cut, finish=lambda parts: parts[0].float())
    seconds = []
    steps = iter(batches(way, source, group))
    for _ in range(EPOCHS):
        if cold and dist.get_rank() == 0:
            throw_out(paths)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(-(-SAMPLES // BATCH)):
            next(steps)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    assert next(steps, None) is None
    return [*seconds, float(source.bytes_read)]


def worker(folder: Path, rounds: int, report: Path) -> None:
    """One of the ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    offsets = [dist.new_group(list(range(o, RANKS, PARTS))) for o in range(PARTS)]
    group = offsets[dist.get_rank() % PARTS]
    cases = [*product(KINDS, (False, True))]
    found: dict[tuple[str, bool, str], list[list[float]]] = {}
    for number in range(rounds):
        for kind, cold in cases:
            for way in ("store", "again") if number % 2 else ("again", "store"):
                result = torch.tensor(timed(way, kind, cold, folder, group), dtype=torch.float64)
                total = result[-1:].clone()
                dist.all_reduce(total)
                found.setdefault((kind, cold, way), []).append([*result[:-1].tolist(), *total])
    if dist.get_rank() == 0:
        with report.open("w") as out:
            for kind, cold in cases:
                print(line(kind, cold, found), file=out)
    dist.destroy_process_group()


def line(kind: str, cold: bool, found: dict[tuple[str, bool, str], list[list[float]]]) -> str:
    def later(way: str, number: int) -> float:
        return statistics.mean(found[kind, cold, way][number][1:EPOCHS])

    rounds = range(len(found[kind, cold, "store"]))
    ratio = statistics.median(later("again", n) / later("store", n) for n in rounds)
    whole = SAMPLES * PARTS * SLAB
    text = [f"{kind:6}{'cold' if cold else 'warm':6}"]
    for way in ("store", "again"):
        first = statistics.median(r[0] for r in found[kind, cold, way])
        epoch = statistics.median(later(way, n) for n in rounds)
        read = max(float(r[-1]) for r in found[kind, cold, way]) / whole
        text.append(f"{way}: first {first:.3f} s, later {epoch:.3f} s, files {read:.4f} data sets;")
    return " ".join([*text, f"again / store {ratio:.2f}"])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        worker(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    else:
        count = sys.argv[1] if len(sys.argv) > 1 else "5"
        print(
            f"slab store, {RANKS} ranks, {PARTS} for each sample, {SAMPLES} samples of "
            f"{PARTS * SLAB / 2**20:g} MiB, {count} rounds, {time.strftime('%Y-%m-%d')}, "
            f"load {os.getloadavg()[0]:.1f}"
        )
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            out = Path(folder) / "report.txt"
            torchrun("slab_store.py", folder, count, str(out), processes=RANKS)
            print(out.read_text(), end="")
