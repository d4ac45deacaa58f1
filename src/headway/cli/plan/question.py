"""The planner's question from command-line options, recipe and cluster.

All problems of the options are reported in one error. Functions that need the recipe's model or
optimizer import torch when they are called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.cli.terminal.console import note, warn
from headway.cluster import Cluster
from headway.cost.machine_presets import machine_of
from headway.documents import nearest
from headway.errors import HeadwayError, PlanError, UsageError
from headway.planner.estimate.degrees import divisors
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.search.request import (
    ForcedModules,
    Objective,
    PlanRequest,
    parse_force,
    resolve_force,
    restrict_to_force,
)
from headway.planner.search.request import restrict_to_executor as narrowed
from headway.schedule.generators.registry import RUNNABLE_SCHEDULES
from headway.units import Price, format_bytes, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from headway.plan import Plan
    from headway.run.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PlanSearchOptions:
    """What the command line says, read.

    Attributes:
        counts: Numbers of devices, ascending; None: the cluster's.
        memory: Bytes of a device; None: all of it.
        price: Of a device and hour; None: the cluster file's, if any.
        force: (pattern, what).
        objective: As in `PlanRequest`.
        runnable: Only what today's executor can run.
        tensor: Degrees of the tensor axis that the model's annotations allow; None: any.
        seconds: Of searching; None: as long as it takes.
    """

    counts: tuple[int, ...] | None
    memory: int | None
    price: Price | None
    force: ForcedModules
    objective: Objective
    runnable: bool
    schedules: tuple[str, ...]
    tensor: tuple[int, ...] | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingLength:
    """How long a recipe trains.

    Attributes:
        stop: Steps of the whole run; None: not known.
        epoch: Steps of one pass over the data; None: not known.
    """

    stop: int | None = None
    epoch: int | None = None


def parse_search_options(
    *,
    devices: str | None,
    memory: str | None,
    price: str | None,
    force: tuple[str, ...],
    objective: Objective,
    runnable: bool,
    schedules: str,
    time_limit: str | None = None,
) -> PlanSearchOptions:
    """The options as values.

    Raises:
        UsageError: With every problem of all of them.
    """
    forced, problems = parse_force(force)
    named = tuple(word.strip() for word in schedules.split(","))
    problems += [
        f"--schedules {schedules}: no price of {word!r}"
        f"{nearest(word, [*RUNNABLE_SCHEDULES, 'all'])}"
        for word in named
        if word not in (*RUNNABLE_SCHEDULES, "all")
    ]
    counts, limit, money = None, None, None
    if devices is not None:
        try:
            counts = parse_device_counts(devices)
        except ValueError as error:
            problems.append(f"--devices {devices}: {error}")
    if memory is not None:
        try:
            limit = _bytes(memory)
        except ValueError as error:
            problems.append(f"--memory {error}")
    if price is not None:
        try:
            money = Price.parse(price)
        except ValueError as error:
            problems.append(f"--price {error}")
    seconds = None
    if time_limit is not None:
        try:
            seconds = parse_seconds(time_limit)
        except ValueError as error:
            problems.append(f"--time-limit {error}")
    if problems:
        raise UsageError(
            "the question cannot be read",
            why="\n  ".join(problems),
            fix="See headway plan search --help.",
        )
    return PlanSearchOptions(
        counts=counts,
        memory=limit,
        price=money,
        force=forced,
        objective=objective,
        runnable=runnable,
        schedules=named,
        seconds=seconds,
    )


def parse_memory_limit(text: str | None) -> int | None:
    """Bytes of what `--memory` says; None: all of a device's.

    Raises:
        UsageError: It is no size, or has no unit.
    """
    try:
        return None if text is None else _bytes(text)
    except ValueError as error:
        raise UsageError(f"--memory {error}", fix='Write it as "80 GiB".') from None


def _bytes(text: str) -> int:
    size = parse_bytes(text)
    if text.strip().replace(".", "", 1).isdigit():
        raise ValueError(f'{text}: no unit; write "{text} GiB" or "{text} B"')
    if size <= 0:
        raise ValueError(f"{text}: it must be positive")
    return size


def parse_device_counts(text: str) -> tuple[int, ...]:
    """Numbers of devices, ascending, of "8", "6,12" or "1..64": powers of two, and both ends.

    Raises:
        ValueError: No such numbers.
    """
    low, dots, high = text.partition("..")
    try:
        ends = (int(low), int(high)) if dots else (1, 1)
        found = {int(word) for word in text.split(",")} if not dots else {*ends}
    except ValueError:
        raise ValueError("it is no number of devices; write 8, 6,12 or 1..64") from None
    if min(found) < 1:
        raise ValueError("at least 1 device is needed")
    if ends[0] > ends[1]:
        raise ValueError(f"{ends[0]} is more than {ends[1]}; write the smaller one first")
    if dots:
        found |= {2**n for n in range(ends[1].bit_length()) if ends[0] <= 2**n <= ends[1]}
    return tuple(sorted(found))


def build_question(
    wanted: PlanSearchOptions, work: PlanningWorkload, batch: int, cluster: Cluster
) -> PlanRequest:
    """The question to the search.

    Raises:
        PlanError: With everything that cannot be on this cluster with this model.
    """
    machine = machine_of(cluster)
    counts = wanted.counts or (cluster.ranks,)
    problems = []
    if counts[-1] > cluster.ranks:
        problems.append(f"--devices: {counts[-1]}, and the cluster has {cluster.ranks}")
    force, unknown = resolve_force(work, wanted.force)
    problems += unknown
    question = PlanRequest(
        work=work,
        machine=machine,
        devices=counts,
        batch=batch,
        memory=wanted.memory,
        objective=wanted.objective,
        schedules=wanted.schedules,
        force=force,
        seconds=wanted.seconds,
    )
    if wanted.runnable:
        question = narrowed(question, zero=question.zero)
    if not problems:
        inner = machine.network.levels[0].width
        degrees = {t for n in counts for t in divisors(n) if t <= inner}
        question, problems = restrict_to_force(
            question, question.tensor or wanted.tensor or sorted(degrees)
        )
    if problems:
        raise PlanError(
            "there can be no such plan",
            problems=problems,
            fix=(
                "Ask for fewer devices or describe a larger cluster (--nodes with a preset); force "
                "only what the model has."
            ),
        )
    if wanted.memory is not None and wanted.memory > machine.device.memory:
        warn(
            f"--memory {format_bytes(wanted.memory)} is more than the "
            f"{format_bytes(machine.device.memory)} of {machine.device.name}"
        )
    return question


def device_price(wanted: PlanSearchOptions, cluster: Cluster) -> Price | None:
    """Of a device and hour; None: nobody said."""
    if wanted.price is not None:
        return wanted.price
    try:
        return cluster.price_of([0])
    except PlanError:
        return None


def recipe_workload(recipe: str, plan: Plan | None) -> tuple[PlanningWorkload, int, Recipe]:
    """A recipe's model and optimiser, its batch, and the recipe.

    Args:
        plan: That is to be priced for it.

    Raises:
        PlanError: The plan is of another batch, or the model cannot be captured.
    """
    from headway.cli.plan.optimizer_cost import optimizer_footprint  # imports torch
    from headway.run.measure.recipe_model import recipe_graph
    from headway.run.recipe.factory import load_recipe

    graph, samples, batch = recipe_graph(recipe)
    if plan is not None and batch != plan.batch.samples:
        raise PlanError(
            "the plan is of another batch than the recipe",
            problems=[f"plan {plan.batch.samples} samples, recipe {batch}"],
            fix="Take the recipe that the plan was made for.",
        )
    found = load_recipe(recipe)
    work = PlanningWorkload(
        graph=graph, samples=samples, optimiser=optimizer_footprint(found), reads=not found.workers
    )
    return work, batch, found


def search_precision(said: str) -> str:
    """As `PlanRequest.precision` has what a recipe or a plan says."""
    return "bfloat16" if said == "bfloat16" else ""


def training_length(recipe: Recipe) -> TrainingLength:
    """How many steps a recipe trains, where it says and its data are there."""
    from headway.data import as_source  # imports torch
    from headway.run.recipe.batch_units import steps_per_epoch, stop_steps

    try:
        length = len(as_source(recipe.data()))
        return TrainingLength(
            stop=stop_steps(recipe, length), epoch=steps_per_epoch(recipe, length)
        )
    except HeadwayError as error:
        note(f"how long the recipe trains is not known: {error.what}")
        return TrainingLength()
