"""single: what tells plans apart that read alike, in tables, explanations and pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cli.plan.output import report_lines
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.planner.estimate.degrees import Degrees, describe_degrees
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.alternatives import distinguishing_labels, label_points
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.operator_choices import operator_choices
from headway.planner.search.request import PlanRequest
from headway.report.pictures.pareto_frontier import frontier_plot
from headway.run.measure.recipe_model import recipe_graph
from support.planning import planning_result

MACHINE = machine_of(of_preset("p3.16xlarge", nodes=2))


@pytest.fixture(scope="module")
def engine():
    graph, samples, batch, _ = recipe_graph("support.recipes:stack")
    work = PlanningWorkload(graph=graph, samples=samples)
    return PlanSearch(PlanRequest(work=work, machine=MACHINE, devices=(8,), batch=batch))


@pytest.fixture(scope="module")
def alike(engine):
    """The same degrees with all the memory, and with less."""
    degrees = Degrees(tensor=1, data=2, pipeline=4, microbatch=4, microbatches=4)
    candidate = engine.candidate(degrees)
    first = candidate.fastest(float("inf"))
    second = candidate.fastest(0.9 * first.bytes)
    assert first.stages != second.stages
    return [first, second]


def test_as_many_aspects_are_named_as_it_takes():
    rows = [
        ("a", {"cut": "cut at 3", "head": "head whole", "tail": "tail"}),
        ("a", {"cut": "cut at 4", "head": "head split", "tail": "tail"}),
        ("a", {"cut": "cut at 4", "head": "head whole", "tail": "tail"}),
        ("b", {"cut": "cut at 9"}),
        ("c", {"head": "same"}),
        ("c", {"head": "same"}),
    ]
    assert distinguishing_labels(*zip(*rows, strict=True)) == [
        "cut at 3, head whole",
        "cut at 4, head split",
        "cut at 4, head whole",
        "",
        "",
        "",
    ]


def test_cuts_tell_apart_what_degrees_do_not(engine, alike):
    said = label_points(engine, alike)
    assert len(set(said)) == 2
    for point, words in zip(alike, said, strict=True):
        stage, start = words.removeprefix("stage ").split(" from ")
        assert engine.row[point.stages[int(stage)].start].module == start
    other = engine.candidate(Degrees(tensor=1, data=8, pipeline=1, microbatch=4, microbatches=1))
    assert label_points(engine, [alike[0], other.fastest(float("inf"))]) == ["", ""]


def test_what_the_tensor_axis_splits_tells_apart():
    """Whole weights where there is room, split ones where there is not."""
    graph, samples, batch, _ = recipe_graph("headway.workloads.resnet:recipe")
    work = PlanningWorkload(graph=graph, samples=samples)
    engine = PlanSearch(PlanRequest(work=work, machine=MACHINE, devices=(8,), batch=batch))
    degrees = Degrees(tensor=8, data=1, pipeline=1, microbatch=16, microbatches=2)
    candidate = engine.candidate(degrees)
    points = [candidate.fastest(float("inf"))]
    points.append(candidate.fastest(0.15 * points[0].bytes))
    assert {stage.recompute for point in points for stage in point.stages} == {False}
    said = label_points(engine, points)
    how = {words.split(" ")[0]: words.split(" ")[1] for words in said}
    (module,) = how  # of one module both say what they do
    assert said[0] != said[1]
    for point, words in zip(points, said, strict=True):
        own = {
            choice.how
            for choice in operator_choices(engine.tables_at(point), point)
            if choice.module == module
        }
        assert words == f"{module} {' and '.join(own)}"


def test_rows_and_pictures_do_not_read_alike(engine, alike):
    outcome = replace(find_plans(engine.question), points=tuple(alike), chosen=0)
    answer = planning_result(outcome)
    said = label_points(outcome.search, alike)
    rows = [row for row in report_lines(answer) if describe_degrees(alike[0].degrees) in row]
    for words in said:
        assert sum(f"({words})" in row for row in rows) >= 1
    shown = frontier_plot(outcome, model="m", cluster="c")
    assert len({words.partition("\n")[2] for words in shown.words}) == 2
