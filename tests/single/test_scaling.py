"""single: learning-rate rules, warm-up around other schedulers, and the momentum correction."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from headway.errors import DocumentError, RecipeError
from headway.optim import (
    LAMB,
    LARS,
    Scaling,
    WarmUp,
    adasum_rate,
    check_scaling,
    correct_momentum,
    linear,
    scale_rates,
    square_root,
)
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.user_code import describe_value
from headway.units import Amount

# -- rules -----------------------------------------------------------------------------------


def test_the_rules_are_those_of_the_papers():
    assert linear(0.1, batch=8192, reference=256) == pytest.approx(3.2)
    assert square_root(0.1, batch=1024, reference=256) == pytest.approx(0.2)
    assert linear(0.1, batch=128, reference=256) == pytest.approx(0.05)
    assert adasum_rate(0.1) == 0.1
    assert adasum_rate(0.1, local_size=4, factor=2.5) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [{"local_size": 0}, {"factor": 0.0}, {"factor": float("nan")}])
def test_an_adasum_rate_of_nothing_is_refused(bad):
    with pytest.raises(ValueError, match="greater than 0"):
        adasum_rate(0.1, **bad)


@pytest.mark.parametrize("rule", [linear, square_root])
def test_a_batch_of_nothing_is_refused(rule):
    with pytest.raises(ValueError, match="reference 0"):
        rule(0.1, batch=8, reference=0)


def test_a_scaling_as_text():
    assert Scaling.parse("linear from 256 samples") == Scaling("linear", Amount(256, "samples"))
    assert Scaling.parse("square_root from 8k tokens").reference.value == 8000
    assert Scaling.parse("linear from 256").factor(512) == 2
    assert str(Scaling.parse("linear from 1 sample")) == "linear from 1 sample"
    assert Scaling.parse("linear from 1024 tokens").factor(64, 32) == 2
    assert Scaling.parse("square_root from 16 samples").factor(64) == 2


@pytest.mark.parametrize("text", ["linear", "linear 256", "cubic from 256", "linear from x", ""])
def test_another_text_is_refused(text):
    with pytest.raises(ValueError, match=r"linear from 256 samples|positive count"):
        Scaling.parse(text)


def test_tokens_need_their_number_per_sample():
    with pytest.raises(RecipeError, match="tokens_per_sample is not given"):
        Scaling.parse("linear from 8192 tokens").factor(64)


def two_groups(kind=torch.optim.SGD, **more):
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    return kind([{"params": weights[0], "lr": 0.1}, {"params": weights[1], "lr": 0.4}], **more)


def test_every_group_is_scaled_before_the_scheduler():
    optimizer = two_groups(lr=1.0)
    assert scale_rates(optimizer, "square_root from 16 samples", batch=64) == 2
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.8]
    scheduler = CosineAnnealingLR(optimizer, 10)
    assert scheduler.base_lrs == [0.2, 0.8]
    json.dumps(optimizer.state_dict()["param_groups"])


def test_scaling_twice_or_too_late_is_refused():
    optimizer = two_groups(lr=1.0)
    scale_rates(optimizer, "linear from 16 samples", batch=64)
    with pytest.raises(RecipeError, match="cannot be scaled") as caught:
        scale_rates(optimizer, "linear from 16 samples", batch=64)
    assert "scaled already: linear from 16 samples to 64" in str(caught.value)
    late = two_groups(lr=1.0)
    CosineAnnealingLR(late, 10)
    with pytest.raises(RecipeError, match="A scheduler has taken up its rate"):
        scale_rates(late, "linear from 16 samples", batch=64)
    assert [g["lr"] for g in late.param_groups] == [0.1, 0.4]


def test_adasum_refuses_a_linearly_scaled_rate_and_names_its_own_recipe():
    optimizer = two_groups(lr=1.0)
    check_scaling(optimizer, "adasum")
    scale_rates(optimizer, "linear from 16 samples", batch=64)
    check_scaling(optimizer, "mean")
    with pytest.raises(RecipeError, match="does not go with a linearly scaled") as caught:
        check_scaling(optimizer, "adasum")
    text = str(caught.value)
    assert "x4" in text
    assert "best rate of one worker" in text
    assert "hierarchical" in text
    root = two_groups(lr=1.0)
    scale_rates(root, "square_root from 16 samples", batch=64)
    check_scaling(root, "adasum")


# -- warm-up ---------------------------------------------------------------------------------


def run(optimizer, scheduler, steps):
    rates = []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


INNER = {
    "none": None,
    "steps": lambda o: MultiStepLR(o, [3, 8]),
    "cosine": lambda o: CosineAnnealingLR(o, 12),
    "exponential": lambda o: ExponentialLR(o, 0.8),
    "one cycle": lambda o: OneCycleLR(o, [0.1, 0.4], total_steps=20, cycle_momentum=False),
    "chained": lambda o: ChainedScheduler([ExponentialLR(o, 0.9), MultiStepLR(o, [5])]),
    "sequence": lambda o: SequentialLR(
        o, [LinearLR(o, 0.5, total_iters=2), ExponentialLR(o, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("name", INNER)
def test_warm_up_multiplies_the_rates_of_any_scheduler(name, delay):
    inner, plain = INNER[name], two_groups(lr=1.0)
    alone = run(plain, inner(plain), 14) if inner else [[0.1, 0.4]] * 14
    optimizer = two_groups(lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = WarmUp(optimizer, 4, start=0.2, then=inner, delay=delay)
        rates = run(optimizer, scheduler, 14)
    for step, (found, factor) in enumerate(
        zip(rates, [0.2, 0.4, 0.6, 0.8] + [1] * 10, strict=True)
    ):
        expected = alone[max(0, step - 4) if delay else step]
        assert found == pytest.approx([factor * rate for rate in expected], rel=1e-12), step
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


def test_warm_up_begins_with_one_part_of_the_steps_or_what_is_asked_for():
    def first(steps, **more):
        optimizer = two_groups(lr=1.0)
        WarmUp(optimizer, steps, **more)
        return optimizer.param_groups[0]["lr"]

    assert first(4) == pytest.approx(0.025)
    assert first(4, start=0.0) == 0
    assert first(0) == first(1) == 0.1


def test_a_rate_changed_by_hand_is_kept():
    optimizer = two_groups(lr=1.0)
    scheduler = WarmUp(optimizer, 4, start=0.2)
    run(optimizer, scheduler, 1)
    optimizer.param_groups[0]["lr"] *= 3
    assert run(optimizer, scheduler, 5)[-1] == pytest.approx([0.3, 0.4])


def test_a_tensor_rate_stays_the_same_tensor():
    rate = torch.tensor(0.5, dtype=torch.float64)
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.Adam([weight], lr=rate)
    scheduler = WarmUp(optimizer, 4, start=0.2, then=lambda o: ExponentialLR(o, 0.5))
    rates = [r for (r,) in run(optimizer, scheduler, 5)]
    assert rates == pytest.approx([0.1, 0.1, 0.075, 0.05, 0.03125])
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("name", INNER)
def test_a_warm_up_goes_on_from_its_state(name):
    def make():
        optimizer = two_groups(kind=LARS, lr=1.0)
        return optimizer, WarmUp(optimizer, 6, start=0.2, then=INNER[name])

    optimizer, scheduler = make()
    run(optimizer, scheduler, 4)
    other, restored = make()
    other.load_state_dict(optimizer.state_dict())
    state = scheduler.state_dict()
    json.dumps(state["_rates"])
    restored.load_state_dict(state)
    assert run(other, restored, 8) == run(optimizer, scheduler, 8)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"steps": -1}, "a warm-up of -1 steps"),
        ({"steps": 2, "start": 1.5}, "starts at 1.5"),
        ({"steps": 2, "then": ReduceLROnPlateau}, "ReduceLROnPlateau cannot follow"),
        ({"steps": 2, "then": lambda o: 3}, "int cannot follow"),
        ({"steps": 2, "velocity": "momentum_buffer"}, "SGD needs no correction"),
    ],
)
def test_warm_ups_that_cannot_be_are_refused(arguments, text):
    with pytest.raises(RecipeError, match=text):
        WarmUp(two_groups(lr=1.0), **arguments)


# -- momentum correction -----------------------------------------------------------------------


class Absorbing(torch.optim.Optimizer):
    """Equation 10 of Goyal et al.: v = m v + lr g, w = w - v."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                v = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                v.mul_(0.9).add_(p.grad, alpha=group["lr"])
                p.sub_(v)


def trajectory(make, schedule, steps=12):
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = make([weight])
    scheduler = schedule(optimizer)
    for _ in range(steps):
        weight.grad = weight.detach() * torch.tensor([1.0, 0.3], dtype=torch.float64)
        optimizer.step()
        scheduler.step()
    return weight.detach()


def warm(velocity=None):
    return lambda o: WarmUp(
        o, 5, start=0.1, then=lambda o: MultiStepLR(o, [7, 9]), velocity=velocity
    )


def sgd(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def test_corrected_momentum_makes_equation_10_what_torchs_sgd_is():
    expected = trajectory(sgd, warm())
    corrected = trajectory(lambda p: Absorbing(p, 0.2), warm("momentum_buffer"))
    torch.testing.assert_close(corrected, expected, rtol=1e-12, atol=1e-12)
    without = trajectory(lambda p: Absorbing(p, 0.2), warm())
    assert float((without - expected).abs().max()) > 0.01


def test_lars_corrects_itself_and_as_printed_by_the_scheduler():
    def lars(correction):
        return lambda p: LARS(p, 0.2, adapt=False, momentum_correction=correction)

    expected = trajectory(sgd, warm())
    torch.testing.assert_close(trajectory(lars(True), warm()), expected, rtol=1e-12, atol=1e-12)
    outside = trajectory(lars(False), warm("momentum_buffer"))
    torch.testing.assert_close(outside, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "make", [sgd, lambda p: torch.optim.RMSprop(p, momentum=0.9), LAMB, lambda p: LARS(p, 1.0)]
)
def test_correction_is_refused_where_the_velocity_does_not_absorb_the_rate(make):
    optimizer = make([nn.Parameter(torch.ones(2))])
    with pytest.raises(RecipeError, match="needs no correction"):
        correct_momentum(optimizer, [0.1])


def test_a_velocity_after_a_rate_of_zero_stays_finite():
    weight = nn.Parameter(torch.ones(2))
    optimizer = Absorbing([weight], 0.5)
    weight.grad = torch.ones(2)
    optimizer.step()
    for before, after in ((0.5, 0.0), (0.0, 0.5)):
        optimizer.param_groups[0]["lr"] = after
        correct_momentum(optimizer, [before])
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.zeros(2))


# -- in a recipe -------------------------------------------------------------------------------

TOML = """
name = "large"
batch = "64 samples"
stop = "10 steps"
scale_rate = "square_root from 16 samples"

[model]
call = "torch.nn:Linear"
in_features = 3
out_features = 2

[data]
call = "support.tiny_models:Points"

[loss]
criterion = "torch.nn:CrossEntropyLoss"

[optimizer]
call = "headway.optim:LAMB"
lr = 0.01
clamp = [0.1, 10.0]

[scheduler]
call = "headway.optim:WarmUp"
steps = 4
start = 0.5

[scheduler.then]
call = "torch.optim.lr_scheduler:CosineAnnealingLR"
T_max = 10
"""


def recipe(tmp_path, *changes):
    text = TOML
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "recipe.toml").write_text(text)
    return load_recipe(str(tmp_path / "recipe.toml"))


def test_a_recipe_names_optimizer_scaling_and_nested_scheduler(tmp_path):
    made = recipe(tmp_path)
    optimizer = made.optimizer(made.model())
    assert isinstance(optimizer, LAMB)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)
    scheduler = made.scheduler(optimizer)
    assert isinstance(scheduler, WarmUp)
    rates = [r for (r,) in run(optimizer, scheduler, 6)]
    cosine = [0.01 * (1 + math.cos(math.pi * t / 10)) for t in range(6)]
    factors = [0.5, 0.625, 0.75, 0.875, 1, 1]
    assert rates == pytest.approx([f * c for f, c in zip(factors, cosine, strict=True)])
    assert describe_value(made.optimizer).endswith("rates x2")
    assert "then=torch.optim.lr_scheduler:CosineAnnealingLR(T_max=10)" in describe_value(
        made.scheduler
    )


def test_without_scaling_the_optimizer_is_the_one_that_was_named(tmp_path):
    made = recipe(tmp_path, ('scale_rate = "square_root from 16 samples"\n', ""))
    assert made.optimizer(made.model()).param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (("square_root from", "cubic from"), DocumentError, "recipe.toml:5 .*linear from 256"),
        (("16 samples", "16 tokens"), DocumentError, "scale_rate is stated in tokens"),
        (("CosineAnnealingLR", "CosineAnealingLR"), RecipeError, "has no CosineAnealingLR"),
        (("lr_scheduler:", "lr_schedulers:"), RecipeError, "recipe.toml:29: module"),
        (("T_max", "t_max"), RecipeError, "no argument t_max"),
    ],
)
def test_mistakes_in_these_keys_are_reported_with_their_place(tmp_path, change, kind, text):
    with pytest.raises(kind, match=text):
        recipe(tmp_path, change)


def bad_scale():
    import dataclasses

    from support.recipes import mlp

    return dataclasses.replace(mlp(), scale_rate="by eye")


def test_a_function_that_returns_a_wrong_scaling_is_told():
    with pytest.raises(RecipeError, match=r"headway\.Recipe: scale_rate: 'by eye'"):
        load_recipe(f"{__name__}:bad_scale")
