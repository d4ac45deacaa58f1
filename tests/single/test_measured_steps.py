"""single: what `headway cluster measure` times on a device: small steps, in rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headway.capture.clock import Clock
from headway.capture.kinds import EMPTY, Case, cases, timed_of, visit
from headway.capture.rounds import in_rounds
from headway.cli.optimizer_cost import with_optimizer
from headway.cluster import Cluster
from headway.cluster.device import Device, Update
from headway.cost.presets import machine_of
from headway.run.recipe import Recipe


def test_rounds_take_the_slowest_rank_and_leave_out_what_others_disturb():
    own, other = iter([0.5, 1.5, 2.5, 3.5, 4.5]), [4.0, 1.0, 50.0, 3.0, 5.0]
    asked = []

    def slowest(times):
        if times == [0.0]:
            return times
        asked.append(times)
        return [10.0 * len(asked), max(times[1], other[len(asked) - 1])]

    found = in_rounds([lambda: (next(own),)], slowest, 50.0)
    assert len(asked) == 5  # another rank's fifty seconds are over
    assert found == [(pytest.approx((1.5 + 3.5 + 5) / 3),)]  # the first one warms up


def test_a_visit_is_a_step_with_weights_and_results_of_its_own():
    """Every call has its own weight and a new input, and all results live until backward."""
    seen = []

    def call(x, weight):
        seen.append((x.data_ptr(), weight.data_ptr()))
        return x @ weight

    shape = (512, 512)
    case = Case(
        kind="mm", call=call, roles=("self", "mat2"), inputs=(shape, shape), trained=("mat2",)
    )
    ahead, back = visit(case, Clock(torch.device("cpu")))
    calls = seen[1:]  # the first one shows how large a result is
    assert ahead > 0
    assert back > 0
    assert len(calls) * 3 * 2**20 >= 2**24  # more than a cache of one core holds
    for pointers in zip(*calls, strict=True):
        assert len(set(pointers)) == len(calls)


def test_cases_count_as_captured_graphs_do():
    every = cases()
    assert every[0].kind == EMPTY
    found = timed_of([(case, (2e-3, 5e-3 if n else 1e-3)) for n, case in enumerate(every)])
    assert len(found) == len(every) - 1
    linear = found[0]
    rows, inner = every[1].inputs[0]
    outer = every[1].inputs[1][0]
    flops, moved = 2 * rows * inner * outer, 4 * (rows * (inner + outer) + outer * (inner + 1))
    assert linear.forward == (flops, moved, 2e-3)
    assert linear.backward[0] == 2 * flops
    assert linear.backward[2] == pytest.approx(4e-3)  # without what the empty one took
    assert all(one.forward[1] > 0 and one.backward[1] > 0 for one in found)


def test_the_recipes_optimiser_is_priced_by_its_tensors():
    updates = {
        "SGD": Update(small=10e-9, middle=2e-9, large=1e-9),
        "clip": Update(small=5e-9, middle=1e-9, large=5e-10),
    }
    device = Device(peak={"fp32": 1e11}, memory=2.0**30, memory_rate=1e10, updates=updates)
    cluster = replace(Cluster.of(1, 2), devices={"cpu": device})
    recipe = Recipe(
        name="one",
        model=lambda: torch.nn.Linear(1024, 1024),
        data=list,
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        batch=2,
        stop=1,
    )
    seconds = 2**20 * 1e-9 + 2**12 * 10e-9  # the weight, and the bias as long as the least
    numbers = 2**20 + 2**10
    found = with_optimizer(machine_of(cluster), cluster, recipe).device
    assert found.update * numbers == pytest.approx(seconds)
    clipped = with_optimizer(machine_of(cluster), cluster, replace(recipe, clip=1.0)).device
    assert clipped.update * numbers == pytest.approx(seconds + 2**20 * 5e-10 + 2**12 * 5e-9)
    adam = replace(recipe, optimizer=lambda model: torch.optim.Adam(model.parameters()))
    assert with_optimizer(machine_of(cluster), cluster, adam) == machine_of(cluster)
