"""ranks: torch's runtime and headway's executor carry out one table, with the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from headway.errors import PlanError
from headway.parallel import Pipeline, PipelineCallbacks, PipelineRanks, StageGradientSync, cut
from headway.schedule.generators.registry import make_schedule
from headway.schedule.lowering import lower
from support import torch_runtime
from support.pipelines import (
    assert_equal,
    chain,
    numbers_of,
    own_names,
    points,
    run_serially,
    team_of,
)
from support.ranks import ranks, run_ranks
from support.tiny_models import CLASSES, FEATURES, cross_entropy
from support.torch_runtime import TorchPipeline

RANKS = 4
EXECUTORS = (Pipeline, TorchPipeline)
ONE_CHAIN = [
    ("gpipe", 8), ("1f1b", 8), ("1f1b", 3), ("interleaved", 8), ("breadth-first", 8), ("zb-h1", 8),
    ("interleaved-zero-bubble", 8),
]  # fmt: skip
TURNING = [("zbv", 8), ("zbv", 4), ("dualpipe-v", 8)]
if torch_runtime._TURNS:
    ONE_CHAIN += TURNING
TWO_WAYS = [("chimera", 4), ("chimera", 8), ("chimera-doubling", 8), ("dualpipe", 8), ("gems", 4)]


def table_of(name, count, **options):
    table = make_schedule(name, stages=RANKS, microbatches=count, **options)
    return lower(replace(table, recompute=()), sync="eager-opt")


def build(dtype):
    torch.manual_seed(0)
    return chain(depth=9).to(dtype)


def a_step(world, executor, model, table, data, steps=1):
    """What one executor leaves on this rank, after its last step."""
    done = []
    stages = cut(model, cross_entropy, data[0], stages=table.stages)
    sums = StageGradientSync(stages, table, team_of(world))
    calls = PipelineCallbacks(
        loss=cross_entropy, share=lambda value, _: value / len(data), sync=sums, step=done.append
    )
    pipeline = executor(stages, table, team_of(world), calls)
    for _ in range(steps):
        model.zero_grad()
        losses = pipeline.run(data)
    hosted = sorted({stage for _, stage in table.hosted(world.rank)})
    assert sorted(done) == sorted(hosted * steps)
    held = {name for stage in hosted for name in own_names(stages, stage)}
    found = {name: value for name, value in numbers_of(model).items() if name in held}
    return {**{f"loss {m}": value for m, value in losses.items()}, **found}


def both(world, cases, dtype):
    return [
        [
            a_step(world, executor, build(dtype), table_of(name, count), points(count, dtype=dtype))
            for executor in EXECUTORS
        ]
        for name, count in cases
    ]


@pytest.mark.slow
def test_tables_of_one_chain_are_bitwise_equal_on_both():
    found = run_ranks(RANKS, both, ONE_CHAIN, torch.float32, timeout=60)
    for number, (_, count) in enumerate(ONE_CHAIN):
        expected = run_serially(build(torch.float32), cross_entropy, points(count))
        for executor in range(2):
            assert_equal(expected, [of_rank[number][executor] for of_rank in found])


@pytest.mark.slow
def test_tables_of_two_directions_are_bitwise_equal_on_both_and_serial_to_rounding():
    """One sum more than the serial run has: that of the two copies of a stage."""
    found = run_ranks(RANKS, both, TWO_WAYS, torch.float64, timeout=60)
    for number, (_, count) in enumerate(TWO_WAYS):
        data = points(count, dtype=torch.float64)
        expected = run_serially(build(torch.float64), cross_entropy, data)
        own, torchs = zip(*[of_rank[number] for of_rank in found], strict=True)
        assert_equal(expected, own, 1e-12)
        for a, b in zip(own, torchs, strict=True):
            assert_equal(a, [b])


class Heads(nn.Module):
    """Two tensors between stages, one of them without a gradient and one a view, changed in place;
    a frozen stage, and a loss that uses a parameter that no stage does.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Halves() for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x, mask = x.clone(), x > 0
        for layer in self.layers:
            x, mask = layer(x, mask)
        return self.head(x) * mask[:, :1]


class Halves(nn.Linear):
    def __init__(self):
        super().__init__(FEATURES, 2 * FEATURES)

    def forward(self, x, mask):
        halves = super().forward(x.mul_(1.5).tanh())
        return halves[:, ::2], mask | (halves.detach()[:, :FEATURES] > 0)


def heated(model, data):
    return cross_entropy(lambda x: model(x) * model.temperature, data)


def harder(world):
    """Two steps of a model with what breaks pipelines, in a table with split backwards."""
    table, data = table_of("zb-h1", 6), points(6, dtype=torch.float64)
    found = []
    for executor in EXECUTORS:
        torch.manual_seed(0)
        model = Heads().double()
        stages = cut(model, heated, data[0], at=[f"layers.{n}" for n in range(1, RANKS)])
        sums = StageGradientSync(stages, table, team_of(world))
        seen = []

        def around(stage, microbatch, phase, seen=seen):
            seen.append((stage, microbatch, phase))
            return torch.autograd.profiler.record_function("here")

        calls = PipelineCallbacks(
            loss=heated, share=lambda v, _: v / 6, sync=sums, step=lambda _: None, around=around
        )
        pipeline = executor(stages, table, team_of(world), calls)
        for _ in range(2):
            model.zero_grad()
            losses = {f"loss {m}": v for m, v in pipeline.run(data).items()}
        held = set(own_names(stages, world.rank))
        numbers = {k: v for k, v in numbers_of(model).items() if k in held}
        found.append(({**losses, **numbers}, sorted(set(seen))))
    return found


@pytest.mark.skipif(
    not torch_runtime._WITHOUT_GRADIENT,
    reason="this torch passes no tensors without a gradient between stages (2.13 does)",
)
def test_what_breaks_pipelines_is_equal_on_both():
    torch.manual_seed(0)
    data = points(6, dtype=torch.float64)
    expected = run_serially(Heads().double(), heated, data)
    found = run_ranks(RANKS, harder)
    for executor in range(2):
        assert_equal(expected, [of_rank[executor][0] for of_rank in found], 1e-12)
    assert all(own[1] == torchs[1] for own, torchs in found)


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def forward(self, x):
        first = self.layers[0](x)
        return (self.layers[2](self.layers[1](first)) + first)[:, :CLASSES]


def problems(world, stages, table, **options):
    given = {"loss": cross_entropy, **options}
    if "sync" not in given:
        given["sync"] = StageGradientSync(stages, table, team_of(world))
    team = given.pop("team", team_of(world))
    with pytest.raises(PlanError) as refused:
        TorchPipeline(stages, table, team, PipelineCallbacks(**given))
    return refused.value.problems


@ranks(3)
def test_what_torch_cannot_is_refused_with_all_reasons(world):
    data = points(4)
    stages = cut(Skipping(), cross_entropy, data[0], stages=3)
    table = replace(make_schedule("1f1b", stages=3, microbatches=4), skips=stages.skips)
    skip = "stage 0 gives values to stage 2, torch only to the next"
    recomputes = "it recomputes, and torch has no action for that"
    assert problems(world, stages, replace(table, recompute=table.every_stage)) == (
        skip,
        recomputes,
    )
    chained = cut(Skipping(), cross_entropy, data[0], stages=3, relay=True)
    without = make_schedule("pipedream", stages=3, microbatches=4)
    assert problems(world, chained, without) == (
        "it has no flush, and torch has no versions of the weights",
        "it has STEP, and nobody was given who makes steps",
    )
    plain = make_schedule("1f1b", stages=3, microbatches=4)
    turned = PipelineRanks(rank=2 - world.rank, ranks=(2, 1, 0), group=world.group)
    assert problems(world, chained, lower(plain, sync="post"), team=turned, sync=None) == (
        "it has SYNC, and nobody was given who sums gradients",
        "it has STEP, and nobody was given who makes steps",
        "the group has the ranks [0, 1, 2], the team [2, 1, 0]",
    )
    deeper = make_schedule("interleaved", stages=3, microbatches=3)
    other = ("it is for 6 stages, and the model has 3",)
    assert problems(world, chained, deeper, sync=None) == other
    with pytest.raises(PlanError) as refused:
        StageGradientSync(chained, deeper, team_of(world))
    assert refused.value.problems == other


class Numbered(nn.Linear):
    def forward(self, given):
        x, scale = given if isinstance(given, tuple) else (given, 1.0)
        return super().forward(x) * scale, 0.5


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Numbered(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x[0][:, :CLASSES]


@ranks(2)
def test_torch_before_2_12_has_no_two_neighbours_on_one_rank(world):
    stages = cut(chain(depth=9), cross_entropy, points(1)[0], stages=4)
    said = "a rank holds two neighbouring stages; torch 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_runtime, "_TURNS", False)
        told = problems(world, stages, make_schedule("zbv", stages=2, microbatches=4))
    assert any(line.startswith(said) for line in told)


@ranks(2)
def test_torch_before_2_13_passes_no_tensor_without_a_gradient(world):
    stages = cut(Heads().double(), heated, points(1, dtype=torch.float64)[0], stages=2)
    table = make_schedule("gpipe", stages=2, microbatches=2)
    sums = StageGradientSync(stages, table, team_of(world))
    calls = PipelineCallbacks(loss=heated, share=lambda v, _: v / 2, sync=sums, step=lambda _: None)
    pipeline = TorchPipeline(stages, table, team_of(world), calls)
    data = points(2, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_runtime, "_WITHOUT_GRADIENT", False)
        with pytest.raises(PlanError, match="stage 0 gives a tensor without a gradient; torch 2"):
            pipeline.run(data)


@ranks(2)
def test_values_that_are_no_tensors_and_uneven_pipes_are_refused(world):
    uneven = make_schedule("gems", stages=2, microbatches=3)
    stages = cut(Scaled(), cross_entropy, points(1)[0], stages=2)
    said = "its pipes have [1, 2] micro-batches, and torch wants equal numbers"
    assert problems(world, stages, uneven) == (said,)
    table = make_schedule("gpipe", stages=2, microbatches=2)
    pipeline = TorchPipeline(stages, table, team_of(world), PipelineCallbacks(loss=cross_entropy))
    with pytest.raises(PlanError, match="stage 0 gives float; torch passes tensors only"):
        pipeline.run(points(2))
