"""What other hardware would change: faster links, more memory, more compute, cheaper launches.

One change at a time, with the seconds of the plan itself and the search's choice on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from headway.cost.device import DeviceModel, scale_device
from headway.cost.network import HierarchicalNetwork
from headway.errors import PlanError
from headway.planner.explain.step_parts import level_of
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest, restrict_to_executor
from headway.schedule.generators.registry import RUNNABLE_SCHEDULES

TWICE = "memory 2x"
SAME = 1e-3
"""Times that differ by a smaller share are called equal."""
_STEPS = (2, 4)
"""How much faster each level of links is tried."""


@dataclass(frozen=True, kw_only=True)
class HardwareChange:
    """Other hardware.

    Attributes:
        name: "node links 2x".
        own: Seconds of the plan itself on it.
        best: What the search finds on it; None: nothing fits.
        changed: Whether that is another plan than on the hardware as it is.
    """

    name: str
    own: float
    best: Point | None
    changed: bool

    @property
    def better(self) -> bool:
        """Whether the choice changes to what is faster than the plan itself on this hardware."""
        faster = self.best is not None and self.best.seconds < self.own * (1 - SAME)
        return self.changed and faster


def fastest_runnable_request(question: PlanRequest, devices: int) -> PlanRequest:
    """The same question for the fastest plan that the executor can run, as `headway plan --runnable
    --objective fastest` asks it.
    """
    runnable = restrict_to_executor(question, zero=question.zero)
    return replace(runnable, devices=(devices,), objective="fastest", schedules=RUNNABLE_SCHEDULES)


def hardware_changes(
    question: PlanRequest, priced: Callable[[PlanSearch], Point]
) -> Iterator[HardwareChange]:
    """Each level of links 2 and 4 times faster, memory and compute twice, launches in half the
    time, one at a time.

    Args:
        question: As of `fastest_runnable_request`.
    """
    best = fastest_plan(question)
    for name, other in _others(question):
        found = fastest_plan(other)
        yield HardwareChange(
            name=name,
            own=priced(PlanSearch(other)).seconds,
            best=found,
            changed=_identity(found) != _identity(best),
        )


def fastest_plan(question: PlanRequest) -> Point | None:
    """The search's choice; None: nothing fits."""
    try:
        return find_plans(question).best
    except PlanError:
        return None


def _identity(point: Point | None) -> object:
    """What makes it another plan: degrees, devices, and the stages that compute again."""
    if point is None:
        return None
    layout = [(one.kinds, one.copies, one.microbatch) for one in point.classes]
    return point.degrees, point.amounts, layout, [stage.recompute for stage in point.stages]


def _others(question: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    machines = question.machines
    if question.groups:
        # What may be used of a device's memory counts as all it has, so that twice is more.
        machines = {
            kind: replace(one, device=replace(one.device, memory=question.caps[kind]))
            for kind, one in machines.items()
        }
        question = replace(question, memory=None)
    for name, network in faster_networks(question.machine.network, question.most):
        faster = {kind: replace(one, network=network) for kind, one in machines.items()}
        yield name, question.with_machines(faster)
    for kind, machine in machines.items():
        for name, device in other_devices(machine.device):
            other = question.with_machines(machines | {kind: replace(machine, device=device)})
            # Under a limit of the user's own, twice the memory alone would change nothing.
            twice = 2 * question.memory if question.memory and name == TWICE else question.memory
            label = f"{kind} {name}" if question.groups else name
            yield label, replace(other, memory=twice)


def other_devices(device: DeviceModel) -> Iterator[tuple[str, DeviceModel]]:
    """Memory twice, peaks twice, launches in half the time, one at a time."""
    yield TWICE, replace(device, memory=2 * device.memory)
    yield "compute 2x", scale_device(device, compute=2.0)
    yield "launches 2x faster", scale_device(device, launches=2.0)


def faster_networks(
    network: HierarchicalNetwork, ranks: int
) -> Iterator[tuple[str, HierarchicalNetwork]]:
    """Each level of links that so many ranks use 2 and 4 times faster, one at a time."""
    outermost = level_of(network, ranks).name
    for number, level in enumerate(network.levels):
        if np.isfinite(level.link.rate):
            for factor in _STEPS:
                yield f"{level.name} links {factor}x", _faster(network, number, factor)
        if level.name == outermost:
            break


def _faster(network: HierarchicalNetwork, number: int, factor: int) -> HierarchicalNetwork:
    """One level's rates, of collectives and of messages; latencies stay."""
    level = network.levels[number]
    link = replace(level.link, rate=level.link.rate * factor)
    message = level.message and replace(level.message, rate=level.message.rate * factor)
    faster = replace(level, link=link, message=message)
    return HierarchicalNetwork((*network.levels[:number], faster, *network.levels[number + 1 :]))
