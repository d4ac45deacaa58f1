"""single: the interface that ranks of a node share in arithmetic is exact, whoever sends."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import sys
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.comm.traffic_shaper import TrafficShaper
from headway.errors import UsageError


def warm():
    """Processes that have imported torch already (`comm` does)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "headway.comm.traffic_shaper"])
    return context


class Clock:
    """Nanoseconds that a test sets."""

    def __init__(self, now=1_000):
        self.now = now

    def __call__(self):
        return self.now


def test_bytes_leave_one_after_the_other(tmp_path):
    clock = Clock(0)
    with TrafficShaper.of(tmp_path / "pace", 1000, clock=clock) as pace:
        assert pace.reserve(500) == 0.5
        assert pace.reserve(250) == 0.75
        clock.now = 2_000_000_000
        assert pace.reserve(1000) == 3.0
        assert pace.sent == 1750


@given(
    rate=st.integers(1, 10**11),
    sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=40),
)
def test_pieces_take_exactly_as_long_as_the_whole(tmp_path_factory, rate, sizes):
    path = tmp_path_factory.mktemp("pace") / "pace"
    with TrafficShaper.of(path, rate, clock=Clock(0)) as pace:
        last = [pace.reserve(size) for size in sizes][-1]
    exact = Fraction(sum(sizes), rate)
    assert last == int(exact * 10**9) / 10**9


def test_a_new_rate_holds_for_what_is_queued(tmp_path):
    clock = Clock(0)
    with TrafficShaper.of(tmp_path / "pace", 1000, clock=clock) as pace:
        pace.reserve(1000)
        clock.now = 500_000_000
        pace.set_rate(100)  # 500 bytes are left: 5 s
        assert pace.rate == 100
        assert pace.reserve(0) == 5.5
        with TrafficShaper.of(tmp_path / "pace", 1000, clock=clock) as again:
            assert again.rate == 100
        clock.now = 10_000_000_000
        pace.set_rate(1000)
        assert pace.reserve(1000) == 11.0


def send(path, count, size, together, ends):
    with TrafficShaper.of(path, 10**9) as pace:
        together.wait()
        ends.put([pace.reserve(size) for _ in range(count)])


def test_several_processes_share_one_line(tmp_path):
    """No two pieces overlap: the times at which they leave are all one piece apart."""
    context = warm()
    ends, together = context.SimpleQueue(), context.Barrier(3)
    path, size, count = tmp_path / "pace", 1_000_000, 3000
    with TrafficShaper.of(path, 10**9) as pace:
        before = time.monotonic()
        pace.reserve(60 * 10**9)  # a minute: the line is busy all the time
        workers = [
            context.Process(target=send, args=(path, count, size, together, ends)) for _ in range(3)
        ]
        for worker in workers:
            worker.start()
        found = sorted(end for _ in workers for end in ends.get())
        for worker in workers:
            worker.join()
        assert pace.sent == 60 * 10**9 + 3 * count * size
    gaps = [round((b - a) * 1e9) for a, b in itertools.pairwise(found)]
    assert len(gaps) == 3 * count - 1
    assert all(abs(gap - 1_000_000) <= 1 for gap in gaps)
    assert found[0] == pytest.approx(before + 60.001, abs=0.5)


def test_threads_of_a_rank_share_it_too(tmp_path, request):
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    with TrafficShaper.of(tmp_path / "pace", 10**6, clock=Clock(0)) as pace:
        threads = [
            threading.Thread(target=lambda: [pace.reserve(10) for _ in range(300)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pace.reserve(0) == 0.012
        assert pace.sent == 12_000


def hold(path, ready):
    import fcntl
    import os

    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    ready.set()
    time.sleep(60)


def test_a_rank_that_is_killed_while_it_holds_the_lock_holds_up_nobody(tmp_path):
    context = warm()
    ready = context.Event()
    with TrafficShaper.of(tmp_path / "pace", 1000) as pace:
        holder = context.Process(target=hold, args=(tmp_path / "pace", ready))
        holder.start()
        assert ready.wait(30)
        holder.kill()
        holder.join()
        assert pace.reserve(0) > 0


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(UsageError, match="sends nothing"):
        TrafficShaper.of(tmp_path / "pace", 0)
    with pytest.raises(UsageError, match="cannot be opened"):
        TrafficShaper.of(tmp_path / "absent" / "pace", 1000)


def test_closing_twice_is_allowed(tmp_path):
    pace = TrafficShaper.of(tmp_path / "pace", 1000)
    pace.close()
    pace.close()
