"""A cluster as text: devices, levels of links, which ranks each level joins, and the sources."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from headway.cluster import Cluster, Level
from headway.cost.presets import device_of
from headway.units import format_bytes, format_flops, format_rate, format_seconds

_SHOWN_GROUPS = 4
"""Domains of a level that are written out."""


def describe(cluster: Cluster) -> str:
    """The page of `headway cluster show`."""
    count = len(cluster.nodes)
    kinds = {name: cluster.devices_of_ranks.count(name) for name in cluster.devices}
    mix = " + ".join(f"{number} x {name}" for name, number in kinds.items() if number)
    head = f"{count} node{'s' * (count > 1)}, {cluster.ranks} rank{'s' * (cluster.ranks > 1)}"
    lines = [f"{head}: {mix}" if mix else f"{head}; nothing is said of devices"]
    lines += ["", *_devices(cluster)] if cluster.devices else []
    lines += ["", *_levels(cluster), "", *_ranks(cluster)]
    sources = [*_sources(cluster)]
    return "\n".join([*lines, *(["", "sources", *sources] if sources else [])]) + "\n"


def _devices(cluster: Cluster) -> list[str]:
    rows = [("device", "reaches", "memory", "streams", "launch", "price")]
    for name, described in cluster.devices.items():
        device = device_of(described, name)
        peaks = [
            f"{key} {format_flops(rate * device.efficiency)}" for key, rate in device.peak.items()
        ]
        plain = (
            format_bytes(device.memory),
            f"{device.memory_rate / 1e9:.4g} GB/s",
            format_seconds(device.dispatch),
            str(described.price) if described.price else "not given",
        )
        rows.append((name, peaks[0], *plain))
        rows += [("", peak, "", "", "", "") for peak in peaks[1:]]
    return _aligned(rows)


def _levels(cluster: Cluster) -> list[str]:
    rows = [("level", "joins", "rate of a unit", "step", "message")]
    for level in cluster.link_levels:
        message = level.alone
        rows.append(
            (
                level.name,
                _joins(level),
                _rate(level.link.rate),
                format_seconds(level.latency),
                f"{_rate(message.rate)}, {format_seconds(message.latency)}",
            )
        )
    return _aligned(rows)


def _joins(level: Level) -> str:
    if level.ranks is not None:
        return f"{level.ranks} ranks of a node"
    if level.nodes is None:
        return "all nodes"
    return "the ranks of a node" if level.nodes == 1 else f"{level.nodes} nodes"


def _rate(rate: float) -> str:
    return "no limit" if math.isinf(rate) else format_rate(rate)


def _ranks(cluster: Cluster) -> Iterator[str]:
    """Which ranks exchange over which level."""
    width = max(len(level.name) for level in cluster.link_levels)
    for level in cluster.link_levels:
        groups = cluster.groups(level)
        shown = [f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}" for ranks in groups]
        more = f" ... {shown[-1]}" if len(shown) > _SHOWN_GROUPS else ""
        yield f"{level.name:<{width}}  ranks {' | '.join(shown[:_SHOWN_GROUPS])}{more}"


def _sources(cluster: Cluster) -> Iterator[str]:
    facts = [(level.name, level.source) for level in cluster.link_levels]
    facts += [(name, dict(device_of(d, name).source)) for name, d in cluster.devices.items()]
    for owner, source in facts:
        said: dict[str, list[str]] = {}
        for number, text in source.items():
            said.setdefault(text, []).append(number)
        for text, numbers in said.items():
            yield f"  {owner}: {', '.join(numbers)}: {text}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
