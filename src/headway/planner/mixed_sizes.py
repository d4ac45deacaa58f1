"""The sizes of micro-batches with which copies on unequal devices are tried.

Invariant: the copies of all classes together have the batch. Source of `balance = "whale"`: Jia et
al. 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headway.cost.transformer import Machine
from headway.errors import PlanError
from headway.planner.mixed_bounds import Least
from headway.planner.mixed_point import Combination
from headway.planner.whale.balance import Share, algorithm_1


def sizes(bounds: Least, combination: Combination, caps: Mapping[str, float]) -> np.ndarray:
    """(n, classes): micro-batches of the classes that together have the batch, none larger
    than it must be beside the others."""
    need = -(-bounds.question.batch // combination.microbatches)
    copies = [number for _, number in combination.cells.classes]
    if bounds.question.balance == "whale":
        found = _by_algorithm_1(bounds, combination, caps, need)
        return np.array([found]) if found else np.zeros((0, len(copies)), dtype=int)
    front: list[tuple[int, ...]] = [()]
    for number in copies[:-1]:
        front = [
            (*some, size)
            for some in front
            for size in range(1, max(1, _left(some, copies, need)) // number + 1)
        ]
    whole = [(*some, max(1, -(-_left(some, copies, need) // copies[-1]))) for some in front]
    return np.array([some for some in whole if _left(some[:-1], copies, need) > 0])


def _by_algorithm_1(
    bounds: Least, combination: Combination, caps: Mapping[str, float], need: int
) -> tuple[int, ...] | None:
    """Whale's shares: by the rates of the devices of a copy, within its memory."""
    kept = bounds.engine.kept * min(combination.microbatches, combination.pipeline)
    shares = [
        Share(
            rate=sum(_flops(bounds.question.machines[kind]) for kind in kinds),
            memory=sum(caps[kind] for kind in kinds),
            scaled=need * kept / combination.tensor,
            fixed=bounds.state(combination),
        )
        for kinds in combination.cells.copies
    ]
    try:
        loads = dict(zip(combination.cells.copies, algorithm_1(shares).loads, strict=True))
    except PlanError:
        return None
    return tuple(
        max(1, int(np.ceil(loads[kinds] * need - 1e-9))) for kinds, _ in combination.cells.classes
    )


def _left(some: Sequence[int], copies: Sequence[int], need: int) -> int:
    return need - sum(n * size for n, size in zip(copies, some, strict=False))


def _flops(machine: Machine) -> float:
    return machine.device.rate(machine.dtype)
