"""ranks: batch normalisation over the global batch equals that of one process, to 1e-12."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from headway import Executor, criterion, data_parallel
from headway.errors import PlanError
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from support.commands import headway_here
from support.ranks import ranks

SAMPLES = 11


def model_of(momentum=0.1):
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Tanh(),
        nn.Linear(6, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2),
    ).double()  # fmt: skip


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = 5 + torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return list(zip(inputs, inputs[:, :2].sin(), strict=True))


def trained(world, batch, norm):
    """Two epochs, of which each ends with a batch of three samples."""
    model = model_of(momentum=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = data_parallel(batch, processes=world.ranks, norm=norm, precision="float64")
    run = Executor(model, optimizer, loss=criterion(nn.MSELoss()), plan=plan, world=world)
    losses = [run.step(step) for step in run.batches(samples(), epochs=2)]
    run.strategy.close()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def equals_one_process(found):
    losses, expected = trained(World.join(LaunchEnv(), device="cpu"), 8, "local")
    for given, state in found:
        torch.testing.assert_close(given, losses, rtol=1e-12, atol=0)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-13)


@ranks(4, check=equals_one_process)
def test_every_step_equals_one_process_also_where_a_rank_has_no_sample(world):
    return trained(World.adopt(), 8, "global")


def test_the_whole_recipe_with_sharded_state_is_verified_equal(tmp_path):
    words = ("-n", "2", "--set", "zero=3", "--steps", "2", "--json")
    done = headway_here("verify", "support.recipes:normalised_globally", *words, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    (facts,) = json.loads(done.out)
    assert facts["equal"]
    assert max(facts["errors"].values()) < 1e-12
    assert facts["errors"]["buffer"] is not None


@pytest.mark.parametrize(
    ("setting", "line"),
    [({"microbatch": 2}, "leave out microbatch"), ({"microbatch": 4}, "")],
)
def test_what_cannot_be_exact_is_refused_by_name(setting, line):
    if not line:
        assert data_parallel(8, processes=2, norm="global", **setting).batch.norm == "global"
        return
    with pytest.raises(PlanError) as caught:
        data_parallel(8, processes=2, norm="global", **setting)
    assert line in str(caught.value)
    assert 'norm = "local"' in str(caught.value)
