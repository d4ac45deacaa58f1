"""single: recordings of runs that differ by rounding are equal, those of a wrong update are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.api.verification import EquivalenceResult, VerificationResult
from headway.verification.compare import compare
from headway.verification.recording import Recording
from headway.verification.serial_run import perturb

SIZE = 20_000


def one_step(gradient: torch.Tensor, **options: float) -> Recording:
    """A step of Adam from the same values."""
    weight = torch.linspace(-0.4, 0.4, SIZE, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Adam([parameter], **{"lr": 0.01, **options})
    parameter.grad = gradient
    optimizer.step()
    tensors = {"1/gradient/w": gradient, "1/parameter/w": parameter.detach()}
    return Recording(tensors, tuple(tensors), initial={"w": weight})


@pytest.fixture
def gradients():
    """Of many magnitudes, some far below what the largest one leaves of a sum, and the same with
    other rounding."""
    draw = torch.Generator().manual_seed(3)
    sizes = 10.0 ** (-12 * torch.rand(SIZE, generator=draw, dtype=torch.float64))
    one = sizes * torch.randn(SIZE, generator=draw, dtype=torch.float64)
    one[:50] = 0.0
    rounding = torch.randn(SIZE, generator=draw, dtype=torch.float64) * 1e-16 * one.abs().max()
    return one, one + rounding


def test_adams_first_step_magnifies_the_rounding_of_small_gradients(gradients):
    one, other = map(one_step, gradients)
    apart = (one.tensors["1/parameter/w"] - other.tensors["1/parameter/w"]).abs().max()
    assert apart > 1e-12 * one.tensors["1/parameter/w"].abs().max()  # or there is nothing to see
    assert compare(one, other).equal


def test_wrong_updates_are_no_rounding(gradients):
    expected, given = one_step(gradients[0]), gradients[1]
    for wrong in ({"eps": 1.001e-8}, {"weight_decay": 1e-9}, {"lr": 0.01 * (1 + 1e-9)}):
        first = compare(expected, one_step(given, **wrong)).first
        assert first is not None, wrong
        assert first.kind == "parameter"
    rounded = one_step(given)
    rounded.tensors["1/parameter/w"][7000] *= 1 + 1e-9  # type: ignore[index]
    assert not compare(expected, rounded).equal


def recorded(gradient: float, rate: float = 1.0) -> Recording:
    tensors = {
        "2/gradient/w": torch.tensor([gradient], dtype=torch.float64),
        "2/journal/lr": torch.tensor(rate, dtype=torch.float64),
    }
    return Recording(tensors, tuple(tensors))


def test_what_rounding_becomes_in_a_model_is_allowed_and_no_more():
    serial, perturbed = recorded(1.0), recorded(1.0 + 1e-10)
    for apart, equal in ((1.5e-9, True), (2e-9, False), (1.0, False), (float("nan"), False)):
        comparison = compare(serial, recorded(1.0 + apart), perturbed=[perturbed])
        assert comparison.equal is equal, apart
        alone = compare(serial, recorded(1.0 + apart))
        assert alone.may_be_rounding is (apart < 1e-4)
    # A rate is not rounded in a model: only what the perturbed run moves is excused.
    first = compare(serial, recorded(1.0, 1.0 + 1.5e-9), perturbed=[perturbed]).first
    assert first is not None
    assert first.kind == "journal"


def test_the_largest_error_of_several_draws_is_allowed():
    """Of the smallest gradient one draw may happen to leave everything as it is."""
    lucky, usual = recorded(1.0 + 1e-12), recorded(1.0 + 1e-10)
    off = recorded(1.0 + 1e-9)
    assert not compare(recorded(1.0), off, perturbed=[lucky]).equal
    assert compare(recorded(1.0), off, perturbed=[lucky, usual]).equal


def test_what_rounding_makes_of_a_gradient_it_may_make_of_the_step():
    """Adam divides by a gradient that is small beside the others of its tensor."""
    gradient = torch.linspace(-1.0, 1.0, SIZE, dtype=torch.float64)
    gradient[7] = 1e-6
    off = gradient.clone()
    off[7] += 1e-11
    serial, split = one_step(gradient), one_step(off)
    perturbed = one_step(gradient + 2e-12 * gradient.roll(1).sign())
    assert not compare(serial, split).equal
    assert compare(serial, split, perturbed=[perturbed]).equal


def test_a_small_first_difference_is_measured_though_a_larger_one_follows():
    comparison = compare(recorded(1.0), recorded(1.0 + 1e-10, rate=1.1))
    assert comparison.may_be_rounding
    assert not compare(recorded(1.0), recorded(1.1)).may_be_rounding


def test_every_draw_is_another_one():
    first, same, second = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    for model, number in ((first, 1), (same, 1), (second, 2)):
        nn.init.ones_(model.double().weight)
        perturb(model, number)
    assert torch.equal(first.weight, same.weight)
    assert not torch.equal(first.weight, second.weight)
    assert 0 < (first.weight - 1).abs().max() <= torch.finfo(torch.float64).eps


def test_what_rounding_becomes_is_never_much():
    first = compare(recorded(1.0), recorded(1.01), perturbed=[recorded(1.5)]).first
    assert first is not None


def test_a_verdict_prints_as_a_sentence(gradients):
    """Not as all its tensors, by which a notebook's cell would end."""
    exact, _ = gradients
    found = one_step(exact)
    same = EquivalenceResult(processes=2, comparison=compare(found, found), seconds=1.0)
    other = EquivalenceResult(
        processes=2, comparison=compare(found, one_step(2 * exact)), seconds=1.0
    )
    equal = VerificationResult((same,), steps=1)
    assert str(equal) == repr(equal) == "EQUAL to the serial run (1 step, 2 tensors compared)"
    said = str(VerificationResult((same, other), steps=1))
    assert said.startswith("DIFFERENT: the split run is NOT the serial run; first difference: ")
