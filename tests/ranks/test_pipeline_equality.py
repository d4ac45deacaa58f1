"""ranks: a pipelined step equals the serial one, for every schedule: losses, gradients, buffers."""

from __future__ import annotations

import torch

from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.lowering import lower
from support.pipelines import assert_equal, chain, points, run_pipelined, run_serially
from support.ranks import run_ranks
from support.tiny_models import cross_entropy

RANKS, COUNT = 4, 8
FLUSHED = [name for name in SCHEDULES if not name.startswith("pipedream")]
ONE_CHAIN = [
    "gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zero-bubble", "zbv", "dualpipe-v",
]  # fmt: skip
"""Backwards of a stage in the order of the micro-batches, on one copy of the model."""


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return chain(depth=9).to(dtype)


def all_schedules(world, names, dtype):
    found = {}
    for name in names:
        count = COUNT // 2 if name == "chimera-halving" else COUNT
        schedule = lower(make_schedule(name, stages=RANKS, microbatches=count), sync="eager-opt")
        data = points(COUNT, dtype=dtype)
        steps = []
        found[name] = run_pipelined(
            world, model(dtype), cross_entropy, data, schedule, step=steps.append
        )
        assert sorted(steps) == sorted({stage for _, stage in schedule.hosted(world.rank)})
    return found


def test_every_schedule_of_one_chain_is_bitwise_equal():
    expected = run_serially(model(), cross_entropy, points(COUNT))
    found = run_ranks(RANKS, all_schedules, ONE_CHAIN, torch.float32)
    for name in ONE_CHAIN:
        assert_equal(expected, [of_rank[name] for of_rank in found])


def test_every_other_schedule_is_equal_to_rounding():
    rest = [name for name in FLUSHED if name not in ONE_CHAIN]
    data = points(COUNT, dtype=torch.float64)
    expected = run_serially(model(torch.float64), cross_entropy, data)
    found = run_ranks(RANKS, all_schedules, rest, torch.float64)
    for name in rest:
        assert_equal(expected, [of_rank[name] for of_rank in found], 1e-12)


def test_chimera_is_bitwise_equal_to_the_two_directions_summed_apart():
    data = points(COUNT)
    down, up = model(), model()
    half = COUNT // 2
    whole = run_serially(model(), cross_entropy, data)
    expected = {k: v for k, v in whole.items() if k.startswith("loss")}
    for part, numbers in ((down, range(half)), (up, range(half, COUNT))):
        run_serially(part, cross_entropy, data, order=numbers)
    for (name, a), b in zip(down.named_parameters(), up.parameters(), strict=True):
        expected[f"gradient {name}"] = a.grad + b.grad
    found = run_ranks(RANKS, all_schedules, ["chimera"], torch.float32)
    assert_equal(expected, [of_rank["chimera"] for of_rank in found])
