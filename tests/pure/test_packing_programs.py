"""pure: packings become programs that deliver everything, at the rate of the packing."""

from __future__ import annotations

import pytest

from headway.collective.generators import trees
from headway.collective.packing.pack import pack
from headway.collective.program.check import program_problems
from headway.collective.program.program import CollectiveTask
from headway.collective.topology import LinkGraph, NetworkTopology, dgx1p, dgx1v
from headway.simulator.collective import simulate_collective
from support.blink import TransferChannel, channel_shares, one_hop_trees, trees_over_servers
from support.link_graphs import random_graph
from support.packings import packing_loads

DIRECTIONS = ("broadcast", "reduce", "all_reduce")


def program_of(packing, elements, *, chunk=None):
    root = None if packing.direction == "all_reduce" else packing.trees[0].root
    collective = CollectiveTask.of(packing.direction, packing.graph.ranks, elements, root=root)
    return trees(collective, [(t.parent, t.weight) for t in packing.trees], chunk=chunk)


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_packings_become_programs_that_deliver_everything(direction, ranks):
    """All roots; sizes below the number of trees, odd ones, with and without chunks."""
    for root in range(1 if direction == "all_reduce" else ranks):
        graph = random_graph(10 * ranks + root, ranks)
        packing = pack(graph, direction, root, attempts=1)
        for elements, chunk in ((0, None), (1, None), (3, 1), (61, 7), (101, None)):
            assert program_problems(program_of(packing, elements, chunk=chunk)) == ()


def test_trees_of_servers_and_switches_become_programs():
    local = [pack(dgx1v().part(part), "all_reduce").trees for part in ([0, 1, 2], [4, 5])]
    for joined in (trees_over_servers([[0, 1, 2], [3, 4]], local), one_hop_trees(5)):
        weighted = [(tree.parent, tree.weight) for tree in joined]
        for elements in (2, 77):
            program = trees(CollectiveTask.of("all_reduce", 5, elements), weighted)
            assert program_problems(program) == ()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "graph",
    [
        LinkGraph.mesh(4),
        LinkGraph.mesh(4).scaled(0.1, [(1, 2)]),
        dgx1p(),
        dgx1v(),
        dgx1v().part(range(6)),
    ],
    ids=["mesh", "one slow", "dgx-1p", "dgx-1v", "six"],
)
def test_a_program_reaches_the_rate_of_its_packing(graph, direction):
    """Seconds are bytes / rate, and the time in which the pipeline fills: of c chunks on trees of
    depth d (2 d for up and down) d / c of it."""
    packing = pack(graph, direction, tolerance=0.0)
    elements, chunks = 1 << 22, 64
    largest = packing.fractions[0] * elements
    program = program_of(packing, elements, chunk=int(largest / chunks))
    played = simulate_collective(program, NetworkTopology.of_links(graph), 1)
    least = elements / packing.rate
    fill = packing.depth * (2 if direction == "all_reduce" else 1) / chunks
    assert least * (1 - 1e-6) <= played.seconds <= least * (1 + 2 * fill)
    for (i, j), load in packing_loads(packing).items():
        sent = program.sent().get((i, j), 0)
        assert sent == pytest.approx(load / packing.rate * elements, abs=2 * len(packing.trees))


def test_two_channels_end_together_when_their_trees_are_played():
    """NVLink and, switched on later, PCIe: both within 5 % of one moment."""
    nvlink = dgx1v(25e9).part(range(4))
    pcie, switch, num_bytes = LinkGraph.of(4, {(i, i + 1): 10e9 for i in range(3)}), 4e-4, 1 << 26
    packings = [pack(graph, "broadcast") for graph in (nvlink, pcie)]
    parts = channel_shares(
        num_bytes, [TransferChannel(packings[0].rate), TransferChannel(packings[1].rate, switch)]
    )
    assert min(parts) > 0
    ends = []
    for packing, part, start in zip(packings, parts, (0.0, switch), strict=True):
        program = program_of(packing, int(part), chunk=int(part) // 256)
        wires = NetworkTopology.of_links(packing.graph)
        ends.append(start + simulate_collective(program, wires, 1).seconds)
    assert max(ends) <= 1.05 * min(ends)
    alone = num_bytes / packings[0].rate
    assert max(ends) < 0.98 * alone
