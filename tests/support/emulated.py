"""Tests on emulated nodes: `run_nodes` is `run_ranks` with every rank in its node's namespace.

    @needs_root
    def test_bytes():
        done = run_nodes(Cluster.of(2, 1, rate="100 Mbit/s"), body)
        assert done.sent["a"] < 1_000_000

The default gloo group is made anew over the links. Bytes are those of the nodes' interfaces while
the body ran, with the headers of all packets.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from headway.cluster import Cluster
from headway.errors import UsageError
from headway.launch.emulation import EmulatedCluster, Emulation, check_possible
from support.interface_bytes import interface_bytes
from support.ranks import World, _find, _load, run_ranks


def _reason() -> str:
    """Why nodes cannot be emulated here; empty if they can."""
    if sys.platform != "linux":
        return "emulated nodes need Linux"
    try:
        check_possible(Cluster.of(1))
    except UsageError as error:
        return str(error)
    return ""


needs_root = pytest.mark.skipif(bool(_reason()), reason=_reason() or "root is there")
"""Mark of a test that emulates nodes."""


@dataclass(frozen=True, kw_only=True)
class NodeWorld(World):
    """What a rank on an emulated node knows.

    Attributes:
        node: The name of its node.
        local_rank: Its number on the node.
        emulated: The cluster: links can be changed and cut, counters read.
    """

    node: str
    local_rank: int
    emulated: EmulatedCluster


class NodeResults(list[Any]):
    """What the body returned, by rank; bytes sent and received by each node's interface."""

    def __init__(self, values: list[Any], sent: dict[str, int], received: dict[str, int]) -> None:
        super().__init__(values)
        self.sent = sent
        self.received = received


def run_nodes(
    cluster: Cluster | EmulatedCluster,
    body: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60,
    mortal: tuple[int, ...] = (),
    **named: Any,
) -> NodeResults:
    """Run `body(world, *arguments, **named)` on every rank of a cluster; see `run_ranks`.

    Args:
        cluster: What to emulate for this call, or a cluster that exists already.
        body: A function at the top level of its module; gets a `NodeWorld`.
        arguments: Passed by value.
        timeout: Seconds, once the processes have been started.
        mortal: Ranks that may be killed by a signal; they return None.
        named: As `arguments`.
    """
    __tracebackhide__ = True
    with ExitStack() as stack:
        if isinstance(cluster, EmulatedCluster):
            emulated = cluster
        else:
            emulated = stack.enter_context(Emulation(cluster))
        place = (body.__module__, inspect.getfile(inspect.unwrap(body)), body.__qualname__)
        found = run_ranks(
            emulated.cluster.ranks, _on_node, emulated, place, arguments, named,
            timeout=timeout, mortal=mortal,
        )  # fmt: skip
    values, sent, received = [], {}, {}
    for rank, result in enumerate(found):
        value, (out, into) = (None, (0, 0)) if result is None else result
        name = emulated.cluster.nodes_of_ranks[rank]
        values.append(value)
        sent[name] = max(out, sent.get(name, 0))
        received[name] = max(into, received.get(name, 0))
    return NodeResults(values, sent, received)


def _on_node(
    world: World,
    emulated: EmulatedCluster,
    place: tuple[str, str, str],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[Any, tuple[int, int]]:
    """The body of a rank: leave the group of the loopback, move to the node, meet there."""
    import torch.distributed as dist

    dist.destroy_process_group()
    name = emulated.cluster.nodes_of_ranks[world.rank]
    emulated.enter(name)
    os.environ["GLOO_SOCKET_IFNAME"] = emulated.interface
    dist.init_process_group(
        "gloo",
        init_method=f"file://{world.directory.parent / 'rendezvous-of-nodes'}",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=600),
    )
    assert dist.group.WORLD is not None
    there = NodeWorld(
        rank=world.rank,
        size=world.size,
        group=dist.group.WORLD,
        directory=world.directory,
        node=name,
        local_rank=emulated.cluster.ranks_of(name).index(world.rank),
        emulated=emulated,
    )
    dist.barrier()
    before = interface_bytes()
    value = _find(_load(place[0], place[1]), place[2])(there, *arguments, **named)
    if dist.is_initialized():
        dist.barrier()
    after = interface_bytes()
    return value, (after[0] - before[0], after[1] - before[1])
