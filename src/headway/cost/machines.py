"""Devices and clusters as machines of the cost model: datasheets, assumptions, fitted numbers.

Every number says where it comes from: a datasheet, "assumed", "fitted", a measurement, or the
cluster's file. An assumed one is a share of the datasheet's, taken from the A100 that was
fitted; your own machines should be measured instead (`headway cluster`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from headway.cluster.cluster import Cluster
from headway.cluster.datasheets import DATASHEET_ALIASES, DATASHEETS
from headway.cluster.device import Device
from headway.cluster.presets import UPLINKS, preset_levels
from headway.cost.device import DeviceModel
from headway.cost.network import HierarchicalNetwork, link_level, network_of
from headway.cost.transformer import Machine
from headway.errors import PlanError

T = TypeVar("T")

# Of the peak: cuBLAS with large fp16 matrices under a lasting load, 250 to 270 of 312 TFLOP/s on an
# A100; assumed, 0.03 either way.
EFFICIENCY = 0.82
# Of the datasheet's memory rate that kernels reach; assumed.
STREAM_EFFICIENCY = 0.73

Access = tuple[Callable[[Machine], float], Callable[[Machine, float], Machine]]
"""How a number is read from a machine, and written."""
DEVICE = (
    "efficiency",
    "depth",
    "memory_rate",
    "kernel",
    "dispatch",
    "skew",
    "sharpness",
    "update",
)


def _device(name: str) -> Access:
    def write(machine: Machine, value: float) -> Machine:
        fields: dict[str, Any] = {name: value}
        return replace(machine, device=replace(machine.device, **fields))

    return lambda machine: float(getattr(machine.device, name)), write


def _link(part: str, name: str) -> Access:
    def read(machine: Machine) -> float:
        return float(getattr(getattr(machine.network.levels[0], part), name))

    def write(machine: Machine, value: float) -> Machine:
        inner, *outer = machine.network.levels
        link = replace(getattr(inner, part), **{name: value})
        levels = (replace(inner, **{part: link}), *outer)
        return replace(machine, network=replace(machine.network, levels=levels))

    return read, write


NUMBERS: Mapping[str, Access] = {
    **{name: _device(name) for name in DEVICE},
    "link_rate": _link("link", "rate"),
    "link_latency": _link("link", "latency"),
    "message_rate": _link("message", "rate"),
    "message_latency": _link("message", "latency"),
    "whole_head": (
        lambda machine: machine.whole_head,
        lambda machine, value: replace(machine, whole_head=value),
    ),
}
"""What can be fitted to measured steps: how it is read from a machine, and written."""

FITTED: Mapping[str, Mapping[str, float]] = {
    "a100-80gb": {
        "efficiency": 0.8114,
        "depth": 65.16,
        "memory_rate": 1.390e12,
        "kernel": 4.280e-6,
        "dispatch": 49.35e-6,
        "skew": 35.87e-6,
        "sharpness": 2.163,
        "update": 18.59e-12,
        "link_rate": 211.3e9,
        "link_latency": 53.32e-6,
        "message_rate": 15.59e9,
        "message_latency": 67.16e-6,
        "whole_head": 0.3311,
    }
}
"""See benchmarks/2026-11-prediction.md; fitted by `calibrate` of tests/support/calibration.py."""
FITTED_SOURCE = "fitted 2026-11-22 to 72 of vTrain's single-node A100 runs (Bang et al. 2024)"


def assumed_machine(name: str, *, uplink: str = "8x hdr", width: int = 8) -> Machine:
    """A machine from its datasheet and the assumed shares.

    Raises:
        PlanError: No such device or uplink.
    """
    sheet = _known(DATASHEETS, DATASHEET_ALIASES.get(name, name), "device")
    inner, outer = preset_levels(sheet, _known(UPLINKS, uplink, "uplink"))
    levels = (link_level(inner, width), link_level(outer, width))
    # Logits that no tensor axis splits ran at a third of the usual rate on the A100 (`FITTED`);
    # the reason is not known.
    return Machine(
        device=_assumed_device(name), network=HierarchicalNetwork(levels), whole_head=0.35
    )


def _assumed_device(name: str) -> DeviceModel:
    sheet = DATASHEETS[DATASHEET_ALIASES.get(name, name)]
    guessed = ("efficiency", "depth", "kernel", "dispatch", "skew", "sharpness", "update")
    return DeviceModel(
        name=name,
        peak=sheet.peak,
        memory=sheet.memory,
        memory_rate=STREAM_EFFICIENCY * sheet.memory_rate,
        efficiency=EFFICIENCY,
        source={"peak": sheet.source, "memory": sheet.source}
        | {"memory_rate": "assumed: a share of the datasheet's"}
        | dict.fromkeys(guessed, "assumed"),
    )


def fitted_machine(name: str, *, uplink: str = "8x hdr") -> Machine:
    """A machine with the numbers that were fitted to measured steps.

    Raises:
        PlanError: This one was not measured.
    """
    machine = assumed_machine(name, uplink=uplink)
    return _with_fitted(machine, _known(FITTED, DATASHEET_ALIASES.get(name, name), "fitted device"))


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
    described = _known(cluster.devices, name, "device")
    model = device_of(described, name)
    dtype = dtype or ("fp16" if "fp16" in model.peak else "fp32")
    machine = Machine(device=model, network=network_of(cluster), dtype=dtype)
    if described.preset is None:
        return machine
    numbers = FITTED.get(DATASHEET_ALIASES.get(described.preset, described.preset), {})
    return _with_fitted(replace(machine, whole_head=0.35), numbers)


def device_of(device: Device, name: str) -> DeviceModel:
    """A described device: what it says itself, else its preset as fitted, else what is assumed."""
    own: dict[str, Any] = dict(device.own)
    if device.kinds:
        own["kinds"] = device.kinds
    if device.host:
        own["host"] = device.host
    source = dict.fromkeys((*own, *(["peak"] if device.peak else [])), "cluster")
    source |= device.source
    if device.preset is None:
        plain = DeviceModel(name=name, peak=device.peak, **own)
        guessed = {key: "assumed" for key in DEVICE if key not in own}
        return replace(plain, source=guessed | source)
    start = _assumed_device(device.preset)
    fits = FITTED.get(DATASHEET_ALIASES.get(device.preset, device.preset), {})
    known: dict[str, Any] = {key: value for key, value in fits.items() if key in DEVICE}
    start = replace(start, **known, source={**start.source, **dict.fromkeys(known, FITTED_SOURCE)})
    peak = {**start.peak, **device.peak}
    # Later ones win: the cluster's own numbers, then fitted ones, then assumed ones.
    return replace(start, name=name, peak=peak, **own, source={**start.source, **source})


def _with_fitted(machine: Machine, numbers: Mapping[str, float]) -> Machine:
    """Fitted numbers in the place of assumed ones; what a file or a measurement says stays."""
    inner = machine.network.levels[0]
    said = dict(machine.device.source)
    said |= {"link_rate": inner.source.get("rate", ""), "link_latency": inner.source["latency"]}
    said |= dict.fromkeys(("message_rate", "message_latency"), inner.source.get("message", ""))
    taken = [key for key in numbers if said.get(key, "assumed").startswith("assumed")]
    for key in taken:
        machine = NUMBERS[key][1](machine, numbers[key])
    source = dict(machine.device.source) | dict.fromkeys(taken, FITTED_SOURCE)
    return replace(machine, device=replace(machine.device, source=source))


def _known(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        raise PlanError(
            f"no {what} {name!r}",
            problems=[f"known: {', '.join(sorted(table))}"],
            fix="Take one of these, or describe the machine with its own numbers.",
        )
    return table[name]
