"""gpu: one rank on CUDA computes what one rank on the CPU does, and says what it cannot do.

NCCL refuses two ranks on one GPU, so that nothing here exchanges more than with itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway import Executor
from headway.errors import PlanError, RecipeError
from headway.plans import data_parallel, pipelined
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from support.tiny_models import Mlp, Points, WithDropout, cross_entropy

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; torch sees none here"
)
GPU = torch.device("cuda", 0)


def world(device: torch.device) -> World:
    return World(place=LaunchEnv(), device=device)


def trained(model: nn.Module, device: torch.device, *, microbatch: int | None = None) -> nn.Module:
    """The model after four steps in float64."""
    plan = data_parallel(8, processes=1, microbatch=microbatch, precision="float64")
    run = Executor(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=cross_entropy,
        plan=plan,
        clip=0.5,
        world=world(device),
    )
    for batch in run.batches(Points(32)):
        run.step(batch)
    run.close()
    return model.cpu()


def equal(one: nn.Module, other: nn.Module, rtol: float) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-14, msg=name)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def test_a_step_equals_that_of_the_cpu():
    equal(trained(made(Mlp), torch.device("cpu")), trained(made(Mlp), GPU), rtol=1e-10)


def test_dropout_does_not_depend_on_the_microbatch():
    whole = trained(made(WithDropout), GPU)
    equal(whole, trained(made(WithDropout), GPU, microbatch=2), rtol=1e-10)


def test_compiled_code_runs_in_every_step():
    calls = [0]

    def backend(graph, _):
        def run(*inputs):
            calls[0] += 1
            return graph.forward(*inputs)

        return run

    torch._dynamo.reset()
    trained(torch.compile(made(Mlp), backend=backend), GPU)
    assert calls == [4]


class AttentionWithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 1, dropout=0.3, batch_first=True)
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None].expand(-1, 3, -1).to(torch.float32)
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))


def test_attention_with_dropout_is_refused():
    model = made(AttentionWithDropout)
    run = Executor(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=cross_entropy,
        batch=8,
        world=world(GPU),
    )
    with pytest.raises(RecipeError, match="attention with dropout cannot be trained on cuda"):
        run.step(next(iter(run.batches(Points(32)))))


def test_pipelines_are_refused():
    model = made(Mlp)
    two = World(place=replace(LaunchEnv(), ranks=2), device=GPU)
    with pytest.raises(PlanError, match="cannot run pipelines on cuda yet"):
        Executor(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=cross_entropy,
            plan=pipelined(8, processes=2, stages=2),
            world=two,
        )


@pytest.fixture
def nccl(tmp_path) -> Iterator[None]:
    """A group of one rank, which still runs on NCCL's own stream."""
    torch.cuda.set_device(GPU)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=GPU)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_a_world_of_nccl_is_on_its_gpu():
    found = World.adopt()
    assert found.device == GPU
    total = torch.ones(3, device=GPU)
    dist.all_reduce(total)
    assert total.tolist() == [1, 1, 1]
