"""pure: Das's volumes and windows against worked values, scans and played steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.cluster import Link
from headway.collective.model.link_fit import LinkFit
from headway.collective.model.overlap import LinkLoad, simulate_link
from headway.collective.model.scheme_ranking import ExchangePrediction, gradient_moments
from headway.collective.model.scheme_ranking import GradientLayer as Priced
from headway.collective.nodes import NOTHING
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.planner.guidelines.layer_parallelism import (
    DasLayer,
    LayerTimes,
    Matmul,
    best_degree,
    best_groups,
    communication,
    computation,
    hybrid_volume,
    ideal_groups,
    least_samples,
    most_nodes,
    ratio_of,
    tensor_seconds,
    windows,
)
from headway.plans.tensor_layout import divisors
from headway.simulator.exchange import simulate_exchange
from support.sampling import sampled

VGG_A = ((3, 64, 224), (64, 128, 112), (128, 256, 56), (256, 256, 56), (256, 512, 28))
VGG_A += ((512, 512, 28), (512, 512, 14), (512, 512, 14))


def convolution(ifm, ofm, size, kernel=3):
    return DasLayer(
        ifm=ifm, ofm=ofm, kernel=(kernel, kernel), output=(size, size), input=(size, size)
    )


def connected(ifm, ofm):
    return DasLayer(ifm=ifm, ofm=ofm)


@pytest.mark.parametrize(
    ("size", "flop_per_byte"),
    [(224, 75_264), (112, 18_816), (56, 4_704), (28, 1_176), (14, 294), (1, 1.5)],
)
def test_the_ratio_depends_on_the_output_map_and_the_samples_alone(size, flop_per_byte):
    for ifm, ofm, kernel in ((3, 64, 3), (512, 17, 1), (64, 64, 11)):
        layer = convolution(ifm, ofm, size, kernel)
        for samples in (1, 2, 7):
            assert ratio_of([layer], samples) == flop_per_byte * samples


def test_the_totals_of_vgg_a():
    layers = [convolution(*sizes) for sizes in VGG_A]
    assert sum(computation(layer, 1) for layer in layers) == pytest.approx(44.9e9, rel=2e-3)
    assert sum(communication(layer) for layer in layers) == pytest.approx(36.9e6, rel=2e-3)
    assert ratio_of(layers) == pytest.approx(1218, abs=1)
    assert computation(DasLayer(ifm=3, ofm=64, first=True), 1) == 4 * 3 * 64


def test_samples_per_node_are_the_fewest_that_the_balance_allows():
    assert least_samples(336, 294) == 2
    assert least_samples(1336, 1218) == 2
    assert least_samples(1336, 294) == 5
    assert least_samples(588, 294) == 2
    assert least_samples(1, 294) == 1
    assert most_nodes(256, 1336, 294) == 51


def model_is_better(layer, batch, overlap=1.0):
    """ofm kw kh (2 - overlap) > iw ih MB: splitting the features moves less than the gradients."""
    weights = layer.ofm * math.prod(layer.kernel) * (2 - overlap)
    return weights > math.prod(layer.input) * batch


def test_data_and_model_flip_exactly_where_the_rule_says():
    for ofm in range(1, 400):
        for overlap in (0.0, 0.5, 1.0):
            layer = convolution(16, ofm, 4)
            gradients = communication(layer, overlap)
            activations = 4 * layer.ifm * 16 * 8
            assert model_is_better(layer, 8, overlap) == (gradients > activations)
    flips = [ofm for ofm in range(200, 300) if model_is_better(connected(64, ofm), 256)]
    assert flips[0] == 257


@pytest.mark.parametrize(
    ("sizes", "batch", "nodes", "ideal", "groups", "megabytes"),
    [
        ((4096, 4096), 256, 64, 2, 2, {64: 134.2, 1: 8.39, 2: 8.39, 4: 10.49}),
        ((4096, 4096), 512, 128, 4, 4, {128: 134.2, 1: 16.8, 2: 10.49, 4: 8.39, 8: 10.49}),
        ((4096, 1000), 256, 64, 4.05, 4, {4: 4.15, 1: 8.39, 64: 32.8}),
        ((25088, 4096), 256, 64, 2, 2, {64: 822, 2: 51.4}),
    ],
)
def test_the_worked_hybrids(sizes, batch, nodes, ideal, groups, megabytes):
    layer = connected(*sizes)
    assert ideal_groups(layer, batch, nodes) == pytest.approx(ideal, abs=5e-3)
    assert ideal_groups(layer, batch, nodes) == math.sqrt(nodes * batch / sizes[1])
    assert best_groups(layer, batch, nodes) == groups
    for g, volume in megabytes.items():
        assert hybrid_volume(layer, batch, nodes, g) == pytest.approx(volume * 1e6, rel=2e-3)


def test_the_best_number_of_groups_is_that_of_trying_all():
    random = np.random.default_rng(1)
    for _ in range(400):
        layer = DasLayer(
            ifm=int(random.integers(1, 5000)),
            ofm=int(random.integers(1, 5000)),
            kernel=(int(random.integers(1, 4)),) * 2,
            input=(int(random.integers(1, 30)),) * 2,
        )
        batch, nodes = int(random.integers(1, 2048)), int(random.integers(1, 200))
        overlap = float(random.choice([0.0, 0.4, 1.0]))
        volumes = {g: hybrid_volume(layer, batch, nodes, g, overlap) for g in divisors(nodes)}
        found = best_groups(layer, batch, nodes, overlap)
        assert volumes[found] == min(volumes.values())
    with pytest.raises(ValueError, match="3 groups of 8"):
        hybrid_volume(connected(1, 1), 1, 8, 3)


def test_the_tensor_degree_follows_the_links():
    product = Matmul(inputs=4096, outputs=4096, weights=4096**2)

    def flat(size, stride):
        return 1e9

    alone = [tensor_seconds(product, 256, 64, t, rate=flat) for t in (1, 2, 64)]
    assert alone[0] == pytest.approx(2 * 4 * 4096**2 * 63 / 64 / 1e9)
    assert alone[1] == pytest.approx(2 * 4 * (8192 * 8 + 4096**2 / 2 * 31 / 32) / 1e9)
    assert alone[2] == pytest.approx(2 * 4 * 8192 * 256 / 1e9)
    network = HierarchicalNetwork(
        (
            LinkLevel(name="node", width=8, link=Link(rate=300e9)),
            LinkLevel(name="cluster", width=math.inf, link=Link(rate=3e9)),
        )
    )
    for rate in (flat, network.rate_of):
        times = {t: float(tensor_seconds(product, 256, 64, t, rate=rate)) for t in divisors(64)}
        assert times[best_degree(product, 256, 64, rate=rate)] == min(times.values())
    assert best_degree(product, 8192, 64, rate=network.rate_of) == 8
    assert best_degree(product, 8192, 64, rate=flat) == 4


def random_stack(random):
    count = int(random.integers(1, 13))
    scale = 10 ** random.uniform(-1.5, 1.5)
    return [
        LayerTimes(
            forward=float(random.uniform(0.1, 1)),
            weight_grad=float(random.uniform(0.1, 1)),
            input_grad=float(random.uniform(0.1, 1)) if i else 0.0,
            num_bytes=float(random.uniform(1, 100) * scale) if random.random() < 0.85 else 0.0,
        )
        for i in range(count)
    ], LinkFit(float(random.uniform(0, 0.3)), 0.02)


def played(stack, link, *, crossing, weights_first):
    """The events of some steps: an input gradient is a layer of its own without parameters, which
    comes before its weight gradient or after it in backward."""
    layers, home = [], []
    for i, one in enumerate(stack):
        first, second = one.input_grad, one.weight_grad
        if not weights_first:
            first, second = 0.0, one.input_grad + one.weight_grad
        layers.append(Priced(name=f"input {i}", shapes=(), backward=first))
        layers.append(Priced(name=f"{i}", shapes=(), forward=one.forward, backward=second))
        if one.num_bytes:
            home.append(i)
    ready, needed = gradient_moments(layers)
    loads = tuple(
        LinkLoad(str(i), stack[i].num_bytes, ready[2 * i + 1], needed[2 * i + 1]) for i in home
    )
    order = tuple(reversed(range(len(home))))
    predicted = ExchangePrediction(
        forward=0.0,
        backward=0.0,
        communication=0.0,
        isolated=0.0,
        buckets=tuple((2 * i + 1,) for i in home),
        loads=loads,
        home=tuple(range(len(home))),
        order=order,
        crossing=crossing,
        link=link,
        played=simulate_link(
            loads, link, order=order, credit=1, crossing=crossing, compute=max(ready)
        ),
        traffic=NOTHING,
    )
    return simulate_exchange(predicted, layers, steps=3)


@pytest.mark.parametrize("part", sampled(range(4), 1))
def test_the_windows_equal_the_played_events_on_1000_stacks(part):
    random = np.random.default_rng(part)
    exposed = 0
    for _ in range(250):
        stack, link = random_stack(random)
        for need, weights_first in (
            ("forward", True),
            ("update", True),
            ("forward", False),
            ("update", False),
        ):
            found = windows(stack, link, need=need, weights_first=weights_first)
            crossing = need == "forward"
            events = played(stack, link, crossing=crossing, weights_first=weights_first)
            assert events.steps[1] == pytest.approx(found.step, rel=1e-12)
            check_the_waits(found, events, crossing)
            exposed += found.step > found.compute
            sent = [i for i, one in enumerate(stack) if one.num_bytes]
            loads = [
                LinkLoad(i, stack[i].num_bytes, found.ready[i], found.need[i] - found.compute)
                for i in sent
            ]
            again = simulate_link(loads, link, credit=1, crossing=crossing, compute=found.compute)
            ends = [found.end[i] for i in sent]
            assert [t.received for t in again.trips] == pytest.approx(ends, rel=1e-12)
            assert again.step == pytest.approx(found.step, rel=1e-12)
    assert exposed > 500


def check_the_waits(found, events, crossing):
    """Layer by layer, in the second step."""
    if not crossing:
        return
    waits = {}
    for span in events.timeline.spans:
        if span.kind == "wait" and span.node == "step 1":
            waits[span.label] = span.end - span.start
    numbers = [k for k, one in enumerate(found.exposed) if one > 1e-12]
    assert sorted(waits.values()) == pytest.approx(sorted(found.exposed[k] for k in numbers))


def available(found):
    """avail_k: seconds from the gradient to the need of the sum."""
    return tuple(need - ready for need, ready in zip(found.need, found.ready, strict=True))


def test_the_first_layer_is_always_exposed_and_has_no_window():
    random = np.random.default_rng(7)
    for _ in range(100):
        stack, link = random_stack(random)
        if not stack[0].num_bytes:
            continue
        found = windows(stack, link)
        assert available(found)[0] == pytest.approx(0, abs=1e-12)
        assert found.exposed[0] >= link.seconds(stack[0].num_bytes) - 1e-9


def test_the_windows_are_the_sums_of_the_layers_before():
    stack = [LayerTimes(forward=i + 1, weight_grad=2, input_grad=3 * (i > 0), num_bytes=1)
             for i in range(4)]  # fmt: skip
    later = available(windows(stack, LinkFit(0, 0), weights_first=False))
    assert later == (0, 1 + 2, 3 + 7, 6 + 12)
    assert available(windows(stack, LinkFit(0, 0))) == (0, 3 + 3, 10 + 3, 18 + 3)


def test_waiting_for_the_update_is_never_shorter_and_small_buckets_cost_latency():
    random = np.random.default_rng(3)
    for _ in range(200):
        stack, link = random_stack(random)
        assert windows(stack, link).step <= windows(stack, link, need="update").step + 1e-12
