"""The request of a search: model, devices, batch, objective, limits, and forced modules.

A request is for devices of one type, or for groups of devices of several. Modules may be forced to
a strategy with Whale's words `replicate`, `split` and `stage` (Jia et al. 2022), which are checked
against the model before anything is searched: every pattern must match modules with parameters,
and each tensor degree must be legal for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

import numpy as np

from headway.cost.machines import Machine
from headway.documents import nearest
from headway.errors import PlanError
from headway.planner.estimate.operators import (
    OperatorSetting,
    PlanningWorkload,
    check_force,
    forcible_names,
)
from headway.planner.estimate.stage_cut import forced_stage_starts, make_units

Objective = Literal["fastest", "fewest-devices", "cheapest", "frontier"]
ORDERS = ("tpd", "tdp")
"""Of axes: the tensor axis is the innermost one, as `operators` prices it."""
AUTOCAST = {"bfloat16": ("bf16", "fp16")}
"""Formats of the products, by the precision of a recipe: the first of which a peak is known."""


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Devices of one type.

    Attributes:
        machine: With the network that joins all groups.
        price: Of one device and hour; None: not known.
    """

    kind: str
    machine: Machine
    count: int
    price: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked.

    Attributes:
        machine: Of the devices; of groups that of the first.
        devices: Numbers of devices that may be used, ascending; empty: each of the groups whole or
            not at all.
        memory: Bytes of a device that a plan may use; None: the device's.
        objective: What the chosen plan must be best in.
        price: Of one device and hour; None: not known.
        tensor: Degrees of the tensor axis; None: all up to the devices of the innermost level.
        schedules: Names of `schedule.generators.registry.SCHEDULES`, or "all".
        orders: Of the axes, as in `Degrees`.
        recompute: "any": every stage may; "pipeline": not without a pipeline.
        precision: Of the recipe: "bfloat16" for autocast; "": that of the model's tensors.
        force: As in `OperatorSetting`.
        seconds: Of searching, after which nothing more is opened once a plan is found: what is
            found then depends on the machine, its bound holds. None: as long as it takes.
        groups: Where there are devices of several types: all of them, in an order that
            `balance = "whale"` may change.
        balance: Of unequal devices: "exact": the best sizes of micro-batches; "whale": those of
            Algorithm 1, and devices in the order of their memory.
        proof: Price all shares of a batch that the bound leaves, not only the first few.

    Raises:
        PlanError: The groups have different networks: the request does not say which one joins two.
    """

    work: PlanningWorkload
    machine: Machine
    batch: int
    devices: tuple[int, ...] = ()
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
    groups: tuple[DeviceGroup, ...] = ()
    balance: Literal["exact", "whale"] = "exact"
    proof: bool = False

    def __post_init__(self) -> None:
        differ = [g.kind for g in self.groups if g.machine.network != self.machine.network]
        if differ:
            first = self.groups[0].kind
            raise PlanError(
                "types of devices have different networks",
                problems=[f"machines.{kind}: not that of {first}" for kind in differ],
                fix="Give all the one network that joins them, of the slowest nodes' levels.",
            )

    def with_machines(self, machines: Mapping[str, Machine]) -> PlanRequest:
        """The same question on other machines, by type."""
        if not self.groups:
            (machine,) = machines.values()
            return replace(self, machine=machine)
        groups = tuple(replace(one, machine=machines[one.kind]) for one in self.groups)
        return replace(self, machine=groups[0].machine, groups=groups)

    def of(self, kind: str) -> PlanRequest:
        """As if there were only the devices of one type; "": as it is."""
        if not kind:
            return self
        group = next(one for one in self.groups if one.kind == kind)
        return replace(
            self,
            machine=group.machine,
            groups=(),
            devices=(group.count,),
            memory=self.caps[kind],
            price=group.price,
        )

    @property
    def most(self) -> int:
        """Devices, at most."""
        return self.devices[-1] if self.devices else sum(one.count for one in self.groups)

    @property
    def machines(self) -> dict[str, Machine]:
        """By type of device."""
        if not self.groups:
            return {self.machine.device.name: self.machine}
        return {one.kind: one.machine for one in self.groups}

    @property
    def cap(self) -> float:
        """Bytes of a device that a plan may use; of groups those of the largest."""
        if self.groups:
            return max(self.caps.values())
        return self.memory or self.machine.device.memory

    @property
    def caps(self) -> dict[str, float]:
        """Bytes of a device that a plan may use, by type: of groups no more than the device has."""
        if not self.groups:
            return {self.machine.device.name: self.cap}
        limit = np.inf if self.memory is None else self.memory
        return {one.kind: min(limit, one.machine.device.memory) for one in self.groups}

    @property
    def priced_devices(self) -> bool:
        """Whether the price of all devices is known."""
        prices = [one.price for one in self.groups] or [self.price]
        return None not in prices

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a parameter."""
        specs = self.work.graph.parameters.values()
        return max((spec.itemsize for spec in specs), default=4)

    @cached_property
    def priced(self) -> Machine:
        """The machine as the recipe's precision finds it. What streams through memory stays as
        captured."""
        device = self.machine.device
        known = [name for name in AUTOCAST.get(self.precision, ()) if name in device.peak]
        if not known or self.itemsize != 4:
            return self.machine
        # Autocast computes 32-bit products in 16 bits.
        peak = {**device.peak, "fp32": device.peak[known[0]]}
        return replace(self.machine, device=replace(device, peak=peak))

    def cost(self, devices: int, seconds: float, amounts: Sequence[tuple[str, int]] = ()) -> float:
        """Of a step; in seconds of devices where no price is known.

        Args:
            amounts: Devices of each type, where there are groups.
        """
        if amounts:
            prices = {one.kind: (one.price or 0.0) / 3600.0 for one in self.groups}
            known = self.priced_devices
            return seconds * sum(n * (prices[kind] if known else 1.0) for kind, n in amounts)
        return devices * seconds * (1.0 if self.price is None else self.price / 3600.0)


KINDS = ("replicate", "split", "stage")
WORDS = ("replicate", "split", "split:tensor", "split:AXIS", "stage")
ForcedModules = tuple[tuple[str, str], ...]


def parse_force(words: Sequence[str]) -> tuple[ForcedModules, list[str]]:
    """Of "MODULES=HOW" the pairs, and what is wrong with the others, one line each."""
    found, problems = [], []
    for word in words:
        pattern, sign, how = word.rpartition("=")
        kind, colon, axis = how.partition(":")
        if not sign or not pattern:
            problems.append(f"--force {word}: write MODULES=HOW, as in blocks.*=split")
        elif kind not in KINDS:
            hint = nearest(kind, KINDS)
            problems.append(f"--force {word}: nothing is called {kind!r}{hint}")
        elif colon and (kind != "split" or not axis):
            problems.append(f"--force {word}: write one of {', '.join(WORDS)}")
        else:
            found.append((pattern, how))
    # A module may begin a stage and be split or replicated at the same time.
    seen = {pattern: how for pattern, how in found if how != "stage"}
    problems += [
        f"--force {pattern}={how}: {pattern}={seen[pattern]} is forced, too"
        for pattern, how in found
        if how != "stage" and seen[pattern] != how
    ]
    return tuple(dict.fromkeys(found)), problems


def resolve_force(work: PlanningWorkload, force: ForcedModules) -> tuple[ForcedModules, list[str]]:
    """The same with a module standing for all that it holds; and which patterns match nothing."""
    forcible = (forcible_names(o) for o in work.graph.operators if o.parameters)
    names = list(dict.fromkeys(name for some in forcible for name in some))
    found, problems = [], []
    for pattern, how in force:
        # A stage begins at one module, where one tensor crosses.
        if how == "stage" or any(fnmatchcase(name, pattern) for name in names):
            found.append((pattern, how))
        elif any(fnmatchcase(name, f"{pattern}.*") for name in names):
            found.append((f"{pattern}.*", how))
        else:
            hint = _nearest(pattern, names)
            problems.append(
                f"--force {pattern}={how}: no module with parameters has this name{hint}"
            )
    try:
        forced_stage_starts(found, make_units(work.graph))
    except PlanError as error:
        problems += [f"--force {problem}" for problem in error.problems]
    return tuple(found), problems


def _nearest(pattern: str, names: Sequence[str]) -> str:
    outer = {name.rsplit(".", n)[0] for name in names for n in range(name.count(".") + 1)}
    legal = sorted({*names, *outer})
    # Names may mean a module or what it lies in; without a near one the top modules are listed.
    hint = nearest(pattern.removesuffix(".*"), legal)
    if not hint.startswith("; legal"):
        return hint
    tops = sorted({name.split(".")[0] for name in names})
    return f"; legal: {', '.join(tops)}"


def restrict_to_force(
    question: PlanRequest, degrees: Sequence[int]
) -> tuple[PlanRequest, list[str]]:
    """The question with those tensor degrees that what is forced allows, and the problems where
    none is left.
    """
    above = [t for t in degrees if t > 1]
    force = tuple(pair for pair in question.force if pair[1] != "stage")
    if not force or not above:
        return question, [
            f"--force {pattern}={how}: without a tensor axis nothing is split; more devices?"
            for pattern, how in question.force
            if how.startswith("split")
        ]
    legal, problems = [], []
    for t in above:
        setting = OperatorSetting(
            work=question.work,
            machine=question.machine,
            tensor=t,
            samples=question.work.samples,
            force=force,
        )
        try:
            check_force(setting)
        except PlanError as error:
            problems += [f"--force {problem}" for problem in error.problems]
        else:
            legal.append(t)
    # Without a tensor axis everything is replicated, so this degree obeys, too.
    replicated = all(how == "replicate" for _, how in force)
    if replicated and 1 in degrees:
        legal.insert(0, 1)
    return replace(question, tensor=tuple(legal)), [] if legal else problems


def restrict_to_executor(question: PlanRequest, *, zero: tuple[int, ...] = (0,)) -> PlanRequest:
    """The same question about plans that the executor can run."""
    # No tensor axis: the executor finds out itself which layers it splits, and the price may be
    # that of another split.
    return replace(question, tensor=(1,), zero=zero, recompute="pipeline")
