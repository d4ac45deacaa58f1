"""single: `headway simulate` of plans whose workers do not agree at every step, with faults."""

from __future__ import annotations

import json

import pytest

import headway
from headway.cli.main import main
from headway.collective.compression import parse_compression
from headway.collective.model.bucket_cost import bucket_traffic
from headway.collective.nodes import Nodes
from headway.comm.tuning.autotuning import initial_arrangement
from headway.plans import ExchangePlan, Synchrony, pipelined
from support.recipes import stack

WORDS = ("--recipe", "support.recipes:stack", "--cluster", "p3.16xlarge")
SSP = {"kind": "bounded", "delay_bound": 4}
SLOW = ("--fault", "rank 2 slow 3x")
FREE = {"kind": "asynchronous"}
WAYS = {
    "local": {"merge": "mean", "local_steps": 8},
    "diloco": {
        "merge": "mean", "local_steps": 4, "warm_up": 3, "outer": "nesterov", "outer_rate": 0.7,
        "outer_momentum": 0.9,
    },
    "easgd": {"merge": "elastic"},
    "d-psgd": {"merge": "neighbour"},
    "servers": {"topology": "sharded", "servers": 2},
    "downpour": {**FREE, "fetch_every": 2, "push_every": 2},
    "ssp": SSP,
    "snapshot": {**SSP, "read": "snapshot"},
    "eager": {**SSP, "remedy": "eager_push"},
    "centre": {**FREE, "merge": "elastic"},
    "tree": {**FREE, "merge": "elastic", "topology": "tree"},
    "ad-psgd": {**FREE, "merge": "pairwise"},
    "gosgd": {**FREE, "merge": "push_sum"},
}  # fmt: skip


@pytest.fixture
def run(capsys, tmp_path):
    def call(fields, *words, processes=4):
        plan = pipelined(32, processes=processes, stages=1, synchrony=Synchrony(**fields))
        plan.save(tmp_path / "plan.json")
        code = main(["simulate", str(tmp_path / "plan.json"), *WORDS, *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture
def figures(run):
    def call(fields, *words, **more):
        code, out, err = run(fields, *words, "--json", "--steps", "40", **more)
        assert code == 0, err
        return json.loads(out)["scenarios"]

    return call


def moved(scenario):
    return {(a, b): size for a, b, size in scenario["links"]}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_played(figures, way):
    before, after = figures(WAYS[way], *SLOW)
    assert [one["steps"] for one in before["workers"]] == pytest.approx([40] * 4, abs=1)
    assert sum(one["rate"] for one in after["workers"]) == pytest.approx(after["rate"])
    assert after["rate"] < 0.95 * before["rate"]
    assert before["met"] or before["links"]
    for one in after["workers"]:
        assert 0 <= sum(one["waits"].values()) <= after["seconds"]


def test_who_waits_for_a_slow_worker(figures):
    """All-reduce of models: at its pace; asynchronous servers: not at all; SSP: up to the bound."""
    _, local = figures(WAYS["local"], *SLOW)
    assert local["workers"][0]["waits"]["meeting"] == pytest.approx(
        2 / 3 * local["seconds"], rel=0.05
    )
    assert local["workers"][2]["waits"].get("meeting", 0.0) < 0.05 * local["seconds"]
    before, free = figures(FREE, *SLOW)
    assert free["rate"] == pytest.approx((3 + 1 / 3) / 4 * before["rate"], rel=0.06)
    assert "bound" not in free["workers"][0]["waits"]
    _, bounded = figures(SSP, *SLOW)
    steps = [one["steps"] for one in bounded["workers"]]
    assert max(steps) - min(steps) in (4, 5)  # at the end some are in a step
    assert bounded["workers"][0]["waits"]["bound"] > 0.4 * bounded["seconds"]
    assert bounded["workers"][2]["waits"].get("bound", 0.0) < 0.01 * bounded["seconds"]


def test_staleness_is_counted_for_each_push(figures):
    _, after = figures({**FREE, "topology": "single"}, *SLOW)
    fast, slow = (
        {int(stale): n for stale, n in after["workers"][w]["staleness"].items()} for w in (1, 2)
    )
    # A push that is still on its way at the end counts with the holder, not with the worker.
    assert sum(fast.values()) == pytest.approx(after["workers"][1]["steps"], abs=1)
    mean = [sum(k * n for k, n in own.items()) / sum(own.values()) for own in (fast, slow)]
    assert mean[1] > 2 * mean[0]


def test_bytes_by_link(figures):
    (alone,) = figures({"merge": "neighbour"})
    (sharded,) = figures({**FREE, "topology": "sharded", "servers": 2})
    ring = moved(alone)
    assert set(ring) == {(a, b) for a in range(4) for b in range(4) if (a - b) % 4 in (1, 3)}
    model = ring[0, 1] / 41  # a model is sent before the gradient that is not made
    # Pulls and pushes of half a model each, between workers and the two servers at 0 and 2.
    assert moved(sharded)[1, 0] == pytest.approx(40 * model / 2, rel=0.06)
    (local,) = figures({"merge": "mean", "local_steps": 8, "state": "keep"})
    assert local["met"] == pytest.approx(5 * 2 * 3 / 4 * model)


def test_faults_have_steps_and_links_have_two_ends(figures, run):
    _, part = figures(WAYS["local"], "--fault", "rank 2 slow 3x from step 11 to step 21")
    before, whole = figures(WAYS["local"], *SLOW)
    assert part["seconds"] - before["seconds"] == pytest.approx(
        (whole["seconds"] - before["seconds"]) / 4, rel=0.05
    )
    code, _, err = run(FREE, "--fault", "link a-b 10x slower from step 3", "--nodes", "2")
    assert code
    assert "in the whole run" in err


def test_a_slow_link_slows_what_crosses_it(figures):
    words = ("--nodes", "2", "--fault", "link a-b 10x slower")
    before, after = figures({"merge": "neighbour"}, *words, processes=16)
    waits = [
        max(sum(one["waits"].values()) for one in found["workers"]) for found in (before, after)
    ]
    assert waits[1] > 2 * waits[0]
    inside, slower = figures({"merge": "neighbour"}, *words, processes=8)
    assert slower["rate"] == inside["rate"]  # one node: nothing crosses


@pytest.mark.parametrize("way", ["ad-psgd", "gosgd", "tree", "centre"])
def test_the_others_go_on_without_a_dead_worker(figures, way):
    before, after = figures(WAYS[way], "--fault", "kill rank 3 at step 10")
    assert after["workers"][3]["steps"] == 9
    assert after["workers"][3]["dies"] == 10
    for one, other in zip(before["workers"][:3], after["workers"][:3], strict=True):
        assert other["steps"] == pytest.approx(one["steps"], abs=1)


def test_a_bounded_run_waits_for_a_dead_worker_no_more(figures):
    single = {**SSP, "topology": "single"}
    _, after = figures(single, "--fault", "kill rank 3 at step 10")
    assert min(one["steps"] for one in after["workers"][:3]) >= 39


@pytest.mark.parametrize("compress", ["int8", "topk:0.01"])
def test_compressed_meetings_send_what_the_buckets_of_a_run_send(figures, compress):
    """By the arithmetic that counts the bytes of a live exchange, bucket by bucket."""
    words = {"merge": "mean", "local_steps": 8, "state": "keep"}
    (whole,) = figures(words)
    (small,) = figures({**words, "compress": compress})
    named = dict(stack().model().named_parameters())
    sent = [
        bucket_traffic(
            [named[name].shape for name in names],
            Nodes.one(4),
            compression=parse_compression(compress),
        ).by_rank(0)
        for names in initial_arrangement(named, ExchangePlan(compress=compress)).layout
    ]
    assert small["met"] == pytest.approx(5 * sum(sent), rel=1e-3)
    assert small["met"] < 0.6 * whole["met"]
    assert small["seconds"] < whole["seconds"]
    assert small["assumes"] == ["compressing takes no time"]


@pytest.mark.parametrize("place", ["single", "colocated"])
def test_a_bound_by_value_lies_between_no_wait_and_lockstep(figures, place):
    words = {"kind": "bounded", "value_bound": 1.0, "topology": place}
    before, after = figures(words, *SLOW)
    assert before["assumes"] == ["no update comes to the bound by value"]
    assert after["least"] < 0.55 * after["rate"]  # all go at the pace of the slow one
    (lockstep,) = figures({"topology": place})
    assert before["least"] < 1.1 * lockstep["rate"]


CUT = ("--nodes", "2", "--fault", "cut link a-b at step 11")


def test_a_cut_link_ends_the_run_as_live(figures, run):
    """Who has a server on the other side waits for it, who has not goes on, or to the bound; nobody
    meets all any more."""
    single = {**FREE, "topology": "single"}
    before, after = figures(single, *CUT, processes=16)
    steps = [one["steps"] for one in after["workers"]]
    assert min(steps[:8]) >= 40 > 20 > max(steps[8:])
    lost = after["workers"][8]["waits"]["link"]
    assert lost > 0.5 * after["seconds"]
    assert "waits for server 0 in vain: after --timeout (300 s" in after["ends"]
    assert not before["ends"]
    _, bounded = figures({**SSP, "topology": "single"}, *CUT, processes=16)
    assert bounded["workers"][1]["waits"]["bound"] > 0.3 * bounded["seconds"]
    assert "bound" not in bounded["workers"][9]["waits"]
    _, met = figures(WAYS["local"], *CUT, processes=16)
    assert [one["steps"] for one in met["workers"]] == [16] * 16  # of 8: the next meeting
    assert "worker 0 waits for the others in vain: after --patience (5 s" in met["ends"]
    _, alone = figures(single, *CUT, processes=8)
    assert not alone["ends"]  # nothing crosses
    code, out, _ = run(single, *CUT, processes=16)
    assert code == 0
    assert "in vain" in out


def test_the_table(run):
    code, out, _ = run(SSP, *SLOW)
    assert code == 0
    assert "as planned: " in out
    assert "waits: bound" in out
    assert "staleness: pushes" in out
    assert "changed: rank 2 slow 3x" in out


@pytest.mark.parametrize(
    ("fields", "words", "said"),
    [
        ({"merge": "mean"}, ("--fault", "kill rank 1 at step 3"), "wait for all others"),
        (FREE, ("--fault", "kill rank 1 at step 3"), "a server or the centre lives there"),
        (FREE, ("--svg", "x.svg", "--timeline", "x.json"), "--svg, --timeline"),
        (FREE, ("--share-links",), "--share-links: the workers"),
        ({}, ("--steps", "7"), "--steps: all ranks agree"),
        (FREE, ("--fault", "rank 7 slow 2x"), "there is no rank 7"),
        (FREE, (*CUT, "--fault", "cut link a-b at step 3"), "several links are cut"),
    ],
)
def test_what_cannot_be_played_is_refused(run, fields, words, said):
    code, _, err = run(fields, *words)
    assert code
    assert said in err


def test_one_name_answers_for_steps_and_for_runs(tmp_path):
    plan = pipelined(32, processes=4, stages=1, synchrony=Synchrony(**SSP))
    words = {"recipe": "support.recipes:stack", "cluster": "p3.16xlarge"}
    found = headway.simulate(plan, steps=12, fault=["rank 2 slow 3x"], **words)
    assert found.plan == plan.hash
    assert [run.name for run in found.runs] == ["as planned", "changed"]
    assert found.runs[1].rate < found.runs[0].rate
    with pytest.raises(headway.UsageError, match="a run is simulated, not one step"):
        assert found.step
    step = headway.simulate(pipelined(32, processes=4, stages=1), **words)
    assert step.seconds > 0
    assert not step.runs
