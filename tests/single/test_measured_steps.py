"""single: what `headway cluster measure` times on a device: small steps, in rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from headway.api.recipe_workload import with_measured_optimizer
from headway.capture import capture
from headway.capture.benchmark.kernels import (
    EMPTY_KERNEL,
    KernelCase,
    kernel_cases,
    kernel_timings,
    time_case,
)
from headway.capture.benchmark.timer import DeviceTimer, time_in_rounds
from headway.cluster import Cluster
from headway.cluster.device import Device, OptimizerPace
from headway.cost.machines import machine_of
from headway.run.recipe.recipe import Recipe


def test_rounds_take_the_slowest_rank_and_leave_out_what_others_disturb():
    own, other = iter([0.5, 1.5, 2.5, 3.5, 4.5]), [4.0, 1.0, 50.0, 3.0, 5.0]
    asked, ended = [], []

    def slowest(times):
        if len(times) == 1 and ended:  # of this round: ours where we took longest, else nothing
            (own,), theirs = ended.pop(), other[len(asked) - 1]
            assert times == [own if own >= theirs else 0.0]
            return [max(times[0], theirs if theirs > own else 0.0)]
        if len(times) == 1:
            return times
        asked.append(times)
        ended.append(times[1:])
        return [10.0 * len(asked), max(times[1], other[len(asked) - 1])]

    found = time_in_rounds([lambda: (next(own),)], slowest, 50.0)
    assert len(asked) == 5  # another rank's fifty seconds are over
    assert found == [(pytest.approx((1.5 + 3.5 + 5) / 3),)]  # the first one warms up


def test_a_round_has_the_times_of_the_rank_that_took_longest_for_it():
    """Not of every visit the slower one's: no rank takes so long for a step."""
    theirs, totals = [3.0, 2.0], []

    def slowest(times):
        if len(times) == 1:  # in step
            return times
        if len(totals) % 2 == 0:
            totals.append(times[1])
            return [1e9, max(times[1], sum(theirs))]
        totals.append(0.0)
        return [max(pair) for pair in zip(times, theirs, strict=True)]

    assert time_in_rounds([lambda: (1.0,), lambda: (3.0,)], slowest, 1.0) == [(3.0,), (2.0,)]


def test_a_visit_is_a_step_with_weights_and_results_of_its_own():
    """Every call has its own weight and a new input, and all results live until backward."""
    seen = []

    def call(x, weight):
        seen.append((x.data_ptr(), weight.data_ptr()))
        return x @ weight

    shape = (512, 512)
    case = KernelCase(
        kind="mm", call=call, roles=("self", "mat2"), inputs=(shape, shape), trained=("mat2",)
    )
    ahead, back = time_case(case, DeviceTimer(torch.device("cpu")))
    calls = seen[1:]  # the first one shows how large a result is
    assert ahead > 0
    assert back > 0
    assert len(calls) * 3 * 2**20 >= 2**24  # more than a cache of one core holds
    for pointers in zip(*calls, strict=True):
        assert len(set(pointers)) == len(calls)


def test_a_layer_calls_its_cells_one_after_the_other_and_groups_are_a_kind():
    every = kernel_cases()
    found = kernel_timings([(case, (2e-3, 2e-3)) for case in every])
    layers = [
        (case, one)
        for case, one in zip(every[1:], found, strict=True)
        if case.kind in ("lstm", "gru", "rnn_tanh")
    ]
    assert layers
    for case, one in layers:
        samples, places, inner = case.inputs[0]
        gates, width = case.inputs[-3]
        assert one.calls == places
        assert one.forward[0] == 2 * samples * places * gates * (inner + width)
        assert one.backward[0] == pytest.approx(2 * one.forward[0])
    assert {one.calls for one in found if one.kind not in ("lstm", "gru", "rnn_tanh")} == {1}
    assert {"conv2d grouped", "conv1d", "conv1d grouped", "conv3d", "gru_cell"} <= {
        one.kind for one in found
    }


def test_captured_layers_are_called_as_often():
    graph = capture(nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True), torch.zeros(3, 7, 4))
    (lstm,) = (o for o in graph.operators if o.kind == "lstm")
    assert [kernel.calls for kernel in lstm.kernels] == [7 * 2 * 2]
    weights = 2 * (4 * 6 * (4 + 6)) + 2 * (4 * 6 * (12 + 6))
    assert lstm.flops.forward == 2 * 3 * 7 * weights
    graph = capture(nn.GRU(4, 6), torch.zeros(7, 3, 4))
    (gru,) = (o for o in graph.operators if o.kind == "gru")
    assert gru.calls == 7


def test_cases_count_as_captured_graphs_do():
    every = kernel_cases()
    assert every[0].kind == EMPTY_KERNEL
    found = kernel_timings([(case, (2e-3, 5e-3 if n else 1e-3)) for n, case in enumerate(every)])
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
        "SGD": OptimizerPace(small=10e-9, middle=2e-9, large=1e-9),
        "clip": OptimizerPace(small=5e-9, middle=1e-9, large=5e-10),
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
    found = with_measured_optimizer(machine_of(cluster), cluster, recipe).device
    assert found.update * numbers == pytest.approx(seconds)
    clipped = with_measured_optimizer(
        machine_of(cluster), cluster, replace(recipe, clip=1.0)
    ).device
    assert clipped.update * numbers == pytest.approx(seconds + 2**20 * 5e-10 + 2**12 * 5e-9)
    adam = replace(recipe, optimizer=lambda model: torch.optim.Adam(model.parameters()))
    assert with_measured_optimizer(machine_of(cluster), cluster, adam) == machine_of(cluster)


def test_a_part_of_a_tensor_has_a_gradient_of_the_whole():
    """A view moves nothing forward; backward fills zeros and copies the part into them."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(4, 6)

        def forward(self, x):
            return self.enter(x)[:, -1].unsqueeze(1)

    graph = capture(Last(), torch.zeros(8, 5, 4))
    (select,) = (o for o in graph.operators if o.kind == "select")
    whole, part = 8 * 5 * 6 * 4, 8 * 6 * 4
    assert (select.traffic.forward, select.traffic.input_gradient) == (0, whole + 2 * part)
    assert all(not o.traffic.total for o in graph.operators if o.kind == "unsqueeze")
