"""Borders of stages that somebody wants, among those that a model has.

Invariant: what is returned are units that can begin a stage, ascending.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.documents import nearest
from headway.errors import PlanError
from headway.planner.operators import Floats
from headway.planner.row import Unit


def start_of(name: str, row: Sequence[Unit]) -> int | None:
    """The unit that begins with a module; no pipeline begins a second stage with the first."""
    numbers = range(1, len(row))
    same = [n for n in numbers if row[n].module == name]
    inside = [n for n in numbers if row[n].module.startswith(f"{name}.")]
    return next(iter([*same, *inside]), None)


def forced_starts(force: Sequence[tuple[str, str]], row: Sequence[Unit]) -> tuple[int, ...]:
    """The first units of the stages that are forced; that of the first unit is always one.

    Args:
        force: (module, what); those with "stage" count.
        row: Of the model.

    Raises:
        PlanError: No stage can begin there.
    """
    names = [module for module, how in force if how == "stage"]
    found = {name: 0 if _is_first(name, row) else start_of(name, row) for name in names}
    legal = list(dict.fromkeys(unit.module for unit in row if unit.module))
    problems = [
        f"{name}=stage: no stage can begin there{nearest(name, legal)}"
        for name, start in found.items()
        if start is None
    ]
    if problems:
        raise PlanError(
            "what is forced is not legal",
            problems=problems,
            fix=f"Stages begin where one tensor crosses: {', '.join(legal)}.",
        )
    return tuple(sorted({start for start in found.values() if start}))


def without_crossing(
    of: np.ndarray, times: Floats, starts: Sequence[int]
) -> tuple[np.ndarray, Floats]:
    """What `pipeline_cuts.cut` takes, so that stages begin at these units: stretches across one
    are of a class of their own, which takes for ever."""
    if not starts:
        return of, times
    first, stop = np.arange(of.shape[0])[:, None], np.arange(of.shape[1])[None, :]
    across = np.zeros(of.shape, dtype=bool)
    for start in starts:
        across |= (first < start) & (stop > start)
    never = np.full((len(times), 1), np.inf)
    return np.where(across, times.shape[1], of), np.concatenate([times, never], axis=1)


def _is_first(name: str, row: Sequence[Unit]) -> bool:
    first = next((unit.module for unit in row if unit.module), "")
    return first == name or first.startswith(f"{name}.")
