"""emulated: rates, counters and cuts of emulated links, and that nothing of them stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.cluster import Cluster, Link, Node, Pair
from headway.errors import UsageError
from headway.launch.emulation import Emulation, check_possible, emulation_limits
from headway.launch.namespaces import (
    NETNS_FOLDER,
    command_json,
    enter_namespace,
    run_batch,
    tags_in_use,
)
from support.commands import environment
from support.emulated import needs_root, run_nodes
from support.interface_bytes import interface_bytes

pytestmark = needs_root

MIB = 2**20
MBIT = 125_000.0
SLOWED = 0.2
"""The least share of its rate that a link must show: a machine that is busy with other things
shapes more slowly (0.64 was seen), but a mistaken unit would be off by 8. What a quiet machine
reaches is in docs/emulation.md; that a link is never too fast holds on every machine."""


def own_remains(pid: int) -> list[str]:
    """Namespaces and links that carry a process id."""
    names = [path.name for path in NETNS_FOLDER.glob(f"headway-{pid}-*")]
    return names + [
        link["ifname"] for link in command_json("ip", "link") if f"hw{pid}." in link["ifname"]
    ]


def transfer(world, num_bytes, sender=0, receiver=1):
    """Seconds of a message, until its receiver's answer is back."""
    import torch
    import torch.distributed as dist

    payload, short = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(1)
    start = time.monotonic()
    if world.rank == sender:
        dist.send(payload, receiver)
        dist.recv(short, receiver)
    elif world.rank == receiver:
        dist.recv(payload, sender)
        dist.send(short, sender)
    return time.monotonic() - start


@pytest.mark.parametrize("rate", ["100 Mbit/s", "1 Gbit/s"])
def test_a_link_has_its_rate(rate):
    """With MTU-sized packets 0.957 is what the headers leave; the burst adds up to 0.04."""
    cluster = Cluster.of(2, rate=rate)
    done = run_nodes(cluster, transfer, 25 * MIB)
    goodput = 25 * MIB / done[0] / cluster.between.rate
    print(f"{rate}: goodput {goodput:.3f} of it")
    assert SLOWED <= goodput <= 1.01
    assert 25 * MIB <= done.sent["a"] <= 26.5 * MIB
    assert done.sent["b"] < MIB
    assert done.received["b"] == pytest.approx(done.sent["a"], rel=0.01)


def inside_and_between(world):
    """Ranks 0 and 1 share a node; the seconds of 40 MiB inside and 1 MiB between."""
    import torch.distributed as dist

    inside = transfer(world, 40 * MIB, 0, 1)
    dist.barrier()
    before = interface_bytes()
    again = transfer(world, 40 * MIB, 0, 1)
    after = interface_bytes()
    dist.barrier()
    between = transfer(world, MIB, 1, 2)
    return min(inside, again), between, sum(after) - sum(before)


def test_ranks_of_a_node_talk_past_its_interface():
    done = run_nodes(Cluster.of(2, 2, rate="50 Mbit/s"), inside_and_between)
    inside, _, through_interface = done[0]
    assert inside < 40 * MIB / (50 * MBIT) / 2  # 6.7 s over the link
    assert through_interface < 50_000
    assert MIB <= done.sent["a"] < 1.3 * MIB
    between = done[1][1]
    assert between > 0.8 * MIB / (50 * MBIT)


def pairs(world):
    """Seconds of 2 MiB from a to b, then from a to c."""
    import torch.distributed as dist

    first = transfer(world, 2 * MIB, 0, 1)
    dist.barrier()
    return first, transfer(world, 2 * MIB, 0, 2)


def test_every_pair_has_its_rate():
    slow = Pair(nodes=("a", "b"), rate=20 * MBIT)
    nodes = tuple(Node(name=name) for name in "abc")
    between = Link.of("200 Mbit/s")
    cluster = Cluster(nodes=nodes, between=between, links=(slow,))
    done = run_nodes(cluster, pairs)
    assert SLOWED <= 2 * MIB / done[0][0] / (20 * MBIT) <= 1.02
    assert SLOWED <= 2 * MIB / done[0][1] / between.rate <= 1.2


def incast(world):
    """Both others send 3 MiB to rank 0 at once; the seconds until it has all."""
    import torch
    import torch.distributed as dist

    parts = [torch.zeros(3 * MIB, dtype=torch.uint8) for _ in range(2)]
    start = time.monotonic()
    if world.rank == 0:
        for work in [dist.irecv(parts[i], i + 1) for i in range(2)]:
            work.wait()
    else:
        dist.send(parts[0], 0)
    return time.monotonic() - start


def test_several_senders_do_not_exceed_the_receivers_interface():
    cluster = Cluster.of(3, rate="50 Mbit/s")
    seconds = run_nodes(cluster, incast)[0]
    goodput = 6 * MIB / seconds / (50 * MBIT)
    assert SLOWED <= goodput <= 1.01


def change(world):
    """Rates in bytes per second: as made, ten times slower, back again."""
    import torch.distributed as dist

    found = []
    for rate in (None, 10 * MBIT, 100 * MBIT):
        if rate is not None and world.rank == 0:
            world.emulated.set_link("a", "b", rate)
        dist.barrier()
        found.append(MIB / transfer(world, MIB))
    return found


def test_a_link_changes_while_it_is_used():
    made, slow, back = run_nodes(Cluster.of(2, rate="100 Mbit/s"), change)[0]
    assert SLOWED * 10 * MBIT <= slow <= 1.05 * 10 * MBIT
    assert made > 1.5 * 10 * MBIT
    assert back > 1.5 * 10 * MBIT


def broken(world):
    """A message over a link that is cut half-way through it, and mended a second later."""
    import threading

    import torch.distributed as dist

    dist.barrier()
    if world.rank == 0:
        cut = threading.Timer(0.15, world.emulated.cut, ("a", "b"))
        mend = threading.Timer(1.15, world.emulated.set_link, ("a", "b", 100 * MBIT))
        cut.start()
        mend.start()
    seconds = transfer(world, 4 * MIB)
    if world.rank == 0:
        cut.join()
        mend.join()
    return seconds


def test_a_cut_link_carries_nothing_until_it_is_mended():
    seconds = run_nodes(Cluster.of(2, rate="100 Mbit/s"), broken)[0]
    assert seconds > 1.1
    assert seconds < 20


def test_counters_from_outside():
    with Emulation(Cluster.of(2, rate="100 Mbit/s")) as emulated:
        before = {node.name: emulated.counters(node.name) for node in emulated.nodes}
        done = run_nodes(emulated, transfer, MIB)
        after = {node.name: emulated.counters(node.name) for node in emulated.nodes}
        assert after["a"] == emulated.counters("a")
        sent = after["a"][0] - before["a"][0]
        assert done.sent["a"] <= sent <= done.sent["a"] + 50_000
        assert emulated.node("b").address != emulated.node("a").address


# ---- nothing stays behind ---------------------------------------------------------------------


def test_nothing_is_left_after_the_exit_and_after_an_error():
    with Emulation(Cluster.of(3, rate="1 Gbit/s")) as first:
        with Emulation(Cluster.of(2)) as second:
            assert second.host != first.host
            assert len(own_remains(os.getpid())) == 4 + 1 + 3 + 1
        assert len(own_remains(os.getpid())) == 4 + 1
    assert own_remains(os.getpid()) == []
    with pytest.raises(ZeroDivisionError), Emulation(Cluster.of(2)):
        raise ZeroDivisionError
    assert own_remains(os.getpid()) == []


HOLD = """
import sys, time
from headway.cluster import Cluster
from headway.launch.emulation import Emulation
with Emulation(Cluster.of(2, rate="1 Gbit/s")) as emulated:
    print(emulated.hub, flush=True)
    time.sleep(60)
"""


def holder():
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"headway-{process.pid}-")
    return process


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid, seconds=5.0):
    deadline = time.monotonic() + seconds
    while own_remains(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_killed_launcher_leaves_nothing():
    process = holder()
    guard = children(process.pid)
    process.kill()
    process.communicate()
    assert gone(process.pid)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in guard):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_next_start_removes_what_a_launcher_left_that_was_killed_with_its_guard():
    process = holder()
    for pid in [*children(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert len(own_remains(process.pid)) == 4
    with Emulation(Cluster.of(1)):
        assert own_remains(process.pid) == []


def test_a_living_launcher_is_left_alone():
    process = holder()
    try:
        with Emulation(Cluster.of(1)):
            pass
        assert len(own_remains(process.pid)) == 4
    finally:
        process.terminate()
        process.communicate()
    assert gone(process.pid)


def test_without_its_guard_the_exit_still_removes_everything():
    with Emulation(Cluster.of(1)):
        own = {tag for tag in tags_in_use() if tag.pid == os.getpid()}
        guards = [pid for pid in children(os.getpid()) if _is_guard(pid)]
        for pid in guards:
            os.kill(pid, signal.SIGKILL)
        assert (len(own), len(guards)) == (1, 1)
    assert own_remains(os.getpid()) == []


def _is_guard(pid):
    return b"netns del" in Path(f"/proc/{pid}/cmdline").read_bytes()


# ---- errors and warnings ----------------------------------------------------------------------


def test_what_is_not_emulated_is_a_warning():
    cluster = Cluster.of(2, rate="1 Gbit/s", latency="2 ms")
    with pytest.warns(UserWarning, match="up to 2 ms, is not emulated"), Emulation(cluster):
        pass
    inside = Cluster(nodes=cluster.nodes, inside=Link.of("20 GB/s"))
    assert "not at 160 Gbit/s" in next(iter(emulation_limits(inside)))
    assert list(emulation_limits(Cluster.of(2, rate="1 Gbit/s"))) == []


def test_a_command_that_fails_is_named():
    with pytest.raises(UsageError) as caught:
        run_batch("ip", ["link show lo", "link add bad type nonsense"])
    assert caught.value.where == "ip link add bad type nonsense"
    assert "Unknown device type" in caught.value.why
    with pytest.raises(UsageError, match="cannot be read"):
        command_json("ip", "link", "show", "absent0")
    with pytest.raises(UsageError, match="cannot enter the namespace"):
        enter_namespace("headway-absent")
    with pytest.raises(UsageError, match="no interface absent0"):
        interface_bytes("absent0")


def test_missing_tools_and_too_many_nodes(monkeypatch):
    with pytest.raises(UsageError, match="241 nodes are too many"):
        check_possible(Cluster.of(241))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="the command ip and tc is missing") as caught:
        check_possible(Cluster.of(2))
    assert "iproute2" in caught.value.fix


def test_a_half_made_cluster_is_removed(monkeypatch):
    """The last interface cannot be made."""
    made = Emulation(Cluster.of(2, rate="1 Gbit/s"))
    monkeypatch.setattr("headway.launch.emulation.INTERFACE", "a-name-much-too-long")
    with pytest.raises(UsageError, match="could not be made or changed"):
        made.__enter__()
    assert own_remains(os.getpid()) == []
