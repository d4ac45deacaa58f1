"""`headway cluster presets | show | measure`: what a machine is, as planners see it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headway.cli.cluster_table import describe
from headway.cli.console import say, show_error, warn
from headway.cluster import find_cluster, read_cluster, to_toml
from headway.cluster.fingerprint import DATE, fingerprint
from headway.cluster.presets import PRESETS, UPLINKS
from headway.cluster.sheets import SHEETS
from headway.errors import HeadwayError, UsageError
from headway.units import format_bytes, format_flops, format_rate

if TYPE_CHECKING:
    from headway.cluster.readings import Readings
    from headway.launch.emulation import Emulated
    from headway.launch.paced import Paced
    from headway.run.place import Place

MARK = "# Measured by headway cluster measure"
TIMEOUT_SECONDS = 120.0
"""Longest wait for another process."""


def presets() -> None:
    """Machines and devices whose numbers are known, with the source of each."""
    width = max(map(len, (*PRESETS, *SHEETS)))
    say("machines")
    for name, preset in PRESETS.items():
        uplink = UPLINKS[preset.uplink]
        say(f"  {name:<{width}}  {preset.text}: {preset.devices} x {preset.device}")
        say(f"  {'':<{width}}  between nodes {format_rate(uplink.rate)}: {uplink.source}")
    say("devices")
    for name, sheet in SHEETS.items():
        peaks = ", ".join(f"{key} {format_flops(rate)}" for key, rate in sheet.peak.items())
        memory = f"{format_bytes(sheet.memory)} at {sheet.memory_rate / 1e9:g} GB/s"
        say(f"  {name:<{width}}  {peaks}; {memory}")
        say(f"  {'':<{width}}  {sheet.source}")


def show(
    cluster: str,
    /,
    *,
    nodes: int | None = None,
    toml: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """A cluster in words: devices, levels of links, which ranks each level joins.

    Args:
        cluster: A cluster.toml, or a preset such as dgx-a100.
        nodes: Of a preset; by default 1.
        toml: Print it as the text of a cluster.toml.
    """
    found = find_cluster(cluster, nodes=nodes)
    say((to_toml(found) if toml else describe(found)).rstrip("\n"))


def measure(
    *,
    out: Annotated[Path, Parameter(alias="-o")] = Path("cluster.toml"),
    processes: Annotated[int | None, Parameter(alias="-n")] = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    emulate: Path | None = None,
    seconds: float = 30.0,
) -> None:
    """Measure devices and links of this machine, and write them as a cluster.toml.

    Also in a world that torchrun, srun or mpirun has started, then of all its nodes. It takes 15 to
    25 seconds more than `--seconds`; the machine should do nothing else.

    Args:
        out: The file to write; one that was not measured is not replaced.
        processes: Local processes; by default one for each GPU, else 2.
        device: What to measure.
        emulate: A cluster.toml: measure emulated nodes and links.
        seconds: For what devices do; more of them see more of a machine that others share.
    """
    from headway.cli.scene import count_ranks, read_scene
    from headway.run.place import Place

    place = Place.here()
    if place.rank == 0:
        _check_out(out)
    scene = read_scene(emulate, (), place, device)
    usual = place.ranks if place.found_world or scene.cluster else usual_ranks(processes, device)
    ranks = count_ranks(place, processes, usual, scene.cluster)
    if place.found_world:
        readings = _join(place, scene.device, seconds)
    else:
        with scene.nodes() as emulated:
            readings = launch_measuring(ranks, scene.device, emulated, seconds)
    if place.rank == 0:
        _write(out, readings)


def _check_out(out: Path) -> None:
    if out.exists() and not out.read_text(encoding="utf-8").startswith(MARK):
        raise UsageError(
            "this file was written by somebody",
            where=str(out),
            fix="Give another name: --out measured.toml",
        )


def usual_ranks(processes: int | None, device: str) -> int:
    """Where the command line does not say: one for each GPU, else 2."""
    if processes is not None:
        return processes
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    return gpus or 2


def _join(place: Place, device: str, seconds: float) -> list[Readings]:
    """As one rank of the world that another launcher has made."""
    from headway.launch.worker import work_here
    from headway.run.measuring import measure as measure_rank

    def tell(error: HeadwayError) -> None:
        show_error(error, trace=False)

    readings: list[Readings] = work_here(
        measure_rank, (device, TIMEOUT_SECONDS, seconds), place=place, directory=None, tell=tell
    )
    return readings


def launch_measuring(
    ranks: int, device: str, emulated: Emulated | Paced | None, seconds: float = 30.0
) -> list[Readings]:
    """In local workers of our own."""
    from headway.launch.local import launch_local

    result = launch_local(
        "headway.run.measuring:measure",
        (device, TIMEOUT_SECONDS, seconds),
        processes=ranks,
        preload=("headway.run.measuring",),
        emulated=emulated,
    )
    if result.stopped_by:
        raise KeyboardInterrupt
    readings: list[Readings] = result.results[0]
    return readings


def _write(out: Path, readings: list[Readings]) -> None:
    warning = write_measured(out, readings)
    say(describe(read_cluster(out)).rstrip("\n"))
    if warning:
        warn(warning)
    say(f"written  {out}")


def write_measured(out: Path, readings: list[Readings]) -> str | None:
    """Write what was measured as a cluster.toml; a sentence if the machine was busy meanwhile."""
    from headway.cost.measured import busy, cluster_of_readings

    warning = busy(readings)
    threads = readings[0].threads
    on = fingerprint(device=readings[0].kernels.name, ranks=len(readings), threads=threads)
    stamp = f"{on[DATE]}, torch {on['torch']}"
    head = [
        f"{MARK.removeprefix('# ')} on {stamp},",
        f"{len(readings)} processes with {threads} thread{'s' if threads > 1 else ''} each.",
    ]
    head += [f"Attention: {warning}."] if warning else []
    cluster = replace(cluster_of_readings(readings, stamp), measured=on)
    out.write_text(to_toml(cluster, head), encoding="utf-8")
    return warning
