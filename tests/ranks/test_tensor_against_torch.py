"""ranks: the cuboid (p, 1, 1) equals FSDP2; (1, p, 1) equals tensor and sequence parallelism."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from headway.parallel.split_layers import split_model
from headway.parallel.tensor import ProcessGrid, SplitSettings
from headway.plans.tensor_layout import TensorGrid
from support import split_models as models
from support.ranks import ranks


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(models.WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(models.WIDTH, 64) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(64, models.WIDTH) for _ in range(2))

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.tanh(up(norm(x))))
        return x


def gradients(model, value):
    value.backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def assert_equal(ours, theirs):
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= 1e-12, name


@ranks(2)
def test_rows_of_weights_are_zero_3(world):
    torch.manual_seed(0)
    ours, (x, target) = Blocks().double(), models.vectors()
    peer = copy.deepcopy(ours)
    fully_shard(peer, mesh=init_device_mesh("cpu", (2,)))
    half = (x.chunk(2)[world.rank], target.chunk(2)[world.rank])
    theirs = gradients(peer, models.square_loss(peer, half))
    settings = SplitSettings(keep=False)
    grid = ProcessGrid.of(TensorGrid.cuboid(2, 1, 1))
    split_model(ours, grid, models.square_loss, (x, target), settings=settings)
    for name, parameter in ours.named_parameters():
        if "norms" not in name and name.endswith("weight"):
            assert parameter.to_local().numel() * 2 == parameter.numel()
    loss = models.square_loss(ours, (x, target))
    assert_equal(gradients(ours, loss), theirs)


@ranks(2)
def test_columns_of_weights_are_tensor_and_sequence_parallel(world):
    torch.manual_seed(0)
    ours, (x, target) = Blocks().double(), models.vectors()
    peer = copy.deepcopy(ours)
    plan = {}
    for number in range(2):
        plan[f"norms.{number}"] = SequenceParallel(sequence_dim=0, use_local_output=False)
        plan[f"ups.{number}"] = ColwiseParallel(input_layouts=Shard(0))
        plan[f"downs.{number}"] = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    mesh = init_device_mesh("cpu", (2,))
    peer = parallelize_module(peer, mesh, plan)
    rows = DTensor.from_local(x.chunk(2)[world.rank], mesh, [Shard(0)])
    value = (peer(rows).full_tensor() - target).square().mean()
    theirs = gradients(peer, value)
    split_model(ours, ProcessGrid.of(TensorGrid.cuboid(1, 2, 1)), models.square_loss, (x, target))
    loss = models.square_loss(ours, (x, target))
    assert abs(loss - value) <= 1e-12
    assert_equal(gradients(ours, loss), theirs)
