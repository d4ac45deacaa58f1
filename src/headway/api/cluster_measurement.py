"""Measure this machine in workers of our own, and write what was found as a cluster.toml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cluster import to_toml
from headway.cluster.local_machine import DATE, fingerprint

if TYPE_CHECKING:
    from headway.cluster.measurement import RankReadings
    from headway.launch.emulation import EmulatedCluster, PacedCluster

MEASURED_HEADER = "# Measured by headway cluster measure"
MEASURE_SECONDS = 30.0
"""For measuring devices, where nobody says how many."""
MEASURE_TIMEOUT_SECONDS = 120.0
"""Longest wait for another process."""


def default_ranks(processes: int | None, device: str) -> int:
    """Processes where nobody says how many: one for each GPU, else 2."""
    if processes is not None:
        return processes
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    # Two ranks are the fewest between which a link can be measured.
    return gpus or 2


def measure_in_workers(
    ranks: int,
    device: str,
    emulated: EmulatedCluster | PacedCluster | None,
    seconds: float = MEASURE_SECONDS,
) -> list[RankReadings]:
    """In local workers of our own."""
    from headway.launch.local import launch_local

    result = launch_local(
        "headway.run.measure.cluster:measure",
        (device, MEASURE_TIMEOUT_SECONDS, seconds),
        processes=ranks,
        # Imported once, in the forkserver: every worker would import torch again.
        preload=("headway.run.measure.cluster",),
        emulated=emulated,
    )
    if result.stopped_by:
        # A signal has stopped the workers: this process ends as if it had got it itself.
        raise KeyboardInterrupt
    readings: list[RankReadings] = result.results[0]
    return readings


def write_measured(out: Path, readings: list[RankReadings]) -> str | None:
    """Write what was measured as a cluster.toml; a sentence if the machine was busy meanwhile."""
    from headway.cost.cluster_fit import busy_warning, cluster_of_readings

    warning = busy_warning(readings)
    threads = readings[0].threads
    on = fingerprint(device=readings[0].kernels.name, ranks=len(readings), threads=threads)
    stamp = f"{on[DATE]}, torch {on['torch']}"
    head = [
        # `to_toml` puts a "#" in front of every line.
        f"{MEASURED_HEADER.removeprefix('# ')} on {stamp},",
        f"{len(readings)} processes with {threads} thread{'s' if threads > 1 else ''} each.",
    ]
    head += [f"Attention: {warning}."] if warning else []
    cluster = replace(cluster_of_readings(readings, stamp), measured=on)
    out.write_text(to_toml(cluster, head), encoding="utf-8")
    return warning
