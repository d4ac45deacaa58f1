"""`headway plan RECIPE --cluster ...` where the cluster has devices of several types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from headway.cli.console import note, say, say_json
from headway.cli.plan_question import Wanted
from headway.cluster import Cluster
from headway.cost.network import network_of
from headway.cost.presets import machine_of
from headway.errors import PlanError
from headway.planner.degrees import sizes
from headway.planner.forced import on_modules
from headway.planner.mixed import MixedOutcome, search_mixed
from headway.planner.mixed_plan import missing, ranks_of, shares_of, to_plan
from headway.planner.mixed_point import MixedPoint
from headway.planner.mixed_question import MixedQuestion
from headway.planner.operators import Workload
from headway.planner.runnable import RUNS
from headway.units import format_bytes, format_seconds


def kinds_of(cluster: Cluster) -> dict[str, int]:
    """Devices of each type, in the order of the cluster."""
    return dict(Counter(name for name in cluster.devices_of_ranks if name is not None))


def mixed_question(
    wanted: Wanted, work: Workload, batch: int, cluster: Cluster, precision: str = ""
) -> MixedQuestion:
    """The question to the search.

    Raises:
        PlanError: Somebody's devices are not known, or something is asked for that cannot be.
    """
    counts, network = kinds_of(cluster), network_of(cluster)
    force, problems = on_modules(work, wanted.force)
    if sum(counts.values()) < cluster.ranks:
        problems.append("some nodes do not say which device they have")
    if wanted.counts and wanted.counts[-1] > cluster.ranks:
        problems.append(f"--devices: {wanted.counts[-1]}, and the cluster has {cluster.ranks}")
    if set(wanted.schedules) not in ({"1f1b"}, set(RUNS)):  # the defaults
        problems.append("--schedules: devices of several types are searched with 1f1b only")
    if problems:
        raise PlanError(
            "there can be no such plan",
            problems=problems,
            fix="Describe the cluster's devices; ask for what they and the model have.",
        )
    return MixedQuestion(
        work=work,
        machines={
            kind: replace(machine_of(cluster, device=kind), network=network) for kind in counts
        },
        counts=counts,
        batch=batch,
        devices=wanted.counts,
        memory=wanted.memory,
        objective=wanted.objective,
        prices=_prices(wanted, cluster, counts),
        tensor=wanted.tensor,
        zero=(0,) if wanted.runnable else (0, 1, 3),
        force=force,
        runnable=wanted.runnable,
        precision=precision,
    )


def _prices(wanted: Wanted, cluster: Cluster, counts: dict[str, int]) -> dict[str, float]:
    """Of a device of each type and hour; empty where one is not known."""
    if wanted.price is not None:
        return dict.fromkeys(counts, wanted.price.per_hour)
    prices = {kind: cluster.devices[kind].price for kind in counts}
    known = {kind: price.per_hour for kind, price in prices.items() if price is not None}
    return known if len(known) == len(counts) else {}


def plan_mixed(question: MixedQuestion, out: Path | None, *, json: bool) -> None:
    """Search, print, write.

    Raises:
        NothingFits: No plan is within the memory.
        PlanError: The chosen plan is to be written, and the executor cannot run it.
    """
    outcome = search_mixed(question)
    if json:
        say_json(facts(outcome))
    else:
        say("\n".join(lines(outcome)))
    if out is not None:
        to_plan(outcome, outcome.best).save(out)
        note(f"wrote {out}; its ranks stand on {in_runs(ranks_of(outcome.best))}")


def lines(outcome: MixedOutcome) -> Iterator[str]:
    """The frontier in lines; the chosen plan is marked."""
    head = (" ", "step", "memory", "devices", "plan", "runs today; else lacks")
    rows = [
        (
            "*" if number == outcome.chosen else " ",
            format_seconds(point.seconds),
            format_bytes(point.bytes),
            " + ".join(f"{n} {kind}" for kind, n in point.combination.amounts),
            describe(point),
            missing(point) or "yes",
        )
        for number, point in enumerate(outcome.points)
    ]
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield from _chosen(outcome)
    yield (
        f"{outcome.considered} combinations, {outcome.opened} priced; for "
        f"{outcome.question.objective} the chosen plan is within {outcome.gap:.1%} of the best"
    )


def _chosen(outcome: MixedOutcome) -> Iterator[str]:
    point, row = outcome.best, outcome.search.engine.row
    for number, stage in enumerate(point.stages):
        first = row[stage.start].module or "the inputs"
        last = row[stage.stop - 1].module or first
        yield f"stage {number}: {first} to {last}" + (", recomputed" if stage.recompute else "")
        for part in stage.parts:
            yield (
                f"  {part.copies} x {part.kind}: {format_seconds(part.stage.seconds)} per "
                f"micro-batch of {part.microbatch}, {format_bytes(part.bytes)}"
            )
    if point.combination.data > 1:
        shares = Counter(
            zip(point.combination.cells.copies, shares_of(outcome, point), strict=True)
        )
        said = [f"{n} of {share} ({in_runs(kinds)})" for (kinds, share), n in shares.items()]
        yield f"shares of {outcome.question.batch} samples: {', '.join(said)}"
    yield f"ranks in the order of the mesh: {in_runs(ranks_of(point))}"
    for kind, _ in point.combination.amounts:
        yield f"{kind} idle for {point.idle(kind):.1%} of the step, communication included"


def describe(point: MixedPoint) -> str:
    """ "data 2, pipe 4, 16 micro-batches of 3 and 2, stage by stage"."""
    combination = point.combination
    degrees = combination.degrees(1)
    words = sizes(degrees, " and ".join(map(str, dict.fromkeys(point.sizes))))
    if degrees.data > 1 and degrees.pipeline > 1:
        words.append("copy by copy" if combination.cells.order == "tpd" else "stage by stage")
    again = sum(stage.recompute for stage in point.stages)
    words += [f"recompute in {again} of {len(point.stages)} stages"] * bool(again)
    return ", ".join(words)


def in_runs(kinds: tuple[str, ...]) -> str:
    """ "4 v100, 4 p100"."""
    return ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(kinds))


def facts(outcome: MixedOutcome) -> dict[str, object]:
    """The frontier as plain data; the same question gives the same bytes."""
    return {
        "format": "headway plan search, mixed devices",
        "version": 1,
        "chosen": outcome.chosen,
        "gap": outcome.gap,
        "considered": outcome.considered,
        "opened": outcome.opened,
        "points": [
            {
                "seconds": point.seconds,
                "bytes": point.bytes,
                "devices": dict(point.combination.amounts),
                "border": point.border,
                "lacks": missing(point),
                "combination": asdict(point.combination),
                "shares": shares_of(outcome, point),
                "ranks": ranks_of(point),
                "stages": [asdict(stage) for stage in point.stages],
            }
            for point in outcome.points
        ],
        "provenance": {
            kind: dict(machine.device.source) for kind, machine in outcome.question.machines.items()
        },
    }
