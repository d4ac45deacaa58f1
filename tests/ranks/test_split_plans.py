"""ranks: plans that split layers or samples train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.errors import PlanError
from headway.plan import LayerSplit, data_parallel
from headway.plan.mechanisms import check_mechanisms
from headway.run.executor import Executor
from headway.run.world import World
from support.commands import headway, resumed
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

SEED, STEPS = 3, 4


CASES: dict[str, tuple[Any, Any, Any]] = {
    "speaker": (Speaker, Lines, speaking),
    "dropout": (Dropping, Lines, speaking),
    "segmenter": (Segmenter, Volumes, labelling),
}


def train(world, case, layers, batch, microbatch, clip, kept):
    build, data, loss = CASES[case]
    torch.manual_seed(SEED)
    model = build().double()
    made = adamw(model)
    plan = data_parallel(
        batch,
        processes=world.size,
        microbatch=microbatch,
        precision="float64",
        split=layers,
        **kept,
    )
    run = Executor(model, made, loss=loss, plan=plan, seed=SEED, clip=clip, world=World.adopt())
    history = []
    for _, part in zip(range(STEPS), run.batches(data(), epochs=None), strict=False):
        found = run.step(part)
        history.append(flat(run.gradients.numbers(), found))
    with run.loader(data(), epochs=1) as loader:
        told = run.evaluate(loader)
    return history, told


def compare(case, ranks, layers, *, batch=8, microbatch=None, clip=None, **kept):
    build, data, loss = CASES[case]
    found = run_ranks(ranks, train, case, layers, batch, microbatch, clip, kept)
    serial = train_serially(
        build, data(), loss, adamw, batch=batch, steps=STEPS, seed=SEED, clip=clip
    )
    for rank, (history, told) in enumerate(found):
        for step, (a, b) in enumerate(zip(serial, history, strict=True), start=1):
            error, name = largest_error(a, b)
            assert error < 1e-11, f"rank {rank}, step {step}: {name} differs by {error:.1e}"
        assert told == found[0][1]
        assert told[1] == len(data())


@pytest.mark.parametrize(
    ("ranks", "layers"),
    [
        (2, LayerSplit(tensor=(2,))),
        (4, LayerSplit(tensor=(2,))),
        (4, LayerSplit(tensor=(2, 2))),
        (4, LayerSplit(tensor=(1, 2, 2))),
        (4, LayerSplit(tensor=(1, 2, 1))),
    ],
    ids=str,
)
def test_split_layers_are_the_serial_run(ranks, layers):
    compare("speaker", ranks, layers, clip=0.5, microbatch=4)


def test_dropout_does_not_depend_on_the_split():
    compare("dropout", 2, LayerSplit(tensor=(2,)))


@pytest.mark.parametrize(
    ("ranks", "layers"),
    [
        (2, LayerSplit(spatial=(2, 1, 1))),
        (4, LayerSplit(spatial=(2, 1, 1))),
        (4, LayerSplit(spatial=(2, 2, 1))),
    ],
    ids=str,
)
def test_split_samples_are_the_serial_run(ranks, layers):
    compare("segmenter", ranks, layers, batch=4, microbatch=2, clip=0.5)


@pytest.mark.parametrize("kept", [{"zero": 3}, {"zero": 1}, {"zero": 2, "shards": 2}], ids=str)
def test_split_samples_with_sharded_state(kept):
    compare("segmenter", 4, LayerSplit(spatial=(2, 1, 1)), batch=4, microbatch=1, clip=0.5, **kept)


def test_any_plan_resumes_what_any_other_has_saved(tmp_path):
    """Sharded state, then a cuboid, then one process, as one process throughout."""
    stages = ((3, 2, ("zero=3",)), (6, 4, ("split.tensor=[1, 2, 2]",)), (8, 1, ()))
    found, whole = resumed(tmp_path, "support.split_recipes:speaker", stages)
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    ("recipe", "ranks", "split"),
    [
        ("speaker", 4, "split.tensor=[2]"),
        ("segmenter", 2, "split.spatial=[2]"),
        ("estimator", 4, "split.spatial=[2, 1, 2]"),
    ],
)
def test_the_command_proves_it(tmp_path, recipe, ranks, split):
    done = headway(
        "verify", f"support.split_recipes:{recipe}", "-n", str(ranks), "--set", split, cwd=tmp_path
    )
    assert done.code == 0, done.err + done.out
    assert "EQUAL to the serial run" in done.out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"split": LayerSplit(tensor=(1, 4))}, "are no sizes of a grid"),
        ({"split": LayerSplit(tensor=(2,)), "zero": 1}, "parts of parts"),
        ({"split": LayerSplit(tensor=(2,), spatial=(2,))}, "spatial at once"),
        ({"split": LayerSplit(tensor=(3,))}, "no multiple of 3 ranks"),
    ],
)
def test_what_cannot_be_together_is_refused_by_name(wrong, words):
    with pytest.raises(PlanError, match=words):
        check_mechanisms(data_parallel(12, processes=4, **wrong))
