"""pure: the program that carries a plan's sums: found for a network, kept as data, priced."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest

from headway.api.plan_selection import CollectiveOption
from headway.cli.main import main
from headway.cluster import Cluster, Pair, to_toml
from headway.collective.all_reduce.algorithm import (
    ALL_REDUCE_KINDS,
    AllReduceOptions,
    PlanTree,
    all_reduce_program,
    all_reduce_traffic,
    program_fingerprint,
)
from headway.collective.compression import parse_compression
from headway.collective.model.bucket_cost import ExchangeNetwork, ExchangeScheme, bucket_traffic
from headway.collective.model.link_fit import LinkFit
from headway.collective.model.scheme_ranking import GradientLayer, predict_exchange
from headway.collective.nodes import Nodes
from headway.collective.program.check import check_program
from headway.collective.topology import NetworkTopology
from headway.documents import to_type
from headway.errors import DocumentError, PlanError, UsageError
from headway.planner.collective_algorithm import (
    INTERPRETED,
    choose_all_reduce,
    fit_all_reduce,
    price_programs,
)
from headway.plans import ExchangePlan, Plan, data_parallel, explain, pipelined, with_collective
from headway.plans.layer_split import LayerSplit
from headway.run.training.run_directory import RunDirectory
from headway.simulator.collective import FREE_HOST, simulate_collective
from headway.simulator.exchange import price_exchange
from support.sampling import sampled

MIB = 2**20
MESH = Cluster.of(4, rate="100 Mbit/s", fabric="mesh")
SLOW = replace(MESH, links=(Pair(nodes=("b", "c"), rate=1.25e6),))
CLUSTERS = {
    "mesh": MESH,
    "slow link": SLOW,
    "switch": Cluster.of(4, rate="1 Gbit/s"),
    "two nodes": Cluster.of(2, 4, rate="1 Gbit/s"),
    "two ranks": Cluster.of(2, rate="100 Mbit/s"),
}
CARRIERS: dict[str, AllReduceOptions | None] = {
    "ring": AllReduceOptions(order=(2, 0, 1), chunk="64 B"),
    "direct": None,
    "halving-doubling": None,
    "servers": AllReduceOptions(chunk="48 B"),
    "trees": AllReduceOptions(
        trees=(PlanTree(parents=(-1, 0, 1), weight=2.0), PlanTree(parents=(2, 2, -1), weight=0.5))
    ),
}


@pytest.mark.parametrize("name", sampled([*CLUSTERS], 2))
def test_auto_is_what_a_comparison_of_all_programs_names(name):
    wires = NetworkTopology.of_cluster(CLUSTERS[name])
    for size in (64 * 1024, 8 * MIB):
        found = choose_all_reduce("auto", wires, size)
        rows, _ = price_programs(found.chosen.program.collective, wires, host=INTERPRETED)
        assert found.chosen.name == rows[0].name
        assert found.chosen.seconds == rows[0].seconds
        expected = {"ring": "all_reduce"}.get(rows[0].name, rows[0].name)
        assert found.collective in (rows[0].name, expected)
        if found.collective not in ALL_REDUCE_KINDS:
            assert found.carrier is None
            continue
        made = all_reduce_program(found.collective, found.carrier, wires.ranks, size // 4, 4)
        check_program(made)
        played = simulate_collective(made, wires, 4, host=INTERPRETED).seconds
        assert played == pytest.approx(rows[0].seconds, rel=0.01)  # sizes of chunks are rounded


def test_the_slow_link_gets_trees_and_a_ring_goes_around_it():
    wires = NetworkTopology.of_cluster(SLOW)
    assert choose_all_reduce("auto", wires, 8 * MIB).collective == "trees"
    ring = choose_all_reduce("ring", wires, 8 * MIB)
    assert ring.carrier is not None
    assert sorted(ring.carrier.order) == [0, 1, 2, 3]
    pairs = {*zip(ring.carrier.order, ring.carrier.order[1:] + ring.carrier.order[:1], strict=True)}
    assert not pairs & {(1, 2), (2, 1)}


@pytest.mark.parametrize("kind", ALL_REDUCE_KINDS)
def test_traffic_is_that_of_the_steps_of_every_size(kind):
    """Flags included, and in global ranks; of 16 bits half of it."""
    nodes = Nodes(((1, 4), (6,)))
    for shapes in ([(3,)], [(40, 64), (33,)], [(1,), (1,)]):
        elements = sum(len(range(s[0])) * (s[1] if len(s) > 1 else 1) + 1 for s in shapes)
        program = all_reduce_program(kind, CARRIERS[kind], 3, elements, 4)
        check_program(program)
        traffic = bucket_traffic(shapes, nodes, collective=kind, carrier=CARRIERS[kind])
        ranks = (1, 4, 6)
        assert traffic.sent == {
            (ranks[a], ranks[b]): size for (a, b), size in program.traffic(4).sent.items()
        }
        half = bucket_traffic(
            shapes,
            nodes,
            collective=kind,
            carrier=CARRIERS[kind],
            compression=parse_compression("fp16"),
        )
        assert half.total == traffic.total / 2
    with pytest.raises(ValueError, match="int8"):
        all_reduce_traffic(kind, CARRIERS[kind], (0, 1, 2), 10, parse_compression("int8"))
    assert not all_reduce_traffic(kind, None, (3,), 10).sent


def test_a_plan_keeps_its_program(tmp_path):
    found = choose_all_reduce("auto", NetworkTopology.of_cluster(SLOW), 8 * MIB)
    plain = data_parallel(16, processes=4)
    plan = with_collective(plain, found.collective, found.carrier)
    assert plan.hash != plain.hash
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads(plan.to_json())["exchange"]["collective"] == "trees"
    assert "by trees (5 of them, in chunks of" in explain(plan)
    assert plan.exact


def test_a_recipe_may_name_one():
    table = tomllib.loads('collective = "ring"\ncarrier = { order = [1, 0, 2], chunk = "1 MiB" }')
    exchange = to_type(table, ExchangePlan, where="recipe.toml")
    assert exchange.carrier == AllReduceOptions(order=(1, 0, 2), chunk="1 MiB")
    assert not exchange.problems(3)


def tree(*parents, weight=1.0):
    return AllReduceOptions(trees=(PlanTree(parents=parents, weight=weight),))


PROBLEMS = {
    "no trees": (ExchangePlan(collective="trees"), "carrier.trees is missing"),
    "ranks": (
        ExchangePlan(collective="trees", carrier=tree(-1, 0)), "parents of 2 ranks; there are 3"
    ),
    "a circle": (ExchangePlan(collective="trees", carrier=tree(-1, 2, 1)), "rank 1 never reaches"),
    "two roots": (ExchangePlan(collective="trees", carrier=tree(-1, -1, 0)), "one is -1, the root"),
    "weight": (ExchangePlan(collective="trees", carrier=tree(-1, 0, 0, weight=0.0)), "weight 0"),
    "order": (
        ExchangePlan(collective="ring", carrier=AllReduceOptions(order=(0, 1, 1))),
        "order [0, 1, 1] is no order of ranks 0 to 2",
    ),
    "chunk": (
        ExchangePlan(collective="ring", carrier=AllReduceOptions(chunk="many")),
        "exchange.carrier.chunk",
    ),
    "no such entry": (
        ExchangePlan(collective="direct", carrier=AllReduceOptions(chunk="1 MiB")),
        "carrier.chunk: collective direct has none",
    ),
    "no program": (ExchangePlan(carrier=AllReduceOptions(chunk="1 MiB")), "it is all_reduce"),
}  # fmt: skip


@pytest.mark.parametrize("what", PROBLEMS)
def test_a_carrier_that_cannot_be_is_named(what):
    exchange, text = PROBLEMS[what]
    problems = exchange.problems(3)
    assert len(problems) == 1
    assert text in problems[0]


def test_plans_whose_sums_something_else_has_are_refused():
    carrier = choose_all_reduce("direct", NetworkTopology.of_cluster(MESH), MIB)
    for plan, text in (
        (data_parallel(8, processes=4, zero=1), "with memory.zero 1"),
        (data_parallel(8, processes=4, split=LayerSplit(tensor=(2,))), "with split.tensor"),
        (pipelined(8, processes=4, stages=2, microbatch=2), "copies of a pipeline's stages"),
    ):
        with pytest.raises(PlanError) as caught:
            with_collective(plan, carrier.collective, carrier.carrier)
        assert text in str(caught.value)


def test_the_price_is_that_of_the_played_program():
    """On links of their own with one slow, an exchange by trees is as much faster than the ring as
    the programs are; and its bytes are the steps'."""
    wires = NetworkTopology.of_cluster(SLOW)
    trees = choose_all_reduce("trees", wires, 8 * MIB)
    fit = fit_all_reduce(trees.collective, trees.carrier, wires, host=FREE_HOST)
    played = simulate_collective(
        all_reduce_program("trees", trees.carrier, 4, 2 * MIB, 4), wires, 4, host=FREE_HOST
    ).seconds
    assert fit.seconds(8 * MIB) == pytest.approx(played, rel=0.05)
    slow = LinkFit.of_rate(1.25e6, 0.0, 4)
    network = ExchangeNetwork(slow, wires.nodes, carried=fit)
    layers = [GradientLayer(name=f"{n}", shapes=((512, 1024),), backward=1e-3) for n in range(4)]
    exchange = ExchangePlan(collective="trees", carrier=trees.carrier)
    price = price_exchange(exchange, layers, network)
    plain = price_exchange(ExchangePlan(), layers, network)
    assert plain.predicted.isolated / price.predicted.isolated == pytest.approx(
        slow.seconds(8 * MIB) / fit.seconds(8 * MIB), rel=0.05
    )
    assert price.predicted.link == fit
    own = predict_exchange(
        ExchangeScheme(collective="trees", carrier=trees.carrier, bucket=MIB), layers, network, {}
    )
    assert own.traffic.total == pytest.approx(price.predicted.traffic.total, rel=1e-5)


def test_ways_are_compared_on_a_cluster(tmp_path, capsys):
    """By trees the sums of a mesh with a slow link take a small part of the ring's time."""
    times = ("--forward", "100 ms", "--backward", "200 ms", "--json")
    (tmp_path / "slow.toml").write_text(to_toml(SLOW))
    main(["exchange", "compare", "--cluster", str(tmp_path / "slow.toml"), *times])
    rows = {row["exchange"]: row for row in json.loads(capsys.readouterr().out)}
    trees, ring = rows["fitted buckets, trees"], rows["fitted buckets"]
    assert trees["exact"]
    assert trees["plan"]["carrier"]["trees"]
    assert ring["isolated"] > 10 * trees["isolated"]
    assert rows["priority, trees"]["step"] <= trees["step"]


def test_a_fingerprint_names_what_is_done():
    programs = [all_reduce_program(kind, CARRIERS[kind], 3, 100, 4) for kind in ALL_REDUCE_KINDS]
    assert len({program_fingerprint([program]) for program in programs}) == len(ALL_REDUCE_KINDS)
    assert program_fingerprint(programs) == program_fingerprint(list(programs))
    assert program_fingerprint(programs) != program_fingerprint(programs[::-1])


def asked(name, run, known=None, ranks=4, *, cluster=None, emulate=None, resume=False):
    wanted = CollectiveOption(name=name, cluster=cluster, emulate=emulate)
    return wanted.find(RunDirectory(run), known, ranks, resume=resume, told=True)


def test_what_the_command_line_asks_for(tmp_path, caplog):
    """The network is what --cluster, --emulate or the run's measurement says, in this order."""
    caplog.set_level("INFO", logger="headway")
    (tmp_path / "slow.toml").write_text(to_toml(SLOW))
    (tmp_path / "cluster.toml").write_text(to_toml(CLUSTERS["two ranks"]))
    slow, plan = tmp_path / "slow.toml", data_parallel(16, processes=4)
    assert asked(None, tmp_path) == (None, None)
    found = asked("auto", tmp_path / "none", plan, cluster=str(slow))
    assert found == asked("auto", tmp_path, plan, emulate=slow)
    assert found[0] == "trees"
    told = caplog.text
    assert "collective auto: trees (5 of them, in chunks of" in told
    assert "next best: " in told
    assert asked("ring", tmp_path / "none") == ("ring", None)
    assert asked("hierarchical", tmp_path / "none") == ("hierarchical", None)
    assert asked("auto", tmp_path, ranks=2)[0] in ("all_reduce", "direct")  # as was measured
    assert asked("auto", tmp_path, ranks=1) == (None, None)
    cut = pipelined(8, processes=2, stages=2, microbatch=2)
    assert asked("auto", tmp_path, cut, ranks=2) == (None, None)
    assert "no gradient exchange to use it for" in caplog.text


def test_a_run_that_goes_on_keeps_its_program(tmp_path, caplog):
    caplog.set_level("INFO", logger="headway")
    plan = with_collective(
        data_parallel(16, processes=4), "ring", AllReduceOptions(order=(1, 0, 2, 3))
    )
    plan.save(tmp_path / "plan.json")
    kept = asked(None, tmp_path, data_parallel(16, processes=4), resume=True)
    assert kept == ("ring", plan.exchange.carrier)
    assert asked(None, tmp_path) == (None, None)
    assert asked(None, tmp_path, plan, resume=True) == (None, None)  # the plan says it itself
    assert asked(None, tmp_path, ranks=2, resume=True) == (None, None)
    assert "the program ring of the run was for 4 ranks, and there are 2" in caplog.text


WRONG = {
    "nothing known of the links": ({"name": "auto"}, "needs to know the links"),
    "other ranks": ({"name": "trees", "cluster": "dgx-1v"}, "has 8 ranks, the job 4"),
    "sharded state": (
        {"name": "direct", "known": data_parallel(12, processes=4, zero=2)},
        "with memory.zero 2",
    ),
    "a pipeline": (
        {"name": "ring", "known": pipelined(8, processes=4, stages=2, microbatch=2)},
        "leave out collective=ring",
    ),
    "no file": ({"name": "trees", "cluster": "none.toml"}, "none.toml"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_refused(what, tmp_path):
    facts, text = WRONG[what]
    with pytest.raises((UsageError, PlanError, DocumentError)) as caught:
        asked(run=tmp_path, **facts)
    assert text in str(caught.value)
