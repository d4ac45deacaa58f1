"""single: what is signed with a job's secret, and at which address a rank listens."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import torch.distributed as dist

from headway.channel.job_secret import SECRET, job_secret, seal, sign, unseal
from headway.errors import RunError, UsageError
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.rendezvous import _read, _write, listen

SEVERAL = replace(LaunchEnv(), ranks=4, local_ranks=2, master_address="127.0.0.1")


def test_a_text_counts_for_its_secret_and_its_place_only():
    sealed = seal("10.0.0.1 4711 \u00e9", b"secret", "the address of rank 0")
    assert unseal(sealed.encode(), b"secret", "the address of rank 0") == "10.0.0.1 4711 \u00e9"
    for other, context in (
        (sealed, "the address of rank 1"),
        (sealed.replace("4711", "4712"), "the address of rank 0"),
        ("", "the address of rank 0"),
        ("10.0.0.1 4711", "the address of rank 0"),
    ):
        with pytest.raises(RunError, match=r"not signed with the secret of this job"):
            unseal(other, b"secret", context)
    with pytest.raises(RunError, match="HEADWAY_SECRET"):
        unseal(sealed, b"another", "the address of rank 0")


def test_parts_cannot_be_moved_from_one_to_the_next():
    assert sign(b"", "ab", "c") != sign(b"", "a", "bc")


def test_a_secret_that_can_be_guessed_is_refused():
    assert job_secret({}) == b""
    assert job_secret({SECRET: "0123456789abcdef"}) == b"0123456789abcdef"
    with pytest.raises(UsageError, match="is too short"):
        job_secret({SECRET: "hunter2"})


def test_ranks_of_other_secrets_do_not_believe_each_other(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv(SECRET, "a" * 32)
    _write(store, "headway/verdict", "all are here")
    assert _read(store, "headway/verdict") == "all are here"
    assert _read(store, "headway/attempt/1") is None
    monkeypatch.setenv(SECRET, "b" * 32)
    with pytest.raises(RunError, match="not signed with the secret of this job"):
        _read(store, "headway/verdict")


@pytest.mark.parametrize(
    ("place", "host", "bound", "told"),
    [
        (replace(LaunchEnv(), ranks=2, local_ranks=2), "", "127.0.0.1", "127.0.0.1"),
        (replace(SEVERAL, interface="lo"), "", "127.0.0.1", "127.0.0.1"),
        (SEVERAL, "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        (SEVERAL, "192.0.2.1", "everywhere", "192.0.2.1"),  # a router's, of nobody's network
        (SEVERAL, "no-such-host.invalid", "everywhere", "no-such-host.invalid"),
    ],
)
def test_a_rank_listens_where_it_is_reached_and_nowhere_else(place, host, bound, told):
    server, address = listen(place, host=host)
    with server:
        assert address == told
        found = server.getsockname()[0]
        assert (found in ("::", "0.0.0.0")) if bound == "everywhere" else (found == bound)


def test_a_port_that_is_taken_is_said():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        listen(SEVERAL, taken.getsockname()[1], "127.0.0.1")
