"""Which devices each part of a model gets: virtual devices, and replicas of the whole model.

A task graph is a part of the model with one strategy; it asks for a number of devices. Invariant:
devices are taken in order, every replica of the model has as many, and none is left over. Source:
Jia et al. 2022, "Whale: Efficient Giant Model Training over Heterogeneous GPUs", the generation of
virtual devices and nested data parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import PlanError


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """The devices of one task graph in one replica of the model.

    Attributes:
        task: Number of the task graph.
        replica: Number of the model's replica: nested data parallelism.
        devices: Numbers of the devices.
    """

    task: int
    replica: int
    devices: tuple[int, ...]


def virtual_devices(
    devices: Sequence[int],
    requests: Sequence[int],
    *,
    together: bool = False,
    gather: bool = False,
) -> tuple[VirtualDevice, ...]:
    """The virtual devices of all replicas of the model, replica by replica.

    Args:
        devices: All of them, node by node.
        requests: For each task graph how many devices it asks for.
        together: All task graphs share the same devices; they must ask for as many.
        gather: Replicas of a task graph stand side by side, so that they add their gradients up
            within a node; else the devices of a replica of the model do.

    Raises:
        PlanError: The number of devices is no multiple of what one replica needs, or the requests
            make no sense.
    """
    _check(len(devices), requests, together=together)
    sizes = [requests[0]] if together else list(requests)
    replicas = len(devices) // sum(sizes)
    found = []
    for replica in range(replicas):
        start = 0
        for task, size in enumerate(requests):
            stride = replicas if gather else 1
            first = start * stride + (replica * size if gather else replica * sum(sizes))
            found.append(VirtualDevice(task, replica, tuple(devices[first : first + size])))
            start += 0 if together else size
    return tuple(found)


def _check(number: int, requests: Sequence[int], *, together: bool) -> None:
    problems = []
    if not requests:
        problems.append("there is no task graph")
    problems += [
        f"task graph {task} asks for {size} devices"
        for task, size in enumerate(requests)
        if size < 1
    ]
    if together and len(set(requests)) > 1:
        problems.append(f"task graphs that share devices ask for {list(requests)}")
    needed = max(requests, default=0) if together else sum(requests)
    if not problems and (number < needed or number % needed):
        problems.append(f"one replica needs {needed} devices; {number} are no multiple of that")
    if problems:
        raise PlanError(
            "no virtual devices",
            problems=problems,
            fix="use a multiple of the devices of one replica, or let a task graph ask for fewer",
        )
