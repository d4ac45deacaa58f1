"""pure: what clusters say to planners: devices, prices, levels of links, presets, their text."""

from __future__ import annotations

import math

import pytest

from headway.cluster import (
    Cluster,
    Device,
    Level,
    Link,
    Node,
    find_cluster,
    of_preset,
    read_cluster,
    to_toml,
)
from headway.cluster.datasheets import DATASHEETS
from headway.cluster.memory_tier import MemoryTier, reached_rates
from headway.cluster.presets import PRESETS
from headway.cost.machines import FITTED, device_of, machine_of
from headway.cost.network import network_of
from headway.errors import DocumentError, PlanError, UsageError
from headway.units import Price, format_flops, parse_flops
from support.golden import check_golden
from support.machines import assumed_machine, fitted_machine

RACKS = """
processes = 4
device = "fast"
nodes = ["a", "b", "c", { name = "d", device = "slow", processes = 2 }]

[[levels]]
name = "socket"
ranks = 2
rate = "40 GB/s"
latency = "1 us"

[[levels]]
name = "node"
nodes = 1
rate = "20 GB/s"
latency = "2 us"

[[levels]]
name = "rack"
nodes = 2
rate = "10 GB/s"
latency = "5 us"

[[levels]]
name = "cluster"
rate = "8 GB/s"
latency = "9 us"
oversubscription = 4
source = { rate = "the invoice" }

[devices.fast]
preset = "a100-80gb"
price = "2.5 USD/h"
memory = "64 GiB"

[devices.slow]
peak = { fp32 = "8 TFLOP/s" }
memory = "16 GiB"
memory_rate = "300 GB/s"
price = "0.5 USD/h"
dispatch = "30 us"
source = { dispatch = "a stop-watch" }
"""


def read(folder, text):
    path = folder / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


def problems(folder, text):
    with pytest.raises(DocumentError) as caught:
        read(folder, text)
    return [line.partition("cluster.toml:")[2] or line for line in caught.value.problems]


# -- levels ------------------------------------------------------------------------------------


def test_the_level_of_a_group_is_the_innermost_that_joins_it(tmp_path):
    cluster = read(tmp_path, RACKS)
    assert cluster.ranks == 14
    names = {
        (0, 1): "socket",
        (5,): "socket",
        (1, 2): "node",
        (4, 5, 6, 7): "node",
        (3, 4): "rack",
        (8, 12): "rack",
        (7, 8): "cluster",
        tuple(range(14)): "cluster",
    }
    assert {ranks: cluster.level_of(ranks).name for ranks in names} == names
    with pytest.raises(PlanError, match="ranks 0 to 13"):
        cluster.level_of([0, 14])


def test_the_groups_of_each_level_hold_every_rank_once_and_lie_in_those_of_the_next(tmp_path):
    cluster = read(tmp_path, RACKS)
    sizes = {level.name: [len(g) for g in cluster.groups(level)] for level in cluster.link_levels}
    assert sizes == {
        "socket": [2] * 7,
        "node": [4, 4, 4, 2],
        "rack": [8, 6],
        "cluster": [14],
    }
    for inner, outer in zip(cluster.link_levels, cluster.link_levels[1:], strict=False):
        for ranks in cluster.groups(inner):
            assert any(set(ranks) <= set(larger) for larger in cluster.groups(outer))


def test_an_old_file_has_levels_too(tmp_path):
    cluster = Cluster.of(3, 2, rate="1 Gbit/s", latency="50 us")
    node, outer = cluster.link_levels
    assert (node.name, node.rate) == ("node", math.inf)
    assert outer.link == Link.of("1 Gbit/s", "50 us")
    assert cluster.level_of([2, 3]) == node
    assert cluster.level_of([1, 2]) == outer
    uneven = read(
        tmp_path,
        'nodes = [{ name = "a", rate = "2 Gbit/s" }, "b", "c"]\n'
        'between = { rate = "4 Gbit/s", latency = "1 us" }\n'
        'links = [{ nodes = ["a", "c"], rate = "1 Gbit/s", latency = "7 us" }]\n',
    )
    assert [level.link for level in uneven.link_levels] == [Link.of("1 Gbit/s", "7 us")]


def test_levels_are_the_links_of_nodes_too(tmp_path):
    cluster = read(tmp_path, RACKS)
    assert cluster.link("a", "a") == Link.of("20 GB/s", "2 us")
    assert cluster.link("a", "b") == Link.of("10 GB/s", "5 us")
    assert cluster.link("b", "c") == cluster.link("d", "a") == Link.of("8 GB/s", "9 us")
    assert cluster.interface_rate("a") == 10e9


def test_levels_become_a_network(tmp_path):
    levels = network_of(read(tmp_path, RACKS)).levels
    # The smallest node is a socket: the outer one of the two counts.
    assert [(level.name, level.width) for level in levels] == [
        ("node", 2),
        ("rack", 4),
        ("cluster", math.inf),
    ]
    assert levels[-1].link == Link.of("2 GB/s", "9 us")  # a quarter: all send at once
    assert levels[-1].message == Link.of("8 GB/s", "9 us")
    assert levels[-1].source == {"rate": "the invoice", "latency": "cluster"}


# -- devices and prices ------------------------------------------------------------------------


def test_devices_by_node_rank_and_price(tmp_path):
    cluster = read(tmp_path, RACKS)
    assert cluster.device_of("a") == "fast"
    assert cluster.devices_of_ranks == ("fast",) * 12 + ("slow",) * 2
    prices = {name: device.price for name, device in cluster.devices.items()}
    assert prices == {"fast": Price(2.5, "USD"), "slow": Price(0.5, "USD")}


def test_what_a_file_says_counts_before_what_the_preset_says(tmp_path):
    cluster = read(tmp_path, RACKS)
    fast, usual = device_of(cluster.devices["fast"], "fast"), fitted_machine("a100").device
    assert fast.memory == 64 * 2**30
    assert (fast.peak, fast.efficiency) == (usual.peak, usual.efficiency)
    assert fast.source["memory"] == "cluster"
    assert fast.source["efficiency"].startswith("fitted")
    slow = device_of(cluster.devices["slow"], "slow")
    assert slow.rate("fp32") == 8e12 * slow.efficiency
    assert slow.dispatch == pytest.approx(30e-6)
    assert slow.source["dispatch"] == "a stop-watch"
    assert (slow.source["peak"], slow.source["kernel"]) == ("cluster", "assumed")


def test_a_preset_of_a_measured_machine_has_the_fitted_numbers():
    machine, known = machine_of(of_preset("dgx-a100", nodes=4)), FITTED["a100-80gb"]
    inner = machine.network.levels[0]
    assert (inner.link.rate, inner.link.latency) == (known["link_rate"], known["link_latency"])
    assert (inner.message.rate, inner.message.latency) == (
        known["message_rate"],
        known["message_latency"],
    )
    assert machine.network.levels[1] == assumed_machine("a100").network.levels[1]
    assert machine.device.update == known["update"]
    assert machine.device.source["update"] == machine.device.source["link_rate"]
    assert machine.device.source["update"].startswith("fitted")
    own = of_preset("dgx-a100")
    level = Level(name="node", nodes=1, rate=1e9)
    slow = machine_of(Cluster(nodes=own.nodes, processes=8, levels=(level,), devices=own.devices))
    assert slow.network.levels[0].link.rate == 1e9


def test_a_machine_needs_one_kind_of_device(tmp_path):
    with pytest.raises(PlanError, match="not all alike"):
        machine_of(read(tmp_path, RACKS))
    assert machine_of(read(tmp_path, RACKS), device="slow").dtype == "fp32"
    with pytest.raises(PlanError, match="nothing is known"):
        machine_of(Cluster.of(2))


# -- memory tiers ------------------------------------------------------------------------------

TIERS = """
[devices.card]
preset = "t4"
tiers = [
  { name = "DRAM", memory = "64 GiB", rate = "40 GB/s", link = { rate = "8 GB/s" } },
  { name = "NVMe", memory = "1 TiB", rate = "2 GB/s", mapped = true, source = "the shop" },
]
"""


def test_the_tiers_of_a_device_are_read_written_and_reached_over_their_links(tmp_path):
    cluster = read(tmp_path, f"nodes = 2\n{TIERS}")
    tiers = device_of(cluster.devices["card"], "card").tiers
    assert [(t.name, t.memory, t.rate) for t in tiers] == [
        ("DRAM", 64 * 2**30, 40e9),
        ("NVMe", 2**40, 2e9),
    ]
    # The drive lies behind the host's memory: its rows pass the same link to the device.
    assert reached_rates(tiers) == (8e9, 2e9)
    fast = MemoryTier(name="NVMe", memory=1.0, rate=20e9)
    assert reached_rates((tiers[0], fast)) == (8e9, 8e9)
    assert read(tmp_path, to_toml(cluster)) == cluster
    assert device_of(Device(preset="t4"), "t4").tiers == ()


def test_what_a_file_says_of_tiers_counts_instead_of_the_presets(tmp_path):
    assert [t.name for t in machine_of(of_preset("zion")).device.tiers] == ["DRAM", "NVMe"]
    own = MemoryTier(name="CXL", memory=2.0**40, rate=30e9)
    assert device_of(Device(preset="zion", tiers=(own,)), "zion").tiers == (own,)


def test_all_problems_of_tiers_are_told_at_once(tmp_path):
    text = """
nodes = 1
[devices.card]
preset = "t4"
tiers = [
  { name = "device", memory = "64 GiB", rate = "40 GB/s" },
  { name = "DRAM", memory = "0 B", rate = "0 GB/s", link = { rate = "0 B/s" } },
  { name = "DRAM", memory = "1 GiB", rate = "1 GB/s" },
  { name = "", memory = "1 GiB", rate = "1 GB/s" },
]
"""
    said = "\n".join(problems(tmp_path, text))
    for one in (
        "devices.card.tiers.0.name: 'device' stands twice (the device's own memory)",
        "devices.card.tiers.1.memory: 0 bytes; it must be positive",
        "devices.card.tiers.1.rate: 0 bit/s carries nothing",
        "devices.card.tiers.1.link: a rate of 0 bit/s carries nothing",
        "devices.card.tiers.2.name: 'DRAM' stands twice",
        "devices.card.tiers.3.name: a tier needs a name",
    ):
        assert one in said
    wrong = problems(tmp_path, 'nodes = 1\n[devices.a]\npreset = "t4"\ntiers = [{ name = "x" }]\n')
    assert [line.split("  ", 1)[1] for line in wrong] == [
        "missing key devices.a.tiers.0.memory",
        "missing key devices.a.tiers.0.rate",
    ]


# -- presets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("nodes", [1, 3])
def test_every_preset_is_a_cluster_with_sources_and_a_file(name, nodes, tmp_path):
    cluster = of_preset(name, nodes=nodes)
    assert cluster.ranks == nodes * PRESETS[name].devices
    assert all({"rate", "latency", "message"} <= set(level.source) for level in cluster.levels)
    again = read(tmp_path, to_toml(cluster))
    assert again.devices == cluster.devices
    assert to_toml(again) == to_toml(cluster)
    for one, other in zip(again.levels, cluster.levels, strict=True):
        assert one.rate == pytest.approx(other.rate, rel=1e-12)
        assert one.latency == pytest.approx(other.latency, rel=1e-12)
    assert machine_of(again).device.memory == DATASHEETS[PRESETS[name].device].memory


def test_a_preset_and_a_device_say_the_same():
    known = assumed_machine("h100", uplink="8x ndr")
    machine = machine_of(of_preset("dgx-h100", nodes=2))
    assert machine.network == known.network
    assert machine.device.rate("bf16") == known.device.rate("bf16")


def test_clusters_are_found_by_path_or_name(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("nodes = 3\n")
    assert find_cluster(str(path)).ranks == 3
    assert find_cluster("dgx-a100", nodes=2).ranks == 16
    with pytest.raises(UsageError, match="no preset 'dgx-a10'; did you mean dgx-a100"):
        find_cluster("dgx-a10")
    with pytest.raises(UsageError, match="is for presets"):
        find_cluster(str(path), nodes=2)
    with pytest.raises(DocumentError, match="cannot be read"):
        find_cluster(str(tmp_path / "none.toml"))


# -- the file ----------------------------------------------------------------------------------


def test_a_file_with_everything_survives_writing_and_reading(tmp_path):
    cluster = read(tmp_path, RACKS)
    text = to_toml(cluster, ["two lines", "of comment"])
    check_golden("cli/cluster_racks.toml", text)
    assert to_toml(read(tmp_path, text), ["two lines", "of comment"]) == text
    old = read(
        tmp_path,
        'nodes = [{ name = "a", rate = "2 Gbit/s" }, "b"]\nprocesses = 3\nfabric = "mesh"\n'
        'inside = { rate = "20 GB/s" }\nbetween = { rate = "4 Gbit/s", latency = "250 ms" }\n'
        'links = [{ nodes = ["a", "b"], rate = "1 Gbit/s" }]\n',
    )
    assert read(tmp_path, to_toml(old)) == old
    odd = Cluster(nodes=(Node(name="a"),), devices={'a "b"': Device(preset="t4")})
    assert read(tmp_path, to_toml(odd)).devices == odd.devices


def test_all_problems_of_devices_and_levels_come_at_once(tmp_path):
    text = RACKS.replace('"a100-80gb"', '"a100-80g"').replace("fp32", "fp33")
    text = text.replace('device = "slow"', 'device = "slov"').replace('"0.5 USD/h"', '"0.5 EUR/h"')
    text = text.replace("ranks = 2", "ranks = 0").replace("oversubscription = 4", "nodes = 3")
    text = text.replace("{ dispatch = ", "{ dispach = ").replace('"16 GiB"', '"0 GiB"')
    text += 'efficiency = 2\nsharpness = 0.5\n[inside]\nrate = "1 GB/s"\n'
    assert problems(tmp_path, text) == [
        "devices.fast.preset: no device 'a100-80g'; did you mean a100-80gb or a100-40gb?",
        "devices.slow.peak.fp33: no number format; did you mean fp32?",
        "devices.slow: memory is 0; it must be positive",
        "devices.slow.efficiency: 2; between 0 and 1 is possible",
        "devices.slow.sharpness: 0.5; it must be at least 1",
        "devices.slow.source.dispach: no such number; did you mean dispatch?",
        "devices: prices in EUR and USD; write all in one currency",
        "nodes.3.device: no device 'slov'; did you mean slow?",
        "levels.0.ranks: 0; at least 1",
        "levels.3: cluster does not hold whole domains of rack; levels go from the innermost "
        "outwards, each a multiple of the one before",
        "levels: cluster is the last one and does not join all 4 nodes; write a last level "
        "without nodes",
        "levels: they say all; leave inside, between and links out",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devices.a.peak.fp32 = 3", "3  devices.a.peak.fp32: 3 is no rate of computing; write it"),
        ('devices.a.price = "5 USD"', "3  devices.a.price: '5 USD' is no price; write it as"),
        ("devices.a.memory = 80", '3  devices.a.memory: 80 is no size; write it as "80 GiB"'),
        ('devices.a.presett = "t4"', "3  unknown key devices.a.presett; did you mean preset?"),
        ('levels = [{ name = "node" }]', "3  missing key levels.0.rate"),
    ],
)
def test_problems_of_form_say_line_and_key(tmp_path, text, said):
    assert problems(tmp_path, f"\nnodes = 1\n{text}\n")[0].startswith(said)


def test_two_kinds_of_devices_want_to_know_who_has_which(tmp_path):
    text = 'nodes = 2\n[devices.a]\npreset = "t4"\n[devices.b]\npreset = "p100"\n[devices.c]\n'
    assert problems(tmp_path, text) == [
        "devices.c: without a preset it needs peak, memory, memory_rate too",
        "nodes.0.device: missing; one of a, b, c",
        "nodes.1.device: missing; one of a, b, c",
    ]


def test_flops_and_prices_carry_units():
    assert parse_flops("312 TFLOP/s") == 312e12
    assert format_flops(1.979e15) == "1.98 PFLOP/s"
    assert str(Price.parse("2.50 EUR/h")) == "2.5 EUR/h"
    for wrong in ("312", "312 TB/s", "3 tflop/s"):
        with pytest.raises(ValueError, match="rate of computing"):
            parse_flops(wrong)
    for wrong in ("2.5", "2.5 USD", "USD/h", "2.5 USD/d"):
        with pytest.raises(ValueError, match="no price"):
            Price.parse(wrong)
