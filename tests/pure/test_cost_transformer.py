"""pure: a transformer's step and memory against hand-worked sums and played tables."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headway.cluster.link import Link
from headway.cost.device import DeviceModel
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.schedule.generators.registry import make_schedule
from headway.schedule.stage_costs import StageCosts
from headway.schedule.timing import time_schedule
from support.machines import fitted_machine
from support.transformer_formula import (
    FormulaMachine,
    Transformer,
    TransformerSplit,
    layer_seconds,
    memory_of_transformer,
    pipeline_seconds,
    price_transformer,
)

GPT = Transformer(layers=24.0, hidden=2048.0, heads=16.0, sequence=1024.0)
GPT3 = Transformer(layers=96.0, hidden=12288.0, heads=96.0, sequence=2048.0)
A100 = fitted_machine("a100")
# Nothing but arithmetic: no floors, memory without limit, links without latency.
BARE = FormulaMachine(
    skew=0.0,
    device=DeviceModel(
        name="bare",
        peak={"fp16": 1e14},
        memory=1e11,
        memory_rate=1e30,
        efficiency=1.0,
        depth=0.0,
        kernel=0.0,
        dispatch=0.0,
        update=0.0,
    ),
    network=HierarchicalNetwork((LinkLevel(name="node", width=math.inf, link=Link(rate=1e11)),)),
)


# -- work ------------------------------------------------------------------------------------------


def test_flops_are_megatrons():
    # 96 B s L h^2 (1 + s/(6h) + V/(16 L h)), Narayanan et al. 2021.
    h, layers, s, v, b = 2048, 24, 1024, 51200, 8
    published = 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert GPT.flops(8.0) == pytest.approx(published, rel=1e-12)


def test_flops_are_those_that_torch_counts():
    small = Transformer(layers=12.0, hidden=768.0, heads=12.0, sequence=1024.0, vocabulary=50304.0)
    assert small.flops(8.0, recompute=False) == 7_001_333_563_392  # FlopCounterMode, torch 2.13


def test_parameters():
    assert GPT.parameters == 12 * 24 * 2048**2 + 51200 * 2048
    assert GPT3.parameters == pytest.approx(174.6e9, rel=2e-3)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_bare_machine_does_the_flops_and_nothing_else(recompute):
    split = TransformerSplit(
        microbatch=4.0, microbatches=2.0, recompute="full" if recompute else "none"
    )
    step = price_transformer(GPT, split, BARE)
    assert step.seconds == pytest.approx(GPT.flops(8.0, recompute=recompute) / 1e14, rel=1e-12)
    assert step.bubble == step.messages == step.exchange == step.update == 0


def test_a_tensor_split_does_a_share_and_sums_twice_per_pass():
    whole = layer_seconds(GPT, TransformerSplit(microbatch=4.0), BARE)
    parts = layer_seconds(GPT, TransformerSplit(microbatch=4.0, tensor=4.0), BARE)
    one = 2 * 3 / 4 * (2 * 4 * 1024 * 2048) / 1e11
    assert parts[2] == pytest.approx(6 * one)
    assert parts[0] == pytest.approx(whole[0] / 4 + 2 * one)
    assert parts[1] == pytest.approx(whole[1] / 4 + 4 * one)


def test_exchange_of_each_zero_stage():
    held = (24 * 12 * 2048**2 + 51200 * 2048) * 2.0
    half = 3 / 4 * held / 1e11
    split = TransformerSplit(data=4.0, microbatches=5.0)
    for zero, passes in ((0, 2), (1, 2), (2, 6), (3, 15)):
        step = price_transformer(GPT, replace(split, zero=float(zero)), BARE)
        assert step.exchange == pytest.approx(passes * half), zero


# -- pipelines -------------------------------------------------------------------------------------


def played(name, stages, microbatches, virtual, weights, message):
    """A table with a backward of three forwards, timed; (its time, what the closed form says)."""
    table = make_schedule(name, stages=stages, microbatches=microbatches, virtual=virtual)
    forward = [weight / virtual for weight in weights for _ in range(virtual)]
    backward = [3 * f for f in forward]
    costs = StageCosts.of(
        len(forward), forward=forward, backward=backward, message=message * (stages > 1)
    )
    slowest, whole = 4 * max(weights), 4 * sum(weights)
    found = pipeline_seconds(slowest, whole, microbatches, virtual, stages=stages, message=message)
    return time_schedule(table, costs).makespan, float(sum(found))


@pytest.mark.parametrize("message", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("last", [1.0, 1.02, 1.4])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_closed_form_is_the_played_table(stages, last, message):
    weights = [1.0] * (stages - 1) + [last]
    for microbatches in (stages, 2 * stages, 24):
        made, said = played("1f1b", stages, microbatches, 1, weights, message)
        assert said == pytest.approx(made), microbatches


@pytest.mark.parametrize("message", [0.0, 0.05])
@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_closed_form_of_an_interleaved_table(stages, virtual, message):
    made, said = played("interleaved", stages, 4 * stages, virtual, [1.0] * stages, message)
    assert said == pytest.approx(made)


def test_fewer_micro_batches_than_stages_are_no_cheaper_than_played():
    for microbatches in (1, 2, 3):
        made, said = played("1f1b", 4, microbatches, 1, [1.0] * 4, 0.1)
        assert made <= said * (1 + 1e-12) < 1.01 * made


def test_pipelines_of_a_step():
    split = TransformerSplit(pipeline=4.0, microbatches=8.0)
    step = price_transformer(GPT, split, BARE)
    layer = step.forward + step.backward
    last = 6 * layer + step.head
    assert step.bubble == pytest.approx(24 * layer + step.head - last)
    message = 2 * 1024 * 2048 / 1e11
    assert step.messages == pytest.approx(2 * 3 * message)  # the head gives the others time
    looped = price_transformer(GPT, replace(split, virtual=3.0), BARE)
    assert looped.bubble == pytest.approx(step.bubble / 3)
    assert looped.messages == pytest.approx(2 * 11 * message)
    tied = 2 * 51200 * 2048 / 1e11  # of two ranks, 2 (2-1)/2
    assert step.exchange == pytest.approx(tied)


def test_the_ends_of_a_pipeline_in_one_node_sum_their_weights_there():
    tied = 2 * 51200 * 2048 / 1e11
    far = LinkLevel(name="cluster", width=math.inf, link=Link(rate=1e9))
    for width, rate in ((8.0, 1e11), (4.0, 1e9 / 4)):  # as if all four ranks sent
        near = LinkLevel(name="node", width=width, link=Link(rate=1e11))
        machine = replace(BARE, network=HierarchicalNetwork((near, far)))
        # Ranks 0 and 1 hold the first stage, 6 and 7 the last one.
        split = TransformerSplit(tensor=2.0, pipeline=4.0, microbatches=8.0)
        step = price_transformer(GPT, split, machine)
        assert step.exchange == pytest.approx(tied / 2 * 1e11 / rate), width


def test_what_is_sharded_is_copied_into_buckets_and_out():
    slow = replace(BARE, device=replace(BARE.device, memory_rate=1e12))
    held = 24 * 12 * 2048**2 + 51200 * 2048
    plain, sharded = (
        price_transformer(GPT, TransformerSplit(data=4.0, zero=zero), slow).exchange
        for zero in (0.0, 1.0)
    )
    assert sharded - plain == pytest.approx(16 * held / 1e12)
    alone = price_transformer(GPT, TransformerSplit(zero=1.0), slow)
    assert alone.exchange == 0


# -- a real machine --------------------------------------------------------------------------------


def test_many_plans_are_priced_as_one_by_one():
    t = np.array([1.0, 2.0, 4.0, 8.0, 2.0])
    d = np.array([8.0, 4.0, 1.0, 1.0, 2.0])
    p = np.array([1.0, 1.0, 2.0, 1.0, 2.0])
    split = TransformerSplit(tensor=t, data=d, pipeline=p, microbatch=2.0, microbatches=16.0 / d)
    together = price_transformer(GPT, split, A100).seconds
    for i in range(5):
        one = TransformerSplit(
            tensor=t[i], data=d[i], pipeline=p[i], microbatch=2.0, microbatches=16.0 / d[i]
        )
        assert together[i] == pytest.approx(float(price_transformer(GPT, one, A100).seconds))


def test_more_work_takes_longer():
    split = TransformerSplit(tensor=2.0, data=2.0, pipeline=2.0, microbatch=2.0, microbatches=4.0)
    step = float(price_transformer(GPT, split, A100).seconds)
    for change in ({"layers": 32.0}, {"hidden": 4096.0}, {"sequence": 2048.0}):
        assert price_transformer(replace(GPT, **change), split, A100).seconds > step, change
    for change in ({"microbatch": 4.0}, {"microbatches": 5.0}, {"data": 4.0}):
        assert price_transformer(GPT, replace(split, **change), A100).seconds > step, change
    for other in ("none", "selective"):
        assert price_transformer(GPT, replace(split, recompute=other), A100).seconds < step
    slow = replace(A100, device=replace(A100.device, dispatch=1e-3))
    assert price_transformer(GPT, split, slow).seconds > 2 * step


def test_launches_bound_small_layers_and_arithmetic_large_ones():
    small = layer_seconds(replace(GPT, hidden=256.0, heads=4.0), TransformerSplit(), A100)
    kernels = A100.device.seconds_of_host(20.0 + 20.0 + 36.0)
    assert sum(small[:2]) == pytest.approx(kernels, rel=0.02)
    large = layer_seconds(GPT3, TransformerSplit(microbatch=8.0), A100)
    work = GPT3.flops(8.0) - 6 * 8 * 2048 * 12288 * 51200
    rate = work / GPT3.layers / sum(large[:2])
    assert 0.6 * 312e12 < rate < 0.8265 * 312e12


def test_a_softmax_that_cannot_be_fused_costs_kernels():
    fused = layer_seconds(GPT, TransformerSplit(tensor=8.0, microbatch=2.0), A100)
    alone = layer_seconds(GPT, TransformerSplit(tensor=8.0, microbatch=1.0), A100)
    assert sum(alone[:2]) > sum(fused[:2])  # two rows of heads instead of four


# -- memory ----------------------------------------------------------------------------------------


def test_state_is_eighteen_bytes_per_parameter_and_zero_divides_it():
    held = float(GPT.parameters)
    for zero, expected in ((0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)):
        memory = memory_of_transformer(GPT, TransformerSplit(data=8.0, zero=float(zero)))
        assert memory.weights + memory.gradients + memory.state == pytest.approx(expected * held)


def test_activations_are_those_of_the_papers():
    s, b, h, a, t = 2048.0, 1.0, 12288.0, 96.0, 8.0
    unit = s * b * h * GPT3.layers
    split = TransformerSplit(tensor=t, recompute="none")
    assert memory_of_transformer(GPT3, split).activations == pytest.approx(
        unit * (10 + 24 / t + 5 * a * s / (h * t))
    )
    both = replace(split, sequence_parallel=True)
    assert memory_of_transformer(GPT3, both).activations == pytest.approx(
        unit / t * (34 + 5 * a * s / h)
    )
    full = memory_of_transformer(GPT3, replace(split, recompute="full")).activations
    one = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert full == pytest.approx(2 * unit + one)


def test_stages_hold_what_is_under_way():
    plain = TransformerSplit(tensor=8.0, pipeline=8.0, microbatches=64.0, recompute="none")
    one = memory_of_transformer(GPT3, replace(plain, microbatches=1.0)).activations
    assert memory_of_transformer(GPT3, plain).activations == pytest.approx(8 * one)
    looped = memory_of_transformer(GPT3, replace(plain, virtual=3.0)).activations
    assert looped == pytest.approx(8 * one * (1 + 7 / 24))
    total = memory_of_transformer(GPT3, plain).total
    assert 30e9 < total < 80 * 2**30 * 2
