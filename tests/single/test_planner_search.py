"""single: the search: bounds, the questions' agreement, determinism, the 100K-class example."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.errors import PlanError
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.estimate.stage_cut import make_units, unit_of_module
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.operator_choices import operator_choices
from headway.planner.search.plan_conversion import missing_in_executor
from headway.planner.search.request import PlanRequest
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.big_models import ResNet50, ids, meta

MACHINE = machine_of(of_preset("dgx-a100", nodes=1))


def gpt(layers=4, width=256):
    config = TransformerConfig(vocabulary=1024, window=64, width=width, layers=layers, heads=8)
    with torch.device("meta"):
        return PlanningWorkload(
            graph=fuse_light_operators(capture(TransformerLM(config), ids(16, 64))), samples=16
        )


@pytest.fixture(scope="module")
def work():
    return gpt()


def asked(work, **changed):
    return PlanRequest(**{"work": work, "machine": MACHINE, "devices": (8,), "batch": 32} | changed)


def facts(outcome):
    return [(p.seconds, p.bytes, p.degrees, p.border, p.stages) for p in outcome.points]


def test_same_question_same_answer(work):
    assert facts(find_plans(asked(work))) == facts(find_plans(asked(gpt())))


def test_units_are_the_blocks(work):
    row = make_units(work.graph)
    kinds = [unit.kind for unit in row]
    assert kinds.count(kinds[-3]) == 3  # the first block makes the rotations, too
    assert all(one.exit == two.entry for one, two in pairwise(row))
    assert (row[0].start, row[-1].stop) == (0, len(work.graph.operators))


def test_the_questions_agree(work):
    """F6: mini-time is the fastest point within its cap, mini-parallelism the fewest devices."""
    counts = (1, 2, 4, 8)
    free = find_plans(asked(work, devices=counts, objective="fastest"))
    cap = free.best.bytes * 0.9
    capped = find_plans(asked(work, devices=counts, objective="fastest", memory=cap))
    assert capped.best.bytes <= cap
    assert capped.best.seconds >= free.best.seconds
    assert free.gap == capped.gap == 0
    alone = find_plans(asked(work, devices=(1,), memory=2 * cap))
    least = min(point.bytes for point in alone.points)
    fewest = find_plans(asked(work, devices=counts, objective="fewest-devices", memory=least * 0.7))
    assert fewest.best.devices > 1
    fewer = tuple(count for count in counts if count < fewest.best.devices)
    with pytest.raises(PlanError):
        find_plans(asked(work, devices=fewer, memory=least * 0.7))


def test_of_the_plans_with_the_fewest_devices_the_fastest_is_taken(work):
    counts = (2, 4, 8)
    roomy = find_plans(asked(work, devices=(2,))).points
    for cap in sorted({1.01 * point.bytes for point in roomy}):
        fewest = find_plans(
            asked(work, devices=counts, objective="fewest-devices", memory=cap)
        ).best
        fastest = find_plans(asked(work, devices=(2,), objective="fastest", memory=cap)).best
        assert (fewest.devices, fewest.seconds) == (2, fastest.seconds)


@pytest.mark.slow
def test_the_fastest_of_all_combinations(work):
    """Bounds drop nothing: opening every combination finds the same."""
    for memory in (80e9, 60e6, 40e6):
        try:
            outcome = find_plans(asked(work, objective="fastest", memory=memory))
        except PlanError:
            outcome = None
        engine = (outcome or find_plans(asked(work))).search
        every = [engine.open(one).fastest(memory) for one in engine.combinations()]
        best = min((point.seconds for point in every if point), default=np.inf)
        assert best == (outcome.best.seconds if outcome else np.inf)


def test_no_plan_fits(work):
    with pytest.raises(PlanError, match="no plan fits"):
        find_plans(asked(work, devices=(1,), memory=5e6))


def test_forced_choices(work):
    forced = find_plans(
        asked(work, tensor=(8,), force=(("blocks.*", "split"),), objective="fastest")
    )
    found = operator_choices(forced.search.tables_at(forced.best), forced.best)
    products = [c for c in found if c.module.startswith("blocks.") and c.kind == "linear"]
    assert products
    assert all(choice.how.startswith("split:") for choice in products)
    with pytest.raises(PlanError, match="what is forced"):
        find_plans(asked(work, tensor=(8,), force=(("blocks.*", "split:nothing"),)))


def test_decisions_add_up(work):
    outcome = find_plans(asked(work, tensor=(4,)))
    for point in outcome.points:
        held = [0.0] * len(point.stages)
        for choice in operator_choices(outcome.search.tables_at(point), point):
            held[choice.stage] += choice.parameters
        # A tied parameter counts once in a stage, but each of its operators holds it.
        twice = [outcome.search.shared.doubled(s.start, s.stop) / 4 for s in point.stages]
        once = [own - more for own, more in zip(held, twice, strict=True)]
        assert once == pytest.approx([stage.params for stage in point.stages], rel=1e-12)


def loss(model, data):
    return torch.nn.functional.cross_entropy(model(data[0]), data[1])


@pytest.mark.slow
def test_a_hundred_thousand_classes():
    """W6: replicate the backbone, split the head; 89.7 % less to synchronise (Whale, figure 2)."""
    with torch.device("meta"):
        data = (meta(64, 3, 224, 224), ids(64))
        graph = fuse_light_operators(capture(ResNet50(100_000), data, loss=loss))
    machine = machine_of(of_preset("p3.16xlarge", nodes=4))
    work = PlanningWorkload(graph=graph, samples=64)
    changed = {"machine": machine, "devices": (32,), "tensor": (32,), "batch": 1024}
    outcome = find_plans(asked(work, objective="fastest", **changed))
    found = [
        c
        for c in operator_choices(outcome.search.tables_at(outcome.best), outcome.best)
        if c.parameters
    ]
    assert {c.how for c in found if c.module != "head"} == {"split:n"}  # each its samples
    assert [c.how for c in found if c.module == "head"] == ["split:o"]  # each its classes
    fallen = 1 - sum(choice.summed for choice in found) / graph.parameter_bytes
    assert fallen == pytest.approx(0.897, abs=0.001)


def test_microbatches_under_way():
    degrees = Degrees(tensor=1, data=1, pipeline=4, microbatch=1, microbatches=3)
    assert [degrees.in_flight(behind) for behind in range(4)] == [1, 2, 3, 3]


def test_one_micro_batch_is_cut_where_the_longest_sum_is_short():
    """All cuts have one sum of stages; what differs is the stage whose gradients are last."""
    found = PlanSearch(asked(gpt(8, width=2048), batch=8))
    degrees = Degrees(tensor=1, data=4, pipeline=2, microbatch=2, microbatches=1)
    candidate, length = found.candidate(degrees), len(found.row)
    each = [candidate.planned((0, start, length)).seconds for start in range(1, length)]
    assert max(each) > 1.2 * min(each)
    for known in (np.inf, max(each)):
        point = candidate.fastest(found.question.cap, known)
        assert point is not None
        assert point.seconds <= 1.05 * min(each)


def test_a_stage_is_named_after_what_was_folded_into_its_first_layer():
    """An activation that is folded into the layer behind it begins the stage."""
    layers = [part for _ in range(3) for part in (torch.nn.Linear(8, 8), torch.nn.ReLU())]
    with torch.device("meta"):
        graph = fuse_light_operators(
            capture(torch.nn.Sequential(*layers, torch.nn.Linear(8, 4)), meta(16, 8))
        )
    row = make_units(graph)
    assert [unit.module for unit in row] == ["0", "1", "3", "5"]
    assert unit_of_module("1", row) == unit_of_module("2", row) == 1
    assert unit_of_module("5", row) == unit_of_module("6", row) == 3
    nested = [replace(unit, module=f"{unit.module}.1", layer=f"{unit.layer}.0") for unit in row]
    assert unit_of_module("2", nested) == 1


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (torch.nn.Linear(8, 8) for _ in range(3))
        self.act = torch.nn.ReLU()

    def forward(self, x):
        return self.three(self.act(self.two(self.act(self.one(x)))))


def test_a_stage_is_not_named_after_a_module_that_runs_elsewhere_too():
    with torch.device("meta"):
        graph = fuse_light_operators(capture(Twice(), meta(16, 8)))
    row = make_units(graph)
    assert [unit.module for unit in row] == ["one", "two", "three"]


def test_a_search_that_must_end_says_how_far_it_may_be(work):
    """C6: what is left closed counts in the gap."""
    whole, ended = find_plans(asked(work)), find_plans(asked(work, seconds=0.0))
    assert ended.opened < whole.opened
    assert ended.bound <= whole.best.seconds <= ended.best.seconds
    assert ended.gap >= ended.best.seconds / whole.best.seconds - 1.0


def test_of_equally_fast_plans_the_one_on_fewest_devices_is_taken():
    """Of a model whose layers no device can share, more devices are of no use."""
    with torch.device("meta"):
        layers = [torch.nn.Tanh() for _ in range(3)]
        graph = fuse_light_operators(capture(torch.nn.Sequential(*layers), meta(1, 8)))
    work = PlanningWorkload(graph=graph, samples=1)
    outcome = find_plans(asked(work, devices=(1, 2, 8), batch=1, objective="fastest"))
    assert outcome.best.devices == 1


def test_a_split_that_no_rule_of_the_executor_carries_out_is_said():
    """Channels of convolutions may be split by the search, but split layers keep them whole."""
    block = torch.nn.Sequential(
        torch.nn.Conv2d(64, 256, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(256, 64, 1)
    )
    graph = fuse_light_operators(
        capture(block.to("meta"), torch.empty(8, 64, 16, 16, device="meta"))
    )
    work = PlanningWorkload(graph=graph, samples=8)
    forced = asked(work, devices=(2,), batch=8, tensor=(2,), force=(("*", "split"),))
    found = find_plans(forced)
    assert missing_in_executor(found.search, found.best) == "a tensor split of conv2d"
    free = find_plans(asked(work, devices=(2,), batch=8, tensor=(1,)))
    assert missing_in_executor(free.search, free.best) == ""


def test_split_transformers_are_carried_out(work):
    found = find_plans(asked(work, devices=(4,), tensor=(4,), force=(("blocks.*", "split"),)))
    assert {
        c.how
        for c in operator_choices(found.search.tables_at(found.best), found.best)
        if c.how.startswith("split")
    }
    assert missing_in_executor(found.search, found.best) == ""
