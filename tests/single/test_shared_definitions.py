"""single: what reference and run take from a recipe by the same code is worked out again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headway.data import as_source
from headway.errors import NotEqual
from headway.optim import LARS, WarmUp, layerwise, lr_scaling, warmup
from headway.plans import ExchangePlan, data_parallel
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.batch_units import stop_steps as steps_of_the_run
from headway.run.recipe.factory import load_recipe
from headway.run.step import forward_pass
from headway.run.step.randomness import build_model
from headway.verification.own_precision import check_own_precision
from headway.verification.recording import build_training_state
from headway.verification.reference.epochs import ReferenceEpochs
from headway.verification.reference.recipes import (
    batch_samples,
    check_amounts,
    check_plan,
    check_seed,
    stop_steps,
)
from support.recipes import mlp
from support.tiny_models import Points


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stop", [7, "2 epochs", "65 samples", "1k samples", "330 tokens"])
def test_amounts_are_those_of_the_run(stop, drop_last):
    recipe = replace(mlp(), stop=stop, tokens_per_sample=5, batch="60 tokens", drop_last=drop_last)
    assert batch_samples(recipe) == resolve_batch(recipe) == 12
    sizes = ReferenceEpochs(as_source(Points(40)), 5, 12, drop_last).sizes
    steps = stop_steps(recipe, sizes, drawn=False)
    assert steps == stop_steps(recipe, sizes, drawn=True) == steps_of_the_run(recipe, 40)
    assert steps == steps_of_the_run(recipe, sizes)
    with pytest.raises(NotEqual, match="ends after"):
        check_amounts(recipe, sizes, batch=12, steps=steps + 1)


def test_a_plan_without_the_compressor_of_the_recipe_is_refused():
    recipe = replace(mlp(), exchange=ExchangePlan(compress="fp16"))
    check_plan(replace(recipe, exchange=None), data_parallel(12, processes=2))
    with pytest.raises(NotEqual, match="exchange"):
        check_plan(recipe, data_parallel(12, processes=2))


def test_a_seed_that_decides_nothing_is_noticed():
    check_seed(mlp(), build_model)
    with pytest.raises(NotEqual, match="another seed"):
        check_seed(mlp(), lambda recipe: build_model(replace(recipe, seed=0)))


def test_another_type_of_autocast_is_noticed(monkeypatch):
    recipe = replace(mlp(), precision="bfloat16")
    check_own_precision(recipe)
    half = lambda *_: torch.autocast("cpu", dtype=torch.float16)  # noqa: E731
    monkeypatch.setattr("headway.run.executor.autocast", half)
    assert forward_pass.autocast is not half
    with pytest.raises(NotEqual, match=r"bfloat16.*step 1, loss"):
        check_own_precision(recipe)


def test_an_option_that_is_not_taken_is_noticed(monkeypatch):
    made = layerwise.LARS.add_param_group

    def forgetting(self, group):
        made(self, group)
        self.param_groups[-1]["momentum"] = 0.5

    recipe = replace(mlp(), optimizer=lambda model: LARS(model.parameters(), lr=0.1))
    build_training_state(recipe, recipe.model(), reference=True)
    monkeypatch.setattr(layerwise.LARS, "add_param_group", forgetting)
    with pytest.raises(NotEqual, match=r"momentum = 0.9, and steps by 0.5"):
        build_training_state(recipe, recipe.model(), reference=True)


def test_a_rate_that_is_scaled_otherwise_is_noticed(monkeypatch):
    scaled = replace(mlp(), scale_rate="square_root from 3 samples")
    recipe = load_recipe(scaled)
    build_training_state(recipe, recipe.model(), reference=True)
    monkeypatch.setattr(lr_scaling, "square_root", lr_scaling.linear)
    with pytest.raises(NotEqual, match=r"0\.04 in place of 0\.02"):
        build_training_state(recipe, recipe.model(), reference=True)


def test_the_reference_warms_up_by_its_own_arithmetic(monkeypatch):
    def scheduler(optimizer):
        inner = torch.optim.lr_scheduler.ExponentialLR
        return WarmUp(optimizer, 2, then=lambda o: inner(o, 0.5), delay=True)

    def rates(*, reference):
        recipe = replace(mlp(), scheduler=scheduler)
        trained = build_training_state(recipe, recipe.model(), reference=reference)
        found = []
        for _ in range(6):
            found.append(trained.optimizer.param_groups[0]["lr"])
            trained.optimizer.step()
            trained.scheduler.step()
        assert trained.scheduler.state_dict()["last_epoch"] == 6
        return found

    assert rates(reference=True) == pytest.approx(rates(reference=False))
    monkeypatch.setattr(warmup.WarmUp, "factor", lambda self, step: 1.0)
    monkeypatch.setattr("headway.verification.recording.check_warm_up", lambda _: None)
    monkeypatch.setattr("headway.verification.recording.check_warm_up_then_cosine", lambda: None)
    assert rates(reference=True)[0] == 0.5 * rates(reference=False)[0]
