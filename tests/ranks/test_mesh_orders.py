"""ranks: a mesh with data inside of pipe trains as one rank does."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from headway.plans import PipelinePlan, pipelined
from headway.plans.mesh import Mesh
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.ranks import run_ranks
from support.serial import flat, largest_error, train_serially
from support.tiny_models import CLASSES, FEATURES
from support.tiny_models import Residual as Net

SEED, STEPS, BATCH = 3, 3, 12


def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2 * BATCH, FEATURES, generator=draw)
    y = torch.randint(CLASSES, (2 * BATCH,), generator=draw)
    return torch.utils.data.TensorDataset(x, y)


def mean(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def split(world):
    plan = pipelined(
        BATCH,
        processes=world.size,
        stages=2,
        pipeline=PipelinePlan(microbatches=3),
        precision="float64",
    )
    plan = replace(plan, mesh=Mesh(axes=tuple(reversed(plan.mesh.axes))))
    plan.check()
    assert plan.mesh.peers(0, "data") == (0, 1)
    torch.manual_seed(SEED)
    model = Net().double()
    run = Executor(model, adamw(model), loss=mean, plan=plan, seed=SEED, world=World.adopt())
    history = []
    for _, part in zip(range(STEPS), run.batches(data(), epochs=None), strict=False):
        value = run.step(part)
        history.append(flat(run.strategy.tensors_by_kind(), value))
    run.strategy.close()
    return history


def test_data_inside_of_pipe_equals_the_serial_run():
    """Two stages of two copies: ranks 0 and 1 hold the first stage."""
    expected = train_serially(Net, data(), mean, adamw, batch=BATCH, steps=STEPS, seed=SEED)
    first, *others = run_ranks(4, split)
    for a, b in zip(expected, first, strict=True):
        error, name = largest_error(a, b)
        assert error < 1e-12, name
    for history in others:
        assert [b["loss"] for b in history] == [b["loss"] for b in first]
