"""Virtual devices of Whale's task graphs, and pipeline stages on unequal devices.
A task graph is a part of the model with one strategy; it asks for a number of devices. Devices are
taken in order, and every replica of the model has as many.

With 1F1B stage i of N holds the activations of min(m, N - i) micro-batches, so the device with the
most memory takes the first stage. Source: Jia et al. 2022 (Whale), generation of virtual devices,
nested data parallelism, and balancing between task graphs; `cut_exactly` is headway's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from headway.cost.device import Array
from headway.errors import PlanError
from headway.planner.pareto.choice_graph import ChoiceGraph
from headway.planner.pareto.solve import solve
from headway.planner.whale.load_balance import DeviceShare, algorithm_1
from headway.units import format_bytes


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """The devices of one task graph in one replica of the model.

    Attributes:
        replica: Number of the model's replica: nested data parallelism.
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


# Stages of a pipeline on unequal devices: whose memory comes first, and where the model is cut.


_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class StageBlock:
    """A piece of the model that is not cut, for one micro-batch.

    Attributes:
        weights: Bytes of parameters, gradients and optimiser state.
        activations: Bytes kept from forward to backward.
    """

    flops: float
    weights: float
    activations: float


@dataclass(frozen=True, slots=True)
class StageDevice:
    """FLOP/s and bytes."""

    rate: float
    memory: float


@dataclass(frozen=True, slots=True)
class UnequalStages:
    """A cut.

    Attributes:
        ends: For each stage the number of the block after its last one.
        seconds: Of one micro-batch at each stage, forward and backward.
        bytes: At the peak of each stage.
    """

    ends: tuple[int, ...]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]


def by_memory(devices: Sequence[StageDevice]) -> tuple[int, ...]:
    """The order of devices over the stages: most memory first, of equal ones the faster one."""
    return tuple(
        sorted(range(len(devices)), key=lambda i: (-devices[i].memory, -devices[i].rate, i))
    )


def in_flight(stages: int, microbatches: int) -> tuple[int, ...]:
    """Micro-batches whose activations a stage holds with 1F1B: min(m, N - i)."""
    return tuple(min(microbatches, stages - i) for i in range(stages))


def cut_by_shares(
    blocks: Sequence[StageBlock], devices: Sequence[StageDevice], held: Sequence[int]
) -> UnequalStages:
    """Whale's cut: Algorithm 1 shares the FLOPs, and stages end at the nearest blocks.

    Args:
        blocks: In topological order.
        devices: Of the stages, in their order.
        held: Micro-batches that each stage holds.

    Raises:
        PlanError: A stage does not fit.
    """
    _check_number(blocks, devices)
    weights = sum(block.weights for block in blocks)
    kept = sum(block.activations for block in blocks)
    shares = [
        DeviceShare(rate=device.rate, memory=device.memory, scaled=weights + count * kept)
        for device, count in zip(devices, held, strict=True)
    ]
    loads = algorithm_1(shares).loads
    total = [0.0, *accumulate(block.flops for block in blocks)]
    ends: list[int] = []
    for stage, wanted in enumerate(accumulate(load * total[-1] for load in loads)):
        first = (ends[-1] if ends else 0) + 1
        last = len(blocks) - (len(devices) - 1 - stage)
        ends.append(min(range(first, last + 1), key=lambda e: (abs(total[e] - wanted), e)))
    ends[-1] = len(blocks)
    return _priced(blocks, devices, held, ends)


def cut_exactly(
    blocks: Sequence[StageBlock], devices: Sequence[StageDevice], held: Sequence[int]
) -> UnequalStages:
    """The cut whose slowest stage is fastest, of those that fit.

    The least time of a slowest stage is that of some run of blocks on some device; it is found by
    halving, the frontier engine says whether there is a cut of stages that take no longer.

    Args:
        blocks: In topological order.
        devices: Of the stages, in their order.
        held: Micro-batches that each stage holds.

    Raises:
        PlanError: There is no cut that fits.
    """
    _check_number(blocks, devices)
    runs = [_runs(blocks, device, count) for device, count in zip(devices, held, strict=True)]
    times = np.unique(np.concatenate([run[np.isfinite(run)] for run in runs]))
    low, high = 0, len(times) - 1
    ends = _cut(runs, times[high]) if len(times) else None
    if ends is None:
        raise PlanError(
            "no cut fits into the devices in this order",
            problems=_how_far(blocks, devices, held),
            fix="order the devices by memory, take a smaller micro-batch, or recompute activations",
        )
    while low < high:
        middle = (low + high) // 2
        found = _cut(runs, times[middle])
        if found is None:
            low = middle + 1
        else:
            high, ends = middle, found
    return _priced(blocks, devices, held, ends)


def _runs(blocks: Sequence[StageBlock], device: StageDevice, held: int) -> Array:
    """Seconds of the blocks from one border to a later one (n + 1, n + 1); infinite if they do
    not fit, or there are none."""
    work = np.cumsum([0.0, *(block.flops for block in blocks)]) / device.rate
    room = np.cumsum([0.0, *(_bytes(block, held) for block in blocks)])
    used = room[None, :] - room[:, None]
    fits = np.triu(used <= device.memory * (1 + _ROUNDING), 1)
    return np.where(fits, work[None, :] - work[:, None], np.inf)


def _cut(runs: Sequence[Array], most: float) -> list[int] | None:
    """Ends of stages none of which takes longer than `most`; None if there are none.

    The nodes of the graph of choices are the borders between stages, an edge is a stage.
    """
    allowed = [np.where(run <= most, run, np.inf) for run in runs]
    last = len(runs[0]) - 1
    if len(runs) == 1:
        return [last] if np.isfinite(allowed[0][0, last]) else None
    borders = [f"border {stage:04d}" for stage in range(1, len(runs))]
    nodes = {border: np.zeros((last + 1, 1)) for border in borders}
    nodes[borders[0]] = nodes[borders[0]] + allowed[0][0, :, None]
    nodes[borders[-1]] = nodes[borders[-1]] + allowed[-1][:, last, None]
    edges = {
        pair: table[..., None] for pair, table in zip(pairwise(borders), allowed[1:-1], strict=True)
    }
    graph = ChoiceGraph(("seconds",), nodes, edges)
    try:
        found = solve(graph)
    except PlanError:
        return None
    choices = found.choices(0)
    return [*(choices[border] for border in borders), last]


def _priced(
    blocks: Sequence[StageBlock],
    devices: Sequence[StageDevice],
    held: Sequence[int],
    ends: Sequence[int],
) -> UnequalStages:
    parts = [blocks[begin:end] for begin, end in pairwise((0, *ends))]
    stages = UnequalStages(
        tuple(ends),
        tuple(
            sum(block.flops for block in part) / device.rate
            for part, device in zip(parts, devices, strict=True)
        ),
        tuple(
            sum(_bytes(block, count) for block in part)
            for part, count in zip(parts, held, strict=True)
        ),
    )
    problems = [
        f"stage {i}: {format_bytes(used)}, its device has {format_bytes(device.memory)}"
        for i, (used, device) in enumerate(zip(stages.bytes, devices, strict=True))
        if used > device.memory * (1 + _ROUNDING)
    ]
    if problems:
        raise PlanError("stages do not fit", problems=problems, fix="use the exact cut")
    return stages


def _bytes(block: StageBlock, held: int) -> float:
    return block.weights + held * block.activations


def _how_far(
    blocks: Sequence[StageBlock], devices: Sequence[StageDevice], held: Sequence[int]
) -> list[str]:
    """How many blocks each stage could hold at most, were it alone."""
    lines = []
    for stage, (device, count) in enumerate(zip(devices, held, strict=True)):
        fits = sum(used <= device.memory for used in accumulate(_bytes(b, count) for b in blocks))
        lines.append(
            f"stage {stage}: {format_bytes(device.memory)} hold the first {fits} of {len(blocks)} "
            f"blocks, with {count} micro-batches"
        )
    return lines


def _check_number(blocks: Sequence[StageBlock], devices: Sequence[StageDevice]) -> None:
    if len(blocks) < len(devices):
        raise PlanError(
            "no stage may be empty",
            problems=[f"{len(blocks)} blocks for {len(devices)} stages"],
            fix="use fewer stages",
        )
