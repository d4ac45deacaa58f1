"""single: connections between ranks, both ends in one process: messages, ends, introductions."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from headway.channel.gloo_listeners import named_interfaces
from headway.comm.backend import connection
from headway.comm.backend.connection import (
    ConnectionBroken,
    ConnectionMessages,
    connect_peers,
    interface_candidates,
)
from headway.errors import Stalled

LONG = timedelta(seconds=10)
LARGE = 3 * 2**20
"""Elements of float32: more than the kernel keeps for a receiver that does not read."""


def group(size, ways=1, store=None, seconds=10.0):
    """The messages of all ranks, introduced to each other."""
    store = store or dist.HashStore()
    every = range(size)
    with ThreadPoolExecutor(size) as pool:
        at = [["127.0.0.1"]] * ways
        found = [pool.submit(connect_peers, store, r, every, at, seconds) for r in every]
    return [ConnectionMessages(each.result()) for each in found]


@pytest.fixture
def ends(request):
    """As many ranks as a test asks for, closed at its end."""
    made = group(getattr(request, "param", 2))
    yield made
    for messages in made:
        messages.close()


three = pytest.mark.parametrize("ends", [3], indirect=True)


def numbers(count, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_both_directions_at_once(ends):
    sent = [numbers(LARGE, rank) for rank in range(2)]
    got = [torch.zeros(LARGE) for _ in range(2)]

    def work(rank):
        receive = ends[rank].recv([got[rank]], 1 - rank, 5)
        send = ends[rank].send([sent[rank]], 1 - rank, 5)
        send.wait(LONG)  # it moves what comes, too, or both would wait for ever
        receive.wait(LONG)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert torch.equal(got[0], sent[1])
    assert torch.equal(got[1], sent[0])


def test_messages_are_told_apart_by_tags_and_keep_their_order(ends):
    one, other = ends
    sizes = {7: (3, 0, 40_000), 8: (100_000, 5)}
    sent = {tag: [numbers(n, 10 * tag + n) for n in each] for tag, each in sizes.items()}
    leaving = [one.send([t], 1, tag) for tag, each in sent.items() for t in each]
    for tag in (8, 7):  # the other way round: those of 7 have to be put aside
        got = [torch.zeros(n) for n in sizes[tag]]
        for transfer in [other.recv([t], 0, tag) for t in got]:
            transfer.wait(LONG)
        assert all(torch.equal(a, b) for a, b in zip(got, sent[tag], strict=True))
    for transfer in leaving:
        transfer.wait(LONG)


def test_nobody_runs_far_ahead_of_who_asks_for_nothing(ends):
    one, other = ends
    sent = numbers(4 * LARGE, 0)
    transfer = one.send([sent], 1, 1)
    wanted = torch.zeros(1)
    with pytest.raises(RuntimeError, match="timed out"):
        transfer.wait(timedelta(seconds=0.2))
    got = torch.zeros(4 * LARGE)
    receives = [other.recv([got], 0, 1), other.recv([wanted], 0, 2)]
    assert not receives[0].travels
    assert receives[1].travels
    with ThreadPoolExecutor(1) as pool:
        pool.submit(receives[0].wait, LONG)
        transfer.wait(LONG)
        one.send([torch.ones(1)], 1, 2).wait(LONG)
    receives[1].wait(LONG)
    assert torch.equal(got, sent)
    assert wanted.item() == 1


@three
def test_several_threads_wait_in_one_group(ends):
    one, other, third = ends
    got = [torch.zeros(n) for n in (10, LARGE)]
    first = other.recv([got[0]], 0, 0)
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(first.wait, LONG)]  # in poll, for something else
        time.sleep(0.1)
        done.append(pool.submit(other.recv([got[1]], 2, 1).wait, LONG))
        third.send([numbers(LARGE, 1)], 1, 1).wait(LONG)
        done[1].result(10)
        assert not done[0].done()
        one.send([numbers(10, 0)], 1, 0)
        done[0].result(10)
    assert torch.equal(got[0], numbers(10, 0))
    assert torch.equal(got[1], numbers(LARGE, 1))


@three
def test_a_wait_ends_in_time_and_costs_nothing(ends):
    ends[2].send([torch.ones(1)], 0, 0)  # nobody has asked for it
    receive = ends[0].recv([torch.zeros(5)], 1, 0)
    began, processor = time.monotonic(), time.thread_time()
    with pytest.raises(RuntimeError, match="timed out"):
        receive.wait(timedelta(seconds=0.3))
    assert 0.3 <= time.monotonic() - began < 2
    assert time.thread_time() - processor < 0.1


@pytest.mark.parametrize("aside", [False, True])
def test_another_size_is_said(ends, aside):
    one, other = ends
    if not aside:
        receive = other.recv([torch.zeros(3)], 0, 1)
    one.send([torch.zeros(4)], 1, 1)
    if aside:
        one.send([torch.zeros(1)], 1, 2)
        other.recv([torch.zeros(1)], 0, 2).wait(LONG)
        receive = other.recv([torch.zeros(3)], 0, 1)
    with pytest.raises(ConnectionBroken, match="It sent 16 bytes where 12 were expected") as caught:
        receive.wait(LONG)
    assert caught.value.peer == 0


@three
def test_a_death_is_told_to_all_who_wait_with_its_name(ends, monkeypatch):
    monkeypatch.setattr(connection, "_GRACE_SECONDS", 0.2)
    ends[1].send([torch.ones(2)], 0, 3)
    waits = [ends[0].recv([torch.zeros(1)], peer, 0) for peer in (1, 2)]
    for link in ends[1]._by_number.values():
        link.drop()
    came = torch.zeros(2)
    for transfer in waits:  # of the dead one, and of one that lives
        began = time.monotonic()
        with pytest.raises(ConnectionBroken, match="It is gone") as caught:
            transfer.wait(LONG)
        assert caught.value.peer == 1
        assert time.monotonic() - began < 2
    early = ends[0].recv([came], 1, 3)  # what it had sent is there
    assert early.done
    assert came.tolist() == [1, 1]


@three
def test_who_has_said_goodbye_is_not_missed(ends, monkeypatch):
    monkeypatch.setattr(connection, "_GRACE_SECONDS", 0.1)
    ends[1].close()
    receive = ends[0].recv([torch.zeros(1)], 2, 0)
    with pytest.raises(RuntimeError, match="timed out"):
        receive.wait(timedelta(seconds=0.5))
    processor = time.thread_time()
    with pytest.raises(RuntimeError, match="timed out"):
        receive.wait(timedelta(seconds=0.3))
    assert time.thread_time() - processor < 0.1  # its end does not keep poll awake
    ends[2].send([torch.ones(1)], 0, 0)
    receive.wait(LONG)
    with pytest.raises(ConnectionBroken, match="It has closed the group"):
        ends[0].recv([torch.zeros(1)], 1, 0).wait(LONG)


def test_closing_wakes_who_waits(ends):
    receive = ends[0].recv([torch.zeros(1)], 1, 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receive.wait, LONG)
        time.sleep(0.1)
        began = time.monotonic()
        ends[0].close()
        assert time.monotonic() - began < 3
        with pytest.raises(ConnectionBroken, match="was closed by this rank"):
            waiting.result(5)


def test_a_copy_of_the_process_keeps_no_connection_open():
    one, other = group(2)
    child = os.fork()
    if not child:  # as a worker of a data loader, that outlives its rank
        time.sleep(20)
        os._exit(0)
    try:
        for link in one._by_number.values():
            link.drop()
        with pytest.raises(ConnectionBroken, match="It is gone"):
            other.recv([torch.zeros(1)], 0, 0).wait(timedelta(seconds=5))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        one.close()
        other.close()


# -- introductions ------------------------------------------------------------------------------


def test_strangers_are_turned_away(monkeypatch):
    monkeypatch.setattr(connection, "_SHORT_SECONDS", 0.2)
    store, strangers = dist.HashStore(), []
    one_at_a_time = threading.Lock()

    class Slow:
        """A store in which strangers read the notice of rank 0 before the others do."""

        set, wait = store.set, store.wait

        @staticmethod
        def get(key):
            found = store.get(key)
            with one_at_a_time:
                if key == "0" and not strangers:
                    port = int(re.search(rb'"127.0.0.1", (\d+)', found).group(1))
                    for hello in (b"", b"\0" * 35 + b"\1", b"x" * 36, b"\1\0\0\0" * 9):
                        strangers.append(socket.create_connection(("127.0.0.1", port)))
                        strangers[-1].sendall(hello)
            return found

    ends = group(2, store=Slow)
    assert len(strangers) == 4
    got = torch.zeros(3)
    ends[1].send([torch.ones(3)], 0, 0)
    ends[0].recv([got], 1, 0).wait(LONG)
    assert got.tolist() == [1, 1, 1]
    for each in (*ends, *strangers):
        each.close()


def test_who_does_not_come_is_named():
    with pytest.raises(Stalled, match="rank 6 did not come to a group"):
        connect_peers(dist.HashStore(), 0, (4, 6), [["127.0.0.1"]], 0.2)


@pytest.mark.parametrize("ways", [0, 2])
def test_one_without_an_address_keeps_all_from_it(ways):
    """None, or another number of interfaces."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        found = [
            pool.submit(
                connect_peers, store, r, range(3), [["127.0.0.1"]] * (ways if r == 1 else 1), 9
            )
            for r in range(3)
        ]
    assert [each.result() for each in found] == [None] * 3


def test_addresses_are_those_that_gloo_would_choose(monkeypatch):
    assert interface_candidates(("lo",)) == [["127.0.0.1"]]
    assert interface_candidates(("lo", "no such interface")) == [["127.0.0.1"], []]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert interface_candidates(named_interfaces()) == [["127.0.0.1"]] * 2
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert named_interfaces() == []
    (own,) = interface_candidates(())
    assert own[-1] == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "no such host.invalid")
    assert interface_candidates(()) == [["127.0.0.1"]]


def test_large_messages_have_a_way_for_each_interface():
    one, other = group(2, ways=2)
    got = torch.zeros(2)
    for tag in (10, 11):
        one.send([torch.full((1,), float(tag))], 1, tag)
    numbers_ = {link.number for link in other._links[0]}
    assert len(numbers_) == 2
    for tag in (11, 10):
        other.recv([got[tag - 10 : tag - 9]], 0, tag).wait(LONG)
        assert not any(link._early for link in other._links[0])  # none was in the way
    assert got.tolist() == [10, 11]
    one.close()
    other.close()
