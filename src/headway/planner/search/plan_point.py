"""A plan of the search's result: its stages, and what a step of it costs.
The parts of a step add up to its seconds, with the pipeline's bubble as the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.planner.estimate.degrees import Degrees


@dataclass(frozen=True, kw_only=True)
class PointStage:
    """One stage of a point.

    Attributes:
        start: Its first unit.
        stop: The unit behind its last.
        price: The number of its strategy among those of the stretch.
        recompute: Whether its units keep only what enters them.
        seconds: Of one micro-batch, both passes.
        tail: Seconds of a step for gradients and update.
        state: Bytes of weights, gradients and optimiser.
        kept: Bytes kept for backward, of all micro-batches under way.
        transient: Bytes for a moment above these, while a micro-batch passes.
        gradients: Of `state`, bytes that are made in the first backward of a step, where all
            micro-batches are under way before it; 0: some are not.
        first: Bytes for a moment above `state` and `kept` in that backward; may be below 0.
        flights: Micro-batches under way.
        passing: Bytes above `state` while the update runs, when nothing is kept.
        params: Bytes of parameters that it holds.
        forward: Of `seconds`, those of the forward pass.
        weight: Of `seconds`, those of the gradients of weights.
        after: Of `tail`, what follows when the gradients have been summed.
    """

    start: int
    stop: int
    price: int
    recompute: bool
    seconds: float
    tail: float
    state: float
    kept: float
    transient: float
    params: float
    forward: float = 0.0
    weight: float = 0.0
    after: float = 0.0
    passing: float = 0.0
    gradients: float = 0.0
    first: float = 0.0
    flights: int = 1

    @property
    def moment(self) -> float:
        """Bytes for a moment above `state` and `kept` at the fullest moment."""
        if not self.gradients:
            return self.transient
        if self.flights == 1:
            return self.first
        return max(self.first, self.transient - self.kept / self.flights)

    @property
    def bytes(self) -> float:
        return self.state + max(self.kept + self.moment, self.passing)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One plan of the frontier.

    Attributes:
        border: Placement of what crosses from stage to stage.
        messages: Of those, between stages.
        exchange: Of those, of gradients and weights over the data axis and copies of stages: what
            computation waits for.
        hidden: Seconds of the same beside which computation goes on.
        update: Of `seconds`, of the optimiser.
        reading: Of `seconds`, of samples put together into batches.
        busy: Of `seconds`, those in which the busiest rank computes.
        ranks: Bytes of each rank of a pipeline.
        bucket: Bytes of the buckets in which gradients travel; 0: not in buckets.
    """

    degrees: Degrees
    border: str
    stages: tuple[PointStage, ...]
    seconds: float
    messages: float
    exchange: float = 0.0
    hidden: float = 0.0
    update: float = 0.0
    reading: float = 0.0
    busy: float = 0.0
    ranks: tuple[float, ...] = ()
    bucket: float = 0.0

    @property
    def bytes(self) -> float:
        """On the fullest device."""
        return max(self.ranks or (stage.bytes for stage in self.stages))

    @property
    def devices(self) -> int:
        return self.degrees.devices


def describe_recomputation(point: Point) -> str:
    """ ", recompute in 2 stages" where some do."""
    number = sum(stage.recompute for stage in point.stages)
    if not number:
        return ""
    return (
        ", recompute"
        if number == len(point.stages)
        else f", recompute in {number} stage{'s' * (number > 1)}"
    )
