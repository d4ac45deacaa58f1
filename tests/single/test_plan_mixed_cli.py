"""single: `headway plan` and `headway explain` where a cluster has devices of several types."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from headway.cli.main import main
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.guidelines.plan_advice import AdviceRequest, advice_of
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.plan_conversion import missing_in_executor, point_of, to_plan
from headway.planner.search.request import PlanRequest
from headway.planner.traffic.estimate import collectives_of, collectives_of_ranks
from headway.plans import Plan, data_parallel, pipelined
from headway.plans.pipeline import PipelinePlan
from headway.run.measure.recipe_model import recipe_graph
from support.call_volumes import call_volumes
from support.mixed import RECIPE, devices, question_of


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
    graph, samples = recipe_graph(RECIPE)[:2]
    return PlanningWorkload(graph=graph, samples=samples)


# -- money ----------------------------------------------------------------------------------------


@pytest.mark.slow
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
    assert found["question"]["currency"] == "EUR"
    hour = {"fast": 3.6, "slow": 1.8}
    for point in found["points"]:
        each = point["seconds"] * sum(n * hour[kind] for kind, n in point["types"].items()) / 3600
        assert point["money"]["step"] == pytest.approx(each, rel=1e-12)
        assert point["money"]["thousand_steps"] == 1000 * point["money"]["step"]
        assert point["money"]["run"] == pytest.approx(8 * each, rel=1e-12)  # of 8 steps
    code, shown, _ = run("plan", RECIPE, "--cluster", cluster, "--objective", "cheapest")
    head, *rows = shown.splitlines()
    assert "1,000 steps" in head
    costs = {point["money"]["thousand_steps"] for point in found["points"]}
    assert f"{min(costs):.3g} EUR" in next(row for row in rows if row.startswith("*"))
    assert "cost: 1,000 steps cost" in shown
    code, shown, _ = run("plan", RECIPE, "--cluster", cluster, "--price", "7.2 USD/h", "--json")
    for point in json.loads(shown)["points"]:
        each = point["seconds"] * point["devices"] * 7.2 / 3600
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
    search = PlanSearch(question)
    alone = PlanSearch(
        PlanRequest(work=work, machine=question.machines["fast"], devices=(4,), batch=32)
    )
    kinds = ("fast", "fast", "slow", "slow")
    cut = PipelinePlan(microbatches=4, cut=("2",))
    for plan in (
        data_parallel(32, processes=4),
        pipelined(32, processes=4, stages=2, pipeline=cut),
    ):
        mixed, plain = point_of(plan, search, kinds), point_of(plan, alone)
        assert mixed.seconds == pytest.approx(plain.seconds, rel=1e-12)
        found = collectives_of_ranks(search, mixed)
        for one in found:
            assert one.calls == collectives_of(alone, plain)[one.stage]
        assert {one.stage for one in found} == set(range(plan.pipe_degree))
        assert any(one.calls for one in found)


def test_messages_have_the_size_of_the_copys_micro_batches(work, cluster):
    """A copy of fast devices with 6 samples at once, one of slow ones with 2."""
    search = PlanSearch(question_of(work, cluster))
    cut = PipelinePlan(microbatches=4, cut=("2",))
    plan = pipelined(32, processes=4, stages=2, pipeline=cut, shares=(24, 8))
    found = collectives_of_ranks(search, point_of(plan, search, ("fast",) * 2 + ("slow",) * 2))
    sent = {(one.kind, one.stage): call_volumes(one.calls) for one in found}
    for stage, way in ((0, "send"), (1, "receive")):
        fast, slow = (sent[kind, stage][way, "pipe"] for kind in ("fast", "slow"))
        assert fast == (4, 3 * slow[1])
        assert (
            sent["fast", stage]["all_reduce", "data"] == sent["slow", stage]["all_reduce", "data"]
        )


# -- a plan again ---------------------------------------------------------------------------------


def test_a_point_becomes_a_plan_and_the_same_point_again(work, cluster):
    question = question_of(work, cluster)
    outcome = find_plans(question)
    seen = set()
    for point in outcome.points:
        if missing_in_executor(outcome.search, point):
            continue
        plan = to_plan(outcome, point)
        again = point_of(plan, PlanSearch(question), point.rank_kinds)
        assert again.seconds == pytest.approx(point.seconds, rel=1e-9)
        assert again.bytes == pytest.approx(point.bytes, rel=1e-9)
        places = [
            [(own.kinds, own.copies, own.microbatch) for own in one.classes]
            for one in (again, point)
        ]
        assert places[0] == places[1]
        assert again.amounts == point.amounts
        seen.add(point.degrees.pipeline > 1)
    assert seen


@pytest.mark.slow
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
    assert "no executable plan is faster" in shown
    for kind in set(plan.prediction.device.replace(",", "").split()) & {"fast", "slow"}:
        assert f"{kind}: " in shown
        for change in ("compute 2x", "memory 2x", "launches 2x faster"):
            assert f"with {kind} {change}: this plan" in shown
    code, shown, _ = run("explain", out, "--recipe", RECIPE, "--cluster", cluster, "--json")
    found = json.loads(shown)
    assert found["point"]["seconds"] == pytest.approx(plan.prediction.seconds, rel=1e-9)
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(
        plan.prediction.seconds, rel=1e-6
    )
    assert sum(plan.prediction.parts.values()) == pytest.approx(plan.prediction.seconds, rel=1e-6)
    faster = next(c for c in found["changes"] if c["name"] == "fast compute 2x")
    assert faster["own"] <= found["point"]["seconds"]


@pytest.mark.slow
def test_a_plan_that_is_slower_than_the_search_s_is_told_so(run, cluster, tmp_path):
    even = tmp_path / "even.json"
    data_parallel(32, processes=4).save(even)
    code, shown, err = run("explain", even, "--recipe", RECIPE, "--cluster", cluster)
    assert code == 0, err
    assert "ranks in the order of the mesh: 2 fast, 2 slow" in shown
    assert "among the executable plans the search would take" in shown
    measured = ("--guidelines", "--measure")
    code, _, err = run("explain", even, "--recipe", RECIPE, "--cluster", cluster, *measured)
    assert code == 1
    assert "devices of several types" in err


# -- guidelines and sources -----------------------------------------------------------------------


def test_the_lemmas_are_answered_for_each_type_and_for_the_group(run, work, cluster, tmp_path):
    even = tmp_path / "even.json"
    plan = data_parallel(32, processes=4)
    plan.save(even)
    words = ("explain", even, "--recipe", RECIPE, "--cluster", cluster, "--guidelines")
    code, shown, err = run(*words, "--json")
    assert code == 0, err
    answers = {one["question"]: one for one in json.loads(shown)["advice"]}
    question = question_of(work, cluster)
    jobs = {kind: AdviceRequest(PlanSearch(question.of(kind)), 4, 8) for kind in ("fast", "slow")}
    for kind, job in jobs.items():
        lemma = answers[
            f"[as if all 4 devices were {kind}] How many devices are worth their while?"
        ]
        assert lemma["numbers"]["R_O"] == pytest.approx(job.overhead / job.compute, rel=1e-12)
    each = {kind: job.alone[0] / 8 for kind, job in jobs.items()}
    shares = answers["How should the samples be shared among them, with data parallelism?"][
        "numbers"
    ]
    assert (shares["sample fast"], shares["sample slow"]) == (each["fast"], each["slow"])
    ways = [(n, 16 - n) for n in range(1, 16)]  # of each of two, and two
    least = min(max(a * each["fast"], b * each["slow"]) for a, b in ways)
    assert shares["passes"] == pytest.approx(least, rel=1e-12)
    assert 2 * (shares["share fast"] + shares["share slow"]) == 32
    assert shares["even"] == pytest.approx(8 * each["slow"], rel=1e-12)
    worth = answers["How many of the fastest devices are they worth?"]["numbers"]
    assert worth["G"] == pytest.approx(2 + 2 * each["fast"] / each["slow"], rel=1e-12)
    ratio = max(job.overhead for job in jobs.values()) / jobs["fast"].compute
    assert worth["alpha_G"] == pytest.approx((1 + ratio) / (1 + worth["G"] * ratio), rel=1e-12)
    filled = answers["How well are the plan's own devices filled?"]["numbers"]
    point = point_of(plan, PlanSearch(question), ("fast",) * 2 + ("slow",) * 2)
    assert filled["idle slow"] == point.idle("slow") < filled["idle fast"] == point.idle("fast")
    code, shown, _ = run(*words)
    assert "--measure" not in shown


def test_of_one_type_in_use_the_answers_are_those_of_one_type(run, work, cluster, tmp_path):
    two = tmp_path / "two.json"
    data_parallel(32, processes=2).save(two)
    words = ("explain", two, "--recipe", RECIPE, "--cluster", cluster, "--guidelines")
    code, shown, err = run(*words, "--json")
    assert code == 0, err
    first, *answers = json.loads(shown)["advice"]
    assert set(first["numbers"]) == {"idle fast", "step", "stage", "seconds"}
    own, _ = advice_of(AdviceRequest(PlanSearch(question_of(work, cluster).of("fast")), 2, 16))
    assert answers[: len(own)] == [asdict(one) for one in own]


@pytest.mark.slow
def test_the_sources_are_those_of_each_type(run, cluster, tmp_path):
    even = tmp_path / "even.json"
    data_parallel(32, processes=4).save(even)
    words = ("explain", even, "--recipe", RECIPE, "--cluster", cluster)
    code, shown, err = run(*words, "--sources")
    assert code == 0, err
    for kind in ("fast", "slow"):
        assert f"where the numbers of {kind} come from:" in shown
    assert set(json.loads(run(*words, "--json")[1])["sources"]) == {"fast", "slow"}
