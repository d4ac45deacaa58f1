"""ranks: programs that change while training: equal to the serial run before and after, on all
ranks at once; a link's real measurement, and the death of a rank in it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import headway
from headway.collective.all_reduce.algorithm import AllReduceOptions
from headway.collective.topology import LinkGraph
from headway.comm.tuning import repacking
from headway.comm.tuning.repacking import probe_links
from headway.errors import PeerLost
from headway.plans import ExchangePlan, data_parallel
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.ranks import run_ranks
from support.serial import Numbers, largest_error, numbers, train_serially
from support.tiny_models import ALL, cross_entropy

SEED, STEPS, RANKS, CASE = 3, 6, 4, "unused"
MESH = LinkGraph.mesh(RANKS, 1250.0)
SLOW = MESH.scaled(0.1, [(1, 2)])
MADE_FOR_MESH = AllReduceOptions(rates=MESH.rates)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def measuring(tables: list[LinkGraph]) -> None:
    """From now on every step measures the links, and the first two see the first table."""
    found = iter([table for table in tables for _ in range(2)])
    repacking.probe_links = lambda *_, **named: next(found, tables[-1])
    repacking.FIRST_VOTE = 1
    repacking.steps_to_vote = lambda seconds: 1
    repacking.ProbePolicy.vote = lambda *_: True


def train(
    world: Any, exchange: ExchangePlan
) -> tuple[list[Numbers], list[tuple[str, str]], list[str]]:
    """What every step left; the program of the plan and the one of the groups; the remarks."""
    measuring([SLOW, MESH])
    build, data = ALL[CASE]
    torch.manual_seed(SEED)
    model = build().double()
    made = adamw(model)
    plan = data_parallel(12, processes=world.size, precision="float64", exchange=exchange)
    run = Executor(model, made, loss=cross_entropy, plan=plan, seed=SEED, world=World.adopt())
    history, programs = [], []
    for _, part in zip(range(STEPS), run.batches(data(), epochs=None), strict=False):
        value = run.step(part)
        run.flush()
        history.append(numbers(model, made, value))
        current = run.strategy.exchange
        route = current.now.buckets[0].routes[0]
        role = route.group._role("all_reduce", current.now.buckets[0].fused.buffer.numel(), 8)
        programs.append((current.description.collective, role.name))
    remarks = [each for each in run.strategy.context.remarks if "re-arranged" not in each]
    run.strategy.close()
    return history, programs, remarks


def train_all(world: Any, cases: dict[str, ExchangePlan]) -> dict[str, Any]:
    return {name: train(world, exchange) for name, exchange in cases.items()}


CASES = {
    "plain": ExchangePlan(collective="direct", carrier=MADE_FOR_MESH, bucket="300"),
    "priority": ExchangePlan(
        collective="direct", carrier=MADE_FOR_MESH, priority=True, chunk="10 MiB"
    ),
    "never": ExchangePlan(collective="direct", carrier=MADE_FOR_MESH, repack=False),
}


def test_changed_programs_equal_the_serial_run():
    build, data = ALL[CASE]
    expected = train_serially(build, data(), cross_entropy, adamw, batch=12, steps=STEPS, seed=SEED)
    found = run_ranks(RANKS, train_all, CASES, timeout=100)
    for name in CASES:
        for rank in found:
            history, programs, remarks = rank[name]
            assert (programs, remarks) == (found[0][name][1], found[0][name][2])
            for a, b in zip(expected, history, strict=True):
                common = {key: value for key, value in a.items() if "gradient" not in key}
                error, where = largest_error(common, {key: b[key] for key in common})
                assert error < 1e-12, (name, where)
    for name in ("plain", "priority"):
        _, programs, remarks = found[0][name]
        assert set(programs[1:]) == {("trees", "all_reduce (trees)")}
        assert "rank 1 to rank 2: 1 kbit/s, was 10 kbit/s" in remarks[0]
        assert remarks[1].startswith("re-packed: direct would take ")
        assert "rank 2 to rank 1: 10 kbit/s, was 1 kbit/s" in remarks[2]
        assert remarks[3].startswith("re-packed: trees (5 of them")
        assert len(remarks) == 4
    assert found[0]["never"][1:] == ([("direct", "all_reduce (direct)")] * STEPS, [])


def really(world: Any) -> LinkGraph:
    """The loopback, with pairs 0-2 left out."""
    torch.set_num_threads(1)
    links = MESH.part(range(world.size)).scaled(0.0, [(0, 2)])
    return probe_links(world.group, links)


def test_links_are_measured_alike_on_all_ranks():
    """Also an odd number of ranks, of which one rests in each round."""
    first, *others = run_ranks(3, really)
    assert all(other == first for other in others)
    assert first.arcs == ((0, 1), (1, 0), (1, 2), (2, 1))


def dies(world: Any) -> str:
    """Rank 1 vanishes when it is about to measure its link to rank 2."""
    measuring([MESH])
    repacking.probe_links = probe_links
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = headway.Exchange(model, optimizer, CASES["plain"], world=World.adopt())

    def doing(text: str, *arguments: object) -> None:
        if "probe" in text and (world.rank, arguments) == (1, (2,)):
            os.kill(os.getpid(), signal.SIGKILL)

    exchange._strategy.exchange._links._doing = doing
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(PeerLost) as caught:
        exchange.step()
    exchange._strategy.reducer._routes.rest()
    return str(caught.value)


def test_a_death_while_links_are_measured_is_named_in_time():
    said = run_ranks(RANKS, dies, timeout=30, mortal=[1])
    assert said[1] is None
    assert "the connection to rank 1 broke" in said[2]
