"""single: whether a plan runs today is what training would say; support.run_sweep really trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headway
from headway.api.planning import PlanningResult
from headway.errors import HeadwayError, RecipeError
from headway.parallel.pipeline.partition.cut import cut, run_stages
from headway.parallel.stages import ModelCall
from headway.planner.search.plan_point import Point
from headway.run.measure import recipe_model
from headway.run.step.batch import example_batch
from headway.run.step.setup import check_components
from support.plan_sweep import every_plan
from support.planned_models import RECIPES


def chosen(name: str, ranks: int, *, stages: bool) -> tuple[PlanningResult, Point]:
    """An answer whose choice is data parallelism, or a pipeline."""
    result = headway.plan(RECIPES[name], "8x-4090", devices=ranks)
    outcome = result.outcome
    wanted = (1, 1, ranks) if stages else (1, ranks, 1)
    points = (
        point
        for point in every_plan(outcome.search)
        if (point.degrees.tensor, point.degrees.data, point.degrees.pipeline) == wanted
        and not point.degrees.zero
    )
    point = next(points)
    return replace(result, outcome=replace(outcome, points=(point,), chosen=0)), point


def as_training_cuts(name: str, result: PlanningResult) -> str:
    """What `train` says when it cuts the model, with numbers."""
    recipe, samples = RECIPES[name], result.chosen.degrees.microbatch
    data = example_batch(recipe, samples)
    try:
        cut(recipe.model().train(), recipe.loss, data, at=result.plan.pipeline.cut)
    except HeadwayError as error:
        return "; ".join((error.what, *getattr(error, "problems", ())))
    return "yes"


@pytest.mark.parametrize(
    ("name", "numbers"), [("twice", False), ("default output", False), ("ordered output", False)]
)
def test_a_pipeline_is_offered_if_training_can_cut_it(
    monkeypatch: pytest.MonkeyPatch, name: str, numbers: bool
) -> None:
    """Where the model is too large to be run, with stand-ins for its tensors."""
    if not numbers:
        monkeypatch.setattr(recipe_model, "TRIAL_FLOPS", 0)
    result, point = chosen(name, 2, stages=True)
    said = result.runs(point)
    assert said == as_training_cuts(name, result)
    assert (said == "yes") == (name == "ordered output")


def test_what_a_stage_changes_in_place_is_seen() -> None:
    result, point = chosen("in place", 2, stages=True)
    said, _, _ = result.runs(point).rpartition(" by up to ")
    assert "the output of the stages differs from the model's" in said
    assert as_training_cuts("in place", result).startswith(said)


def test_an_optimiser_that_cannot_be_driven_is_named_for_every_plan() -> None:
    result, point = chosen("sparse adam", 3, stages=False)
    model = RECIPES["sparse adam"].model()
    with pytest.raises(RecipeError) as refused:
        check_components(model, RECIPES["sparse adam"].optimizer(model), None, 3)
    assert result.runs(point) == refused.value.what


@pytest.mark.parametrize("name", ["ordered output", "model output"])
def test_stages_return_what_the_model_returns(name: str) -> None:
    """Dictionaries of a class of their own, also those that are dataclasses."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    model = recipe.model().train()
    data = example_batch(recipe, 4)
    stages = cut(model, recipe.loss, data, at=["blocks.1", "blocks.3"])
    expected, found = model(data[0]), run_stages(stages, ModelCall.of((data[0],), {}))
    assert type(found) is type(expected)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.hidden, expected.hidden)
