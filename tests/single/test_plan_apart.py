"""single: what tells plans apart that read alike, in tables, explanations and pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.cli.plan_answer import Answer, lines
from headway.cli.plan_question import Amounts
from headway.cluster.presets import of_preset
from headway.cost.presets import machine_of
from headway.planner.apart import apart, points_apart
from headway.planner.decision import choices
from headway.planner.degrees import Degrees, describe
from headway.planner.operators import Workload
from headway.planner.search import Question, Search, search
from headway.report.frontier import frontier_of
from headway.run.model_graph import graph_of

MACHINE = machine_of(of_preset("p3.16xlarge", nodes=2))


@pytest.fixture(scope="module")
def engine():
    graph, samples, batch = graph_of("support.recipes:stack")
    work = Workload(graph=graph, samples=samples)
    return Search(Question(work=work, machine=MACHINE, devices=(8,), batch=batch))


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
    assert apart(*zip(*rows, strict=True)) == [
        "cut at 3, head whole",
        "cut at 4, head split",
        "cut at 4, head whole",
        "",
        "",
        "",
    ]


def test_cuts_tell_apart_what_degrees_do_not(engine, alike):
    said = points_apart(engine, alike)
    assert len(set(said)) == 2
    for point, words in zip(alike, said, strict=True):
        stage, start = words.removeprefix("stage ").split(" from ")
        assert engine.row[point.stages[int(stage)].start].module == start
    other = engine.candidate(Degrees(tensor=1, data=8, pipeline=1, microbatch=4, microbatches=1))
    assert points_apart(engine, [alike[0], other.fastest(float("inf"))]) == ["", ""]


def test_what_the_tensor_axis_splits_tells_apart():
    """Whole weights where there is room, split ones where there is not."""
    graph, samples, batch = graph_of("headway.workloads.resnet.recipe:recipe")
    work = Workload(graph=graph, samples=samples)
    engine = Search(Question(work=work, machine=MACHINE, devices=(8,), batch=batch))
    degrees = Degrees(tensor=8, data=1, pipeline=1, microbatch=16, microbatches=2)
    candidate = engine.candidate(degrees)
    points = [candidate.fastest(float("inf"))]
    points.append(candidate.fastest(0.15 * points[0].bytes))
    assert {stage.recompute for point in points for stage in point.stages} == {False}
    said = points_apart(engine, points)
    how = {words.split(" ")[0]: words.split(" ")[1] for words in said}
    (module,) = how  # of one module both say what they do
    assert said[0] != said[1]
    for point, words in zip(points, said, strict=True):
        own = {choice.how for choice in choices(engine, point) if choice.module == module}
        assert words == f"{module} {' and '.join(own)}"


def test_rows_and_pictures_do_not_read_alike(engine, alike):
    outcome = replace(search(engine.question), points=tuple(alike), chosen=0)
    answer = Answer(outcome=outcome, recipe="r", cluster="c", currency="", amounts=Amounts())
    said = points_apart(outcome.search, alike)
    rows = [row for row in lines(answer) if describe(alike[0].degrees) in row]
    for words in said:
        assert sum(f"({words})" in row for row in rows) >= 1
    shown = frontier_of(outcome, model="m", cluster="c")
    assert len({spot.words for spot in shown.spots}) == 2
