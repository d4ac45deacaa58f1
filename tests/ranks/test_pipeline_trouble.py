"""ranks: what breaks in a pipeline names the cell where each rank stood, and ends it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from headway.errors import PeerLost, RunError, Stalled
from headway.parallel import Pipeline, PipelineCallbacks, PipelineRanks, cut
from headway.schedule.generators.registry import make_schedule
from headway.schedule.lowering import lower
from support.pipelines import chain, make_pipeline, points
from support.ranks import ranks, run_ranks
from support.tiny_models import FEATURES, cross_entropy


def interrupted(world, do, microbatch):
    """A step in which rank 1 does something in the forward of a micro-batch; the error."""

    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, FEATURES)

        def forward(self, x):
            if world.rank == 1 and x[0, 0] == microbatch:
                DO[do]()
            return self.layer(x)

    # One thing after the other could not be told from another if both had the default time-out.
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    data = [(torch.full((4, FEATURES), float(m)), torch.zeros(4).long()) for m in range(4)]
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), Interrupted(), nn.Linear(FEATURES, 4))
    model[0].weight.data, model[0].bias.data = torch.eye(FEATURES), torch.zeros(FEATURES)
    plain = [(x + 10, y) for x, y in data]
    stages = cut(model, cross_entropy, plain[0], at=["1"])
    table = lower(make_schedule("1f1b", stages=2, microbatches=4))
    waits = []
    calls = PipelineCallbacks(loss=cross_entropy, doing=waits.append)
    pipeline = Pipeline(
        stages, table, PipelineRanks(rank=world.rank, ranks=(0, 1), group=group), calls
    )
    pipeline.run(plain)
    try:
        pipeline.run(data)
    except (Stalled, PeerLost) as error:
        return type(error).__name__, str(error), str(waits[-1])
    return None


DO = {"sleeps": lambda: time.sleep(4.0), "dies": lambda: os.kill(os.getpid(), signal.SIGKILL)}


def test_a_rank_that_does_not_come():
    (kind, text, waited), _ = run_ranks(2, interrupted, "sleeps", 1)
    assert kind == "Stalled"
    assert "rank 0 of the pipeline stands at d0.s0.RECV.1<1 (action " in text
    assert waited == "d0.s0.RECV.1<1"


def test_a_rank_that_dies():
    (kind, text, _), nothing = run_ranks(2, interrupted, "dies", 2, mortal=(1,))
    assert nothing is None
    assert kind == "PeerLost"
    assert "another rank vanished while rank 0 of the pipeline stands at d0.s0." in text


@ranks(2)
def test_sizes_between_stages_that_depend_on_the_numbers(world):
    class Choosing(nn.Module):
        def forward(self, x):
            return x[x[:, 0] > 0]

    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), Choosing(), nn.Linear(FEATURES, 4))
    model[0].weight.data, model[0].bias.data = torch.eye(FEATURES), torch.zeros(FEATURES)
    data = [(x.abs() + 0.1, y) for x, y in points(4)]
    table = lower(make_schedule("gpipe", stages=2, microbatches=4))

    def total(model, batch):
        return model(batch[0]).sum()

    pipeline = make_pipeline(
        world, model, total, data, table, stages=cut(model, total, data[0], at=["2"])
    )
    pipeline.run(data)
    data[2][0][0] = -1.0
    error = None
    try:
        pipeline.run(data)
    except (RunError, PeerLost, Stalled) as found:
        error = found
    if world.rank == 0:
        assert error is not None
        assert "what goes over d0: stage 0 to stage 1 has changed" in str(error)
        dist.destroy_process_group()  # as a process that ends; rank 1 waits for its message
    else:
        assert isinstance(error, PeerLost)


@ranks(2)
def test_data_whose_sizes_cannot_be_seen(world):
    """Layouts are announced every time, and not remembered for ever."""

    class Box:
        def __init__(self, x):
            self.x = x

    class Opening(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = chain()

        def forward(self, box):
            return self.layers(box.x)

    torch.manual_seed(0)
    model = Opening()
    data = [(Box(x[: 2 + m]), y[: 2 + m]) for m, (x, y) in enumerate(points(3))]
    table = lower(make_schedule("1f1b", stages=2, microbatches=3))
    pipeline = make_pipeline(world, model, cross_entropy, data, table)
    first = pipeline.run(data)
    again = pipeline.run(data[::-1])
    if world.rank == 1:
        assert all(torch.equal(first[m], again[2 - m]) for m in range(3))
    links = pipeline._training._remote.values()
    assert all(not link._layouts for link in links)
