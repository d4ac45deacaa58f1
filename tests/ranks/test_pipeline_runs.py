"""ranks: plans with a pipeline through the executor equal the serial run, and save and resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.errors import PlanError
from headway.plans import ExchangePlan, PipelinePlan, pipelined
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.ranks import run_ranks
from support.sampling import sampled
from support.serial import flat, largest_error, train_serially
from support.tiny_models import CLASSES, FEATURES
from support.tiny_models import Residual as Net

SEED, STEPS, SAMPLES, BATCH = 3, 5, 26, 12  # two batches of an epoch are whole, the third is ragged


def data() -> torch.utils.data.Dataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=draw)
    y = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    return torch.utils.data.TensorDataset(x, y)


def mean(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def counted(model, batch):
    """Some labels do not count, so that the global count is known after the exchange only."""
    target = batch[1].masked_fill(batch[1] == 1, -100)
    total = nn.functional.cross_entropy(model(batch[0]), target, reduction="sum")
    return total, (target != -100).sum()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def plan_of(ranks, stages, pipeline):
    return pipelined(BATCH, processes=ranks, stages=stages, pipeline=pipeline, precision="float64")


def split(world, stages, pipeline, loss, clip):
    torch.manual_seed(SEED)
    model = Net().double()
    made = adamw(model)
    plan = plan_of(world.size, stages, pipeline)
    run = Executor(model, made, loss=loss, plan=plan, clip=clip, seed=SEED, world=World.adopt())
    assert run.pipeline is not None
    history = []
    for _, part in zip(range(STEPS), run.batches(data(), epochs=None), strict=False):
        value = run.step(part)
        history.append(flat(run.strategy.tensors_by_kind(), value))
    kinds = {span.kind for span in run.record.spans}
    run.strategy.close()
    return history, kinds


CASES = {
    "1f1b": (4, 4, PipelinePlan(microbatches=4), mean, None),
    "fewer than ranks": (4, 4, PipelinePlan(microbatches=3), mean, 0.5),
    "two copies": (4, 2, PipelinePlan(schedule="interleaved", microbatches=3), mean, 0.5),
    "counted": (4, 2, PipelinePlan(schedule="zb-h1", microbatches=4, sync="post"), counted, 0.2),
    "zbv": (2, 2, PipelinePlan(schedule="zbv", microbatches=4, sync="eager"), mean, None),
    "chimera": (4, 4, PipelinePlan(schedule="chimera", microbatches=4), counted, 0.2),
    "doubling": (
        4,
        4,
        PipelinePlan(schedule="chimera", microbatches=8, mode="doubling"),
        mean,
        None,
    ),
    "halving": (4, 4, PipelinePlan(schedule="chimera-halving", microbatches=4), mean, None),
    "blocks": (
        4,
        4,
        PipelinePlan(schedule="chimera", microbatches=8, mode="doubling", recompute="blocks"),
        mean,
        None,
    ),
    "some stages": (
        2,
        2,
        PipelinePlan(schedule="zbv", microbatches=4, recompute="stages", recompute_stages=(0, 3)),
        counted,
        0.5,
    ),
    "gems": (2, 2, PipelinePlan(schedule="gems", microbatches=5), mean, None),
    "cut": (2, 2, PipelinePlan(schedule="gpipe", microbatches=2, cut=("blocks.1",)), mean, 0.5),
}


@pytest.mark.parametrize("case", sampled([*CASES], 5))
def test_a_pipeline_equals_the_serial_run(case):
    ranks, stages, pipeline, loss, clip = CASES[case]
    expected = train_serially(
        Net, data(), loss, adamw, batch=BATCH, steps=STEPS, clip=clip, seed=SEED
    )
    first, *others = run_ranks(ranks, split, stages, pipeline, loss, clip)
    for a, b in zip(expected, first[0], strict=True):
        error, name = largest_error(a, b)
        assert error < 1e-12, name
    for history, kinds in (first, *others):
        assert [b["loss"] for b in history] == [b["loss"] for b in first[0]]
        assert {"forward", "backward"} <= kinds
    assert all(b.keys() == {"loss"} for history, _ in others for b in history)


def planted(world):
    """The sums over the copies of a stage are forgotten."""
    from headway.parallel import StageGradientSync

    StageGradientSync.start = lambda self, stage: None
    StageGradientSync.wait = lambda self, stage: None
    return split(world, 2, PipelinePlan(microbatches=2), mean, None)[0]


@pytest.mark.slow
def test_forgotten_sums_are_noticed():
    expected = train_serially(Net, data(), mean, adamw, batch=BATCH, steps=STEPS, seed=SEED)
    history = run_ranks(4, planted)[0]
    errors = [largest_error(a, b)[0] for a, b in zip(expected, history, strict=True)]
    assert max(errors) > 1e-3


def test_what_a_pipeline_cannot_do_is_said_at_once():
    with pytest.raises(PlanError, match="did you mean chimera"):
        plan_of(2, 2, PipelinePlan(schedule="chimaera"))
    with pytest.raises(PlanError, match="5 processes are no multiple of 2"):
        plan_of(5, 2, None)
    with pytest.raises(PlanError, match="cut has 2 names; 2 stages need 1"):
        plan_of(2, 2, PipelinePlan(cut=("a", "b")))
    with pytest.raises(PlanError, match="leave out compress=fp16"):
        pipelined(BATCH, processes=4, stages=2, exchange=ExchangePlan(compress="fp16"))
