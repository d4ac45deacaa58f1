"""single: `headway explain`: a plan's price, what binds, its neighbours, hardware, guidelines."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.api.explanation import explain_plan, stage_boundaries
from headway.cli.explain import explanation_lines, part_line
from headway.cli.main import main
from headway.cluster import to_toml
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.cost.memory import OPTIMISER_MEMORY
from headway.cost.network import HierarchicalNetwork
from headway.errors import PlanError
from headway.parallel import cut
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.alternatives import neighbour_plans
from headway.planner.explain.hardware_changes import (
    TWICE,
    fastest_runnable_request,
    hardware_changes,
)
from headway.planner.explain.step_parts import fullest_stage_memory, step_parts
from headway.planner.guidelines.layer_parallelism import layers_of
from headway.planner.guidelines.plan_advice import AdviceRequest, advice_of
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.plan_conversion import (
    degrees_of,
    missing_in_executor,
    point_of,
    to_plan,
)
from headway.planner.search.request import PlanRequest
from headway.plans import LayerSplit, Plan, data_parallel, pipelined
from headway.plans.pipeline import PipelinePlan
from headway.plans.plan import unsupported_by_executor
from headway.run.measure.recipe_model import recipe_graph
from support.recipes import Stack
from support.sampling import sampled

RECIPE = "support.recipes:stack"
BATCH = 32
CLUSTER = ("--cluster", "p3.16xlarge", "--nodes", "2")
MACHINE = machine_of(of_preset("p3.16xlarge", nodes=2))
PARAMETERS = 4 * sum(parameter.numel() for parameter in Stack().parameters())


@pytest.fixture(scope="module")
def question():
    graph, samples, batch, _ = recipe_graph(RECIPE)
    assert batch == BATCH
    work = PlanningWorkload(graph=graph, samples=samples)
    return PlanRequest(work=work, machine=MACHINE, devices=(8,), batch=batch)


def engine(question, devices=8, **changed):
    return PlanSearch(replace(question, devices=(devices,), **changed))


@pytest.fixture
def run(capsys, tmp_path):
    def call(plan, *words):
        plan.save(tmp_path / "plan.json")
        code = main(["explain", str(tmp_path / "plan.json"), *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def staged(**changed):
    pipe = PipelinePlan(microbatches=4, cut=("3",), **changed)
    return pipelined(BATCH, processes=4, stages=2, pipeline=pipe, microbatch=4)


# -- the price of a plan --------------------------------------------------------------------------


def test_a_point_that_becomes_a_plan_has_the_same_price(question):
    """For each point of two frontiers that runs today: to a plan, and back."""
    seen = set()
    for memory in (None, 0.7e6):
        asked = replace(question, memory=memory, tensor=(1,), zero=(0,))
        outcome = find_plans(asked)
        for point in outcome.points:
            if missing_in_executor(outcome.search, point):
                continue
            again = point_of(to_plan(outcome, point), engine(asked))
            assert again.degrees == point.degrees
            assert (again.seconds, again.bytes) == (point.seconds, point.bytes)
            seen.add(point.degrees.pipeline)
    assert len(seen) > 1


def test_every_point_becomes_a_plan_with_its_degrees(question):
    """Tensor axis, ZeRO, order of the axes; what layers do is taken as what is fastest. In memory
    that a few plans are left with: an eighth of weights, gradients, moments and one more is 498 kB,
    and no plan needs less than 508 kB."""
    seen = set()
    for memory in (None, 0.52e6):
        asked = replace(question, memory=memory, tensor=None, zero=(0, 1, 3), orders=("tpd", "tdp"))
        outcome = find_plans(asked)
        engine_ = engine(asked)
        for point in outcome.points:
            if point.degrees.pipeline == 1 and any(stage.recompute for stage in point.stages):
                continue
            plan = to_plan(outcome, point)
            again = point_of(plan, engine_)
            assert again.degrees == point.degrees
            assert again.seconds <= point.seconds * (1 + 1e-12)
            lacks = missing_in_executor(outcome.search, point)
            assert lacks or not list(unsupported_by_executor(plan))
            seen.add((point.degrees.tensor > 1, point.degrees.zero))
    assert len(seen) > 2


@pytest.mark.parametrize("memory", [0.52e6, 0.55e6])
def test_a_plan_with_a_tensor_axis_costs_what_the_search_has_chosen(question, memory):
    """Parts of tensors between its stages, and what layers do within the memory."""
    asked = replace(question, memory=memory, tensor=(2,), objective="fastest")
    outcome = find_plans(asked)
    best = outcome.best
    assert best.border != "R"
    again = point_of(to_plan(outcome, best), PlanSearch(asked))
    assert again == best


def test_what_is_forced_to_be_replicated_is_left_whole_by_the_plan(question):
    forced = (("7", "replicate"), ("1.0", "split:tensor"))
    asked = replace(question, memory=None, tensor=(2,), zero=(0,), force=forced)
    outcome = find_plans(asked)
    plan = to_plan(outcome, outcome.best)
    assert plan.split == LayerSplit(tensor=(2,), whole=("7",))
    assert degrees_of(plan).tensor == 2


def test_the_parts_of_a_data_parallel_step(question):
    """By hand: two devices of a node sum in a ring of 2, 2 alpha + S / beta; Adam by parameter."""
    point = point_of(data_parallel(BATCH, processes=2, microbatch=4), engine(question, 2))
    found = {part.name: part for part in step_parts(question, point)}
    assert set(found) == {"compute", "exchange", "update"}
    link = MACHINE.network.levels[0].link
    ring = 2 * link.latency + PARAMETERS / link.rate
    assert found["exchange"].seconds == pytest.approx(ring, rel=1e-12)
    assert found["exchange"].level == MACHINE.network.levels[0].name
    adding = 3 * 3 * PARAMETERS / MACHINE.device.memory_rate  # three more micro-batches
    assert found["update"].seconds == pytest.approx(MACHINE.device.update * PARAMETERS / 4 + adding)
    assert sum(part.seconds for part in found.values()) == pytest.approx(point.seconds, rel=1e-12)
    across = point_of(data_parallel(BATCH, processes=16), engine(question, 16))
    levels = {part.name: part.level for part in step_parts(question, across)}
    assert levels["exchange"] == MACHINE.network.levels[1].name


def test_the_parts_of_a_pipeline(question):
    """Compute m t_max, bubble t - t_max for two stages; recomputation pays one more forward."""
    point = point_of(staged(), engine(question, 4))
    found = {part.name: part.seconds for part in step_parts(question, point)}
    times = [stage.seconds for stage in point.stages]
    assert found["compute"] == 4 * max(times)
    assert found["bubble"] == pytest.approx(min(times), rel=1e-9)
    assert sum(found.values()) == pytest.approx(point.seconds, rel=1e-12)
    again = point_of(staged(recompute="blocks", recompute_stages=(1,)), engine(question, 4))
    assert again.stages[0] == point.stages[0]
    assert again.stages[1].seconds > point.stages[1].seconds
    assert again.stages[1].kept < point.stages[1].kept


def test_every_part_has_words(question):
    """Putting samples into batches, too, which only a measured device prices."""
    slow = replace(MACHINE, device=replace(MACHINE.device, gather=1e-4))
    asked = replace(question, machine=slow)
    for plan in (data_parallel(BATCH, processes=16), staged(recompute="blocks")):
        found = step_parts(asked, point_of(plan, engine(asked, plan.ranks)))
        assert "data" in {part.name for part in found}
        assert all(f"{part.share:.1%}" in part_line(part) for part in found)


def test_the_fullest_stage_by_category(question):
    """4 bytes of weights, with momentum 8 of gradients and moments per parameter, with Adam 12: and
    4 more while it divides by its square roots, when no activations are held. Where one micro-batch
    is all, the gradients of early layers are not there yet when most is held."""
    plan = data_parallel(BATCH, processes=1)
    momentum = replace(
        question, work=replace(question.work, optimiser=OPTIMISER_MEMORY["momentum"])
    )
    twice = data_parallel(BATCH, processes=1, microbatch=BATCH // 2)
    held = fullest_stage_memory(momentum, point_of(twice, engine(momentum, 1)))
    assert (held.weights, held.training) == (PARAMETERS, 2 * PARAMETERS)
    assert held.activations == pytest.approx(question.work.graph.saved_bytes / 2)
    assert held.update == 0
    held = fullest_stage_memory(momentum, point_of(plan, engine(momentum, 1)))
    assert held.weights == PARAMETERS < held.training < 2 * PARAMETERS
    assert held.activations == pytest.approx(question.work.graph.saved_bytes)
    assert held.bytes == held.weights + held.training + held.activations + held.again
    assert held.update == 0
    assert held.share == held.bytes / MACHINE.device.memory
    adam = fullest_stage_memory(question, point_of(plan, engine(question, 1)))
    assert (adam.weights, adam.training) == (PARAMETERS, 3 * PARAMETERS)
    assert (adam.activations, adam.again, adam.update) == (0, 0, PARAMETERS)
    assert adam.bytes == 5 * PARAMETERS


# -- neighbours and hardware ----------------------------------------------------------------------


def test_neighbours_are_priced_as_the_search_does_and_say_why_not(question):
    plan = data_parallel(BATCH, processes=8, microbatch=4)
    asked = engine(question)
    found = {one.step: one for one in neighbour_plans(asked, point_of(plan, asked), most=8)}
    assert len(found) == 8
    assert found["data 8 -> 16"].why == "it needs 16 devices, the cluster has 8"
    assert found["micro-batch 4 -> 8"].why == "a share of 4 samples is no multiple of 8"
    assert found["tensor 1 -> less"].point is None
    fewer = data_parallel(BATCH, processes=4, microbatch=4)
    half = found["data 8 -> 4"].point
    assert half.seconds == point_of(fewer, engine(question, 4)).seconds
    best = find_plans(fastest_runnable_request(question, 8)).best
    assert all(
        one.point.seconds >= best.seconds
        for one in found.values()
        if one.point and one.point.devices == 8 and not missing_in_executor(asked, one.point)
    )
    small = engine(question, memory=1e6)
    tight = neighbour_plans(small, point_of(plan, small), most=16)
    assert tight[3].point is None
    assert "are allowed" in tight[3].why


@pytest.mark.slow
@pytest.mark.parametrize(("number", "devices"), sampled([(0, 8), (1, 16)], 1))
def test_other_hardware_is_asked_of_the_search(question, number, devices):
    """Of a pipeline's messages, inside of a node by their own rate, and from node to node."""
    pipe = PipelinePlan(microbatches=2, cut=("3",))
    plan = pipelined(BATCH, processes=devices, stages=2, pipeline=pipe, microbatch=2)
    asked = fastest_runnable_request(question, devices)
    found = {one.name: one for one in hardware_changes(asked, lambda other: point_of(plan, other))}
    levels = list(MACHINE.network.levels)
    level = levels[number]
    links = {name: getattr(level, name) for name in ("link", "message")}
    faster = {name: replace(link, rate=4 * link.rate) for name, link in links.items()}
    levels[number] = replace(level, **faster)
    by_hand = replace(asked, machine=replace(MACHINE, network=HierarchicalNetwork(tuple(levels))))
    change = found[f"{level.name} links 4x"]
    assert change.own == point_of(plan, PlanSearch(by_hand)).seconds
    assert change.own < point_of(plan, PlanSearch(asked)).seconds
    assert change.best.seconds == find_plans(by_hand).best.seconds
    assert len(found) == 2 * (number + 1) + 3  # a level that nobody uses is not tried
    device = replace(MACHINE.device, dispatch=MACHINE.device.dispatch / 2)
    device = replace(device, kernel=MACHINE.device.kernel / 2)
    quick = replace(asked, machine=replace(MACHINE, device=device))
    launches = found["launches 2x faster"]
    assert launches.own == point_of(plan, PlanSearch(quick)).seconds
    assert launches.own < point_of(plan, PlanSearch(asked)).seconds
    assert launches.best.seconds == find_plans(quick).best.seconds
    twice = replace(asked, memory=2 * asked.cap)
    assert found["memory 2x"].best.seconds == find_plans(twice).best.seconds
    base = find_plans(asked).best
    assert all(
        one.changed == (one.best.degrees != base.degrees)
        for one in found.values()
        if not any(stage.recompute for stage in (*one.best.stages, *base.stages))
    )


@pytest.mark.parametrize("said", [True, False])
def test_memory_binds_where_twice_as_much_changes_the_choice(question, said):
    """Two devices that cannot hold a copy each, by --memory or by what they have."""
    least = 3.5 * PARAMETERS
    device = replace(MACHINE.device, memory=10 * least if said else least)
    tight = replace(
        fastest_runnable_request(question, 2),
        zero=(0,),
        schedules=("1f1b",),
        machine=replace(MACHINE, device=device),
        memory=least if said else None,
    )
    best = find_plans(tight).best
    assert best.degrees.pipeline == 2
    found = {one.name: one for one in hardware_changes(tight, lambda _: best)}
    assert found["memory 2x"].changed
    assert found["memory 2x"].best.degrees.data == 2
    assert not found["compute 2x"].changed


def test_a_choice_changes_only_to_what_is_faster_than_the_plan(question):
    """The plan may be faster than all that the search finds, as with a tensor axis it is; then more
    memory, with which the search finds something else, is not what binds."""
    found = explain_plan(data_parallel(BATCH, processes=8), engine(question), most=16)
    other = replace(found.changes[0], name=TWICE, changed=True)
    for share, more, bound in (
        (2.0, "changes to", "binds, too"),
        (0.5, "nothing faster", "does not"),
    ):
        one = replace(other, own=share * other.best.seconds)
        assert one.better == (share > 1)
        said = "\n".join(explanation_lines(engine(question), replace(found, changes=(one,))))
        assert more in next(line for line in said.splitlines() if f"with {TWICE}" in line)
        assert f"memory {bound}" in said


def test_what_rounding_leaves_is_no_part(question):
    point = point_of(data_parallel(BATCH, processes=8), engine(question))
    for hidden, shown in ((1e-10, 0.0), (1e-8, 1e-8 * point.seconds)):
        terms = step_parts(question, replace(point, hidden=hidden * point.seconds))
        assert {part.name: part.hidden for part in terms}["exchange"] == shown


def test_one_stage_is_one_stage(question):
    """Of two, one computes again."""
    found = explain_plan(
        staged(recompute="blocks", recompute_stages=(1,)), engine(question, 4), most=16
    )
    faster = replace(found.point, seconds=found.point.seconds / 2)
    said = "\n".join(explanation_lines(engine(question), replace(found, today=faster)))
    assert re.search(r"the search would take .*, recompute in 1 stage$", said, re.MULTILINE)


def test_the_choice_is_what_the_command_plan_takes(run, capsys):
    """Schedules and ZeRO included, so that no change leads to a plan that is slower than this."""
    words = (RECIPE, *CLUSTER, "--devices", "8", "--runnable", "--objective", "fastest", "--json")
    assert main(["plan", *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    best = answer["points"][answer["chosen"]]
    code, out, _ = run(data_parallel(BATCH, processes=8), "--recipe", RECIPE, *CLUSTER, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["today"]["seconds"] == best["seconds"]
    assert found["today"]["degrees"] == best["degrees"]
    for change in found["changes"]:
        assert change["best"]["seconds"] <= change["own"] * (1 + 1e-9)


# -- guidelines -----------------------------------------------------------------------------------


def test_the_lemmas_get_the_facts_of_graph_and_cluster(question):
    """Every number of Zou's lemmas and of Das' ratio, from its formula."""
    answers, unknown = advice_of(AdviceRequest(engine(question, 16), 16, 2))
    numbers = {answer.question: answer.numbers for answer in answers}
    alone = point_of(data_parallel(BATCH, processes=1, microbatch=2), engine(question, 1))
    summed = float(MACHINE.network.all_reduce(PARAMETERS, 16))
    overhead = summed + MACHINE.device.update * PARAMETERS / 4
    compute = 16 * alone.stages[0].seconds
    devices = numbers["How many devices are worth their while?"]
    assert devices["R_O"] == pytest.approx(overhead / compute, rel=1e-12)
    servers = numbers["How many parameter servers?"]
    rate = MACHINE.network.levels[1].link.rate
    assert (servers["N_w"], servers["S_p"], servers["B_ps"]) == (2, PARAMETERS, rate)
    exact = 2 * PARAMETERS * 2 / (rate * compute / 16)
    assert servers["exact"] == pytest.approx(exact, rel=1e-12)
    assert servers["N_ps"] == math.ceil(exact)
    samples = numbers["How many samples per node hide the exchange?"]
    flops = question.work.graph.flops.total * BATCH / question.work.samples
    assert samples["balance"] == pytest.approx(flops / compute * 8 / rate, rel=1e-12)
    batch = numbers["Which minibatch, and which algorithm for each layer?"]
    assert batch["X_mini"] == 2  # the whole share
    assert batch["epoch"] == pytest.approx(alone.stages[0].seconds)
    shown = numbers["How much of the gradient exchange shows?"]
    assert shown["compute"] == pytest.approx(alone.stages[0].seconds)
    assert any("convolutions" in line for line in unknown)


def test_a_tight_memory_makes_blocks_compute_again(question):
    """The knapsack: what is kept fits into what parameters leave, and no smaller batch wins."""
    state = 4 * PARAMETERS
    free = AdviceRequest(engine(question, 1), 1, 32).minibatch
    tight = AdviceRequest(
        engine(question, 1, memory=state + 0.4 * free.best.chosen.bytes), 1, 32
    ).minibatch
    assert set(free.best.chosen.algorithms.values()) == {"keep"}
    assert tight.best.chosen.bytes <= tight.best.bound
    assert tight.best.batch < 32 or "recompute" in tight.best.chosen.algorithms.values()
    assert tight.best.epoch > free.best.epoch
    assert AdviceRequest(engine(question, 1, memory=state), 1, 32).minibatch is None


def test_what_is_not_known_is_named(question):
    one, unknown = advice_of(AdviceRequest(engine(question, 1), 1, 32))
    assert not any("servers" in answer.question for answer in one)
    assert any("one device exchanges nothing" in line for line in unknown)
    free = replace(MACHINE.network.levels[0].link, rate=math.inf)
    network = HierarchicalNetwork((replace(MACHINE.network.levels[0], link=free, width=math.inf),))
    other = replace(question, machine=replace(MACHINE, network=network))
    _, unknown = advice_of(AdviceRequest(engine(other), 8, 4))
    assert any("no rate of" in line for line in unknown)


def test_folded_layers_are_all_found(question):
    """Folding gives an input another role; the volumes are those of the model's own layers."""
    assert 4 * sum(layer.weights + layer.ofm for layer in layers_of(question.work.graph)) == (
        PARAMETERS
    )


# -- the command ----------------------------------------------------------------------------------


def test_without_recipe_and_cluster_it_says_what_the_plan_says(run):
    code, out, _ = run(staged())
    assert code == 0
    assert "1f1b over 2 ranks" in out
    assert json.loads(run(staged(), "--json")[1])["plan"] == staged().hash


@pytest.mark.slow
def test_sentences_and_json_of_the_same_plan(run, question):
    code, out, _ = run(staged(), "--recipe", RECIPE, *CLUSTER)
    assert code == 0
    point = point_of(staged(), engine(question, 4))
    assert "what binds: the launches of kernels, not the products (compute, " in out
    assert "memory: stage 1 is the fullest" in out
    assert "data 2 -> 4: " in out
    assert "among the executable plans the search would take" in out
    code, out, _ = run(staged(), "--recipe", RECIPE, *CLUSTER, "--json")
    data = json.loads(out)
    assert data["point"]["seconds"] == point.seconds
    assert len(data["neighbours"]) == 8
    assert data["changes"][0]["name"] == "node links 2x"
    assert isinstance(data["changes"][0]["own"], float)


def test_guidelines_of_a_plan(run):
    code, out, _ = run(staged(), "--recipe", RECIPE, *CLUSTER, "--guidelines")
    assert code == 0
    assert "(Zou et al. 2017, Lemma 1)" in out
    assert "not known: " in out
    assert not re.search(r"\blinear(_\d+)?\b", out)  # modules are named, not operators


def test_refusals(run, question):
    assert "--recipe and --cluster" in run(staged(), "--guidelines")[2]
    assert run(staged(), "--recipe", RECIPE)[0] == 1
    code, _, err = run(data_parallel(BATCH, processes=16), "--recipe", RECIPE, *CLUSTER[:2])
    assert (code, "the plan has 16 ranks, the cluster 8" in err) == (2, True)
    code, _, err = run(data_parallel(8, processes=2), "--recipe", RECIPE, *CLUSTER)
    assert (code, "plan 8 samples, recipe 32" in err) == (2, True)
    with pytest.raises(PlanError, match="no price") as error:
        degrees_of(staged(schedule="pipedream-2bw"))
    assert "pipedream-2bw" in str(error.value)
    pipe = PipelinePlan(microbatches=4, cut=("nowhere",))
    wrong = pipelined(BATCH, processes=4, stages=2, pipeline=pipe, microbatch=4)
    with pytest.raises(PlanError, match="cannot be cut there"):
        point_of(wrong, engine(question, 4))


# -- collectives and splits -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_collectives_of_a_step(run):
    """Rank by rank of a pipeline, as its executor carries them out: four micro-batches, 7 ranks'
    worth of nothing else."""
    code, out, _ = run(staged(), "--recipe", RECIPE, *CLUSTER, "--json")
    assert code == 0
    first, last = json.loads(out)["collectives"]
    ways = [(c["kind"], c["phase"], c["count"]) for c in first if c["axis"] == "pipe"]
    assert ways == [("send", "forward", 4), ("receive", "backward", 4)]
    assert [(c["kind"], c["count"]) for c in last if c["axis"] == "pipe"] == [
        ("receive", 4),
        ("send", 4),
    ]
    sums = [c for c in (*first, *last) if c["axis"] == "data"]
    assert sum(c["bytes"] - c["beside"] for c in sums) == PARAMETERS
    assert {c["ranks"] for c in sums} == {2}
    code, out, _ = run(staged(), "--recipe", RECIPE, *CLUSTER)
    table = out[out.index("as the executor carries them out") : out.index("one step away")]
    assert "rank of the first copy 0:" in table
    assert "all_reduce     data   of 2" in table


def test_the_collectives_of_split_samples_and_layers(run):
    """Also where the search has no price: halos of the first stage, sums of split layers."""
    cut = pipelined(
        4,
        processes=4,
        stages=2,
        pipeline=PipelinePlan(microbatches=2),
        split=LayerSplit(spatial=(2,)),
    )
    recipes = "support.split_recipes:"
    code, out, err = run(cut, "--recipe", f"{recipes}segmenter", *CLUSTER, "--json")
    assert code == 0
    assert "no price for this plan: split.spatial" in err
    found = json.loads(out)["collectives"]
    assert len(found) == 4
    for one in found:
        kinds = {(c["kind"], c["axis"]) for c in one}
        assert {("send", "space"), ("receive", "space"), ("all_reduce", "data")} <= kinds
        assert [c["bytes"] for c in one if c["axis"] == "world"] == [24, 8]  # the recipe clips
    layers = data_parallel(8, processes=4, split=LayerSplit(tensor=(2,)))
    code, out, _ = run(layers, "--recipe", f"{recipes}speaker", *CLUSTER)
    assert code == 0
    table = out[out.index("as the executor carries them out") : out.index("one step away")]
    assert "all_reduce     tensor of 2" in table


def test_tensors_between_stages_are_what_the_stages_of_the_model_give(run, question):
    model, rows = Stack(), torch.randn(4, 6)
    stages = cut(model, lambda model, data: model(data).sum(), rows, at=["3"])
    (given,) = stages[0].module(rows)
    asked = engine(question, 4)
    (found,) = stage_boundaries(staged(), asked, point_of(staged(), asked)).tensors
    assert (found.shape, found.bytes, found.protocol) == (given.shape, given.nbytes, "static")
    ragged = pipelined(
        BATCH, processes=2, stages=2, pipeline=PipelinePlan(microbatches=3, cut=("3",))
    )
    asked = engine(question, 2)
    (found,) = stage_boundaries(ragged, asked, point_of(ragged, asked)).tensors
    assert (found.shape, found.bytes, found.protocol) == ((None, 64), 11 * 64 * 4, "dynamic")
    out = run(ragged, "--recipe", RECIPE, *CLUSTER)[1]
    assert f"0 to 1: {found.tensor} [varies, 64] float32, 2.75 KiB, dynamic; made by" in out
    alone = data_parallel(BATCH, processes=2)
    assert not stage_boundaries(alone, asked, point_of(alone, asked)).tensors


def test_splits_of_convolutions_and_products(run):
    plan = data_parallel(12, processes=4)
    code, out, _ = run(
        plan, "--recipe", "support.recipes:normalised", *CLUSTER, "--guidelines", "--json"
    )
    assert code == 0
    advice = {one["question"]: one for one in json.loads(out)["advice"]}
    table = advice["Which split of the convolutions is best for 4 devices?"]
    assert {"data", "spatial", "filter", "channel"} <= table["numbers"].keys()
    assert "channel at most 1 device." in table["answer"]  # the images have one channel
    assert "spatial at most" not in table["answer"]  # the classifier behind them has no space
    degrees = advice["Which tensor degree of each product exchanges least?"]
    assert degrees["source"].startswith("Das et al. 2016")


def test_a_memory_that_is_no_size_is_refused(run):
    code, _, err = run(
        data_parallel(BATCH, processes=2), "--recipe", RECIPE, *CLUSTER, "--memory", "2"
    )
    assert code == 1
    assert 'write "2 GiB" or "2 B"' in err


def test_algorithms_are_measured(run):
    plan = data_parallel(12, processes=4)
    words = ("--recipe", "support.recipes:normalised", *CLUSTER, "--guidelines", "--measure")
    code, out, err = run(plan, *words)
    assert code == 0, err
    answer = out[out.index("Which minibatch, and which algorithm") :]
    assert "an epoch takes" in answer
    assert "conv " in answer.partition("(Zou")[0]
    assert "--measure" not in out


# -- what the plan's file says --------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_s_file_says_recipe_and_cluster(capsys, tmp_path, monkeypatch):
    """A preset, and a file that is named from the folder of the plan; explain and simulate."""
    (tmp_path / "plans").mkdir()
    (tmp_path / "c.toml").write_text(to_toml(of_preset("p3.16xlarge", nodes=2)))
    monkeypatch.chdir(tmp_path)
    plan = Path("plans/plan.json")
    for cluster in (CLUSTER, ("--cluster", "c.toml")):
        words = ("--devices", "2", "--runnable", "--objective", "fastest", "--out", str(plan))
        assert main(["plan", RECIPE, *cluster, *words]) == 0
        monkeypatch.chdir(tmp_path / "plans")
        for command in ("explain", "simulate"):
            capsys.readouterr()
            assert main([command, "plan.json"]) == 0
            alone = capsys.readouterr()
            assert f"recorded in the plan: --recipe {RECIPE} --cluster" in alone.err
            assert "is not what it was" not in alone.err
            said = [word.replace("c.toml", "../c.toml") for word in cluster]
            assert main([command, "plan.json", "--recipe", RECIPE, *said]) == 0
            assert capsys.readouterr().out == alone.out
        monkeypatch.chdir(tmp_path)
    asked = Plan.load(plan).prediction.asked
    assert (asked.recipe, asked.cluster, asked.nodes) == (RECIPE, "../c.toml", 0)
    assert Plan.load(plan).hash == replace(Plan.load(plan), prediction=None).hash
    text = Path("c.toml").read_text()
    Path("c.toml").write_text(to_toml(of_preset("p3dn.24xlarge", nodes=2)))
    assert Path("c.toml").read_text() != text
    assert main(["simulate", str(plan)]) == 0
    assert "c.toml has changed since the plan was made" in capsys.readouterr().err


def test_launches_bind_where_the_host_is_as_slow_as_the_compute(question):
    """The stack is tiny: what a GPU computes takes less than to start it."""
    found = explain_plan(data_parallel(BATCH, processes=2), engine(question, 2), most=16)
    assert found.parts[0].name == "compute"
    for issuing, said in ((found.issuing, "the launches of kernels"), (0.0, "compute (")):
        assert f"what binds: {said}" in "\n".join(
            explanation_lines(engine(question), replace(found, issuing=issuing))
        )
