"""`headway schedule list | show | compare | check`, with the table of `compare`.

Nothing is run. Every figure is measured on the table itself; published formulas are printed beside
it. Times are in one unit of the user's choice, memory in stages of 1/D of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.api.schedule_table import invalid_table_error
from headway.cli.schedule.figures import (
    ScheduleCosts,
    ScheduleFigures,
    describe_schedule,
    evaluate_schedule,
    format_range,
    schedule_data,
)
from headway.cli.terminal.console import say, say_json, write_file, write_pictures
from headway.errors import PlanError, UsageError
from headway.report.trace_export import chrome_trace_json
from headway.schedule.check import schedule_violations
from headway.schedule.csv_format import read_table, to_csv
from headway.schedule.csv_format import to_torch_csv as torch_text
from headway.schedule.drawing import draw_aligned, draw_timed, legend, timing_timeline
from headway.schedule.generators.registry import SCHEDULES, NamedSchedule, make_schedule
from headway.schedule.pipeline_schedule import PipelineSchedule

_UNIT = ScheduleCosts()


def list_schedules(*, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """List the named pipeline schedules, with their options and sources."""
    if json:
        say_json([{"name": name, **_kind(kind)} for name, kind in SCHEDULES.items()])
        return
    names = max(map(len, SCHEDULES))
    abouts = max(len(kind.about) for kind in SCHEDULES.values())
    for name, kind in SCHEDULES.items():
        takes = "".join(f"  --{option}" for option in kind.options)
        say(f"{name:<{names}}  {kind.about:<{abouts}}  {kind.source}{takes}")


def _kind(kind: NamedSchedule) -> dict[str, object]:
    return {"about": kind.about, "source": kind.source, "options": list(kind.options)}


def show(
    name: str,
    /,
    *,
    stages: int = 4,
    microbatches: int | None = None,
    pipes: int | None = None,
    virtual: int | None = None,
    mode: str | None = None,
    recompute: str | None = None,
    costs: ScheduleCosts = _UNIT,
    aligned: Annotated[bool, Parameter(negative="")] = False,
    svg: Path | None = None,
    png: Path | None = None,
    timeline: Path | None = None,
    csv: Path | None = None,
    torch_csv: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Draw a schedule with its figures: bubble, memory, messages, critical path.

    Args:
        name: One of `headway schedule list`.
        stages: D, the ranks of the pipeline.
        microbatches: N, per step; by default as many as ranks.
        pipes: For chimera: simultaneous pipes, half of them in each direction.
        virtual: For looped schedules: stages per rank.
        mode: For chimera: direct, doubling or halving; how it continues beyond N = D.
        recompute: Stages that recompute their forward in backward, as 0,2; "all" or "none".
        costs: Times and sizes of the actions.
        aligned: Draw equal slots, as in the paper, instead of times.
        svg: Write a picture to this file.
        png: Write the picture as PNG to this file.
        timeline: Write a Chrome trace (opens in Perfetto) to this file; one unit is one second.
        csv: Write the table to this file; `headway train --schedule` reads it.
        torch_csv: Write the table for torch's pipeline runtime to this file.
    """
    costs.check()
    given = {"pipes": pipes, "virtual": virtual, "mode": mode}
    options = {key: value for key, value in given.items() if value is not None}
    number = stages if microbatches is None else microbatches
    schedule = _with_recompute(_make(name, stages, number, options), recompute)
    found = evaluate_schedule(schedule, costs, options=options)
    # First, because it may refuse --aligned: no file is written then.
    text = _drawing(found, aligned=aligned)
    if csv is not None:
        write_file(csv, to_csv(schedule))
    if torch_csv is not None:
        write_file(torch_csv, torch_text(schedule))
    if timeline is not None:
        write_file(timeline, chrome_trace_json(timing_timeline(found.timing)))
    _pictures([found], svg, png)
    if json:
        say_json(schedule_data(found))
        return
    kind = SCHEDULES[name]
    say(f"{schedule.name}: {kind.about} ({kind.source})")
    say(describe_schedule(found, text))


def _make(
    name: str, stages: int, microbatches: int, options: dict[str, int | str]
) -> PipelineSchedule:
    """The schedule of a name; options that it does not take are refused, not dropped."""
    if name in SCHEDULES:
        takes = SCHEDULES[name].options
        wrong = [f"--{option}" for option in options if option not in takes]
        if wrong:
            legal = ", ".join(f"--{option}" for option in takes)
            raise UsageError(
                f"the schedule {name} does not take {', '.join(wrong)}",
                fix=f"It takes {legal}." if takes else "It takes no options of its own.",
            )
    check_at_least_1(stages=stages, microbatches=microbatches)
    return make_schedule(name, stages=stages, microbatches=microbatches, **options)  # type: ignore[arg-type]


def check_at_least_1(**numbers: int) -> None:
    """Refuse options that are not, by their names."""
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"--{name} {number}: at least 1")


def _drawing(found: ScheduleFigures, *, aligned: bool) -> str:
    schedule = found.schedule
    if aligned and schedule.slots is None:
        raise UsageError(
            f"--aligned: {schedule.name} is an order, not a table of equal slots",
            fix="Leave it out: the drawing is by time then.",
        )
    drawn = draw_aligned(schedule) if aligned else draw_timed(schedule, found.timing)
    return f"{drawn}\n{legend(schedule)}"


def _with_recompute(schedule: PipelineSchedule, stages: str | None) -> PipelineSchedule:
    """The schedule, with the stages of which the user says that they recompute."""
    if stages is None:
        return schedule
    again: tuple[int, ...] = schedule.every_stage if stages == "all" else ()
    if stages not in ("all", "none"):
        try:
            again = tuple(sorted({int(stage) for stage in stages.split(",")}))
        except ValueError:
            raise UsageError(f'--recompute {stages}: stages as 0,2, "all" or "none"') from None
    if wrong := set(again) - set(schedule.every_stage):
        last = schedule.stages - 1
        raise UsageError(f"--recompute {min(wrong)}: {schedule.name} has stages 0 to {last}")
    return replace(schedule, recompute=again)


def compare(
    *,
    stages: int = 4,
    microbatches: int | None = None,
    pipes: int = 2,
    virtual: int = 2,
    recompute: str | None = None,
    costs: ScheduleCosts = _UNIT,
    svg: Path | None = None,
    png: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Compare all schedules in one table: step time, bubble, memory, messages.

    Args:
        stages: D, the ranks of the pipeline.
        microbatches: N, per step; by default twice as many as ranks.
        pipes: For chimera: simultaneous pipes, half of them in each direction.
        virtual: For looped schedules: stages per rank.
        recompute: Stages that recompute their forward in backward, as 0,2; "all" or "none".
        costs: Times and sizes of the actions.
        svg: Write one picture with all of them to this file.
        png: Write the picture as PNG to this file.
    """
    costs.check()
    number = 2 * stages if microbatches is None else microbatches
    check_at_least_1(stages=stages, microbatches=number)
    rows: dict[str, ScheduleFigures | PlanError] = {}
    for name, kind in SCHEDULES.items():
        given = {"pipes": pipes, "virtual": virtual}
        options = {key: value for key, value in given.items() if key in kind.options}
        try:
            schedule = _with_recompute(_make(name, stages, number, dict(options)), recompute)
            rows[name] = evaluate_schedule(schedule, costs, options=options)
        except PlanError as error:
            rows[name] = error
    _pictures([row for row in rows.values() if isinstance(row, ScheduleFigures)], svg, png)
    if json:
        say_json([{"name": name, **_row_facts(row)} for name, row in rows.items()])
    else:
        say(_table(rows, stages, number, costs))


def _row_facts(row: ScheduleFigures | PlanError) -> dict[str, object]:
    if isinstance(row, ScheduleFigures):
        return {"possible": True, **schedule_data(row)}
    return {"possible": False, "problems": list(row.problems)}


def _table(
    rows: dict[str, ScheduleFigures | PlanError], stages: int, number: int, costs: ScheduleCosts
) -> str:
    width = max(map(len, rows)) + 2
    lines = [
        f"{stages} ranks, {number} micro-batches; {costs.text()}",
        "",
        f"{'schedule':<{width}}{'step':>8}{'bubble':>9}{'activations':>14}{'weights':>10}"
        f"{'messages':>10}",
    ]
    for name, row in rows.items():
        if isinstance(row, ScheduleFigures):
            lines.append(f"{name:<{width}}{_columns(row)}")
        else:
            lines.append(f"{name:<{width}}impossible: {'; '.join(row.problems)}")
    best = _shortest(rows)
    lines += ["", "activations, weights: of the ranks, in stages of 1/D of the model"]
    if best:
        lines.append(f"shortest step that ends with a flush: {', '.join(best)}")
    return "\n".join(lines)


def _columns(row: ScheduleFigures) -> str:
    stats = row.stats
    remarks = [row.schedule.recomputes] if row.schedule.recompute else []
    remarks += ["no flush: the bubble is paid once, not in every step"] * (not row.schedule.flush)
    return (
        f"{stats.makespan:>8.5g}{stats.bubble:>9.1%}{format_range(stats.peak_activations):>14}"
        f"{format_range(stats.weights):>10}{stats.messages:>10}  {', '.join(remarks)}"
    ).rstrip()


def _shortest(rows: dict[str, ScheduleFigures | PlanError]) -> list[str]:
    flushed = {
        name: row.stats.makespan
        for name, row in rows.items()
        if isinstance(row, ScheduleFigures) and row.schedule.flush
    }
    least = min(flushed.values(), default=0.0)
    # Equal steps of different tables differ by rounding.
    return [name for name, time in flushed.items() if time <= least * (1 + 1e-9)]


def check(
    file: Path,
    /,
    *,
    pipes: int = 1,
    costs: ScheduleCosts = _UNIT,
    svg: Path | None = None,
    png: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Check a schedule table: every violation, by cell.

    Args:
        file: A CSV file, in headway's dialect or in torch's; one row per rank.
        pipes: For a table of torch: its number of pipes.
        costs: Times and sizes of the actions.
        svg: Write a picture of a valid table to this file.
        png: Write the picture as PNG to this file.

    Returns:
        0 for a valid table, 2 for one that cannot be executed.
    """
    costs.check()
    check_at_least_1(pipes=pipes)
    schedule = read_table(file, pipes=pipes)
    wrong = schedule_violations(schedule)
    # With --json the violations are the result, and no error.
    if wrong and json:
        rows = [
            {"rule": v.rule, "rank": v.rank, "cell": v.position, "action": v.action, "text": v.text}
            for v in wrong
        ]
        say_json({"valid": False, "violations": rows})
        return PlanError.exit_code
    if wrong:
        raise invalid_table_error(file, wrong)
    found = evaluate_schedule(schedule, costs)
    _pictures([found], svg, png)
    if json:
        say_json({"valid": True, **schedule_data(found)})
    else:
        say(f"{file}: valid")
        say(describe_schedule(found, _drawing(found, aligned=False)))
    return 0


def _pictures(shown: Sequence[ScheduleFigures], svg: Path | None, png: Path | None) -> None:
    if svg is None and png is None:
        return
    from headway.report.pictures.pipeline_schedule import schedule_png, schedule_svg

    if not shown:
        raise UsageError("there is nothing to draw: no schedule is possible with these numbers")
    write_pictures((svg, lambda: schedule_svg(shown)), (png, lambda: schedule_png(shown)))
