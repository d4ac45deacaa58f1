"""Queries of a Pareto front: least time, fewest devices, or the whole profile.
`mini_time` under a cap is the fastest row within the cap; `mini_parallelism` is the least number of
devices with such a row. Source: Cai et al. 2022 (TensorOpt), user options mini-time,
mini-parallelism and profiling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.documents import nearest
from headway.errors import PlanError
from headway.planner.pareto.front import Floats, reduce_front
from headway.planner.pareto.solve import Solution


@dataclass(frozen=True, slots=True)
class FrontierAnswer:
    """One strategy of one frontier.

    Attributes:
        devices: Number of devices of the frontier; 0 where there is only one.
        costs: (d,).
    """

    devices: int
    row: int
    costs: Floats


def mini_time(
    objectives: tuple[str, ...],
    frontier: Solution,
    *,
    cap: Mapping[str, float],
    time: str = "seconds",
) -> FrontierAnswer:
    """The fastest strategy within the caps.

    Raises:
        PlanError: None is within them; says how far each cap is from being met.
    """
    place = _place(objectives, time)
    within = np.ones(len(frontier), dtype=np.bool_)
    for name, most in cap.items():
        within &= frontier.costs[:, _place(objectives, name)] <= most
    if not within.any():
        raise PlanError(
            "no strategy is within the caps", problems=_missing(objectives, frontier, cap)
        )
    rows = np.flatnonzero(within)
    row = int(rows[frontier.costs[rows, place].argmin()])
    return FrontierAnswer(0, row, frontier.costs[row])


def mini_parallelism(
    objectives: tuple[str, ...],
    frontiers: Mapping[int, Solution],
    *,
    cap: Mapping[str, float],
    time: str = "seconds",
) -> FrontierAnswer:
    """The fewest devices with a strategy within the caps, and the fastest one on them.

    Args:
        cap: Most of some objectives; a cap on the time is a deadline.

    Raises:
        PlanError: No number of devices is enough; one line for each.
    """
    problems: list[str] = []
    for devices in sorted(frontiers):
        try:
            found = mini_time(objectives, frontiers[devices], cap=cap, time=time)
        except PlanError as error:
            problems += [f"{devices} devices: {line}" for line in error.problems]
        else:
            return FrontierAnswer(devices, found.row, found.costs)
    raise PlanError("no number of devices is enough", problems=problems, fix="raise a cap")


def profiling(frontiers: Mapping[int, Solution]) -> tuple[FrontierAnswer, ...]:
    """The frontier over device counts: no row is beaten with as few or fewer devices.

    Returns:
        In order of devices, then of the rows.
    """
    rows = [
        FrontierAnswer(n, i, frontiers[n].costs[i])
        for n in sorted(frontiers)
        for i in range(len(frontiers[n]))
    ]
    if not rows:
        return ()
    front = reduce_front(
        np.array([(found.devices, *found.costs) for found in rows], dtype=np.float64)
    )
    return tuple(rows[place] for place in front.origins[:, 0])


def _place(objectives: tuple[str, ...], name: str) -> int:
    if name not in objectives:
        raise ValueError(f"no objective {name!r}{nearest(name, list(objectives))}")
    return objectives.index(name)


def _missing(
    objectives: tuple[str, ...], frontier: Solution, cap: Mapping[str, float]
) -> list[str]:
    least = frontier.costs.min(axis=0, initial=np.inf)
    lines = [
        f"{name}: at least {least[_place(objectives, name)]:g}, the cap is {most:g}"
        for name, most in cap.items()
        if least[_place(objectives, name)] > most
    ]
    return lines or ["each cap can be met, but not all of them together"]
