"""pure: links that have drifted: which, what carries the sums then, and when it is worth a look."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import pytest

from headway.cli.main import main
from headway.cluster import Cluster, Pair
from headway.collective.all_reduce.algorithm import AllReduceOptions, PlanTree, all_reduce_program
from headway.collective.all_reduce.repacking import (
    PROBE_TIME_SHARE,
    ProbePolicy,
    all_reduce_seconds,
    find_drift,
    find_repacking,
    links_of_options,
    pairings,
    probe_bytes,
    probe_seconds,
    reconcile_measurements,
    steps_to_vote,
)
from headway.collective.packing.pack import pack
from headway.collective.program.check import check_program
from headway.collective.topology import LinkGraph, NetworkTopology
from headway.planner.collective_algorithm import choose_all_reduce
from headway.plans import ExchangePlan, Plan, data_parallel, with_collective
from headway.simulator.collective import simulate_collective
from support.link_graphs import random_graph

MIB = 2**20
RATE = 12.5e6
MESH = LinkGraph.mesh(4, RATE)
SLOW = MESH.scaled(0.1, [(1, 2)])
SIZES = [8 * MIB, 8 * MIB, MIB]


def noisy(graph, seed=0, share=0.15):
    """Rates as they are measured beside other programs: some percent too low, never alike."""
    rates = [
        [rate * (1 - share * ((7 * i + 3 * j + seed) % 5) / 4) for j, rate in enumerate(row)]
        for i, row in enumerate(graph.rates)
    ]
    return LinkGraph(tuple(map(tuple, rates)))


def found_for(cluster):
    wires = NetworkTopology.of_cluster(cluster)
    found = choose_all_reduce("auto", wires, 8 * MIB)
    return wires, found.collective, found.carrier


# -- what is done about it ---------------------------------------------------------------------


def test_noise_and_links_that_are_all_slower_change_nothing():
    """What a description says too low or too high for all links alike, too."""
    for measured in (MESH, noisy(MESH), MESH.scaled(0.3), noisy(MESH.scaled(40.0), seed=1)):
        assert (
            find_repacking("direct", AllReduceOptions(rates=MESH.rates), MESH, measured, SIZES)
            is None
        )


def test_one_of_two_measurements_may_be_disturbed():
    """A link counts as drifted where both say so, and by the milder one."""
    for first, second in ((SLOW, MESH), (MESH, SLOW), (SLOW, MESH.scaled(3.0, [(1, 2)]))):
        assert reconcile_measurements(MESH, first, second).rates == MESH.rates
    both = reconcile_measurements(MESH, SLOW.scaled(0.5), MESH.scaled(0.3, [(1, 2)]))
    assert both.rates[1][2] == pytest.approx(0.3 * RATE)
    assert both.rates[0][2] == pytest.approx(RATE)


def test_only_what_drifted_gets_another_rate():
    """At the level of the other links: these are all half as fast as described."""
    drifts, links = find_drift(MESH, noisy(SLOW.scaled(0.5)))
    assert [(d.sender, d.receiver) for d in drifts] == [(1, 2), (2, 1)]
    assert all(d.now < 0.06 * RATE and 0.4 * RATE < d.before <= 0.5 * RATE for d in drifts)
    assert {links.rates[i][j] for i, j in links.arcs if {i, j} != {1, 2}} == {drifts[0].before}
    assert [links.rates[d.sender][d.receiver] for d in drifts] == [d.now for d in drifts]


@pytest.mark.parametrize("kind", ["direct", "servers", "ring", "trees"])
def test_trees_take_the_place_of_a_program_whose_link_became_slow(kind):
    """What is predicted before and after is what the simulator plays, to some percent."""
    wires = NetworkTopology.of_cluster(Cluster.of(4, rate="100 Mbit/s", fabric="mesh"))
    carrier = choose_all_reduce(kind, wires, 8 * MIB).carrier
    assert links_of_options(carrier) == MESH
    found = find_repacking(kind, carrier, MESH, noisy(SLOW), SIZES)
    assert found.changes
    assert found.after.kind == "trees"
    now = NetworkTopology.of_links(found.links)
    for one in (found.before, found.after):
        program = all_reduce_program(one.kind, one.carrier, 4, 2 * MIB, 4)
        check_program(program)
        played = simulate_collective(program, now, 4).seconds * sum(SIZES) / SIZES[0]
        assert one.seconds == pytest.approx(played, rel=0.05)
    crossing = all_reduce_program("trees", found.after.carrier, 4, 2 * MIB, 4).sent()
    before = all_reduce_program(kind, carrier, 4, 2 * MIB, 4).sent()
    if before.get((1, 2)):
        assert crossing[1, 2] < 0.4 * before[1, 2]
    assert not ExchangePlan(collective="trees", carrier=found.after.carrier).problems(4)


def test_a_link_that_recovers_is_used_again():
    away = find_repacking("direct", AllReduceOptions(rates=MESH.rates), MESH, SLOW, SIZES)
    back = find_repacking("trees", away.after.carrier, away.links, MESH, SIZES)
    assert back.changes
    assert back.after.seconds < 0.9 * back.before.seconds
    assert find_repacking("trees", back.after.carrier, back.links, MESH, SIZES) is None


def test_what_gains_too_little_stays_and_is_said_once():
    """Small messages: what they cost to begin counts, not the links."""
    found = find_repacking("direct", AllReduceOptions(rates=MESH.rates), MESH, SLOW, [256])
    assert not found.changes
    assert list(found.sentences()) == [
        "links have drifted: rank 1 to rank 2: 10 Mbit/s, was 100 Mbit/s; "
        "rank 2 to rank 1: 10 Mbit/s, was 100 Mbit/s",
        "direct stays, 360 us for the sums of a step predicted: no trees are 10% faster",
    ]
    assert (
        find_repacking("direct", AllReduceOptions(rates=MESH.rates), found.links, SLOW, [256])
        is None
    )


def test_any_graph_is_packed_again_and_never_predicted_slower():
    for seed in range(8):
        graph = random_graph(seed, ranks=3 + seed % 3).scaled(1e7)
        packed = pack(graph, "all_reduce", attempts=2).trees
        trees = tuple(
            PlanTree(parents=tuple(-1 if p is None else p for p in tree.parent), weight=tree.weight)
            for tree in packed
        )
        drifting = [link for link in graph.links if any(link in tree.links for tree in packed)]
        away = graph.scaled(0.2, drifting[:1])
        found = find_repacking("trees", AllReduceOptions(trees=trees), graph, away, SIZES)
        if len(graph.links) == 2:  # nothing goes around: the others are the faster ones
            assert not found.changes
        assert found.after.seconds <= found.before.seconds
        check_program(all_reduce_program("trees", found.after.carrier, graph.ranks, 10_000, 4))


# -- data of the plan --------------------------------------------------------------------------


def test_links_of_their_own_are_in_the_plan_and_shared_ones_are_not(tmp_path):
    mesh = Cluster.of(4, rate="100 Mbit/s", fabric="mesh")
    slow = replace(mesh, links=(Pair(nodes=("b", "c"), rate=1.25e6),))
    wires, collective, carrier = found_for(slow)
    assert carrier.rates == wires.graph.rates == SLOW.rates
    plan = with_collective(data_parallel(16, processes=4), collective, carrier)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    shared = choose_all_reduce(
        "trees", NetworkTopology.of_cluster(Cluster.of(4, rate="1 Gbit/s")), MIB
    )
    assert shared.carrier.rates == ()


def test_wrong_rates_are_named():
    for rates in (
        ((1.0,),),
        ((0.0,) * 3,) * 3,
        ((1.0, -1.0, 0.0),) * 3,
        ((float("inf"),) * 3,) * 3,
    ):
        (problem,) = ExchangePlan(
            collective="direct", carrier=AllReduceOptions(rates=rates)
        ).problems(3)
        assert problem.startswith("exchange.carrier.rates: for 3 ranks 3 rows")


# -- when and how to look ----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(2, 10))
def test_every_link_is_alone_once(ranks):
    """In as few rounds as there can be."""
    rounds = pairings(LinkGraph.mesh(ranks))
    assert len(rounds) == ranks - 1 + ranks % 2
    assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(range(ranks), 2)]
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
    part = LinkGraph.mesh(ranks).scaled(0.0, [(0, 1)])
    assert (0, 1) not in [pair for pairs in pairings(part) for pair in pairs]


def test_a_message_is_long_enough_and_not_too_long():
    assert probe_bytes(RATE) == 1_250_000  # 0.1 s
    assert probe_bytes(1e3) == 64 * 1024
    assert probe_bytes(1e12) == 16 * MIB
    assert probe_seconds(MESH) == pytest.approx(3 * 0.1)


def votes(watch, level, most=10_000):
    """Steps of 0.1 s until it measures, when each stands still for so long."""
    return next((n for n in range(most) if watch.vote(1, 0.1, level)), most) + 1


def test_what_is_measured_costs_its_share_of_the_time():
    watch = ProbePolicy(0.2)
    assert votes(watch, 0.01) == pytest.approx(0.2 / PROBE_TIME_SHARE / 0.1, abs=2)
    for patience in (2, 4, 8, 16, 16):  # nothing was found: later and later
        watch.measured(0.1, changed=False)
        assert votes(watch, 0.01) == pytest.approx(patience * 0.1 / PROBE_TIME_SHARE / 0.1, abs=2)
    watch.measured(0.1, changed=True)
    assert votes(watch, 0.01) == pytest.approx(0.1 / PROBE_TIME_SHARE / 0.1, abs=2)


def test_lost_time_is_a_reason_to_look_at_once():
    """As soon as as much was lost as looking costs; a level that stays is then the usual one."""
    watch = ProbePolicy(0.2)
    for _ in range(20):
        assert not watch.vote(1, 0.1, 0.02)
    assert votes(watch, 0.13) == 2  # 0.1 s beyond 1.5 times the usual in each
    watch.measured(0.2, changed=False)
    assert votes(watch, 0.13) > 500
    watch.measured(0.2, changed=False)
    watch.vote(1, 0.1, 0.01)
    assert not watch.vote(1, 0.1, 0.014)
    assert watch.lost == 0


def test_clocks_are_compared_twice_a_second():
    assert [steps_to_vote(seconds) for seconds in (0.0, 1e-6, 0.01, 0.2, 5.0)] == [
        1000, 1000, 50, 2, 1,
    ]  # fmt: skip


# -- the command -------------------------------------------------------------------------------


def test_the_command_shows_what_training_would_do(tmp_path, capsys):
    (tmp_path / "mesh.toml").write_text(
        'nodes = 4\nfabric = "mesh"\nbetween = { rate = "100 Mbit/s" }\n'
    )
    words = ["collective", "show", "-c", str(tmp_path / "mesh.toml"), "-b", "8 MiB"]
    assert main([*words, "--change", "link b-c 10 Mbit/s"]) == 0
    _, told = capsys.readouterr().out.split("changed: link b-c 10 Mbit/s\n")
    *rows, after = told.splitlines()
    times = {name: tuple(times) for name, *times in map(str.split, rows)}
    assert times["ring"] == ("10.1", "s,", "was", "1.01", "s")
    assert times["halving-doubling"][:2] == ("1.01", "s,")  # never sends from b to c
    assert after.startswith("train would re-pack: trees (5 of them, in chunks of 67.9 KiB): 41")
    assert main([*words, "--change", "link b-c 0.95x"]) == 0
    assert "train" not in capsys.readouterr().out
    assert main([*words, "--change", "link b-c 0.1x", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["changed"]
    assert found["program"] == "trees"
    assert len(found["trees"]) == 5
    assert found["seconds"]["direct"] == pytest.approx(10 * 0.3355, rel=0.01)
    exact = all_reduce_seconds("direct", None, SLOW, 8 * MIB)
    assert exact == pytest.approx(found["seconds"]["direct"], rel=1e-6)


@pytest.mark.parametrize(
    ("sentence", "why"),
    [
        ("b-c 1 Mbit/s", "not a change of a link"),
        ("link b-x 1 Mbit/s", "no rank 'x'"),
        ("link b-c fast", "fast"),
        ("link b-c 0x", "above 0"),
    ],
)
def test_what_changes_no_link_is_refused(tmp_path, capsys, sentence, why):
    (tmp_path / "mesh.toml").write_text(
        'nodes = 3\nfabric = "mesh"\nbetween = { rate = "1 Gbit/s" }\n'
    )
    words = ["collective", "show", "-c", str(tmp_path / "mesh.toml"), "--change", sentence]
    assert main(words) == 1
    assert why in capsys.readouterr().err
