"""`headway plan RECIPE --cluster ...`: from a model and a cluster to the frontier of plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.console import note, say, say_json
from headway.cluster import find_cluster
from headway.cost.presets import machine_of
from headway.errors import PlanError, UsageError
from headway.planner.candidate import Point
from headway.planner.decision import choices
from headway.planner.operators import Workload
from headway.planner.runnable import missing, to_plan
from headway.planner.search import Objective, Outcome, Question, describe, search
from headway.units import format_bytes, format_seconds, parse_bytes


def search_plans(
    recipe: str,
    /,
    *,
    cluster: str,
    nodes: int | None = None,
    objective: Objective = "frontier",
    memory: str | None = None,
    devices: str | None = None,
    force: tuple[str, ...] = (),
    runnable: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Find the plans that nothing beats in step time, memory and devices, and choose one.

    Args:
        recipe: As for `headway train`; its model is captured, not built in memory.
        cluster: A cluster.toml, or a preset such as dgx-a100.
        nodes: Of a preset; by default 1.
        objective: What the chosen plan is best in: step time (also of the frontier), number of
            devices, or money.
        memory: Of a device that may be used, as in "80 GiB"; by default all of it.
        devices: "8", "1..64" (powers of two, and both ends) or "6,12"; by default the cluster's.
        force: "blocks.*=split", "head=replicate", "head=split:o": what modules must do.
        runnable: Look only for plans that today's executor can run: data and pipeline axes.
        out: Write the chosen plan there, as `headway train --plan` takes it.
        json: Print the frontier as JSON.
    """
    found = find_cluster(cluster, nodes=nodes)
    counts = _counts(devices, found.ranks)
    machine = machine_of(found)
    price = None
    if objective == "cheapest":
        price = found.price_of([0]).per_hour
    from headway.run.model_graph import graph_of  # imports torch

    graph, samples, batch = graph_of(recipe)
    if graph.unknown:
        note(f"only replicated, as no rule is known: {', '.join(graph.unknown)}")
    question = Question(
        work=Workload(graph=graph, samples=samples),
        machine=machine,
        devices=counts,
        batch=batch,
        memory=None if memory is None else parse_bytes(memory),
        objective=objective,
        price=price,
        force=tuple(_forced(word) for word in force),
    )
    if runnable:
        question = replace(question, tensor=(1,), zero=(0,))
    outcome = search(question)
    if json:
        say_json(facts(outcome))
    else:
        say("\n".join(table(outcome)))
    if out is not None:
        to_plan(outcome, outcome.best).save(out)
        note(f"wrote {out}")


def table(outcome: Outcome) -> Iterator[str]:
    """The frontier in lines; the chosen plan is marked."""
    question = outcome.question
    shown = [
        (
            "*" if number == outcome.chosen else " ",
            format_seconds(point.seconds),
            format_bytes(point.bytes),
            str(point.devices),
            describe(point.degrees) + _again(point),
            missing(point) or "yes",
        )
        for number, point in enumerate(outcome.points)
    ]
    head = (" ", "step", "memory", "devices", "plan", "runs today; else lacks")
    widths = [max(len(row[n]) for row in (head, *shown)) for n in range(len(head))]
    for row in (head, *shown):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield from _chosen(outcome)
    yield (
        f"{outcome.considered} combinations of degrees, {outcome.opened} solved; "
        f"for {question.objective} the chosen plan is within {outcome.gap:.1%} of the best"
    )
    source = question.machine.device.source
    kinds = ", ".join(sorted({text.partition(":")[0] for text in source.values()}))
    yield f"numbers of {question.machine.device.name}: {kinds}"


def _chosen(outcome: Outcome) -> Iterator[str]:
    """The stages of the chosen plan, and what its operators do."""
    point, row = outcome.best, outcome.search.row
    decided = choices(outcome, point)
    for number, stage in enumerate(point.stages):
        first = row[stage.start].module or "the inputs"
        last = row[stage.stop - 1].module or first
        yield (
            f"stage {number}: {first} to {last}, {format_seconds(stage.seconds)} per micro-batch; "
            f"state {format_bytes(stage.state)}, activations {format_bytes(stage.kept)}"
            + (f", computed again {format_bytes(stage.transient)}" if stage.recompute else "")
        )
    if point.degrees.tensor > 1:
        ways: dict[str, list[str]] = {}
        for choice in decided:
            if choice.parameters:
                ways.setdefault(choice.how, []).append(choice.module)
        for how, modules in ways.items():
            more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
            yield f"{how}: {', '.join(modules[:3])}{more}"


def _again(point: Point) -> str:
    number = sum(stage.recompute for stage in point.stages)
    if not number:
        return ""
    return ", recompute" if number == len(point.stages) else f", recompute in {number} stages"


def facts(outcome: Outcome) -> dict[str, object]:
    """The frontier as plain data; the same question gives the same bytes."""
    return {
        "chosen": outcome.chosen,
        "gap": outcome.gap,
        "considered": outcome.considered,
        "opened": outcome.opened,
        "points": [
            {
                "seconds": point.seconds,
                "bytes": point.bytes,
                "devices": point.devices,
                "border": point.border,
                "lacks": missing(point),
                "degrees": asdict(point.degrees),
                "stages": [asdict(stage) for stage in point.stages],
            }
            for point in outcome.points
        ],
        "choices": [asdict(choice) for choice in choices(outcome, outcome.best)],
        "provenance": dict(outcome.question.machine.device.source),
    }


def _counts(text: str | None, ranks: int) -> tuple[int, ...]:
    """Numbers of devices, ascending.

    Raises:
        UsageError: No such numbers, or more than the cluster has.
    """
    if text is None:
        return (ranks,)
    try:
        low, dots, high = text.partition("..")
        if dots:
            ends = (int(low), int(high))
            powers = [2**n for n in range(ends[1].bit_length()) if ends[0] <= 2**n <= ends[1]]
            found = sorted({*ends, *powers})
        else:
            found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise UsageError(
            f"--devices {text} is no number of devices", fix="Write 8, 6,12 or 1..64."
        ) from None
    if found[0] < 1 or found[-1] > ranks:
        raise PlanError(
            f"--devices {text}: the cluster has {ranks}",
            problems=[f"{found[0]} to {found[-1]} are asked for"],
            fix="Ask for fewer, or describe a larger cluster (--nodes with a preset).",
        )
    return tuple(found)


def _forced(word: str) -> tuple[str, str]:
    pattern, sign, how = word.partition("=")
    if not sign or how.partition(":")[0] not in ("replicate", "split"):
        raise UsageError(
            f"--force {word} says nothing that can be forced",
            fix="Write MODULES=replicate, MODULES=split or MODULES=split:AXIS; MODULES may hold *.",
        )
    return pattern, how
