"""pure: the simulator against `schedule.timing`, `schedule.stats` and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headway.cluster.link import Link
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.lowering import lower
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import measure_schedule, peak_activations
from headway.schedule.timing import time_schedule
from headway.simulator.ranks import RankGrid
from headway.simulator.simulation import simulate_training_step
from headway.simulator.work import StageWork, StepWork

FREE = HierarchicalNetwork((LinkLevel(name="all", width=math.inf, link=Link(rate=1.0)),))
"""A second for each byte: a message's bytes are its seconds."""


def late(latency):
    return HierarchicalNetwork(
        (LinkLevel(name="all", width=math.inf, link=Link(rate=1.0, latency=latency)),)
    )


def random_bytes(stage):
    return (1.0, 3.0, 0.5, 2.5)[stage % 4]


def stages_of(costs):
    return tuple(
        StageWork(
            forward=costs.forward[s],
            input_grad=costs.input_grad[s],
            weight_grad=costs.weight_grad[s],
            message=costs.message[s] if costs.message else 0.0,
            kept=costs.activation[s],
            params=random_bytes(s),
        )
        for s in range(costs.stages)
    )


def work_of(table, costs, **changed):
    given = {"stages": stages_of(costs), "grid": RankGrid(pipeline=table.ranks), "network": FREE}
    return StepWork(table=table, **(given | changed))


def random_costs(random, stages, *, message=True):
    def some():
        return tuple(float(x) for x in random.uniform(0.2, 2.0, stages))

    return StageCosts(
        forward=some(),
        input_grad=some(),
        weight_grad=some(),
        message=some() if message else (),
        activation=some(),
        weight=some(),
    )


def tables():
    for name in SCHEDULES:
        for ranks, number in ((2, 4), (4, 8), (4, 12), (8, 16)):
            yield pytest.param(name, ranks, number, id=f"{name}-{ranks}-{number}")


@pytest.mark.parametrize(("name", "ranks", "number"), list(tables()))
def test_every_table_takes_as_long_as_its_timing(name, ranks, number):
    """Bit for bit, with random costs of every stage, with and without messages."""
    random = np.random.default_rng(ranks * 100 + number)
    table = make_schedule(name, stages=ranks, microbatches=number)
    for latency in (0.0, 0.7):
        costs = random_costs(random, table.stages)
        network, stages = late(latency), range(table.stages)
        sums = [float(network.all_reduce(random_bytes(s), len(table.holders(s)))) for s in stages]
        priced = costs.halved() if table.halves else costs
        priced = replace(priced, latency=latency, sync=tuple(sums))
        found = simulate_training_step(work_of(table, costs, network=network))
        timing = time_schedule(lower(table, sync="eager-opt"), priced)
        assert found.seconds == timing.makespan
        for account in found.accounts:
            assert sum(account.busy.values()) == pytest.approx(timing.busy(account.place), rel=1e-9)
            parts = [*account.busy.values(), *account.exposed.values(), account.bubble]
            assert math.fsum(parts) == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize(("name", "ranks", "number"), list(tables()))
def test_every_table_has_the_bubble_and_the_memory_of_its_statistics(name, ranks, number):
    random = np.random.default_rng(7)
    table = make_schedule(name, stages=ranks, microbatches=number)
    table = replace(table, recompute=())
    costs = random_costs(random, table.stages, message=False)
    own = costs.halved() if table.halves else costs
    stages = tuple(replace(stage, params=0.0) for stage in stages_of(costs))
    found, said = (
        simulate_training_step(work_of(table, costs, stages=stages)),
        measure_schedule(table, own),
    )
    assert found.bubble == pytest.approx(said.bubble, rel=1e-9, abs=1e-12)
    peaks = [account.peak for account in found.accounts]
    assert peaks == pytest.approx(peak_activations(table, own), abs=1e-8)
    assert not found.exposed
