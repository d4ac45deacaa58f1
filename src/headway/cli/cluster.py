"""`headway cluster presets | show | measure`: describe a cluster, or measure this machine.

A cluster is shown as the planner sees it: devices, levels of links, the ranks that each level
joins, and the source of every number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headway.api.cluster_measurement import (
    MEASURE_SECONDS,
    MEASURE_TIMEOUT_SECONDS,
    MEASURED_HEADER,
    default_ranks,
    measure_in_workers,
    write_measured,
)
from headway.api.emulation import count_ranks, read_emulation_options
from headway.cli.terminal.console import say, show_error, table_lines, warn
from headway.cluster import Cluster, Level, find_cluster, read_cluster, to_toml
from headway.cluster.datasheets import DATASHEETS
from headway.cluster.memory_tier import reached_rates
from headway.cluster.presets import PRESETS, UPLINKS
from headway.cost.machines import device_of
from headway.errors import HeadwayError, UsageError
from headway.run.distributed.launch_env import LaunchEnv
from headway.units import format_bytes, format_flops, format_rate, format_seconds

if TYPE_CHECKING:
    from headway.cluster.measurement import RankReadings


_SHOWN_GROUPS = 4
"""Domains of a level that are written out."""


def describe_cluster(cluster: Cluster) -> str:
    """The page of `headway cluster show`."""
    count = len(cluster.nodes)
    kinds = {name: cluster.devices_of_ranks.count(name) for name in cluster.devices}
    mix = " + ".join(f"{number} x {name}" for name, number in kinds.items() if number)
    head = f"{count} node{'s' * (count > 1)}, {cluster.ranks} rank{'s' * (cluster.ranks > 1)}"
    lines = [f"{head}: {mix}" if mix else f"{head}; no devices described"]
    lines += ["", *_devices(cluster)] if cluster.devices else []
    if tiers := [*_tiers(cluster)]:
        lines += ["", *tiers]
    lines += ["", *_levels(cluster), "", *_ranks(cluster)]
    sources = [*_sources(cluster)]
    return "\n".join([*lines, *(["", "sources", *sources] if sources else [])]) + "\n"


def _devices(cluster: Cluster) -> Iterator[str]:
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
    return table_lines(rows)


def _tiers(cluster: Cluster) -> Iterator[str]:
    """The memory behind that of devices; nothing where no device has any."""
    rows = [("device", "memory behind it", "holds", "rows at", "reached at")]
    for name, described in cluster.devices.items():
        tiers = device_of(described, name).tiers
        for tier, reached in zip(tiers, reached_rates(tiers), strict=True):
            alone, seen = (f"{rate / 1e9:.4g} GB/s" for rate in (tier.rate, reached))
            rows.append((name, tier.name, format_bytes(tier.memory), alone, seen))
    return table_lines(rows) if len(rows) > 1 else iter(())


def _levels(cluster: Cluster) -> Iterator[str]:
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
    return table_lines(rows)


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
    for name, device in cluster.devices.items():
        tiers = device_of(device, name).tiers
        facts.append((name, {tier.name: tier.source for tier in tiers if tier.source}))
    for owner, source in facts:
        said: dict[str, list[str]] = {}
        for number, text in source.items():
            said.setdefault(text, []).append(number)
        for text, numbers in said.items():
            yield f"  {owner}: {', '.join(numbers)}: {text}"


def presets() -> None:
    """List known machines and devices, with the source of their numbers."""
    width = max(map(len, (*PRESETS, *DATASHEETS)))
    say("machines")
    for name, preset in PRESETS.items():
        uplink = UPLINKS[preset.uplink]
        say(f"  {name:<{width}}  {preset.text}: {preset.devices} x {preset.device}")
        say(f"  {'':<{width}}  between nodes {format_rate(uplink.rate)}: {uplink.source}")
    say("devices")
    for name, sheet in DATASHEETS.items():
        peaks = ", ".join(f"{key} {format_flops(rate)}" for key, rate in sheet.peak.items())
        memory = ", ".join(
            f"{format_bytes(size)} at {rate / 1e9:g} GB/s{name and f' ({name})'}"
            for name, size, rate in (
                ("", sheet.memory, sheet.memory_rate),
                *((tier.name, tier.memory, tier.rate) for tier in sheet.tiers),
            )
        )
        say(f"  {name:<{width}}  {peaks}; {memory}")
        say(f"  {'':<{width}}  {sheet.source}")


def show(
    cluster: str,
    /,
    *,
    nodes: int | None = None,
    toml: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Describe a cluster: devices, levels of links, which ranks each level joins.

    Args:
        cluster: A cluster.toml, or a preset such as dgx-a100.
        nodes: Number of nodes of a preset; by default 1.
        toml: Print a cluster.toml.
    """
    found = find_cluster(cluster, nodes=nodes)
    say((to_toml(found) if toml else describe_cluster(found)).rstrip("\n"))


def measure(
    *,
    out: Annotated[Path, Parameter(alias="-o")] = Path("cluster.toml"),
    processes: Annotated[int | None, Parameter(alias="-n")] = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    emulate: Path | None = None,
    seconds: float = MEASURE_SECONDS,
) -> None:
    """Measure the devices and links of this machine, and write a cluster.toml.

    Under torchrun, srun or mpirun all nodes of the job are measured. It takes 15 to 25 seconds more
    than `--seconds`; the machine should be idle.

    Args:
        out: The file to write; a file that was not measured is not replaced.
        processes: Local processes; by default one for each GPU, else 2.
        device: What to measure; auto: GPUs where there are some.
        emulate: A cluster.toml: measure emulated nodes and links.
        seconds: Time for measuring devices; more of it averages over other load.
    """
    place = LaunchEnv.here()
    if place.rank == 0:
        # Before the half minute of measuring, not after it.
        _check_out(out)
    scene = read_emulation_options(emulate, (), place, device)
    # `default_ranks` imports torch: it is asked last.
    usual = place.ranks if place.found_world or scene.cluster else default_ranks(processes, device)
    ranks = count_ranks(place, processes, usual, scene.cluster)
    if place.found_world:
        readings = _measure_as_rank(place, scene.device, seconds)
    else:
        with scene.nodes() as emulated:
            readings = measure_in_workers(ranks, scene.device, emulated, seconds)
    if place.rank == 0:
        _write(out, readings)


def _check_out(out: Path) -> None:
    if out.exists() and not out.read_text(encoding="utf-8").startswith(MEASURED_HEADER):
        raise UsageError(
            "this file was not written by headway",
            where=str(out),
            fix="Give another name: --out measured.toml",
        )


def _measure_as_rank(place: LaunchEnv, device: str, seconds: float) -> list[RankReadings]:
    """As one rank of the world that another launcher has made."""
    from headway.launch.worker import run_rank_here
    from headway.run.measure.cluster import measure as measure_rank

    def tell(error: HeadwayError) -> None:
        show_error(error, trace=False)

    readings: list[RankReadings] = run_rank_here(
        measure_rank,
        (device, MEASURE_TIMEOUT_SECONDS, seconds),
        place=place,
        directory=None,
        tell=tell,
    )
    return readings


def _write(out: Path, readings: list[RankReadings]) -> None:
    warning = write_measured(out, readings)
    # Read back: what is shown is what a search will find in the file.
    say(describe_cluster(read_cluster(out)).rstrip("\n"))
    if warning:
        warn(warning)
    say(f"written  {out}")
