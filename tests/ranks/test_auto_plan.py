"""ranks: `headway train --plan auto`: what the search says is what runs and equals the serial run,
and its prediction stands beside the measured step in log lines and report."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from headway.api.plan_selection import AutoPlanSearch
from headway.api.recipe_workload import with_measured_optimizer
from headway.cluster import read_cluster
from headway.cluster.measurement import DeviceReadings, LinkReadings, RankReadings
from headway.cost.machines import machine_of
from headway.errors import RecipeError
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.export.auto import RecipeLimits, find_auto_plan
from headway.planner.export.prediction import hash_of
from headway.planner.search.request import PlanRequest
from headway.plans import Plan
from headway.plans.prediction import PlanProvenance
from headway.report import write_report
from headway.run.distributed.failure_record import read_failures
from headway.run.distributed.world import World
from headway.run.measure import cluster as measuring
from headway.run.measure.recipe_model import recipe_graph
from headway.run.recipe.factory import load_recipe
from support.commands import (
    HEADWAY,
    TORCHRUN,
    command,
    events,
    headway_here,
    newest_tensors,
    none_left,
)
from support.ranks import run_ranks

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


def found_by_search(path, precision="float32"):
    """The same question, asked directly."""
    recipe = load_recipe(RECIPE, (f"precision='{precision}'",))
    cluster = read_cluster(path)
    graph, samples, batch, _ = recipe_graph(RECIPE)
    question = PlanRequest(
        work=PlanningWorkload(graph=graph, samples=samples),
        machine=with_measured_optimizer(machine_of(cluster), cluster, recipe),
        devices=(2,),
        batch=batch,
    )
    return find_auto_plan(question, RecipeLimits(microbatch=recipe.microbatch), cluster)


def trained(folder, cluster, *more):
    words = ("train", RECIPE, "-n", "2", "--plan", "auto", "--cluster", str(cluster))
    return headway_here(*words, "--directory", str(folder / "run"), *more, cwd=folder)


def predicted_in(line):
    return re.search(r"\(predicted ([^,]+), ", line).group(1)


def test_the_plan_is_that_of_the_search_and_its_prediction_is_shown(tmp_path):
    cluster = described(tmp_path)
    done = trained(tmp_path, cluster)
    assert done.code == 0, done.err
    expected = found_by_search(cluster)
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.hash == expected.plan.hash
    assert plan.prediction.asked == PlanProvenance(recipe=RECIPE, cluster="../cluster.toml")
    assert replace(plan.prediction, asked=None) == expected.plan.prediction
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
    verified = headway_here(*words, cwd=tmp_path)
    assert verified.code == 0, verified.out + verified.err
    # A wrong price in the file is what the lines say.
    wrong = json.loads((tmp_path / "run" / "plan.json").read_text())
    wrong["prediction"]["seconds"] = 42.0
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    words = ("train", RECIPE, "-n", "2", "--plan", "wrong.json", "--directory", "other")
    again = headway_here(*words, cwd=tmp_path)
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


def under_torchrun(folder, *more, recipe=RECIPE):
    words = ("--standalone", "--nproc-per-node", "2", "-m", *HEADWAY[2:], "train", recipe)
    options = ("--plan", "auto", "--device", "cpu", "--directory", str(folder / "run"), *more)
    return command(*TORCHRUN, *words, *options, cwd=folder)


@pytest.mark.slow
def test_under_torchrun_rank_0_searches_for_all(tmp_path):
    """The plan, what is kept and shown of it, and the parameters are those without torchrun."""
    cluster = described(tmp_path)
    double = ("--set", "precision='float64'")
    done = under_torchrun(tmp_path, "--cluster", str(cluster), *double)
    assert done.code == 0, done.err
    expected = found_by_search(cluster, "float64").plan
    plan = Plan.load(tmp_path / "run" / "plan.json")
    expected = replace(expected, memory=replace(expected.memory, precision="float64"))
    assert plan == expected
    assert done.err.count("next best: ") == 1  # one rank has searched
    assert done.err.count("was not measured") == 1
    said = [line for line in done.err.splitlines() if "samples/s" in line]
    assert said
    assert all("(predicted " in line for line in said), said
    (start,) = events(tmp_path / "run", "start")
    assert start["predicted"]["seconds"] == plan.prediction.seconds
    assert start["ranks"] == 2
    words = ("train", RECIPE, "-n", "1", "--directory", "alone", *double)
    assert headway_here(*words, cwd=tmp_path).code == 0
    serial = newest_tensors(tmp_path / "alone")
    for name, tensor in newest_tensors(tmp_path / "run").items():
        assert torch.allclose(tensor, serial[name], rtol=1e-12, atol=1e-12), name


@pytest.mark.slow
def test_under_torchrun_an_error_of_rank_0_ends_all_and_is_told_once(tmp_path):
    cluster = described(tmp_path, memory="64 B")
    done = under_torchrun(tmp_path, "--cluster", str(cluster))
    assert done.code != 0
    assert done.err.count("HW-2002") == 1
    assert not (tmp_path / "run" / "events.jsonl").exists()
    failures = sorted((tmp_path / "run" / "failures").glob("*.json"))
    kinds = [(f["kind"], f["secondary"]) for f in (json.loads(p.read_text()) for p in failures)]
    assert kinds[0] == ("NothingFits", False)
    assert all(echo for _, echo in kinds[1:])  # where torchrun has not ended them before


FAILS_ON_RANK_1 = """
import os, threading
from dataclasses import replace
from support.recipes import mlp
from support.tiny_models import Mlp
from support.sampling import sampled

def model():
    threading.Event().wait(300)  # a long search of rank 0

def recipe():
    if os.environ["RANK"] == "1":
        raise ValueError("no data here")
    return replace(mlp(), model=model)
"""


@pytest.mark.slow
def test_under_torchrun_an_error_of_rank_1_ends_the_search_of_rank_0(tmp_path):
    """In time, told once and with the rank; the deadline of `command` is far below the search's."""
    (tmp_path / "failing.py").write_text(FAILS_ON_RANK_1)
    cluster = described(tmp_path)
    done = under_torchrun(tmp_path, "--cluster", str(cluster), recipe="failing:recipe")
    assert done.code != 0
    (said,) = [line for line in done.err.splitlines() if line.startswith("HW-")]
    assert said.startswith(f"{RecipeError.code} rank 1, failing.py"), said
    assert said.endswith("ValueError: no data here")
    records = {record.rank: record for record in read_failures(tmp_path / "run", 0)}
    assert not records.pop(1).secondary
    assert all(record.secondary and "rank 1" in record.what for record in records.values())
    assert none_left(tmp_path / "run")


def readings(world):
    """As `measure_in` would give them for a world of this size, and nothing is measured."""
    sizes = [2.0**power for power in range(10, 25, 2)]
    shapes = [(n, n, k) for n in (256, 512) for k in (64, n)]
    kernels = DeviceReadings(
        name="cpu",
        adds=True,
        products={"fp32": tuple((*shape, 5e-6 + math.prod(shape) / 2.5e10) for shape in shapes)},
        streams=tuple((size, 3e-6 + size / 1e10) for size in (1e6, 1e7, 1e8)),
        dispatch=5e-6,
        kernel=0.0,
        updates={"AdamW": (9e-9, 6e-9, 3e-9), "clip": (3e-9, 2e-9, 1e-9)},
        memory=4e9,
        spread=1.02,
    )
    inside = LinkReadings(
        ranks=world.ranks,
        sums=tuple((size, 1e-4 + size / 1e9) for size in sizes),
        messages=tuple((size, 5e-5 + size / 1e9) for size in sizes),
    )
    return world.ranks * [
        RankReadings(
            node="here",
            kernels=kernels,
            inside=inside if world.ranks > 1 else None,
            between=None,
            busy=0.0,
            threads=1,
        )
    ]


def measured_plan(world):
    """In a world that measures itself: the plan of this rank, and how often it has measured."""
    calls, told = [], io.StringIO()
    measuring.measure_in = lambda here: calls.append(here) or readings(here)
    auto = AutoPlanSearch(
        recipe=RECIPE, overrides=(), cluster="measure", device="cpu", fallback=False
    )
    find = partial(auto.find_in, World.adopt(), directory=world.directory / "run")
    notes = logging.StreamHandler(told)
    logging.getLogger("headway").addHandler(notes)
    logging.getLogger("headway").setLevel("INFO")
    with contextlib.closing(notes):
        plans = [find(resume=False), find(resume=True)]
    assert told.getvalue().count("as before") == (world.rank == 0)
    kept = world.directory / "run"
    assert Plan.load(kept / "plan.json") == plans[0]
    assert hash_of(read_cluster(kept / "cluster.toml")) == plans[0].prediction.cluster
    return plans, len(calls)


@pytest.mark.parametrize("size", [1, 2])
def test_all_ranks_measure_once_and_get_one_plan(size):
    (plans, calls), *others = run_ranks(size, measured_plan)
    assert all(other == (plans, calls) for other in others)
    assert calls == 1
    assert plans[0] == plans[1]
    assert plans[0].ranks == size
