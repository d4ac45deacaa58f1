"""single: every layout of up to four ranks: what the plan lists is what its executor starts."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from torch import nn

from headway.collective.collective_calls import CommunicatingStage
from headway.errors import PlanError
from headway.graph.model_graph import TensorSpec
from headway.planner.traffic.executor import collectives_of_plan
from headway.plans import LayerSplit, ModuleSplit, PipelinePlan, data_parallel, explain, pipelined
from headway.plans.plan import unsupported_by_executor
from headway.run.measure.communication_dry_run import dry_run
from support.collective_recorder import collective_differences
from support.played import played
from support.sampling import sampled
from support.split_recipes import (
    Estimator,
    Lines,
    Segmenter,
    Speaker,
    Volumes,
    estimating,
    labelling,
    speaking,
)


class Talker(Speaker):
    """A transformer whose last weight is its first."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.words.weight


class Layers(nn.Sequential):
    """Perceptrons that share a weight, and one that is not trained."""

    def __init__(self):
        pairs = [(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(3)]
        pairs[2][0].weight = pairs[0][0].weight
        super().__init__(*(nn.Sequential(*pair) for pair in pairs), nn.Linear(8, 4))
        self[1].requires_grad_(False)


class Normed(nn.Sequential):
    """Statistics of a batch over all parts, then whole vectors."""

    def __init__(self):
        super().__init__(
            nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(),
            nn.Conv3d(4, 4, 3, stride=2, padding=1), nn.AvgPool3d(2), nn.Flatten(),
            nn.Linear(4 * 2, 3),
        )  # fmt: skip


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((8,), float(index)), index % 4


def choosing(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


MODELS = {
    "talker": (Talker, Lines, speaking),
    "layers": (Layers, Rows, choosing),
    "segmenter": (Segmenter, Volumes, labelling),
    "estimator": (Estimator, Volumes, estimating),
    "normed": (Normed, Volumes, estimating),
}
SCHEDULES = (
    {"schedule": "1f1b"},
    {"schedule": "zb-h1", "sync": "eager"},
    {"schedule": "1f1b", "recompute": "blocks"},
    {"schedule": "chimera"},
    {"schedule": "gpipe", "recompute": "stages"},
    {"schedule": "interleaved"},
)
TENSOR = {2: [(2,), (1, 2, 1), (2, 1, 1), (1, 1, 2)], 4: [(4,), (2, 2), (1, 2, 2), (2, 1, 2)]}
SPATIAL = {2: [(2, 1, 1), (1, 2, 1)], 4: [(4, 1, 1), (2, 2, 1)]}


def plans(name, ranks):
    """Every split into copies, stages, and ranks that share samples, with state in parts.

    Micro-batches differ in size, but where ranks share them out.
    """
    for stages, split, options in layouts(name, ranks):
        batch = 16 if len(split.tensor) > 1 else 10
        yield pipelined(batch, processes=ranks, stages=stages, split=split, **options)


def layouts(name, ranks):
    """(stages, split, further options)."""
    splits, kind = (TENSOR, "tensor") if name == "talker" else (SPATIAL, "spatial")
    # Four stages cut inside of a block, and the sizes that are sent there are zeros when played.
    halves = name == "talker"
    schedules = cycle(SCHEDULES[:-1] if halves else SCHEDULES)
    for stages, group in product((1, 2) if halves else (1, 2, 4), (1, 2, 4)):
        for sizes in splits.get(group, [()]) if ranks % (stages * group) == 0 else ():
            split = LayerSplit(**{kind: sizes})
            if stages > 1:
                yield stages, split, {"pipeline": PipelinePlan(microbatches=4, **next(schedules))}
                continue
            copies = ranks // group * (group if kind == "spatial" else 1)
            degrees = (0,) if copies == 1 else (0, 3) if len(sizes) > 1 else range(4)
            for zero in degrees:
                yield stages, split, {"zero": zero, "microbatch": 4}


def found_in(name, plan, rank, clip=None):
    """Where what the ranks of a pipeline do differs from the list; that it is refused."""
    build, data, loss = MODELS[name]
    torch.manual_seed(1)
    example = torch.utils.data.default_collate([data()[0]])
    try:
        seen = played(plan, plan.mesh.peers(rank, "pipe"), build, data(), loss, clip)
    except PlanError as refused:
        with pytest.raises(PlanError, match=str(refused).splitlines()[0]):
            dry_run(plan, build(), loss, example, rank=rank)
        return ["refused"]
    wrong = []
    for one, recorder in seen.items():
        parts = dry_run(plan, build(), loss, example, rank=one)
        calls = collectives_of_plan(plan, parts, rank=one, clip=clip is not None)
        wrong += [f"rank {one}: {line}" for line in collective_differences(calls, recorder.seen)]
    return wrong


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["talker", "segmenter"])
def test_every_layout_of_up_to_four_ranks(name, ranks):
    """All are carried out, by `plan.mechanisms` and by the executor. (State in parts of pipelines:
    `ranks/test_plan_collectives_stages`.)"""
    every = list(plans(name, ranks))
    assert len(every) == {"talker": {2: 9, 4: 23}, "segmenter": {2: 9, 4: 16}}[name][ranks]
    for plan in sampled(every, 2):
        assert list(unsupported_by_executor(plan)) == []
        last = ranks - plan.group_degree + bool(plan.split.spatial)
        assert found_in(name, plan, last, clip=0.5) == [], explain(plan)


ISLANDS = LayerSplit(
    tensor=(2,),
    by=(
        ModuleSplit(modules="blocks.0.perceptron", tensor=(2, 1, 1)),
        ModuleSplit(modules="blocks.1", tensor=(1, 2, 1)),
    ),
)
PIPE = PipelinePlan(microbatches=3)
FIRST = LayerSplit(spatial=(2,))


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "split", "options"),
    sampled(
        [
            ("talker", 2, 1, ISLANDS, {}),
            ("talker", 4, 1, LayerSplit(tensor=(2,), whole=("blocks.1",)), {"zero": 2}),
            ("talker", 4, 1, LayerSplit(tensor=(2,), only=("blocks",)), {"precision": "bfloat16"}),
            ("talker", 4, 2, LayerSplit(tensor=(2,)), {"precision": "bfloat16", "pipeline": PIPE}),
            (
                "talker",
                4,
                1,
                LayerSplit(tensor=(2,)),
                {"shares": (3, 1), "microbatch": 2, "zero": 3},
            ),
            ("talker", 4, 1, LayerSplit(tensor=(2,)), {"shares": (3, 1), "microbatch": 2}),
            ("layers", 4, 2, LayerSplit(tensor=(2,)), {"pipeline": PIPE}),
            ("layers", 4, 1, LayerSplit(tensor=(2,)), {"zero": 1}),
            ("estimator", 4, 2, FIRST, {"pipeline": PIPE}),
            ("estimator", 4, 1, LayerSplit(spatial=(2,), head="gathered"), {"zero": 2}),
            (
                "normed",
                4,
                2,
                LayerSplit(spatial=(2, 1)),
                {"pipeline": PIPE, "precision": "float64"},
            ),
            ("normed", 8, 1, LayerSplit(spatial=(2, 2)), {"microbatch": 3, "batch": 10}),
            ("segmenter", 12, 2, LayerSplit(spatial=(3, 1, 1)), {"pipeline": PIPE, "batch": 11}),
        ],
        4,
    ),
)
def test_models(name, ranks, stages, split, options):
    """Grids of their own, weights that are tied, frozen or whole, statistics, thirds of samples."""
    plan = pipelined(
        **{"batch": 8, "processes": ranks, "stages": stages, "split": split, **options}
    )
    for rank in {0, ranks - plan.group_degree + bool(split.spatial)}:
        assert found_in(name, plan, rank, clip=0.5) == []


def test_what_a_model_refuses_its_list_refuses():
    split = LayerSplit(tensor=(2, 2))
    plan = data_parallel(9, processes=4, split=split)
    assert found_in("talker", plan, 0) == ["refused"]


def test_what_is_not_known_is_named():
    """Without a rehearsal; and micro-batches of another size than those that are known."""
    spec = TensorSpec(shape=(4, 4), dtype="float32")
    plan = data_parallel(8, processes=4, split=LayerSplit(tensor=(2,)))
    with pytest.raises(PlanError, match="what its operators send is not known"):
        collectives_of_plan(plan, [CommunicatingStage(parameters={"a": spec})])
    with pytest.raises(PlanError, match="micro-batches of 4 samples: nothing is known"):
        collectives_of_plan(plan, {2: [CommunicatingStage(parameters={"a": spec}, passes={})]})
