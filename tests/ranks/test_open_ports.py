"""ranks: a job on one machine listens on its loopback only."""

from __future__ import annotations

import os
import socket

import pytest

from headway.channel.rendezvous import interface_address
from headway.launch.local import launch_local
from support import open_ports_entries as entries
from support.commands import headway_here
from support.open_ports import (
    SocketWatch,
    beyond_the_loopback,
    listening,
    reachable_sockets,
)
from support.sampling import sampled

PRELOAD = ("pytest", "support.open_ports_entries")
STAGES = ("stages=2", "pipeline.microbatches=2")
SPEAKER, SEGMENTER = (f"support.split_recipes:{name}" for name in ("speaker", "segmenter"))
FAMILIES = {
    # Recipe, processes, what is set.
    "data": ("", 2, ()),
    "loaders": ("", 2, ("arguments.workers=2",)),
    "compressed": ("", 2, ("exchange.compress='topk:0.1'",)),
    "priority": ("", 2, ("exchange.priority=true",)),
    "ring": ("", 2, ("exchange.collective='ring'",)),
    "servers": ("", 2, ("exchange.collective='servers'",)),
    "adasum": ("", 2, ("exchange.reduce='adasum'",)),
    "zero 1": ("", 2, ("zero=1",)),
    "zero 3": ("", 2, ("zero=3",)),
    "hybrid shards": ("", 4, ("zero=3", "shards=2")),
    "pipeline": ("", 2, STAGES),
    "pipeline without shared memory": ("", 2, (*STAGES, "pipeline.shared_memory=false")),
    "chimera": ("", 2, (*STAGES, "pipeline.schedule='chimera'")),
    "pipeline x zero 3": ("", 4, (*STAGES, "zero=3")),
    "tensor": (SPEAKER, 2, ("split.tensor=[2]",)),
    "tensor x pipeline": (SPEAKER, 4, (*STAGES, "split.tensor=[2]")),
    "spatial": (SEGMENTER, 2, ("split.spatial=[2]",)),
    "sparse rows": ("support.recipes:sparse", 2, ()),
    "verify": ("", 2, ("verify",)),
}


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


def test_sockets_that_others_reach_are_seen(tmp_path):
    """What the test below rests on."""
    own = os.getpid()
    with (
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as hidden,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        abstract.bind(f"\0headway {own}")
        (tmp_path / "x").mkdir(mode=0o700)
        hidden.bind(str(tmp_path / "x" / "s"))
        datagrams.bind(("", 0))
        found = reachable_sockets(own)
        assert f"unix @headway {own}" in found
        assert f"udp ('0.0.0.0', {datagrams.getsockname()[1]})" in found
        assert not any(str(tmp_path) in name for name in found)


@pytest.mark.parametrize("family", sampled(list(FAMILIES), 1))
def test_nobody_else_reaches_a_socket_of_any_plan(tmp_path, monkeypatch, family):
    """Neither other machines nor other users, as long as the run lasts; also where the shell names
    the interface for runs of several machines."""
    others = [name for _, name in socket.if_nameindex() if interface_address(name)]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[-1])
    recipe, processes, settings = FAMILIES[family]
    recipe, words = recipe or "support.recipes:trapped", [f"stop={8}", *settings]
    command = ["train", recipe, "--device", "cpu"]
    if "verify" in words:
        command, words = ["verify", recipe], []
    sets = [word for setting in words for word in ("--set", setting)]
    # On a busy machine the watch may not get to look while a short run listens.
    for _ in range(3):
        with SocketWatch() as watch:
            done = headway_here(*command, "-n", str(processes), *sets, cwd=tmp_path)
        assert done.code == 0, done.err
        assert watch.reachable == set()
        if watch.watched:
            break
    else:
        pytest.fail("nothing was seen to listen: the watch is wrong")
