"""ranks: what methods hand to the network is the figure that the plan states, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from headway.collective.compression import parse_compression
from headway.collective.model.bucket_cost import bucket_traffic
from headway.collective.nodes import Nodes
from headway.comm.algorithms.adasum import Adasum
from headway.comm.algorithms.hierarchical import HierarchicalAllReduce
from headway.comm.algorithms.method import (
    AllReduce,
    FusedBuffer,
    GradientSlice,
    complete,
)
from headway.comm.compress.factory import make_method
from headway.comm.compress.sparsification import HierarchicalTopK
from headway.comm.lanes.routes import make_route
from support.ranks import ranks

SHAPES = ((40, 64), (33,), (3, 16, 30), (7,))


class Counter:
    """Stands between headway and torch.distributed, and keeps what this rank sends to whom."""

    def __init__(self, monkeypatch) -> None:
        self.sent: dict[tuple[int, int], float] = {}
        names = ["all_to_all_single", "isend"]
        gather = "all_gather_single" if hasattr(dist, "all_gather_single") else None
        names.append(gather or "all_gather_into_tensor")
        for name in names:
            real, count = getattr(dist, name), getattr(self, name.removesuffix("_into_tensor"))
            monkeypatch.setattr(dist, name, self.counted(real, count))
        real = dist.ProcessGroup.allreduce
        monkeypatch.setattr(dist.ProcessGroup, "allreduce", self.counted(real, self.all_reduce))

    @staticmethod
    def counted(real, count):
        def call(*arguments, **named):
            count(*arguments, **named)
            return real(*arguments, **named)

        return call

    def add(self, to: int, size: float) -> None:
        if size:
            pair = (dist.get_rank(), to)
            self.sent[pair] = self.sent.get(pair, 0.0) + size

    @staticmethod
    def right(group) -> tuple[int, int]:
        """The neighbour in Gloo's ring, and the size of the group."""
        members = dist.get_process_group_ranks(group)
        place = members.index(dist.get_rank())
        return members[(place + 1) % len(members)], len(members)

    def all_reduce(self, group, tensors, *_) -> None:
        to, n = self.right(group)
        self.add(to, sum(2 * (n - 1) / n * tensor.nbytes for tensor in tensors))

    def all_gather(self, rows, payload, group=None, **_) -> None:
        to, n = self.right(group or dist.group.WORLD)
        self.add(to, (n - 1) * payload.nbytes)

    all_gather_single = all_gather

    def all_to_all_single(self, rows, payloads, group=None, **_) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        for to in members:
            if to != dist.get_rank():
                self.add(to, payloads.nbytes / len(members))

    def isend(self, tensor, group=None, group_dst=None, **_) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.add(members[group_dst], tensor.nbytes)


def fused_of(shapes):
    pieces, start = [], 0
    for number, shape in enumerate(shapes):
        stop = start + math.prod(shape)
        pieces.append(GradientSlice(f"p{number}", start, stop, shape))
        start = stop
    buffer = torch.rand(start + len(shapes), generator=torch.Generator().manual_seed(3))
    buffer[start:] = 1.0
    return FusedBuffer(buffer, tuple(pieces), 1)


METHODS = {
    "plain": (AllReduce, {}),
    "adasum": (Adasum, {"reduce": "adasum"}),
    "hierarchical": (HierarchicalAllReduce, {"collective": "hierarchical"}),
    "hierarchical fp16": (
        lambda: HierarchicalAllReduce(make_method(parse_compression("fp16"), seed=0)),
        {"collective": "hierarchical", "compression": parse_compression("fp16")},
    ),
    "hitopkcomm": (
        lambda: HierarchicalTopK(0.02),
        {"collective": "hierarchical", "compression": parse_compression("topk:0.02")},
    ),
    "hitopkcomm, dense": (
        lambda: HierarchicalTopK(0.9),
        {"collective": "hierarchical", "compression": parse_compression("topk:0.9")},
    ),
    "hierarchical adasum": (
        lambda: Adasum(hierarchical=True),
        {"collective": "hierarchical", "reduce": "adasum"},
    ),
    **{
        text: (
            lambda text=text: make_method(parse_compression(text), seed=0),
            {"compression": parse_compression(text)},
        )
        for text in ("fp16", "bf16", "int8", "sign", "topk:0.05", "mstopk:0.05", "randomk:0.05")
    },
    "powersgd": (
        lambda: make_method(parse_compression("powersgd:2"), seed=0),
        {"compression": parse_compression("powersgd:2")},
    ),
}


def differences(members):
    """Method -> what this rank sent, and what it should have sent, where they differ."""
    nodes = Nodes(members)
    route = make_route(None, nodes, hierarchical=True)
    found = {}
    for name, (make, how) in METHODS.items():
        with pytest.MonkeyPatch.context() as patch:
            counter = Counter(patch)
            complete(make(), fused_of(SHAPES), route)
        planned = bucket_traffic(SHAPES, nodes, **how)
        own = {pair: size for pair, size in planned.sent.items() if pair[0] == dist.get_rank()}
        total = sum(own.values())
        pairs = {*own, *counter.sent}
        # Halves and shards of an odd length differ by an element.
        if any(
            abs(own.get(p, 0.0) - counter.sent.get(p, 0.0)) > 0.002 * total + 16 for p in pairs
        ) or sum(counter.sent.values()) != pytest.approx(total, rel=0.003):
            found[name] = (counter.sent, own)
    return found


def none_differs(results):
    assert results == [{}] * len(results)


@ranks(4, check=none_differs)
def test_two_nodes_of_two_ranks(world):
    return differences(((0, 1), (2, 3)))


@ranks(4, check=none_differs)
def test_nodes_that_alternate(world):
    return differences(((0, 2), (1, 3)))


@ranks(3, check=none_differs)
def test_three_nodes(world):
    return differences(((0,), (1,), (2,)))


@ranks(2, check=none_differs)
def test_two_nodes(world):
    return differences(((0,), (1,)))
