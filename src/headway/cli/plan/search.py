"""`headway plan RECIPE --cluster ...`: its options and the search; `output` prints the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.api.planning import TABLES
from headway.api.planning import plan as find_plan
from headway.cli.plan.output import cluster_name, report_data, report_lines
from headway.cli.terminal.console import note, say, say_json, write_file
from headway.errors import UsageError
from headway.planner.search.plan_point import format_device_runs
from headway.planner.search.request import Objective
from headway.units import format_bytes, format_seconds


def search_plans(
    recipe: str,
    /,
    *,
    cluster: str,
    nodes: int | None = None,
    objective: Objective = "frontier",
    memory: str | None = None,
    devices: str | None = None,
    price: str | None = None,
    force: tuple[str, ...] = (),
    schedules: str | None = None,
    runnable: Annotated[bool, Parameter(negative="")] = False,
    time_limit: str | None = None,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    inexact: Annotated[bool, Parameter(negative="")] = False,
    take: str | None = None,
    svg: Path | None = None,
    png: Path | None = None,
    tables_svg: Path | None = None,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Find the Pareto-optimal plans in step time, memory and devices, and choose one.

    Args:
        recipe: As for `headway train`; its model is captured, not allocated.
        cluster: A cluster.toml, or a preset such as dgx-a100; its devices may be of several types.
        nodes: Number of nodes of a preset; by default 1.
        objective: What the chosen plan optimises: step time (also of the frontier), number of
            devices, or cost; where no price is known, device-hours.
        memory: Memory of a device that may be used, as in "80 GiB"; by default all of it.
        devices: "8", "1..64" (powers of two, and both ends) or "6,12"; by default the cluster's.
        price: Of a device, as in "2.5 USD/h"; by default the cluster file's.
        force: Strategy of modules: "blocks.*=split", "head=replicate", "head=split:o" (an axis of
            the operator), "blocks.8=stage" (a stage begins there).
        schedules: Pipeline schedules, as in "1f1b,gpipe,zb-h1"; "all" takes longer. By default
            1f1b; with --runnable --objective fastest all that the executor runs.
        runnable: Look only for plans that the executor can run, without a tensor axis.
        time_limit: Stop searching after this long, as in "10 s", with the best plan so far and its
            distance from the optimum.
        overrides: KEY=VALUE, a change to the recipe; may be repeated.
        inexact: Price local SGD, D-PSGD, asynchronous and bounded servers as well, whose steps do
            not equal the serial run's; the chosen plan is the same.
        take: The name of an inexact plan, or "tables" for the one whose embedding tables lie over
            all ranks, for --out in the place of the chosen one.
        svg: Draw the frontier into this file.
        png: Draw the frontier into this file.
        tables_svg: Draw into this file which embedding table lies where, and each rank's load.
        out: Write the chosen plan to this file, for `headway train --plan`.
    """
    if take is not None and (out is None or not (inexact or take == TABLES)):
        raise UsageError(f"--take {take} needs --inexact and --out FILE", fix="Give all three.")
    result = find_plan(
        recipe,
        cluster,
        nodes=nodes,
        devices=devices,
        memory=memory,
        price=price,
        force=force,
        objective=objective,
        runnable=runnable,
        schedules=schedules,
        time_limit=time_limit,
        overrides=overrides,
        inexact=inexact,
    )
    if json:
        say_json(report_data(result))
    else:
        say("\n".join(report_lines(result)))
    if svg is not None or png is not None:
        # Only for a picture: a search does without the report's packages.
        from headway.report.pictures import pareto_frontier as picture

        shown = picture.frontier_plot(result.outcome, model=recipe, cluster=cluster_name(result))
        for path, draw in ((svg, picture.frontier_svg), (png, picture.frontier_png)):
            if path is not None:
                write_file(path, draw(shown))
                note(f"wrote {path}")
    if tables_svg is not None:
        if result.tables is None:
            raise UsageError(
                "--tables-svg: this model has no embedding tables to place",
                fix="Leave it out; tables are placed where they are most of a model.",
            )
        from headway.report.pictures.table_placement import tables_picture

        name = f"{recipe} on {cluster_name(result)}"
        write_file(tables_svg, tables_picture(result.tables.placement, title=name))
        note(f"wrote {tables_svg}")
    if out is not None:
        result.save(out, take=take)
        note(f"wrote {out}")
        if take is None and result.chosen.rank_kinds:
            note(f"its ranks stand on {format_device_runs(result.chosen.rank_kinds)}")
    note(
        f"captured in {format_seconds(result.capture_seconds)}, searched in "
        f"{format_seconds(result.search_seconds)}{_peak_memory()}"
    )


def _peak_memory() -> str:
    """Of this process so far, where the system says it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return ""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB.
    return f"; peak memory of this process {format_bytes(most * 1024)}"
