"""What is asked of the search on devices of several types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from headway.cost.transformer import Machine
from headway.errors import PlanError
from headway.planner.operators import Workload
from headway.planner.question import Objective, Question


@dataclass(frozen=True, kw_only=True)
class MixedQuestion:
    """What is asked.

    Attributes:
        work: The model.
        machines: Of each type of devices, with one network for all; in an order that
            `balance = "whale"` may change.
        counts: Devices that there are of each type.
        devices: Numbers of devices in all; None: every type whole or not at all.
        batch: Samples of a step.
        memory: Bytes of a device that a plan may use, of any type; None: all of it.
        objective: What the chosen plan must be best in.
        prices: Of a device of each type and hour; empty: not known.
        tensor: Degrees of the tensor axis; None: all up to the devices of the innermost level.
        zero: Stages of ZeRO.
        force: As in `Setting`, and (module, "stage"): a stage begins there.
        balance: "exact": the best sizes of micro-batches; "whale": those of Algorithm 1, and
            devices in the order of their memory.
        runnable: Only what today's executor can run.
        proof: Price all shares that the bound leaves, not `mixed.TRIES` of them.
        precision: As in `Question`.
        seconds: As in `Question`.

    Raises:
        PlanError: The types have different networks: which one joins two types, nobody says.
    """

    work: Workload
    machines: Mapping[str, Machine]
    counts: Mapping[str, int]
    batch: int
    devices: tuple[int, ...] | None = None
    memory: float | None = None
    objective: Objective = "frontier"
    prices: Mapping[str, float] = field(default_factory=dict)
    tensor: tuple[int, ...] | None = None
    zero: tuple[int, ...] = (0, 1, 3)
    force: tuple[tuple[str, str], ...] = ()
    balance: Literal["exact", "whale"] = "exact"
    runnable: bool = False
    proof: bool = False
    precision: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        first, *others = self.machines
        network = self.machines[first].network
        differ = [kind for kind in others if self.machines[kind].network != network]
        if differ:
            raise PlanError(
                "types of devices have different networks",
                problems=[f"machines.{kind}: not that of {first}" for kind in differ],
                fix="Give all the one network that joins them, of the slowest nodes' levels.",
            )

    @cached_property
    def caps(self) -> Mapping[str, float]:
        """Bytes by type."""
        limit = np.inf if self.memory is None else self.memory
        return {kind: min(limit, m.device.memory) for kind, m in self.machines.items()}

    def of(self, kind: str) -> Question:
        """As if there were only one type."""
        return Question(
            work=self.work,
            machine=self.machines[kind],
            devices=(self.counts[kind],),
            batch=self.batch,
            force=self.force,
            precision=self.precision,
            recompute="pipeline" if self.runnable else "any",
        )

    def cost(self, amounts: Sequence[tuple[str, int]], seconds: float) -> float:
        """Of a step; in seconds of devices where prices are not known."""
        return seconds * sum(
            number * (self.prices[kind] / 3600.0 if self.prices else 1.0)
            for kind, number in amounts
        )
