"""pure: programs on wires: fair sharing, closed forms, bounds, the choice, the command."""

from __future__ import annotations

import json
import random
from typing import get_args

import pytest

from headway.cli.main import main
from headway.cluster import Cluster, Level, Link, Node, Pair, read_cluster, to_toml
from headway.collective.generators import (
    chain,
    direct,
    halving_doubling,
    hierarchical,
    ring,
    servers,
    star,
    trees,
)
from headway.collective.generators.rings import ring_order
from headway.collective.nodes import Nodes
from headway.collective.program.check import check_program
from headway.collective.program.program import CollectiveTask, Op
from headway.collective.topology import LinkGraph, NetworkTopology, dgx1v
from headway.errors import PlanError, UsageError
from headway.planner.collective_algorithm import (
    INTERPRETED,
    PROGRAMS,
    collective_lower_bound,
    parse_wires,
    price_programs,
)
from headway.simulator.collective import FREE_HOST, HostCosts, simulate_collective
from headway.simulator.engine import MaxMinSharing, TaskProgram, run_tasks
from support.golden import check_golden
from support.link_graphs import SLOW_MESH
from support.sampling import sampled

RATE = 12.5e6
"""100 Mbit/s in bytes per second."""


def switch(nodes, processes=1, latency="0 s"):
    return NetworkTopology.of_cluster(
        Cluster.of(nodes, processes, rate="100 Mbit/s", latency=latency)
    )


def mesh(nodes):
    return NetworkTopology.of_cluster(Cluster.of(nodes, rate="100 Mbit/s", fabric="mesh"))


def seconds(program, wires, **facts):
    check_program(program)
    return simulate_collective(program, wires, **facts).seconds


# -- sharing -----------------------------------------------------------------------------------


def flows(rates, *each):
    """Ends of flows (lane, wires, amount), all ready at 0."""
    tasks = TaskProgram()
    wires = [tasks.stream(0, "wire", rate=rate) for rate in rates]
    lanes = [tasks.stream(0, "link") for _ in each]
    numbers = [
        tasks.flow("flow", lanes[lane], [wires[w] for w in crossed], amount)
        for lane, crossed, amount in each
    ]
    played = run_tasks(tasks)
    return [played.ends[number] for number in numbers]


def test_flows_on_one_wire_share_it_until_one_ends():
    assert flows([2.0], (0, [0], 2.0), (1, [0], 4.0)) == [2.0, 3.0]


def test_a_flow_held_up_elsewhere_leaves_its_share_to_others():
    # the second wire carries 4: 1/2 for the first flow, which the first wire limits, 7/2 for the
    # third
    assert flows([1.0, 4.0], (0, [0, 1], 1.0), (1, [0], 1.0), (2, [1], 7.0)) == [2.0, 2.0, 2.0]


def test_flows_of_one_lane_follow_each_other():
    assert flows([1.0], (0, [0], 1.0), (0, [0], 2.0)) == [1.0, 3.0]
    assert flows([1.0, 1.0], (0, [0], 1.0), (0, [1], 2.0)) == [1.0, 3.0]


def test_a_flow_needs_a_wire():
    tasks = TaskProgram()
    lane = tasks.stream(0, "link")
    with pytest.raises(ValueError, match="streams with a rate"):
        tasks.flow("flow", lane, [lane], 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_flow_can_have_more_without_taking_from_a_poorer_one(seed):
    draw = random.Random(seed)
    rates = {wire: draw.uniform(1, 9) for wire in range(6)}
    sharing = MaxMinSharing(rates)
    crossed = {n: draw.sample(range(6), draw.randrange(1, 4)) for n in range(12)}
    for number, wires in crossed.items():
        sharing.join(0.0, number, (100 + number, *wires), 1.0)
    ends = {number: end for end, number, _ in sharing.solve()}
    got = {number: 1.0 / end for number, end in ends.items()}
    load = {w: sum(got[n] for n, wires in crossed.items() if w in wires) for w in rates}
    assert all(load[w] <= rates[w] * (1 + 1e-9) for w in rates)
    for number, wires in crossed.items():
        assert any(
            load[w] >= rates[w] * (1 - 1e-9)
            and all(got[m] <= got[number] * (1 + 1e-9) for m, ws in crossed.items() if w in ws)
            for w in wires
        )


# -- closed forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_ring_and_direct_on_a_switch(n):
    late = 1e-3
    c = CollectiveTask.of("all_reduce", n, 840 * n)
    wire = 2 * (n - 1) / n * c.elements * 4 / RATE
    wires = switch(n, latency="1 ms")
    assert seconds(ring(c), wires) == pytest.approx(wire + 2 * (n - 1) * late)
    assert seconds(direct(c), wires) == pytest.approx(wire + 2 * late)
    if n in (2, 4, 8):
        doubling = {2: 1, 4: 2, 8: 3}[n]
        assert seconds(halving_doubling(c), wires) == pytest.approx(wire + 2 * doubling * late)
    for op in ("reduce_scatter", "all_gather", "all_to_all"):
        c = CollectiveTask.of(op, n, 840 * n)
        assert seconds(direct(c), wires) == pytest.approx(wire / 2 + late)


def test_levels_send_less_between_nodes():
    wires = switch(2, 4)
    c = CollectiveTask.of("all_reduce", 8, 8000)
    flat = seconds(direct(c), wires)
    assert flat == pytest.approx(4 * c.elements * 4 / RATE)  # 2 x 4 x 4 eighths leave a node
    assert seconds(hierarchical(c, wires.nodes), wires) == pytest.approx(c.elements * 4 / RATE)


def test_one_server_has_to_take_in_everything():
    c = CollectiveTask.of("all_reduce", 5, 16000)
    once = 4 * c.elements * 4 / RATE  # in and out of the server at the same time, in 16 chunks
    assert seconds(servers(c, [2]), switch(5)) == pytest.approx(once * 17 / 16)
    shared = seconds(servers(c), switch(5))
    assert shared == pytest.approx(2 * 4 / 5 * c.elements * 4 / RATE, rel=0.15)


@pytest.mark.parametrize("chunks", [4, 16, 64])
def test_a_tree_fills_like_a_pipe(chunks):
    for tree, depth in ((star(4, 0), 1), (chain(range(4)), 3), ((None, 0, 1, 0), 2)):
        for op, steps in (("all_reduce", 2 * depth), ("broadcast", depth), ("reduce", depth)):
            c = CollectiveTask.of(op, 4, 6400)
            program = trees(c, [(tree, 1.0)], chunk=6400 // chunks)
            wanted = (chunks + steps - 1) / chunks * 6400 * 4 / RATE
            assert seconds(program, mesh(4)) == pytest.approx(wanted)


def test_two_packed_trees_are_three_rings_on_a_mesh_of_four():
    c = CollectiveTask.of("all_reduce", 4, 2**20)
    weighted = [((None, 0, 0, 1), 1.0), ((3, 2, 3, None), 1.0)]  # no link in common
    program = trees(c, weighted, chunk=2**12)
    played = simulate_collective(program, mesh(4))
    assert played.seconds == pytest.approx(c.elements * 4 / (2 * RATE), rel=0.05)
    assert seconds(ring(c), mesh(4)) == pytest.approx(1.5 * c.elements * 4 / RATE)


def test_what_ranks_add_and_copy_counts():
    c = CollectiveTask.of("all_reduce", 2, 1000)
    host = HostCosts(combine=1e3, copy=1e3, overhead=0.5)
    # begin two messages, send half, add half; again, without the sum
    wanted = 2 * (2 * 0.5 + 2000 / RATE) + 2000 / 1e3
    assert seconds(direct(c), switch(2), host=host) == pytest.approx(wanted)


# -- networks ----------------------------------------------------------------------------------


def test_wires_of_a_switch_a_mesh_and_levels():
    two = switch(2, 2)
    assert [w.name for w in two.wires] == ["a out", "b in", "b out", "a in"]
    assert two.ways[0, 1].wires == ()  # inside nothing is said
    assert two.ways[0, 2].wires == two.ways[1, 3].wires == (0, 1)
    assert two.shared
    assert two.names == ("a.0", "a.1", "b.0", "b.1")
    assert len(mesh(4).wires) == 12
    assert not mesh(4).shared
    levels = (
        Level(name="node", nodes=1, rate=8e9),
        Level(name="rack", nodes=2, rate=4e9, oversubscription=2.0),
        Level(name="all", rate=1e9, latency=1e-3),
    )
    names = tuple(Node(name=name) for name in "abcd")
    racks = NetworkTopology.of_cluster(Cluster(nodes=names, processes=2, levels=levels))
    for pair, rate in (((0, 1), 8e9), ((0, 2), 2e9), ((0, 4), 1e9)):
        assert {racks.wires[w].rate for w in racks.ways[pair].wires} == {rate}
    assert racks.ways[0, 4].wires == racks.ways[3, 7].wires  # racks share one wire
    assert racks.ways[0, 4].latency == 1e-3


def test_links_that_are_not_there(tmp_path):
    path = tmp_path / "line.toml"
    path.write_text(
        'nodes = 3\nfabric = "links"\n'
        '[[links]]\nnodes = ["a", "b"]\nrate = "1 GB/s"\n'
        '[[links]]\nnodes = ["b", "c"]\nrate = "2 GB/s"\n'
    )
    cluster = read_cluster(path)
    assert 'fabric = "links"' in to_toml(cluster)
    wires = NetworkTopology.of_cluster(cluster)
    assert sorted(wires.ways) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    c = CollectiveTask.of("all_reduce", 3, 1000)
    with pytest.raises(PlanError, match="nothing joins rank 0 and rank 2"):
        simulate_collective(direct(c), wires)
    found, refused = price_programs(c, wires)
    assert [one.name for one in found] == ["trees"]
    assert refused["ring"].startswith("no ring of links joins all 3 ranks")


def test_a_ring_goes_round_the_slow_link():
    slow = LinkGraph.of(4, {(0, 1): 0.1, (0, 2): 1, (0, 3): 1, (1, 2): 1, (1, 3): 1, (2, 3): 1})
    order = ring_order(slow)
    assert all(slow.rates[a][b] == 1 for a, b in zip(order, (*order[1:], 0), strict=True))
    assert ring_order(LinkGraph.mesh(5)) == (0, 1, 2, 3, 4)
    assert set(ring_order(dgx1v())) == set(range(8))


# -- bounds ------------------------------------------------------------------------------------


def test_bounds_of_the_literature():
    size = 4 * 4000
    c = CollectiveTask.of("all_reduce", 4, 4000)
    assert collective_lower_bound(c, switch(4)) == pytest.approx(1.5 * size / RATE)
    assert collective_lower_bound(c, mesh(4)) == pytest.approx(size / (2 * RATE))
    assert collective_lower_bound(c, switch(2, 2)) == pytest.approx(size / RATE)
    slow = NetworkTopology.of_cluster(
        Cluster(
            nodes=Cluster.of(4).nodes,
            between=Link(rate=1.0),
            links=(Pair(nodes=("a", "b"), rate=0.1),),
            fabric="mesh",
        )
    )
    assert collective_lower_bound(c, slow) == pytest.approx(size / 1.7)
    assert collective_lower_bound(
        CollectiveTask.of("broadcast", 4, 4000), switch(4)
    ) == pytest.approx(size / RATE)
    assert collective_lower_bound(CollectiveTask.of("reduce", 4, 4000), mesh(4)) == pytest.approx(
        size / RATE / 3
    )
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        some = collective_lower_bound(CollectiveTask.of(op, 4, 4000), switch(4))
        assert some == pytest.approx(0.75 * size / RATE)
    big = CollectiveTask.of("all_reduce", 8, 1000)
    assert collective_lower_bound(big, NetworkTopology.of_links(dgx1v())) == pytest.approx(
        4000 * 7 / 24
    )
    assert collective_lower_bound(CollectiveTask.of("all_reduce", 1, 9), switch(1)) == 0


@pytest.mark.parametrize("seed", sampled(range(8), 2))
def test_nothing_is_played_below_its_bound(seed):
    draw = random.Random(seed)
    counts = [draw.randrange(1, 3) for _ in range(draw.randrange(2, 4))]
    nodes = tuple(
        Node(name=name, processes=count, rate=draw.uniform(1, 9))
        for name, count in zip("abc", counts, strict=False)
    )
    cluster = Cluster(
        nodes=nodes,
        inside=Link(rate=draw.uniform(5, 20)),
        between=Link(rate=draw.uniform(1, 5)),
        fabric=draw.choice(["switch", "mesh"]),
    )
    wires = NetworkTopology.of_cluster(cluster)
    if wires.ranks < 2:
        return
    for op in get_args(Op):
        found, _ = price_programs(
            CollectiveTask.of(op, wires.ranks, draw.randrange(40, 400)), wires
        )
        for one in found:
            assert one.share <= 1 + 1e-9, (op, one.name)
            wire = one.played.busiest()
            if wire is not None:
                busy = one.played.loads()[wire] / wires.wires[wire].rate
                assert one.seconds >= busy * (1 - 1e-9)


@pytest.mark.slow
def test_each_program_is_the_best_somewhere():
    def best(op, size, wires, host=FREE_HOST):
        found, _ = price_programs(CollectiveTask.of(op, wires.ranks, size), wires, host=host)
        return found[0].name, {one.name: one.seconds for one in found}

    assert best("all_reduce", 8, switch(4, latency="1 ms"))[0] == "direct"
    assert best("all_to_all", 1024, switch(4))[0] == "direct"
    assert best("reduce_scatter", 2**10, switch(2, 4))[0] == "hierarchical"
    name, times = best("all_reduce", 2**12, switch(2, 4, latency="1 ms"))
    assert times["hierarchical"] == pytest.approx(times[name])
    assert times["direct"] > 2 * times[name]
    costly = HostCosts(overhead=0.01)  # then whoever begins fewer messages is faster
    assert best("all_reduce", 8, switch(4, latency="1 ms"), costly)[0] != "direct"


def test_the_choice_is_a_program_that_is_right():
    wires = NetworkTopology.of_cluster(Cluster.of(2, 2, rate="1 Gbit/s"))
    task = CollectiveTask.of("reduce_scatter", 4, 1000)
    program = price_programs(task, wires, host=INTERPRETED)[0][0].program
    check_program(program)
    assert (program.elements, program.ranks) == (1000, 4)
    assert program == price_programs(task, wires, host=INTERPRETED)[0][0].program


def test_equal_programs_are_chosen_by_their_messages():
    found, _ = price_programs(CollectiveTask.of("all_reduce", 4, 4000), switch(4))
    near = [one.program.messages() for one in found if one.share > 0.999999]
    assert near == sorted(near)


# -- the command -------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    path = tmp_path / "mesh.toml"
    path.write_text(SLOW_MESH)
    svg, png = tmp_path / "x.svg", tmp_path / "x.png"
    words = ["collective", "show", "--cluster", str(path), "--bytes", "2 MiB"]
    assert main([*words, "--svg", str(svg), "--png", str(png)]) == 0
    text = capsys.readouterr().out.replace(str(path), "mesh.toml")
    check_golden("cli/collective_show.txt", text)
    assert "of the bound" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--json", "--programs", "servers,ring"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["program"] for one in found["programs"]] == ["ring", "servers"]
    assert 0.3 < found["programs"][0]["share_of_bound"] < 0.5
    assert len(found["programs"][1]["trees"]) == 4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--programs", "rings"], "no program 'rings'; did you mean ring?"),
        (["--bytes", "many"], "--bytes many"),
        (["--root", "1"], "--root 1: all_reduce of 4 ranks"),
        (["--op", "broadcast", "--root", "4"], "--root 4: broadcast of 4 ranks"),
        (["--op", "all_to_all", "--programs", "ring"], "no program carries out all_to_all here"),
        (["--element", "0"], "at least 1 byte"),
    ],
)
def test_what_the_command_refuses(words, why, tmp_path, capsys):
    path = tmp_path / "c.toml"
    path.write_text('nodes = 4\nbetween = { rate = "1 Gbit/s" }\n')
    assert main(["collective", "show", "-c", str(path), *words]) in (1, 2)
    assert why in capsys.readouterr().err


def test_published_machines_by_name():
    assert parse_wires("dgx-1p").wires[0].rate == 20e9
    assert len(parse_wires("dgx-1v").wires) == 32
    assert next(iter(PROGRAMS)) == "ring"
    with pytest.raises(UsageError):
        parse_wires("dgx-1x")
    assert parse_wires("cpu", nodes=2).nodes == Nodes(((0, 1), (2, 3)))
