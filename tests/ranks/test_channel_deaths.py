"""ranks: an end of a channel dies at any moment: the other learns in time, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.channel import Channel, wait_any
from headway.errors import PeerLost
from support.patience import patient
from support.ranks import ranks, run_ranks

PROVIDERS = ["shared_memory", "socket"] if sys.platform == "linux" else ["socket"]
every_provider = pytest.mark.parametrize("provider", PROVIDERS)
PATIENCE = 20.0
"""Far above what a death may take to be noticed; a deadline that runs out is `Stalled`."""


def in_shared_memory():
    """Names in /dev/shm, but for those of MPI and of multiprocessing's locks in other processes."""
    folder = Path("/dev/shm")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if not name.startswith(("sem.mp-", "mpich"))]


def die_soon(seconds):
    """Have this process killed in the middle of whatever its main thread does then."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def until_the_end(world, provider, mortal, seconds, shape):
    channel = Channel(1 - world.rank, shape=shape, provider=provider, timeout=PATIENCE)
    dist.barrier()
    if world.rank == mortal:
        die_soon(seconds)
    number = 0
    try:
        while True:
            channel.put(torch.full((5000,), float(number)))
            with channel.get() as came:
                assert came.eq(number).all(), "torn, lost or doubled"
            number += 1
    except PeerLost as error:
        channel.close()
        return str(error)


@every_provider
@pytest.mark.parametrize("mortal", [0, 1])
@pytest.mark.parametrize("shape", [(5000,), None], ids=["static", "dynamic"])
def test_a_killed_end_is_named_by_the_other(provider, mortal, shape):
    before = in_shared_memory()
    seconds = random.Random(mortal).random() * 0.05
    results = run_ranks(
        2, until_the_end, provider, mortal, seconds, shape, mortal=[mortal], timeout=PATIENCE
    )
    assert f"rank {mortal} vanished" in results[1 - mortal]
    assert in_shared_memory() == before


def wait_idle(world, provider, way):
    channel = Channel(1 - world.rank, shape=(4,), provider=provider, timeout=PATIENCE)
    dist.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 vanished"):
        way(channel)
    with pytest.raises(PeerLost, match="rank 1 vanished"):  # and ever after
        channel.ready()
    channel.close()
    return time.monotonic() - began


def just_get(channel):
    channel.get()


def any_of_one(channel):
    wait_any([channel])


def put_on(channel):
    while True:
        channel.put(torch.ones(4))


@every_provider
@pytest.mark.parametrize("way", [just_get, any_of_one, put_on])
def test_every_wait_ends_with_the_death_of_the_other(provider, way):
    results = run_ranks(2, wait_idle, provider, way, mortal=[1], timeout=PATIENCE)
    assert results[0] < PATIENCE / 2


@every_provider
@ranks(2, mortal=[0])
def test_what_was_put_before_the_death_is_delivered(world, provider):
    channel = Channel(1 - world.rank, shape=(1000,), provider=provider, timeout=PATIENCE)
    if world.rank == 0:
        channel.put(torch.full((1000,), 1.0))
        channel.put(torch.full((1000,), 2.0))
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        try:
            channel._wire.check()
        except PeerLost:
            break
        time.sleep(0.005)
    for number in (1, 2):
        with channel.get() as came:
            assert came.eq(number).all()
    with pytest.raises(PeerLost, match="rank 0 vanished"):
        channel.get()
    channel.close()


@every_provider
@ranks(2)
def test_nothing_stays_of_a_channel_that_was_closed_or_forgotten(world, provider):
    """Descriptors, mappings and threads; a forgotten end says goodbye, too."""

    def held():
        maps = Path("/proc/self/maps").read_text().count("headway channel")
        return len(os.listdir("/proc/self/fd")), maps, threading.active_count()

    def one(shape, close):
        channel = Channel(1 - world.rank, shape=shape, provider=provider, timeout=PATIENCE)
        channel.put(torch.ones(100_000))
        assert channel.get_into(torch.zeros(100_000)).eq(1).all()
        dist.barrier()
        if close:
            channel.close()

    if not Path("/proc/self/maps").exists():
        pytest.skip("there is no /proc to look into")
    one((100_000,), True)
    dist.barrier()
    before = held()
    for _ in range(3):
        for close in (True, False):
            for shape in ((100_000,), None):
                one(shape, close)
                dist.barrier()

    def leaks():
        # Less is no leak: the first channel may still be closing when `before` is taken.
        return any(now > then for now, then in zip(held(), before, strict=True))

    deadline = time.monotonic() + patient(10)
    while leaks() and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread of a forgotten end sees its connection end
    assert not leaks(), (before, held())


@ranks(2)
def test_a_forgotten_end_is_noticed(world):
    channel = Channel(1 - world.rank, shape=(2,), timeout=PATIENCE)
    dist.barrier()
    if world.rank == 0:
        del channel
    else:
        with pytest.raises(PeerLost, match=r"rank 0 (has closed|vanished)"):
            channel.get()
        channel.close()
    dist.barrier()
