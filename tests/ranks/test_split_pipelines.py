"""ranks: plans whose stages split layers or samples train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.checkpoint.staging import local_data
from headway.plans import LayerSplit, ModuleSplit, PipelinePlan, pipelined
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.commands import headway_here, resumed
from support.ranks import run_ranks
from support.serial import flat, largest_error, train_serially
from support.split_recipes import (
    Dropping,
    Lines,
    Segmenter,
    Speaker,
    Volumes,
    adamw,
    labelling,
    speaking,
)

SEED, STEPS, BATCH = 3, 4, 7  # of 24 or 40 samples: the last batch is ragged

MODELS: dict[str, tuple[Any, Any, Any]] = {
    "speaker": (Speaker, Lines, speaking),
    "dropout": (Dropping, Lines, speaking),
    "segmenter": (Segmenter, Volumes, labelling),
}


def train(world, cases):
    """Each in turn: (model, layers, stages, schedule, further options of the plan)."""
    return [one(world, *case) for case in cases]


def one(world, case, layers, stages, pipeline, options):
    build, data, loss = MODELS[case]
    torch.manual_seed(SEED)
    model = build().double()
    options = {"batch": BATCH, **options}
    plan = pipelined(
        processes=world.size, stages=stages, pipeline=pipeline, precision="float64",
        split=layers, **options,
    )  # fmt: skip
    run = Executor(
        model, adamw(model), loss=loss, plan=plan, clip=0.5, seed=SEED, world=World.adopt()
    )
    history = []
    for _, part in zip(range(STEPS), run.batches(data(), epochs=None), strict=False):
        value = run.step(part)
        history.append(flat(run.strategy.tensors_by_kind(), value))
    with run.loader(data(), epochs=1) as loader:
        told = run.evaluate(loader)
    with run.whole() as whole:
        held = flat({"parameter": dict(whole.named_parameters())}, value) if not world.rank else {}
    mine = [
        (p.numel(), local_data(p).numel())
        for n, p in run.strategy.parameters.named.items()
        if n in run.pipeline.ownership.trained
    ]
    assert sum(own for _, own in mine) < sum(all_ for all_, _ in mine) or layers.spatial
    run.strategy.close()
    return history, told, held


def compare(ranks, *cases):
    found = run_ranks(ranks, train, cases, timeout=90)
    for number, (case, *rest) in enumerate(cases):
        batch = rest[-1].get("batch", BATCH)
        build, data, loss = MODELS[case]
        serial = train_serially(
            build, data(), loss, adamw, batch=batch, steps=STEPS, clip=0.5, seed=SEED
        )
        history, told, held = found[0][number]
        for step, (a, b) in enumerate(zip(serial, history, strict=True), start=1):
            error, name = largest_error(a, b)
            assert error < 1e-11, f"{case} {rest}, step {step}: {name} differs by {error:.1e}"
        for name, tensor in held.items():
            assert torch.equal(tensor, history[-1][name]), name
        assert all(rank[number][1] == told for rank in found)
        assert told[1] == len(data())


GPIPE = PipelinePlan(schedule="gpipe", microbatches=3)
ONE = PipelinePlan(microbatches=3)
SPLIT = PipelinePlan(schedule="zb-h1", microbatches=3, sync="eager")
STAGEWISE = PipelinePlan(microbatches=3, recompute="stages")
BLOCKS = PipelinePlan(microbatches=3, recompute="blocks")
EVEN = PipelinePlan(schedule="zb-h1", microbatches=2)
CHIMERA = PipelinePlan(schedule="chimera", microbatches=4, sync="eager")
HALVES, CORNERS = LayerSplit(spatial=(2, 1, 1)), LayerSplit(spatial=(2, 2, 1))


@pytest.mark.slow
def test_samples_in_parts():
    """Halos between ranks of a stage, parts between stages, a skip over two of them."""
    compare(
        4,
        ("segmenter", HALVES, 2, GPIPE, {}),
        ("segmenter", HALVES, 2, SPLIT, {"zero": 1}),
        ("segmenter", HALVES, 2, CHIMERA, {"zero": 3}),
        ("segmenter", HALVES, 2, STAGEWISE, {}),
        ("segmenter", HALVES, 2, BLOCKS, {}),
    )


@pytest.mark.slow
def test_copies_of_samples_in_parts():
    compare(8, ("segmenter", CORNERS, 2, ONE, {}), ("segmenter", HALVES, 2, ONE, {"zero": 3}))


TWO, SQUARE, LINE, CUBE = (
    LayerSplit(tensor=(2,)),
    LayerSplit(tensor=(2, 2)),
    LayerSplit(tensor=(1, 2, 1)),
    LayerSplit(tensor=(1, 2, 2)),
)


ISLANDS = LayerSplit(
    tensor=(2,),
    by=(
        ModuleSplit(modules="blocks.0.perceptron", tensor=(2, 1, 1)),
        ModuleSplit(modules="blocks.1", tensor=(1, 2, 1)),
    ),
)


@pytest.mark.slow
def test_layers_in_parts():
    compare(
        4,
        ("speaker", TWO, 2, GPIPE, {}),
        ("dropout", TWO, 2, SPLIT, {}),
        ("speaker", TWO, 2, CHIMERA, {}),
        ("speaker", TWO, 2, BLOCKS, {}),
        ("speaker", TWO, 2, STAGEWISE, {}),
        ("speaker", ISLANDS, 2, EVEN, {"batch": 8}),
        ("speaker", ISLANDS, 2, CHIMERA, {"batch": 8}),
    )


@pytest.mark.slow
def test_layers_and_state_in_parts():
    """Parts of layers are cut once more, over both copies; with Chimera over four ranks."""
    compare(
        8,
        ("speaker", TWO, 2, ONE, {"zero": 1}),
        ("speaker", TWO, 2, SPLIT, {"zero": 3}),
        ("speaker", TWO, 2, CHIMERA, {"zero": 2}),
        ("speaker", TWO, 2, ONE, {"zero": 1, "shards": 2}),
    )


@pytest.mark.slow
def test_grids():
    """Samples of a micro-batch are cut as well: it has four of them."""
    compare(
        8,
        ("speaker", SQUARE, 2, EVEN, {"batch": 8}),
        ("speaker", CUBE, 2, EVEN, {"batch": 8}),
        ("speaker", LINE, 2, EVEN, {"batch": 8, "zero": 3}),
    )


@pytest.mark.slow
def test_any_plan_resumes_what_any_other_has_saved(tmp_path):
    """Stages of split layers, then with state in parts, then one process, as it throughout."""
    chimera = "pipeline.schedule='chimera'"
    stages = (
        (3, 4, ("stages=2", "split.tensor=[2]", "zero=1", chimera, "pipeline.microbatches=2")),
        (6, 4, ("stages=2", "zero=3", "pipeline.microbatches=2")),
        (8, 1, ()),
    )
    found, whole = resumed(tmp_path, "support.split_recipes:speaker", stages)
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.slow
def test_the_command_proves_it(tmp_path):
    words = ("stages=2", "split.spatial=[2]", "pipeline.microbatches=2")
    options = [w for v in words for w in ("--set", v)]
    done = headway_here(
        "verify", "support.split_recipes:segmenter", "-n", "4", *options, cwd=tmp_path
    )
    assert done.code == 0, done.err + done.out
    assert "EQUAL to the serial run" in done.out
