"""A plan of the search's result: its stages, and what a step of it costs.

The parts of a step add up to its seconds, with the pipeline's bubble as the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from headway.planner.estimate.degrees import Degrees, degree_labels, describe_degrees
from headway.planner.estimate.pipeline_time import PointStage


@dataclass(frozen=True, kw_only=True)
class CopyClass:
    """Copies of the model that stand on devices of the same types.

    Attributes:
        kinds: The type of device of each stage.
        copies: Their numbers on the data axis.
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
        border: Placement of the tensors that cross from stage to stage.
        messages: Of `seconds`, those between stages.
        exchange: Of `seconds`, what computation waits for: gradients and weights over the data axis
            and copies of stages.
        hidden: Seconds of the same beside which computation goes on.
        update: Of `seconds`, the optimiser.
        reading: Of `seconds`, the collation of samples into batches.
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
        """The mean share of the step in which devices of a type do not compute."""
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


def uniform_class(point: Point) -> CopyClass:
    """All copies of a plan on devices of one type."""
    return CopyClass(
        kinds=(point.kind,) * len(point.stages),
        copies=tuple(range(point.degrees.data)),
        microbatch=point.degrees.microbatch,
        stages=point.stages,
    )


def describe_recomputation(point: Point) -> str:
    """ ", recompute in 2 stages" where some do."""
    number = sum(stage.recompute for stage in point.stages)
    if number in (0, len(point.stages)):
        return ", recompute" if number else ""
    return f", recompute in {number} stage{'s' * (number > 1)}"


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
