"""`headway plan RECIPE --cluster ...`: from a model and a cluster to the frontier of plans."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headway.cli.asked import with_asked
from headway.cli.console import note, say, say_json
from headway.cli.plan_answer import Answer, facts, lines
from headway.cli.plan_cut import that_runs
from headway.cli.plan_mixed import (
    frontier_of_mixed,
    kinds_of,
    mixed_question,
    money_of,
    plan_mixed,
)
from headway.cli.plan_question import (
    Amounts,
    amounts_of,
    precision_in,
    price_of,
    question_of,
    read_words,
)
from headway.cluster import find_cluster
from headway.cluster.presets import PRESETS, of_preset
from headway.cost.presets import machine_of
from headway.errors import NothingFits, UsageError
from headway.plan import Plan
from headway.planner.operators import Workload
from headway.planner.predicted import with_prediction
from headway.planner.question import Objective, Question
from headway.planner.refusal import refusal
from headway.planner.runnable import RUNS, missing, to_plan
from headway.planner.search import Outcome, search
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headway.report.frontier import Frontier


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
        png: The same as PNG.
        out: Write the chosen plan there, as `headway train --plan` takes it.
        json: Print everything as JSON.
    """
    every = runnable and objective == "fastest"
    wanted = read_words(
        devices=devices,
        memory=memory,
        price=price,
        force=force,
        objective=objective,
        runnable=runnable,
        schedules=schedules or (",".join(RUNS) if every else "1f1b"),
        time_limit=time_limit,
    )
    found = find_cluster(cluster, nodes=nodes)
    mixed = len(kinds_of(found)) > 1
    from headway.cli.optimizer_cost import optimiser_of, with_optimizer  # imports torch
    from headway.run.model_graph import annotated_graph_of
    from headway.run.recipe_file import load_recipe

    begin = time.perf_counter()
    graph, samples, batch, said = annotated_graph_of(recipe)
    captured = time.perf_counter()
    if graph.unknown:
        note(f"only replicated, as no rule is known: {', '.join(graph.unknown)}")
    loaded = load_recipe(recipe)
    precision = precision_in(loaded.precision)
    work = Workload(
        graph=graph, samples=samples, optimiser=optimiser_of(loaded), reads=not loaded.workers
    )
    annotated = said.forced_choices()
    save = None if out is None else partial(_save, recipe, cluster, nodes, out)
    wanted = replace(wanted, force=wanted.force + annotated.force, tensor=annotated.tensor)
    if mixed:
        asked = mixed_question(wanted, work, batch, found, loaded, precision)
        outcome = plan_mixed(asked, found, money_of(wanted, found, loaded), save, json=json)
        if svg or png:
            _pictures(frontier_of_mixed(outcome, model=recipe, cluster=cluster), svg, png)
        return
    question = question_of(wanted, work, batch, found)
    machine = with_optimizer(question.machine, found, loaded)
    question = replace(question, machine=machine, precision=precision)
    money = price_of(wanted, found)
    if money is not None:
        question = replace(question, price=money.per_hour)
    outcome_ = _searched(question, cluster)
    answer = Answer(
        outcome=that_runs(outcome_, loaded) if runnable else outcome_,
        recipe=recipe,
        cluster=cluster if nodes is None else f"{nodes} x {cluster}",
        currency="" if money is None else money.currency,
        amounts=Amounts() if money is None else amounts_of(loaded),
    )
    done = time.perf_counter()
    if json:
        say_json(facts(answer))
    else:
        say("\n".join(lines(answer)))
    if svg or png:
        from headway.report.frontier import frontier_of

        shown = frontier_of(answer.outcome, model=answer.recipe, cluster=answer.cluster)
        _pictures(shown, svg, png)
    if save is not None:
        best = answer.outcome.best
        save(with_prediction(to_plan(answer.outcome, best), question, best, found))
        lacks = missing(best)
        if lacks:
            note(f"today's executor cannot run {out}: {lacks}")
    note(
        f"captured in {format_seconds(captured - begin)}, searched in "
        f"{format_seconds(done - captured)}{_most_memory()}"
    )


def _save(recipe: str, cluster: str, nodes: int | None, out: Path, plan: Plan) -> None:
    with_asked(plan, recipe, cluster, nodes, out).save(out)
    note(f"wrote {out}")


def _searched(question: Question, cluster: str) -> Outcome:
    try:
        return search(question)
    except NothingFits:
        more = machine_of(of_preset(cluster, nodes=2)).network if cluster in PRESETS else None
        raise refusal(question, more) from None


def _pictures(shown: Frontier, svg: Path | None, png: Path | None) -> None:
    from headway.report.frontier import frontier_png, frontier_svg

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


def _most_memory() -> str:
    """Of this process so far, where the system says it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return ""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"; this process took at most {format_bytes(most * 1024)}"
