"""Where a plan's time and memory go, its neighbours, and what other hardware would change.
The parts of a step are the terms of the candidate's price and add up to its seconds, those of a
stage to its bytes. Neighbours are one step away in one degree, as people vary plans by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from headway.cost.device import DeviceModel, scale_device
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.errors import PlanError
from headway.planner.estimate.degrees import Degrees, microbatch_sizes
from headway.planner.estimate.operators import dtype_of, kernel_count
from headway.planner.estimate.pricing import host_seconds
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.plan_conversion import candidate_of, restrict_to_executor
from headway.planner.search.plan_point import Point
from headway.planner.search.request import ORDERS, PlanRequest
from headway.planner.search.result import PricedPlan
from headway.schedule.generators.registry import PLAIN, RUNNABLE_SCHEDULES
from headway.units import format_bytes

PricedT = TypeVar("PricedT", bound=PricedPlan)
"""What a search finds: `Point`, or `MixedPoint`."""
TWICE = "memory 2x"
SAME = 1e-3
"""Times that differ by a smaller share are called equal."""
ROUNDING = 1e-9
"""Parts below this share of a step are none."""
_STEPS = (2, 4)
"""How much faster each level of links is tried."""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of a step.

    Attributes:
        name: "compute", "bubble", "messages", "exchange", "update", "data" or "host".
        level: Of links, where it is their time.
        hidden: Seconds of the same beside which computation goes on; not of `seconds`.
    """

    name: str
    seconds: float
    share: float
    level: str = ""
    hidden: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What the fullest stage holds.

    Attributes:
        share: Of what is allowed, with all stages of its device.
        weights: Bytes of its parameters.
        training: Bytes of gradients and optimiser.
        activations: Bytes kept for backward, of all micro-batches under way.
        again: Bytes for a moment, while a micro-batch passes.
        update: Bytes for a moment while the update runs, when nothing else but weights and training
            is held; 0 where that is not the fullest moment.
    """

    stage: int
    bytes: float
    share: float
    weights: float
    training: float
    activations: float
    again: float
    update: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NeighbourPlan:
    """A plan one step away.

    Attributes:
        step: "tensor 1 -> 2".
        degrees: What it would be; None where it cannot be.
        point: Its fastest plan; None where it cannot be.
    """

    step: str
    degrees: Degrees | None = None
    point: Point | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class HardwareChange(Generic[PricedT]):
    """Other hardware.

    Attributes:
        name: "node links 2x".
        own: Seconds of the plan itself on it.
        best: What the search finds on it; None: nothing fits.
        changed: Whether that is another plan than on the hardware as it is.
    """

    name: str
    own: float
    best: PricedT | None
    changed: bool

    @property
    def better(self) -> bool:
        """Whether the choice changes to what is faster than the plan itself on this hardware."""
        faster = self.best is not None and self.best.seconds < self.own * (1 - SAME)
        return self.changed and faster


def step_parts(question: PlanRequest, point: Point) -> tuple[StepPart, ...]:
    """The terms of a step, the largest first; those of nothing are left out, but for an exchange
    that is hidden as a whole."""
    degrees, network = point.degrees, question.machine.network
    graph = question.work.graph
    trained = {name for o in graph.operators for name in o.parameters} - set(graph.frozen)
    host = host_seconds(question.machine.device.host, degrees, len(trained))
    known = (point.busy, point.messages, point.exchange, point.update, point.reading, host)
    terms = {
        "compute": point.busy,
        "data": point.reading,
        "host": host,
        "bubble": point.seconds - sum(known),
        "messages": point.messages,
        "exchange": point.exchange,
        "update": point.update,
    }
    reach = {
        "messages": degrees.stride("pipe") + 1,
        "exchange": degrees.stride("data") * degrees.data,
    }
    levels = {name: level_of(network, ranks).name for name, ranks in reach.items()}
    least = ROUNDING * point.seconds
    hidden = {"exchange": point.hidden if point.hidden > least else 0.0}
    found = [
        StepPart(
            name=name,
            seconds=s,
            share=s / point.seconds,
            level=levels.get(name, ""),
            hidden=hidden.get(name, 0.0),
        )
        for name, s in terms.items()
        if max(s, hidden.get(name, 0.0)) > least
    ]
    return tuple(sorted(found, key=lambda part: -part.seconds))


def level_of(network: HierarchicalNetwork, ranks: int) -> LinkLevel:
    """The innermost level that joins so many ranks in a row."""
    return next((level for level in network.levels if level.width >= ranks), network.levels[-1])


def fullest_stage_memory(question: PlanRequest, point: Point) -> StageMemory:
    """What the fullest stage holds, by category; a rank with several stages holds more."""
    number = max(range(len(point.stages)), key=lambda n: point.stages[n].bytes)
    stage = point.stages[number]
    weights = stage.params / (point.degrees.data if point.degrees.zero >= 3 else 1)
    updates = stage.passing > stage.kept + stage.moment
    absent = 0.0 if updates else max(0.0, -stage.moment)  # gradients that are not there yet
    return StageMemory(
        stage=number,
        bytes=stage.bytes,
        share=point.bytes / question.cap,
        weights=weights,
        training=stage.state - weights - absent,
        activations=0.0 if updates else stage.kept,
        again=0.0 if updates else max(0.0, stage.moment),
        update=stage.passing if updates else 0.0,
    )


def peak_utilisation(engine: PlanSearch, point: Point) -> float:
    """Share of the devices' peak that a step's products reach."""
    question, work = engine.question, engine.question.work
    graph = work.graph
    setting = engine.tables_of(1, point.degrees.microbatch).setting
    largest = max(graph.operators, key=lambda operator: operator.flops.total)
    peak = setting.machine.device.peak[dtype_of(setting, graph.specs(largest)[1])]
    flops = graph.flops.total * question.batch / work.samples
    return float(flops / (point.seconds * point.devices * peak))


def launch_seconds(engine: PlanSearch, point: Point) -> float:
    """Seconds of a step that the host needs to issue the kernels of the slowest stage."""
    slowest = max(point.stages, key=lambda stage: stage.seconds)
    units = engine.row[slowest.start : slowest.stop]
    operators = engine.question.work.graph.operators[units[0].start : units[-1].stop]
    number = sum(
        (2 + slowest.recompute) * kernel_count(o) + bool(o.flops.weight_gradient) for o in operators
    )
    host = engine.question.machine.device.seconds_of_host(float(number))
    return float(point.degrees.microbatches * point.degrees.virtual * host)


# -- neighbours -----------------------------------------------------------------------------------


def neighbour_plans(engine: PlanSearch, point: Point, *, most: int) -> tuple[NeighbourPlan, ...]:
    """One step up and down in t, d, p and b: t and p take from d, d is of other devices.

    Args:
        engine: Of the plan's model and cluster.
    """
    return tuple(
        _neighbour(engine, point, name, factor, most)
        for name in ("tensor", "data", "pipeline", "microbatch")
        for factor in (2.0, 0.5)
    )


def _neighbour(
    engine: PlanSearch, point: Point, name: str, factor: float, most: int
) -> NeighbourPlan:
    old = getattr(point.degrees, name)
    new = old * factor
    label = "pipe" if name == "pipeline" else "micro-batch" if name == "microbatch" else name
    step = f"{label} {old} -> {new:g}"
    if new != int(new):
        return NeighbourPlan(step=f"{label} {old} -> less", why=f"{old} cannot be halved")
    degrees, why = _moved(engine, point.degrees, name, int(new), most)
    if degrees is None:
        return NeighbourPlan(step=step, why=why)
    candidate, cap = candidate_of(engine, degrees), engine.question.cap
    found = candidate.fastest(cap)
    if found is not None:
        return NeighbourPlan(step=step, degrees=degrees, point=found)
    least = candidate.fastest(float("inf"))
    need = candidate.bound()[1]
    why = "the model cannot be cut so"
    if least is not None:
        why = f"it needs at least {format_bytes(need)} per device; {format_bytes(cap)} are allowed"
        if need <= cap:
            why = f"no cut of it fits into {format_bytes(cap)} per device"
    return NeighbourPlan(step=step, degrees=degrees, why=why)


def _moved(
    engine: PlanSearch, old: Degrees, name: str, new: int, most: int
) -> tuple[Degrees | None, str]:
    """The degrees after one step, or why there are none."""
    batch = engine.question.batch
    t, d, p = old.tensor, old.data, old.pipeline
    if name == "microbatch":
        if batch % (d * new):
            return None, f"a share of {batch // d} samples is no multiple of {new}"
        return replace(old, microbatch=new, microbatches=batch // d // new), ""
    if name == "data":
        d = new
        if t * d * p > most:
            return None, f"it needs {t * d * p} devices, the cluster has {most}"
    else:
        number = old.data * getattr(old, name)
        if number % new:
            return None, f"{number} ranks that tensor, pipe and data share are no multiple of {new}"
        d = number // new
        t, p = (new, p) if name == "tensor" else (t, new)
    if p * old.virtual > len(engine.row):
        return None, f"the model has {len(engine.row)} units that can be a stage"
    if t > engine.question.machine.network.levels[0].width:
        return None, "a tensor axis stays within the innermost level of links"
    if batch % d:
        return None, f"a batch of {batch} samples is no multiple of {d} shares"
    sizes = [b for b in microbatch_sizes(batch // d) if b <= old.microbatch]
    b = old.microbatch if batch // d % old.microbatch == 0 else max(sizes)
    zero = old.zero if d > 1 else 0
    moved = replace(old, tensor=t, data=d, pipeline=p, microbatch=b, zero=zero)
    if p == 1:
        moved = replace(moved, schedule=PLAIN.name, virtual=1, pipes=1)
    if 1 in (d, p):
        moved = replace(moved, order=ORDERS[0])
    return replace(moved, microbatches=batch // d // b), ""


# -- other hardware -------------------------------------------------------------------------------


def fastest_runnable_request(question: PlanRequest, devices: int) -> PlanRequest:
    """The same question for the fastest plan that today's executor can run, as `headway plan
    --runnable --objective fastest` asks it."""
    today = restrict_to_executor(question, zero=question.zero)
    return replace(today, devices=(devices,), objective="fastest", schedules=RUNNABLE_SCHEDULES)


def hardware_changes(
    question: PlanRequest, priced: Callable[[PlanSearch], Point]
) -> Iterator[HardwareChange[Point]]:
    """Each level of links 2 and 4 times faster, memory and compute twice, launches in half the
    time, one at a time.

    Args:
        question: As of `fastest_runnable_request`.
        priced: The plan itself on another cluster.
    """
    best = _best(question)
    for name, other in _others(question):
        found = _best(other)
        yield HardwareChange(
            name=name,
            own=priced(PlanSearch(other)).seconds,
            best=found,
            changed=_identity(found) != _identity(best),
        )


def _best(question: PlanRequest) -> Point | None:
    try:
        return find_plans(question).best
    except PlanError:
        return None


def _identity(point: Point | None) -> object:
    """What makes it another plan: degrees, and the stages that compute again."""
    return point and (point.degrees, tuple(stage.recompute for stage in point.stages))


def _others(question: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    machine = question.machine
    for name, network in faster_networks(machine.network, question.devices[-1]):
        yield name, replace(question, machine=replace(machine, network=network))
    for name, device in other_devices(machine.device):
        twice = question.memory and 2 * question.memory
        yield (
            name,
            replace(
                question,
                machine=replace(machine, device=device),
                memory=twice if name == TWICE else question.memory,
            ),
        )


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
