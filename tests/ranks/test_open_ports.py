"""ranks: a job on one machine listens on its loopback only."""

from __future__ import annotations

import os
import socket

import pytest

from headway.launch.local import launch_local
from support import open_ports_entries as entries
from support.open_ports import beyond_the_loopback, listening

PRELOAD = ("pytest", "support.open_ports_entries")


def test_a_listing_shows_what_listens_and_where():
    """What the other tests rest on."""
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as everywhere,
        socket.create_server(("127.0.0.1", 0)) as inside,
    ):
        found = listening([os.getpid()])
        wide, local = everywhere.getsockname()[1], inside.getsockname()[1]
    assert {("::", wide), ("127.0.0.1", local)} <= found
    assert ("::", wide) in beyond_the_loopback(found)
    assert ("127.0.0.1", local) not in beyond_the_loopback(found)


@pytest.mark.parametrize("backend", ["gloo", "headway"])
def test_a_job_on_one_machine_listens_on_the_loopback_only(backend):
    """The launcher and all ranks, while they exchange: IPv4 and IPv6.

    Gloo's sockets accept nothing more: a thousand callers would make Gloo abort.
    """
    results = launch_local(
        entries.ports, (os.getpid(), backend), processes=2, preload=PRELOAD
    ).results
    seen = [found for found, _ in results]
    assert any(seen), "nothing listens: the listing is wrong"
    assert [beyond_the_loopback(found) for found in seen] == [set(), set()]
    # The heartbeat of rank 0, which asks for the secret.
    assert [len(heard) for _, heard in results] == [1, 0]
