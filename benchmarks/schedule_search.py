"""Searched and split-weight Chimera tables against the best known ones, at equal peak memory.

    python benchmarks/schedule_search.py [lists] [moves]

Simulation alone: makespans in units of one rank's forward (F = I = W = 1 per rank and micro-batch,
no messages), activations and weights in units of one rank's share of one copy of the model. An
activation is held until its weight gradient. Every printed table has passed `check_schedule`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from headway.errors import PlanError
from headway.planner.schedule_search.placements import costs_of
from headway.planner.schedule_search.tables import (
    ScheduleSearchBudget,
    ScheduleSearchResult,
    search_schedule,
)
from headway.schedule.check import check_schedule
from headway.schedule.generators.registry import make_schedule
from headway.schedule.pipeline_schedule import PipelineSchedule
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import ScheduleStats, measure_schedule

PLACEMENTS = {
    "one copy, halves": ("straight", "v", "loop"),
    "one copy, quarters": ("w",),
    "two copies, whole stages": ("both-directions",),
    "two copies, halves": ("both-v",),
}
SLOW = 1.5


def named(name: str, ranks: int, microbatches: int) -> PipelineSchedule:
    schedule = make_schedule(name, stages=ranks, microbatches=microbatches)
    check_schedule(schedule)
    return replace(schedule, recompute=())


def judge(schedule: PipelineSchedule, costs: StageCosts) -> ScheduleStats:
    return measure_schedule(schedule, costs_of(schedule.stages, costs))


def row(name: str, stats: ScheduleStats, rival: float, note: str = "") -> None:
    saved = 100 * (1 - stats.makespan / rival)
    print(
        f"  {name:<34}{stats.makespan:8.2f}{100 * stats.bubble:8.1f} %{saved:+8.1f} %"
        f"{max(stats.peak_activations):8.2f}{max(stats.weights):6.0f}{stats.messages:10d}  {note}"
    )


def head(title: str) -> None:
    print(f"\n{title}")
    titles = f"{'table':<34}{'makespan':>8}{'bubble':>10}{'saved':>10}"
    print(f"  {titles}{'activ.':>8}{'weights':>8}{'msgs':>8}")


def search(
    costs: StageCosts,
    microbatches: int,
    most: float,
    placements: tuple[str, ...],
    budget: ScheduleSearchBudget,
) -> ScheduleSearchResult:
    return search_schedule(
        costs.stages,
        microbatches,
        costs,
        most_activations=most,
        placements=placements,
        budget=budget,
    )


def searched(
    costs: StageCosts, microbatches: int, most: float, rival: float, budget: ScheduleSearchBudget
) -> None:
    """With one copy of the weights and with two, by how finely the stages are cut."""
    for copies, placements in PLACEMENTS.items():
        start = time.perf_counter()
        try:
            found = search(costs, microbatches, most, placements, budget)
        except PlanError:
            print(f"  searched, {copies}: no table within {most:g} activations was found")
            continue
        note = "proven best of its placements" if found.is_optimal else f"bound {found.bound:.2f}"
        note += f"; {found.trail[-1].means}"
        note += f", {time.perf_counter() - start:.1f} s"
        row(f"searched, {copies}", judge(found.schedule, found.costs), rival, note)


def against(rival_name: str, ranks: int, microbatches: int, budget: ScheduleSearchBudget) -> None:
    costs = StageCosts.of(ranks)
    rival = judge(named(rival_name, ranks, microbatches), costs)
    most = max(rival.peak_activations)
    head(f"D={ranks}, N={microbatches}, at most {most:g} activations, the peak of {rival_name}")
    row(rival_name, rival, rival.makespan)
    split = judge(named("chimera-split", ranks, microbatches), costs)
    row("chimera-split", split, rival.makespan)
    searched(costs, microbatches, most, rival.makespan, budget)


def at_memory_of_1f1b(budget: ScheduleSearchBudget, ranks: int = 4, microbatches: int = 8) -> None:
    """Beside every schedule that torch has too; "over" are those that hold more than 1F1B."""
    costs = StageCosts.of(ranks)
    rival = judge(named("1f1b", ranks, microbatches), costs)
    most = max(rival.peak_activations)
    head(f"D={ranks}, N={microbatches}, at most {most:g} activations, the peak of 1f1b")
    for name in ("1f1b", "gpipe", "interleaved", "breadth-first", "interleaved-zero-bubble"):
        beside(name, costs, microbatches, most, rival.makespan)
    for name in ("zbv", "dualpipe-v", "zb-h1", "chimera", "chimera-split"):
        beside(name, costs, microbatches, most, rival.makespan)
    searched(costs, microbatches, most, rival.makespan, budget)


def beside(name: str, costs: StageCosts, microbatches: int, most: float, rival: float) -> None:
    stats = judge(named(name, costs.stages, microbatches), costs)
    row(name, stats, rival, "over" if max(stats.peak_activations) > most else "")


def unequal(budget: ScheduleSearchBudget, ranks: int = 4, microbatches: int = 8) -> None:
    """One stage takes longer; the looped and folded tables cut it into two halves."""
    for slow in range(ranks):
        times = tuple(SLOW if stage == slow else 1.0 for stage in range(ranks))
        costs = StageCosts.of(ranks, forward=times)
        rivals = {n: judge(named(n, ranks, microbatches), costs) for n in ("1f1b", "interleaved")}
        best = min(stats.makespan for stats in rivals.values())
        head(f"stage {slow} takes {SLOW} times as long; D={ranks}, N={microbatches}")
        for name, stats in rivals.items():
            row(name, stats, best)
        quarters = make_schedule("interleaved", stages=ranks, microbatches=microbatches, virtual=4)
        row("interleaved, 4 per rank", judge(quarters, costs), best)
        for name in ("zbv", "interleaved-zero-bubble", "chimera-split"):
            beside(name, costs, microbatches, float("inf"), best)
        searched(costs, microbatches, max(rivals["1f1b"].peak_activations), best, budget)


def main(lists: int = 400, moves: int = 4000) -> None:
    budget = ScheduleSearchBudget(lists=lists, moves=moves)
    start = time.perf_counter()
    print(f"Saved: less time than the first table (of unequal stages: the best). {budget}")
    for ranks in (4, 8):
        for microbatches in (ranks, 2 * ranks, 4 * ranks):
            for rival in ("zbv", "dualpipe-v"):
                if rival == "zbv" or microbatches >= 2 * ranks:
                    against(rival, ranks, microbatches, budget)
    at_memory_of_1f1b(budget)
    unequal(budget)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
