"""pure: bytes on the wire: the closed forms of the papers, from the sum over pairs of ranks."""

from __future__ import annotations

import math

import pytest

from headway.collective.compression import NoCompression, parse_compression
from headway.collective.model.bucket_cost import (
    adasum_traffic,
    bucket_traffic,
    direct_traffic,
    ring_all_gather_traffic,
    ring_all_reduce_traffic,
    shard_parcels,
)
from headway.collective.nodes import Nodes, Traffic

D = 6_553_600
"""Elements; 25 MiB in float32."""
SHAPES = ((2560, 2560),)
MIB = 2**20


def apart(n):
    return Nodes(tuple((rank,) for rank in range(n)))


def grid(m, n):
    return Nodes(tuple(tuple(range(i * n, (i + 1) * n)) for i in range(m)))


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16])
def test_a_ring_sends_each_byte_2_n_minus_1_over_n_times(n):
    traffic = ring_all_reduce_traffic(range(n), 1000.0)
    assert all(traffic.by_rank(rank) == pytest.approx(2 * (n - 1) / n * 1000) for rank in range(n))
    assert ring_all_gather_traffic(range(n), 10.0).by_rank(0) == 10 * (n - 1)
    assert direct_traffic(range(n), 10.0).by_rank(0) == 10 * (n - 1)


def test_the_specification_s_table_of_two_nodes_with_two_ranks():
    """Section 1.4: 25 MiB, 1 % density; NIC bytes 37.5 flat ring, 25.0 hierarchical, 1.50 flat
    top-k, 0.50 HiTopKComm."""
    nodes = grid(2, 2)

    def nic(**how):
        return bucket_traffic(SHAPES, nodes, **how).busiest_node(nodes) / MIB

    assert nic() == pytest.approx(37.5, abs=0.01)
    assert nic(collective="hierarchical") == pytest.approx(25.0, abs=0.01)
    assert nic(compression=parse_compression("topk:0.01")) == pytest.approx(1.50, abs=0.01)
    sparse = nic(collective="hierarchical", compression=parse_compression("mstopk:0.01"))
    assert sparse == pytest.approx(0.50, abs=0.01)


@pytest.mark.parametrize(("m", "n"), [(2, 2), (2, 4), (3, 2), (4, 8)])
def test_hitopkcomm_s_closed_form(m, n):
    """(m - 1) rho d x 8 bytes leave a node."""
    nodes = grid(m, n)
    traffic = bucket_traffic(
        SHAPES, nodes, collective="hierarchical", compression=parse_compression("topk:0.01")
    )
    assert traffic.busiest_node(nodes) == pytest.approx((m - 1) * 0.01 * D * 8, rel=1e-3)


@pytest.mark.parametrize(("m", "n"), [(2, 2), (3, 4), (8, 8)])
def test_hierarchical_dense_closed_form(m, n):
    """2 (m - 1) / m d leave a node, however many ranks share it."""
    nodes = grid(m, n)
    traffic = bucket_traffic(SHAPES, nodes, collective="hierarchical")
    assert traffic.busiest_node(nodes) == pytest.approx(2 * (m - 1) / m * 4 * D, rel=1e-5)
    inside = 2 * (n - 1) / n * 4 * D
    assert traffic.by_rank(0) == pytest.approx(inside + 2 * (m - 1) / m * 4 * D / n, rel=1e-5)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_adasum_s_closed_form(n):
    """2 d (n - 1) / n x 4 and, per layer and level, three numbers to each of the others."""
    traffic = adasum_traffic(range(n), 4.0 * D, layers=25)
    assert traffic.by_rank(n - 1) == pytest.approx(2 * 4 * D * (n - 1) / n, rel=0.001)
    assert {round(traffic.by_rank(rank)) for rank in range(n)} == {round(traffic.by_rank(0))}
    two = adasum_traffic(range(2), 1000.0, layers=25)
    assert two.by_rank(0) == 1000 + 25 * (24 + 8)  # in the last level flags go along


def test_adasum_across_nodes_sums_its_dot_products_inside_nodes_too():
    """Two nodes of two ranks: the mean inside, halves of the shards across, 4 numbers per layer (as
    it is the last level) to the partner and to the other rank of the node."""
    traffic = bucket_traffic([(1000,)] * 5, grid(2, 2), collective="hierarchical", reduce="adasum")
    dense = 4 * 5000
    assert traffic.sent[0, 2] == dense / 2 * 0.5 * 2 + 5 * 32
    assert traffic.sent[0, 1] == dense + 5 * 32
    one = bucket_traffic([(1000,)] * 5, grid(1, 4), collective="hierarchical", reduce="adasum")
    assert one.sent[0, 3] == 2 * dense / 4 + 5 * 8


@pytest.mark.parametrize("n", [3, 5, 6, 7])
def test_beyond_a_power_of_two_whole_buffers_go_there_and_back(n):
    power = 1 << (n.bit_length() - 1)
    traffic = adasum_traffic(range(n), 1000.0, layers=1)
    assert traffic.by_rank(n - 1) == 1008
    extra = traffic.by_rank(0) - adasum_traffic(range(power), 1000.0, layers=1).by_rank(0)
    assert extra == 1008


@pytest.mark.parametrize(
    ("text", "factor"),
    [("fp16", 0.5), ("bf16", 0.5), ("randomk:0.01", 0.01), ("powersgd:2", 4 / 2560)],
)
def test_summable_payloads_travel_in_rings(text, factor):
    dense = bucket_traffic(SHAPES, apart(4)).by_rank(0)
    sent = bucket_traffic(SHAPES, apart(4), compression=parse_compression(text)).by_rank(0)
    assert sent == pytest.approx(factor * dense, rel=1e-3)


def test_gathered_payloads_grow_with_the_ranks():
    def sent(n):
        return bucket_traffic(SHAPES, apart(n), compression=parse_compression("topk:0.01")).by_rank(
            0
        )

    assert sent(8) == pytest.approx(7 * sent(2), rel=1e-3)
    assert sent(2) == pytest.approx(0.08 * D, rel=1e-3)


def test_int8_is_scattered_from_three_ranks_on():
    """Two rounds of a quarter, each to all others: as much as a ring of a quarter."""
    found = bucket_traffic(SHAPES, apart(8), compression=parse_compression("int8")).by_rank(0)
    assert found == pytest.approx(bucket_traffic(SHAPES, apart(8)).by_rank(0) / 4, rel=0.02)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"compression": parse_compression("fp16")},
        {"compression": parse_compression("int8")},
        {"compression": parse_compression("sign")},
        {"compression": parse_compression("topk:0.1")},
        {"compression": parse_compression("powersgd:1")},
        {"reduce": "adasum"},
        {"collective": "hierarchical"},
        {"collective": "hierarchical", "compression": parse_compression("fp16")},
        {"collective": "hierarchical", "compression": parse_compression("topk:0.3")},
        {"collective": "hierarchical", "reduce": "adasum"},
    ],
)
@pytest.mark.parametrize("nodes", [grid(2, 2), grid(3, 2), grid(1, 4), apart(5)], ids=str)
def test_what_is_sent_is_received(how, nodes):
    shapes = ((64, 33), (7,), (128, 8, 3))
    traffic = bucket_traffic(shapes, nodes, **how)
    received = {}
    for (_, to), size in traffic.sent.items():
        received[to] = received.get(to, 0.0) + size
    assert math.fsum(received.values()) == pytest.approx(traffic.total)
    assert sum(traffic.by_rank(rank) for rank in range(nodes.ranks)) == pytest.approx(traffic.total)
    assert traffic.busiest_rank() == max(traffic.by_rank(rank) for rank in range(nodes.ranks))
    assert all(sender != receiver and size > 0 for (sender, receiver), size in traffic.sent.items())


def test_flags_are_part_of_the_figure():
    many, one = bucket_traffic([(10,)] * 100, apart(2)), bucket_traffic([(1000,)], apart(2))
    assert many.by_rank(0) - one.by_rank(0) == pytest.approx(99 * 4)
    payload = NoCompression().payloads([(10,)] * 100, 4, 2)
    assert many.by_rank(0) == payload[0].num_bytes


def test_parcels_of_shards_add_up_to_the_density():
    parcels = shard_parcels(1003, 3, 2, 0.1, 4)
    # 50 values and 50 indices; in the second 3 flags, and 4 bytes to come to a multiple of 8
    assert parcels == (400, 416)
    assert shard_parcels(10, 2, 8, 0.01, 4)[-1] == 8  # nothing but a flag


def test_one_rank_sends_nothing_and_one_node_sends_nothing_out():
    assert bucket_traffic(SHAPES, apart(1)).total == 0
    nodes = grid(1, 4)
    assert bucket_traffic(SHAPES, nodes, collective="hierarchical").busiest_node(nodes) == 0


def test_ranks_that_alternate_over_nodes_cost_the_ring_more():
    """A ring in order of rank crosses at every hop, which a hierarchical exchange does not."""
    mixed = Nodes(((0, 2), (1, 3)))
    ring = bucket_traffic(SHAPES, mixed).busiest_node(mixed)
    assert ring == pytest.approx(2 * 1.5 * 4 * D, rel=1e-5)
    layered = bucket_traffic(SHAPES, mixed, collective="hierarchical").busiest_node(mixed)
    assert layered == pytest.approx(4 * D, rel=1e-5)


def test_compressors_that_need_whole_tensors_are_refused_where_gradients_are_cut():
    with pytest.raises(ValueError, match="cuts gradients anywhere, not so powersgd"):
        bucket_traffic(
            SHAPES,
            grid(2, 2),
            collective="hierarchical",
            compression=parse_compression("powersgd:1"),
        )


def test_traffic_adds_up():
    one, two = Traffic({(0, 1): 1.0}), Traffic({(0, 1): 2.0, (1, 0): 3.0})
    assert (one + two).sent == {(0, 1): 3.0, (1, 0): 3.0}
    assert one.sent == {(0, 1): 1.0}
