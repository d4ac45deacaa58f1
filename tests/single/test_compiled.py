"""single: a compiled model trains compiled, or a warning says that it does not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from headway import Executor
from headway.errors import PlanError, RecipeError
from headway.plans import pipelined
from headway.plans.plan import check_device
from headway.run.step.batch import resize_batch
from headway.run.step.randomness import probe_random_draws
from support.tiny_models import Mlp, Points, WithDropout, cross_entropy


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """How often compiled code has run; no compiler is needed for `backend`."""
    torch._dynamo.reset()
    found: list[int] = [0]
    yield found
    torch._dynamo.reset()


def compiled(model: nn.Module, calls: list[int], *, in_place: bool = False) -> nn.Module:
    def backend(graph, _):
        def run(*inputs):
            calls[0] += 1
            return graph.forward(*inputs)

        return run

    if in_place:
        model.compile(backend=backend)
        return model
    return torch.compile(model, backend=backend)


def per_step(model: nn.Module, calls: list[int], steps: int = 4) -> list[int]:
    run = Executor(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=cross_entropy, batch=8)
    found = []
    for batch in run.batches(Points(32), epochs=None):
        before = calls[0]
        run.step(batch)
        found.append(calls[0] - before)
        if len(found) == steps:
            break
    run.close()
    return found


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_code_runs_in_every_step(calls, in_place):
    assert per_step(compiled(Mlp(), calls, in_place=in_place), calls) == [1, 1, 1, 1]


def test_a_compiled_part_of_a_model(calls):
    model = nn.Sequential(compiled(nn.Linear(6, 8), calls), nn.Linear(8, 4))
    assert per_step(model, calls) == [1, 1, 1, 1]


def test_random_draws_switch_it_off_with_a_warning(calls):
    torch.manual_seed(0)
    model = WithDropout()
    expected = WithDropout()
    expected.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="compiled, and trains uncompiled"):
        assert per_step(compiled(model, calls), calls) == [0, 0, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        per_step(expected, calls)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


# -- what GPUs cannot do yet ----------------------------------------------------------------------


def test_pipelines_are_refused_on_gpus():
    check_device(pipelined(8, processes=2, stages=2), "cpu")
    check_device(pipelined(8, processes=2, stages=1), "cuda")
    with pytest.raises(PlanError, match="cannot run pipelines on cuda yet") as caught:
        check_device(pipelined(8, processes=2, stages=2), "cuda")
    assert "NCCL ignores" in str(caught.value)


@torch.library.custom_op(
    "headway_test::_scaled_dot_product_flash_attention",
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def fused_attention(x: torch.Tensor) -> torch.Tensor:
    """Stands for the operator of GPUs, which draws once for all samples."""
    return x * torch.rand(())


class WithFusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(fused_attention(x))


def test_attention_that_draws_for_all_samples_at_once_is_refused():
    data = torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(RecipeError, match="attention with dropout cannot be trained on"):
        probe_random_draws(WithFusedAttention(), cross_entropy, data, resize_batch)
