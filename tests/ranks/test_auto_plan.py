"""ranks: `headway train --plan auto`: what the search says is what runs and equals the serial run,
and its prediction stands beside the measured step in log lines and report."""

from __future__ import annotations

import json
import re

import pytest

from headway.cli.optimizer_cost import with_optimizer
from headway.cluster import read_cluster
from headway.cost.presets import machine_of
from headway.plan import Plan
from headway.planner.automatic import Limits, decide
from headway.planner.operators import Workload
from headway.planner.search import Question
from headway.report import write_report
from headway.run.model_graph import graph_of
from headway.run.recipe_file import load_recipe
from support.commands import HEADWAY, command

CLUSTER = """
nodes = 1
processes = 2
[[levels]]
name = "node"
nodes = 1
rate = "{rate}"
latency = "{latency}"
[devices.cpu]
peak = {{ fp32 = "50 GFLOP/s" }}
memory = "{memory}"
memory_rate = "10 GB/s"
dispatch = "{dispatch}"
sharpness = 1.0
update = "1 ns"
"""
USUAL = {"rate": "1 GB/s", "latency": "100 us", "memory": "4 GiB", "dispatch": "5 us"}
RECIPE = "support.recipes:mlp"


def described(folder, **numbers):
    path = folder / "cluster.toml"
    path.write_text(CLUSTER.format(**USUAL | numbers))
    return path


def found_by_search(path):
    """The same question, asked directly."""
    recipe = load_recipe(RECIPE)
    cluster = read_cluster(path)
    graph, samples, batch = graph_of(RECIPE)
    question = Question(
        work=Workload(graph=graph, samples=samples),
        machine=with_optimizer(machine_of(cluster), cluster, recipe),
        devices=(2,),
        batch=batch,
    )
    return decide(question, Limits(microbatch=recipe.microbatch), cluster)


def trained(folder, cluster, *more):
    words = ("train", RECIPE, "-n", "2", "--plan", "auto", "--cluster", str(cluster))
    return command(*HEADWAY, *words, "--directory", str(folder / "run"), *more, cwd=folder)


def predicted_in(line):
    return re.search(r"\(predicted ([^,]+), ", line).group(1)


def test_the_plan_is_that_of_the_search_and_its_prediction_is_shown(tmp_path):
    cluster = described(tmp_path)
    done = trained(tmp_path, cluster)
    assert done.code == 0, done.err
    expected = found_by_search(cluster)
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.hash == expected.plan.hash
    assert plan.prediction == expected.plan.prediction
    assert sum(plan.prediction.parts.values()) == pytest.approx(plan.prediction.seconds)
    lines = [line for line in done.err.splitlines() if line.startswith("step ") and "loss " in line]
    steps = [line for line in lines if "samples/s" in line]
    assert steps
    assert all("(predicted " in line for line in steps), steps
    assert "compute " in steps[-1], steps  # the parts of a step are known a moment after it
    assert "plan auto: " in done.err
    assert "next best: " in done.err
    assert "was not measured" in done.err  # a file written by hand
    page = write_report(tmp_path / "run").html.read_text()
    assert "Predicted and measured" in page
    assert "measured, below its prediction" in page
    assert plan.prediction.cluster in page
    start = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert start["predicted"]["seconds"] == plan.prediction.seconds
    # The plan runs again from its file alone, and is equal to the serial run.
    words = ("verify", RECIPE, "--plan", str(tmp_path / "run" / "plan.json"))
    verified = command(*HEADWAY, *words, cwd=tmp_path)
    assert verified.code == 0, verified.out + verified.err
    # A wrong price in the file is what the lines say.
    wrong = json.loads((tmp_path / "run" / "plan.json").read_text())
    wrong["prediction"]["seconds"] = 42.0
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    words = ("train", RECIPE, "-n", "2", "--plan", "wrong.json", "--directory", "other")
    again = command(*HEADWAY, *words, cwd=tmp_path)
    assert again.code == 0, again.err
    said = [line for line in again.err.splitlines() if "samples/s" in line]
    assert said
    assert {predicted_in(line) for line in said} == {"42 s"}
    assert Plan.load(tmp_path / "wrong.json").hash == plan.hash


def test_what_does_not_fit_is_refused_and_falls_back_only_if_told(tmp_path):
    cluster = described(tmp_path, memory="64 B")
    done = trained(tmp_path, cluster)
    assert done.code != 0
    assert "no plan fits" in done.err
    assert not (tmp_path / "run" / "events.jsonl").exists()
    told = trained(tmp_path, cluster, "--fallback")
    assert told.code == 0, told.err
    assert "data parallelism instead" in told.err
    assert Plan.load(tmp_path / "run" / "plan.json").data_degree == 2
