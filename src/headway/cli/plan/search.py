"""`headway plan RECIPE --cluster ...`: from a model and a cluster to the frontier of plans."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headway.api.inputs import record_provenance
from headway.api.plan_request import note_unknown_operators, parse_search_options
from headway.api.planning import plan as find_plan
from headway.cli.plan.mixed_devices import (
    cost_basis,
    device_type_counts,
    mixed_frontier_plot,
    mixed_question,
    search_mixed_plans,
)
from headway.cli.plan.output import PlanSearchReport, report_data, report_lines
from headway.cli.terminal.console import note, say, say_json, write_file
from headway.cluster import find_cluster
from headway.planner.search.request import Objective
from headway.plans import Plan
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headway.report.pictures.pareto_frontier import FrontierPlot


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
    svg: Path | None = None,
    png: Path | None = None,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Find the plans that nothing beats in step time, memory and devices, and choose one.

    Args:
        recipe: As for `headway train`; its model is captured, not built in memory.
        cluster: A cluster.toml, or a preset such as dgx-a100.
        nodes: Of a preset; by default 1.
        objective: What the chosen plan is best in: step time (also of the frontier), number of
            devices, or money; where no price is known, device-hours.
        memory: Of a device that may be used, as in "80 GiB"; by default all of it.
        devices: "8", "1..64" (powers of two, and both ends) or "6,12"; by default the cluster's.
        price: Of a device, as in "2.5 USD/h"; by default the cluster file's.
        force: What modules must do: "blocks.*=split", "head=replicate", "head=split:o" (an axis
            of the operator), "blocks.8=stage" (a stage begins there).
        schedules: Of pipelines, as in "1f1b,gpipe,zb-h1"; "all" takes longer. By default 1f1b; with
            --runnable --objective fastest all that the executor runs.
        runnable: Look only for plans that today's executor can run, without a tensor axis.
        time_limit: Of the search, as in "10 s": then the best so far is told, with what it may be
            from the best there is.
        svg: Draw the frontier into this file.
        out: Write the chosen plan there, as `headway train --plan` takes it.
    """
    found = find_cluster(cluster, nodes=nodes)
    if len(device_type_counts(found)) > 1:
        from headway.api.recipe_workload import capture_workload  # imports torch

        captured = capture_workload(recipe)
        note_unknown_operators(captured.work)
        wanted = parse_search_options(
            devices=devices,
            memory=memory,
            price=price,
            force=force,
            objective=objective,
            runnable=runnable,
            schedules=schedules,
            time_limit=time_limit,
        )
        said = captured.annotations
        wanted = replace(wanted, force=wanted.force + said.force, tensor=said.tensor)
        save = None if out is None else partial(_save, recipe, cluster, nodes, out)
        outcome = search_mixed_plans(
            mixed_question(wanted, captured, found, captured.precision),
            found,
            cost_basis(wanted, found, captured.recipe),
            save,
            json=json,
        )
        if svg or png:
            _pictures(mixed_frontier_plot(outcome, model=recipe, cluster=cluster), svg, png)
        return
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
    )
    answer = PlanSearchReport(
        outcome=result.outcome,
        recipe=recipe,
        cluster=cluster if nodes is None else f"{nodes} x {cluster}",
        currency=result.currency,
        amounts=result.length,
    )
    if json:
        say_json(report_data(answer))
    else:
        say("\n".join(report_lines(answer)))
    if svg or png:
        from headway.report.pictures.pareto_frontier import frontier_plot

        shown = frontier_plot(answer.outcome, model=answer.recipe, cluster=answer.cluster)
        _pictures(shown, svg, png)
    if out is not None:
        result.save(out)
        note(f"wrote {out}")
        if result.missing:
            note(f"today's executor cannot run {out}: {result.missing}")
    note(
        f"captured in {format_seconds(result.capture_seconds)}, searched in "
        f"{format_seconds(result.search_seconds)}{_peak_memory()}"
    )


def _save(recipe: str, cluster: str, nodes: int | None, out: Path, plan: Plan) -> None:
    record_provenance(plan, recipe, cluster, nodes, out).save(out)
    note(f"wrote {out}")


def _pictures(shown: FrontierPlot, svg: Path | None, png: Path | None) -> None:
    from headway.report.pictures.pareto_frontier import frontier_png, frontier_svg

    for path, drawn in ((svg, frontier_svg), (png, frontier_png)):
        if path is not None:
            write_file(path, drawn(shown))
            note(f"wrote {path}")


def _peak_memory() -> str:
    """Of this process so far, where the system says it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return ""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"; this process took at most {format_bytes(most * 1024)}"
