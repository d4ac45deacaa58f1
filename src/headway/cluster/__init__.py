"""The machine as data: nodes, devices, the links inside and between nodes, and faults."""

from headway.cluster.cluster import Cluster, Node, Pair, read_cluster
from headway.cluster.device import Device
from headway.cluster.faults import (
    CutLink,
    Fault,
    KillRank,
    SlowLink,
    SlowRank,
    check_faults,
    parse_fault,
)
from headway.cluster.level import Level
from headway.cluster.link import Link
from headway.cluster.presets import find_cluster, of_preset
from headway.cluster.toml import to_toml

__all__ = [
    "Cluster",
    "CutLink",
    "Device",
    "Fault",
    "KillRank",
    "Level",
    "Link",
    "Node",
    "Pair",
    "SlowLink",
    "SlowRank",
    "check_faults",
    "find_cluster",
    "of_preset",
    "parse_fault",
    "read_cluster",
    "to_toml",
]
