"""ranks: training whose sums a program carries equals the serial run, and sends what the plan says;
what no program can carry is refused by name; ranks that chose otherwise are told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.cluster import Cluster
from headway.collective.all_reduce.algorithm import AllReduceOptions, PlanTree
from headway.collective.model.bucket_cost import bucket_traffic
from headway.collective.nodes import NOTHING, Traffic
from headway.collective.topology import NetworkTopology
from headway.comm.backend import process_group
from headway.errors import PlanError
from headway.planner.collective_algorithm import choose_all_reduce
from headway.plans import ExchangePart, ExchangePlan, data_parallel, with_collective
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.ranks import RanksFailed, run_ranks
from support.serial import Numbers, largest_error, numbers, train_serially
from support.tiny_models import ALL, cross_entropy

SEED, STEPS, RANKS = 3, 4, 4


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def packed(ranks: int = RANKS) -> AllReduceOptions:
    mesh = NetworkTopology.of_cluster(Cluster.of(ranks, rate="100 Mbit/s", fabric="mesh"))
    carrier = choose_all_reduce("trees", mesh, 4096).carrier
    assert carrier is not None
    return carrier


TREES = {"collective": "trees", "carrier": packed()}
LOPSIDED = AllReduceOptions(
    chunk="40 B",
    trees=(
        PlanTree(parents=(-1, 0, 1, 2), weight=3.0),
        PlanTree(parents=(3, 3, 3, -1), weight=0.1),
    ),
)
EXACT: dict[str, ExchangePlan] = {
    "ring": ExchangePlan(collective="ring", bucket="300"),
    "ring along an order": ExchangePlan(
        collective="ring", carrier=AllReduceOptions(order=(2, 0, 3, 1), chunk="24 B")
    ),
    "direct": ExchangePlan(collective="direct", bucket="300"),
    "halving-doubling": ExchangePlan(collective="halving-doubling"),
    "servers": ExchangePlan(collective="servers", carrier=AllReduceOptions(chunk="1 KiB")),
    "trees": ExchangePlan(**TREES, bucket="300"),
    "lopsided trees": ExchangePlan(collective="trees", carrier=LOPSIDED),
    "trees, no overlap": ExchangePlan(**TREES, overlap=False),
    "trees, fitted buckets": ExchangePlan(**TREES, bucket="auto"),
    "trees, priority": ExchangePlan(**TREES, priority=True, chunk="100"),
    "direct, three in flight": ExchangePlan(
        collective="direct", priority=True, credit=3, chunk="64"
    ),
    "trees, parts": ExchangePlan(
        **TREES, parts=(ExchangePart(parameters="*.bias", compress="none"),)
    ),
}


class Counted:
    """Stands before Gloo's messages and keeps what each rank was sent, in bytes."""

    sent: dict[int, int]

    def __init__(self, messages, sent) -> None:
        self.messages, self.sent = messages, sent

    def send(self, tensors, peer, tag):
        self.sent[peer] = self.sent.get(peer, 0) + sum(tensor.nbytes for tensor in tensors)
        return self.messages.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        return self.messages.recv(tensors, peer, tag)


def counting(sent):
    """Interpreters that are made from now on count."""
    made = process_group.Interpreter

    def make(messages, **named):
        return made(Counted(messages, sent), **named)

    process_group.Interpreter = make
    return made


def planned(run: Executor) -> tuple[int, Traffic]:
    """Bytes of one step: what this rank sends by its buckets, and all ranks by the plan."""
    exchange = run.strategy.exchange
    total = NOTHING
    for bucket in exchange.now.buckets:
        total += bucket_traffic(
            [piece.shape for piece in bucket.fused.pieces],
            bucket.routes[0].nodes,
            collective=exchange.description.collective,
            compression=exchange.description.compression,
            carrier=exchange.description.carrier,
            element_bytes=bucket.fused.buffer.element_size(),
        )
    return sum(bucket.wire_bytes for bucket in exchange.now.buckets), total


def train(world: Any, case: str, exchange: ExchangePlan) -> list[Numbers]:
    build, data = ALL[case]
    torch.manual_seed(SEED)
    model = build().double()
    made = adamw(model)
    plan = data_parallel(12, processes=world.size, precision="float64", exchange=exchange)
    sent: dict[int, int] = {}
    plain = counting(sent)
    try:
        run = Executor(model, made, loss=cross_entropy, plan=plan, seed=SEED, world=World.adopt())
        history = []
        for _, part in zip(range(STEPS), run.batches(data(), epochs=None), strict=False):
            value = run.step(part)
            run.flush()
            history.append(numbers(model, made, value))
    finally:
        process_group.Interpreter = plain
    if not run.strategy.exchange._measures:  # measuring sends, too
        own, total = planned(run)
        assert sum(sent.values()) == STEPS * own
        assert sent == {
            peer: STEPS * size for (rank, peer), size in total.sent.items() if rank == world.rank
        }
    run.strategy.close()
    return history


def train_all(world: Any, cases: dict[str, tuple[str, ExchangePlan]]) -> dict[str, list[Numbers]]:
    return {name: train(world, *case) for name, case in cases.items()}


@pytest.mark.slow
def test_programs_equal_the_serial_run():
    """Every kind, with buckets, overlap, priority and parts, to 1e-12; and the bytes of each rank
    to each other are those of the plan, to the byte."""
    expected = {}
    for case in ("unused", "tied"):
        build, data = ALL[case]
        expected[case] = train_serially(
            build, data(), cross_entropy, adamw, batch=12, steps=STEPS, seed=SEED
        )
    cases = {name: ("unused", exchange) for name, exchange in EXACT.items()}
    cases |= {f"{name}, tied": ("tied", EXACT[name]) for name in ("trees", "trees, priority")}
    assert all(exchange.exact for _, exchange in cases.values())
    for found in run_ranks(RANKS, train_all, cases, timeout=100):
        for name, history in found.items():
            for a, b in zip(expected[cases[name][0]], history, strict=True):
                common = {key: value for key, value in a.items() if "gradient" not in key}
                error, where = largest_error(common, {key: b[key] for key in common})
                assert error < 1e-12, (name, where)


def test_three_ranks_and_rounded_sums():
    """An odd number of ranks; 16 bits on the wire: half of the bytes, ranks alike, and learning."""
    kinds = {
        "trees fp16": ExchangePlan(collective="trees", carrier=packed(3), compress="fp16"),
        "direct bf16": ExchangePlan(collective="direct", compress="bf16"),
        "halving fp16": ExchangePlan(
            collective="halving-doubling", compress="fp16", priority=True, credit=1, chunk="10 MiB"
        ),
    }
    cases = {name: ("unused", exchange) for name, exchange in kinds.items()}
    first, *others = run_ranks(3, train_all, cases, timeout=60)
    for name in kinds:
        assert float(first[name][-1]["loss"]) < float(first[name][0]["loss"])
        for other in others:
            for key, value in first[name][-1].items():
                if key.startswith("parameter "):
                    assert torch.equal(other[name][-1][key], value), (name, key)


def differing(world: Any) -> None:
    carrier = packed()
    if world.rank == 2:
        carrier = replace(carrier, trees=carrier.trees[::-1])
    train(world, "tied", ExchangePlan(collective="trees", carrier=carrier))


def test_a_rank_with_other_programs_is_named():
    """Before anything is sent, which would hang or sum what does not belong together."""
    with pytest.raises(RanksFailed, match="ranks 2 would carry the sums by other programs"):
        run_ranks(RANKS, differing)


def test_a_group_of_the_user_stays_what_it_was():
    """The exchange's groups have a backend of their own: `register_backend` keeps its programs."""
    run_ranks(2, users_group)


def users_group(world: Any) -> None:
    asked = []
    process_group.register_backend(choose=lambda task, *_: asked.append(task.op))
    train(world, "tied", ExchangePlan(collective="direct"))
    group = dist.new_group(backend="headway")
    ones = torch.ones(5)
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [2.0] * 5
    assert asked == ["all_reduce"]


REFUSED = {
    "int8": (partial(ExchangePlan, compress="int8"), "compress int8 with collective trees"),
    "topk": (
        partial(ExchangePlan, parts=(ExchangePart(parameters="*", compress="topk:0.1"),)),
        "compress topk:0.1 with collective trees",
    ),
    "adasum": (partial(ExchangePlan, reduce="adasum"), "reduce adasum with collective trees"),
    "groups": (
        partial(ExchangePlan, parts=(ExchangePart(parameters="*", ranks=((0, 1), (2, 3))),)),
        "ranks with collective trees",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_program_carries_is_refused_by_name(what):
    make, text = REFUSED[what]
    plan = data_parallel(12, processes=RANKS, exchange=make())
    with pytest.raises(PlanError) as caught:
        with_collective(plan, "trees", packed())
    assert text in str(caught.value)
