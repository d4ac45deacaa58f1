"""ranks: pipelines that are cut by measured time or by hand equal the serial run."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from headway.api.schedule_table import recipe_overrides
from headway.cli.main import main
from headway.errors import HeadwayError, PlanError, RecipeError
from headway.plans import PipelinePlan, Plan, explain, pipelined
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.pipeline.stage_ownership import partition_model, user_partition
from headway.run.recipe.check import check_recipe
from headway.run.recipe.factory import load_recipe
from headway.verification.compare import compare
from headway.verification.distributed_run import record_in_world
from headway.verification.recording import Recording, VerifyJob
from headway.verification.serial_run import record_serial
from support.commands import events, headway_here
from support.cuts import Deciding, Uneven
from support.ranks import run_ranks
from support.tiny_models import Points, cross_entropy


def example():
    points = Points(4)
    return points.x, points.y


def cut_both_ways(world):
    """Names called by each stage, what was remarked, and whether all was left as it was."""
    torch.manual_seed(world.rank)
    model, found, remarks = nn.Sequential(*Uneven(), nn.BatchNorm1d(4)), [], []
    model[0].weight.grad = torch.ones(96, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    for balance in ("parameters", "time"):
        stages = partition_model(
            model,
            cross_entropy,
            example(),
            how=PipelinePlan(balance=balance),
            stages=3,
            arithmetic=nullcontext,
            remark=remarks.append,
        )
        found.append([stage.calls for stage in stages])
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(96, 6))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    return found, remarks


def test_a_slow_module_is_alone_when_time_is_balanced():
    results = run_ranks(2, cut_both_ways)
    assert results[0] == results[1]  # times of rank 0, also in what is said
    (by_parameters, by_time), remarks = results[0]
    assert by_parameters[0] == ("0",)
    assert by_parameters != by_time
    assert by_time[1] == ("5",)
    assert len(remarks) == 1
    assert remarks[0].startswith("cut by measured time into stages of ")
    assert remarks[0].endswith(': cut = ["5", "6"]')


# -- equal to the serial run ---------------------------------------------------------------------


def split(world, job, target):
    record_in_world(World.adopt(), job, world.directory / "split")
    if world.rank == 0:
        (world.directory / "split").rename(target)


@pytest.mark.parametrize("way", ["by time", "by hand", "by time, searched table"])
def test_the_split_run_equals_the_serial_one(tmp_path, way):
    recipe, overrides = "uneven", ("pipeline.balance=time",)
    if way == "by hand":
        recipe, overrides = "deciding", ("pipeline.by_hand=support.cuts:in_two",)
    if way == "by time, searched table":
        table = ("--stages", "2", "--microbatches", "4", "--forward", "1,1.5", "--placement", "v")
        path = tmp_path / "x.csv"
        assert main(["schedule", "search", *table, "--seed", "1", "--out", str(path)]) == 0
        overrides = (*overrides, *recipe_overrides(path))
    job = VerifyJob(recipe=f"support.cuts:{recipe}", overrides=overrides)
    serial, parallel = tmp_path / "serial", tmp_path / "parallel"
    record_serial(LaunchEnv(), job, serial)
    run_ranks(2, split, job, str(parallel))
    comparison = compare(Recording.load(serial), Recording.load(parallel))
    kinds = {d.kind for d in comparison.differences}
    assert {"loss", "gradient", "parameter", "optimizer"} <= kinds
    assert comparison.equal, str(comparison.first)


@pytest.mark.timeout(240)
def test_the_user_sees_where_the_model_was_cut(tmp_path):
    words = ("--processes", "2", "--set", "pipeline.balance=time", "--directory", "run")
    done = headway_here("train", "support.cuts:uneven", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    (note,) = events(tmp_path / "run", "note")
    assert note["text"].startswith("cut by measured time into stages of ")
    assert note["text"] in done.err


# -- what rank 0 cannot measure ------------------------------------------------------------------


def cut_with_a_fault(world, error):
    """What a rank raises where rank 0 cannot measure; rank 0 alone measures."""

    def raising(model, data):
        raise error

    try:
        partition_model(
            Uneven(),
            raising if world.rank == 0 else cross_entropy,
            example(),
            how=PipelinePlan(balance="time"),
            stages=2,
            arithmetic=nullcontext,
            remark=print,
        )
    except Exception as raised:
        return type(raised).__name__, str(raised)
    return None


def test_what_rank_0_raises_while_it_measures_reaches_all_ranks():
    own, other = run_ranks(2, cut_with_a_fault, KeyError("my own"))
    assert own == ("KeyError", "'my own'")
    assert other[0] == "WorkerFailed"
    assert "KeyError: 'my own'" in other[1]
    own, other = run_ranks(2, cut_with_a_fault, PlanError("not so", problems=["because"]))
    assert own[0] == other[0] == "PlanError"
    assert "not so" in other[1]


# -- what is refused -----------------------------------------------------------------------------


def test_all_that_is_wrong_with_a_chain_is_listed():
    with pytest.raises(PlanError) as error:
        user_partition("support.cuts:misspelt", Deciding(), 2)
    assert error.value.problems == (
        "it has 3 stages",
        "stage 0: there is no module entre; did you mean enter?",
        "stage 0: 3 is neither a module nor the name of one",
        "stage 1 is empty",
    )
    assert "cuts.py:" in error.value.where
    with pytest.raises(PlanError, match="it returned NoneType, not a list of lists"):
        user_partition("support.cuts:nothing", Deciding(), 2)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("support.cuts:in_tow", "has no in_tow; did you mean in_two"),
        ("support.cust:in_two", "module support.cust is not found"),
        ("support.cuts:raising", "raised KeyError: 'my own'"),
        ("support.cuts:number", "not callable"),
    ],
)
def test_a_wrong_reference_is_named_with_its_place(reference, said):
    with pytest.raises(RecipeError, match=said):
        user_partition(reference, Deciding(), 2)


def test_a_function_beside_the_recipe_is_found_when_the_model_is_cut(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text('def chain(model):\n    return [["enter"], ["leave"]]\n')
    (tmp_path / "recipe.toml").write_text(
        'recipe = "support.cuts:deciding"\n[pipeline]\nby_hand = "beside:chain"\n'
    )
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    recipe = load_recipe(str(tmp_path / "recipe.toml"))
    assert recipe.pipeline is not None
    chain = user_partition(recipe.pipeline.by_hand, Deciding(), 2)
    assert chain == [["enter"], ["leave"]]
    monkeypatch.delitem(sys.modules, "beside")


def test_foreign_parameters_are_found_when_the_model_is_cut():
    chain = PipelinePlan(by_hand="support.cuts:foreign")
    with pytest.raises(PlanError, match="Linear has parameters that the model does not have"):
        partition_model(
            Deciding(),
            cross_entropy,
            example(),
            how=chain,
            stages=2,
            arithmetic=nullcontext,
            remark=print,
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("pipeline.by_hand=support.cuts:in_tow",), "did you mean in_two"),
        (("pipeline.by_hand=support.cuts",), "not of the form module:name"),
        (("pipeline.balance=tiem",), "tiem"),
    ],
)
def test_a_recipe_is_refused_before_anything_starts(changes, said):
    with pytest.raises(HeadwayError, match=said):
        check_recipe("support.cuts:deciding", changes)
    with pytest.raises(RecipeError, match="number is an int, not a class or function"):
        load_recipe("support.cuts:deciding", ("pipeline.by_hand=support.cuts:number",))


def test_ways_to_cut_that_contradict_each_other_are_refused_together():
    how = PipelinePlan(balance="time", by_hand="my_module", cut=("enter",))
    with pytest.raises(PlanError) as error:
        pipelined(12, processes=2, stages=2, pipeline=how)
    assert error.value.problems == (
        'pipeline: cut and balance = "time" and by_hand each say where to cut; keep one of them',
        "pipeline.by_hand is 'my_module'; it has the form module:function",
    )


def test_a_plan_says_how_it_is_cut(tmp_path):
    for how, said in (
        (PipelinePlan(balance="time"), "cut at equal times, measured when the model is cut"),
        (PipelinePlan(by_hand="my:chain"), "cut at my:chain"),
    ):
        plan = pipelined(12, processes=2, stages=2, pipeline=how)
        assert said in explain(plan)
        (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
        assert Plan.load(tmp_path / "plan.json") == plan
