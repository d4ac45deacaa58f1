"""single: what FSDP2 and tensor parallelism send is what the planner lists, count and bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from headway import Executor, criterion
from headway.collective.collective_calls import CommunicatingStage
from headway.errors import PlanError
from headway.graph.model_graph import TensorSpec
from headway.parallel.fsdp import fsdp_units as gathered_of
from headway.planner.estimate.degrees import Degrees
from headway.planner.traffic.estimate import of_gradients
from headway.planner.traffic.executor import (
    FullyShardedModule,
    collectives_of_plan,
    fsdp2_wrapper_calls,
)
from headway.plans import data_parallel
from support.call_volumes import call_volumes
from support.collective_recorder import CollectiveRecorder, collective_differences
from support.fake_world import fake_world
from support.tiny_models import FEATURES, Points

WORLDS = (2, 8, 1024)


def same(calls, recorder):
    assert recorder.seen
    assert list(collective_differences(calls, recorder.seen)) == []


def specs_of(module):
    return {
        name: TensorSpec(shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."))
        for name, p in module.named_parameters()
    }


class Row(nn.Module):
    """Blocks with odd shapes, and parameters of its own around them."""

    def __init__(self, width: int = 37, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            for _ in range(blocks)
        )
        self.leave = nn.Linear(width, 5)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def groups_of(model, *, root_reshards):
    """What `fully_shard` of every block and of the model makes."""
    inside = {f"blocks.{n}.{name}" for n, b in enumerate(model.blocks) for name in specs_of(b)}
    own = {name: spec for name, spec in specs_of(model).items() if name not in inside}
    return [
        FullyShardedModule(parameters=own, reshard=root_reshards),
        *(FullyShardedModule(parameters=specs_of(block)) for block in model.blocks),
    ]


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def train(model, zero, microbatches, inputs):
    """One step, as ZeRO 1, 2 or 3 of FSDP2; the parameters are sharded at its beginning."""
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for number in range(microbatches):
        last = number == microbatches - 1
        for part in parts:
            if zero < 3:
                part.set_reshard_after_forward(False)
                part.set_reshard_after_backward(last)
            if zero < 2:
                part.set_requires_gradient_sync(last)
        model(inputs).sum().backward()


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_fully_shard(ranks, zero, microbatches):
    model = Row()
    groups = groups_of(model, root_reshards=False)
    calls = fsdp2_wrapper_calls(groups, ranks, zero=zero, microbatches=microbatches)
    with fake_world(ranks, rank=ranks // 2):
        shard(model)
        for _ in range(2):
            with CollectiveRecorder() as recorder:
                train(model, zero, microbatches, torch.randn(4, FEATURES))
    same(calls, recorder)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_the_search_prices_is_what_fully_shard_sends(zero):
    """All wrapped modules free what they gathered; their dimensions are multiples of the ranks."""
    model = Row(width=32).requires_grad_(True)
    model.leave = nn.Linear(32, 8)
    degrees = Degrees(tensor=1, data=8, pipeline=1, microbatch=4, microbatches=3, zero=zero)
    held = sum(spec.bytes for spec in specs_of(model).values())
    with fake_world(8):
        shard(model, reshard_after_forward=zero == 3)
        with CollectiveRecorder() as recorder:
            train(model, zero, 3, torch.randn(4, FEATURES))
    priced = {
        kind: size
        for (kind, _), (_, size) in call_volumes(of_gradients(degrees, [held], held)).items()
    }
    seen = {kind: sum(s.bytes for s in recorder.seen if s.kind == kind) for kind in priced}
    assert seen == priced


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard_that_keeps_or_frees(reshard):
    """`reshard_after_forward` given for all, the root among them; frozen parameters."""
    model = Row()
    model.blocks[1].requires_grad_(False)
    model.blocks[2][0].bias.requires_grad_(False)
    groups = [
        FullyShardedModule(
            parameters=group.parameters,
            reshard=reshard,
            frozen=frozenset({1: set(), 2: group.parameters, 3: {"0.bias"}}.get(number, set())),
        )
        for number, group in enumerate(groups_of(model, root_reshards=reshard))
    ]
    with fake_world(8):
        shard(model, reshard_after_forward=reshard)
        with CollectiveRecorder() as recorder:
            model(torch.randn(4, FEATURES)).sum().backward()
    same(fsdp2_wrapper_calls(groups, 8), recorder)


def test_fully_shard_over_copies():
    """A mesh of two axes: shards over 8, copies over 128 (HSDP)."""
    model = Row()
    groups = groups_of(model, root_reshards=False)
    with fake_world(1024):
        mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("replicate", "shard"))
        shard(model, mesh=mesh)
        with CollectiveRecorder() as recorder:
            model(torch.randn(4, FEATURES)).sum().backward()
    same(fsdp2_wrapper_calls(groups, 8, copies=128), recorder)


# -- headway's executor ---------------------------------------------------------------------------


class Scaled(Row):
    """With a single number, which is not sharded, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.blocks[1][0].requires_grad_(False)

    def forward(self, x):
        return super().forward(x) * self.factor


def part_of(model):
    """The whole model, before it is sharded."""
    specs, names = specs_of(model), {p: n for n, p in model.named_parameters()}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    return CommunicatingStage(
        parameters={n: spec for n, spec in specs.items() if n in trained},
        frozen={n: spec for n, spec in specs.items() if n not in trained},
        gathered=[[names[p] for p in module.parameters()] for module in gathered_of(model)],
    )


@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (8, 4), (1024, None)])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_what_the_executor_does_for_a_plan(ranks, shards, zero, microbatches):
    plan = data_parallel(
        2 * microbatches * ranks, processes=ranks, microbatch=2, zero=zero, shards=shards
    )
    model = Scaled()
    part = part_of(model)
    assert len(part.gathered) == 3
    with fake_world(ranks, rank=ranks // 2) as world:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = criterion(nn.CrossEntropyLoss())
        run = Executor(model, optimizer, loss=loss, plan=plan, world=world, clip=1.0)
        for batch in run.batches(Points(plan.batch.samples * 2)):
            with CollectiveRecorder() as recorder:
                run.step(batch)
    same(collectives_of_plan(plan, [part], clip=True), recorder)


def test_what_is_not_listed_is_named():
    """Without the model nobody knows which of its modules FSDP2 gathers together."""
    plan = data_parallel(4, processes=2, zero=3)
    with pytest.raises(PlanError, match="which modules are gathered together"):
        collectives_of_plan(plan, [CommunicatingStage(parameters=specs_of(Row()))])
