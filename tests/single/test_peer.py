"""single: who is given up and who is excused, from what the two kernels and the peer say."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from headway.errors import PeerLost, Stalled, UsageError
from headway.run.distributed.heartbeat import (
    Heartbeat,
    HeartbeatConnection,
    HeartbeatListener,
    ProcessIdentity,
    RankFailure,
    _facts,
    _thread_states,
    connect_heartbeat,
    machine_naming,
    name_rank_machines,
    reported_failure,
    silent_ranks,
)
from headway.run.distributed.heartbeat_message import LineError, SignedLines, number, seconds
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import Watchdog, World, break_connections, open_sockets

OWN = ProcessIdentity(rank=0, local_rank=0, node=0, host="a", machine="m", pid=1, started="")
HERE = ProcessIdentity.here(replace(LaunchEnv(), rank=1))


@pytest.fixture
def pair():
    """A peer, and the other end of its line."""
    server = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(server.getsockname())
    near, _ = server.accept()
    peer = HeartbeatConnection(near, 100.0, b"key")
    peer.identity = replace(OWN, rank=1)
    peer.preparing = False
    yield peer, far
    for thing in (server, far, near):
        thing.close()


def wait_until(holds, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


# -- the evidence --------------------------------------------------------------------------------


def test_silence_for_longer_than_the_patience_is_a_loss(pair):
    peer, _ = pair
    assert not peer.overdue(105.0, 5.0, "m")
    assert peer.overdue(105.1, 5.0, "m")
    peer.restart_timer(105.0)
    assert not peer.overdue(109.0, 5.0, "m")
    peer.left = True
    assert not peer.overdue(999.0, 5.0, "m")


def test_who_prepares_is_excused_for_ten_times_as_long(pair):
    peer, _ = pair
    peer.take_beat({"preparing": "1"}, 100.0)
    assert not peer.overdue(149.0, 5.0, "m")
    assert peer.overdue(151.0, 5.0, "m")


def test_who_prepares_on_a_machine_that_does_not_answer_is_not_excused(pair, monkeypatch):
    peer, _ = pair
    peer.take_beat({"preparing": "1"}, 100.0)
    monkeypatch.setattr(HeartbeatConnection, "answers", lambda self: False)
    assert peer.overdue(105.1, 5.0, "m")


def test_who_has_not_said_who_it_is_is_not_judged(pair):
    peer, _ = pair
    peer.identity = None
    assert not peer.overdue(999.0, 5.0, "m")


def test_a_process_of_this_machine_that_computes_is_busy(pair, monkeypatch):
    peer, _ = pair
    facts = _facts(os.getpid())
    assert facts[0] == "R"
    states = ["S", "S"]
    monkeypatch.setattr("headway.run.distributed.heartbeat._thread_states", lambda pid: states)
    monkeypatch.setattr(
        "headway.run.distributed.heartbeat._facts", lambda pid: ("S", _facts(pid)[1], facts[2])
    )
    peer.identity = HERE
    assert HERE.machine
    assert not peer.overdue(104.0, 5.0, HERE.machine)  # from here on its seconds are counted
    before = os.times()
    while os.times().user + os.times().system - before.user - before.system < 0.9:
        pass
    assert not peer.overdue(106.0, 5.0, HERE.machine)  # 0.9 s of computing in two
    assert peer.overdue(120.0, 5.0, HERE.machine)  # but not in sixteen
    states[1] = "R"
    assert not peer.overdue(120.0, 5.0, HERE.machine)  # one of its threads waits for a core
    states[1] = "T"
    monkeypatch.setattr(
        "headway.run.distributed.heartbeat._facts", lambda pid: ("T", 0.0, facts[2])
    )
    assert peer.overdue(120.0, 5.0, HERE.machine)  # it is stopped
    assert peer.is_here(HERE.machine)
    peer.identity = replace(HERE, started="0")  # another process of the same number
    assert not peer.is_here(HERE.machine)


def test_who_is_stopped_while_it_prepares_is_not_excused(pair, monkeypatch):
    peer, _ = pair
    peer.identity = HERE
    peer.take_beat({"preparing": "1"}, 100.0)
    monkeypatch.setattr("headway.run.distributed.heartbeat._thread_states", lambda pid: ["T"])
    monkeypatch.setattr(
        "headway.run.distributed.heartbeat._facts", lambda pid: ("T", 0.0, HERE.started)
    )
    assert peer.overdue(105.1, 5.0, HERE.machine)


def test_the_threads_of_a_process_are_looked_at():
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    states = _thread_states(os.getpid())
    over.set()
    assert len(states) >= 2
    assert "R" in states


@pytest.mark.parametrize(
    ("machine", "kind"), [(HERE.machine, "gone"), ("another", "silent")], ids=["this", "another"]
)
def test_a_connection_that_closes_after_a_silence(pair, machine, kind):
    """A kill, where the process would be seen if it were stopped; elsewhere nobody knows."""
    peer, far = pair
    hub = Heartbeat(replace(HERE, rank=0), listener=open_listener(), patience=5.0)
    peer.identity = replace(HERE, machine=machine)
    hub._peers.append(peer)
    hub._selector.register(peer.link, selectors.EVENT_READ, peer)
    far.close()
    hub._hear(peer, peer.heard + 4.5)
    assert hub.loss is not None
    assert hub.loss.kind == kind
    hub._close()


def test_a_process_that_has_ended_is_not_silent_though_its_connection_is_open(pair):
    peer, _ = pair
    hub = Heartbeat(replace(HERE, rank=0), listener=open_listener(), patience=5.0)
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    peer.identity = replace(HERE, pid=child.pid, started=_facts(child.pid)[2])
    hub._peers.append(peer)
    hub._selector.register(peer.link, selectors.EVENT_READ, peer)
    hub._check_silence(peer.heard + 5.5)
    assert hub.loss is not None
    assert hub.loss.kind == "gone"
    assert child.wait() == 0
    hub._close()


def test_who_stood_still_itself_takes_a_closed_connection_for_a_death(monkeypatch):
    """The silence before it is its own."""
    listener = open_listener()
    hub = Heartbeat(OWN, listener=listener, patience=5.0)
    second = other(listener, 1, machine="another")
    hub.start()
    second.start()
    assert wait_until(lambda: len(hub._partners()) == 1)
    select, began = hub._selector.select, time.monotonic()

    def still(seconds):
        """Six seconds pass here, in which rank 1 ends."""
        for sock in (second._peers[0].link, second._wake, second._woken):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        monkeypatch.setattr(time, "monotonic", lambda: began + 6.0 + real() - began)
        monkeypatch.setattr(hub._selector, "select", select)
        return select(seconds)

    real = time.monotonic
    monkeypatch.setattr(hub._selector, "select", still)
    assert hub.lost.wait(5)
    assert hub.loss is not None
    assert hub.loss.kind == "gone"
    second.stop()


def test_a_machine_that_acknowledges_answers(pair):
    peer, far = pair
    far.sendall(b"0" * 32 + b"\n")
    time.sleep(0.05)
    peer.receive(101.0)
    for _ in range(3):
        peer.send()
    time.sleep(0.1)
    assert peer.answers() is True


def test_messages_arrive_whole_in_pieces(pair):
    peer, far = pair
    lines = SignedLines(b"key", calls=True)
    lines.read(far.recv(100))
    whole = lines.write({}) + lines.write({"doing": "d\xe4ta = 1 & 2\n", "seconds": 3})
    far.sendall(lines.greeting + whole[:-20])
    time.sleep(0.05)
    assert peer.receive(101.0) == [{}]
    far.sendall(whole[-20:])
    time.sleep(0.05)
    message = {"doing": "d\xe4ta = 1 & 2\n", "seconds": "3"}
    assert peer.receive(102.0) == [message]
    assert peer.receive(103.0) == []
    assert peer.heard == 102.0
    peer.take_beat(message, 102.0)
    assert peer.doing == (message["doing"], 99.0)
    far.close()
    time.sleep(0.05)
    assert peer.receive(104.0) is None


# -- the signatures -----------------------------------------------------------------------------


def greeted(key=b"key"):
    """Both ends of one connection, which have greeted each other."""
    caller, called = SignedLines(b"key", calls=True), SignedLines(key, calls=False)
    caller.read(called.greeting)
    called.read(caller.greeting)
    return caller, called


def test_a_message_counts_once_in_its_place_on_its_connection_in_its_direction():
    caller, called = greeted()
    first, second = caller.write({"n": 1}), caller.write({"n": 2})
    assert called.read(first)[0] == [{"n": "1"}]
    assert called.read(first + second)[0] == [{"n": "2"}]  # the repetition is skipped
    assert called.read(second.replace(b"n=2", b"n=3"))[0] == []
    assert caller.read(called.write({"n": 4}))[0] == [{"n": "4"}]
    for line, other in ((first, greeted()[1]), (first, greeted()[0]), (second, greeted()[1])):
        with pytest.raises(LineError, match="not signed"):
            other.read(line)


def test_who_has_another_key_is_a_stranger():
    caller, called = greeted(key=b"another")
    with pytest.raises(LineError, match="not signed"):
        called.read(caller.write({"hello": 1}))


def test_a_line_without_an_end_is_not_kept():
    called = SignedLines(b"key", calls=False)
    with pytest.raises(LineError, match="too long"):
        called.read(b"x" * 2000)
    caller, called = greeted()
    called.read(caller.write({}))
    called.read(b"x" * 200_000)  # a rank of this job may say more, but not without end
    with pytest.raises(LineError, match="too long"):
        called.read(b"x" * 100_000)


@pytest.mark.parametrize("text", ["", "-1", "1_0", "\u0663", " 1", "1e3", "9" * 5000])
def test_numbers_are_digits_only(text):
    with pytest.raises(ValueError, match="no number"):
        number(text)


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "", "x" * 10**6])
def test_times_are_finite(text):
    with pytest.raises(ValueError):
        seconds(text)


# -- the thread ----------------------------------------------------------------------------------


def other(listener: HeartbeatListener, rank: int, **facts) -> Heartbeat:
    own = replace(OWN, rank=rank, **facts)
    return Heartbeat(own, hub=connect_heartbeat(listener.notice, own), patience=3.0)


def open_listener() -> HeartbeatListener:
    return HeartbeatListener.open(socket.create_server(("127.0.0.1", 0)), "127.0.0.1")


def test_states_reach_every_rank_and_goodbyes_are_no_losses():
    listener = open_listener()
    said = ("data of step 3", time.monotonic() - 7, False)
    hub = Heartbeat(OWN, listener=listener, patience=3.0)
    slow = Heartbeat(
        replace(OWN, rank=1),
        hub=connect_heartbeat(listener.notice, replace(OWN, rank=1)),
        status=lambda: said,
    )
    third = other(listener, 2)
    for thread in (hub, slow, third):
        thread.start()
    deadline = time.monotonic() + 5
    while third.states().get(1, ("", 0.0))[0] != "data of step 3":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert third.states()[1][1] > 6.9
    assert set(hub.states()) == {0, 1, 2}
    slow.stop()
    hub.stop()
    third.stop()
    assert [thread.loss for thread in (hub, slow, third)] == [None] * 3


def test_a_verdict_reaches_the_others_and_strangers_reach_nobody():
    listener = open_listener()
    hub, third = Heartbeat(OWN, listener=listener), other(listener, 2, host="c")
    failing = other(listener, 1, host="b")
    stranger = socket.create_connection(("127.0.0.1", int(listener.notice.split()[1])))
    stranger.sendall(b'{"failed": "me too"}\n{"token": 5}\n')
    for thread in (hub, third, failing):
        thread.start()
    assert len(stranger.recv(100)) == 33  # a greeting, and no more
    with suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    stranger.close()
    time.sleep(0.3)
    assert hub.loss is None
    failing.stop("ValueError: no")
    for thread in (hub, third):
        assert thread.lost.wait(5)
        assert thread.loss.ranks == (1,)
        assert thread.loss.what == "rank 1 on b failed: ValueError: no"
        assert isinstance(thread.loss.error(), PeerLost)
        thread.stop()


@pytest.mark.parametrize(
    "packet",
    [
        '{"token":"\xe9"}\n'.encode(),
        b"[" * 60_000 + b"\n",
        b"0" * 32 + b"\n" + b'{"hello": {"rank": 1}}\n',
        b"0" * 32 + b"\n" + b"f" * 32 + b" failed=me\n",
        b"\n" * 1000,
        b"\xff\xfe\n",
        b"x" * 10**6,
    ],
    ids=["not ASCII", "nested", "unsigned", "forged", "empty lines", "no text", "no end"],
)
def test_no_packet_ends_the_thread(packet):
    listener = open_listener()
    hub, second = Heartbeat(OWN, listener=listener, patience=3.0), other(listener, 1)
    hub.start()
    second.start()
    place = ("127.0.0.1", int(listener.notice.split()[1]))
    with socket.create_connection(place, timeout=5) as stranger, suppress(OSError):
        stranger.sendall(packet)
        while stranger.recv(100):
            pass
    deadline = time.monotonic() + 5
    while hub.states().keys() != {0, 1} or second.states().keys() != {0, 1}:
        assert time.monotonic() < deadline
    assert hub._thread.is_alive()
    second.stop("ValueError: no")
    assert hub.lost.wait(5)
    assert hub.loss.ranks == (1,)
    hub.stop()


def test_a_stranger_that_says_nothing_is_turned_away_at_last(monkeypatch):
    monkeypatch.setattr("headway.run.distributed.heartbeat._STRANGER_SECONDS", 0.2)
    listener = open_listener()
    hub = Heartbeat(OWN, listener=listener, patience=3.0)
    hub.start()
    place = ("127.0.0.1", int(listener.notice.split()[1]))
    with socket.create_connection(place, timeout=5) as stranger:
        assert len(stranger.recv(100)) == 33
        assert stranger.recv(1) == b""
    hub.stop()
    assert hub.loss is None


@pytest.mark.slow
def test_a_process_that_stood_still_itself_judges_nobody(monkeypatch):
    """As after the suspension of a machine: the beats of the others come when it goes on."""
    listener = open_listener()
    hub, second = Heartbeat(OWN, listener=listener, patience=3.0), other(listener, 1)
    hub.start()
    second.start()
    time.sleep(0.3)
    until: list[float] = []
    beat = Heartbeat._beat

    def still(self, now):
        """Both stand still; rank 0 goes on first."""
        if not until:
            until.append(time.monotonic() + 5.0)
        later = 1.5 * self._own.rank
        time.sleep(max(0.0, until[0] + later - time.monotonic()))
        beat(self, now)

    monkeypatch.setattr(Heartbeat, "_beat", still)
    time.sleep(10.0)
    assert until
    assert (hub.loss, second.loss) == (None, None)
    second.stop()
    hub.stop()


# -- the words -----------------------------------------------------------------------------------


def test_machines_are_named_where_there_are_several():
    ranks = [replace(OWN, rank=n, node=n // 2, host="ab"[n // 2]) for n in range(4)]
    assert machine_naming(ranks[:2]) == ""
    assert machine_naming(ranks) == "host"
    assert machine_naming([replace(r, host="x") for r in ranks]) == "node"
    assert name_rank_machines(ranks[1:], "host") == "rank 1 on a and ranks 2 and 3 on b"
    assert name_rank_machines(ranks[2:], "node") == "ranks 2 and 3 on node 1"
    assert name_rank_machines(ranks[2:], "") == "ranks 2 and 3"


def test_silence_says_what_was_heard_last_and_is_one_ranks_to_tell(pair):
    peer, _ = pair
    peer.doing = ("data of step 3", 90.0)
    loss = silent_ranks([peer], OWN, 106.0, "host")
    assert loss.what == "rank 1 on a has sent no heartbeat for 6 s"
    assert "Last report of rank 1: data of step 3." in loss.why
    assert isinstance(loss.error(), Stalled)
    echo = RankFailure.from_message(loss.to_message())
    assert (echo, echo.reports, loss.reports) == (loss, False, True)
    assert isinstance(echo.error(), PeerLost)
    peer.identity = OWN
    for local_rank, speaks in ((0, True), (1, False)):
        own = replace(OWN, rank=3, node=1, local_rank=local_rank, host="b")
        told = silent_ranks([peer], own, 106.0, "host")
        assert told.what == "rank 0 on a cannot be reached from rank 3 on b"
        assert told.reports is speaks


def test_an_exchange_is_not_begun_once_a_rank_is_lost():
    world = World(place=LaunchEnv(), device="cpu")
    world._watchdog._heartbeat = Heartbeat(OWN)
    world._watchdog._heartbeat.loss = reported_failure(replace(OWN, rank=1), "no", "")
    world.doing("data of step %d", 4)
    with pytest.raises(PeerLost, match="rank 1 failed") as caught, world.explained("x"):
        pytest.fail("began")
    assert caught.value.where == "step 4"
    world._watchdog._heartbeat._close()


def test_too_little_patience_is_refused():
    place = replace(LaunchEnv(), ranks=2)
    with pytest.raises(UsageError, match="a patience of 1 s is too short"):
        World.join(place, patience_seconds=1.0)


def test_doing_is_put_together_only_when_asked():
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("nobody asked")

    line = Watchdog(LaunchEnv())
    assert line.status()[2]
    line.doing("bucket %s", (Costly(),))
    line.doing("bucket %d of step %d", (3, 4))
    assert line.status()[0] == "bucket 3 of step 4"
    assert not line.status()[2]


# -- the sockets ---------------------------------------------------------------------------------


def test_only_connections_of_foreign_code_since_a_moment_are_broken(pair):
    peer, far = pair
    kept = frozenset(open_sockets().values())
    server = socket.create_server(("127.0.0.1", 0))
    python = socket.create_connection(server.getsockname())
    foreign = os.dup(socket.create_connection(server.getsockname()).detach())
    ends = [server.accept()[0] for _ in range(2)]
    assert break_connections(kept) >= 1
    ends[1].settimeout(2)
    assert ends[1].recv(1) == b""
    assert far.recv(100).endswith(b"\n")
    far.sendall(b"0" * 32 + b"\n")
    time.sleep(0.05)
    peer.receive(101.0)
    peer.send()
    assert far.recv(100).endswith(b"\n")
    python.sendall(b"x")
    assert ends[0].recv(1) == b"x"
    for thing in (server, python, *ends):
        thing.close()
    os.close(foreign)
