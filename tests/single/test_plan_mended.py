"""single: a plan that does not fit: what is missing, and changes of it that make it fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.api.explanation import explain_plan
from headway.cli.explain import explanation_lines
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.infeasible import excess_bytes, memory_fixes
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.plan_conversion import point_of
from headway.planner.search.request import PlanRequest
from headway.plans import data_parallel, pipelined
from headway.plans.pipeline import PipelinePlan
from headway.run.measure.recipe_model import recipe_graph

BATCH = 32
MACHINE = machine_of(of_preset("p3.16xlarge", nodes=2))


@pytest.fixture(scope="module")
def question():
    graph, samples, batch, _ = recipe_graph("support.recipes:stack")
    work = PlanningWorkload(graph=graph, samples=samples)
    return PlanRequest(work=work, machine=MACHINE, devices=(2,), batch=batch)


PLAN = pipelined(
    BATCH, processes=2, stages=2, pipeline=PipelinePlan(microbatches=4, cut=("3",)), microbatch=8
)


def tight(question, plan, share):
    """The plan with so much of the memory that it needs, priced."""
    point = point_of(plan, PlanSearch(question))
    engine = PlanSearch(replace(question, memory=share * point.bytes))
    return engine, point_of(plan, engine)


@pytest.mark.parametrize("share", [0.99, 0.8])
def test_every_change_makes_it_fit(question, share):
    engine, point = tight(question, PLAN, share)
    missing = excess_bytes(engine, point)
    assert point.bytes - missing <= engine.question.cap < point.bytes - missing + 1
    found = memory_fixes(engine, point)
    assert found
    assert [mend.slower for mend in found] == sorted(mend.slower for mend in found)
    for mend in found:
        assert mend.point.bytes <= engine.question.cap
        assert mend.point.devices == point.devices
        assert mend.slower == mend.point.seconds / point.seconds - 1


def test_only_the_stages_that_are_too_full_compute_again(question):
    engine, point = tight(question, PLAN, 0.99)
    over = [n for n, stage in enumerate(point.stages) if stage.bytes > engine.question.cap]
    assert len(over) == 1
    found = [mend for mend in memory_fixes(engine, point) if mend.change.startswith("recompute ")]
    for mend in found:
        again = [n for n, stage in enumerate(mend.point.stages) if stage.recompute]
        assert again == over
        assert [s.start for s in mend.point.stages] == [s.start for s in point.stages]
        assert engine.row[point.stages[over[0]].start].module in mend.change


def test_one_kind_of_thing_changes(question):
    engine, point = tight(question, data_parallel(BATCH, processes=2), 0.8)
    found = {
        mend.change.rpartition(" ")[0]: mend.point.degrees for mend in memory_fixes(engine, point)
    }
    assert {"micro-batches of", "ZeRO"} & set(found)
    if "ZeRO" in found:
        assert replace(found["ZeRO"], zero=0) == point.degrees
    if "micro-batches of" in found:
        new = found["micro-batches of"]
        assert new.microbatch < point.degrees.microbatch
        assert (new.data, new.pipeline) == (point.degrees.data, point.degrees.pipeline)


def test_explain_says_so(question):
    engine, point = tight(question, PLAN, 0.8)
    found = explain_plan(PLAN, engine, most=16)
    words = "\n".join(explanation_lines(engine, found))
    assert "this does not fit" in words
    assert "more per device; or, the fastest first:" in words
    assert found.over == excess_bytes(engine, point)
    free = PlanSearch(question)
    whole = explain_plan(PLAN, free, most=16)
    assert (whole.over, whole.mends) == (0, ())
    assert "more per device; or" not in "\n".join(explanation_lines(free, whole))
