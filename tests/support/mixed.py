"""A small cluster of two types of devices, two of each, and questions about it."""

from __future__ import annotations

from headway.cluster import read_cluster
from headway.cost.machines import machine_of
from headway.planner.search.request import DeviceGroup, PlanRequest

RECIPE = "support.recipes:stack"
CLUSTER = """
processes = 2
nodes = [{{ name = "new", device = "fast" }}, {{ name = "old", device = "slow" }}]
[[levels]]
name = "node"
nodes = 1
rate = "5 GB/s"
latency = "20 us"
[[levels]]
name = "cluster"
rate = "1 GB/s"
latency = "60 us"
[devices.fast]
{fast}
[devices.slow]
{slow}
"""
DEVICE = """
peak = {{ fp32 = "{peak} GFLOP/s" }}
memory = "1 GiB"
memory_rate = "{rate} GB/s"
dispatch = "1 us"
sharpness = 1.0
update = "1 ns"
{price}
"""


def devices(price=True, slower=2):
    own = 'price = "{} EUR/h"' if price else ""
    return CLUSTER.format(
        fast=DEVICE.format(peak=40, rate=20, price=own.format(3.6)),
        slow=DEVICE.format(peak=40 / slower, rate=20 / slower, price=own.format(1.8)),
    )


def question_of(work, path, **changed):
    cluster = read_cluster(path)
    network = machine_of(cluster, device="fast").network
    machines = {kind: machine_of(cluster, device=kind) for kind in ("fast", "slow")}
    assert all(machine.network == network for machine in machines.values())
    groups = [
        DeviceGroup(kind=kind, machine=machine, count=2) for kind, machine in machines.items()
    ]
    usual = {"work": work, "batch": 32, "zero": (0,), "tensor": (1,), "recompute": "pipeline"}
    return PlanRequest(machine=groups[0].machine, groups=tuple(groups), **(usual | changed))
