"""single: `headway schedule search` and `choose`, and costs of each stage on the command line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from headway.cli.schedule.search import RIVALS
from headway.cluster.link import Link
from headway.cost.pipeline_model import ChimeraSetting, EqualLayers
from headway.cost.pipeline_model import rank_chimera_candidates as candidates
from headway.plans import PipelinePlan, pipelined
from headway.run.measure.recipe_model import measure_model_costs
from headway.schedule.check import schedule_violations
from headway.schedule.csv_format import read_table
from support import schedule_command
from support.golden import check_golden

UNEQUAL = ("--forward", "1,1.5,1,1", "--latency", "0.1")
RANKS = {"ranks": 32, "memory": "16 GiB", "bandwidth": "10 GB/s", "latency": "2 us"}
BERT = {
    "batch": 512, "layers": 48, "forward": "0.8 ms", "activation": "512 KiB", "held": "11.5 MB",
    "weights": "55.8 MB", **RANKS,
}  # fmt: skip


def words_of(options):
    return "choose", *(word for name, value in options.items() for word in (f"--{name}", value))


def bert(**changed):
    return words_of(BERT | changed)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


run, facts = schedule_command.run, schedule_command.facts


# -- costs of each stage -------------------------------------------------------------------------


def test_equal_numbers_for_each_stage_are_one_number(facts):
    one = facts("show", "zbv", "--forward", 1, "--backward", 3)
    each = facts("show", "zbv", "--forward", "1,1,1,1", "--backward", "3,3,3,3")
    assert one.pop("formula") is None is each.pop("formula")
    assert one == each


def test_a_slow_stage_is_slow_and_a_large_one_large(facts, run):
    found = facts("show", "1f1b", "--forward", "1,1,1,3", "--activation", "1,1,1,5")
    assert found["step"] == 3 + 4 * 9 + 3 * 2  # the last stage is always busy
    assert found["activations"] == [4, 3, 2, 5]
    assert found["formula"] is None
    _, out, _ = run("show", "1f1b", "--input-grad", "1,2,1,1", "--weight-grad", 1)
    assert "backward 2 3 2 2 (input 1 2 1 1, weights 1)" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "1f1b", "--forward", "1,x"), "'1,x' is no number"),
        (("show", "1f1b", "--forward", "1,2,3"), "numbers for 3 stages do not fit 4 stages"),
        (("show", "1f1b", "--forward", "1,2"), "numbers for 2 stages do not fit 4 stages"),
        (("show", "1f1b", "--forward", "1,0,1,1"), "--forward 0: more than 0"),
        (("show", "1f1b", "--forward", "1,1,1,1", "--backward", "1,2"), "--backward has 2"),
        (("show", "interleaved", "--virtual", "3", "--forward", "1,1,1,1"), "12 stages"),
        (("search", "--activation", "-1"), "--activation -1.0: a size"),
        (("search", "--memory", "0"), "--memory 0 --seconds 20: more than 0"),
        (("search", "--seconds", "nan"), "--seconds nan: more than 0"),
        (("search", "--placement", "strait"), "did you mean straight"),
        (("search", "--out", "no/where.csv", "--seconds", "1"), "cannot be written"),
        (words_of(RANKS), "--batch, --layers, --forward, --activation, --held, --weights"),
        (bert(held="big"), "--held: 'big' is not a size"),
        (bert(ranks=0), "--ranks 0: at least 1"),
        (bert(layers=0), "--layers 0: at least 1"),
        (bert(memory="0 B"), "--memory 0 B: more than 0"),
        ((*words_of(RANKS), "no_such_recipe"), "no recipe is called 'no_such_recipe'"),
    ],
)
def test_what_is_refused(run, words, said):
    code, out, err = run(*words)
    assert (code, out) == (1, "")
    assert said in err


# -- search --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_written_is_what_was_printed(facts):
    found = facts("search", *UNEQUAL, "--memory", 4.5, "--out", "x.csv")
    assert found["placement"] == "w"
    assert not found["out_of_time"]
    checked = facts("check", "x.csv", *UNEQUAL)
    assert schedule_violations(read_table(Path("x.csv"))) == ()
    for key in ("step", "activations", "weights", "bubble", "messages"):
        assert checked[key] == found[key]
    assert max(found["activations"]) <= 4.5
    assert found["bound"] <= found["step"]
    named = {row["name"]: row for row in found["named"]}
    assert tuple(named) == RIVALS
    compared = {row["name"]: row for row in facts("compare", *UNEQUAL)}
    for name, row in named.items():
        assert row["step"] == compared[name]["step"]
        assert row["fits"] == (max(row["activations"]) <= 4.5)
        assert not row["fits"] or row["step"] > 1.05 * found["step"]
    facts("search", *UNEQUAL, "--memory", 4.5, "--csv", "again.csv")
    assert Path("again.csv").read_bytes() == Path("x.csv").read_bytes()


def test_a_search_beside_the_named_schedules(run):
    code, out, _ = run("search", *UNEQUAL, "--out", "x.csv")
    assert code == 0
    check_golden("cli/schedule_search.txt", out)


def test_where_nothing_better_is_found_that_is_said(run):
    _, out, _ = run("search", "--placement", "straight,v")
    assert "nothing shorter than a known table was found: this is zbv, v" in out
    assert "as long as zbv, the shortest of the named ones that fit" in out
    assert "the shortest that there is: no table can beat 25.5 (straight, v)" in out
    _, out, _ = run("search", "--stages", 2, "--microbatches", 4)  # held twice, it has no bubble
    assert "2.1% longer than chimera, the shortest of the named ones that fit" in out
    _, out, _ = run("search", "--stages", 3, "--memory", 1, "--placement", "v")
    assert "none of the named schedules fits into this memory" in out
    assert "impossible: 3 ranks: Chimera needs an even number of stages" in out


def test_an_ended_search_says_so(run, facts):
    words = ("search", *UNEQUAL, "--seconds", "1e-6", "--out", "x.csv")
    assert facts(*words)["out_of_time"]
    assert "stopped after 1e-06 s (seed 0)" in run(*words)[1]
    assert schedule_violations(read_table(Path("x.csv"))) == ()


def test_a_memory_in_which_nothing_fits_is_a_plan_error(run):
    code, _, err = run("search", "--memory", 0.1)
    assert code == 2
    assert "no table was found that holds at most 0.1 activations" in err


# -- choose --------------------------------------------------------------------------------------


def recipe_of(out):
    return tomllib.loads(out[out.index("batch = ") :])


def test_a_choice_from_numbers(run, facts):
    code, out, _ = run(*bert())
    assert code == 0
    check_golden("cli/schedule_choose.txt", out)
    workload = EqualLayers(
        layers=48, forward=8e-4, activation=2**19, held=11.5e6, gradient=55.8e6, state=4 * 55.8e6
    )
    setting = ChimeraSetting(
        workers=32, batch=512, memory=2**34, link=Link(rate=1e10, latency=2e-6)
    )
    expected = candidates(workload, setting)
    rows = facts(*bert())
    assert len(rows) == len(expected) == 4
    for row, candidate in zip(rows, expected, strict=True):
        assert row["stages"] == candidate.shape.stages
        assert row["model"] == pytest.approx(candidate.price.seconds)
        assert row["executed"] == pytest.approx(candidate.simulated())


@pytest.mark.parametrize(
    ("words", "micros"),
    [
        ((), 1),
        (("--pipes", 4), 1),
        (("--mode", "doubling"), 1),
        (("--mode", "halving"), 2),
        (("--recompute",), 1),
    ],
)
def test_the_printed_recipe_is_the_choice(run, facts, words, micros):
    best = facts(*bert(), *words)[0]
    said = recipe_of(run(*bert(), *words)[1])
    assert said["batch"] == "512 samples"
    plan = pipelined(
        512,
        processes=32,
        stages=said["stages"],
        microbatch=said["microbatch"],
        pipeline=PipelinePlan(**said["pipeline"]),
    )
    assert plan.pipe_degree == best["stages"]
    assert plan.data_degree == best["copies"]
    assert plan.batch.parts == best["microbatches"] * micros
    made = plan.pipeline.make(plan.pipe_degree, plan.batch.parts)
    assert len(made.pipes) == (4 if "--pipes" in words else 2)
    assert bool(made.recompute) == ("doubling" in words or "--recompute" in words)


def test_where_execution_prefers_another_choice_that_is_said(run):
    """The model does not hide an all-reduce behind compute, execution does."""
    numbers = {
        "ranks": 8, "batch": 128, "layers": 32, "forward": "1 ms", "activation": "100 kB",
        "held": "10 MB", "weights": "50 MB", "state": "400 MB", "memory": "8 GB",
        "bandwidth": "3 GB/s", "latency": "10 us",
    }  # fmt: skip
    _, out, _ = run(*words_of(numbers))
    assert "executed, 4 stages are 2.6% faster than the model's choice" in out
    assert "chosen: 1 x 8 stages" in out


def test_where_nothing_fits_every_depth_has_a_reason(run):
    code, _, err = run(*bert(memory="100 MB"))
    assert code == 2
    assert "4 stages: " in err
    assert "32 stages: they do not divide 48 layers" in err


def test_a_recipe_is_measured(facts, run):
    found = measure_model_costs("support.recipes:wide", 4)
    assert (found.batch, found.layers) == (12, 3)
    weights = 4 * (6 * 256 + 256 + 256 * 32 + 32 + 32 * 4 + 4)
    assert found.weights * 3 == weights
    assert found.activation == 256 * 4
    assert found.forward > 0
    assert found.held * 3 >= 4 * (256 + 32)
    words = ("--ranks", 4, "--memory", "1 GiB", "--bandwidth", "1 Gbit/s")
    _, out, _ = run("choose", "support.recipes:wide", *words, "--layers", 4)
    assert "4 layers (measured here); each:" in out
    assert f"weights {weights / 4 / 1024:.3g} KiB" in out
    assert recipe_of(out)["batch"] == "12 samples"
    rows = facts("choose", "support.recipes:wide", *words, "--layers", 4, "--batch", 24)
    assert {row["copies"] * row["samples"] * row["microbatches"] for row in rows} == {24}
