"""pure: the price of an exchange, the simulator against it, the choice, and the command."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from headway.cli.exchange import compare, equal_layers
from headway.cli.main import main
from headway.collective.compression import CompressorSpeed, parse_compression
from headway.collective.model.bucket_cost import ExchangeNetwork, ExchangeScheme, bucket_service
from headway.collective.model.gradient_buckets import backward_order, ddp_buckets
from headway.collective.model.link_fit import LinkFit
from headway.collective.model.overlap import step_bound
from headway.collective.model.scheme_ranking import (
    CANDIDATE_COMPRESSORS,
    GradientLayer,
    exactness,
    gradient_moments,
    predict_exchange,
    rank_schemes,
)
from headway.collective.nodes import Nodes
from headway.errors import PlanError, UsageError
from headway.plans import ExchangePart, ExchangePlan
from headway.simulator.exchange import price_exchange, simulate_exchange
from support.golden import check_golden

MIB = 2**20
SLOW = ExchangeNetwork.flat(LinkFit.of_rate(12.5e6, 2e-4, 2))
"""100 Mbit/s, two ranks."""

FP16 = parse_compression("fp16")


def compression_pays(speed: CompressorSpeed, ratio: float, seconds_per_byte: float) -> bool:
    """Whether a compressor can pay at all: 1 / S < (1 - 1 / q) x link time per byte.

    Args:
        speed: Of the compressor, per byte of gradient.
        ratio: q: how many times smaller it makes gradients.
        seconds_per_byte: Of the link, for uncompressed gradients.
    """
    return speed.encode + speed.decode < (1 - 1 / ratio) * seconds_per_byte


def least_step(price):
    """The shortest step that this kind of exchange allows; seconds."""
    found, kind = price.predicted, "overlap" if price.exchange.overlap else "none"
    if price.exchange.overlap and price.exchange.priority:
        kind = "crossing"
    return step_bound(found.forward, found.backward, found.communication, kind)


def chain(n=25, compute=1.0, shape=(512, 512)):
    return [
        GradientLayer(
            name=f"layer{i}",
            shapes=(shape,),
            forward=compute / 3 / n,
            backward=compute * 2 / 3 / n,
        )
        for i in range(n)
    ]


def uneven(seed, n=12):
    draw = random.Random(seed)
    return [
        GradientLayer(
            name=f"blocks.{i}",
            shapes=((draw.choice([8, 64, 300]), draw.choice([32, 500])), (draw.choice([8, 64]),)),
            forward=draw.uniform(0.001, 0.03),
            backward=draw.uniform(0.002, 0.06),
        )
        for i in range(n)
    ]


def without_latency(layers, ratio):
    """A link on which the whole communication takes `ratio` seconds."""
    return ExchangeNetwork.flat(LinkFit(0.0, ratio / sum(layer.num_bytes for layer in layers)))


# -- the specification's model of the bound ----------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "ddp", "fifo", "priority", "lower"),
    [
        (0.25, 1.24, 1.01, 1.01, 1.00),
        (0.5, 1.48, 1.02, 1.02, 1.00),
        (0.75, 1.72, 1.11, 1.03, 1.00),
        (1.0, 1.96, 1.36, 1.05, 1.00),
        (1.5, 2.44, 1.86, 1.54, 1.50),
        (2.0, 2.92, 2.36, 2.04, 2.00),
        (4.0, 4.84, 4.36, 4.04, 4.00),
    ],
)
def test_the_table_of_25_equal_layers(ratio, ddp, fifo, priority, lower):
    """Communication over compute; DDP's default buckets, best order inside the step, priority
    across its border with chunks of 256 KiB, bound. 0.75 gives 1.035, printed as 1.03 there."""
    layers = chain()
    network = without_latency(layers, ratio)
    order = backward_order(gradient_moments(layers)[0])
    sizes = [layer.num_bytes for layer in layers]
    buckets = ddp_buckets(sizes, order, (MIB, 25 * MIB))
    assert predict_exchange(
        ExchangeScheme(), layers, network, {}, buckets=buckets
    ).step == pytest.approx(ddp, abs=0.005)
    assert predict_exchange(ExchangeScheme(), layers, network, {}).step == pytest.approx(
        fifo, abs=0.005
    )
    price = price_exchange(ExchangePlan(bucket="auto", priority=True), layers, network)
    assert price.predicted.step == pytest.approx(priority, abs=0.0065)
    assert least_step(price) == pytest.approx(lower)


def test_fp16_halves_the_communication():
    """Section 3.5: with q = 2 and crossing 1.92x over DDP's default at C = F + B, 2.79x at twice
    that; and crossing adds next to nothing there (bound 1.02)."""
    layers = chain()
    for ratio, gain in ((1.0, 1.92), (2.0, 2.79)):
        network = without_latency(layers, ratio)
        buckets = ddp_buckets(
            [layer.num_bytes for layer in layers],
            backward_order(gradient_moments(layers)[0]),
            (MIB, 25 * MIB),
        )
        ddp = predict_exchange(ExchangeScheme(), layers, network, {}, buckets=buckets).step
        half = predict_exchange(
            ExchangeScheme(compression=FP16, priority=True),
            layers,
            network,
            {},
        ).step
        assert ddp / half == pytest.approx(gain, abs=0.03)
    inside = predict_exchange(
        ExchangeScheme(compression=FP16),
        layers,
        without_latency(layers, 1.0),
        {},
    ).step
    across = predict_exchange(
        ExchangeScheme(compression=FP16, priority=True),
        layers,
        without_latency(layers, 1.0),
        {},
    ).step
    assert inside / across == pytest.approx(1.0, abs=0.02)


# -- the simulator is the price ----------------------------------------------------------------

EXCHANGES = {
    "default": ExchangePlan(),
    "fitted": ExchangePlan(bucket="auto"),
    "small": ExchangePlan(bucket="64 KiB"),
    "after backward": ExchangePlan(bucket="auto", overlap=False),
    "fp16": ExchangePlan(bucket="auto", compress="fp16"),
    "int8": ExchangePlan(bucket="auto", compress="int8"),
    "topk": ExchangePlan(bucket="auto", compress="topk:0.05"),
    "powersgd": ExchangePlan(bucket="auto", compress="powersgd:2"),
    "priority": ExchangePlan(bucket="auto", priority=True),
    "priority, given size": ExchangePlan(priority=True, bucket="1 MiB", chunk="100 KiB"),
    "priority, credit 1": ExchangePlan(bucket="auto", priority=True, credit=1),
    "priority, fp16": ExchangePlan(bucket="auto", priority=True, compress="fp16"),
    "priority, topk": ExchangePlan(bucket="auto", priority=True, compress="topk:0.05"),
    "adasum": ExchangePlan(bucket="auto", reduce="adasum"),
    "hierarchical": ExchangePlan(bucket="auto", collective="hierarchical"),
    "hierarchical, priority": ExchangePlan(bucket="auto", collective="hierarchical", priority=True),
    "hitopkcomm": ExchangePlan(bucket="auto", collective="hierarchical", compress="mstopk:0.05"),
    "hierarchical adasum": ExchangePlan(bucket="auto", collective="hierarchical", reduce="adasum"),
    "parts": ExchangePlan(
        bucket="auto",
        parts=(
            ExchangePart(parameters="blocks.1*", compress="fp16"),
            ExchangePart(parameters="blocks.3", ranks=((0, 1), (2, 3))),
        ),
    ),
}
GRID = ExchangeNetwork.of_rates(2, 2, rate=2e6, inside=1e9, latency=1e-3)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_price_is_what_the_simulator_plays(name, seed):
    exchange, layers = EXCHANGES[name], uneven(seed)
    price = price_exchange(exchange, layers, GRID)
    played = simulate_exchange(price.predicted, layers, steps=4)
    first = 1 if exchange.priority else 0  # nothing is under way in the very first forward pass
    for step in played.steps[first:-1]:
        assert step == pytest.approx(price.predicted.step, rel=1e-12)
    exposed = sum(
        span.seconds
        for span in played.timeline.spans
        if span.kind == "wait" and span.node == "step 2"
    )
    assert exposed == pytest.approx(price.predicted.exposed, abs=1e-12)
    assert 0 <= price.predicted.exposed <= price.predicted.isolated + 1e-12
    assert least_step(price) <= price.predicted.step + 1e-12


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_byte_travels_once_a_step(name):
    layers = uneven(3)
    price = price_exchange(EXCHANGES[name], layers, GRID)
    found = price.predicted
    assert sorted(i for bucket in found.buckets for i in bucket) == [*range(len(layers))]
    played = simulate_exchange(found, layers, steps=3)
    lane = played.timeline.seconds(rank=0, lane="exchange")
    assert lane == pytest.approx(3 * found.communication)


def test_dense_loads_are_the_gradients():
    layers = uneven(4)
    for exchange in (ExchangePlan(), ExchangePlan(priority=True, bucket="auto")):
        found = price_exchange(exchange, layers, SLOW).predicted
        assert sum(load.num_bytes for load in found.loads) == pytest.approx(
            sum(layer.num_bytes for layer in layers)
        )


@pytest.mark.parametrize("name", ["fitted", "priority", "topk"])
def test_no_lane_does_two_things_at_a_time(name):
    layers = uneven(5)
    found = price_exchange(EXCHANGES[name], layers, GRID).predicted
    spans = simulate_exchange(found, layers, steps=3).timeline.spans
    for lane in ("compute", "exchange"):
        own = sorted((s for s in spans if s.lane == lane), key=lambda s: s.start)
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(own))


def test_layers_of_different_methods_share_no_bucket():
    price = price_exchange(EXCHANGES["parts"], uneven(6), GRID)
    kinds = [
        {"group" if i == 3 else "fp16" if i in (1, 10, 11) else "plain" for i in bucket}
        for bucket in price.predicted.buckets
    ]
    assert all(len(kind) == 1 for kind in kinds)
    assert {next(iter(kind)) for kind in kinds} == {"group", "fp16", "plain"}


# -- methods -----------------------------------------------------------------------------------


def test_the_plain_all_reduce_is_priced_at_what_was_measured():
    link = LinkFit(1e-3, 1e-8, 0.0, 4)
    assert (
        bucket_service(ExchangeScheme(), [(1000, 1000)], ExchangeNetwork.flat(link), {}).num_bytes
        == 4e6
    )


def test_gathering_costs_as_the_bytes_that_a_rank_sends():
    """Flat top-k of 1 % over four ranks: 3 payloads of 8 bytes, where a ring sends 1.5 of all."""
    served = bucket_service(
        ExchangeScheme(compression=parse_compression("topk:0.01")),
        [(1000, 1000)],
        ExchangeNetwork.flat(LinkFit(1e-3, 1e-8, 0.0, 4)),
        {"topk": CompressorSpeed(1e-9, 1e-10)},
    )
    assert served.num_bytes == pytest.approx(3 * 80_000 / 1.5)
    assert served.encode == pytest.approx(4e6 * 1e-9)
    assert served.decode == pytest.approx(4 * 4e6 * 1e-10)


def test_powersgd_has_a_second_round():
    link = LinkFit(1e-3, 1e-8, 0.0, 2)
    served = bucket_service(
        ExchangeScheme(compression=parse_compression("powersgd:1")),
        [(500, 500)],
        ExchangeNetwork.flat(link),
        {},
    )
    assert served.delay == pytest.approx(1e-3)
    assert served.num_bytes == 4 * 1000


def test_hierarchy_pays_where_nodes_share_a_link():
    """Specification 3.7: 25 MiB on two nodes of two ranks at 100 Mbit/s: 3.21 s flat, 2.37 s in
    levels (2.10 s is what 25 MiB take), 0.166 s flat top-k and HiTopKComm 0.166 s."""
    network = ExchangeNetwork.of_rates(2, 2, rate=12.5e6, inside=1e9, latency=1e-3)
    layers = [GradientLayer(name="all", shapes=((2560, 2560),))]

    def alone(exchange):
        return price_exchange(exchange, layers, network).predicted.step

    assert alone(ExchangePlan()) == pytest.approx(3.15, abs=0.01)
    assert alone(ExchangePlan(collective="hierarchical")) == pytest.approx(2.11, abs=0.02)
    assert alone(ExchangePlan(compress="topk:0.01")) == pytest.approx(0.14, abs=0.02)
    sparse = alone(ExchangePlan(compress="mstopk:0.01", collective="hierarchical"))
    assert sparse == pytest.approx(0.08, abs=0.02)


def test_an_unmeasured_inside_costs_nothing():
    nodes = Nodes(((0, 1), (2, 3)))
    network = ExchangeNetwork(LinkFit(1e-3, 1e-7, 0.0, 4), nodes)
    price = price_exchange(ExchangePlan(collective="hierarchical"), chain(4), network)
    assert math.isfinite(price.predicted.step)
    assert price.predicted.link is network.link


def test_a_group_of_fewer_ranks_sends_less():
    small = GRID.among((0, 1))
    assert small.link.ranks == 2
    assert small.link.seconds_per_byte == pytest.approx(GRID.link.seconds_per_byte / 1.5)
    assert small.nodes.members == ((0, 1),)


def test_one_rank_exchanges_nothing():
    price = price_exchange(
        ExchangePlan(), chain(3), ExchangeNetwork.flat(LinkFit.of_rate(1e6, 0.0, 1))
    )
    assert price.predicted.step == pytest.approx(1.0)
    assert price.predicted.traffic.busiest_rank() == 0


def test_impossible_exchanges_are_refused_with_the_reason():
    uneven_nodes = ExchangeNetwork(LinkFit(0.0, 1e-8, 0.0, 3), Nodes(((0, 1), (2,))))
    with pytest.raises(PlanError, match="cannot be priced") as caught:
        price_exchange(ExchangePlan(collective="hierarchical"), chain(2), uneven_nodes)
    assert caught.value.problems == ("exchange.collective hierarchical: the nodes have 2, 1 ranks",)
    with pytest.raises(PlanError) as caught:
        price_exchange(
            ExchangePlan(collective="hierarchical", compress="powersgd:1"), chain(2), GRID
        )
    assert "powersgd" in caught.value.problems[0]
    with pytest.raises(PlanError) as caught:
        price_exchange(ExchangePlan(bucket="many"), chain(2), SLOW)
    assert "exchange.bucket" in caught.value.problems[0]


# -- choosing ----------------------------------------------------------------------------------


def test_exact_is_chosen_where_communication_is_hidden_anyway():
    ranked = rank_schemes(chain(), without_latency(chain(), 0.2), base=ExchangeScheme())
    assert ranked[0].scheme.compression.name == "none"
    assert ranked[0].reason.startswith("exact")


def test_on_a_slow_link_the_coarse_ones_win_by_their_bytes():
    ranked = rank_schemes(chain(), without_latency(chain(), 40.0), base=ExchangeScheme())
    assert exactness(ranked[0].scheme) == 2
    assert "as fast as the best exact exchange" in ranked[0].reason
    steps = [choice.step for choice in ranked]
    assert ranked[-1].scheme.compression.name == "none"
    assert steps[-1] > 10 * steps[0]


def test_an_approximation_must_gain_something():
    """Slightly faster is not enough, and the reason says how much would be."""
    layers = chain()
    ranked = rank_schemes(
        layers,
        without_latency(layers, 0.5),
        base=ExchangeScheme(),
        candidates=(parse_compression("none"), parse_compression("fp16")),
        speeds={},
    )
    assert [choice.scheme.compression.name for choice in ranked] == ["none", "fp16"]
    assert ranked[1].step < ranked[0].step
    assert "less exact: it must be 1.02x" in ranked[1].reason


def test_never_worse_than_the_best_hook_of_ddp():
    """Whatever the link, the choice's step is within its class's handicap of the best hook's."""
    hooks = [*map(parse_compression, ("fp16", "powersgd:1", "powersgd:2", "powersgd:4"))]
    for ratio in (0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 100.0):
        network = without_latency(chain(), ratio)
        chosen = rank_schemes(chain(), network, base=ExchangeScheme())[0]
        best = min(
            choice.step
            for choice in rank_schemes(chain(), network, base=ExchangeScheme(), candidates=hooks)
        )
        assert chosen.step <= best * 1.05


def test_shards_that_cut_gradients_leave_some_compressors_out():
    ranked = rank_schemes(chain(4), GRID, base=ExchangeScheme(collective="hierarchical"))
    assert {choice.scheme.compression.name for choice in ranked} == {"none", "fp16", "topk"}


def test_a_slow_compressor_does_not_pay_on_a_fast_link():
    """Specification 3.6: 1 / S < (1 - 1 / q) x link time per byte."""
    selection = CompressorSpeed(0.45e-9)
    assert compression_pays(selection, 100.0, 8e-9)  # 1 Gbit/s
    assert not compression_pays(selection, 100.0, 0.4e-9)
    assert compression_pays(CompressorSpeed(0.04e-9), 2.0, 0.8e-9)  # fp16 at 10 Gbit/s
    layers = chain(compute=1e-3)
    fast = ExchangeNetwork.flat(LinkFit(0.0, 0.2e-9, 0.0, 2))
    slow = {"topk": CompressorSpeed(3e-9)}
    ranked = rank_schemes(
        layers,
        fast,
        base=ExchangeScheme(),
        speeds=slow,
        candidates=[*map(parse_compression, ("none", "topk:0.01"))],
    )
    assert ranked[0].scheme.compression.name == "none"


def test_the_ranking_is_the_same_every_time():
    first = rank_schemes(chain(), SLOW, base=ExchangeScheme())
    again = rank_schemes(chain(), SLOW, base=ExchangeScheme())
    assert [c.scheme for c in first] == [c.scheme for c in again]
    assert len(first) == len(CANDIDATE_COMPRESSORS)


def test_an_automatic_compressor_is_chosen_in_the_price():
    exact = price_exchange(
        ExchangePlan(compress="auto", bucket="auto"), chain(), without_latency(chain(), 0.1)
    )
    assert exact.exchange.compress == "none"
    coarse = price_exchange(
        ExchangePlan(compress="auto", bucket="auto"), chain(), without_latency(chain(), 50.0)
    )
    assert coarse.exchange.compress not in ("none", "auto")
    assert coarse.predicted.step < 10


# -- the command -------------------------------------------------------------------------------

ARGUMENTS = (
    "exchange", "compare", "--layers", "25", "--size", "1 MiB", "--link", "100 Mbit/s",
    "--latency", "0.2 ms", "--forward", "0.7 s", "--backward", "1.4 s",
)  # fmt: skip


def test_the_table_of_the_command(capsys):
    assert main([*ARGUMENTS, "--ranks", "2"]) == 0
    check_golden("cli/exchange_compare.txt", capsys.readouterr().out)


def test_nodes_with_several_ranks_have_hierarchical_rows(capsys):
    assert main([*ARGUMENTS, "--ranks", "4", "--nodes", "2"]) == 0
    check_golden("cli/exchange_compare_nodes.txt", capsys.readouterr().out)


def test_facts_and_picture(capsys, tmp_path):
    picture = tmp_path / "steps.svg"
    assert main([*ARGUMENTS, "--json", "--svg", str(picture)]) == 0
    rows = json.loads(capsys.readouterr().out)
    by_name = {row["exchange"]: row for row in rows}
    assert by_name["priority"]["plan"]["priority"] is True
    assert by_name["DDP, default buckets"]["plan"] is None
    assert all(row["bound"] <= row["step"] + 1e-9 for row in rows)
    assert all(row["exposed"] <= row["isolated"] + 1e-9 for row in rows)
    assert by_name["fitted buckets, fp16"]["node_bytes"] * 2 == pytest.approx(
        by_name["fitted buckets"]["node_bytes"]
    )
    svg = picture.read_text()
    assert svg.startswith("<svg")
    for name in ("DDP, default buckets", "priority", "exposed communication"):
        assert name in svg


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"link": "fast"}, "--link: 'fast' is not a rate"),
        ({"size": "one"}, "--size: 'one' is not a size"),
        ({"forward": "soon"}, "--forward: 'soon' is not a duration"),
        ({"ranks": 1}, "at least 1 layer and 2 ranks"),
        ({"layers": 0}, "at least 1 layer and 2 ranks"),
        ({"ranks": 4, "nodes": 3}, "--nodes 3: 4 ranks cannot be spread evenly"),
    ],
)
def test_impossible_arguments(change, words):
    with pytest.raises(UsageError, match=words):
        compare(**({"forward": "1 s", "backward": "2 s"} | change))


def test_equal_layers_are_as_square_as_they_can_be():
    layer = equal_layers(3, 4 * 6, 3.0, 6.0)[0]
    assert layer.shapes == ((2, 3),)
    assert (layer.forward, layer.backward) == (1.0, 2.0)
    assert equal_layers(1, 4 * 7, 1.0, 1.0)[0].shapes == ((1, 7),)
