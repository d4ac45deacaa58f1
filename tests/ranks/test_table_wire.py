"""ranks: what ranks of one machine send each other for lookups goes through shared memory."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.errors import PeerLost, Stalled
from headway.parallel.tables.wire import Wire, open_table_streams
from support.ranks import ranks, run_ranks

PATIENCE = 20.0
HOST = torch.device("cpu")
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
pytestmark = only_linux
TYPES = (torch.float32, torch.uint8, torch.int64, torch.float64, torch.int32)


def wire_of(world, together=lambda a, b: True, timeout=PATIENCE):
    return Wire(world.group, HOST, open_table_streams(world.group, HOST, together, timeout))


def message(by, to, turn):
    """Tensors of several types and uneven sizes; some ranks send some others nothing."""
    if (by + 2 * to + turn) % 4 == 0:
        return []
    kinds = [TYPES[(by + to + turn + n) % len(TYPES)] for n in range(3)]
    sizes = [(turn * 37 + 11 * by + 5 * to) % 200, 3, (turn * turn) % 5000]
    return [
        torch.arange(size).add(by + 10 * to + turn).to(kind).view(1, size).squeeze(0)
        for size, kind in zip(sizes, kinds, strict=True)
    ]


def shapes(tensors):
    return [(tuple(x.shape), x.dtype) for x in tensors]


def start(wire, turn):
    everyone = range(wire.size)
    return wire.start(
        [message(wire.rank, to, turn) for to in everyone],
        [shapes(message(by, wire.rank, turn)) for by in everyone],
    )


def assert_came(wire, flight, turn):
    for by, came in enumerate(flight.wait()):
        expected = message(by, wire.rank, turn)
        assert shapes(came) == shapes(expected)
        assert all(torch.equal(a, b) for a, b in zip(came, expected, strict=True))


class Counted:
    """Exchanges over the process group."""

    def __init__(self, monkeypatch):
        self.exchanges, plain = 0, dist.all_to_all_single

        def counted(*args, **kwargs):
            self.exchanges += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(dist, "all_to_all_single", counted)


def exchange(world, apart):
    """Waited for in any order, some not at all, some long after; nothing over the group."""
    wire = wire_of(world, lambda a, b: not {a, b} & set(apart))
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        over_group = Counted(patch)
        for turn in range(0, 60, 3):
            flights = [(turn + n, start(wire, turn + n)) for n in range(3)]
            if turn % 2:
                flights.reverse()
            if turn % 4 == 0:
                flights.pop(1)
            for number, flight in flights:
                assert_came(wire, flight, number)
            kept += flights[: turn % 5 == 0]
            assert wire.gather([turn, wire.rank]) == [[turn, by] for by in range(wire.size)]
        assert wire.documents({"rank": wire.rank}) == [{"rank": by} for by in range(wire.size)]
        for number, flight in kept:
            assert_came(wire, flight, number)
    lent = [
        sum(stream._arena._ended[r.number] != r.loans for r in stream._arena._rooms)
        for stream in wire.streams.values()
    ]
    dist.barrier(world.group)
    return over_group.exchanges, len(wire.streams), max(lent, default=0), len(kept)


@pytest.mark.parametrize(
    ("size", "apart"),
    [(2, ()), (2, (1,)), (3, ()), (3, (1,)), pytest.param(4, (0, 2), marks=pytest.mark.slow)],
)
def test_messages_of_all_sizes_arrive(size, apart):
    for rank, found in enumerate(run_ranks(size, exchange, apart, timeout=PATIENCE)):
        exchanges, streams, lent, kept = found
        near = [other for other in range(size) if other not in (*apart, rank)]
        assert streams == (0 if rank in apart else len(near))
        assert bool(exchanges) == bool(apart)
        # Of those that nobody waited for, only the newest may still be lent.
        assert lent <= kept + 3


@ranks(2)
def test_more_messages_under_way_than_a_stream_has_room_for(world):
    """Rank 1 comes late: no put may wait for what waits for the put itself."""
    wire = wire_of(world)
    flights = [(turn, start(wire, turn)) for turn in range(300)]
    for turn, flight in reversed(flights):
        assert_came(wire, flight, turn)


def memory_of(stream):
    """Bytes of memory behind the arena of a stream."""
    return 512 * os.fstat(stream._arena.file).st_blocks


def swap(wire, x):
    came = wire.swap([[x]] * 2, [shapes([x])] * 2)[1 - wire.rank]
    assert torch.equal(came[0], x)


@ranks(2)
def test_memory_of_messages_that_do_not_come_again_goes_back(world):
    wire = wire_of(world)
    (stream,) = wire.streams.values()
    large = torch.ones(8 << 20, dtype=torch.uint8)
    swap(wire, large)
    assert memory_of(stream) > 8 << 20
    for number in range(100):
        swap(wire, torch.full((1000,), float(number)))
    assert memory_of(stream) < 1 << 20
    swap(wire, large)  # in the same room, which has memory again
    for number in range(8):  # of sizes that fit into no room of the ones before
        swap(wire, torch.ones((1 << 20) * 3**number // 100 + 1, dtype=torch.uint8))
        dist.barrier(world.group)
    sizes = [len(room.map) for room in stream._arena._rooms]
    assert memory_of(stream) < max(sizes) + (1 << 20) < sum(sizes)
    del wire, stream
    dist.barrier(world.group)
    gc.collect()
    assert "headway channel" not in Path("/proc/self/maps").read_text()


def interrupted(world, how):
    wire = wire_of(world, timeout=1.0)
    wire.gather([0])
    if world.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3.0)
        return None
    flight = start(wire, 1)
    try:
        flight.wait()
    except (PeerLost, Stalled) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("dies", "PeerLost", "rank 1 vanished"),
        ("sleeps", "Stalled", "rank 1 did not put a tensor within 1 s"),
    ],
)
def test_a_rank_that_does_not_come_is_named(how, kind, words):
    mortal = (1,) if how == "dies" else ()
    found, text = run_ranks(2, interrupted, how, mortal=mortal, timeout=PATIENCE)[0]
    assert found == kind
    assert words in text
