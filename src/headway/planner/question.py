"""What is asked of the search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headway.cost.transformer import Machine
from headway.planner.operators import Workload

Objective = Literal["fastest", "fewest-devices", "cheapest", "frontier"]
ORDERS = ("tpd", "tdp")
"""Of axes: the tensor axis is the innermost one, as `operators` prices it."""
AUTOCAST = {"bfloat16": ("bf16", "fp16")}
"""Formats of the products, by the precision of a recipe: the first of which a peak is known."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        work: The model.
        machine: Devices and links.
        devices: Numbers of devices that may be used, ascending.
        batch: Samples of a step.
        memory: Bytes of a device that a plan may use; None: the device's.
        objective: What the chosen plan must be best in.
        price: Of one device and hour; None: not known.
        tensor: Degrees of the tensor axis; None: all up to the devices of the innermost level.
        zero: Stages of ZeRO.
        schedules: Of pipelines: names of `schemes.SCHEMES`, or "all".
        orders: Of the axes, as in `Degrees`.
        recompute: "any": every stage may; "pipeline": not without a pipeline.
        precision: Of the recipe: "bfloat16" for autocast; "": that of the model's tensors.
        force: As in `Setting`.
        seconds: Of searching, after which nothing more is opened once a plan is found: what is
            found then depends on the machine, its bound holds. None: as long as it takes.
    """

    work: Workload
    machine: Machine
    devices: tuple[int, ...]
    batch: int
    memory: float | None = None
    objective: Objective = "frontier"
    price: float | None = None
    tensor: tuple[int, ...] | None = None
    zero: tuple[int, ...] = (0, 1, 3)
    schedules: tuple[str, ...] = ("1f1b",)
    orders: tuple[str, ...] = ORDERS
    recompute: Literal["any", "pipeline"] = "any"
    precision: str = ""
    force: tuple[tuple[str, str], ...] = ()
    seconds: float | None = None

    @property
    def cap(self) -> float:
        return self.memory or self.machine.device.memory

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a parameter."""
        specs = self.work.graph.parameters.values()
        return max((spec.itemsize for spec in specs), default=4)

    @cached_property
    def priced(self) -> Machine:
        """The machine as the recipe's precision finds it: autocast computes 32-bit products in 16
        bits. What streams through memory stays as captured."""
        device = self.machine.device
        known = [name for name in AUTOCAST.get(self.precision, ()) if name in device.peak]
        if not known or self.itemsize != 4:
            return self.machine
        peak = {**device.peak, "fp32": device.peak[known[0]]}
        return replace(self.machine, device=replace(device, peak=peak))

    def cost(self, devices: int, seconds: float) -> float:
        """Of a step; in seconds of devices where no price is known."""
        return devices * seconds * (1.0 if self.price is None else self.price / 3600.0)
