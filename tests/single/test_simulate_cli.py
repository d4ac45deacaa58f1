"""single: `headway simulate`: plans played, against the search's prices; changes, faults, files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from headway.cli.main import main
from headway.cluster.device import HostOverhead
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.errors import UsageError
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.export.to_simulation import step_of_plan, step_of_point
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.request import PlanRequest
from headway.plans import ExchangePlan, MemoryPolicy, data_parallel, pipelined
from headway.plans.pipeline import PipelinePlan
from headway.report.trace_export import check_chrome_trace
from headway.run.measure.recipe_model import recipe_graph
from headway.schedule.csv_format import to_csv
from headway.schedule.generators.registry import SCHEDULES
from headway.simulator.ranks import StepFaults
from headway.simulator.simulation import simulate_training_step
from headway.simulator.what_if import change_device_types, parse_step_faults

RECIPE = "support.recipes:stack"
BATCH = 32
CLUSTER = of_preset("p3.16xlarge", nodes=2)
MACHINE = machine_of(CLUSTER)
WORDS = ("--recipe", RECIPE, "--cluster", "p3.16xlarge", "--nodes", "2")


@pytest.fixture(scope="module")
def question():
    graph, samples, batch, _ = recipe_graph(RECIPE)
    assert batch == BATCH
    work = PlanningWorkload(graph=graph, samples=samples)
    return PlanRequest(work=work, machine=MACHINE, devices=(8,), batch=batch)


@pytest.fixture
def run(capsys, tmp_path):
    def call(plan, *words):
        first = []
        if plan is not None:
            plan.save(tmp_path / "plan.json")
            first = [str(tmp_path / "plan.json")]
        code = main(["simulate", *first, *WORDS, *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def staged(processes=4, **changed):
    pipe = PipelinePlan(**({"microbatches": 4} | changed))
    return pipelined(BATCH, processes=processes, stages=2, pipeline=pipe, microbatch=4)


# -- the search's prices --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        data_parallel(BATCH, processes=1),
        data_parallel(BATCH, processes=8, microbatch=2),
        data_parallel(BATCH, processes=16, microbatch=1, exchange=ExchangePlan(bucket="100 KiB")),
        data_parallel(
            BATCH,
            processes=16,
            exchange=ExchangePlan(bucket="100 KiB", overlap=False),
            microbatch=2,
        ),
        staged(),
        staged(8),
        staged(8, schedule="gpipe"),
        staged(8, schedule="zb-h1"),
        staged(recompute="blocks", recompute_stages=(0,)),
    ],
    ids=lambda plan: f"{plan.pipeline.schedule}-{plan.ranks}-{plan.exchange.bucket}",
)
def test_a_plan_takes_what_the_search_prices_it_at(question, plan):
    """Inside of a node, where the formulas have no reason to differ."""
    work, point = step_of_plan(plan, PlanSearch(replace(question, devices=(plan.ranks,))))
    found = simulate_training_step(work)
    assert found.seconds == pytest.approx(point.seconds, rel=1e-9)
    assert found.peak == pytest.approx(point.bytes, rel=1e-9)
    assert found.ranks == plan.ranks


@pytest.mark.parametrize("plan", [data_parallel(BATCH, processes=4, microbatch=4), staged()])
def test_what_the_host_does_is_played_as_it_is_priced(question, plan):
    """Samples into batches, a step, its micro-batches and tensors; of a pipeline its passes."""
    host = HostOverhead(
        step=1e-3, microbatch=2e-4, tensor=1e-5, piped_step=2e-3, piped_microbatch=3e-4
    )
    slow = replace(MACHINE, device=replace(MACHINE.device, host=host, gather=1e-4))
    work, point = step_of_plan(plan, PlanSearch(replace(question, devices=(4,), machine=slow)))
    found = simulate_training_step(work)
    plain, _ = step_of_plan(plan, PlanSearch(replace(question, devices=(4,))))
    assert found.seconds > simulate_training_step(plain).seconds + 2e-3
    assert found.seconds == pytest.approx(point.seconds, rel=1e-9)
    for account in found.accounts:
        assert account.busy["host"] == pytest.approx(work.stages[0].host, rel=1e-12)


def test_every_point_of_a_frontier_holds_what_the_search_says(question):
    """With tensor axis and ZeRO; time agrees where neither ZeRO nor a sum may be hidden. Of a
    pipeline the price has the longest update behind the last sum, whoever is the last."""
    outcome = find_plans(question)
    kinds = set()
    for point in outcome.points:
        found = simulate_training_step(step_of_point(point, outcome.search))
        assert found.peak == pytest.approx(point.bytes, rel=1e-9)
        assert found.ranks == point.devices
        degrees = point.degrees
        kinds.add((degrees.tensor > 1, degrees.zero))
        if not degrees.zero and (degrees.tensor == 1 or degrees.pipeline == 1):
            longest = max(stage.update for stage in found.work.stages)
            stages = [replace(stage, update=longest) for stage in found.work.stages]
            late = simulate_training_step(replace(found.work, stages=tuple(stages)))
            assert late.seconds == pytest.approx(point.seconds, rel=1e-9)
            assert found.seconds <= late.seconds
    assert len(kinds) > 2


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_schedule_is_played_and_all_ranks_agree(question, name):
    """Also those that the search has no price for; a table as a file says the same as its name."""
    number = 8 if name.startswith("dualpipe") else 4
    plan = staged(4, schedule=name, microbatches=number)
    engine = PlanSearch(replace(question, devices=(4,)))
    work, _ = step_of_plan(plan, engine)
    some, everybody = simulate_training_step(work), simulate_training_step(work, everybody=True)
    assert some.seconds == everybody.seconds
    assert len(some.accounts) == 2
    written = replace(plan, pipeline=replace(plan.pipeline, table=to_csv(work.table)))
    if not work.table.halves:
        assert simulate_training_step(step_of_plan(written, engine)[0]).seconds == some.seconds


def test_a_tensor_group_goes_at_the_pace_of_its_slowest_rank(question):
    """The collectives of the axis take as long as before."""
    outcome = find_plans(replace(question, tensor=(8,), zero=(0,)))
    work = step_of_point(outcome.best, outcome.search)
    plain = simulate_training_step(work)
    slow = simulate_training_step(replace(work, faults=StepFaults(slow={5: 3.0})))
    inside = plain.exposed.get("tensor axis", 0.0)
    assert slow.seconds == pytest.approx(3 * (plain.seconds - inside) + inside, rel=1e-9)
    forward = sum(stage.forward for stage in work.stages)
    assert 0 <= sum(stage.collectives[0] for stage in work.stages) < forward


# -- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_a_step_is_made_of(run):
    code, out, _ = run(staged(8))
    assert code == 0
    assert "as planned" in out
    assert "changed" not in out
    assert "the simulation agrees" in out
    assert "2 of 8 ranks were simulated" in out
    assert re.search(r"bubble +\d+\.\d%", out)
    assert "messages between stages" in out


def test_changes_and_faults_stand_beside_the_plan(run):
    words = ("--change", "link node-node 1 Gbit/s", "--fault", "rank 1 slow 2x")
    code, out, _ = run(staged(16), *words)
    assert code == 0
    assert "changed: link node-node 1 Gbit/s; rank 1 slow 2x" in out
    step = next(line for line in out.splitlines() if line.startswith("step"))
    assert re.search(r"\+\d", step)


def test_the_figures_as_data(run, question):
    plan = staged(8)
    code, out, _ = run(plan, "--json", "--change", "device peak 2x", "--fault", "rank 0 3x slower")
    assert code == 0
    before, after = json.loads(out)["scenarios"]
    work, point = step_of_plan(plan, PlanSearch(question))
    assert before["seconds"] == simulate_training_step(work).seconds
    assert before["priced"] == point.seconds
    assert after["priced"] is None
    for scenario in (before, after):
        for rank in scenario["ranks"]:
            parts = [*rank["busy"].values(), *rank["exposed"].values(), rank["bubble"]]
            assert math.fsum(parts) == pytest.approx(scenario["seconds"], rel=1e-9)
        assert max(size for _, size in scenario["ranks"][0]["curve"]) <= scenario["peak"]
    assert sum(rank["count"] for rank in after["ranks"]) == 8


def test_pictures_and_traces(run, tmp_path):
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    words = ("--svg", str(svg), "--timeline", str(trace), "--fault", "link a-b 10x slower")
    code, _, _ = run(staged(16), *words)
    assert code == 0
    drawn = svg.read_text()
    assert "changed: memory of these ranks" in drawn
    assert drawn.count("<svg ") == 5
    assert check_chrome_trace(json.loads(trace.read_text())) == []


def test_the_precision_is_that_of_the_plan(run):
    """Products in 16 bits take no longer."""
    seconds = []
    for precision in ("float32", "bfloat16"):
        plan = staged(8)
        code, out, _ = run(replace(plan, memory=MemoryPolicy(precision=precision)), "--json")
        assert code == 0
        seconds.append(json.loads(out)["scenarios"][0]["seconds"])
    assert seconds[1] <= seconds[0]


def test_several_changes_are_made_together(run):
    words = ("--json", "--change", "device peak 2x", "--change", "link node 2x")
    code, out, _ = run(staged(8), *words)
    assert code == 0
    assert json.loads(out)["change"] == ["device peak 2x", "link node 2x"]


def test_without_a_plan_the_search_finds_one(run):
    code, out, _ = run(None, "--devices", "8", "--change", "latency node 1 us", "--share-links")
    assert code == 0
    assert "the fastest plan that the search finds: " in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--change", "link nod 2x"), "did you mean node"),
        (("--change", "link rack 2x"), "The cluster has rank-rank, node-node, node, cluster"),
        (("--change", "link node fast"), "fast"),
        (("--change", "link node 0x"), "a value above 0 is needed"),
        (("--change", "device weight 2x"), "peak, memory-rate"),
        (("--change", "device lunches 2x"), "did you mean launches"),
        (("--change", "device v100 peak 2x"), "no devices 'v100'"),
        (("--change", "latency node 5"), "5 has neither a unit nor the x of 2x"),
        (("--change", "memory 80"), "80 has neither a unit"),
        (("--change", "faster"), 'is no change\n  Write "link LEVEL 100 Gbit/s"'),
        (("--memory", "80"), 'no unit; write "80 GiB" or "80 B"'),
        (("--memory", "lots"), "'lots' is not a size"),
        (("--fault", "rank 9 slow 2x"), "there is no rank 9: the ranks are 0 to 7"),
        (("--fault", "link a-z 2x slower"), "no node 'z'"),
        (("--fault", "kill rank 1 at step 3"), "never ends"),
        (("--fault", "rank 1 slow 0.5x"), "at least 1x"),
        (("--fault", "link a-a 2x slower"), "a link has two different ends"),
        (("--fault", "rain"), '"rank 3 slow 2x"'),
        (("--devices", "4"), "--devices 4 beside a plan of 8 ranks"),
    ],
)
def test_what_is_not_understood_is_refused(run, words, said):
    code, _, err = run(staged(8), *words)
    assert code in (1, 2)
    assert said in err


def changed(machine, cluster, sentences):
    """One machine with other numbers."""
    (found,) = change_device_types({machine.device.name: machine}, cluster, sentences).values()
    return found


def test_a_change_changes_the_number_that_it_names():
    node, between = MACHINE.network.levels
    found = changed(MACHINE, CLUSTER, ["link node-node 100 Gbit/s", "latency node-node 2x"])
    assert found.network.levels[0] == node
    assert found.network.levels[1].link.rate == 100e9 / 8
    assert found.network.levels[1].link.latency == 2 * between.link.latency
    faster = changed(MACHINE, CLUSTER, ["link rank-rank 4x"])
    assert faster.network.levels[0].link.rate == 4 * node.link.rate
    assert changed(MACHINE, CLUSTER, ["memory 2x"]).device.memory == 2 * MACHINE.device.memory
    assert changed(MACHINE, CLUSTER, ["memory 80 GiB"]).device.memory == 80 * 2**30
    named = changed(MACHINE, CLUSTER, [f"device {MACHINE.device.name} peak 2x"])
    assert named == changed(MACHINE, CLUSTER, ["device peak 2x"])
    launches = changed(MACHINE, CLUSTER, ["device launches 2x"]).device
    assert (
        launches == changed(MACHINE, CLUSTER, ["device dispatch 0.5x", "device kernel 0.5x"]).device
    )
    doubled = changed(MACHINE, CLUSTER, ["device peak 2x"]).device
    assert doubled.peak == {key: 2 * rate for key, rate in MACHINE.device.peak.items()}
    assert replace(doubled, peak=MACHINE.device.peak) == MACHINE.device


def test_one_node_has_no_links_between_nodes():
    """By whatever name: `node-node` is refused with the reason, not with a guess."""
    one = of_preset("p3.16xlarge", nodes=1)
    with pytest.raises(UsageError, match="one node only") as error:
        changed(machine_of(one), one, ["link node-node 100Gbit/s"])
    assert "--nodes" in error.value.fix
    assert "did you mean" not in str(error.value)


def test_faults_of_the_same_rank_add_up():
    found = parse_step_faults(
        ["rank 3 slow 2x", "rank 3 2x slower", "link a-b 10x slower"], 16, CLUSTER
    )
    assert found.slow == {3: 4.0}
    assert found.paths[0].ends == (frozenset(range(8)), frozenset(range(8, 16)))
    with pytest.raises(UsageError):
        parse_step_faults(["cut link a-b at step 2"], 16, CLUSTER)


def test_all_mistakes_are_told_at_once(run):
    words = ("--change", "blah", "--change", "link foo 2x", "--fault", "rank 99 slow 2x")
    code, _, err = run(staged(8), *words)
    assert code == 1
    for said in ("'blah' is no change", "no level 'foo'", "no rank 99: the ranks are 0 to 7"):
        assert said in err
