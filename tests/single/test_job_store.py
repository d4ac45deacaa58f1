"""single: the store of a job of several machines, and what strangers can do to it: nothing."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from headway.channel.job_secret import SECRET
from headway.channel.rendezvous import connection_to_drop
from headway.errors import RunError, Stalled
from headway.run.distributed import rendezvous
from headway.run.distributed.heartbeat_message import MOST_BYTES_OF_STRANGERS, decode, encode
from headway.run.distributed.job_store import JobStore, KeyTable, call_job_store, host_job_store
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.rendezvous import join_rendezvous
from support.fuzzing import TOKENS, batches, fuzz
from support.patience import patient
from support.ports import free_port

SET = {"do": "set", "key": "groups/0", "value": "00ff"}


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv(SECRET, "a" * 32)


def hosted() -> tuple[JobStore, tuple[str, int]]:
    """The store at rank 0, and its address; no fixture, whose value would outlive the test."""
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    place = server.getsockname()
    return host_job_store(server, 5.0), place


def battery(store: dist.Store) -> list[object]:
    """What torch and headway ask of a store."""
    store.set("a", b"\x00\xff=&")
    found: list[object] = [store.get("a"), store.check(["a"]), store.check(["a", "b"])]
    found += [store.add("n", 5), store.add("n", -2), store.get("n"), store.add("n", 0)]
    found += [store.compare_set("c", "", "1"), store.compare_set("c", "0", "2")]
    found += [store.compare_set("c", "1", "3"), store.get("c")]
    store.append("t", "one")
    store.append("t", "two")
    store.multi_set(["x", "y"], ["1", "2"])
    found += [store.get("t"), store.multi_get(["x", "y"]), store.has_extended_api()]
    found += [store.num_keys() > 4, store.delete_key("x"), store.delete_key("x")]
    store.wait(["y"])
    store.wait(["y"], timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.wait(["never"], timedelta(milliseconds=20))
    return found


@pytest.mark.parametrize("wrap", [lambda store: store, lambda s: dist.PrefixStore("groups", s)])
def test_it_does_what_torchs_stores_do(wrap):
    """Also where torch's own code asks, as it does behind a prefix."""
    at_rank_0, (host, port) = hosted()
    at_rank_1 = call_job_store(host, port, 5.0)
    assert isinstance(at_rank_1, JobStore)
    expected = battery(dist.HashStore())
    assert battery(wrap(at_rank_0)) == expected
    for key in ("a", "n", "c", "t", "x", "y"):
        wrap(at_rank_1).delete_key(key)
    assert battery(wrap(at_rank_1)) == expected
    assert wrap(at_rank_0).get("t") == b"onetwo"


def test_a_rank_waits_for_what_another_will_write():
    at_rank_0, (host, port) = hosted()
    at_rank_1 = call_job_store(host, port, 5.0)
    threading.Timer(0.05, at_rank_0.set, ("late", "1")).start()
    assert at_rank_1.get("late") == b"1"


def test_another_secret_is_said_and_gets_nothing(monkeypatch):
    at_rank_0, (host, port) = hosted()
    monkeypatch.setenv(SECRET, "b" * 32)
    with pytest.raises(RunError, match="has another secret"):
        call_job_store(host, port, 5.0)
    assert at_rank_0.num_keys() == 0


def test_a_store_that_nobody_holds_ends():
    store, (host, port) = hosted()
    other = call_job_store(host, port, 5.0)
    del store
    deadline = time.monotonic() + patient(5)
    while any(thread.name == "headway-store" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(dist.DistNetworkError):
        other.check(["a"])
    assert call_job_store(host, port, 5.0) is None


def of_torch(command: int, key: bytes, value: bytes = b"") -> bytes:
    """As a client of a TCPStore speaks, which puts a stroke before all keys."""
    key = b"/" + key
    text = struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BQ", command, len(key)) + key
    return text + struct.pack("<Q", len(value)) + value


def stranger_texts() -> list[bytes]:
    nonce = b"0" * 32 + b"\n"
    line = b"f" * 32 + b" " + encode(SET) + b"\n"
    texts = [of_torch(n, b"groups/0//cpu//0/0", b"x") for n in range(12)]
    return [*texts, nonce, nonce + line, line, nonce * 3, b"x" * (MOST_BYTES_OF_STRANGERS + 1)]


@pytest.mark.parametrize("cases", batches(), ids=str)
def test_fuzz_the_port_of_the_store(cases):
    """A rank is answered while strangers say anything, and others say nothing and stay."""
    at_rank_0, place = hosted()
    at_rank_1 = call_job_store(*place, 5.0)
    at_rank_1.set("a", "1")
    texts, kept = stranger_texts(), []

    def make(rng: random.Random, _: object) -> bytes:
        parts = [rng.choice(texts), rng.choice(TOKENS), rng.randbytes(rng.randrange(80))]
        return b"".join(rng.choices(parts, k=rng.choice((1, 1, 3))))

    def read(text: bytes) -> None:
        stranger = socket.create_connection(place, 5)
        with suppress(OSError):
            stranger.sendall(text)
        kept.append(stranger)
        if len(kept) > 400:
            kept.pop(0).close()

    fuzz("store port", cases, [b""], read, make=make)
    assert at_rank_1.get("a") == at_rank_0.get("a") == b"1"
    assert at_rank_1.num_keys() == 1
    late = call_job_store(*place, 5.0)
    assert late is not None
    assert late.get("a") == b"1"
    for stranger in kept:
        stranger.close()


@pytest.mark.parametrize("cases", batches(), ids=str)
def test_fuzz_requests(cases):
    """As from a rank of the job: what is signed, but makes no sense."""
    table = KeyTable()

    def read(text: bytes) -> None:
        table.answer(decode(text))

    texts = [encode(SET), encode({**SET, "do": "compare", "expected": ""}),
             encode({"do": "add", "key": "n", "sign": "-", "amount": 3}),
             encode({"do": "get", "key": "groups/0"}), encode({"do": "size", "key": ""}),
             encode({"do": "delete", "key": "n"})]  # fmt: skip
    fuzz("store request", cases, texts, read, legal=(ValueError, KeyError))


def test_ranks_meet_while_a_stranger_rewrites_every_key():
    """Without a launcher's agent: rank 0 opens the store at the agreed address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    places = [
        replace(LaunchEnv(), rank=rank, ranks=2, node_rank=rank, launcher="environment",
                master_port=address[1])
        for rank in (0, 1)
    ]  # fmt: skip
    keys = (b"headway/verdict", b"headway/attempt/1", b"headway/arrived/1")
    over, said = threading.Event(), []

    def attack() -> None:
        while not over.is_set():
            for key in keys:
                for command in range(12):
                    with (
                        suppress(OSError),
                        socket.create_connection(address, 1) as link,
                    ):
                        link.sendall(of_torch(command, key, b"x"))
                        said.append(command)

    with ThreadPoolExecutor(3) as pool:
        attacked = pool.submit(attack)
        try:
            met = [pool.submit(join_rendezvous, places[0], patient(10), "hello")]
            deadline = time.monotonic() + patient(10)
            while len(said) < 36 and time.monotonic() < deadline:
                time.sleep(0.01)
            met.append(pool.submit(join_rendezvous, places[1], patient(10), ""))
            results = [each.result() for each in met]
        finally:
            over.set()
        attacked.result()
    assert len(said) >= 36
    assert [result.notice for result in results] == ["hello", "hello"]


def test_of_too_many_callers_one_of_the_most_frequent_address_is_turned_away():
    assert connection_to_drop("abcde", ["1", "2", "2", "3", "2"]) == "b"
    assert connection_to_drop("abc", ["1", "2", "3"]) == "a"


def test_a_rank_whose_agent_has_ended_does_not_wait_for_it(monkeypatch):
    """torchrun was killed while it started its workers: its store does not come back."""
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.2)
    place = LaunchEnv(
        rank=1, ranks=2, local_ranks=2, launcher="torchrun", agent_store=True,
        master_port=free_port(),
    )  # fmt: skip
    begun = time.monotonic()
    with pytest.raises(Stalled, match="nobody answers at"):
        join_rendezvous(place, patient(60))
    assert time.monotonic() - begun < patient(10)


def test_the_store_of_an_old_world_may_close_at_any_request(monkeypatch):
    """Rank 0 ends its world while rank 1, already in the next, has reached its store."""
    place = LaunchEnv(ranks=2, launcher="environment", master_port=free_port())

    def dying(requests: int) -> JobStore:
        table, left = KeyTable(), iter(range(requests))

        def ask(request):
            if next(left, None) is None:
                raise dist.DistNetworkError("the store of rank 0 has closed the connection")
            return table.answer(request)

        return JobStore(ask, 5.0)

    old = map(dying, range(4))
    reached = rendezvous.call_job_store
    monkeypatch.setattr(rendezvous, "call_job_store", lambda *at: next(old, None) or reached(*at))
    with ThreadPoolExecutor(2) as pool:
        places = [place, replace(place, rank=1, node_rank=1)]
        met = [pool.submit(join_rendezvous, each, patient(10), "hello") for each in places]
        assert [each.result().notice for each in met] == ["hello", "hello"]
    assert next(old, None) is None
