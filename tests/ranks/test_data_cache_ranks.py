"""ranks: processes that share a data cache, die in the middle, and damage it under each other."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import headway
from headway.data import CacheWarning, Cursor, Loader, cached
from headway.data.cache import blob_store as shelf_module
from headway.data.cache import levels as disk_module
from headway.data.cache.statistics import CacheCounters
from headway.plans import BatchSplit
from support.cache_counts import hit_rate, since
from support.ranks import ranks, run_ranks

LENGTH = 60
SIZE = 3000
"""Elements of a sample; 12 kB, so that a write takes long enough to be interrupted."""


class Numbers(Dataset):
    """Sample i is made of i."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.arange(index, index + SIZE, dtype=torch.float32), index


def right(index, sample):
    return sample[1] == index and torch.equal(sample[0], Numbers()[index][0])


def epoch(source, world, number, workers=0):
    """One epoch of this rank; every sample is checked. Returns what was found where."""
    before = source.statistics()
    split = BatchSplit(samples=world.size * 3)
    with Loader(
        source, split, rank=world.rank, ranks=world.size,
        cursor=Cursor(7, number), epochs=number + 1, workers=workers,
    ) as loader:  # fmt: skip
        for batch in loader:
            for micro in batch.micros:
                for row, index in enumerate(micro.data[1].tolist()):
                    assert right(index, (micro.data[0][row], index))
    return since(source.statistics(), before)


# -- sharing ------------------------------------------------------------------------------------


def shared(results):
    """Each sample was read from the source once; then everything came from memory."""
    first, later = zip(*results, strict=True)
    assert sum(found.remote_samples for found in first) == LENGTH
    assert sum(found.memory_stored for found in first) == LENGTH
    assert sum(found.disk_stored for found in first) == LENGTH
    assert sum(found.memory_samples for found in later) == LENGTH
    assert all(hit_rate(found) == 1 for found in later)
    assert not any(found.damaged for pair in results for found in pair)


@ranks(4, check=shared)
def test_ranks_share_what_any_of_them_has_read(world):
    tempfile.tempdir = str(world.directory)
    source = cached(Numbers(), "numbers", memory="2 MiB", disk=world.directory / "cache")
    first = epoch(source, world, 0)
    dist.barrier()
    later = epoch(source, world, 1)
    dist.barrier()
    return first, later


@ranks(2, check=shared)
def test_data_loading_processes_share_it_and_count_for_their_rank(world):
    multiprocessing.set_start_method("fork", force=True)  # as in the ranks of a launcher
    tempfile.tempdir = str(world.directory)
    source = cached(Numbers(), "numbers", memory="2 MiB", disk=world.directory / "cache")
    first = epoch(source, world, 0, workers=2)
    dist.barrier()
    later = epoch(source, world, 1, workers=2)
    dist.barrier()
    return first, later


def two_epochs(world, source):
    for number in range(2):
        epoch(source, world, number)
        dist.barrier()


def test_processes_that_get_it_by_value_use_the_same_levels_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = cached(Numbers(), "numbers", memory="2 MiB", disk=tmp_path / "cache")
    run_ranks(2, two_epochs, source)
    found = source.statistics()
    assert (found.remote_samples, found.memory_samples) == (LENGTH, LENGTH)
    source.samples(range(LENGTH))
    assert since(source.statistics(), found).memory_samples == LENGTH


def count_up(world, counters):
    dist.barrier()
    for _ in range(20_000):
        counters.add(damaged=1)


def test_no_count_is_lost():
    counters = CacheCounters()
    run_ranks(2, count_up, counters)
    counters.add(damaged=5)
    assert counters.statistics().damaged == 40_005
    assert [counters.first(3), counters.first(3), counters.first(2)] == [True, False, True]


def bounded(results):
    sizes, rates = zip(*results, strict=True)
    assert len(set(sizes)) == 1
    held = 400_000 // (SIZE * 4 + 200)
    assert all(SIZE * 4 * (held - 2) < size <= 400_000 for size in sizes[0])
    assert sum(rates) == pytest.approx(held, abs=2)


@ranks(4, check=bounded)
def test_the_limits_hold_for_all_processes_together(world):
    tempfile.tempdir = str(world.directory)
    source = cached(
        Numbers(), "numbers", memory=400_000, disk=world.directory / "cache", disk_limit=400_000
    )
    epoch(source, world, 0)
    dist.barrier()
    later = epoch(source, world, 1)
    dist.barrier()
    return tuple(level.size for level in source._levels), later.memory_samples + later.disk_samples


@ranks(2)
def test_training_is_bit_for_bit_that_without_the_cache(world):
    multiprocessing.set_start_method("fork", force=True)
    tempfile.tempdir = str(world.directory)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(50, size, generator=generator) for size in (4, 2)]
    results = []
    for cache in ({}, {"memory": "6 KiB", "disk": world.directory / "cache"}):
        data = TensorDataset(*rows)
        examples = cached(data, "rows", **cache) if cache else data
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss = headway.criterion(nn.MSELoss())
        with headway.Executor(model, optimizer, loss=loss, batch=8, seed=3) as run:
            losses = [run.step(b) for b in run.batches(examples, epochs=3, workers=world.rank)]
        results.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))
    assert hit_rate(examples.statistics()) > 0.2


# -- death --------------------------------------------------------------------------------------


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_blob(file, buffers, begin):
    whole = b"".join(buffers)
    os.pwrite(file, whole[: len(whole) // 2], begin)
    die()


def without_its_record(file, data, begin):
    die()


def kill_while_storing(world, folder, moment):
    """Stores some samples, and dies while it stores one more."""
    source = cached(Numbers(), "numbers", disk=folder)
    source.samples(range(10))
    if moment == "holding the lock":
        disk_module._stored = die
    else:
        os.pwritev = {"half a blob": half_a_blob, "before the blob": die}.get(moment, os.pwritev)
        if moment == "before the record":
            os.pwrite = without_its_record
    source.samples([20])


def read_after(world, folder):
    source = cached(Numbers(), "numbers", disk=folder)
    start = time.monotonic()
    for index in range(LENGTH):
        assert right(index, source.samples([index])[0])
    assert time.monotonic() - start < shelf_module.WAIT, "nobody waits for the dead"
    found = source.statistics()
    assert found.damaged == 0
    return found


@pytest.mark.parametrize(
    "moment", ["holding the lock", "before the blob", "half a blob", "before the record"]
)
def test_a_process_killed_while_it_stores_leaves_nothing_that_is_served(tmp_path, moment):
    assert run_ranks(1, kill_while_storing, tmp_path, moment, mortal=[0]) == [None]
    (found,) = run_ranks(1, read_after, tmp_path)
    assert (found.disk_samples, found.remote_samples) == (10, LENGTH - 10)
    assert found.disk_stored == LENGTH - 10
    (found,) = run_ranks(1, read_after, tmp_path)
    assert found.disk_samples == LENGTH


def fill_until_killed(world, folder, moments):
    source = cached(Numbers(), "numbers", disk=folder)
    dist.barrier()
    threading.Timer(moments[world.rank], die).start()
    order = list(range(LENGTH))
    while True:
        random.shuffle(order)
        source.samples(order)


@pytest.mark.parametrize("seed", range(4))
def test_processes_killed_at_any_moment(tmp_path, seed):
    moments = [0.0005 + 0.02 * random.Random(seed * 10 + rank).random() for rank in range(2)]
    run_ranks(2, fill_until_killed, tmp_path, moments, mortal=[0, 1])
    run_ranks(2, read_after, tmp_path)


# -- damage -------------------------------------------------------------------------------------


def reader_counts(results):
    assert sum(results[1:]) > 0, "no reader met the damage"


@ranks(3, check=reader_counts)
def test_bytes_damaged_under_the_readers(world):
    folder = world.directory / "cache"
    source = cached(Numbers(), "numbers", disk=folder)
    if world.rank == 0:
        source.samples(range(LENGTH))
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        for number in range(10):
            if world.rank == 0:
                (path,) = Path(folder).rglob("data")
                with path.open("r+b") as file:
                    for _ in range(200):
                        file.seek(random.randrange(path.stat().st_size))
                        file.write(os.urandom(1))
            else:
                epoch(source, world, number)
    dist.barrier()
    return source.statistics().damaged


@ranks(3)
def test_the_directory_deleted_under_the_readers(world):
    folder = world.directory / "cache"
    source = cached(Numbers(), "numbers", disk=folder)
    dist.barrier()
    for number in range(15):
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        epoch(source, world, number)
    dist.barrier()
    before = source.statistics()
    source.samples(range(LENGTH))
    source.samples(range(LENGTH))
    assert since(source.statistics(), before).disk_samples >= LENGTH, "it goes on as before"
    assert source.statistics().damaged == 0


def one_is_right(results):
    found = Counter(results)
    assert found.total() == 3
    assert found["stale"] >= 1


@ranks(3, check=one_is_right)
def test_ranks_that_start_on_changed_data(world):
    """Whoever notices throws the store away; nobody is given old samples."""
    folder = world.directory / "cache"

    class Old(Numbers):
        def __getitem__(self, index):
            return torch.zeros(SIZE), index

    if world.rank == 0:
        cached(Old(), "numbers", disk=folder).samples(range(LENGTH))
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = cached(Numbers(), "numbers", disk=folder)
        epoch(source, world, 0)
    dist.barrier()
    return "stale" if caught else "fresh"
