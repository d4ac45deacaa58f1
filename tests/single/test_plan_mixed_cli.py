"""single: `headway plan` and `headway explain` where a cluster has devices of several types."""

from __future__ import annotations

import json

import pytest

from headway.cli.main import main
from headway.cluster import read_cluster
from headway.cost.presets import machine_of
from headway.plan import Plan, data_parallel, pipelined
from headway.plan.pipeline import Pipeline
from headway.planner.collectives import collectives_of, volumes
from headway.planner.mixed import MixedSearch, search_mixed
from headway.planner.mixed_collectives import collectives_of_mixed
from headway.planner.mixed_plan import missing, ranks_of, to_plan
from headway.planner.mixed_planned import mixed_point_of
from headway.planner.mixed_question import MixedQuestion
from headway.planner.operators import Workload
from headway.planner.planned import point_of
from headway.planner.search import Question, Search
from headway.run.model_graph import graph_of

RECIPE = "support.recipes:stack"
CLUSTER = """
processes = 2
nodes = [{{ name = "new", device = "fast" }}, {{ name = "old", device = "slow" }}]
[[levels]]
name = "node"
nodes = 1
rate = "5 GB/s"
latency = "20 us"
[[levels]]
name = "cluster"
rate = "1 GB/s"
latency = "60 us"
[devices.fast]
{fast}
[devices.slow]
{slow}
"""
DEVICE = """
peak = {{ fp32 = "{peak} GFLOP/s" }}
memory = "1 GiB"
memory_rate = "{rate} GB/s"
dispatch = "1 us"
sharpness = 1.0
update = "1 ns"
{price}
"""


def devices(price=True, slower=2):
    own = 'price = "{} EUR/h"' if price else ""
    return CLUSTER.format(
        fast=DEVICE.format(peak=40, rate=20, price=own.format(3.6)),
        slow=DEVICE.format(peak=40 / slower, rate=20 / slower, price=own.format(1.8)),
    )


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text(devices())
    return path


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main([*map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture(scope="module")
def work():
    graph, samples = graph_of(RECIPE)[:2]
    return Workload(graph=graph, samples=samples)


def question_of(work, path, **changed):
    cluster = read_cluster(path)
    network = machine_of(cluster, device="fast").network
    machines = {kind: machine_of(cluster, device=kind) for kind in ("fast", "slow")}
    assert all(machine.network == network for machine in machines.values())
    usual = {
        "work": work, "machines": machines, "counts": {"fast": 2, "slow": 2}, "batch": 32,
        "runnable": True, "zero": (0,), "tensor": (1,),
    }  # fmt: skip
    return MixedQuestion(**(usual | changed))


# -- money ----------------------------------------------------------------------------------------


def test_money_and_picture_of_each_plan(run, cluster, tmp_path):
    svg, png = tmp_path / "f.svg", tmp_path / "f.png"
    code, shown, err = run(
        "plan", RECIPE, "--cluster", cluster, "--json", "--svg", svg, "--png", png
    )
    assert code == 0, err
    found = json.loads(shown)
    drawn = svg.read_text()
    assert drawn.count("<title>") == len(found["points"])
    assert f"{len(found['points'])} plans by step time and memory; chosen: " in drawn
    assert png.read_bytes().startswith(b"\x89PNG")
    assert found["currency"] == "EUR"
    hour = {"fast": 3.6, "slow": 1.8}
    for point in found["points"]:
        each = point["seconds"] * sum(n * hour[kind] for kind, n in point["devices"].items()) / 3600
        assert point["money"]["step"] == pytest.approx(each, rel=1e-12)
        assert point["money"]["thousand_steps"] == 1000 * point["money"]["step"]
        assert point["money"]["run"] == pytest.approx(8 * each, rel=1e-12)  # of 8 steps
    code, shown, _ = run("plan", RECIPE, "--cluster", cluster, "--objective", "cheapest")
    head, *rows = shown.splitlines()
    assert "1,000 steps" in head
    costs = {point["money"]["thousand_steps"] for point in found["points"]}
    assert f"{min(costs):.3g} EUR" in next(row for row in rows if row.startswith("*"))
    assert "money: 1,000 steps cost" in shown
    code, shown, _ = run("plan", RECIPE, "--cluster", cluster, "--price", "7.2 USD/h", "--json")
    for point in json.loads(shown)["points"]:
        each = point["seconds"] * sum(point["devices"].values()) * 7.2 / 3600
        assert point["money"]["step"] == pytest.approx(each, rel=1e-12)


def test_without_prices_it_is_hours_of_each_type(run, tmp_path):
    path = tmp_path / "free.toml"
    path.write_text(devices(price=False))
    code, shown, err = run("plan", RECIPE, "--cluster", path, "--objective", "fastest")
    assert code == 0, err
    assert "1,000 steps  " not in shown.splitlines()[0]
    assert "whose price is not known" in shown
    assert "[devices." in shown


# -- collectives ----------------------------------------------------------------------------------


def test_collectives_of_equal_types_are_those_of_one_type(work, tmp_path):
    path = tmp_path / "equal.toml"
    path.write_text(devices(slower=1))
    question = question_of(work, path)
    search = MixedSearch(question)
    alone = Search(Question(work=work, machine=question.machines["fast"], devices=(4,), batch=32))
    kinds = ("fast", "fast", "slow", "slow")
    cut = Pipeline(microbatches=4, cut=("2",))
    for plan in (
        data_parallel(32, processes=4),
        pipelined(32, processes=4, stages=2, pipeline=cut),
    ):
        mixed, plain = mixed_point_of(plan, search, kinds), point_of(plan, alone)
        assert mixed.seconds == pytest.approx(plain.seconds, rel=1e-12)
        found = collectives_of_mixed(search, mixed)
        for one in found:
            assert one.calls == collectives_of(alone, plain)[one.stage]
        assert {one.stage for one in found} == set(range(plan.pipe_degree))
        assert any(one.calls for one in found)


def test_messages_have_the_size_of_the_copys_micro_batches(work, cluster):
    """A copy of fast devices with 6 samples at once, one of slow ones with 2."""
    search = MixedSearch(question_of(work, cluster))
    cut = Pipeline(microbatches=4, cut=("2",))
    plan = pipelined(32, processes=4, stages=2, pipeline=cut, shares=(24, 8))
    found = collectives_of_mixed(
        search, mixed_point_of(plan, search, ("fast",) * 2 + ("slow",) * 2)
    )
    sent = {(one.kind, one.stage): volumes(one.calls) for one in found}
    for stage, way in ((0, "send"), (1, "receive")):
        fast, slow = (sent[kind, stage][way, "pipe"] for kind in ("fast", "slow"))
        assert fast == (4, 3 * slow[1])
        assert (
            sent["fast", stage]["all_reduce", "data"] == sent["slow", stage]["all_reduce", "data"]
        )


# -- a plan again ---------------------------------------------------------------------------------


def test_a_point_becomes_a_plan_and_the_same_point_again(work, cluster):
    question = question_of(work, cluster)
    outcome = search_mixed(question)
    seen = set()
    for point in outcome.points:
        if missing(point):
            continue
        plan = to_plan(outcome, point)
        again = mixed_point_of(plan, MixedSearch(question), ranks_of(point))
        assert again.seconds == pytest.approx(point.seconds, rel=1e-9)
        assert again.bytes == pytest.approx(point.bytes, rel=1e-9)
        assert again.combination.cells.copies == point.combination.cells.copies
        assert (again.combination.amounts, again.sizes) == (point.combination.amounts, point.sizes)
        seen.add(point.combination.pipeline > 1)
    assert seen


def test_explain_says_what_binds_and_what_would_change_it(run, cluster, tmp_path):
    out = tmp_path / "plan.json"
    words = ("--cluster", cluster, "--runnable", "--objective", "fastest", "--out", out)
    code, shown, err = run("plan", RECIPE, *words)
    assert code == 0, err
    plan = Plan.load(out)
    assert plan.prediction.device in err
    code, shown, err = run("explain", out, "--recipe", RECIPE, "--cluster", cluster)
    assert code == 0, err
    assert f"ranks in the order of the mesh: {plan.prediction.device}" in shown
    assert "of the plans that run today none is faster" in shown
    for kind in set(plan.prediction.device.replace(",", "").split()) & {"fast", "slow"}:
        assert f"{kind}: " in shown
        assert f"with {kind} compute 2x: this plan" in shown
    code, shown, _ = run("explain", out, "--recipe", RECIPE, "--cluster", cluster, "--json")
    found = json.loads(shown)
    assert found["point"]["seconds"] == pytest.approx(plan.prediction.seconds, rel=1e-9)
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(
        plan.prediction.seconds, rel=1e-6
    )
    assert sum(plan.prediction.parts.values()) == pytest.approx(plan.prediction.seconds, rel=1e-6)
    faster = next(c for c in found["changes"] if c["name"] == "fast compute 2x")
    assert faster["own"] <= found["point"]["seconds"]


def test_a_plan_that_is_slower_than_the_search_s_is_told_so(run, cluster, tmp_path):
    even = tmp_path / "even.json"
    data_parallel(32, processes=4).save(even)
    code, shown, err = run("explain", even, "--recipe", RECIPE, "--cluster", cluster)
    assert code == 0, err
    assert "ranks in the order of the mesh: 2 fast, 2 slow" in shown
    assert "of the plans that run today the search would take" in shown
    code, _, err = run("explain", even, "--recipe", RECIPE, "--cluster", cluster, "--guidelines")
    assert code == 1
    assert "devices of one type" in err
