"""Borders of stages that somebody wants, among those that a model has.

Invariant: what is returned are units that can begin a stage, ascending.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from headway.documents import nearest
from headway.errors import PlanError
from headway.planner.row import Unit


def start_of(name: str, row: Sequence[Unit]) -> int | None:
    """The unit that begins with a module; no pipeline begins a second stage with the first."""
    numbers = range(1, len(row))
    same = [n for n in numbers if name in (row[n].module, row[n].layer)]
    inside = [n for n in numbers if _lies_in(name, row[n].module) or _lies_in(name, row[n].layer)]
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


def named(unit: Unit, force: Sequence[tuple[str, str]]) -> str:
    """What a plan calls the border in front of a unit: the module with which it begins, or its
    layer, where that is what somebody said that begins a stage."""

    names = [name for name, how in force if how == "stage"]
    module, layer = (any(_lies_in(n, known) for n in names) for known in (unit.module, unit.layer))
    return unit.layer if layer and not module else unit.module


def nameless(row: Sequence[Unit]) -> frozenset[int]:
    """Units that no plan can name as the first of a stage: what calls no module (a loss, a mean),
    a later call of a module, and the first module, before which the executor has no stage."""
    first = next((n for n, unit in enumerate(row) if unit.module), len(row))
    seen = {""}
    found = set()
    for number, unit in enumerate(row):
        if number and (number <= first or unit.module in seen):
            found.add(number)
        seen.add(unit.module)
    return frozenset(found)


def without_crossing(
    of: np.ndarray, starts: Sequence[int], barred: Collection[int] = ()
) -> np.ndarray:
    """What `pipeline_cuts.cut` takes, so that stages begin at `starts` and at no `barred` unit."""
    if not starts and not barred:
        return of
    first, stop = np.arange(of.shape[0])[:, None], np.arange(of.shape[1])[None, :]
    never = np.isin(first, list(barred)) & (stop > first)
    for start in starts:
        never |= (first < start) & (stop > start)
    return np.where(never, -1, of)


def _is_first(name: str, row: Sequence[Unit]) -> bool:
    first = next((unit.module for unit in row if unit.module), "")
    return _lies_in(name, first)


def _lies_in(name: str, module: str) -> bool:
    """Whether a module is the one of this name, or inside of it."""
    return module == name or module.startswith(f"{name}.")
