"""Machines of one preset: as assumed from its datasheet alone, and as the product has it."""

from __future__ import annotations

from headway.cluster.cluster import Cluster, Node
from headway.cluster.datasheets import datasheet_of
from headway.cluster.device import Device
from headway.cluster.presets import UPLINKS, preset_levels
from headway.cost.machines import WHOLE_HEAD, Machine, assumed_device, machine_of
from headway.cost.network import HierarchicalNetwork, link_level

RANKS = 8
"""Of a node."""


def assumed_machine(name: str, *, uplink: str = "8x hdr") -> Machine:
    """A machine from its datasheet and the assumed shares: where a fit begins."""
    levels = preset_levels(datasheet_of(name), UPLINKS[uplink])
    return Machine(
        device=assumed_device(name),
        network=HierarchicalNetwork(tuple(link_level(level, RANKS) for level in levels)),
        whole_head=WHOLE_HEAD,
    )


def fitted_machine(name: str) -> Machine:
    """The machine that `machine_of` makes of two nodes of it."""
    cluster = Cluster(
        nodes=(Node(name="a"), Node(name="b")),
        processes=RANKS,
        devices={name: Device(preset=name)},
        levels=preset_levels(datasheet_of(name), UPLINKS["8x hdr"]),
    )
    return machine_of(cluster, dtype="fp16")
