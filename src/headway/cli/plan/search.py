"""`headway plan RECIPE --cluster ...`: from a model and a cluster to a plan.

Captures the model, searches, prints the frontier and writes the chosen plan. With `--runnable` the
executor tries to cut the model at the stage boundaries of the chosen plan; where it cannot, the
search is repeated without pipelines.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headway.cli.plan.mixed_devices import (
    cost_basis,
    device_type_counts,
    mixed_frontier_plot,
    mixed_question,
    search_mixed_plans,
)
from headway.cli.plan.output import PlanSearchReport, report_data, report_lines
from headway.cli.plan.plan_file import record_provenance
from headway.cli.plan.question import (
    TrainingLength,
    build_question,
    device_price,
    parse_search_options,
    search_precision,
    training_length,
)
from headway.cli.terminal.console import note, say, say_json
from headway.cluster import find_cluster
from headway.cluster.presets import PRESETS, of_preset
from headway.cost.machine_presets import machine_of
from headway.errors import NothingFits, PlanError, RecipeError, UsageError
from headway.plan import Plan
from headway.planner.estimate.degrees import describe_degrees
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.infeasible import infeasible_error
from headway.planner.export.auto import RecipeLimits
from headway.planner.export.prediction import with_prediction
from headway.planner.search.branch_and_bound import PlanSearch, SearchResult, find_plans
from headway.planner.search.plan_conversion import missing_in_executor, to_plan
from headway.planner.search.request import Objective, PlanRequest
from headway.schedule.generators.registry import RUNNABLE_SCHEDULES
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headway.report.pictures.pareto_frontier import FrontierPlot
    from headway.run.recipe.recipe import Recipe


def why_not_cuttable(recipe: Recipe, plan: Plan, samples: int) -> str:
    """Why the executor cannot cut a recipe's model as a plan says; "" where it can.

    Args:
        recipe: Its model and loss; nothing is allocated.
        plan: With any pipeline, or none.
        samples: Of a micro-batch.
    """
    from headway.run.measure.recipe_model import check_stage_boundaries  # imports torch

    if not plan.pipeline.cut:
        return ""
    try:
        check_stage_boundaries(recipe, plan.pipeline.cut, samples)
    except (PlanError, RecipeError) as error:
        return "; ".join((error.what, *getattr(error, "problems", ())))
    return ""


def executable_outcome(outcome: SearchResult, recipe: Recipe) -> SearchResult:
    """The same answer, or without pipelines where the executor cannot cut the model so.

    Args:
        outcome: Of a question about plans that run today.

    Raises:
        PlanError: Without pipelines nothing fits.
    """
    degrees = outcome.best.degrees
    if degrees.pipeline == 1:
        return outcome
    why = why_not_cuttable(recipe, to_plan(outcome, outcome.best), degrees.microbatch)
    if not why:
        return outcome
    note(f"{describe_degrees(degrees)} would be chosen, but cannot run: {why}")
    try:
        return PlanSearch(outcome.question, RecipeLimits(pipeline=False).allow).run()
    except NothingFits:
        raise PlanError(
            "no plan that today's executor can run fits",
            problems=[why, "without a pipeline nothing fits"],
            fix="Change the model so that its forward can be followed, or allow more memory.",
        ) from None


# `headway plan RECIPE --cluster ...`: from a model and a cluster to the frontier of plans.


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
    every = runnable and objective == "fastest"
    wanted = parse_search_options(
        devices=devices,
        memory=memory,
        price=price,
        force=force,
        objective=objective,
        runnable=runnable,
        schedules=schedules or (",".join(RUNNABLE_SCHEDULES) if every else "1f1b"),
        time_limit=time_limit,
    )
    found = find_cluster(cluster, nodes=nodes)
    mixed = len(device_type_counts(found)) > 1
    from headway.cli.plan.optimizer_cost import (  # imports torch
        optimizer_footprint,
        with_measured_optimizer,
    )
    from headway.run.measure.recipe_model import annotated_recipe_graph
    from headway.run.recipe.factory import load_recipe

    begin = time.perf_counter()
    graph, samples, batch, said = annotated_recipe_graph(recipe)
    captured = time.perf_counter()
    if graph.unknown:
        note(f"only replicated, as no rule is known: {', '.join(graph.unknown)}")
    loaded = load_recipe(recipe)
    precision = search_precision(loaded.precision)
    work = PlanningWorkload(
        graph=graph,
        samples=samples,
        optimiser=optimizer_footprint(loaded),
        reads=not loaded.workers,
    )
    annotated = said.forced_choices()
    save = None if out is None else partial(_save, recipe, cluster, nodes, out)
    wanted = replace(wanted, force=wanted.force + annotated.force, tensor=annotated.tensor)
    if mixed:
        asked = mixed_question(wanted, work, batch, found, loaded, precision)
        outcome = search_mixed_plans(
            asked, found, cost_basis(wanted, found, loaded), save, json=json
        )
        if svg or png:
            _pictures(mixed_frontier_plot(outcome, model=recipe, cluster=cluster), svg, png)
        return
    question = build_question(wanted, work, batch, found)
    machine = with_measured_optimizer(question.machine, found, loaded)
    question = replace(question, machine=machine, precision=precision)
    money = device_price(wanted, found)
    if money is not None:
        question = replace(question, price=money.per_hour)
    outcome_ = _search_or_refuse(question, cluster)
    answer = PlanSearchReport(
        outcome=executable_outcome(outcome_, loaded) if runnable else outcome_,
        recipe=recipe,
        cluster=cluster if nodes is None else f"{nodes} x {cluster}",
        currency="" if money is None else money.currency,
        amounts=TrainingLength() if money is None else training_length(loaded),
    )
    done = time.perf_counter()
    if json:
        say_json(report_data(answer))
    else:
        say("\n".join(report_lines(answer)))
    if svg or png:
        from headway.report.pictures.pareto_frontier import frontier_plot

        shown = frontier_plot(answer.outcome, model=answer.recipe, cluster=answer.cluster)
        _pictures(shown, svg, png)
    if save is not None:
        best = answer.outcome.best
        save(with_prediction(to_plan(answer.outcome, best), question, best, found))
        lacks = missing_in_executor(best)
        if lacks:
            note(f"today's executor cannot run {out}: {lacks}")
    note(
        f"captured in {format_seconds(captured - begin)}, searched in "
        f"{format_seconds(done - captured)}{_peak_memory()}"
    )


def _save(recipe: str, cluster: str, nodes: int | None, out: Path, plan: Plan) -> None:
    record_provenance(plan, recipe, cluster, nodes, out).save(out)
    note(f"wrote {out}")


def _search_or_refuse(question: PlanRequest, cluster: str) -> SearchResult:
    try:
        return find_plans(question)
    except NothingFits:
        more = machine_of(of_preset(cluster, nodes=2)).network if cluster in PRESETS else None
        raise infeasible_error(question, more) from None


def _pictures(shown: FrontierPlot, svg: Path | None, png: Path | None) -> None:
    from headway.report.pictures.pareto_frontier import frontier_png, frontier_svg

    for path, made in ((svg, frontier_svg), (png, frontier_png)):
        if path is None:
            continue
        drawn = made(shown)
        try:
            path.write_bytes(drawn.encode() if isinstance(drawn, str) else drawn)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror}", fix="Name another file."
            ) from None
        note(f"wrote {path}")


def _peak_memory() -> str:
    """Of this process so far, where the system says it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return ""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"; this process took at most {format_bytes(most * 1024)}"
