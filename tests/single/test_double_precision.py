"""single: what a model's own code converts to fewer bits stays float64 where all else is."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from headway.run.step import randomness
from headway.run.step.double_precision import double_precision

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
HALF = torch.ones(6, 4, dtype=torch.float16)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.bfloat16().sum(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.float16),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.to(HALF),
        lambda x: x.type_as(HALF),
        lambda x: x.type(torch.float32),
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.sum(dim=0, dtype=torch.float32),
        lambda x: torch.arange(4).float() + x[0],
        lambda x: torch.zeros(4).index_add_(0, torch.tensor([1]), x[0, :1]),
        lambda x: torch.full((4,), 0.1, dtype=torch.float32) * x[0],
        lambda x: x.new_zeros(4, dtype=torch.float32),
    ],
)
def test_a_conversion_keeps_all_bits(convert):
    with double_precision("float64"):
        assert convert(X).dtype is torch.float64


def test_integers_bits_and_wider_types_are_left_alone():
    with double_precision("float64"):
        assert torch.arange(3).dtype is torch.int64
        assert torch.tensor([1, 2]).dtype is torch.int64
        assert torch.zeros(2, dtype=torch.int32).dtype is torch.int32
        assert X.to(torch.int64).dtype is torch.int64
        assert X.to(X.new_ones(1, dtype=torch.bool)).dtype is torch.bool
        assert torch.zeros(2, dtype=torch.int32).view(torch.float32).dtype is torch.float32
        assert torch.zeros(2, dtype=torch.cfloat).dtype is torch.complex128


def test_another_mode_between_the_model_and_torch():
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    # As headway's own modes are: the line that asks is still the model's.
    code = compile(textwrap.dedent(inspect.getsource(Passing)), randomness.__file__, "exec")
    names = {"TorchDispatchMode": TorchDispatchMode}
    exec(code, names)
    with double_precision("float64"), names["Passing"]():
        assert X.float().dtype is torch.float64


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_precisions_are_left_alone(precision):
    with double_precision(precision):
        assert X.float().dtype is torch.float32
        assert torch.zeros(2).dtype is torch.float32


def test_what_headway_converts_stays_converted():
    namespace = {"torch": torch, "X": X}
    code = compile("found = X.to(torch.float16)", randomness.__file__, "exec")
    with double_precision("float64"):
        exec(code, namespace)
    assert namespace["found"].dtype is torch.float16


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.11 has no F.grouped_mm")
def test_a_grouped_product_that_has_no_float64():
    rows = X.clone().requires_grad_()
    weights = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    with double_precision("float64"):
        found = F.grouped_mm(rows, weights, offs=ends)
        gradients = torch.autograd.grad(found.square().sum(), (rows, weights))
    expected = torch.cat([rows[:2] @ weights[0], rows[2:5] @ weights[2], rows.new_zeros(1, 5)])
    assert torch.equal(found, expected)
    wanted = torch.autograd.grad(expected.square().sum(), (rows, weights))
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_recomputation_in_the_backward_pass_converts_alike():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x):
            return F.softmax(self.inner(x), dim=-1, dtype=torch.float32).to(x.dtype)

    model = Narrow()
    with double_precision("float64"):
        recomputed = torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False)
        (found,) = torch.autograd.grad(recomputed.square().sum(), model.inner.weight)
    expected = torch.softmax(model.inner(X), dim=-1).square().sum()
    assert torch.equal(found, torch.autograd.grad(expected, model.inner.weight)[0])


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.11 has no F.grouped_mm")
def test_a_grouped_product_of_tensors_without_numbers():
    with double_precision("float64"), FakeTensorMode():
        rows = torch.empty(6, 4, dtype=torch.float64)
        weights = torch.empty(3, 4, 5, dtype=torch.float64)
        found = F.grouped_mm(rows, weights, offs=torch.empty(3, dtype=torch.int32))
    assert found.shape == (6, 5)
