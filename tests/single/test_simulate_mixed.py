"""single: `headway simulate` where a cluster has devices of several types."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from headway.api.simulation import device_numbers_of_ranks
from headway.cli.main import main
from headway.cluster import read_cluster
from headway.errors import UsageError
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.export.to_simulation import step_of_plan, step_of_point
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.request import PlanRequest
from headway.plans import data_parallel, pipelined
from headway.plans.pipeline import PipelinePlan
from headway.run.measure.recipe_model import recipe_graph
from headway.simulator.simulation import simulate_training_step
from headway.simulator.what_if import change_device_types, parse_step_faults
from support.mixed import RECIPE, devices, question_of

KINDS = ("fast", "fast", "slow", "slow")
CUT = PipelinePlan(microbatches=4, cut=("2",))


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text(devices())
    return path


@pytest.fixture(scope="module")
def work():
    graph, samples = recipe_graph(RECIPE)[:2]
    return PlanningWorkload(graph=graph, samples=samples)


@pytest.fixture
def run(capsys, tmp_path):
    def call(plan, *words):
        first = []
        if plan is not None:
            plan.save(tmp_path / "plan.json")
            first = [str(tmp_path / "plan.json")]
        code = main(["simulate", *first, "--recipe", RECIPE, *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


# -- the step -------------------------------------------------------------------------------------


def test_on_equal_types_a_step_is_that_of_one_type(work, tmp_path):
    path = tmp_path / "equal.toml"
    path.write_text(devices(slower=1))
    question = question_of(work, path)
    mixed = PlanSearch(question)
    alone = PlanSearch(
        PlanRequest(work=work, machine=question.machines["fast"], devices=(4,), batch=32)
    )
    again = replace(CUT, recompute="blocks", recompute_stages=(1,))
    for plan in (
        data_parallel(32, processes=4),
        data_parallel(32, processes=4, microbatch=2),
        pipelined(32, processes=4, stages=2, pipeline=CUT),
        pipelined(32, processes=4, stages=2, pipeline=again),
    ):
        found = simulate_training_step(step_of_plan(plan, mixed, KINDS)[0])
        plain = simulate_training_step(step_of_plan(plan, alone)[0])
        assert found.seconds == pytest.approx(plain.seconds, rel=1e-12)
        assert found.peak == pytest.approx(plain.peak, rel=1e-12)
        assert found.exposed == pytest.approx(plain.exposed, rel=1e-9)


@pytest.mark.slow
def test_no_point_takes_longer_or_holds_more_than_the_search_says(work, cluster):
    """Without a pipeline exactly as long; in one the price takes all copies as slow as the slowest,
    and every message as one between nodes."""
    question = question_of(
        work, cluster, recompute="any", tensor=None, zero=(0, 1, 3), devices=(4,)
    )
    engine, seen = PlanSearch(question), set()
    for combination in engine.combinations():
        if combination.degrees.schedule != "1f1b":
            continue
        point = engine.open(combination).fastest(question.cap)
        if point is None:
            continue
        found = simulate_training_step(step_of_point(point, engine))
        assert found.peak == pytest.approx(point.bytes, rel=1e-9)
        assert found.ranks == point.devices == 4
        alike = len(point.classes) == 1
        plain = combination.degrees.zero == 0 and combination.degrees.tensor == 1
        if plain:
            assert found.seconds <= point.seconds * (1 + 1e-9)
        if plain and combination.degrees.pipeline == 1:
            assert found.seconds == pytest.approx(point.seconds, rel=1e-9)
        seen.add((alike, plain, combination.degrees.pipeline > 1))
    assert len(seen) > 5


def test_copies_that_are_slow_at_different_stages_wait_less_than_the_price_says(work, cluster):
    """The price takes both stages as slow as their slowest copy."""
    plan = pipelined(32, processes=4, stages=2, pipeline=CUT)
    search = PlanSearch(question_of(work, cluster))
    crossed = ("fast", "slow", "slow", "fast")
    played, point = step_of_plan(plan, search, crossed)
    slow, same = step_of_plan(plan, search, KINDS)
    assert (
        simulate_training_step(played).seconds
        < point.seconds
        == pytest.approx(same.seconds, rel=1e-9)
    )
    assert simulate_training_step(slow).seconds == pytest.approx(same.seconds, rel=1e-9)


def test_each_copy_has_the_times_and_micro_batches_of_its_devices(work, cluster):
    """A pipeline of fast devices with 24 samples beside one of slow ones with 8: by the searches of
    one type each."""
    question = question_of(work, cluster)
    plan = pipelined(32, processes=4, stages=2, pipeline=CUT, shares=(24, 8))
    played, point = step_of_plan(plan, PlanSearch(question), KINDS)
    assert played.variant == (0, 1)
    found = simulate_training_step(played)
    assert found.seconds == pytest.approx(point.seconds, rel=1e-9)  # the fast ones are slower
    by_rank = {account.rank: account for account in found.accounts}
    assert len(by_rank) == 4
    for first, kind, share in ((0, "fast", 24), (2, "slow", 8)):
        machine = question.machines[kind]
        asked = PlanRequest(work=work, machine=machine, devices=(2,), batch=share)
        alone = pipelined(share, processes=2, stages=2, pipeline=CUT)
        own = {
            a.place: a
            for a in simulate_training_step(step_of_plan(alone, PlanSearch(asked))[0]).accounts
        }
        for place in range(2):
            account = by_rank[first + place]
            for part in ("forward", "backward"):
                assert account.busy[part] == pytest.approx(own[place].busy[part], rel=1e-9)
    slow = simulate_training_step(
        replace(played, faults=parse_step_faults(["rank 3 slow 3x"], 4, read_cluster(cluster)))
    )
    assert slow.seconds > found.seconds


# -- the command ----------------------------------------------------------------------------------


def test_the_command_speaks_of_each_type(run, cluster):
    plan = pipelined(32, processes=4, stages=2, pipeline=CUT, shares=(20, 12))
    words = ("--cluster", cluster, "--change", "device slow peak 2x", "--change", "memory slow 2x")
    code, out, err = run(plan, *words, "--fault", "link new-old 5x slower")
    assert code == 0, err
    assert "shares or micro-batches" not in err
    assert "ranks in the order of the mesh: 2 fast, 2 slow" in out
    assert "all 4 ranks were simulated" in out
    for line in ("is the fullest fast, ", "of 1 GiB", "is the fullest slow, ", "of 2 GiB"):
        assert line in out
    code, shown, _ = run(plan, *words, "--json")
    before, after = json.loads(shown)["scenarios"]
    assert after["seconds"] < before["seconds"] == pytest.approx(before["priced"], rel=1e-3)
    assert after["seconds"] == pytest.approx(after["priced"], rel=1e-3)
    assert before["allowed"] == {"fast": 2.0**30, "slow": 2.0**30}
    assert after["allowed"] == {"fast": 2.0**30, "slow": 2.0**31}
    assert [rank["device"] for rank in after["ranks"]] == [*KINDS]
    busy = [{r["rank"]: r["busy"] for r in s["ranks"]} for s in (before, after)]
    assert busy[0][0] == busy[1][0]  # a fast one
    assert busy[0][2]["backward"] > busy[1][2]["backward"]
    for rank in before["ranks"]:
        parts = [*rank["busy"].values(), *rank["exposed"].values(), rank["bubble"]]
        assert math.fsum(parts) == pytest.approx(before["seconds"], rel=1e-9)


def test_without_a_plan_the_fastest_on_all_devices_is_played(run, cluster):
    code, out, err = run(None, "--cluster", cluster, "--change", "memory 2x", "--json")
    assert code == 0, err
    before, after = json.loads(out)["scenarios"]
    assert (before["seconds"], before["priced"]) == (after["seconds"], after["priced"])
    assert before["allowed"]["slow"] * 2 == after["allowed"]["slow"]
    assert {rank["device"] for rank in before["ranks"]} == {"fast", "slow"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--change", "device fest peak 2x"), "no devices 'fest'; did you mean fast"),
        (("--change", "memory huge 2x"), "The cluster has fast, slow; without a name all"),
        (("--change", "device slow weight 2x"), "peak, memory-rate"),
        (("--change", "device slow peak 2x", "--change", "blah"), "'blah' is no change"),
        (("--fault", "rank 4 slow 2x"), "there is no rank 4"),
    ],
)
def test_what_is_not_understood_is_refused(run, cluster, words, said):
    code, _, err = run(data_parallel(32, processes=4), "--cluster", cluster, *words)
    assert code in (1, 2)
    assert said in err


def test_a_change_of_a_type_changes_it_alone(work, cluster):
    machines = question_of(work, cluster).machines
    found = change_device_types(
        machines, read_cluster(cluster), ["device slow peak 2x", "memory 2x", "link node 2x"]
    )
    for kind, factor in (("fast", 1), ("slow", 2)):
        old, new = machines[kind], found[kind]
        assert new.device.peak["fp32"] == factor * old.device.peak["fp32"]
        assert new.device.memory == 2 * old.device.memory
        assert new.network.levels[0].link.rate == 2 * old.network.levels[0].link.rate
    with pytest.raises(UsageError):
        change_device_types(machines, read_cluster(cluster), ["device fast 2x"])


def test_a_link_is_between_the_devices_that_stand_on_its_nodes(cluster):
    """A plan whose first ranks stand on the second node."""
    described = read_cluster(cluster)
    kinds = ("slow", "slow", "fast")
    assert device_numbers_of_ranks(kinds, described) == (2, 3, 0)
    (path,) = parse_step_faults(
        ["link new-old 2x slower"], 3, described, device_numbers_of_ranks(kinds, described)
    ).paths
    assert path.ends == ({2}, {0, 1})
