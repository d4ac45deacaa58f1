"""From measured times to the numbers of a cluster file: devices and levels of links.

Each number keeps when and with what it was measured, and by how much its formula misses the times
that it was fitted to. Peaks are the shortest of repeated times, all else what a step usually takes.
Invariant: `cost.presets.device_of` and `cost.network.link_level` make of the result a model that
gives the measured times back, up to the error that stands beside each number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from headway.cluster.cluster import Cluster, Node, node_names
from headway.cluster.device import Device, Update
from headway.cluster.level import Level
from headway.cluster.link import Link
from headway.cluster.readings import Exchanges, Kernels, Readings, Times
from headway.collective.link import LinkFit, fit_line, fit_link
from headway.cost.host import with_host
from headway.cost.network import Network, link_level, network_of
from headway.cost.paces import paces_of
from headway.cost.presets import device_of
from headway.units import format_bytes

BUSY_CORES, BUSY_SPREAD = 0.3, 1.3
"""Cores in use by others, and usual time over shortest one, above which a machine is busy."""


def cluster_of_readings(readings: Sequence[Readings], stamp: str) -> Cluster:
    """The cluster: of unequal ranks and nodes the slowest exchange and the usual device count.

    Args:
        readings: In order of rank.
        stamp: Date and versions: "2026-11-21, torch 2.13.0".
    """
    by_node: dict[str, list[Readings]] = {}
    for reading in readings:
        by_node.setdefault(reading.node, []).append(reading)
    by_device: dict[str, list[Kernels]] = {}
    for reading in readings:
        by_device.setdefault(reading.kernels.name, []).append(reading.kernels)
    devices = {
        name: device_of_kernels(_usual(several), stamp) for name, several in by_device.items()
    }
    processes = max(len(members) for members in by_node.values())
    names = node_names(len(by_node))
    nodes = tuple(
        Node(
            name=name,
            processes=None if len(members) == processes else len(members),
            device=members[0].kernels.name if len(devices) > 1 else None,
        )
        for name, members in zip(names, by_node.values(), strict=True)
    )
    inside = _slowest(reading.inside for reading in readings)
    between = _slowest(reading.between for reading in readings)
    levels = [level_of_exchanges("node", 1, inside, stamp)] if inside else []
    levels += [level_of_exchanges("cluster", None, between, stamp)] if between else []
    cluster = Cluster(nodes=nodes, processes=processes, levels=tuple(levels), devices=devices)
    network = network_of(cluster)
    hosts = {
        name: with_host(devices[name], _usual(several), network, len(readings), stamp)
        for name, several in by_device.items()
    }
    return replace(cluster, devices=hosts)


def busy(readings: Sequence[Readings]) -> str | None:
    """A sentence if the machine did other things meanwhile, else None."""
    cores = max(reading.busy for reading in readings)
    spread = max(reading.kernels.spread for reading in readings)
    if cores < BUSY_CORES and spread < BUSY_SPREAD:
        return None
    return (
        f"the machine was busy: others used {cores:.1f} cores before, and products usually took "
        f"{spread:.2f} times as long as at best; measure again when it is idle"
    )


def _usual(several: Sequence[Kernels]) -> Kernels:
    """The one of middle speed."""
    ordered = sorted(several, key=lambda kernels: sum(s for _, s in kernels.streams))
    return ordered[len(ordered) // 2]


def _slowest(exchanges: Iterable[Exchanges | None]) -> Exchanges | None:
    known = [exchange for exchange in exchanges if exchange is not None]
    return max(known, key=lambda e: sum(s for _, s in e.sums), default=None)


# -- links -------------------------------------------------------------------------------------


def level_of_exchanges(name: str, nodes: int | None, found: Exchanges, stamp: str) -> Level:
    """Latency and rate of a level, from all-reduces; of plain messages from such.

    A sum of nothing takes 2 log2(n) steps (tree), a large one passes 2 (n-1)/n of its bytes (ring).
    """
    sums = fit_link(found.sums, ranks=found.ranks)
    plain = fit_link(found.messages, ranks=2)
    level = Level(
        name=name,
        nodes=nodes,
        rate=_rounded(_rate(sums, found.sums)),
        latency=_rounded(sums.latency / (2 * math.log2(found.ranks))),
        message=Link(rate=_rounded(_rate(plain, found.messages)), latency=_rounded(plain.latency)),
    )
    network = Network((link_level(level, found.ranks),))
    assert level.message is not None
    predicted = [float(network.all_reduce(size, found.ranks)) for size, _ in found.sums]
    sent = [level.message.seconds(size) for size, _ in found.messages]
    sizes = f"{format_bytes(found.sums[0][0])} to {format_bytes(found.sums[-1][0])}"
    summed = (
        f"measured {stamp}: all-reduce among {found.ranks} ranks, {sizes}, "
        f"{_miss(predicted, found.sums)}"
    )
    one = f"measured {stamp}: from one rank to another, {_miss(sent, found.messages)}"
    return replace(level, source={"rate": summed, "latency": summed, "message": one})


def _rate(fit: LinkFit, times: Times) -> float:
    """Of the fit; where no time grew with the size, that of the largest."""
    size, seconds = times[-1]
    return fit.rate if math.isfinite(fit.rate) else size / seconds


# -- devices -----------------------------------------------------------------------------------


def device_of_kernels(found: Kernels, stamp: str) -> Device:
    """All numbers of a device; its peaks are those that products reach, so efficiency is 1."""
    main = "fp32" if found.adds or "bf16" not in found.products else "bf16"
    overhead, stream = fit_line(found.streams)
    floor = found.kernel + (found.dispatch if found.adds else 0.0)
    depth = _depth(found.products[main], floor)
    peak = {
        name: _rounded(median(2.0 * m * n * (k + depth) / _work(s, floor) for m, n, k, s in points))
        for name, points in found.products.items()
    }
    kinds, misses = paces_of(found.kinds, floor, peak.get("fp32", math.inf))
    updates = {
        name: Update(**dict(zip(("small", "middle", "large"), map(_rounded, times), strict=True)))
        for name, times in found.updates.items()
    }
    device = Device(
        peak=peak,
        memory=found.memory,
        memory_rate=_rounded(1.0 / stream),
        efficiency=1.0,
        depth=_rounded(depth),
        kernel=_rounded(found.kernel),
        dispatch=_rounded(found.dispatch),
        skew=_rounded(found.skew),
        sharpness=1.0 if found.adds else None,
        update=_rounded(updates["AdamW"].large + updates["clip"].large) if updates else None,
        gather=None if found.gather is None else _rounded(found.gather),
        overlap=None if found.overlap is None else float(f"{found.overlap:.2g}"),
        kinds=kinds,
        updates=updates,
    )
    streamed = [overhead + stream * size for size, _ in found.streams]
    words = {
        "peak": f"products of matrices, {_products_miss(device, found, floor)}",
        "memory": "what the system says, shared by the ranks of the node",
        "memory_rate": f"sums of two tensors into a new one, {_miss(streamed, found.streams)}",
        "efficiency": "peaks are those that products reach",
        "depth": f"products of matrices in {main}",
        "kernel": "tiny kernels",
        "dispatch": "tiny kernels, forward and backward",
        "skew": "waiting in tiny all-reduces after equal work",
        "sharpness": "host and device are one processor",
        "update": "AdamW and the norm of the gradients, large tensors",
        "updates": "a step of each optimiser, and the norm of the gradients, by size of tensors",
        "gather": "collating tensors of small samples",
        "overlap": "products beside an all-reduce",
        "kinds": f"several shapes of each in small steps, {misses}",
    }
    given = {*device.own, "peak", *(["kinds", "updates"] if kinds else [])}
    said = {key: f"measured {stamp}: {text}" for key, text in words.items() if key in given}
    return replace(device, source=said)


def _depth(points: Sequence[tuple[int, int, int, float]], floor: float) -> float:
    """seconds / (2 m n) = (depth + k) / rate is a line in k."""
    constant, slope = fit_line((k, _work(s, floor) / (2.0 * m * n)) for m, n, k, s in points)
    return constant / slope if slope else 0.0


def _work(seconds: float, floor: float) -> float:
    """Of a product, without its launch; never less than a fifth of its time."""
    return max(seconds - floor, 0.2 * seconds)


def _products_miss(device: Device, found: Kernels, floor: float) -> str:
    model = device_of(device, found.name)
    texts = []
    for name, points in found.products.items():
        predicted = [
            floor + float(model.seconds_of_matmul(m, n, k, dtype=name)) for m, n, k, _ in points
        ]
        texts.append(f"{name} {_miss(predicted, [(0.0, s) for *_, s in points])}")
    return ", ".join(texts)


def _miss(predicted: Sequence[float], times: Sequence[tuple[float, float]]) -> str:
    misses = [abs(p / s - 1.0) for p, (_, s) in zip(predicted, times, strict=True)]
    return f"fit error {sum(misses) / len(misses):.0%} (largest {max(misses):.0%})"


def _rounded(value: float) -> float:
    """To four digits: what was measured is not known better."""
    return float(f"{value:.4g}")
