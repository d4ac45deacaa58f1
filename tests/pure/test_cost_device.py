"""pure: the price of kernels on a device, and of collectives on levels of links."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from headway.cluster.cluster import Cluster, Node
from headway.cluster.datasheets import DATASHEETS
from headway.cluster.device import HostOverhead
from headway.cluster.link import Link
from headway.cluster.presets import UPLINKS
from headway.cost.device import DeviceModel
from headway.cost.machines import FITTED
from headway.cost.network import HierarchicalNetwork, LinkLevel, network_of
from headway.errors import PlanError
from support.machines import assumed_machine, fitted_machine

IDEAL = DeviceModel(
    name="ideal",
    peak={"fp16": 100e12},
    memory=16e9,
    memory_rate=1e12,
    efficiency=0.5,
    depth=100.0,
    kernel=2e-6,
    dispatch=10e-6,
    sharpness=2.0,
)


def two_levels(*, width=4, inner=100e9, uplink=50e9, latency=0.0, far=0.0) -> HierarchicalNetwork:
    return HierarchicalNetwork(
        (
            LinkLevel(name="node", width=width, link=Link(rate=inner, latency=latency)),
            LinkLevel(name="cluster", width=math.inf, link=Link(rate=uplink, latency=far)),
        )
    )


# -- devices -------------------------------------------------------------------------------------


def test_matmul_by_hand():
    # 2 * 1000 * 1000 * 100 / (100e12 * 0.5), twice that because k is as short as `depth`.
    assert IDEAL.seconds_of_matmul(1000, 1000, 100) == pytest.approx(2 * 4e-6)
    # A product with a vector is bound by its bytes: 2 (mk + k + m) / 1e12.
    moved = 2 * (1e8 + 2e4) / 1e12
    assert IDEAL.seconds_of_matmul(10000, 1, 10000) == pytest.approx(moved)
    assert IDEAL.seconds_of_matmul(10000, 1, 10000, count=3) == pytest.approx(3 * moved)


def test_other_kernels_by_hand():
    assert IDEAL.seconds_of_elementwise(1e9) == pytest.approx(1e-3)
    assert IDEAL.seconds_of_kernels(5) == pytest.approx(10e-6)
    assert IDEAL.seconds_of_host(5) == pytest.approx(50e-6)


def test_host_and_device_join():
    assert IDEAL.join(3.0, 4.0) == pytest.approx(5.0)  # sharpness 2
    assert IDEAL.join(0.0, 4.0) == pytest.approx(4.0)
    assert IDEAL.join(0.0, 0.0) == pytest.approx(0.0, abs=1e-20)
    for host, device in itertools.product((1e-6, 1e-3, 1.0), repeat=2):
        both = IDEAL.join(host, device)
        assert max(host, device) <= both <= host + device


def test_arrays_are_priced_as_numbers():
    sizes = np.array([64.0, 512.0, 4096.0])
    together = IDEAL.seconds_of_matmul(sizes, 2 * sizes, 3 * sizes)
    alone = [IDEAL.seconds_of_matmul(n, 2 * n, 3 * n) for n in sizes]
    assert together.tolist() == pytest.approx(alone)
    assert (np.diff(together) > 0).all()


def test_all_that_is_wrong_with_a_device_is_told_at_once():
    with pytest.raises(PlanError) as error:
        DeviceModel(
            name="no", peak={"fp16": 0.0}, memory=-1.0, memory_rate=1.0, efficiency=2, kernel=-1.0
        )
    text = str(error.value)
    for word in ("memory is -1", "peak fp16", "efficiency is 2", "kernel is negative"):
        assert word in text
    with pytest.raises(PlanError, match="no peak for fp8"):
        IDEAL.rate("fp8")


# -- collectives -----------------------------------------------------------------------------------


def test_ring_all_reduce_by_hand():
    net = two_levels(width=8, inner=1e9)
    # 2 (n-1)/n S / rate: 1.75 ms for a megabyte over eight ranks.
    assert net.all_reduce(1e6, 8) == pytest.approx(1.75e-3)
    assert net.all_gather(1e6, 8) == pytest.approx(0.875e-3)
    assert net.reduce_scatter(1e6, 8) == pytest.approx(0.875e-3)
    assert net.all_reduce(1e6, 1) == 0.0


def test_small_messages_take_the_tree():
    net = two_levels(width=8, inner=1e9, latency=10e-6)
    # Nothing to send: 2 log2(8) steps of a tree, not 2 (8-1) of a ring.
    assert net.all_reduce(0.0, 8) == pytest.approx(60e-6)
    assert net.all_reduce(1e9, 8) == pytest.approx(14 * 10e-6 + 1.75)


def test_groups_side_by_side_share_the_uplink():
    net = two_levels()
    alone = net.all_reduce(1e9, 2, 1)
    assert alone == pytest.approx(1e9 / 100e9)  # inside a node
    # Stride 4: one rank of each of two nodes; all four ranks of a node do so at once.
    assert net.all_reduce(1e9, 2, 4) == pytest.approx(4 * 1e9 / 50e9)
    # Stride 2: two groups per node, each with two ranks on it.
    assert net.rate_of(4, 2) == pytest.approx(50e9 / 2)


def test_levels_beat_a_flat_ring():
    net = two_levels(width=4, inner=1000e9, uplink=50e9)
    flat = 2 * 7 / 8 * 1e9 / 50e9
    levels = 2 * 3 / 4 * 1e9 / 1000e9 + 2 * 1 / 2 * 1e9 / 50e9
    assert net.all_reduce(1e9, 8) == pytest.approx(min(flat, levels))
    assert levels < flat


def test_all_to_all_and_send_by_hand():
    net = two_levels(latency=1e-6, far=5e-6)
    # In a node: each sends 3/4 of its buffer.
    assert net.all_to_all(1e6, 4) == pytest.approx(3e-6 + 0.75e6 / 100e9)
    # Two nodes of four: 4 ranks send half of theirs over the uplink.
    assert net.all_to_all(1e6, 8) == pytest.approx(7 * 5e-6 + 4 * 0.5e6 / 50e9)
    assert net.send(1e6, 1) == pytest.approx(1e-6 + 1e6 / 100e9)
    assert net.send(1e6, 4) == pytest.approx(5e-6 + 4 * 1e6 / 50e9)


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_no_collective_beats_its_slowest_link(size, stride):
    net = two_levels(width=8, latency=3e-6, far=20e-6)
    for num_bytes in (0.0, 1e3, 1e6, 1e9):
        level = np.minimum(size, max(1, 8 // stride))
        outer = size / level
        bound = 2 * (outer - 1) / outer * num_bytes * min(stride, 8) / 50e9
        assert net.all_reduce(num_bytes, size, stride) >= bound - 1e-15
        both = net.all_gather(num_bytes, size, stride) + net.reduce_scatter(num_bytes, size, stride)
        assert both >= bound - 1e-15
        more = net.all_reduce(2 * num_bytes + 1, size, stride)
        assert more > net.all_reduce(num_bytes, size, stride)


def test_collectives_of_many_groups_at_once():
    net = two_levels(latency=3e-6, far=20e-6)
    sizes, strides = np.array([1.0, 2.0, 4.0, 8.0, 2.0]), np.array([1.0, 1.0, 1.0, 1.0, 4.0])
    for function in (net.all_reduce, net.all_gather, net.all_to_all):
        together = function(1e7, sizes, strides)
        pairs = zip(sizes, strides, strict=True)
        assert together.tolist() == pytest.approx([float(function(1e7, *pair)) for pair in pairs])


def test_levels_must_grow():
    level = LinkLevel(name="node", width=8, link=Link(rate=1e9))
    with pytest.raises(PlanError, match="no such network"):
        HierarchicalNetwork((level, level))
    with pytest.raises(PlanError, match="carries nothing"):
        HierarchicalNetwork((LinkLevel(name="node", width=8, link=Link(rate=0.0)),))


def test_a_described_cluster_as_levels():
    cluster = Cluster.of(3, 4, rate="80 Gbit/s", latency="10 us")
    net = network_of(cluster)
    assert [level.width for level in net.levels] == [4.0, math.inf]
    assert net.all_reduce(1e9, 4) == 0.0  # as fast as the machine is
    assert net.send(1e9, 4) == pytest.approx(10e-6 + 4 * 1e9 / 10e9)
    assert net.all_reduce(1e9, 12) == pytest.approx(2 * 2 * 10e-6 + 2 * 2 / 3 * 1e9 / 10e9)
    single = network_of(Cluster.of(2, 1, rate="80 Gbit/s"))
    assert single.all_reduce(1e9, 2) == pytest.approx(1e9 / 10e9)
    assert network_of(Cluster.of(1, 4)).all_reduce(1e9, 4) == 0.0
    rows = (("a", 2, 1e9), ("b", 4, 2e9), ("c", 4, 3e9))
    nodes = tuple(Node(name=name, processes=count, rate=rate) for name, count, rate in rows)
    uneven = network_of(Cluster(nodes=nodes, between=Link(rate=5e9)))
    assert [level.width for level in uneven.levels] == [2.0, math.inf]
    assert uneven.levels[1].link.rate == 1e9


# -- presets ---------------------------------------------------------------------------------------


def test_every_number_of_a_preset_has_a_source():
    plain = {"name", "source", "tiers"}  # of tiers each names its own
    measured = {"overlap": 1.0, "kinds": {}, "gather": 0.0, "host": HostOverhead()}  # of no effect
    for name in DATASHEETS:
        device = assumed_machine(name).device
        numbers = set(device.__dataclass_fields__) - plain - set(measured)
        assert numbers == set(device.source), name
        assert {key: getattr(device, key) for key in measured} == measured, name
        for level in assumed_machine(name).network.levels:
            assert {"rate", "latency"} <= set(level.source)
    for name in FITTED:
        assert "fitted" in fitted_machine(name).device.source["efficiency"]
    assert all(uplink.source for uplink in UPLINKS.values())


def test_faster_devices_are_faster():
    order = ["p100", "t4", "v100", "rtx-4090", "a100", "h100"]
    times = [float(assumed_machine(n).device.seconds_of_matmul(4096, 4096, 4096)) for n in order]
    assert times == sorted(times, reverse=True)
