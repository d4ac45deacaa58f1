"""Plans on devices of several types: which devices stand where, and what their stages cost.

Invariant: a stage takes as long as its slowest copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.planner.candidate import Stage
from headway.planner.degrees import Degrees
from headway.planner.mixed_mesh import Cells
from headway.planner.point import Point


@dataclass(frozen=True, kw_only=True, order=True)
class Combination:
    """What the outer loop opens.

    Attributes:
        amounts: Devices of each type in use.
        tensor: t.
        data: d, copies of the model.
        pipeline: p, stages.
        microbatches: m, of a step and every copy.
        zero: Stage of ZeRO over the copies.
        cells: Where the devices stand.
    """

    amounts: tuple[tuple[str, int], ...]
    tensor: int
    data: int
    pipeline: int
    microbatches: int
    zero: int
    cells: Cells

    @property
    def devices(self) -> int:
        return sum(number for _, number in self.amounts)

    def degrees(self, microbatch: int) -> Degrees:
        """As if all copies were of one class."""
        return Degrees(
            tensor=self.tensor,
            data=self.data,
            pipeline=self.pipeline,
            microbatch=microbatch,
            microbatches=self.microbatches,
            zero=self.zero,
            order=self.cells.order,
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stage on the devices of one type in one class of copies.

    Attributes:
        kind: The type.
        copies: So many.
        microbatch: Samples of the largest micro-batch.
        stage: As if all copies were like these.
    """

    kind: str
    copies: int
    microbatch: int
    stage: Stage

    @property
    def bytes(self) -> float:
        return self.stage.bytes


@dataclass(frozen=True, kw_only=True)
class MixedStage:
    """One stage.

    Attributes:
        start: Its first unit.
        stop: The unit behind its last.
        recompute: Whether its units keep only what enters them.
        parts: On every type of devices, class by class.
    """

    start: int
    stop: int
    recompute: bool
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """Of a micro-batch where it is slowest."""
        return max(part.stage.seconds for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class MixedPoint:
    """One plan.

    Attributes:
        combination: Degrees and cells.
        sizes: The largest micro-batch of each class of copies.
        border: Placement of what crosses from stage to stage.
        stages: From the first.
        seconds: Of a step.
        messages: Of those, between stages.
        slowest: As if every copy were as slow as the slowest in everything, which is how it is
            priced.
    """

    combination: Combination
    sizes: tuple[int, ...]
    border: str
    stages: tuple[MixedStage, ...]
    seconds: float
    messages: float
    slowest: Point

    @property
    def bytes(self) -> float:
        """On the fullest device."""
        return max(part.bytes for stage in self.stages for part in stage.parts)

    @property
    def devices(self) -> int:
        return self.combination.devices

    def bytes_on(self, kind: str) -> float:
        """On the fullest device of a type."""
        parts = [part for stage in self.stages for part in stage.parts]
        return max((part.bytes for part in parts if part.kind == kind), default=0.0)

    def idle(self, kind: str) -> float:
        """Which share of the step devices of a type do not compute, on the average."""
        m = self.combination.microbatches
        parts = [part for stage in self.stages for part in stage.parts if part.kind == kind]
        copies = sum(part.copies for part in parts)
        busy = sum(m * part.stage.seconds * part.copies for part in parts) / copies
        return 1.0 - busy / self.seconds
