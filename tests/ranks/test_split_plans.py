"""ranks: plans that split layers or samples train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.comm.compress.compressor import Compressor
from headway.comm.compress.quantization import Bf16
from headway.errors import PlanError
from headway.plans import ExchangePlan, LayerSplit, ModuleSplit, data_parallel
from headway.plans.plan import check_executable
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.verification.compare import compare as compare_recordings
from headway.verification.distributed_run import inexact_file, record_in_world
from headway.verification.recording import Recording, VerifyJob
from headway.verification.replay import record_replay, replay_files
from support.commands import headway_here, resumed
from support.ranks import run_ranks
from support.sampling import sampled
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
        history.append(flat(run.strategy.tensors_by_kind(), found))
    with run.loader(data(), epochs=1) as loader:
        told = run.evaluate(loader)
    run.strategy.close()
    layers = getattr(run.strategy.parameters, "layers", None)
    return history, told, layers.split.explain() if layers else ""


def compare(case, ranks, layers, *, batch=8, microbatch=None, clip=None, **kept):
    build, data, loss = CASES[case]
    found = run_ranks(ranks, train, case, layers, batch, microbatch, clip, kept)
    serial = train_serially(
        build, data(), loss, adamw, batch=batch, steps=STEPS, seed=SEED, clip=clip
    )
    for rank, (history, told, _) in enumerate(found):
        for step, (a, b) in enumerate(zip(serial, history, strict=True), start=1):
            error, name = largest_error(a, b)
            assert error < 1e-12, f"rank {rank}, step {step}: {name} differs by {error:.1e}"
        assert told == found[0][1]
        assert told[1] == len(data())
    return found[0][2].splitlines()


@pytest.mark.parametrize(
    ("ranks", "layers"),
    sampled(
        [
            (2, LayerSplit(tensor=(2,))),
            (4, LayerSplit(tensor=(2,))),
            (4, LayerSplit(tensor=(2, 2))),
            (4, LayerSplit(tensor=(1, 2, 2))),
            (4, LayerSplit(tensor=(1, 2, 1))),
        ],
        1,
    ),
    ids=str,
)
def test_split_layers_are_the_serial_run(ranks, layers):
    compare("speaker", ranks, layers, clip=0.5, microbatch=4)


ONLY = LayerSplit(tensor=(2,), only=("blocks.*.up", "blocks.1.perceptron", "head"))
TWO_GRIDS = LayerSplit(
    tensor=(4,),
    whole=("head",),
    by=(
        ModuleSplit(modules="blocks.0.perceptron", tensor=(2, 1, 2)),
        ModuleSplit(modules="blocks.*.perceptron", tensor=(2, 2)),
    ),
)
ONE_BLOCK = LayerSplit(tensor=(2,), by=(ModuleSplit(modules="blocks.1", tensor=(2, 1, 1)),))


@pytest.mark.parametrize(
    ("ranks", "layers", "kept", "said"),
    sampled(
        [
            pytest.param(
                2,
                ONLY,
                {},
                {
                    "blocks.0.qkv.weight: whole",
                    "blocks.1.perceptron.down.weight: dim 1 over j",
                    "head.weight: dim 0 over j",
                },
                id="only",
            ),
            pytest.param(
                4,
                TWO_GRIDS,
                {},
                {
                    "blocks.0.qkv.weight: dim 0 over j in 3 blocks",
                    "blocks.0.perceptron.up.weight: dim 0 over j then i, dim 1 over l",
                    "blocks.1.perceptron.up.weight: dim 0 over j, dim 1 over i",
                    "head.weight: whole",
                },
                id="two grids",
            ),
            pytest.param(
                4,
                ONE_BLOCK,
                {"zero": 3},
                {
                    "blocks.0.qkv.bias: dim 0 over j in 3 blocks",
                    "blocks.1.out.weight: dim 0 over j then i, dim 1 over l",
                },
                id="one block, sharded",
            ),
        ],
        1,
    ),
)
def test_modules_are_split_otherwise_than_the_rest(ranks, layers, kept, said):
    explained = compare("speaker", ranks, layers, clip=0.5, microbatch=4, **kept)
    assert said <= {*explained}, explained


@pytest.mark.parametrize(
    ("ranks", "layers", "kept"),
    sampled(
        [
            (4, LayerSplit(tensor=(2,)), {"zero": 1}),
            (4, LayerSplit(tensor=(2,)), {"zero": 3}),
            (4, LayerSplit(tensor=(2, 1, 1)), {"zero": 2}),
            (8, LayerSplit(tensor=(2, 2)), {"zero": 3}),
            (8, LayerSplit(tensor=(1, 2, 1)), {"zero": 3, "shards": 2}),
        ],
        1,
    ),
    ids=str,
)
def test_split_layers_with_sharded_state(ranks, layers, kept):
    """Parts of parts; 40 samples: the third batch of a rank may lack a micro-batch."""
    compare("speaker", ranks, layers, batch=16, microbatch=4, clip=0.5, **kept)


@pytest.mark.parametrize(
    "exchange",
    sampled(
        [
            ExchangePlan(bucket="1 KiB"),
            ExchangePlan(bucket="auto"),
            ExchangePlan(collective="hierarchical"),
        ],
        1,
    ),
    ids=str,
)
def test_gradients_of_parts_leave_in_buckets(exchange):
    compare("speaker", 4, LayerSplit(tensor=(2,)), microbatch=2, exchange=exchange)


def rounded(world):
    """Buckets of parts, sums in bfloat16: what each rank gets."""
    torch.manual_seed(SEED)
    model = Speaker().double()
    plan = data_parallel(
        8, processes=world.size, precision="float64", split=LayerSplit(tensor=(2,)),
        exchange=ExchangePlan(compress="bf16", bucket="1 KiB"),
    )  # fmt: skip
    run = Executor(model, adamw(model), loss=speaking, plan=plan, seed=SEED, world=World.adopt())
    run.step(next(iter(run.batches(Lines()))))
    exchange = run.strategy.exchange
    assert exchange is not None
    early = [flight.ready < exchange.now.buckets[0].flight.needed for flight in run.record.flights]
    numbers = run.strategy.tensors_by_kind()
    run.strategy.close()
    return [len(b.routes[0].ranks) for b in exchange.now.buckets], early, numbers["gradient"]


def test_only_copies_exchange_parts_and_they_may_round():
    found = run_ranks(4, rounded)
    serial = train_serially(Speaker, Lines(), speaking, adamw, batch=8, steps=1, seed=SEED)[0]
    for ranks, early, gradients in found:
        assert len(ranks) > 8
        assert set(ranks) == {2}
        assert all(early)
        for name, gradient in gradients.items():
            exact = serial[f"gradient {name}"]
            assert 0 < (gradient - exact).abs().max() < 2**-6 * exact.abs().max(), name


def autocast(world, layers, kept):
    """Loss and gradients of one step: products in bfloat16, everything else in float32."""
    torch.manual_seed(SEED)
    model = Speaker()
    precision = kept.pop("precision", "bfloat16")
    plan = data_parallel(8, processes=world.size, precision=precision, split=layers, **kept)
    run = Executor(model, adamw(model), loss=speaking, plan=plan, seed=SEED, world=World.adopt())
    value = run.step(next(iter(run.batches(Lines()))))
    found = flat(run.strategy.tensors_by_kind(), value)
    run.strategy.close()
    return {name: t for name, t in found.items() if name.startswith(("loss", "gradient"))}


@pytest.mark.slow
def test_split_layers_under_autocast_are_its_serial_run_to_its_rounding():
    """Products of 8 bits: both runs differ from float32, and as much from each other."""
    serial = run_ranks(1, autocast, None, {})[0]
    exact = run_ranks(1, autocast, None, {"precision": "float32"})[0]
    assert serial["loss"] != exact["loss"]
    for ranks, layers, kept in (
        (2, LayerSplit(tensor=(2,)), {}),
        (4, LayerSplit(tensor=(2, 2)), {}),
        (4, LayerSplit(tensor=(1, 2, 1)), {"zero": 3}),
    ):
        for name, tensor in run_ranks(ranks, autocast, layers, kept)[0].items():
            # The gradient of the keys' bias is 0: what is left of it is rounding of the others.
            largest = max(
                exact[name].abs().max(), exact[name.replace("qkv.bias", "enter.bias")].abs().max()
            )
            assert (tensor - serial[name]).abs().max() < 2**-5 * largest, (layers, name)


def doubled(rounds):
    def both(self, fused, route):
        yield from rounds(self, fused, route)
        fused.gradients.mul_(2)

    return both


def job_of(recipe, layers, compress, directory):
    exchange = ExchangePlan(compress=compress, bucket="1 KiB", priority=compress.startswith("topk"))
    plan = directory / "plan.json"
    batch = 8 if recipe == "speaker" else 4
    data_parallel(batch, processes=4, microbatch=2, split=layers, exchange=exchange).save(plan)
    return VerifyJob(recipe=f"support.split_recipes:{recipe}", steps=4, plan=plan)


def recorded_as(world, job, planted, target):
    """Four steps whose sums are inexact."""
    for kind in (Bf16, Compressor) if planted else ():
        kind.rounds = doubled(kind.rounds)
    record_in_world(World.adopt(), job, target)


@pytest.mark.parametrize(
    ("recipe", "layers", "compress", "planted"),
    sampled(
        [
            ("speaker", LayerSplit(tensor=(2,)), "fp16", False),
            ("speaker", LayerSplit(tensor=(1, 2, 1)), "bf16", True),
            ("segmenter", LayerSplit(spatial=(2,)), "int8", False),
            ("segmenter", LayerSplit(spatial=(2, 1, 1)), "topk:0.2", True),
        ],
        1,
    ),
    ids=str,
)
def test_inexact_sums_equal_their_replay(tmp_path, recipe, layers, compress, planted):
    target = tmp_path / "split.safetensors"
    job = job_of(recipe, layers, compress, tmp_path)
    run_ranks(4, recorded_as, job, planted, target)
    record_replay(LaunchEnv(), job, inexact_file(target), ranks=4)
    expected, given = map(Recording.load, replay_files(inexact_file(target)))
    replay = compare_recordings(expected, given)
    assert replay.equal is not planted, "\n".join(map(str, replay.wrong[:5]))


def test_dropout_does_not_depend_on_the_split():
    compare("dropout", 2, LayerSplit(tensor=(2,)))


@pytest.mark.parametrize(
    ("ranks", "layers"),
    sampled(
        [
            (2, LayerSplit(spatial=(2, 1, 1))),
            (4, LayerSplit(spatial=(2, 1, 1))),
            (4, LayerSplit(spatial=(2, 2, 1))),
        ],
        2,
    ),
    ids=str,
)
def test_split_samples_are_the_serial_run(ranks, layers):
    compare("segmenter", ranks, layers, batch=4, microbatch=2, clip=0.5)


PRIORITY = ExchangePlan(priority=True, bucket="1 KiB", chunk="100")
KEPT = ({"zero": 3}, {"zero": 1}, {"zero": 2, "shards": 2}, {"exchange": PRIORITY})


@pytest.mark.parametrize("kept", sampled(KEPT, 1), ids=str)
def test_split_samples_with_sharded_state_and_by_priority(kept):
    compare("segmenter", 4, LayerSplit(spatial=(2, 1, 1)), batch=4, microbatch=1, clip=0.5, **kept)


BY = "split.by=[{modules='blocks.*.perceptron', tensor=[1, 2, 1]}]"


@pytest.mark.slow
def test_any_plan_resumes_what_any_other_has_saved(tmp_path):
    """Sharded state, a cuboid, parts of parts, stages with grids of their own, one process, as
    one process throughout."""
    stages = (
        (3, 2, ("zero=3",)),
        (5, 4, ("split.tensor=[1, 2, 2]",)),
        (6, 4, ("split.tensor=[2]", "zero=2")),
        (7, 4, ("split.tensor=[2]", "stages=2", "pipeline.microbatches=2", BY)),
        (8, 1, ()),
    )
    found, whole = resumed(tmp_path, "support.split_recipes:speaker", stages)
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    ("recipe", "ranks", "split"),
    sampled(
        [
            ("speaker", 4, "split.tensor=[2]"),
            ("speaker", 4, "split.tensor=[2] zero=3"),
            ("segmenter", 2, "split.spatial=[2]"),
            ("estimator", 4, "split.spatial=[2,1,2]"),
        ],
        1,
    ),
)
def test_the_command_proves_it(tmp_path, recipe, ranks, split):
    words = [word for value in split.split(" ") for word in ("--set", value)]
    done = headway_here(
        "verify", f"support.split_recipes:{recipe}", "-n", str(ranks), *words, cwd=tmp_path
    )
    assert done.code == 0, done.err + done.out
    assert "EQUAL to the serial run" in done.out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"split": LayerSplit(tensor=(1, 4))}, "are no sizes of a grid"),
        ({"split": LayerSplit(tensor=(2,), spatial=(2,))}, "spatial at once"),
        (
            {"split": LayerSplit(tensor=(2,)), "exchange": ExchangePlan(priority=True)},
            "priority with",
        ),
        (
            {"split": LayerSplit(tensor=(2,)), "exchange": ExchangePlan(compress="sign")},
            "keeps back",
        ),
        (
            {"split": LayerSplit(tensor=(2,)), "exchange": ExchangePlan(compress="int8")},
            "differently",
        ),
        ({"split": LayerSplit(tensor=(3,))}, "no multiple of 3 ranks"),
    ],
)
def test_what_cannot_be_together_is_refused_by_name(wrong, words):
    with pytest.raises(PlanError, match=words):
        check_executable(data_parallel(12, processes=4, **wrong))
