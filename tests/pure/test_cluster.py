"""pure: clusters and faults as data: what files may say, who shares a node, what each link has."""

from __future__ import annotations

import pytest

from headway.cluster import (
    Cluster,
    CutLink,
    KillRank,
    Link,
    Node,
    Pair,
    SlowLink,
    SlowRank,
    check_faults,
    parse_fault,
    read_cluster,
)
from headway.collective.nodes import Nodes
from headway.errors import DocumentError, UsageError
from headway.launch.emulation import (
    UNLIMITED,
    NodeShaping,
    PacedCluster,
    burst,
    pacing_limits,
    receive_limit,
)

MBIT = 125_000.0


def write(folder, text):
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_a_short_file(tmp_path):
    path = write(tmp_path, 'nodes = 2\nprocesses = 3\nbetween = { rate = "1 Gbit/s" }\n')
    cluster = read_cluster(path)
    assert cluster == Cluster.of(2, 3, rate="1 Gbit/s")
    assert cluster.names == ("a", "b")
    assert cluster.ranks == 6
    assert cluster.nodes_of_ranks == ("a", "a", "a", "b", "b", "b")
    assert Nodes.of(cluster.nodes_of_ranks).members == ((0, 1, 2), (3, 4, 5))
    assert cluster.link("a", "b") == Link(rate=1000 * MBIT)
    assert cluster.link("a", "a") is None


FULL = """
processes = 2
inside = { rate = "20 GB/s", latency = "1 us" }
between = { rate = "1 Gbit/s", latency = "50 us" }

[[nodes]]
name = "left"
processes = 1
rate = "200 Mbit/s"

[[nodes]]
name = "mid"

[[nodes]]
name = "right"
processes = 3

[[links]]
nodes = ["right", "mid"]
rate = "10 Mbit/s"
latency = "20 ms"
"""


def test_a_full_file(tmp_path):
    cluster = read_cluster(write(tmp_path, FULL))
    assert cluster.nodes_of_ranks == ("left", "mid", "mid", "right", "right", "right")
    assert list(cluster.ranks_of("right")) == [3, 4, 5]
    assert cluster.link("left", "mid") == Link.of("200 Mbit/s", "50 us")
    assert cluster.link("mid", "right") == Link.of("10 Mbit/s", "20 ms")
    assert cluster.link("right", "mid") == cluster.link("mid", "right")
    assert cluster.interface_rate("left") == 200 * MBIT
    assert cluster.interface_rate("mid") == 1000 * MBIT


def test_names_alone_and_many_nodes(tmp_path):
    cluster = read_cluster(write(tmp_path, 'nodes = ["x", "y_1"]'))
    assert (cluster.names, cluster.ranks) == (("x", "y_1"), 2)
    assert cluster.link("x", "y_1") is None
    assert Cluster.of(30).names[:2] == ("n0", "n1")


def test_a_mesh_has_a_link_for_every_pair_and_interfaces_without_limit():
    cluster = Cluster.of(4, rate="1 Gbit/s", fabric="mesh")
    assert cluster.interface_rate("a") is None
    assert cluster.link("a", "d") == Link(rate=1000 * MBIT)


def test_hockney():
    assert Link(rate=1e6, latency=0.5).seconds(2e6) == 2.5
    assert str(Link.of("25 Gbit/s", "2 us")) == "25 Gbit/s, 2 us"


WRONG = """
nodes = [{ name = "a-b" }, { name = "c", processes = 0 }, { name = "c", rate = "0 GB/s" }]
processes = 0

[[links]]
nodes = ["c", "d"]
rate = "1 Gbit/s"

[[links]]
nodes = ["c", "c"]
rate = "0 Mbit/s"
"""


def test_all_problems_come_at_once(tmp_path):
    with pytest.raises(DocumentError) as caught:
        read_cluster(write(tmp_path, WRONG))
    assert caught.value.problems == (
        "processes: 0 on each node; at least 1",
        'nodes.0.name: \'a-b\' is no name; use letters, digits, "_" and "."',
        "nodes.1.processes: 0; at least 1",
        "nodes.2.name: 'c' stands twice",
        "nodes.2.rate: a rate of 0 bit/s carries nothing",
        "links.0.nodes: no node 'd'; legal: a-b, c, c",
        'links.1.nodes: a link has two different ends, as in ["a", "b"]',
        "links.1: a rate of 0 bit/s carries nothing",
    )
    assert str(tmp_path) in str(caught.value)


def test_problems_of_the_form_name_line_and_key(tmp_path):
    text = 'nodes = [{ name = "a", speed = 1 }, "b"]\nproceses = 2\nbetween = { rate = 100 }\n'
    with pytest.raises(DocumentError) as caught:
        read_cluster(write(tmp_path, text))
    said = [problem.partition("cluster.toml:")[2] for problem in caught.value.problems]
    assert said == [
        "1  unknown key nodes.0.speed; legal: device, name, processes, rate",
        "2  unknown key proceses; did you mean processes?",
        '3  between.rate: 100 is no rate; write it as "100 Mbit/s" or "3 GB/s"',
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 0", "0 nodes: at least 1"),
        ("nodes = []", "there is none"),
        ("nodes = true", "neither a number of nodes nor a list"),
        ("processes = 2", "missing key nodes"),
        ('nodes = 2\nbetween = { rate = "5 parsec" }', "'5 parsec' is not a rate"),
        ('nodes = 2\nbetween = { rate = "1 GB/s", latency = 3 }', "3 is no duration"),
        ('nodes = 2\nfabric = "ring"', "switch"),
    ],
)
def test_other_problems(tmp_path, text, said):
    with pytest.raises(DocumentError) as caught:
        read_cluster(write(tmp_path, text))
    assert said in str(caught.value)


def test_a_pair_is_not_faster_than_its_interfaces():
    pair = Pair(nodes=("a", "b"), rate=1000 * MBIT)
    nodes = (Node(name="a"), Node(name="b"))
    slow = Cluster(nodes=nodes, between=Link.of("100 Mbit/s"), links=(pair,))
    with pytest.raises(DocumentError, match="1 Gbit/s is more than the interface of node a"):
        slow.check()
    Cluster(nodes=nodes, between=Link.of("100 Mbit/s"), links=(pair,), fabric="mesh").check()
    twice = Cluster(nodes=nodes, links=(pair, Pair(nodes=("b", "a"), rate=MBIT)))
    with pytest.raises(DocumentError, match="the link b-a stands twice"):
        twice.check()
    with pytest.raises(DocumentError, match=r"between: a latency of -1 s is negative"):
        Cluster(nodes=nodes, between=Link(rate=1.0, latency=-1.0)).check()


def test_unknown_nodes_are_named():
    with pytest.raises(KeyError, match="no node 'z'"):
        Cluster.of(2).ranks_of("z")
    with pytest.raises(KeyError, match="no node 'z'"):
        Cluster.of(2).link("a", "z")


# ---- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill rank 3 at step 7", KillRank(rank=3, step=7)),
        ("cut link a-b at step 5", CutLink(ends=("a", "b"), step=5)),
        ("rank 1 2x slower from step 1", SlowRank(rank=1, factor=2.0)),
        (
            "rank 1 2.5x slower from step 3 to step 9",
            SlowRank(rank=1, factor=2.5, first=3, until=9),
        ),
        (
            "link a-b 10x slower from step 20",
            SlowLink(ends=("a", "b"), factor=10.0, first=20),
        ),
        (
            "link n.1-n_2 2.5x slower from step 20 to step 40",
            SlowLink(ends=("n.1", "n_2"), factor=2.5, first=20, until=40),
        ),
    ],
)
def test_faults_read_and_write(text, fault):
    assert parse_fault(text) == fault
    assert str(fault) == text
    assert parse_fault(f"  {text.replace(' ', '  ')} ") == fault


def test_a_slow_rank_in_other_words():
    said = {parse_fault(text) for text in ("rank 3 slow 2x", "rank 3 2x slower")}
    assert said == {SlowRank(rank=3, factor=2.0)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill rank three at step 7", "is no fault; write"),
        ("explode", "is no fault; write"),
        ("cut link a-a at step 5", "two different ends"),
        ("cut link a-b at step 0", "steps count from 1"),
        ("kill rank 0 at step 0", "steps count from 1"),
        ("link a-b 0x slower from step 2", "to stop a link, cut it"),
        ("link a-b 2x slower from step 5 to step 5", "step 5 does not come after step 5"),
        ("rank 1 2x slower from step 5 to step 4", "step 4 does not come after step 5"),
        ("rank 1 0.5x slower", "to stop a rank, kill it"),
    ],
)
def test_what_is_no_fault(text, said):
    with pytest.raises(ValueError, match=said):
        parse_fault(text)


@pytest.mark.parametrize(
    ("text", "cluster", "said"),
    [
        ("kill rank 4 at step 7", None, "there is no rank 4"),
        ("rank 4 2x slower from step 1", None, "there is no rank 4"),
        ("cut link a-b at step 7", None, "there is no link to change"),
        ("cut link a-x at step 7", Cluster.of(2, 2), "no node 'x'; legal: a, b"),
        ("link a-b 2x slower from step 7", Cluster.of(2, 2), "cannot be made slower"),
    ],
)
def test_faults_that_cannot_happen(text, cluster, said):
    with pytest.raises(UsageError, match=said) as caught:
        check_faults([parse_fault(text)], 4, cluster)
    assert text in caught.value.where


def test_faults_that_can():
    texts = ["kill rank 3 at step 7", "cut link a-b at step 1", "link a-b 2x slower from step 7"]
    check_faults(map(parse_fault, texts), 4, Cluster.of(2, 2, rate="1 Gbit/s"))


# ---- what the kernel is told ------------------------------------------------------------------


def test_bursts():
    assert burst(12.5e6) == 131_072
    assert burst(125e6) >= 1_000_000
    assert burst(1.25e3) == 16_384


def test_shares_are_the_interface_and_ceilings_are_the_links():
    peers = {"10.0.0.2": 10 * MBIT, "10.0.0.3": None}
    shape = NodeShaping(interface="eth0", rate=300 * MBIT, peers=peers)
    classes = [line for line in shape.commands() if line.startswith("class")]
    assert [line.split(" burst")[0].split("classid ")[1] for line in classes] == [
        "1:1 htb rate 37500000bps ceil 37500000bps",
        "1:2 htb rate 12500000bps ceil 37500000bps",
        "1:a htb rate 1250000bps ceil 1250000bps",
        "1:b htb rate 12500000bps ceil 37500000bps",
    ]
    assert "match ip dst 10.0.0.3/32 flowid 1:b" in list(shape.commands())[-1]
    assert "class change" in next(iter(shape.limit("10.0.0.2", MBIT)))
    assert list(shape.cut("10.0.0.2")) == ["qdisc replace dev eth0 parent 1:a blackhole"]
    assert f"{UNLIMITED}bps" in list(NodeShaping(interface="e", rate=None, peers={}).commands())[1]
    assert "ceil 1250000bps" in list(receive_limit("node0", 10 * MBIT))[1]


def test_without_root_a_node_has_the_rate_of_its_slowest_link():
    pair = Pair(nodes=("a", "b"), rate=10 * MBIT)
    nodes = tuple(Node(name=name) for name in "abc")
    cluster = Cluster(nodes=nodes, between=Link.of("100 Mbit/s"), links=(pair,))
    paced = PacedCluster(cluster=cluster)
    assert [paced.rate(name) for name in "abc"] == [10 * MBIT, 10 * MBIT, 100 * MBIT]
    told = list(pacing_limits(cluster))
    assert "a 10 Mbit/s, b 10 Mbit/s, c 100 Mbit/s" in told[0]
    assert "slowest" in told[1]
    assert PacedCluster(cluster=Cluster.of(2)).pace("a", None) is None
