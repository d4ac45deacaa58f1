"""ranks: plans whose stages keep their state in parts train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.checkpoint.staging import local_data
from headway.errors import PlanError
from headway.plans import PipelinePlan, pipelined
from headway.plans.plan import check_executable
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.commands import headway_here
from support.ranks import run_ranks
from support.sampling import sampled
from support.serial import flat, largest_error, train_serially
from support.tiny_models import Points, Residual, Sentences, Tied, cross_entropy, ignoring_a_word

SEED, STEPS, LENGTH = 3, 4, 25  # of 12 samples: the third batch has one, so that a copy idles

MODELS: dict[str, tuple[Any, Any, Any]] = {
    "residual": (Residual, Points, cross_entropy),
    "tied": (Tied, Sentences, ignoring_a_word),
}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(world, cases):
    """Each case in turn: (model, stages, schedule, zero, shards, clip, parts)."""
    return [one(world, *case) for case in cases]


def one(world, case, stages, pipeline, zero, shards, clip, parts):
    build, data, loss = MODELS[case]
    torch.manual_seed(SEED)
    model = build().double()
    plan = pipelined(
        12, processes=world.size, stages=stages, pipeline=pipeline, precision="float64",
        zero=zero, shards=shards,
    )  # fmt: skip
    run = Executor(
        model, adamw(model), loss=loss, plan=plan, clip=clip, seed=SEED, world=World.adopt()
    )
    history = []
    for _, part in zip(range(STEPS), run.batches(data(LENGTH), epochs=None), strict=False):
        value = run.step(part)
        history.append(flat(run.strategy.tensors_by_kind(), value))
    with run.loader(data(LENGTH), epochs=1) as loader:
        told = run.evaluate(loader)
    with run.whole() as whole:
        held = flat({"parameter": dict(whole.named_parameters())}, value) if not world.rank else {}
    sizes = {
        name: (p.shape[0], local_data(p).shape[0])
        for name, p in model.named_parameters()
        if name in run.pipeline.ownership.trained and p.dim()
    }
    kept = set(map(id, model.parameters())) == {
        id(p) for group in run.optimizer.param_groups for p in group["params"]
    }
    run.strategy.gather_whole()
    run.strategy.close()  # the model stays whole on rank 0
    for name, parameter in model.named_parameters() if held else ():
        assert torch.equal(parameter, held[f"parameter {name}"])
    return history, told, held, sizes, kept


def compare(ranks, cases):
    found = run_ranks(ranks, train, cases, timeout=90)
    for number, case in enumerate(cases):
        *_, clip, parts = case
        build, data, loss = MODELS[case[0]]
        serial = train_serially(
            build, data(LENGTH), loss, adamw, batch=12, steps=STEPS, clip=clip, seed=SEED
        )
        history, told, held, _, _ = found[0][number]
        for step, (a, b) in enumerate(zip(serial, history, strict=True), start=1):
            error, name = largest_error(a, b)
            assert error < 1e-12, f"{case}, step {step}: {name} differs by {error:.1e}"
        for name, tensor in held.items():
            assert torch.equal(tensor, history[-1][name]), name
        for rank in found:
            assert rank[number][1] == told
            assert rank[number][4]
            for name, (whole, own) in rank[number][3].items():
                assert own <= -(-whole // parts), (case, name, whole, own)
        assert told[1] == LENGTH


GPIPE = PipelinePlan(schedule="gpipe", microbatches=3)
ONE = PipelinePlan(microbatches=3)
INTERLEAVED = PipelinePlan(schedule="interleaved", microbatches=2)
SPLIT = PipelinePlan(schedule="zb-h1", microbatches=3, sync="eager")
ZBV = PipelinePlan(schedule="zbv", microbatches=3, recompute="stages")
BLOCKS = PipelinePlan(microbatches=3, recompute="blocks")
CHIMERA = PipelinePlan(schedule="chimera", microbatches=4, sync="eager")

CASES = {
    "zero 1": [
        ("residual", 2, GPIPE, 1, None, 0.3, 2),
        ("tied", 2, ONE, 1, None, 0.3, 2),
        ("residual", 2, ZBV, 1, None, None, 2),
        ("residual", 2, CHIMERA, 1, None, 0.3, 4),  # both ranks of a stage, in both copies
        ("residual", 4, CHIMERA, 1, None, 0.3, 2),  # both ranks of a stage: there is one copy
    ],
    "zero 2": [
        ("residual", 2, INTERLEAVED, 2, None, 0.3, 2),
        ("residual", 2, SPLIT, 2, None, None, 2),
        ("tied", 2, ONE, 2, 2, 0.3, 2),
    ],
    "zero 3": [
        ("residual", 2, GPIPE, 3, None, 0.3, 2),
        ("residual", 2, INTERLEAVED, 3, None, None, 2),
        ("tied", 2, SPLIT, 3, None, 0.3, 2),
        ("residual", 2, ZBV, 3, None, None, 2),
        ("residual", 2, BLOCKS, 3, None, None, 2),
        ("residual", 2, CHIMERA, 3, None, 0.3, 2),
        ("residual", 4, CHIMERA, 3, None, 0.3, 2),
    ],
}


@pytest.mark.parametrize("cases", sampled([*CASES], 2))
def test_it_is_the_serial_run(cases):
    compare(4, sampled(CASES[cases], 2))


@pytest.mark.slow
def test_copies_of_parts():
    """Two groups of two copies each, of two stages."""
    compare(8, [("residual", 2, ONE, 1, 2, 0.3, 2), ("residual", 2, CHIMERA, 3, 2, 0.3, 2)])


def test_what_is_gathered_is_counted():
    """A step of ZeRO 3 gathers for each of 6 actions, one of ZeRO 1 once; two messages:
    what one stage uses, and what both do."""
    counts = run_ranks(4, gathers, timeout=60)
    assert counts == [{1: 2, 3: 12}] * 4


def gathers(world):
    from headway.parallel.pipeline import data_parallel as stage_zero

    counts, before = {}, stage_zero._gather
    for zero in (1, 3):
        counts[zero] = 0

        def counted(group, zero=zero):
            counts[zero] += 1
            before(group)

        stage_zero._gather = counted
        torch.manual_seed(SEED)
        model = Residual().double()
        plan = pipelined(12, processes=4, stages=2, pipeline=ONE, precision="float64", zero=zero)
        run = Executor(model, adamw(model), loss=cross_entropy, plan=plan, world=World.adopt())
        run.step(next(iter(run.batches(Points(12)))))
        run.strategy.close()
    return counts


@pytest.mark.slow
def test_the_command_proves_it(tmp_path):
    words = ("stages=2", "zero=3", "pipeline.schedule='zb-h1'")
    options = [w for v in words for w in ("--set", v)]
    done = headway_here("verify", "support.recipes:tied", "-n", "4", *options, cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    assert "EQUAL to the serial run" in done.out


def test_versions_of_weights_are_whole():
    plan = pipelined(12, processes=4, stages=2, zero=1, pipeline=PipelinePlan(schedule="pipedream"))
    with pytest.raises(PlanError, match="without a flush"):
        check_executable(plan)
