"""ranks: what stages send, with state, layers and samples in parts, is what the plan lists."""

from __future__ import annotations

import pytest
import torch

from headway.planner.traffic.executor import collectives_of_plan
from headway.plans import LayerSplit, PipelinePlan, pipelined
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.measure.communication_dry_run import dry_run
from support.call_volumes import call_volumes
from support.collective_recorder import CollectiveRecorder, collective_differences
from support.ranks import run_ranks
from support.sampling import sampled
from support.split_recipes import Lines, Segmenter, Speaker, Volumes, labelling, speaking
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
MODELS["segmenter"] = (Segmenter, Volumes, labelling)
MODELS["speaker"] = (Speaker, Lines, speaking)


def seen(world, name, pipe, clip, options):
    """Where what this rank does in its second step differs from the plan's list; and the list."""
    build, data, loss = MODELS[name]
    torch.manual_seed(3)
    model = build()
    pipeline = PipelinePlan(**pipe, shared_memory=False)  # so that messages are seen, too
    options = {"batch": 16, **options}
    plan = pipelined(processes=world.size, stages=2, pipeline=pipeline, **options)
    example = torch.utils.data.default_collate([data()[0]])
    parts = dry_run(plan, model, loss, example, rank=world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = Executor(model, optimizer, loss=loss, plan=plan, clip=clip, world=World.adopt())
    for batch in run.batches(data()):
        with CollectiveRecorder() as recorder:
            run.step(batch)
        if run.steps_done == 2:
            break
    run.strategy.close()
    calls = collectives_of_plan(plan, parts, rank=world.rank, clip=clip is not None)
    return list(collective_differences(calls, recorder.seen)), call_volumes(calls)


ONE = {"microbatches": 3}
SPLIT = {"schedule": "zb-h1", "microbatches": 3, "sync": "eager"}
AGAIN = {"microbatches": 3, "recompute": "stages"}
BLOCKS = {"microbatches": 3, "recompute": "blocks"}
EVEN = {"schedule": "zb-h1", "microbatches": 2}
CHIMERA = {"schedule": "chimera", "microbatches": 4}


INTERLEAVED = {"schedule": "interleaved", "microbatches": 4}
FOUR = {"microbatches": 4, "recompute": "blocks"}
SECOND = {"spatial": (1, 2, 1)}
HALVES, CORNERS = {"spatial": (2, 1, 1)}, {"spatial": (2, 2, 1)}
TWO, LINE, SQUARE = {"tensor": (2,)}, {"tensor": (1, 2, 1)}, {"tensor": (2, 2)}


PIPELINES = [
    (4, "residual", ONE, 0.5, {"zero": 1}),
    (4, "tied", ONE, None, {"zero": 2}),
    (4, "tied", AGAIN, None, {"zero": 3}),
    (4, "scaled", SPLIT, 0.5, {"zero": 3}),
    (4, "scaled", ONE, None, {"zero": 2, "batch": 14}),
    (4, "residual", CHIMERA, None, {"zero": 1}),
    (4, "residual", CHIMERA, None, {"zero": 3}),
    (4, "residual", BLOCKS, None, {"zero": 3}),
    (8, "residual", ONE, 0.5, {"zero": 1, "shards": 2}),
    (8, "scaled", SPLIT, None, {"zero": 3, "shards": 2}),
    (4, "segmenter", SPLIT, 0.5, {"zero": 1, "split": HALVES, "batch": 7}),
    (4, "segmenter", CHIMERA, None, {"zero": 3, "split": HALVES, "batch": 7}),
    (8, "segmenter", AGAIN, 0.5, {"zero": 3, "split": HALVES, "batch": 9}),
    (8, "segmenter", ONE, None, {"zero": 2, "split": CORNERS, "batch": 7}),
    (4, "segmenter", FOUR, 0.5, {"split": SECOND, "batch": 10}),
    (8, "speaker", ONE, 0.5, {"zero": 1, "split": TWO, "batch": 13}),
    (8, "speaker", SPLIT, None, {"zero": 3, "split": TWO}),
    (8, "speaker", CHIMERA, None, {"zero": 2, "split": TWO}),
    (8, "speaker", ONE, None, {"zero": 1, "shards": 2, "split": TWO}),
    (8, "speaker", EVEN, None, {"zero": 3, "split": LINE}),
    (8, "speaker", EVEN, 0.5, {"split": SQUARE}),
    (4, "speaker", INTERLEAVED, 0.5, {"split": TWO}),
]


@pytest.mark.parametrize(("ranks", "name", "pipe", "clip", "options"), sampled(PIPELINES, 2))
def test_every_rank_of_a_pipeline(ranks, name, pipe, clip, options):
    """A world for each: DTensor takes meshes of an earlier one for its own."""
    options = {k: LayerSplit(**v) if k == "split" else v for k, v in options.items()}
    found = run_ranks(ranks, seen, name, pipe, clip, options)
    for rank, (wrong, sent) in enumerate(found):
        assert wrong == [], rank
        kinds = {kind for kind, _ in sent}
        assert {"send", "receive", "all_reduce"} <= kinds
        assert ({"all_gather", "reduce_scatter"} <= kinds) >= ("zero" in options)
