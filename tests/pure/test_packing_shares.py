"""pure: what surrounds packings: drift of links, channels side by side, servers, chunk sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.collective.packing.pack import drifted_links, highest_rate, pack, repack_trees
from headway.collective.packing.tree import WeightedTree
from headway.collective.topology import LinkGraph, dgx1v
from headway.errors import PlanError
from support.blink import (
    TransferChannel,
    channel_shares,
    one_hop_trees,
    servers_rate,
    trees_over_servers,
)
from support.chunk_tuner import ChunkTuner
from support.link_graphs import random_graph
from support.packings import check_packing, spans

KIB = 1024


# -- drift -----------------------------------------------------------------------------------------


def test_only_links_that_moved_far_have_drifted():
    old = LinkGraph.mesh(4, 100.0)
    new = LinkGraph.of(4, {(0, 1): 85.0, (0, 2): 115.0, (0, 3): 70.0, (1, 2): 130.0, (1, 3): 100.0})
    assert drifted_links(old, new) == ((0, 3), (1, 2), (2, 1), (2, 3), (3, 0), (3, 2))
    assert drifted_links(old, new, 0.4) == ((2, 3), (3, 2))
    assert drifted_links(new, old, 0.4)[0] == (0, 3)
    assert drifted_links(old, old) == ()


def kept(old, new):
    """How many of the new trees are old ones."""
    return len({tree.parent for tree in new.trees} & {tree.parent for tree in old.trees})


def test_a_small_drift_keeps_every_tree():
    packing = pack(dgx1v(), "broadcast")
    slower = dgx1v().scaled(0.5)
    again = repack_trees(packing, slower)
    assert [t.parent for t in again.trees] == [t.parent for t in packing.trees]
    assert again.rate == pytest.approx(3)
    assert again.graph == slower


def test_a_link_ten_times_slower_gets_new_trees_beside_old_ones():
    packing = pack(LinkGraph.mesh(4), "all_reduce")
    slow = LinkGraph.mesh(4).scaled(0.1, [(1, 2)])
    again = repack_trees(packing, slow)
    assert again.rate >= 0.99 * 1.7
    check_packing(again)
    assert kept(packing, again) == len(packing.trees)


@pytest.mark.parametrize("direction", ["broadcast", "reduce", "all_reduce"])
def test_after_any_drift_the_bound_is_reached_again(direction):
    for seed in range(20):
        graph = random_graph(seed)
        random = np.random.default_rng(seed)
        packing = pack(graph, direction, seed % graph.ranks, attempts=2)
        moved = graph.scaled(float(random.uniform(0.1, 0.6)), graph.links[:1])
        again = repack_trees(packing, moved)
        assert again.bound == highest_rate(moved, direction, seed % graph.ranks)
        assert again.rate >= 0.99 * again.bound * (1 - 1e-9)
        check_packing(again)


def test_a_link_that_is_gone_takes_its_trees_along():
    packing = pack(LinkGraph.mesh(4), "all_reduce")
    gone = LinkGraph.mesh(4).scaled(0.0, [(0, 1)])
    again = repack_trees(packing, gone)
    check_packing(again)
    assert again.rate >= 0.99 * 5 / 3
    with pytest.raises(PlanError, match="do not join"):
        repack_trees(packing, LinkGraph.mesh(4).scaled(0.0, [(0, 1), (0, 2), (0, 3)]))


# -- channels --------------------------------------------------------------------------------------


def test_two_channels_share_as_blink_writes_it():
    for num_bytes, pcie, nvlink, switch in ((1e9, 10e9, 46e9, 5e-3), (1e8, 11e9, 20e9, 1e-3)):
        formula = num_bytes * pcie / (pcie + nvlink) - switch * pcie * nvlink / (pcie + nvlink)
        found = channel_shares(num_bytes, [TransferChannel(pcie, switch), TransferChannel(nvlink)])
        assert found == pytest.approx((formula, num_bytes - formula))
        assert formula > 0
        assert found[0] / pcie + switch == pytest.approx(found[1] / nvlink)


def test_a_channel_that_starts_too_late_gets_nothing():
    assert channel_shares(
        1e6, [TransferChannel(10e9, 5e-3), TransferChannel(46e9)]
    ) == pytest.approx((0.0, 1e6))
    assert channel_shares(
        1e6, [TransferChannel(10e9), TransferChannel(46e9, 5e-3)]
    ) == pytest.approx((1e6, 0.0))
    assert channel_shares(0, [TransferChannel(1.0), TransferChannel(2.0, 1.0)]) == (0.0, 0.0)


def test_any_number_of_channels_ends_together():
    random = np.random.default_rng(0)
    for _ in range(100):
        rates, starts = random.uniform(1, 10, 5), random.uniform(0, 3, 5) * (random.random(5) < 0.7)
        num_bytes = float(random.uniform(0.1, 60))
        found = channel_shares(
            num_bytes, [TransferChannel(r, s) for r, s in zip(rates, starts, strict=True)]
        )
        assert sum(found) == pytest.approx(num_bytes)
        ends = [s + x / r for x, r, s in zip(found, rates, starts, strict=True) if x > 0]
        assert max(ends) == pytest.approx(min(ends))
        assert all(s >= max(ends) - 1e-9 for x, s in zip(found, starts, strict=True) if x == 0)


@pytest.mark.parametrize("channels", [[], [TransferChannel(0.0)], [TransferChannel(1.0, -1.0)]])
def test_channels_without_a_rate_are_refused(channels):
    with pytest.raises(PlanError, match="cannot share"):
        channel_shares(1.0, channels)


# -- switches and servers --------------------------------------------------------------------------


def traffic(trees, ranks):
    """What each pair (i, j) carries of an all-reduce of 1."""
    found = np.zeros((ranks, ranks))
    for tree in trees:
        for rank, up in enumerate(tree.parent):
            if up is not None:
                found[up, rank] += tree.weight
                found[rank, up] += tree.weight
    return found


def test_on_a_switch_every_rank_carries_the_same():
    trees = one_hop_trees(16)
    assert sum(tree.weight for tree in trees) == pytest.approx(1)
    assert {tree.depth for tree in trees} == {1}
    sent = traffic(trees, 16).sum(axis=1)
    assert sent == pytest.approx(np.full(16, 2 * 15 / 16))


def test_three_phases_over_uneven_servers():
    """Eight ranks on three servers: four, three and one."""
    members = [[0, 1, 2, 3], [4, 5, 6], [7]]
    graphs = [dgx1v().part([0, 1, 2, 3]), dgx1v().part([0, 1, 2])]
    packings = [pack(graph, "all_reduce") for graph in graphs]
    local = [packing.trees for packing in packings] + [(WeightedTree((None,), 1.0),)]
    trees = trees_over_servers(members, local)
    assert sum(tree.weight for tree in trees) == pytest.approx(1)
    assert all(spans(tree.parent) for tree in trees)
    load = traffic(trees, 8)
    for own, packing in zip(members, packings, strict=False):
        inside = load[np.ix_(own, own)] * packing.rate
        assert (inside <= np.array(packing.graph.rates) + 1e-9).all()
    server = np.array([0, 0, 0, 0, 1, 1, 1, 2])
    for number in range(3):
        sent = load[server == number][:, server != number].sum()
        assert sent == pytest.approx(2 * 2 / 3)  # 2 (S - 1) / S of the data
    assert servers_rate([3.0, 2.0, math.inf], 1.0) == pytest.approx(3 / 4)
    assert servers_rate([3.0, 2.0, math.inf], 10.0) == 2.0
    assert servers_rate([3.0], 1.0) == 3.0


def test_roots_of_a_part_reach_each_other_in_one_hop():
    local = pack(dgx1v(), "all_reduce").trees
    trees = trees_over_servers([[*range(8)], [*range(8, 16)]], [local, local])
    assert len(trees) == 2 * len(local)
    for tree in trees:
        across = [
            (r, up) for r, up in enumerate(tree.parent) if up is not None and r // 8 != up // 8
        ]
        assert len(across) == 1
        assert across[0][1] == tree.root
        assert tree.depth <= 1 + max(own.depth for own in local)


def test_trees_that_do_not_belong_to_the_servers_are_refused():
    pair = (WeightedTree((None, 0), 1.0),)
    for members, local, text in (
        ([[0, 1]], [pair, pair], "trees of 2"),
        ([[0, 1], [1, 2]], [pair, pair], "once"),
        ([[0, 1], [2]], [pair, pair], "server 1 has 1 ranks"),
        ([[0, 1], [2]], [pair, ()], "server 1"),
    ):
        with pytest.raises(PlanError, match=text):
            trees_over_servers(members, local)


# -- chunk sizes -----------------------------------------------------------------------------------

SWEEP = [16 * KIB * 2**k for k in range(9)]


def throughput(chunk, num_bytes, rate, latency, depth):
    """Of a pipeline: (chunks + depth - 1) slots of latency + bytes / rate."""
    chunks = math.ceil(num_bytes / chunk)
    return num_bytes / ((chunks + depth - 1) * (latency + num_bytes / chunks / rate))


def tuned(measure):
    tuner = ChunkTuner()
    while (chunk := tuner.next) is not None:
        tuner = tuner.after(measure(chunk))
    assert len(tuner.measured) <= 12
    assert len({chunk for chunk, _ in tuner.measured}) == len(tuner.measured)
    return tuner


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_tuner_ends_near_the_best_of_a_sweep(noise):
    random = np.random.default_rng(5)
    for _ in range(300):
        link = (
            int(2 ** random.uniform(18, 28)),
            10 ** random.uniform(6.5, 10.5),
            10 ** random.uniform(-6, -3),
            int(random.integers(1, 15)),
        )
        tuner = tuned(lambda c, x=link: throughput(c, *x) * np.exp(noise * random.normal()))
        best = max(throughput(chunk, *link) for chunk in SWEEP)
        assert throughput(tuner.best, *link) >= 0.9 * best


def test_the_tuner_doubles_then_steps_down_by_eighths():
    def probed(peak):
        tuner = tuned(lambda chunk: 10 - abs(math.log(chunk / (peak * KIB))))
        return [chunk // KIB for chunk, _ in tuner.measured], tuner.best // KIB

    assert probed(400) == ([64, 128, 256, 512, 1024, 448, 384, 320], 384)
    assert probed(512) == ([64, 128, 256, 512, 1024, 2048, 448], 512)  # the first step is worse


def test_the_tuner_halves_where_the_first_chunk_is_too_large():
    tuner = tuned(lambda chunk: 1e9 / (chunk + 256 * KIB * KIB / chunk))
    assert tuner.best <= 32 * KIB


def test_the_tuner_keeps_its_limits():
    tuner = ChunkTuner(smallest=32 * KIB, largest=128 * KIB)
    while tuner.next is not None:
        assert 32 * KIB <= tuner.next <= 128 * KIB
        tuner = tuner.after(float(tuner.next))
    assert tuner.best == 128 * KIB
    with pytest.raises(ValueError, match="done"):
        tuner.after(1.0)
    assert ChunkTuner(largest=1000).next == 1000
