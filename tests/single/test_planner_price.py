"""single: what the search prices: order of axes, tied weights, precision, overlap, schedules."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from headway.capture import capture
from headway.cluster.device import HostOverhead
from headway.cluster.link import Link
from headway.cost.memory import OPTIMISER_MEMORY
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.gradient_exchange import BUCKETS
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.step_parts import step_parts
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.plan_conversion import (
    degrees_of,
    missing_in_executor,
    point_of,
    to_plan,
    unpriced_parts,
)
from headway.planner.search.request import PlanRequest, restrict_to_executor
from headway.planner.traffic.estimate import collectives_of
from headway.plans import data_parallel
from headway.plans.exchange import ExchangePlan
from headway.schedule.generators.registry import RUNNABLE_SCHEDULES
from support.big_models import ids
from support.machines import fitted_machine

SLOW = Link(rate=1e9, latency=20e-6)
FAST = Link(rate=200e9, latency=2e-6)
NETWORK = HierarchicalNetwork(
    (
        LinkLevel(name="node", width=4.0, link=FAST),
        LinkLevel(name="cluster", width=np.inf, link=SLOW),
    )
)
DEVICE = fitted_machine("a100").device
MACHINE = replace(fitted_machine("a100"), network=NETWORK)


class Tower(nn.Module):
    """Equal layers; wide ones have heavy weights, long batches heavy messages."""

    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x)


class Tied(nn.Module):
    """A head that is the embedding, as in GPT-2."""

    def __init__(self, words=512, width=64):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layers(self.embedding(x)))


def captured(make, data, samples=16):
    with torch.device("meta"):
        return PlanningWorkload(graph=fuse_light_operators(capture(make(), data)), samples=samples)


@pytest.fixture(scope="module")
def tower():
    return captured(lambda: Tower(256, 8), torch.empty(16, 256, device="meta"))


@pytest.fixture(scope="module")
def tied():
    return captured(Tied, ids(16, 8))


def asked(work, **changed):
    given = {"work": work, "machine": MACHINE, "devices": (8,), "batch": 64, "memory": 1e12}
    return PlanRequest(**given | changed)


def degrees(**changed):
    given = {"tensor": 1, "data": 1, "pipeline": 1, "microbatch": 4, "microbatches": 4}
    return Degrees(**given | changed)


# -- order of axes --------------------------------------------------------------------------------


def two_orders(work, microbatch, number=4):
    """Two copies of four stages on two nodes of four devices, in both orders."""
    engine = PlanSearch(asked(work, batch=2 * number * microbatch))
    return [
        engine.candidate(
            degrees(data=2, pipeline=4, microbatch=microbatch, microbatches=number, order=order)
        ).fastest(1e12)
        for order in ("tpd", "tdp")
    ]


def test_which_axis_goes_over_the_slow_links():
    """Wide layers and small batches: sums within nodes; narrow layers and large batches: messages
    within nodes. Both by hand."""
    heavy = captured(lambda: Tower(512, 8), torch.empty(16, 512, device="meta"))
    light = captured(lambda: Tower(64, 8), torch.empty(16, 64, device="meta"))
    sums, messages = two_orders(heavy, 1), two_orders(light, 4096)
    assert sums[0].seconds > sums[1].seconds  # data inside pipe
    assert messages[0].seconds < messages[1].seconds  # pipe inside data
    # A stage has 2 layers; 4 copies of a pipeline's stages share a node's link in "tpd".
    size = 4 * 2 * (512 * 512 + 512)
    apart = 2 * SLOW.latency + 2 * (1 / 2) * size * 4 / SLOW.rate
    beside = 2 * FAST.latency + size / FAST.rate
    assert sums[0].exchange == pytest.approx(apart, rel=1e-9)
    assert sums[1].exchange == pytest.approx(beside, rel=1e-9)
    # One micro-batch passes every border twice; in "tdp" the one in the middle lies between nodes,
    # whose link the two copies share.
    size = 4 * 64 * 4096
    far = SLOW.latency + size * 2 / SLOW.rate
    near = FAST.latency + size / FAST.rate
    inside, across = two_orders(light, 4096, number=1)
    assert inside.messages == pytest.approx(6 * near, rel=1e-9)
    assert across.messages == pytest.approx(4 * near + 2 * far, rel=1e-9)


def test_the_search_takes_the_better_order(tower):
    engine = asked(tower, tensor=(1,), zero=(0,), objective="fastest")
    both = find_plans(engine).best.seconds
    each = [find_plans(replace(engine, orders=(order,))).best.seconds for order in ("tpd", "tdp")]
    assert both == min(each)


def test_a_mesh_with_data_inside_goes_to_a_plan_and_back(tower):
    question = asked(tower, tensor=(1,), zero=(0,), batch=32)
    outcome = find_plans(question)
    point = two_orders(tower, 4)[1]
    plan = to_plan(outcome, point)
    assert plan.mesh.names == ("pipe", "data")
    assert degrees_of(plan) == point.degrees
    assert point_of(plan, PlanSearch(question)).seconds == point.seconds


def test_uneven_shares_count_as_the_largest():
    plan = data_parallel(64, processes=4, microbatch=8)
    plan = replace(plan, batch=replace(plan.batch, shares=(8, 8, 8, 40)))
    found = degrees_of(plan)
    assert (found.microbatch, found.microbatches) == (8, 5)
    assert "all count as the largest" in " ".join(unpriced_parts(plan))


# -- tied weights, precision ----------------------------------------------------------------------


def test_tied_weights_count_once_on_a_device(tied):
    """Without a pipeline once; at both ends of a pipeline on both, and summed between them."""
    engine = PlanSearch(asked(tied, devices=(1,)))
    whole = engine.candidate(degrees()).fastest(1e12)
    assert whole.stages[0].params == tied.graph.parameter_bytes
    assert whole.stages[0].state == 4 * tied.graph.parameter_bytes
    cut = engine.candidate(degrees(pipeline=2)).fastest(1e12)
    shared = 4 * 512 * 64
    assert sum(stage.params for stage in cut.stages) == tied.graph.parameter_bytes + shared
    sum_of_two = 2 * FAST.latency + shared / FAST.rate
    assert cut.exchange == pytest.approx(sum_of_two, rel=1e-9)
    alone = PlanSearch(asked(captured(lambda: Tower(64, 4), torch.empty(16, 64, device="meta"))))
    assert alone.candidate(degrees(pipeline=2)).fastest(1e12).exchange == 0


def test_gradients_of_tied_weights_leave_with_the_first_use(tied):
    gradients = PlanSearch(asked(tied)).shared.gradients
    assert sum(gradients.sizes) == tied.graph.parameter_bytes
    assert (gradients.sizes[-1], gradients.units[-1]) == (4 * 512 * 64, 0)


def test_autocast_computes_products_in_sixteen_bits():
    """A100: 19.5 TFLOP/s in 32 bits, 312 in 16; large products take 1/16 of the time."""
    work = captured(lambda: Tower(8192, 2), torch.empty(16, 8192, device="meta"))
    plain, half = (
        PlanSearch(asked(work, precision=precision))
        .candidate(degrees(microbatch=4096, microbatches=1))
        .fastest(1e12)
        for precision in ("", "bfloat16")
    )
    assert plain.busy / half.busy == pytest.approx(16, rel=0.05)
    assert half.stages[0].state == plain.stages[0].state  # parameters stay in 32 bits
    question = asked(work, precision="bfloat16", batch=4096)
    outcome = find_plans(replace(restrict_to_executor(question), devices=(1,), objective="fastest"))
    assert to_plan(outcome, outcome.best).memory.precision == "bfloat16"


# -- overlap --------------------------------------------------------------------------------------


def test_what_is_hidden_and_what_shows(tower):
    """By hand: one bucket per layer; the last one to leave is the first layer's."""
    engine = PlanSearch(asked(tower, batch=64))
    plan = data_parallel(64, processes=8, microbatch=4, exchange=ExchangePlan(bucket="256 KiB"))
    point = point_of(plan, engine)
    price = [float(NETWORK.all_reduce(n, 8)) for n in (4 * 256, 4 * 256 * 256)]
    assert point.exchange + point.hidden == pytest.approx(8 * sum(price), rel=1e-9)
    assert 0 < point.exchange < point.exchange + point.hidden
    late = point_of(
        data_parallel(
            64, processes=8, microbatch=4, exchange=ExchangePlan(bucket="256 KiB", overlap=False)
        ),
        engine,
    )
    assert late.hidden == 0
    assert late.seconds - point.seconds == pytest.approx(point.hidden, rel=1e-9)
    found = {part.name: part for part in step_parts(engine.question, point)}
    assert found["exchange"].hidden == point.hidden
    assert sum(part.seconds for part in found.values()) == pytest.approx(point.seconds)


def test_a_machine_on_which_nothing_overlaps(tower):
    """`DeviceModel.overlap` 0: the exchange costs what it takes."""
    slow = replace(MACHINE, device=replace(MACHINE.device, overlap=0.0))
    for zero in (0, 1, 2, 3):
        point, serial = (
            PlanSearch(asked(tower, machine=machine))
            .candidate(degrees(data=8, microbatch=4, microbatches=2, zero=zero))
            .fastest(1e12)
            for machine in (MACHINE, slow)
        )
        assert serial.hidden == pytest.approx(0, abs=1e-12)
        assert serial.seconds >= point.seconds
        assert point.hidden > 0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("data", "pipeline"), [(8, 1), (2, 4), (4, 2)])
def test_no_plan_is_below_its_bound(tower, zero, data, pipeline):
    engine = PlanSearch(asked(tower))
    for schedule, virtual, pipes in [("1f1b", 1, 1), ("interleaved", 2, 1), ("chimera", 1, 2)]:
        if pipeline == 1 or pipeline * virtual > 8:
            continue
        candidate = engine.candidate(
            degrees(
                data=data,
                pipeline=pipeline,
                microbatches=4,
                zero=zero,
                schedule=schedule,
                virtual=virtual,
                pipes=pipes,
            )
        )
        point = candidate.fastest(1e12)
        assert point.seconds >= candidate.bound()[0]
        assert point.bytes >= candidate.bound()[1]
    if pipeline == 1:
        candidate = engine.candidate(degrees(data=data, microbatches=2, zero=zero))
        assert candidate.fastest(1e12).seconds >= candidate.bound()[0]


# -- schedules ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_schedules_that_run(tower):
    """The best of them equals that of opening everything, under a memory that binds, too: the least
    with which each still fits; the plan of each point is legal and has its price."""
    question = restrict_to_executor(
        asked(tower, schedules=RUNNABLE_SCHEDULES, batch=32, objective="fastest")
    )
    engine, needs = PlanSearch(question), defaultdict(list)
    for point in (engine.open(one).fastest(1e12) for one in engine.combinations()):
        if point and not missing_in_executor(engine, point):
            needs[point.degrees.schedule].append(point.bytes)
    least = max(map(min, needs.values()))
    assert least < max(map(max, needs.values())) / 2
    for cap in (1e12, least):
        asked_ = replace(question, memory=cap)
        outcome = find_plans(asked_)
        every = [outcome.search.open(one).fastest(cap) for one in outcome.search.combinations()]
        assert outcome.best.seconds == min(p.seconds for p in every if p)
        assert all(p.bytes <= cap for p in every if p)
        seen = set()
        for point in every:
            if (
                point is None
                or missing_in_executor(outcome.search, point)
                or point.degrees.schedule in seen
            ):
                continue
            seen.add(point.degrees.schedule)
            again = point_of(to_plan(outcome, point), PlanSearch(asked_))
            assert again.degrees == point.degrees
            assert again.seconds == pytest.approx(point.seconds, rel=1e-12)
            assert again.bytes == pytest.approx(point.bytes, rel=1e-12)
        assert seen == set(RUNNABLE_SCHEDULES)


def test_copies_hold_parameters_twice(tower):
    """Chimera: two copies of every stage, summed between their ranks."""
    engine = PlanSearch(asked(replace(tower, optimiser=OPTIMISER_MEMORY["momentum"])))
    plain, chimera = (
        engine.candidate(degrees(pipeline=4, schedule=schedule, pipes=pipes))
        for schedule, pipes in (("1f1b", 1), ("chimera", 2))
    )
    one, two = (c.planned((0, 2, 4, 6, len(engine.row))) for c in (plain, chimera))
    assert one.exchange == 0
    assert two.exchange > 0
    own = [two.stages[0], two.stages[3]]
    kept = chimera.book.held(0, [stage.kept / stage.flights for stage in two.stages])
    assert kept == pytest.approx(3 * one.stages[3].kept, rel=0.35)  # D/2 + 1 micro-batches
    micro = kept + max(stage.transient for stage in own)
    # The messages in which gradients are summed; four micro-batches of samples, once; and what
    # stage 3 sends back.
    sums = sum(stage.params for stage in own) + (4 + 1) * 4 * 256 * 4
    assert two.ranks[0] == pytest.approx(sum(stage.state for stage in own) + max(micro, sums))


def test_copies_are_summed_in_one_group(tower):
    """Four copies of each of two ranks' stages: one sum over eight, by hand; its calls say so."""
    engine = PlanSearch(asked(tower, machine=replace(MACHINE, device=replace(DEVICE, overlap=0.0))))
    point = engine.candidate(
        degrees(data=4, pipeline=2, schedule="chimera", pipes=2, order="tdp")
    ).planned((0, 4, len(engine.row)))
    sizes = [stage.params for stage in point.stages]
    sums = [float(NETWORK.all_reduce(size, 8, 1)) for size in sizes]
    assert max(sums) <= point.exchange + point.hidden <= sum(sums) * (1 + 1e-9)
    for calls, size in zip(collectives_of(engine, point), sizes, strict=True):
        found = [(c.ranks, c.bytes, c.count) for c in calls if c.kind == "all_reduce"]
        assert found == [(8, size, 1)]


# -- optimisers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "state"), [("sgd", 2), ("momentum", 3), ("adamw", 4)])
def test_state_is_that_of_the_optimiser(tower, name, state):
    """Weights, gradients, and what the optimiser keeps, in parameters' sizes."""
    engine = PlanSearch(asked(replace(tower, optimiser=OPTIMISER_MEMORY[name])))
    point = engine.candidate(degrees()).fastest(1e12)
    held = tower.graph.parameter_bytes
    assert point.stages[0].state == state * held
    # Adam's square roots of all moments at once are above what 4 samples keep.
    assert point.bytes >= (state + OPTIMISER_MEMORY[name].together) * held
    sharded = engine.candidate(degrees(data=4, zero=1)).fastest(1e12).stages[0]
    # Whole weights and gradients, and beside them the parts that are updated, with their state.
    assert sharded.state == (2 + (1 + state - 2) / 4) * held
    assert sharded.passing == OPTIMISER_MEMORY[name].together * held / 4


def test_an_update_that_does_not_fit_is_not_planned(tower):
    engine = PlanSearch(asked(tower))
    for pipeline, virtual, schedule in [(1, 1, "1f1b"), (4, 1, "1f1b"), (4, 2, "interleaved")]:
        candidate = engine.candidate(degrees(pipeline=pipeline, virtual=virtual, schedule=schedule))
        point = candidate.fastest(1e12)
        updates = [sum(s.state + s.passing for s in point.stages[n::pipeline]) for n in range(4)]
        assert point.bytes == max(updates)
        assert candidate.fastest(point.bytes) is not None
        tight = candidate.fastest(point.bytes - 1)
        assert tight is None or tight.bytes < point.bytes


def test_a_rank_updates_all_its_stages(tower):
    """Two stages of one layer each against one of two layers."""
    engine = PlanSearch(asked(tower))
    one, two = (
        engine.candidate(
            degrees(pipeline=4, virtual=virtual, schedule=schedule, microbatches=8)
        ).planned(tuple(range(0, len(engine.row) + 1, 2 // virtual)))
        for schedule, virtual in (("1f1b", 1), ("interleaved", 2))
    )
    assert two.update == pytest.approx(one.update, rel=1e-9)


def test_floor_and_gap(tower):
    outcome = find_plans(asked(tower, objective="fastest"))
    assert outcome.gap == 0
    assert 0 < outcome.floor <= outcome.best.seconds
    assert outcome.unexplored == pytest.approx(outcome.best.seconds / outcome.floor - 1)
    assert BUCKETS[0] == ExchangePlan().bucket_bytes


# -- beside kernels -------------------------------------------------------------------------------


def test_what_a_step_takes_beside_its_kernels_is_priced(tower):
    host = HostOverhead(
        step=3e-3, microbatch=2e-4, tensor=5e-5, piped_step=4e-3, piped_microbatch=6e-4
    )
    machine = replace(MACHINE, device=replace(DEVICE, host=host))
    tensors = len({name for o in tower.graph.operators for name in o.parameters})
    m = 32 // 2 // 4
    for wanted, own, more in (
        (degrees(data=2, microbatch=4, microbatches=m), 3e-3 + m * 2e-4 + tensors * 5e-5, 0.0),
        (
            degrees(data=2, pipeline=4, microbatch=4, microbatches=m),
            4e-3 + tensors / 4 * 5e-5,
            (m + 3) * 6e-4,
        ),
    ):
        questions = [asked(tower, machine=machine_, batch=32) for machine_ in (MACHINE, machine)]
        plain, told = (PlanSearch(q).candidate(wanted).fastest(1e12) for q in questions)
        found = {part.name: part.seconds for part in step_parts(questions[1], told)}
        assert found["host"] == pytest.approx(own)
        assert sum(found.values()) == pytest.approx(told.seconds)
        assert told.seconds - plain.seconds == pytest.approx(own + more, rel=0.02)
        assert "host" not in {part.name for part in step_parts(questions[0], plain)}


# -- samples --------------------------------------------------------------------------------------


def test_each_rank_puts_the_samples_of_its_copy_together(tower):
    """One by one, and what they move, read and written; a pipeline's ranks all read the same."""
    gather = 1e-4
    device = replace(DEVICE, gather=gather)
    for wanted in (degrees(data=2), degrees(data=2, pipeline=4)):
        points = []
        for machine, reads in ((MACHINE, True), (replace(MACHINE, device=device), True),
                               (replace(MACHINE, device=device), False)):  # fmt: skip
            question = asked(replace(tower, reads=reads), machine=machine, batch=32)
            points.append(PlanSearch(question).candidate(wanted).fastest(1e12))
        plain, reading, beside = points
        own = 16 * gather + 2 * 16 * 4 * 256 / DEVICE.memory_rate
        assert reading.reading == pytest.approx(own)
        assert reading.seconds == pytest.approx(plain.seconds + own)
        assert {p.name: p.seconds for p in step_parts(question, reading)}["data"] == reading.reading
        assert (plain.reading, beside.reading) == (0.0, 0.0)
        assert beside.seconds == plain.seconds
