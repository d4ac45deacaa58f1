"""Devices and clusters as machines of the cost model: datasheets, assumptions, fitted numbers.

Every number says where it comes from: a datasheet, "assumed", "fitted", a measurement, or the
cluster's file. An assumed one is a share of the datasheet's, taken from the A100 that was
fitted; your own machines should be measured instead (`headway cluster`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.cluster.cluster import Cluster
from headway.cluster.datasheets import DATASHEET_ALIASES, datasheet_of
from headway.cluster.device import Device
from headway.cost.device import DeviceModel
from headway.cost.network import HierarchicalNetwork, network_of
from headway.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and what joins them.

    Attributes:
        network: Ranks are numbered tensor axis first, then data, then pipeline.
    """

    device: DeviceModel
    network: HierarchicalNetwork
    dtype: str = "fp16"


# Of the datasheet's memory rate that kernels reach; assumed.
STREAM_EFFICIENCY = 0.73

DEVICE = (
    "efficiency",
    "depth",
    "memory_rate",
    "kernel",
    "dispatch",
    "sharpness",
    "update",
)
LINK = ("rate", "latency")
"""Numbers of a device, and of the innermost links, that can be fitted to measured steps."""

FITTED: Mapping[str, Mapping[str, float]] = {
    "a100-80gb": {
        "efficiency": 0.8114,
        "depth": 65.16,
        "memory_rate": 1.390e12,
        "kernel": 4.280e-6,
        "dispatch": 49.35e-6,
        "sharpness": 2.163,
        "update": 18.59e-12,
        "link_rate": 211.3e9,
        "link_latency": 53.32e-6,
        "message_rate": 15.59e9,
        "message_latency": 67.16e-6,
    }
}
"""See benchmarks/2026-11-prediction.md; fitted by `calibrate` of tests/support/calibration.py, with
two numbers that only its formula knows."""
FITTED_SOURCE = "fitted 2026-11-22 to 72 of vTrain's single-node A100 runs (Bang et al. 2024)"


def assumed_device(name: str) -> DeviceModel:
    """A device with a datasheet: its numbers, and for the others the assumed shares.

    Raises:
        KeyError: There is no datasheet of this name.
    """
    sheet = datasheet_of(name)
    guessed = ("efficiency", "depth", "kernel", "dispatch", "sharpness", "update")
    return DeviceModel(
        name=name,
        peak=sheet.peak,
        memory=sheet.memory,
        memory_rate=STREAM_EFFICIENCY * sheet.memory_rate,
        tiers=sheet.tiers,
        source={"peak": sheet.source, "memory": sheet.source}
        | {"memory_rate": "assumed: a share of the datasheet's"}
        | dict.fromkeys(guessed, "assumed"),
    )


def machine_of(cluster: Cluster, *, device: str | None = None, dtype: str | None = None) -> Machine:
    """A described cluster for the cost model. What is only assumed gives way to what was fitted.

    Args:
        device: Which of its devices; None: the one that all nodes have.
        dtype: Of the matrix products; None: fp16 where the device has a peak of it, else fp32.

    Raises:
        PlanError: No devices, several of them, or none of this name.
    """
    used = {name for name in cluster.devices_of_ranks if name is not None}
    if device is None and len(used) != 1:
        raise PlanError(
            "the devices are not all alike" if used else "nothing is known of the devices",
            problems=[f"devices: {', '.join(sorted(used)) or 'none'}"],
            fix="Name one of them."
            if used
            else 'Write [devices.NAME] with preset = "...", or measure: headway cluster measure.',
        )
    name = device if device is not None else next(iter(used))
    if name not in cluster.devices:
        raise PlanError(
            f"no device {name!r}",
            problems=[f"known: {', '.join(sorted(cluster.devices))}"],
            fix="Take one of these, or describe the machine with its own numbers.",
        )
    described = cluster.devices[name]
    model = device_of(described, name)
    dtype = dtype or ("fp16" if "fp16" in model.peak else "fp32")
    machine = Machine(device=model, network=network_of(cluster), dtype=dtype)
    if described.preset is None:
        return machine
    numbers = FITTED.get(DATASHEET_ALIASES.get(described.preset, described.preset), {})
    return _with_fitted(machine, numbers)


def device_of(device: Device, name: str) -> DeviceModel:
    """A described device: what it says itself, else its preset as fitted, else what is assumed."""
    own: dict[str, Any] = dict(device.own)
    if device.kinds:
        own["kinds"] = device.kinds
    if device.host:
        own["host"] = device.host
    source = dict.fromkeys((*own, *(["peak"] if device.peak else [])), "cluster")
    source |= device.source
    if device.tiers:
        own["tiers"] = device.tiers  # each names its own source
    if device.preset is None:
        plain = DeviceModel(name=name, peak=device.peak, **own)
        guessed = {key: "assumed" for key in DEVICE if key not in own}
        return replace(plain, source=guessed | source)
    start = assumed_device(device.preset)
    fits = FITTED.get(DATASHEET_ALIASES.get(device.preset, device.preset), {})
    known: dict[str, Any] = {key: value for key, value in fits.items() if key in DEVICE}
    start = replace(start, **known, source={**start.source, **dict.fromkeys(known, FITTED_SOURCE)})
    peak = {**start.peak, **device.peak}
    # Later ones win: the cluster's own numbers, then fitted ones, then assumed ones.
    return replace(start, name=name, peak=peak, **own, source={**start.source, **source})


def _with_fitted(machine: Machine, numbers: Mapping[str, float]) -> Machine:
    """Fitted numbers in the place of assumed ones; what a file or a measurement says stays."""
    inner, *outer = machine.network.levels
    said = dict(machine.device.source)
    said |= {"link_rate": inner.source.get("rate", ""), "link_latency": inner.source["latency"]}
    said |= dict.fromkeys(("message_rate", "message_latency"), inner.source.get("message", ""))
    # Links of a file have the source "cluster" and stay; only assumed ones give way.
    taken: dict[str, Any] = {
        key: value
        for key, value in numbers.items()
        if said.get(key, "assumed").startswith("assumed")
    }
    for part, link in (("link", inner.link), ("message", inner.message)):
        found = {name: taken[key] for name in LINK if (key := f"{part}_{name}") in taken}
        if link is not None and found:
            changed: dict[str, Any] = {part: replace(link, **found)}
            inner = replace(inner, **changed)
    source = dict(machine.device.source) | dict.fromkeys(taken, FITTED_SOURCE)
    own = {key: taken[key] for key in DEVICE if key in taken}
    return replace(
        machine,
        device=replace(machine.device, **own, source=source),
        network=HierarchicalNetwork((inner, *outer)),
    )
