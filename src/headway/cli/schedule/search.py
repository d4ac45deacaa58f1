"""`headway schedule search`: the shortest table for given costs under a memory bound.

The table found is compared with the named schedules that fit into the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.schedule.figures import (
    ScheduleCosts,
    ScheduleFigures,
    evaluate_schedule,
    format_range,
    schedule_data,
)
from headway.cli.schedule.show import check_at_least_1
from headway.cli.terminal.console import say, say_json, write_file
from headway.errors import PlanError, UsageError
from headway.planner.schedule_search.tables import (
    ScheduleSearchBudget,
    ScheduleSearchResult,
    search_schedule,
)
from headway.schedule.csv_format import to_csv
from headway.schedule.generators.registry import make_schedule

RIVALS = ("1f1b", "interleaved", "zbv", "dualpipe-v", "chimera")
_UNIT = ScheduleCosts()
_PLACEMENTS = "straight,v,loop,w"
"""One copy of the weights, as the named schedules but Chimera hold."""
# Sums of the same times in another order differ by less.
_ROUNDING = 1e-9
RivalResult = ScheduleFigures | PlanError


def search(
    *,
    stages: int = 4,
    microbatches: int | None = None,
    memory: float | None = None,
    costs: ScheduleCosts = _UNIT,
    placement: str = _PLACEMENTS,
    seconds: float = 20.0,
    seed: int = 0,
    out: Annotated[Path | None, Parameter(name=("--out", "--csv"))] = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Search for the shortest table under a memory limit; compare it with the named schedules.

    Args:
        stages: D, the ranks of the pipeline.
        microbatches: N, per step; by default twice as many as ranks.
        memory: Activations that a rank may hold, in stages of 1/D of the model; by default D.
        costs: Times and sizes of the actions.
        placement: Comma-separated placements of stages: straight, v, loop and w hold the weights
            once, both-directions and both-v twice. v, loop and both-v need 2D stages, w needs 4D.
        seconds: Time limit; a search that ends before it gives the same table on any machine.
        seed: Of the heuristics.
        out: Write the table to this file; `headway train --schedule` reads it.
    """
    costs.check()
    number = 2 * stages if microbatches is None else microbatches
    check_at_least_1(stages=stages, microbatches=number)
    most = float(stages) if memory is None else memory
    if not (most > 0 and seconds > 0):
        raise UsageError(f"--memory {most:g} --seconds {seconds:g}: more than 0")
    places = [place.strip() for place in placement.split(",")]
    found = search_schedule(
        stages,
        number,
        costs.of_stages(stages, stages),
        most_activations=most,
        placements=places,
        budget=ScheduleSearchBudget(seconds=seconds, seed=seed),
    )
    best = evaluate_schedule(found.schedule, costs)
    rivals = {name: _rival(name, stages, number, costs) for name in RIVALS}
    if out is not None:
        write_file(out, to_csv(found.schedule))
    if json:
        say_json(_facts(found, best, rivals, most))
        return
    say(f"{stages} ranks, {number} micro-batches; {costs.text()}")
    say(f"at most {most:g} activations on a rank, in stages of 1/{stages} of the model\n")
    say("\n".join(_table(found, best, rivals, most)) + "\n")
    say("\n".join(_verdict(found, rivals, most, places)))
    say(f"{_search_note(found, seconds, seed)}")
    if out is not None:
        say(f"{out} holds the table, for headway train RECIPE --schedule {out}")


def _rival(name: str, stages: int, microbatches: int, costs: ScheduleCosts) -> RivalResult:
    try:
        return evaluate_schedule(
            make_schedule(name, stages=stages, microbatches=microbatches), costs
        )
    except PlanError as error:
        return error


def _fits(row: RivalResult, most: float) -> bool:
    return isinstance(row, ScheduleFigures) and max(row.stats.peak_activations) <= most + _ROUNDING


def _table(
    found: ScheduleSearchResult, best: ScheduleFigures, rivals: dict[str, RivalResult], most: float
) -> list[str]:
    title = f"{found.schedule.name} ({found.placement})"
    rows: dict[str, RivalResult] = {title: best, **rivals}
    width = max(map(len, rows)) + 2
    lines = [f"{'':<{width}}{'step':>8}{'bubble':>9}{'activations':>14}{'weights':>10}"]
    for name, row in rows.items():
        if isinstance(row, PlanError):
            lines.append(f"{name:<{width}}impossible: {'; '.join(row.problems)}")
            continue
        stats = row.stats
        remark = "" if _fits(row, most) else "  more than allowed"
        lines.append(
            f"{name:<{width}}{stats.makespan:>8.5g}{stats.bubble:>9.1%}"
            f"{format_range(stats.peak_activations):>14}{format_range(stats.weights):>10}{remark}"
        )
    return lines


def _verdict(
    found: ScheduleSearchResult,
    rivals: dict[str, RivalResult],
    most: float,
    placements: Sequence[str],
) -> list[str]:
    """Beside the best that fits, and beside what is possible at all."""
    named = {
        name: row.stats.makespan
        for name, row in rivals.items()
        if isinstance(row, ScheduleFigures) and _fits(row, most)
    }
    lines = []
    if found.makespan >= found.trail[0].makespan - _ROUNDING:
        lines.append(
            f"nothing shorter than a known table was found: this is {found.trail[0].means}"
        )
    if not named:
        lines.append("none of the named schedules fits into this memory")
    else:
        name = min(named, key=named.__getitem__)
        less = 1 - found.makespan / named[name]
        much = "as long as"
        if abs(less) > _ROUNDING:
            much = f"{abs(less):.1%} {'shorter' if less > 0 else 'longer'} than"
        lines.append(f"{much} {name}, the shortest of the named ones that fit")
    where = ", ".join(placements)
    if found.is_optimal:
        lines.append(f"the shortest that there is: no table can beat {found.bound:g} ({where})")
    else:
        gap = found.makespan / found.bound - 1
        lines.append(f"no table can beat {found.bound:g} ({where}); this one is {gap:.1%} above it")
    return lines


def _search_note(found: ScheduleSearchResult, seconds: float, seed: int) -> str:
    if found.out_of_time:
        return f"stopped after {seconds:g} s (seed {seed}); allow more with --seconds"
    return f"search complete (seed {seed}); the same command finds the same table"


def _facts(
    found: ScheduleSearchResult, best: ScheduleFigures, rivals: dict[str, RivalResult], most: float
) -> dict[str, object]:
    named = [
        {"name": name, "possible": True, "fits": _fits(row, most), **schedule_data(row)}
        if isinstance(row, ScheduleFigures)
        else {"name": name, "possible": False, "problems": list(row.problems)}
        for name, row in rivals.items()
    ]
    return {
        **schedule_data(best),
        "placement": found.placement,
        "memory": most,
        "bound": found.bound,
        "optimal": found.is_optimal,
        "out_of_time": found.out_of_time,
        "trail": [{"means": step.means, "step": step.makespan} for step in found.trail],
        "named": named,
    }
