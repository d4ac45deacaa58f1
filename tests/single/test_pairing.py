"""single: how the two ends of a channel find each other among strangers."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from headway.channel import pairing
from headway.channel.rendezvous import StoreRendezvous
from support.open_ports import listening
from support.patience import patient

SECONDS = patient(20)
TOKEN = b"t" * 32


def rendezvous(seconds=SECONDS):
    store = dist.HashStore()
    return [StoreRendezvous(store, rank, 1 - rank, seconds) for rank in (0, 1)]


def paired(ends, *, address=None):
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(pairing.pair, end, address) for end in ends]
        return [each.result() for each in both]


def talk(near, far):
    near.settimeout(SECONDS)
    far.setblocking(True)
    with near, far:
        far.sendall(b"x")
        assert near.recv(1) == b"x"


@pytest.mark.parametrize("given", ["nothing", "interface", "address"])
def test_only_the_way_to_the_other_end_is_open(monkeypatch, given):
    """Two machines, as far as they know."""
    monkeypatch.setattr(pairing, "namespace_identity", lambda kind: "")
    monkeypatch.setattr(pairing, "own_addresses", lambda: ["127.0.0.3"])
    monkeypatch.setattr(pairing, "named_interfaces", lambda: ["x"] * (given == "interface"))
    monkeypatch.setattr(pairing, "route_ends", lambda addresses: ["127.0.0.2"])
    seen, accept = set(), pairing.accept

    def observed(servers, *arguments):
        seen.update(server.getsockname() for server in servers)
        assert seen <= listening([os.getpid()])
        return accept(servers, *arguments)

    monkeypatch.setattr(pairing, "accept", observed)
    talk(*paired(rendezvous(), address="127.0.0.4" if given == "address" else None))
    found = {"nothing": {"127.0.0.2"}, "interface": {"127.0.0.3"}}
    assert {at for at, _ in seen} == found.get(given, {"127.0.0.2", "127.0.0.4"})


def test_ends_of_routes_are_addresses_of_this_machine():
    own = [a for a in pairing.own_addresses() if ":" not in a]
    found = pairing.route_ends([*own, "192.0.2.200", "127.0.0.1", "no such host"])
    assert set(found) <= set(own), "own addresses and the loopback are no way to another machine"


def test_strangers_at_the_places_of_the_other_end():
    """One is silent, one answers with what it hears, one hangs up, one is not there."""
    near, far = rendezvous()
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        gone = socket.create_server(("127.0.0.1", 0))
        places = [one.getsockname() for one in (gone, *strangers, server)]
        gone.close()

        def answer():
            echo = stack.enter_context(strangers[0].accept()[0])
            echo.sendall(echo.recv(32))
            strangers[1].accept()[0].close()
            # What a stranger has heard is worth nothing at the place of the listener.
            heard = stack.enter_context(strangers[2].accept()[0]).recv(32)
            thief = stack.enter_context(socket.create_connection(places[-1]))
            thief.sendall(heard)

        def accept():
            return list(pairing.accept([server], places[-1:], TOKEN, near, threading.Event()))

        with ThreadPoolExecutor(2) as pool:
            pool.submit(answer)
            caller = pool.submit(pairing.call, places, TOKEN, far)
            (accepted,) = accept()
            link, why = caller.result()
        assert (why, accepted.getpeername()) == ("", link.getsockname())
        talk(accepted, link)


def test_a_proof_for_another_place_or_pair_is_refused():
    near, _ = rendezvous(1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        wrong = [
            pairing.proof(TOKEN, 0, 1, ("127.0.0.1", place[1] + 1)),
            pairing.proof(TOKEN, 1, 0, place),
            pairing.proof(b"u" * 32, 0, 1, place),
        ]
        callers = [socket.create_connection(place) for _ in wrong]
        for caller, said in zip(callers, wrong, strict=True):
            caller.sendall(said)
        assert list(pairing.accept([server], [place], TOKEN, near, threading.Event())) == []
        assert [caller.recv(1) for caller in callers] == [b""] * 3
        for caller in callers:
            caller.close()


def test_nobody_answers():
    """The listener is told, and does not wait for its own time-out."""
    ends = rendezvous(300.0)
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing, "_answer", lambda token, said: os.urandom(32))
        both = [pool.submit(pairing.pair, end, None) for end in ends]
        for each in both:
            with pytest.raises(Exception, match="no connection between rank"):
                each.result()
    assert time.monotonic() - begun < patient(20)
