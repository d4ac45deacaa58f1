"""single: where no plan fits: the least memory, changes that do, and smaller ones that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.errors import NothingFits
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.infeasible import (
    describe_relaxation,
    find_fitting,
    find_relaxations,
    infeasible_error,
    least_memory,
)
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.request import PlanRequest
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.big_models import ids
from support.sampling import sampled

MACHINE = machine_of(of_preset("dgx-a100", nodes=2))
TODAY = {"tensor": (1,), "zero": (0,)}
"""What the executor runs."""


@pytest.fixture(scope="module")
def work():
    config = TransformerConfig(vocabulary=1024, window=64, width=256, layers=2, heads=8)
    with torch.device("meta"):
        return PlanningWorkload(
            graph=fuse_light_operators(capture(TransformerLM(config), ids(16, 64))), samples=16
        )


@pytest.fixture(scope="module")
def asked(work):
    def ask(**changed):
        return PlanRequest(
            **{"work": work, "machine": MACHINE, "devices": (4,), "batch": 32} | changed
        )

    return ask


KNOWN = {}


def verdict_of(question):
    """Of each question once."""
    limits = replace(question, work=None, machine=None)
    key = (limits, question.machine.device.memory, len(question.machine.network.levels))
    if key not in KNOWN:
        KNOWN[key] = find_relaxations(PlanSearch(question))
    return KNOWN[key]


def every_least(question):
    """The least memory by asking all combinations, none left out by a bound."""
    engine = PlanSearch(question)
    least = float("inf")
    for degrees in (one.degrees for one in engine.combinations()):
        candidate = engine.candidate(degrees)
        while (point := candidate.fastest(least * (1 - 1e-9))) is not None:
            least = point.bytes
    return least


@pytest.mark.parametrize(
    "limits", sampled([{}, TODAY, {"devices": (1, 2)}, {"batch": 8, "devices": (8,)}], 2)
)
def test_the_least_memory_is_that_of_all_combinations(asked, limits):
    question = asked(**limits)
    need = least_memory(PlanSearch(question))
    assert need.proven
    # `fastest` takes the fastest plan within a cap, so that stepping down ends just above the least
    assert need.bytes == pytest.approx(every_least(question), abs=1, rel=1e-8)
    assert find_plans(replace(question, memory=need.bytes)).best.bytes <= need.bytes
    with pytest.raises(NothingFits):
        find_plans(replace(question, memory=need.bytes - 1))


CASES = {
    "today": (0.95, {**TODAY, "devices": (8,)}),
    "one device": (0.9, {"devices": (1,)}),
    "replicated": (0.97, {"devices": (8,), "force": (("*", "replicate"),), "zero": (0,)}),
    "gpipe": (0.97, {"schedules": ("gpipe",), **TODAY}),
    "today, no pipeline": (0.9, {"recompute": "pipeline", "devices": (1,)}),
}
"""Of the least memory, and what else is asked."""


@pytest.fixture(scope="module")
def refused(asked):
    """A question to which nothing fits, by the name of its case."""

    def ask(case):
        share, limits = CASES[case]
        question = asked(**limits)
        return replace(question, memory=share * least_memory(PlanSearch(question)).bytes)

    return ask


@pytest.mark.parametrize("case", sampled([*CASES], 1))
def test_each_change_does_and_a_smaller_one_does_not(refused, case):
    question = refused(case)
    with pytest.raises(NothingFits):
        find_plans(question)
    _, changes = verdict_of(question)
    assert "memory" in [one.kind for one in changes]
    for one in changes:
        found = find_plans(replace(one.question, objective="fastest")).best
        assert (found.seconds, found.degrees) == (one.point.seconds, one.point.degrees), one.change
        assert found.bytes <= one.question.cap
        if one.shorter is not None:
            with pytest.raises(NothingFits):
                find_plans(one.shorter)
    ranks = [(one.hardware, one.cost) for one in changes]
    assert ranks == sorted(ranks)


def kinds(question):
    return {one.kind: one for one in verdict_of(question)[1]}


@pytest.mark.slow
def test_what_the_question_left_out_is_offered(refused):
    found = kinds(refused("today"))
    assert {"memory", "zero"} <= set(found)
    assert found["zero"].question.zero[-1] == found["zero"].point.degrees.zero > 0
    assert not found["zero"].hardware
    assert not found["memory"].hardware  # of what a device has
    assert "force" in kinds(refused("replicated"))
    assert "schedule" in kinds(refused("gpipe"))


def test_a_larger_device_is_the_least_one_that_does(asked):
    device = replace(MACHINE.device, memory=6e6)
    found = kinds(asked(devices=(2,), machine=replace(MACHINE, device=device)))
    assert found["device"].question.machine.device.name == "p100"
    assert found["memory"].hardware


def test_more_devices_than_the_cluster_s_links_join_have_no_time(work):
    one_node = machine_of(of_preset("dgx-a100"))
    question = PlanRequest(work=work, machine=one_node, devices=(8,), batch=16)
    need = least_memory(PlanSearch(question))
    found = kinds(replace(question, memory=0.9 * need.bytes))
    assert found["devices"].point.devices == 16  # the next node
    assert found["devices"].hardware
    assert found["devices"].slower is None
    assert "time unknown: the cluster's file joins no more than 8 devices" in describe_relaxation(
        found["devices"]
    )
    assert found["memory"].slower is not None


@pytest.mark.slow
def test_more_nodes_of_a_preset_have_a_time_and_are_named(work):
    """That of a search on the preset with so many nodes."""
    one_node, more = machine_of(of_preset("dgx-a100")), machine_of(of_preset("dgx-a100", nodes=2))
    question = PlanRequest(work=work, machine=one_node, devices=(8,), batch=16)
    question = replace(question, memory=0.9 * least_memory(PlanSearch(question)).bytes)
    found = {one.kind: one for one in find_relaxations(PlanSearch(question), more.network)[1]}[
        "devices"
    ]
    assert found.change == "16 devices (--nodes 2)"
    asked = replace(question, machine=more, devices=(16,), objective="fastest")
    assert found.point.seconds == find_plans(asked).best.seconds
    assert found.slower is not None
    assert " a sample; " in describe_relaxation(found)
    assert "16 devices (--nodes 2): " in infeasible_error(question, more.network).fix


def test_the_words(refused):
    question = refused("one device")
    error = infeasible_error(question)
    need = least_memory(PlanSearch(question))
    assert error.exit_code == 2
    assert "every plan needs" in error.problems[0]
    assert "is the fullest: weights" in error.problems[1]
    assert error.fix.count("\n") == len(verdict_of(question)[1])
    assert " more per device (" in error.fix
    assert need.bytes > question.cap


def test_a_sibling_shares_tables_and_nothing_else(asked):
    engine = PlanSearch(asked())
    outcome = engine.run()
    other = engine.related(asked(memory=1e9, objective="fastest"))
    assert other.bounds._tables is engine.bounds._tables
    assert not other.points
    fresh = find_plans(asked(memory=1e9, objective="fastest"))
    assert other.run().best == fresh.best
    assert engine.points == outcome.search.points
    assert find_fitting(engine.related(asked(memory=1.0))) is None
