"""The parts of a step's time and of the fullest stage's memory.

The parts of a step are the terms of the candidate's price and add up to its seconds, those of a
stage to its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.planner.estimate.pricing import host_seconds
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest

ROUNDING = 1e-9
"""Parts below this share of a step are none."""


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


def step_parts(question: PlanRequest, point: Point) -> tuple[StepPart, ...]:
    """The terms of a step, the largest first; only those above `ROUNDING` of it, or hidden ones."""
    machine = question.of(point.amounts[0][0] if point.amounts else "").machine
    degrees, network = point.degrees, machine.network
    graph = question.work.graph
    trained = {name for o in graph.operators for name in o.parameters} - set(graph.frozen)
    host = host_seconds(machine.device.host, degrees, len(trained))
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
    # A message spans its two ends, an exchange all of its group.
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


def memory_share(question: PlanRequest, point: Point) -> float:
    """Of what a device may use, what the fullest one needs."""
    if not point.amounts:
        return point.bytes / question.cap
    return max(point.bytes_on(kind) / question.caps[kind] for kind, _ in point.amounts)


def fullest_stage_memory(question: PlanRequest, point: Point) -> StageMemory:
    """What the fullest stage holds, by category; a rank with several stages holds more."""
    number = max(range(len(point.stages)), key=lambda n: point.stages[n].bytes)
    stage = point.stages[number]
    weights = stage.params / (point.degrees.data if point.degrees.zero >= 3 else 1)
    updates = stage.passing > stage.kept + stage.moment
    absent = 0.0 if updates else max(0.0, -stage.moment)  # gradients that are not made yet
    return StageMemory(
        stage=number,
        bytes=stage.bytes,
        share=memory_share(question, point),
        weights=weights,
        training=stage.state - weights - absent,
        activations=0.0 if updates else stage.kept,
        again=0.0 if updates else max(0.0, stage.moment),
        update=stage.passing if updates else 0.0,
    )
