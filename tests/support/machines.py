"""Machines of one preset: as assumed from its datasheet alone, and as the product has it."""

from __future__ import annotations

from headway.cluster.cluster import Cluster, Node
from headway.cluster.datasheets import datasheet_of
from headway.cluster.device import Device
from headway.cluster.presets import UPLINKS, preset_levels
from headway.cost.machines import assumed_device, machine_of
from headway.cost.network import HierarchicalNetwork, link_level
from support.transformer_formula import FormulaMachine

RANKS = 8
"""Of a node."""


FITTED_FORMULA = {"skew": 35.87e-6, "whole_head": 0.3311}
"""What was fitted with `headway.cost.machines.FITTED` for the A100."""


def assumed_machine(name: str, *, uplink: str = "8x hdr") -> FormulaMachine:
    """A machine from its datasheet and the assumed shares: where a fit begins."""
    levels = preset_levels(datasheet_of(name), UPLINKS[uplink])
    return FormulaMachine(
        device=assumed_device(name),
        network=HierarchicalNetwork(tuple(link_level(level, RANKS) for level in levels)),
        whole_head=0.35,
    )


def fitted_machine(name: str) -> FormulaMachine:
    """The machine that `machine_of` makes of two nodes of it."""
    cluster = Cluster(
        nodes=(Node(name="a"), Node(name="b")),
        processes=RANKS,
        devices={name: Device(preset=name)},
        levels=preset_levels(datasheet_of(name), UPLINKS["8x hdr"]),
    )
    return FormulaMachine(**vars(machine_of(cluster, dtype="fp16")), **FITTED_FORMULA)
