"""ranks: stages of tensor-parallel blocks, pipe x tensor = 2 x 2, equal the serial run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headway.errors import PlanError
from headway.parallel import Pipeline, PipelineCallbacks, PipelineRanks, StageGradientSync, cut
from headway.schedule.generators.registry import make_schedule
from headway.schedule.lowering import lower
from support.pipelines import assert_equal, numbers_of, points, run_serially
from support.ranks import run_ranks
from support.tiny_models import CLASSES, FEATURES, cross_entropy
from support.torch_runtime import TorchPipeline

PIPE, TENSOR, COUNT = 2, 2, 4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(FEATURES, 8)
        self.down = nn.Linear(8, FEATURES)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """What is split, and between it norms that every rank has whole; stages end in views."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = block(norm(x))
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Tower().double()


def batch():
    return points(COUNT, dtype=torch.float64)


def split(model, mesh, *, plain=(True, True, True, True)):
    """Args: plain: whether each block returns a plain tensor."""
    for block, local in zip(model.blocks, plain, strict=True):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=local)}
        parallelize_module(block, mesh, plan)
    return model


def pipelined(world, names):
    mesh = init_device_mesh("cpu", (PIPE, TENSOR), mesh_dim_names=("pipe", "tensor"))
    place = mesh.get_local_rank("tensor")
    ranks = tuple(stage * TENSOR + place for stage in range(PIPE))
    team = PipelineRanks(
        rank=mesh.get_local_rank("pipe"), ranks=ranks, group=mesh.get_group("pipe")
    )
    data, found = batch(), {}
    for executor, name in names:
        model = split(build(), mesh["tensor"])
        table = lower(make_schedule(name, stages=PIPE, microbatches=COUNT), sync="eager")
        stages = cut(model, cross_entropy, data[0], stages=table.stages)
        calls = PipelineCallbacks(
            loss=cross_entropy,
            share=lambda value, _: value / COUNT,
            sync=StageGradientSync(stages, table, team),
            step=lambda _: None,
        )
        pipeline = executor(stages, table, team, calls)
        evaluated = pipeline.evaluate(data) if executor is Pipeline else {}
        losses = pipeline.run(data)
        assert all(torch.equal(losses[m], loss) for m, loss in evaluated.items())
        own = {key for _, n in table.hosted(team.rank) for key in stages[n].parameters}
        held = {k: v for k, v in sorted(numbers_of(model).items()) if k.split()[-1] in own}
        assert any(isinstance(gradient, DTensor) for gradient in held.values())
        whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in held.items()}
        found[executor.__name__, name] = {**{f"loss {m}": v for m, v in losses.items()}, **whole}
    model = split(build(), mesh["tensor"], plain=(False, False, False, True))
    model.norms, said = nn.ModuleList(nn.Identity() for _ in range(4)), "a DTensor enters stage 1"
    with pytest.raises(PlanError, match=said):
        cut(model, cross_entropy, data[0], at=["blocks.1"])
    return found


@pytest.mark.slow
def test_schedules_equal_the_serial_run_on_both_executors():
    """Torch's own ZBV raises "Can't detach views in-place" here: our stages give it no views."""
    ours = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "chimera", "dualpipe"]
    names = [(Pipeline, name) for name in ours]
    names += [(TorchPipeline, name) for name in ("1f1b", "zbv", "chimera")]
    expected = run_serially(build(), cross_entropy, batch())
    found = run_ranks(PIPE * TENSOR, pipelined, names, timeout=60)
    for executor, name in names:
        key = executor.__name__, name
        assert_equal(expected, [of_rank[key] for of_rank in found], 1e-12)
