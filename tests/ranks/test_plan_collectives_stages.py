"""ranks: what stages with state in parts send is what the plan lists, count and bytes."""

from __future__ import annotations

import pytest
import torch

from headway.graph import TensorSpec
from headway.plan import Pipeline, pipelined
from headway.planner.collectives import volumes
from headway.planner.collectives_plan import Part, collectives_of_plan
from headway.run.executor import Executor
from headway.run.world import World
from headway.verification.recorder import Recorder, differences
from support.ranks import run_ranks
from support.tiny_models import Points, Residual, Sentences, Tied, cross_entropy, ignoring_a_word

MODELS = {
    "residual": (Residual, Points, cross_entropy),
    "tied": (Tied, Sentences, ignoring_a_word),
}


class Scaled(torch.nn.Sequential):
    """Rows that ranks cannot share evenly, a single number, and a layer that is not trained."""

    def __init__(self):
        super().__init__(
            torch.nn.Linear(6, 13), torch.nn.Linear(13, 5), torch.nn.Linear(5, 7),
            torch.nn.Linear(7, 4),
        )  # fmt: skip
        self.factor = torch.nn.Parameter(torch.ones(()))
        self[1].requires_grad_(False)

    def forward(self, x):
        return super().forward(x) * self.factor


MODELS["scaled"] = (Scaled, Points, cross_entropy)


def spec_of(tensor):
    return TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def seen(world, name, pipe, zero, shards, clip):
    """Where what this rank does in its second step differs from the plan's list; and the list."""
    build, data, loss = MODELS[name]
    torch.manual_seed(3)
    model = build()
    plan = pipelined(
        16, processes=world.size, stages=2, pipeline=Pipeline(**pipe), zero=zero, shards=shards
    )
    specs = {name: spec_of(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = Executor(model, optimizer, loss=loss, plan=plan, clip=clip, world=World.adopt())
    for batch in run.batches(data(32)):
        with Recorder() as recorder:
            run.step(batch)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    parts = [
        Part(
            parameters={n: specs[n] for n in stage.parameters if n in trained},
            frozen={n: specs[n] for n in stage.parameters if n not in trained},
            sends={target: () for given in stage.gives for target in given.targets},
        )
        for stage in run.pipeline.stages
    ]
    run.gradients.close()
    messages = ("send", "receive")  # their bytes are those of `test_plan_collectives_pipeline`
    found = [s for s in recorder.seen if s.kind not in messages]
    calls = collectives_of_plan(plan, parts, rank=world.rank, clip=clip is not None)
    return list(differences(calls, found)), volumes(calls)


ONE = {"microbatches": 3}
SPLIT = {"schedule": "zb-h1", "microbatches": 3, "sync": "eager"}
AGAIN = {"microbatches": 3, "recompute": "stages"}
BLOCKS = {"microbatches": 3, "recompute": "blocks"}
CHIMERA = {"schedule": "chimera", "microbatches": 4}


@pytest.mark.parametrize(
    ("ranks", "name", "pipe", "zero", "shards", "clip"),
    [
        (4, "residual", ONE, 1, None, 0.5),
        (4, "tied", ONE, 2, None, None),
        (4, "tied", AGAIN, 3, None, None),
        (4, "scaled", SPLIT, 3, None, 0.5),
        (4, "scaled", ONE, 2, None, None),
        (4, "residual", CHIMERA, 1, None, None),
        (4, "residual", CHIMERA, 3, None, None),
        (4, "residual", BLOCKS, 3, None, None),
        (8, "residual", ONE, 1, 2, 0.5),
        (8, "scaled", SPLIT, 3, 2, None),
    ],
)
def test_state_in_parts(ranks, name, pipe, zero, shards, clip):
    """A world for each: DTensor takes meshes of an earlier one for its own."""
    for rank, (wrong, sent) in enumerate(run_ranks(ranks, seen, name, pipe, zero, shards, clip)):
        assert wrong == [], rank
        assert {"all_gather", "reduce_scatter"} <= {kind for kind, _ in sent}
