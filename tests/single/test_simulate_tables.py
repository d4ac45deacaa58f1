"""single: a simulated step of a plan with split tables: its exchanges, times and refusals."""

from __future__ import annotations

import json

import pytest

import headway
from headway.cli.main import main
from headway.errors import PlanError
from headway.plans import LayerSplit, data_parallel
from headway.plans.tables import TableSplit
from support import table_recipes

BATCH, RANKS = 8, 2
CLUSTER = """
nodes = 1
processes = 2
[[levels]]
name = "node"
nodes = 1
rate = "{rate}"
latency = "50 us"
[devices.cpu]
peak = {{ fp32 = "50 GFLOP/s" }}
memory = "1 GiB"
memory_rate = "8 GB/s"
"""


@pytest.fixture
def cluster(tmp_path):
    def write(rate="1 GB/s"):
        path = tmp_path / f"{rate.split()[0]}.toml"
        path.write_text(CLUSTER.format(rate=rate))
        return str(path)

    return write


def recipe():
    return table_recipes.clicks(precision="float32")


def plan_of(tables, **more):
    return data_parallel(BATCH, processes=RANKS, split=LayerSplit(tables=tables), **more)


@pytest.mark.parametrize("way", ["table", "row", "copies"])
def test_a_step_has_the_exchanges_of_tables(cluster, way):
    fast = headway.simulate(plan_of(way), recipe=recipe(), cluster=cluster())
    slow = headway.simulate(plan_of(way), recipe=recipe(), cluster=cluster("1 kB/s"))
    tables = slow.step.work.tables
    assert tables is not None
    kinds = {one.kind for one in tables.exchanges}
    assert "gradients" in kinds
    assert ("ids" in kinds) == (way != "copies")
    # On such a link bytes are all that counts, and nearly nothing hides them.
    network = slow.step.work.network
    seconds = sum(one.seconds(network) for one in tables.exchanges)
    assert seconds > 0.1
    assert slow.step.exposed["tables"] == pytest.approx(seconds, rel=0.02)
    assert slow.seconds > 50 * fast.seconds
    held = [account.peak for account in fast.step.accounts]
    whole = headway.simulate(plan_of("copies"), recipe=recipe(), cluster=cluster())
    assert max(held) <= max(account.peak for account in whole.step.accounts)


def test_a_slow_rank_and_a_slow_link_are_felt(cluster):
    found = headway.simulate(
        plan_of("hash"), recipe=recipe(), cluster=cluster("1 MB/s"), fault=["rank 1 slow 3x"]
    )
    before, after = (one.step for one in found.scenarios)
    assert after.accounts[1].busy["lookups"] == pytest.approx(
        3 * before.accounts[1].busy["lookups"]
    )
    changed = headway.simulate(
        plan_of("hash"), recipe=recipe(), cluster=cluster("1 MB/s"), change=["link node 2x"]
    )
    assert changed.scenarios[1].step.exposed["tables"] < 0.7 * before.exposed["tables"]


def test_the_command_says_what_tables_exchange(cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan_of("row", precision="float64").save(tmp_path / "plan.json")
    where = cluster("1 MB/s")
    words = [
        "simulate",
        "plan.json",
        "--recipe",
        "support.table_recipes:clicks",
        "--cluster",
        where,
    ]
    assert main(words) == 0
    assert "exchanges of split tables" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scenarios"][0]["exposed"]["tables"] > 0


def test_splits_that_mean_nothing_are_named(cluster):
    wrong = plan_of((TableSplit(tables="nobody", way="row"),))
    with pytest.raises(PlanError, match="no table matches 'nobody'"):
        headway.simulate(wrong, recipe=recipe(), cluster=cluster())
    grown = plan_of((TableSplit(way="grow"),))
    with pytest.raises(PlanError, match="no number of rows to price"):
        headway.simulate(grown, recipe=recipe(), cluster=cluster())


def test_explain_says_bytes_by_table(cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan_of("table", precision="float64").save(tmp_path / "plan.json")
    words = ["explain", "plan.json", "--recipe", "support.table_recipes:clicks"]
    assert main([*words, "--cluster", cluster("1 MB/s"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["tables"]
    # A rank has 4 samples of three tags, each a number with a weight; sums have 6 columns.
    assert told["sent"]["tags.weight"]["ids"] == 4 * 3 * (4 + 8)
    assert told["sent"]["tags.weight"]["sums"] == 4 * 6 * 8
    assert told["exposed"] > 0
    assert main([*words, "--cluster", cluster("1 MB/s")]) == 0
    out = capsys.readouterr().out
    assert "with its split tables (simulated)" in out
    assert "tags.weight" in out
    assert "the other layers, by themselves" in out
