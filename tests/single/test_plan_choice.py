"""single: the choice: nothing beside it beats it, and more schedules never make it worse."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from headway.capture import capture
from headway.cli.plan.output import report_lines
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.errors import NothingFits
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.alternatives import (
    fewer_device_counts,
    nearest_plans,
    neighbour_plans,
)
from headway.planner.explain.infeasible import infeasible_error, least_memory
from headway.planner.search import branch_and_bound
from headway.planner.search.branch_and_bound import ALIKE, PlanSearch, find_plans
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.big_models import ids
from support.plan_sweep import every_plan
from support.planning import planning_result


def gpt(*, layers: int, width: int, window: int = 256) -> PlanningWorkload:
    config = TransformerConfig(vocabulary=1024, window=window, width=width, layers=layers, heads=8)
    with torch.device("meta"):
        model = TransformerLM(config).bfloat16()
        return PlanningWorkload(
            graph=fuse_light_operators(capture(model, ids(16, window))), samples=16
        )


@pytest.fixture(scope="module")
def wide() -> PlanningWorkload:
    return gpt(layers=6, width=4096)


@pytest.fixture(scope="module")
def narrow() -> PlanningWorkload:
    return gpt(layers=4, width=512)


def asked(work: PlanningWorkload, preset: str, devices: int, **changed: Any) -> PlanRequest:
    machine = machine_of(of_preset(preset, nodes=max(1, devices // 8)))
    fixed = {"work": work, "machine": machine, "devices": (devices,), "objective": "fastest"}
    return PlanRequest(**fixed | changed)


def beats(one: Point, other: Point) -> bool:
    """As good in time, memory and devices, and better in one."""
    figures = [(p.seconds, p.bytes, p.devices) for p in (one, other)]
    ratios = np.array(figures[0]) / np.array(figures[1])
    return bool((ratios <= 1 + 1e-9).all() and (ratios < 1 - 1e-9).any())


def check_choice(question: PlanRequest) -> None:
    """Nothing on the frontier or one step away beats the choice; no allowed step is faster."""
    outcome = find_plans(question)
    around = neighbour_plans(outcome.search, outcome.best, most=question.most)
    others = [one.point for one in around if one.point is not None]
    assert others
    for other in [*outcome.points, *others]:
        assert not beats(other, outcome.best), (outcome.best.degrees, other.degrees)
        if other.devices in question.devices:
            assert other.seconds * ALIKE >= outcome.best.seconds, other.degrees


def test_a_smaller_microbatch_that_is_no_power_of_two_is_found(wide: PlanningWorkload) -> None:
    """6 samples are the whole share of a rank, 3 are faster and need less memory."""
    check_choice(asked(wide, "p4d.24xlarge", 16, batch=24))


@pytest.mark.parametrize("seed", range(3))
def test_no_alternative_beats_the_choice(narrow: PlanningWorkload, seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices = int(rng.choice([4, 8]))
    question = asked(
        narrow,
        str(rng.choice(["dgx-a100", "8x-4090"])),
        devices,
        batch=devices * int(rng.choice([3, 5, 6, 8])),
        objective=str(rng.choice(["frontier", "fastest"])),
        schedules=[("1f1b",), ("1f1b", "zb-h1"), ("gpipe",)][rng.integers(3)],
    )
    check_choice(question)


@pytest.mark.parametrize("preset", ["8x-4090"])
def test_more_schedules_are_never_worse(
    narrow: PlanningWorkload, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fewer tables are made, the more a larger space could leave out.
    monkeypatch.setattr(branch_and_bound, "TABLES", 2)
    question = asked(narrow, preset, 16, batch=32)
    spaces = [("1f1b",), ("zb-h1", "1f1b"), ("all",)]
    seconds = [find_plans(replace(question, schedules=some)).best.seconds for some in spaces]
    for less, more in pairwise(seconds):
        assert more <= less * ALIKE


def test_with_the_least_memory_there_is_a_plan(wide: PlanningWorkload) -> None:
    """Sums of bytes in another order must not miss by a rounding."""
    for devices in (8, 16):
        question = asked(wide, "dgx-a100", devices, batch=16)
        need = least_memory(PlanSearch(replace(question, memory=np.inf)))
        assert need is not None
        found = find_plans(replace(question, memory=float(need.bytes)))
        assert found.best.bytes <= need.bytes
        with pytest.raises(NothingFits):
            find_plans(replace(question, memory=float(need.bytes - 1)))


def test_a_refusal_names_what_would_help_and_nothing_internal(wide: PlanningWorkload) -> None:
    question = asked(wide, "dgx-a100", 8, batch=16, memory=1e9)
    with pytest.raises(NothingFits) as plain:
        find_plans(question)
    for error in (plain.value, infeasible_error(question)):
        assert "memory" in str(error)
        assert "infeasible_error" not in str(error)
        assert "headway.planner" not in str(error)


def test_a_plan_behind_many_that_do_not_fit_is_found(
    wide: PlanningWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first combinations of a schedule need too much memory, later ones do not."""
    monkeypatch.setattr(branch_and_bound, "TABLES", 1)
    question = asked(wide, "dgx-a100", 16, batch=16, schedules=("gpipe",), tensor=(1,), zero=(0,))
    free = PlanSearch(replace(question, memory=np.inf))
    need = least_memory(free)
    assert need is not None
    assert need.bytes < free.run().best.bytes
    assert find_plans(replace(question, memory=float(need.bytes))).best.bytes <= need.bytes


def test_fewer_devices_are_taken_where_they_are_faster(narrow: PlanningWorkload) -> None:
    """Over slow links between nodes; not only half as many, and not only with as much memory."""
    outcome = find_plans(asked(narrow, "8x-4090", 16, batch=16, tensor=(1,)))
    counts = fewer_device_counts(outcome)
    assert counts == (1, 2, 4, 8, 16)
    found = find_plans(replace(outcome.question, devices=counts))
    assert found.best.devices < 16
    assert found.best.seconds <= outcome.best.seconds
    assert fewer_device_counts(found) == ()


@pytest.mark.parametrize("objective", ["cheapest", "fewest-devices"])
def test_fewer_devices_are_judged_by_the_objective(
    narrow: PlanningWorkload, objective: str
) -> None:
    """All eight are the fastest, and neither the cheapest nor the fewest."""
    question = asked(narrow, "dgx-a100", 8, batch=64, tensor=(1,), schedules=("1f1b",))
    assert fewer_device_counts(find_plans(question)) == ()
    outcome = find_plans(replace(question, objective=objective))
    counts = fewer_device_counts(outcome)
    assert counts == (1, 2, 4, 8)
    found = find_plans(replace(outcome.question, devices=counts))
    assert found.best.devices == 1
    assert found.value < outcome.value
    assert fewer_device_counts(found) == ()


def test_alternatives_are_on_devices_that_were_asked_for(narrow: PlanningWorkload) -> None:
    outcome = find_plans(asked(narrow, "dgx-a100", 8, batch=64))
    alone = replace(outcome, points=(outcome.best,), chosen=0)
    assert {one.point.devices for one in nearest_plans(alone, 9)} == {8}
    assert {one.point.devices for one in nearest_plans(alone, 9, fewer=True)} == {4, 8}


@pytest.mark.parametrize("objective", ["fastest", "frontier"])
def test_the_space_of_the_best_is_named_and_true(narrow: PlanningWorkload, objective: str) -> None:
    question = asked(
        narrow, "8x-4090", 4, batch=12, objective=objective, schedules=("1f1b", "gpipe"), zero=(0,)
    )
    outcome = find_plans(question)
    lines = list(report_lines(planning_result(outcome)))
    (said,) = (line for line in lines if line.startswith("Searched "))
    space = (
        "1f1b, gpipe; ZeRO 0; any tensor axis inside a node; one strategy for equal blocks of a "
        "stage; cuts of least sum"
    )
    assert f"for {objective}: {space}. " in said
    others = [point.seconds for point in every_plan(outcome.search)]
    assert min(others) >= outcome.bound * (1 - 1e-9)
    optimal = f"Within {outcome.gap:.1%} of the best of these" if outcome.gap >= 5e-4 else "Optimal"
    assert optimal in said
    loose = list(report_lines(planning_result(replace(outcome, bound=outcome.bound / 1.25))))
    assert any("Within 25.0% of the best of these" in line for line in loose)


def test_yes_is_said_only_of_what_surely_runs(narrow: PlanningWorkload) -> None:
    """Of plans without a model at hand, which could be cut on trial."""
    question = asked(narrow, "dgx-a100", 4, batch=16, recompute="pipeline")
    search = PlanSearch(question)
    result = planning_result(search.run())
    said: dict[str, set[str]] = {}
    for point in every_plan(search):
        degrees = point.degrees
        kind = "tensor" if degrees.tensor > 1 else "pipe" if degrees.pipeline > 1 else ""
        said.setdefault(kind or f"ZeRO {degrees.zero}", set()).add(result.runs(point))
    assert said["ZeRO 0"] == {"yes"}
    for kind, unknown in (("pipe", "the cut"), ("ZeRO 1", "state in parts")):
        assert said[kind] == {f"not known: {unknown}"}
    # On so narrow a model it pays nowhere to split a layer; on a wide one it does.
    assert said["tensor"] == {"a layer that the tensor axis splits"}
    wide = PlanSearch(asked(gpt(layers=2, width=8192), "dgx-a100", 4, batch=16))
    runs = planning_result(wide.run()).runs
    splits = {runs(point) for point in every_plan(wide) if point.degrees.tensor > 1}
    assert splits
    assert all("the executor's own split" in one for one in splits)
    plain = next(one for one in every_plan(search) if one.devices == one.degrees.data)
    again = replace(plain, stages=(replace(plain.stages[0], recompute=True),))
    assert result.runs(again) == "recomputation without a pipeline"
