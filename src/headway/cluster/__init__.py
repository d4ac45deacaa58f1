"""The machine as data: nodes, the links inside and between them, and faults that happen to them."""

from headway.cluster.cluster import Cluster, Node, Pair, read_cluster
from headway.cluster.faults import CutLink, Fault, KillRank, SlowLink, check_faults, parse_fault
from headway.cluster.link import Link

__all__ = [
    "Cluster",
    "CutLink",
    "Fault",
    "KillRank",
    "Link",
    "Node",
    "Pair",
    "SlowLink",
    "check_faults",
    "parse_fault",
    "read_cluster",
]
