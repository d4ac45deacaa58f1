"""The machine as data: nodes, devices, the links inside and between nodes, and faults."""

from headway.cluster.cluster import Cluster, Node, Pair, read_cluster, to_toml
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
from headway.cluster.link import Level, Link
from headway.cluster.memory_tier import MemoryTier
from headway.cluster.presets import find_cluster, of_preset

__all__ = [
    "Cluster",
    "CutLink",
    "Device",
    "Fault",
    "KillRank",
    "Level",
    "Link",
    "MemoryTier",
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
