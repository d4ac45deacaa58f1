"""`headway plan RECIPE --cluster ...` where the cluster has devices of several types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

from headway.cli.console import note, say, say_json
from headway.cli.plan_answer import (
    PRICED,
    columns_of_money,
    data_of_money,
    heads_of_money,
    in_hours,
    in_money,
)
from headway.cli.plan_question import Amounts, Wanted, amounts_of
from headway.cluster import Cluster
from headway.collective.calls import Calls, in_rows
from headway.cost.network import network_of
from headway.cost.presets import machine_of
from headway.errors import PlanError
from headway.plan import Plan
from headway.plan.prediction import Prediction
from headway.planner.apart import apart, placed, stages_in_words
from headway.planner.degrees import sizes
from headway.planner.forced import on_modules
from headway.planner.mixed import MixedOutcome, MixedSearch, search_mixed
from headway.planner.mixed_collectives import collectives_of_mixed
from headway.planner.mixed_plan import missing, ranks_of, shares_of, to_plan
from headway.planner.mixed_point import MixedPoint
from headway.planner.mixed_question import MixedQuestion
from headway.planner.operators import Workload
from headway.planner.predicted import prediction_of
from headway.planner.refusal import ends
from headway.planner.row import Unit
from headway.planner.runnable import RUNS
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headway.report.frontier import Frontier
    from headway.run.recipe import Recipe


def kinds_of(cluster: Cluster) -> dict[str, int]:
    """Devices of each type, in the order of the cluster."""
    return dict(Counter(name for name in cluster.devices_of_ranks if name is not None))


def mixed_question(
    wanted: Wanted, work: Workload, batch: int, cluster: Cluster, recipe: Recipe, precision: str
) -> MixedQuestion:
    """The question to the search.

    Args:
        wanted: What the command line says.
        work: Of the recipe's model.
        batch: Samples of a step.
        cluster: With devices of several types.
        recipe: Whose optimiser's update counts, where the file has measured it.
        precision: As in `Question`.

    Raises:
        PlanError: Somebody's devices are not known, or something is asked for that cannot be.
    """
    from headway.cli.optimizer_cost import with_optimizer  # imports torch

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
            kind: replace(
                with_optimizer(machine_of(cluster, device=kind), cluster, recipe), network=network
            )
            for kind in counts
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
        seconds=wanted.seconds,
    )


def _prices(wanted: Wanted, cluster: Cluster, counts: dict[str, int]) -> dict[str, float]:
    """Of a device of each type and hour; empty where one is not known."""
    if wanted.price is not None:
        return dict.fromkeys(counts, wanted.price.per_hour)
    prices = {kind: cluster.devices[kind].price for kind in counts}
    known = {kind: price.per_hour for kind, price in prices.items() if price is not None}
    return known if len(known) == len(counts) else {}


@dataclass(frozen=True)
class Money:
    """What prices are in, and how long the recipe trains.

    Attributes:
        currency: "" where no price is known.
        amounts: Steps.
    """

    currency: str = ""
    amounts: Amounts = field(default_factory=Amounts)


NO_MONEY = Money()


def money_of(wanted: Wanted, cluster: Cluster, recipe: Recipe) -> Money:
    """Nothing where the price of a type is not known."""
    if not _prices(wanted, cluster, kinds_of(cluster)):
        return Money()
    some = wanted.price or cluster.price_of([0])
    return Money("" if some is None else some.currency, amounts_of(recipe))


def plan_mixed(
    question: MixedQuestion,
    cluster: Cluster,
    money: Money,
    save: Callable[[Plan], None] | None,
    *,
    json: bool,
) -> MixedOutcome:
    """Search, print, save the chosen plan.

    Raises:
        NothingFits: No plan is within the memory.
        PlanError: The chosen plan is to be written, and the executor cannot run it.
    """
    outcome = search_mixed(question)
    if json:
        say_json(facts(outcome, money))
    else:
        say("\n".join(lines(outcome, money)))
    if save is not None:
        plan = to_plan(outcome, outcome.best)
        save(replace(plan, prediction=_predicted(outcome, cluster)))
        note(f"its ranks stand on {in_runs(ranks_of(outcome.best))}")
    return outcome


def frontier_of_mixed(outcome: MixedOutcome, *, model: str, cluster: str) -> Frontier:
    """What there is to draw of an answer; allowed is what the largest device may use."""
    from headway.report.frontier import Frontier, Spot

    question = outcome.question
    return Frontier(
        title=f"{model} on {cluster}, batch {question.batch}: {question.objective}",
        spots=tuple(
            Spot(
                seconds=point.seconds,
                bytes=point.bytes,
                devices=point.devices,
                words=describe(point),
                chosen=number == outcome.chosen,
            )
            for number, point in enumerate(outcome.points)
        ),
        allowed=max(question.caps.values()),
    )


def _predicted(outcome: MixedOutcome, cluster: Cluster) -> Prediction:
    """Of a step of the chosen plan, and on which type each rank stands."""
    point = outcome.best
    kind = point.stages[0].parts[0].kind
    return replace(
        prediction_of(outcome.question.of(kind), point.slowest, cluster),
        bytes=point.bytes,
        device=in_runs(ranks_of(point)),
    )


def lines(outcome: MixedOutcome, money: Money = NO_MONEY) -> Iterator[str]:
    """The frontier in lines; the chosen plan is marked."""
    priced = heads_of_money(money.amounts) if outcome.question.prices else []
    notes = points_apart(outcome)
    head = (" ", "step", "memory", "devices", *priced, "plan", "runs today; else lacks")
    rows = [
        (
            "*" if number == outcome.chosen else " ",
            format_seconds(point.seconds),
            format_bytes(point.bytes),
            " + ".join(f"{n} {kind}" for kind, n in point.combination.amounts),
            *columns_of_money(_each(outcome, point), money.currency, money.amounts),
            f"{describe(point)}{said and f' ({said})'}",
            missing(point) or "yes",
        )
        for number, (point, said) in enumerate(zip(outcome.points, notes, strict=True))
    ]
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield from _chosen(outcome, money)
    yield ""
    yield from collectives_in_lines(outcome.search, outcome.best)
    yield (
        f"{outcome.considered} combinations, {outcome.opened} priced; for "
        f"{outcome.question.objective} the chosen plan is within {outcome.gap:.1%} of the best"
    )


def points_apart(outcome: MixedOutcome) -> list[str]:
    """What tells the points of an answer from those that read alike."""
    row = outcome.search.engine.row
    heads = [(point.combination.amounts, describe(point)) for point in outcome.points]
    return apart(heads, [_features(row, point) for point in outcome.points])


def _features(row: Sequence[Unit], point: MixedPoint) -> dict[str, str]:
    prices = [part.stage.price for stage in point.stages for part in stage.parts]
    return {
        "ranks": f"ranks on {in_runs(ranks_of(point))}",
        **stages_in_words(row, point.stages),
        "border": placed(point.border),
        "strategies": f"strategies {prices}",
    }


def _each(outcome: MixedOutcome, point: MixedPoint) -> float | None:
    """What a step costs; None: no price is known."""
    question = outcome.question
    return question.cost(point.combination.amounts, point.seconds) if question.prices else None


def _money(outcome: MixedOutcome, money: Money) -> str:
    point = outcome.best
    each = _each(outcome, point)
    if each is not None:
        return in_money(each, money.currency, money.amounts)
    return in_hours({kind: n * point.seconds for kind, n in point.combination.amounts})


def collectives_in_lines(search: MixedSearch, point: MixedPoint) -> Iterator[str]:
    """Of one rank; those that do the same share their lines."""
    alike: dict[Calls, list[str]] = {}
    for one in collectives_of_mixed(search, point):
        alike.setdefault(one.calls, []).append(f"stage {one.stage} on {one.kind}")
    if not any(alike):
        return
    yield f"{PRICED}:"
    for calls, names in alike.items():
        if len(alike) > 1:
            yield f"{', '.join(dict.fromkeys(names))}:"
        yield from in_rows([calls])
    yield ""


def _chosen(outcome: MixedOutcome, money: Money) -> Iterator[str]:
    point = outcome.best
    yield _money(outcome, money)
    yield from stages_in_lines(outcome.search, point)
    if point.combination.data > 1:
        shares = Counter(
            zip(point.combination.cells.copies, shares_of(outcome, point), strict=True)
        )
        said = [f"{n} of {share} ({in_runs(kinds)})" for (kinds, share), n in shares.items()]
        yield f"shares of {outcome.question.batch} samples: {', '.join(said)}"
    yield f"ranks in the order of the mesh: {in_runs(ranks_of(point))}"
    for kind, _ in point.combination.amounts:
        yield f"{kind} idle for {point.idle(kind):.1%} of the step, communication included"


def stages_in_lines(search: MixedSearch, point: MixedPoint) -> Iterator[str]:
    """What each stage costs on each type of devices."""
    for number, stage in enumerate(point.stages):
        first, last = ends(search.engine, stage)
        yield f"stage {number}: {first} to {last}" + (", recomputed" if stage.recompute else "")
        for part in stage.parts:
            yield (
                f"  {part.copies} x {part.kind}: {format_seconds(part.stage.seconds)} per "
                f"micro-batch of {part.microbatch}, {format_bytes(part.bytes)}"
            )


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


def facts(outcome: MixedOutcome, money: Money = NO_MONEY) -> dict[str, object]:
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
                "money": data_of_money(_each(outcome, point), money.amounts),
                "border": point.border,
                "lacks": missing(point),
                "combination": asdict(point.combination),
                "shares": shares_of(outcome, point),
                "ranks": ranks_of(point),
                "stages": [asdict(stage) for stage in point.stages],
            }
            for point in outcome.points
        ],
        "currency": money.currency,
        "collectives": [asdict(one) for one in collectives_of_mixed(outcome.search, outcome.best)],
        "provenance": {
            kind: dict(machine.device.source) for kind, machine in outcome.question.machines.items()
        },
    }
