"""ranks: plans whose heads work on whole samples train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway.plans import LayerSplit, PipelinePlan, data_parallel, pipelined
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.workloads.cosmoflow import CosmoFlow, CosmoFlowConfig
from headway.workloads.resnet import ResNet, ResNetConfig
from support.ranks import run_ranks
from support.serial import flat, largest_error, train_serially
from support.split_recipes import Estimator, Volumes, adamw, estimating

SEED, STEPS = 3, 3


class Universes(torch.utils.data.Dataset):
    """Cubes of 4 channels and a number for each; images of 3 and a class are cut out of them."""

    def __len__(self):
        return 17

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        return torch.randn(4, 8, 8, 8, generator=made), torch.randn(4, generator=made)


class Images(Universes):
    def __getitem__(self, index):
        cube, numbers = super().__getitem__(index)
        return cube[:3, 0], numbers.argmax()


def cosmoflow(batch_norm):
    return CosmoFlow(
        CosmoFlowConfig(
            width=8, channels=3, most_channels=3, pooling="average", hidden=(6, 5),
            batch_norm=batch_norm, dropout=0.3,
        )
    )  # fmt: skip


def resnet(norm):
    return ResNet(
        ResNetConfig(layers=(1, 1), bottleneck=False, width=4, classes=4, stem="small", norm=norm)
    )


def near(model, batch):
    cubes, numbers = batch
    return F.mse_loss(model(cubes), numbers)


def classed(model, batch):
    """As a sum and what it is over."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "cosmoflow": (lambda: cosmoflow(False), Universes, near),
    "cosmoflow, normed": (lambda: cosmoflow(True), Universes, near),
    "resnet": (lambda: resnet("batch"), Images, classed),
    "resnet, groups": (lambda: resnet("group"), Images, classed),
    "estimator": (Estimator, Volumes, estimating),
}


def train(world, cases):
    """Each in turn: (model, split, further options of the plan)."""
    return [one(world, *case) for case in cases]


def one(world, case, layers, options):
    build, data, loss = CASES[case]
    torch.manual_seed(SEED)
    model = build().double()
    make = pipelined if "stages" in options else data_parallel
    plan = make(processes=world.size, precision="float64", split=layers, **options)
    run = Executor(
        model, adamw(model), loss=loss, plan=plan, clip=0.5, seed=SEED, world=World.adopt()
    )
    history = []
    for _, part in zip(range(STEPS), run.batches(data(), epochs=None), strict=False):
        value = run.step(part)
        history.append(flat(run.strategy.tensors_by_kind(), value))
    with run.loader(data(), epochs=1) as loader:
        told = run.evaluate(loader)
    run.strategy.close()
    return history, told


def compare(ranks, *cases):
    found = run_ranks(ranks, train, cases, timeout=90)
    for number, (case, layers, options) in enumerate(cases):
        build, data, loss = CASES[case]
        serial = train_serially(
            build, data(), loss, adamw, batch=options["batch"], steps=STEPS, clip=0.5, seed=SEED
        )
        history, told = found[0][number]
        for step, (a, b) in enumerate(zip(serial, history, strict=True), start=1):
            error, name = largest_error(a, b)
            where = f"{case} {layers} {options}, step {step}"
            assert error < 1e-12, f"{where}: {name} differs by {error:.1e}"
        assert all(rank[number][1] == told for rank in found)
        assert told[1] == len(data())


LINE, HALVES, CORNERS = (LayerSplit(spatial=s) for s in ((4, 1, 1), (2, 1, 1), (2, 2, 1)))
FORCED = LayerSplit(spatial=(2, 2, 1), head="samples")
GATHERED = LayerSplit(spatial=(2, 2, 1), head="gathered")


@pytest.mark.slow
def test_heads_on_four_ranks():
    """Running statistics and dropout on both sides of the switch; 17 samples: ragged batches."""
    compare(
        4,
        ("cosmoflow, normed", CORNERS, {"batch": 6}),
        ("cosmoflow, normed", LINE, {"batch": 3}),
        ("cosmoflow, normed", GATHERED, {"batch": 3}),
        ("cosmoflow", FORCED, {"batch": 3, "microbatch": 1}),
        ("cosmoflow", HALVES, {"batch": 7, "microbatch": 2}),
        ("cosmoflow", CORNERS, {"batch": 6, "zero": 3}),
        ("cosmoflow", HALVES, {"batch": 8, "zero": 2}),
        ("resnet", LayerSplit(spatial=(2, 2)), {"batch": 5}),
        ("resnet, groups", LayerSplit(spatial=(1, 2), min_width=3), {"batch": 6}),
        ("estimator", CORNERS, {"batch": 5}),
    )


THREE = PipelinePlan(schedule="gpipe", microbatches=2)


@pytest.mark.slow
def test_heads_in_pipelines():
    """Whole samples go from stage to stage; where a rank has none, nothing is sent."""
    compare(
        4,
        ("estimator", HALVES, {"batch": 7, "stages": 2, "pipeline": THREE}),
        ("cosmoflow", HALVES, {"batch": 6, "stages": 2, "pipeline": PipelinePlan(
            schedule="zb-h1", microbatches=2)}),
        ("cosmoflow", HALVES, {"batch": 6, "stages": 2, "zero": 1, "pipeline": PipelinePlan(
            schedule="chimera", microbatches=2)}),
        ("resnet, groups", LayerSplit(spatial=(2, 1), min_width=3), {
            "batch": 6, "stages": 2, "pipeline": PipelinePlan(microbatches=2, recompute="blocks")}),
    )  # fmt: skip


@pytest.mark.slow
def test_heads_on_eight_ranks():
    compare(
        8,
        ("cosmoflow, normed", LayerSplit(spatial=(2, 2, 2)), {"batch": 5}),
        ("cosmoflow, normed", LayerSplit(spatial=(2, 1, 4)), {"batch": 2}),
        ("cosmoflow", CORNERS, {"batch": 7, "microbatch": 3}),
        ("cosmoflow", CORNERS, {"batch": 6, "stages": 2, "pipeline": THREE}),
        ("resnet", LayerSplit(spatial=(2, 4)), {"batch": 6}),
    )
