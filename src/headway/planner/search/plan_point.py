"""A plan of the search's result: its stages, and what a step of it costs.

The parts of a step add up to its seconds, with the pipeline's bubble as the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from headway.planner.estimate.degrees import Degrees, degree_labels, describe_degrees


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
class CopyClass:
    """Copies of the model that stand on devices of the same types.

    Attributes:
        kinds: The type of device of each stage.
        copies: Their numbers on the data axis.
        microbatch: Samples of their largest micro-batch.
        stages: As if all copies were like these.
    """

    kinds: tuple[str, ...]
    copies: tuple[int, ...]
    microbatch: int
    stages: tuple[PointStage, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One plan of the frontier.

    Attributes:
        stages: Where copies differ, each as slow as its slowest copy and as full as the fullest,
            which is how the step is priced.
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
        amounts: Devices of each type in use, where the request has groups of devices.
        classes: The copies of the model, where the request has groups of devices.
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
    amounts: tuple[tuple[str, int], ...] = ()
    classes: tuple[CopyClass, ...] = ()

    @property
    def kind(self) -> str:
        """The type of the devices where all are of one; "": of several, or the request has one."""
        return self.amounts[0][0] if len(self.amounts) == 1 else ""

    def bytes_on(self, kind: str) -> float:
        """On the fullest device of a type."""
        if len(self.amounts) == 1:
            return self.bytes
        return max((stage.bytes for _, stage in self._stages_on(kind)), default=0.0)

    def idle(self, kind: str) -> float:
        """Which share of the step devices of a type do not compute, on the average."""
        found = list(self._stages_on(kind))
        rounds = self.degrees.microbatches * self.degrees.virtual
        busy = sum(rounds * stage.seconds * copies for copies, stage in found)
        return 1.0 - busy / sum(copies for copies, _ in found) / self.seconds

    def _stages_on(self, kind: str) -> Iterator[tuple[int, PointStage]]:
        """(copies, stage) of all stages on devices of a type."""
        for one in self.classes:
            for own, stage in zip(one.kinds, one.stages, strict=True):
                if own == kind:
                    yield len(one.copies), stage

    @property
    def rank_kinds(self) -> tuple[str, ...]:
        """The type of each rank's device, in the order of the plan's mesh; empty where the request
        has one type."""
        d = self.degrees
        copies = {copy: one.kinds for one in self.classes for copy in one.copies}
        if not copies:
            return ()
        if d.order == "tpd":
            cells = [copies[c][s] for c in range(d.data) for s in range(d.pipeline)]
        else:
            cells = [copies[c][s] for s in range(d.pipeline) for c in range(d.data)]
        return tuple(kind for kind in cells for _ in range(d.tensor))

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


def describe_point(point: Point) -> str:
    """ "data 2, pipe 4, 16 micro-batches of 3 and 2, stage by stage, recompute in 1 stage"."""
    degrees = point.degrees
    if len(point.amounts) < 2:
        return describe_degrees(degrees) + describe_recomputation(point)
    sizes = dict.fromkeys(one.microbatch for one in point.classes)
    words = degree_labels(degrees, " and ".join(map(str, sizes)))
    if degrees.data > 1 and degrees.pipeline > 1:
        words.append("copy by copy" if degrees.order == "tpd" else "stage by stage")
    return ", ".join(words) + describe_recomputation(point)


def describe_devices(point: Point) -> str:
    """ "4 v100 + 4 p100", or their number where the request has one type."""
    return " + ".join(f"{n} {kind}" for kind, n in point.amounts) or str(point.devices)


def format_device_runs(kinds: Sequence[str]) -> str:
    """ "4 v100, 4 p100": the types of ranks in their order."""
    return ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(kinds))
