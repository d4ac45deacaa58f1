"""Common machines by name, as clusters: their devices, and the links inside and between nodes.

Rates are a share of the datasheets' (assumed, and said so in each `source`); a machine of one's own
is measured instead: `headway cluster measure`. Prices are not in it: they change, and they are
yours. Invariant: what is assumed here is assumed nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headway.cluster.cluster import MAX_RANKS, Cluster, Node, node_names, read_cluster
from headway.cluster.datasheets import Datasheet, datasheet_of
from headway.cluster.device import Device
from headway.cluster.link import Level, Link
from headway.documents import nearest
from headway.errors import UsageError
from headway.units import format_rate

LINK_EFFICIENCY = 0.67
"""Of the datasheet's link rate that NCCL's rings reach inside a node; assumed."""
UPLINK_EFFICIENCY = 0.9
"""Of a network interface's rate that NCCL reaches; assumed."""
STEP, FAR_STEP = 40e-6, 20e-6
"""Seconds of one step of a collective inside and between nodes, in the middle of training; assumed
from what was fitted for the A100."""
COPIED = Link(rate=14e9, latency=80e-6)
"""One plain message: a copy through the host; assumed."""


class Uplink(NamedTuple):
    """What joins nodes: bytes/s of all interfaces of one node in each direction, and whence."""

    rate: float
    source: str


UPLINKS: Mapping[str, Uplink] = {
    "4x hdr": Uplink(100e9, "four HDR InfiniBand interfaces of 200 Gbit/s"),
    "8x hdr": Uplink(200e9, "eight HDR InfiniBand interfaces of 200 Gbit/s, as DGX A100"),
    "8x ndr": Uplink(400e9, "eight NDR InfiniBand interfaces of 400 Gbit/s, as DGX H100"),
    "4x edr": Uplink(50e9, "four EDR InfiniBand interfaces of 100 Gbit/s, as DGX-1"),
    "efa 400": Uplink(50e9, "Elastic Fabric Adapter, 400 Gbit/s in all, as p4d.24xlarge"),
    "efa 3200": Uplink(400e9, "Elastic Fabric Adapter, 3,200 Gbit/s in all, as p5.48xlarge"),
    "8x 100 gbe": Uplink(100e9, "100 Gbit/s for each of eight sockets, from memory"),
    "100 gbit/s": Uplink(12.5e9, "one network of 100 Gbit/s"),
    "25 gbit/s": Uplink(3.125e9, "one network of 25 Gbit/s"),
    "10 gbit/s": Uplink(1.25e9, "one Ethernet interface of 10 Gbit/s"),
}


class Preset(NamedTuple):
    """A kind of node."""

    text: str
    device: str
    devices: int
    uplink: str


PRESETS: Mapping[str, Preset] = {
    "cpu": Preset("two sockets, one rank each", "xeon-8380", 2, "10 gbit/s"),
    "dgx-1": Preset("NVIDIA DGX-1, 8 V100 32 GB", "v100-32gb", 8, "4x edr"),
    "dgx-a100": Preset("NVIDIA DGX A100, 8 A100 80 GB", "a100-80gb", 8, "8x hdr"),
    "dgx-h100": Preset("NVIDIA DGX H100, 8 H100 80 GB", "h100", 8, "8x ndr"),
    "p3.16xlarge": Preset("AWS, 8 V100 16 GB", "v100-16gb", 8, "25 gbit/s"),
    "p3dn.24xlarge": Preset("AWS, 8 V100 32 GB", "v100-32gb", 8, "100 gbit/s"),
    "p4d.24xlarge": Preset("AWS, 8 A100 40 GB", "a100-40gb", 8, "efa 400"),
    "p5.48xlarge": Preset("AWS, 8 H100 80 GB", "h100", 8, "efa 3200"),
    "a2-highgpu-8g": Preset("Google Cloud, 8 A100 40 GB", "a100-40gb", 8, "100 gbit/s"),
    "g4dn.metal": Preset("AWS, 8 T4", "t4", 8, "100 gbit/s"),
    "zion": Preset("Facebook Zion, 8 accelerators and 8 sockets", "zion", 8, "8x 100 gbe"),
    "8x-4090": Preset("8 GeForce RTX 4090 on PCIe", "rtx-4090", 8, "10 gbit/s"),
}


def of_preset(name: str, *, nodes: int = 1) -> Cluster:
    """A cluster of like nodes: of_preset("dgx-a100", nodes=8).

    Raises:
        UsageError: No such preset; names the nearest one. Or too many nodes.
        DocumentError: Fewer than one node.
    """
    if name not in PRESETS:
        raise UsageError(
            f"no preset {name!r}{nearest(name, list(PRESETS))}",
            fix="`headway cluster presets` lists them; or give the path of a cluster.toml.",
        )
    preset = PRESETS[name]
    if nodes > MAX_RANKS:
        raise UsageError(f"{nodes} nodes are too many", fix=f"Ask for at most {MAX_RANKS}.")
    inside, between = preset_levels(datasheet_of(preset.device), UPLINKS[preset.uplink])
    cluster = Cluster(
        nodes=tuple(Node(name=node) for node in node_names(nodes)),
        processes=preset.devices,
        devices={preset.device: Device(preset=preset.device)},
        levels=(inside, between) if nodes > 1 else (inside,),
    )
    cluster.check(name)
    return cluster


def preset_levels(card: Datasheet, uplink: Uplink) -> tuple[Level, Level]:
    """The links inside and between nodes of such devices, with assumed shares and latencies."""
    rate = LINK_EFFICIENCY * card.link_rate
    # A copy through the host is no faster than the link that it goes over.
    message = Link(rate=min(COPIED.rate, rate), latency=COPIED.latency)
    said = {"latency": "assumed", "message": "assumed: copies through the host"}
    inside = Level(
        name="node",
        nodes=1,
        rate=rate,
        latency=STEP,
        message=message,
        source={"rate": _share(LINK_EFFICIENCY, card.link_rate, card.source), **said},
    )
    between = Level(
        name="cluster",
        rate=UPLINK_EFFICIENCY * uplink.rate,
        latency=FAR_STEP,
        message=message,
        source={"rate": _share(UPLINK_EFFICIENCY, uplink.rate, uplink.source), **said},
    )
    return inside, between


def _share(share: float, rate: float, source: str) -> str:
    return f"assumed: {share:g} of {format_rate(rate)}: {source}"


def find_cluster(text: str, *, nodes: int | None = None) -> Cluster:
    """A cluster from what a command line says: the path of a cluster.toml, or a preset's name.

    Args:
        text: A path where it ends in .toml or exists, else a preset.

    Raises:
        UsageError: No such preset; or `nodes` for a file, which says that itself.
        DocumentError: The file has problems; all are listed.
    """
    path = Path(text)
    # A missing .toml is a mistyped path, not a preset: `read_cluster` then names the file.
    # Not `Path.is_file`, which raises where a name is too long for a file.
    if path.suffix != ".toml" and not os.path.isfile(text):
        return of_preset(text, nodes=1 if nodes is None else nodes)
    if nodes is not None:
        raise UsageError(
            f"--nodes {nodes} is for presets; {text} says itself how many nodes there are",
            fix="Leave --nodes out, or change the file.",
        )
    return read_cluster(path)
