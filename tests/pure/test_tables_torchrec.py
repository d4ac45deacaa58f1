"""pure: TorchRec's estimates of shards, as its planner has printed them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.planner.tables.demand import TableDemand
from headway.planner.tables.solve import Solution, solve
from headway.planner.tables.torchrec import (
    Topology,
    column_width,
    row_shards,
    shard_cost,
    torchrec_problem,
)

SHARDS = json.loads((Path(__file__).parents[1] / "support/torchrec_shards.json").read_text())
"""Written by TorchRec 1.8.0: device, ranks, of a node, rows, columns, bag, way, kernel, shape of
the shard, milliseconds, bytes of HBM and of DDR."""


def test_every_recorded_shard_has_torchrecs_time_and_bytes():
    ways = set()
    for device, ranks, local, rows, columns, bag, way, kernel, shape, time, hbm, ddr in SHARDS:
        table = TableDemand(table="t", rows=rows, columns=columns, bag=bag)
        topology = Topology(ranks=ranks, local=local, device=device)
        cost = shard_cost(table, way, kernel, tuple(shape), topology)
        assert cost.total == pytest.approx(time, rel=1e-9), (device, way, kernel)
        assert (cost.hbm, cost.ddr) == (hbm, ddr), (device, way, kernel)
        ways.add((device, way, kernel))
    assert len(ways) >= 15


def test_states_of_optimisers_count_as_torchrec_counts_them():
    topology = Topology(ranks=8, local=8)
    plain = TableDemand(table="t", rows=1000, columns=64)
    base = shard_cost(plain, "table_wise", "fused", (1000, 64), topology).hbm
    adam = TableDemand(table="t", rows=1000, columns=64, element_state=8)
    by_row = TableDemand(table="t", rows=1000, columns=64, row_state=4)
    size = 1000 * 64 * 4
    assert shard_cost(adam, "table_wise", "fused", (1000, 64), topology).hbm == base + 2 * size
    assert shard_cost(by_row, "table_wise", "fused", (1000, 64), topology).hbm == base + size / 64


def test_weights_of_lookups_cost_a_kernel_more():
    topology, table = Topology(ranks=2, local=2), TableDemand(table="t", rows=100, columns=128)
    plain = shard_cost(table, "table_wise", "fused", (100, 128), topology)
    heavy = shard_cost(table, "table_wise", "fused", (100, 128), topology, weighted=True)
    read = 512 * 2 * 8 / topology.hbm_rate
    assert heavy.forward == pytest.approx(plain.forward + read)
    assert heavy.backward == pytest.approx(3.1 * heavy.forward)


def test_shards_are_cut_as_torchrec_cuts_them():
    assert row_shards(10, 4, 4) == [(3, 4), (3, 4), (3, 4), (1, 4)]
    assert row_shards(5, 4, 4) == [(2, 4), (2, 4), (1, 4), (0, 4)]
    assert [column_width(n, 32) for n in (16, 64, 100, 96)] == [16, 32, 100, 32]
    assert column_width(256, None) == 128


def test_its_choice_is_solved_with_few_tables():
    tables = [
        TableDemand(table=f"t{n}", rows=rows, columns=64, bag=bag)
        for n, (rows, bag) in enumerate([(10**7, 1), (10**6, 20), (100, 1), (5 * 10**6, 3)])
    ]
    problem = torchrec_problem(tables, Topology(ranks=4, local=4), least_columns=32)
    found = solve(problem)
    assert isinstance(found, Solution)
    assert problem.fits(found.assignment)
    assert found.gap < 0.05
    tight = torchrec_problem(
        tables, Topology(ranks=4, local=4, hbm=2**30, ddr=2**31), least_columns=32
    )
    less = solve(tight)
    assert isinstance(less, Solution)
    assert less.seconds >= found.bound
