"""pure: tables over ranks and tiers of memory: prices, reasons, and what never happens."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.cluster import Cluster, Device, Level, MemoryTier, Node, of_preset
from headway.cost.network import network_of
from headway.documents import to_type
from headway.errors import NothingFits, PlanError
from headway.planner.tables.costs import tier_machine, tier_problem
from headway.planner.tables.demand import TableDemand, sent_bytes, travels
from headway.planner.tables.placement import TablesPlan, place_over_tiers
from headway.planner.tables.skew import AccessSkew, measure_skew
from headway.planner.tables.solve import Solution, solve
from headway.plans.tables import place_tables

GIB = 2.0**30
SEVERAL = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cluster(ranks=2, nodes=1, *, memory=1.0, dram=4.0, nvme=0.0, rate=10e9, dram_rate=20e9):
    """Ranks with GiB of their own memory at 100 GB/s, of DRAM and of NVMe."""
    tiers = [MemoryTier(name="DRAM", memory=dram * GIB, rate=dram_rate)] if dram else []
    if nvme:
        tiers.append(MemoryTier(name="NVMe", memory=nvme * GIB, rate=1e9, mapped=True))
    card = Device(peak={"fp32": 1e12}, memory=memory * GIB, memory_rate=100e9, tiers=tuple(tiers))
    levels = [Level(name="node", nodes=1, rate=rate, latency=1e-6)]
    if nodes > 1:
        levels.append(Level(name="cluster", rate=rate / 4, latency=1e-5))
    return Cluster(
        nodes=tuple(Node(name=f"n{n}") for n in range(nodes)),
        processes=ranks // nodes,
        devices={"card": card},
        levels=tuple(levels),
    )


def table(name="t", rows=100_000, columns=64, bag=4.0, **more):
    return TableDemand(table=name, rows=rows, columns=columns, bag=bag, **more)


def place(demands, machine, samples=512, **more) -> TablesPlan:
    return place_over_tiers(demands, tier_machine(machine, **more), samples=samples)


# -- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_bytes_are_those_of_the_formulas(ranks):
    b, n, d, f = 1024, 6, 32, (ranks - 1) / ranks
    demand = table(rows=10**12, columns=d, bag=n)
    sent = sent_bytes(demand, ranks, b)
    assert sent["table"] == pytest.approx(8 * b * n * f + 2 * f * 4 * b * d)
    assert sent["sums"] == pytest.approx(12 * b * n * f + 2 * f * 4 * ranks * b * d)
    # So large a table has hardly any row twice in a batch.
    assert sent["rows"] == pytest.approx(8 * b * n * f + 2 * 4 * b * n * d * f, rel=1e-6)
    assert sent["copies"] == pytest.approx((ranks - 1) * b * n * (8 + 4 * d), rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_travel_below_as_many_lookups_as_ranks_and_sums_above(ranks):
    few, many = (table(rows=10**12, columns=512, bag=n) for n in (ranks - 1, ranks + 1))
    assert travels(few, ranks, 256, parts=ranks) == "rows"
    assert travels(many, ranks, 256, parts=ranks) == "sums"
    assert travels(replace(many, pooled=False), ranks, 256, parts=ranks) == "rows"


def test_of_a_table_with_few_rows_those_travel_once():
    demand = table(rows=50, columns=512, bag=20)
    assert travels(demand, 8, 4096) == "rows"
    sent = sent_bytes(demand, 8, 4096)
    assert sent["rows"] < sent["table"] < sent["sums"]


def test_the_exchange_costs_what_the_network_says():
    machine = cluster(4)
    tiers = tier_machine(machine)
    problem = tier_problem([table(rows=10**9, bag=10)], tiers, samples=100)
    whole = next(o for o in problem.options[0] if o.way == "table")
    assert whole.columns == whole.parts == 1
    sent = 8 * 400 * 10 + 2 * 400 * 64 * 4  # of all 400 samples, its own included
    network = network_of(machine)
    exact = float(network.all_to_all(sent, 4)) - float(network.all_to_all(0, 4))
    assert whole.forms[0].exchange == pytest.approx(exact)
    assert problem.latencies[0] == pytest.approx(3 * float(network.all_to_all(0, 4)))


# -- what is chosen ----------------------------------------------------------------------------


def test_tables_are_dealt_evenly_and_the_plan_says_so():
    found = place([table(f"t{n}", bag=20) for n in range(4)], cluster(2))
    assert found.gap <= 1e-9
    held = [sorted(p.rank for t in found.tables for p in t.pieces).count(r) for r in (0, 1)]
    assert held[0] == held[1]
    assert max(load.seconds for load in found.loads) == pytest.approx(
        min(load.seconds for load in found.loads)
    )
    assert found.seconds == pytest.approx(max(load.seconds for load in found.loads) + found.latency)
    for load in found.loads:
        own = [p for t in found.tables for p in t.pieces if p.rank == load.rank]
        assert load.seconds == pytest.approx(sum(p.lookup + p.exchange for p in own))


def test_what_a_plan_says_of_its_tables_resolves_to_the_same_placement():
    demands = [
        table("a", rows=6_000_000),
        table("b", rows=3_000_000, bag=30),
        table("c", rows=30),
        table("d", rows=9_000_000, bag=1, pooled=False),
    ]
    found = place(demands, cluster(4, dram=2.0))
    shapes = {d.table: (d.rows, d.columns) for d in demands}
    again = place_tables(found.splits, shapes, 4)
    for placed in found.tables:
        resolved = again[placed.table]
        assert resolved.owners == placed.placement.owners
        assert resolved.cut == placed.placement.cut
        assert resolved.travels == placed.placement.travels
        assert resolved.hot == placed.placement.hot
        assert placed.why


def test_hot_rows_lie_in_the_fast_tier_and_cold_ones_behind_it():
    rows = 8_000_000  # 2 GiB, of which 1 GiB fits
    ids = np.concatenate([np.arange(rows // 50).repeat(9), np.arange(rows // 50, rows // 10)])
    hot = table("hot", rows=rows, bag=50, skew=measure_skew([ids], rows, exact_rows=2**23))
    found = place([hot], cluster(1, dram=0, nvme=8.0))
    (piece,) = found.tables[0].pieces
    assert (piece.hot_tier, piece.tier) == ("device", "NVMe")
    assert 0 < piece.hot_rows < rows
    assert found.tables[0].placement.hot == f"{piece.hot_rows} rows"
    assert "of lookups are of its hot rows (device), the rest lies in NVMe" in found.tables[0].why
    even = place([replace(hot, skew=None)], cluster(1, dram=0, nvme=8.0))
    assert found.seconds < even.seconds / 2


def test_frequent_rows_side_by_side_are_dealt_by_a_hash():
    rows = 1_000_000
    skew = measure_skew([np.arange(rows // 8).repeat(3), np.arange(rows)], rows)
    busy = table("busy", rows=rows, columns=3, bag=100, skew=skew)
    tiers = tier_machine(cluster(4))
    options = {o.way: o for o in tier_problem([busy], tiers, samples=64).options[0]}
    row, hashed = (options[way].forms[0].lookups.sum(axis=0) for way in ("row", "hash"))
    assert row.max() > 2 * row.min()
    assert hashed.max() == hashed.min() < row.max()


def test_a_cluster_of_nodes_has_tables_on_one_node_and_grids():
    tiers = tier_machine(cluster(4, nodes=2))
    ways = [o.way for o in tier_problem([table()], tiers, samples=8).options[0]]
    assert ways == ["copies", "table", "column", "column", "row", "table_row", "table_row", "grid"]


def test_what_the_optimiser_does_to_rows_limits_the_ways():
    tiers = tier_machine(cluster(4, nodes=2, nvme=8.0))
    (ways,) = tier_problem([table(divides=False)], tiers, samples=8).options
    assert {option.way for option in ways} == {"copies", "table", "row", "table_row"}
    (ways,) = tier_problem([table(sparse=False)], tiers, samples=8).options
    assert {form.slow for option in ways for form in option.forms} == {0, 1}
    narrow = tier_problem([table(columns=4)], tiers, samples=8).options[0]
    assert [option.columns for option in narrow if option.way == "column"] == [2]


def test_a_table_that_does_not_fit_is_refused_with_what_is_missing():
    with pytest.raises(NothingFits) as caught:
        place([table("huge", rows=100_000_000)], cluster(2))
    error = caught.value
    assert "23.8 GiB with the optimiser's state, and 13.8 GiB of memory are missing" in error.what
    assert re.search(r"rank [01]: .* more of DRAM needed; it has 4 GiB", error.problems[0])
    assert "more of DRAM" in error.fix
    assert "NVMe" in error.fix
    assert "more ranks" in error.fix
    state = table("huge", rows=24_000_000, element_state=8)
    with pytest.raises(NothingFits, match="row-wise Adagrad") as caught:
        place([state], cluster(2))


def test_memory_that_is_not_for_tables_is_left_free():
    demands = [table(f"t{n}", rows=1_500_000) for n in range(4)]
    free = place(demands, cluster(2))
    less = place(demands, cluster(2), reserved=0.8 * GIB)
    assert free.device_bytes > 0.3 * GIB
    assert less.device_bytes <= 0.2 * GIB
    assert less.seconds > free.seconds
    with pytest.raises(PlanError, match="not known"):
        tier_machine(Cluster.of(2))


def test_devices_of_two_kinds_get_what_they_can_hold():
    base = cluster(2)
    small = replace(base.devices["card"], memory=0.1 * GIB, tiers=())
    mixed = replace(
        base,
        nodes=(Node(name="a", device="card"), Node(name="b", device="small")),
        processes=1,
        devices={**base.devices, "small": small},
        levels=(Level(name="cluster", rate=10e9),),
    )
    found = place([table(f"t{n}", rows=800_000) for n in range(3)], mixed)
    assert found.loads[1].used["device"] <= 0.1 * GIB
    assert found.loads[1].capacity["DRAM"] == 0
    assert all(p.tier != "DRAM" for t in found.tables for p in t.pieces if p.rank == 1)


def test_zion_holds_what_one_device_cannot():
    tables = [table(f"t{n}", rows=30_000_000, columns=128, row_state=4.0) for n in range(8)]
    found = place_over_tiers(tables, tier_machine(of_preset("zion")), samples=256, seconds=1.0)
    assert sum(t.bytes for t in found.tables) > 100 * GIB
    assert all(u <= load.capacity[k] for load in found.loads for k, u in load.used.items())
    assert found.binds[0].startswith("rank")


# -- properties --------------------------------------------------------------------------------


def tables_of(seed, count):
    rng = np.random.default_rng(seed)
    return [
        table(
            f"t{n}",
            rows=int(10 ** rng.uniform(1, 7)),
            columns=int(rng.choice([4, 16, 64])),
            bag=float(rng.choice([1, 3, 20])),
            pooled=bool(rng.random() < 0.8),
            row_state=4.0,
            sparse=bool(rng.random() < 0.7),
        )
        for n in range(count)
    ]


@SEVERAL
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3))
def test_no_tier_is_ever_overfull(seed, count, ranks):
    demands = tables_of(seed, count)
    size = sum(d.bytes for d in demands) / GIB
    machine = cluster(ranks, memory=size / 3 / ranks, dram=size / ranks, nvme=size)
    found = place(demands, machine)
    for load in found.loads:
        for name, used in load.used.items():
            assert used <= load.capacity[name] * (1 + 1e-9)
    for placed in found.tables:
        whole = sum((p.columns[1] - p.columns[0]) * p.rows for p in placed.pieces)
        copies = ranks if placed.way == "copies" else 1
        demand = next(d for d in demands if d.table == placed.table)
        assert whole >= demand.rows * demand.columns * copies


@settings(SEVERAL, max_examples=5)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_the_step_gets_no_longer_with_faster_links_or_memory_or_more_of_it(seed, ranks):
    demands = tables_of(seed, 2)
    size = sum(d.bytes for d in demands) / GIB
    base = {"memory": size / 4, "dram": size, "rate": 1e9, "dram_rate": 5e9}

    def seconds(**changed):
        tiers = tier_machine(cluster(ranks, **base | changed))
        found = solve(tier_problem(demands, tiers, samples=128), seconds=10.0)
        assert isinstance(found, Solution)
        assert found.proven
        return found.seconds

    usual = seconds() * (1 + 1e-6)
    assert seconds(memory=size / 2) <= usual
    assert seconds(dram=2 * size) <= usual
    assert seconds(rate=2e9) <= usual
    assert seconds(dram_rate=10e9) <= usual


def test_documents_survive_json():
    found = place([table("a"), table("b", rows=10)], cluster(2))
    again = to_type(json.loads(json.dumps(dataclasses.asdict(found))), TablesPlan, where="here")
    assert again == found
    assert AccessSkew(rows=3).share(1.5) == 0.5
