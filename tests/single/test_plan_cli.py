"""single: `headway plan RECIPE`: words, JSON, pictures, money, forced choices, refusals."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

import headway
from headway.api.plan_request import parse_device_counts
from headway.cli.main import main
from headway.cli.plan.output import format_money
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.alternatives import nearest_plans, plan_figures
from headway.planner.explain.sources import FORMULAS, machine_numbers
from headway.planner.search.branch_and_bound import find_plans
from headway.planner.search.request import (
    PlanRequest,
    parse_force,
    resolve_force,
    restrict_to_force,
)
from headway.plans import Plan, data_parallel
from headway.report.pictures.canvas import COLOURS
from headway.report.pictures.pareto_frontier import frontier_plot, frontier_png, frontier_svg
from headway.run.measure.recipe_model import recipe_graph

RECIPE = "support.recipes:stack"
CLUSTER = ("--cluster", "p3.16xlarge")
BATCH = 32


@pytest.fixture(scope="module")
def work():
    graph, samples = recipe_graph(RECIPE)[:2]
    return PlanningWorkload(graph=graph, samples=samples)


@pytest.fixture(scope="module")
def question(work):
    machine = machine_of(of_preset("p3.16xlarge"))
    return PlanRequest(work=work, machine=machine, devices=(1, 2, 4), batch=BATCH)


@pytest.fixture(scope="module")
def outcome(question):
    return find_plans(question)


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main(["plan", RECIPE, *(() if "--cluster" in words else CLUSTER), *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


# -- words and JSON -------------------------------------------------------------------------------


def test_the_answer_in_words(run, tmp_path):
    out = tmp_path / "plan.json"
    code, shown, err = run("--devices", "1..4", "--runnable", "--out", str(out))
    assert code == 0, err
    assert "chosen for frontier" in shown
    assert "nearest alternatives, against the chosen plan:" in shown
    assert "whose price is not known" in shown
    assert '--price "2.5 USD/h"' in shown
    assert "peak memory of this process" in err
    assert Plan.load(out).ranks in (1, 2, 4)


def test_a_plan_that_the_executor_cannot_run_is_written_with_a_warning(tmp_path, capsys):
    """Channels of convolutions may be split by the search, but split layers keep them whole."""
    recipe, out = "support.recipes:normalised", tmp_path / "plan.json"
    split = (*CLUSTER, "--devices", "2", "--force", "conv=split")
    assert main(["plan", recipe, *split, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    lacks = "a tensor split of batch_norm, a tensor split of conv2d"
    assert f"  {lacks}\n" in shown.out
    said = f"the executor cannot run {out} as it is planned: it lacks {lacks}"
    assert f"warning: {said}" in shown.err
    assert Plan.load(out).group_degree == 2
    found = headway.plan(recipe, "p3.16xlarge", devices=2, force=("conv=split",))
    with pytest.warns(UserWarning, match=re.escape(said)):
        found.save(out)


def test_a_tensor_axis_that_splits_nothing_is_not_called_runnable(capsys):
    words, recipe = ("--devices", "2", "--force", "*=replicate"), "support.recipes:normalised"
    found = headway.plan(recipe, "p3.16xlarge", devices=2, force=("*=replicate",))
    axes = [point for point in found.frontier if point.degrees.tensor > 1]
    assert axes, "the search has no such plan: then there is nothing to see"
    for point in axes:
        assert found.runs(point) == "a layer that the tensor axis splits"
    assert main(["plan", recipe, *CLUSTER, *words]) == 0
    assert "the tensor axis splits no parameters" in capsys.readouterr().out


def test_json_says_all_of_it_and_always_the_same(run):
    words = ("--devices", "1..4", "--json", "--price", "3.6 EUR/h")
    code, shown, _ = run(*words)
    assert code == 0
    found = json.loads(shown)
    assert (found["format"], found["version"]) == ("headway plan search", 1)
    best = found["points"][found["chosen"]]
    assert best["seconds"] == min(point["seconds"] for point in found["points"])
    for point in found["points"]:
        assert point["money"]["step"] == pytest.approx(
            point["devices"] * point["seconds"] * 3.6 / 3600, rel=1e-12
        )
        assert point["money"]["thousand_steps"] == 1000 * point["money"]["step"]
        parts = sum(part["seconds"] for part in point["parts"])
        assert parts == pytest.approx(point["seconds"], rel=1e-6)
        assert 0 < point["mfu"] < 1
    assert found["question"]["currency"] == "EUR"
    assert found["question"]["steps"]["stop"] > 0
    whole = found["question"]["steps"]["stop"] * best["money"]["step"]
    assert best["money"]["run"] == pytest.approx(whole, rel=1e-12)
    assert {call["kind"] for stage in found["collectives"] for call in stage} or best[
        "devices"
    ] == 1
    assert run(*words)[1] == shown


def test_money_in_words(run):
    _, shown, _ = run("--devices", "2", "--price", "2 USD/h")
    head = shown.splitlines()[0]
    assert "a step" in head
    assert "1,000 steps" in head
    assert "whole run" in head
    assert re.search(r"1,000 steps cost \S+ USD, an epoch of .* the whole run of", shown)
    assert [format_money(v, "X") for v in (12345.6, 3.214, 0.004121)] == [
        "12,346 X",
        "3.21 X",
        "0.00412 X",
    ]


def test_the_cheapest_is_the_same_for_any_price(question):
    """The devices are alike: without a price the fewest device-seconds are chosen."""
    free = find_plans(replace(question, objective="cheapest"))
    paid = find_plans(replace(question, objective="cheapest", price=7.5))
    assert free.best == paid.best
    costs = [p.seconds * p.devices for p in find_plans(question).points]
    assert free.best.seconds * free.best.devices <= min(costs) * (1 + 1e-12)


def test_a_price_in_the_cluster_file(run, tmp_path, capsys):
    assert main(["cluster", "show", "p3.16xlarge", "--toml"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "cluster.toml"
    path.write_text(text.replace("[devices.v100-16gb]", '[devices.v100-16gb]\nprice = "3 USD/h"'))
    code, shown, err = run("--cluster", str(path), "--devices", "2")
    assert code == 0, err
    assert "USD" in shown


# -- alternatives and provenance ------------------------------------------------------------------


def test_nearest_alternatives(outcome):
    found = nearest_plans(outcome)
    assert 0 < len(found) <= 4
    for one in found:
        assert one.point != outcome.best
        assert one.point.seconds == pytest.approx((1 + one.seconds) * outcome.best.seconds)
        assert one.point.bytes == pytest.approx((1 + one.bytes) * outcome.best.bytes)
        assert one.point.devices == one.devices + outcome.best.devices
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    alone = nearest_plans(replace(outcome, points=(outcome.best,), chosen=0))
    assert alone
    assert all(one.step for one in alone)  # one step away in a degree


def test_the_overhead_on_one_device_is_the_update(question):
    """R_O of one device without a pipeline: what the passes do not take."""
    found = find_plans(replace(question, devices=(1,), objective="fastest"))
    point = found.best
    passes = point.degrees.microbatches * point.stages[0].seconds
    rest = (point.seconds - passes) / passes
    assert plan_figures(found.search, point).overhead == pytest.approx(rest, rel=1e-9)


def test_every_number_has_a_source_and_every_formula_its_numbers(question):
    known = {one.name: one for one in machine_numbers(replace(question, price=2.0))}
    assert all(one.source and one.value for one in known.values())
    levels = {name.split(".")[1] for name in known if name.startswith("links.")}
    assert levels == {level.name for level in question.machine.network.levels}
    for formula in FORMULAS:
        assert formula.paper
        for name in formula.uses:
            pattern = re.escape(name).replace(r"\*", "[^.]+")
            assert any(re.match(pattern, other) for other in known), name


def test_explain_says_where_numbers_come_from(tmp_path, capsys):
    data_parallel(BATCH, processes=2).save(tmp_path / "plan.json")
    words = ["explain", str(tmp_path / "plan.json"), "--recipe", RECIPE, *CLUSTER, "--sources"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "where the numbers come from:" in shown
    assert "Thakur, Rabenseifner and Gropp 2005" in shown
    assert "NVIDIA V100 datasheet" in shown
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sources"]
    assert {one["figure"] for one in found["formulas"]} == {one.figure for one in FORMULAS}


# -- pictures -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_pictures_show_the_same(outcome, tmp_path, run):
    shown = frontier_plot(outcome, model="stack", cluster="p3.16xlarge")
    svg = frontier_svg(shown)
    assert svg == frontier_svg(shown)
    root = ET.fromstring(svg)
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(outcome.points)
    assert "prefers-color-scheme: dark" in svg
    assert COLOURS["card"][1] in svg
    assert "chosen: " in svg
    png = frontier_png(shown)
    assert png == frontier_png(shown)
    assert png.startswith(b"\x89PNG")
    files = tmp_path / "f.svg", tmp_path / "f.png"
    assert run("--devices", "1..4", "--svg", str(files[0]), "--png", str(files[1]))[0] == 0
    assert f"{RECIPE} on p3.16xlarge" in files[0].read_text()
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert run("--svg", str(tmp_path / "no" / "f.svg"))[0] == 1


# -- what is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("8", (8,)), ("6,12", (6, 12)), ("1..8", (1, 2, 4, 8)), ("3..9", (3, 4, 8, 9))],
)
def test_numbers_of_devices(text, numbers):
    assert parse_device_counts(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "a", "1..x", "8..2", "-1..4", "1,,2"])
def test_no_numbers_of_devices(text):
    with pytest.raises(ValueError):
        parse_device_counts(text)


def test_all_problems_together(run):
    code, _, err = run(
        *("--devices", "x", "--memory", "much", "--price", "3"),
        *("--force", "0", "--force", "0=spit", "--force", "0=split", "--force", "0=replicate"),
        *("--schedules", "1f1c"),
    )
    assert code == 1
    for part in (
        "--devices x",
        "'much'",
        "'3'",
        "MODULES=HOW",
        "did you mean split",
        "forced, too",
    ):
        assert part in err
    assert "did you mean 1f1b" in err
    code, _, err = run("--devices", "1..99", "--force", "nothing=split")
    assert code == 2
    assert "the cluster has 8" in err
    assert "no module with parameters has this name" in err


def test_forced_choices(work, question):
    assert parse_force(["a=split:tensor", "b=split:o", "a=split:tensor"]) == (
        (("a", "split:tensor"), ("b", "split:o")),
        [],
    )
    for word in ("a=split:", "a=replicate:o", "=split", "a=stage:2"):
        assert parse_force([word])[1], word
    assert parse_force(["a=stage", "a=split"]) == ((("a", "stage"), ("a", "split")), [])
    assert "no stage can begin there" in resolve_force(work, (("nothing", "stage"),))[1][0]
    names = [o.module for o in work.graph.operators if o.parameters]
    assert resolve_force(work, ((names[0], "split"),)) == (((names[0], "split"),), [])
    assert resolve_force(work, (("nothing", "split"),))[1]
    forced, problems = restrict_to_force(replace(question, force=((names[0], "split"),)), (1, 2, 4))
    assert not problems
    assert set(forced.tensor) <= {2, 4}
    assert find_plans(forced).best.degrees.tensor > 1
    assert restrict_to_force(replace(question, force=(("*", "replicate"),)), (1, 2))[0].tensor == (
        1,
        2,
    )
    assert restrict_to_force(replace(question, force=((names[0], "split:nothing"),)), (1, 2))[1]
    assert restrict_to_force(replace(question, force=((names[0], "split"),)), (1,))[1]


def test_nothing_fits(run):
    code, shown, err = run("--devices", "1", "--memory", "1 KiB")
    assert code == 2
    assert not shown
    assert err.startswith("HW-2002 no plan fits")
    assert "Each of these would help" in err
    least = re.search(r'--memory "(\d+) B"', err)
    code, _, err = run("--devices", "1", "--memory", f"{least.group(1)} B")
    assert code == 0, err
    assert run("--devices", "1", "--memory", f"{int(least.group(1)) - 1} B")[0] == 2


def test_memory_without_a_unit_is_refused(run):
    code, _, err = run("--devices", "1", "--memory", "80")
    assert code == 1
    assert '"80 GiB"' in err


def test_more_memory_than_a_device_has_is_warned_of(run):
    code, _, err = run("--devices", "1", "--memory", "99 GiB")
    assert code == 0
    assert "is more than the" in err


def test_the_bundled_recipes_errors_are_not_bugs(run):
    for words in (("--memory", "x"), ("--devices", "x"), ("--price", "x")):
        assert "HW-9000" not in run(*words)[2]
