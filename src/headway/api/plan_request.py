"""The request to the search, made of options, recipe and cluster.

Options are texts as on the command line, or the values that they stand for; all problems of them
are reported in one error. Functions that need the recipe's model or optimizer import torch when
they are called.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
    from headway.api.recipe_workload import RecipeWorkload
    from headway.plans import Plan
    from headway.run.recipe.recipe import Recipe

_LOG = logging.getLogger("headway")

DeviceCounts = str | int | Sequence[int]
"""8, (6, 12), "8", "6,12" or "1..64"."""


@dataclass(frozen=True, kw_only=True)
class PlanSearchOptions:
    """The options of a search, read.

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
    devices: DeviceCounts | None,
    memory: str | int | None,
    price: str | Price | None,
    force: Sequence[str],
    objective: Objective,
    runnable: bool,
    schedules: str | None,
    time_limit: str | float | None = None,
) -> PlanSearchOptions:
    """The options as values.

    Args:
        memory: Bytes of a device that may be used, or as in "80 GiB".
        schedules: None: 1f1b; of the fastest plan that can run, all that the executor runs.
        time_limit: Seconds, or as in "10 s".

    Raises:
        UsageError: With every problem of all of them.
    """
    forced, problems = parse_force(tuple(force))
    if schedules is None:
        every = runnable and objective == "fastest"
        schedules = ",".join(RUNNABLE_SCHEDULES) if every else "1f1b"
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
            limit = parse_memory(memory)
        except ValueError as error:
            problems.append(f"--memory {error}")
    if price is not None:
        try:
            money = price if isinstance(price, Price) else Price.parse(price)
        except ValueError as error:
            problems.append(f"--price {error}")
    seconds = None
    if time_limit is not None:
        try:
            seconds = parse_duration(time_limit)
        except ValueError as error:
            problems.append(f"--time-limit {error}")
    if problems:
        raise UsageError(
            "these options cannot be read",
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


def parse_duration(said: str | float) -> float:
    """Seconds; of a text as in "10 s".

    Raises:
        ValueError: The text is no duration.
    """
    return parse_seconds(said) if isinstance(said, str) else float(said)


def parse_memory_limit(said: str | int | None) -> int | None:
    """Bytes of what `--memory` says; None: all of a device's.

    Raises:
        UsageError: It is no size, or has no unit.
    """
    try:
        return None if said is None else parse_memory(said)
    except ValueError as error:
        raise UsageError(f"--memory {error}", fix='Write it as "80 GiB".') from None


def parse_memory(said: str | int) -> int:
    """Bytes; a text needs a unit, as "80" could be meant as GiB.

    Raises:
        ValueError: No such size.
    """
    text = f"{said} B" if isinstance(said, int) else said
    size = parse_bytes(text)
    if text.strip().replace(".", "", 1).isdigit():
        raise ValueError(f'{text}: no unit; write "{text} GiB" or "{text} B"')
    if size <= 0:
        raise ValueError(f"{text}: it must be positive")
    return size


def parse_device_counts(said: DeviceCounts) -> tuple[int, ...]:
    """Numbers of devices, ascending, of "8", "6,12" or "1..64": powers of two, and both ends.

    Raises:
        ValueError: No such numbers.
    """
    text = said if isinstance(said, str) else ",".join(map(str, _listed(said)))
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


def _listed(said: int | Sequence[int]) -> Sequence[int]:
    return (said,) if isinstance(said, int) else said


def pricing_request(
    captured: RecipeWorkload,
    cluster: Cluster,
    *,
    devices: tuple[int, ...],
    memory: int | None = None,
    precision: str | None = None,
) -> PlanRequest:
    """A recipe on a cluster, with the update of its optimizer as measured there.

    Args:
        memory: Bytes of a device that may be used; None: all of it.
        precision: Of a plan that is to be priced; None: the recipe's.

    Raises:
        PlanError: The cluster has devices of several types, or says nothing of them.
    """
    from headway.api.recipe_workload import with_measured_optimizer  # imports torch

    kinds = sorted({name for name in cluster.devices_of_ranks if name is not None})
    if len(kinds) > 1:
        raise PlanError(
            "the cluster has devices of several types",
            problems=[f"devices: {', '.join(kinds)}"],
            fix="Describe one type; on the command line plan, explain and simulate take several.",
        )
    return PlanRequest(
        work=captured.work,
        machine=with_measured_optimizer(machine_of(cluster), cluster, captured.recipe),
        devices=devices,
        batch=captured.batch,
        memory=memory,
        precision=captured.precision if precision is None else search_precision(precision),
    )


def build_question(
    wanted: PlanSearchOptions, captured: RecipeWorkload, cluster: Cluster
) -> PlanRequest:
    """The request to the search.

    Raises:
        PlanError: With everything that cannot be on this cluster with this model.
    """
    counts = wanted.counts or (cluster.ranks,)
    problems = []
    if counts[-1] > cluster.ranks:
        problems.append(f"--devices: {counts[-1]}, and the cluster has {cluster.ranks}")
    force, unknown = resolve_force(captured.work, wanted.force)
    problems += unknown
    request = pricing_request(captured, cluster, devices=counts, memory=wanted.memory)
    money = device_price(wanted, cluster)
    request = replace(
        request,
        objective=wanted.objective,
        schedules=wanted.schedules,
        force=force,
        seconds=wanted.seconds,
        price=None if money is None else money.per_hour,
    )
    if wanted.runnable:
        request = narrowed(request, zero=request.zero)
    machine = request.machine
    if not problems:
        inner = machine.network.levels[0].width
        degrees = {t for n in counts for t in divisors(n) if t <= inner}
        request, problems = restrict_to_force(
            request, request.tensor or wanted.tensor or sorted(degrees)
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
        warnings.warn(
            f"--memory {format_bytes(wanted.memory)} is more than the "
            f"{format_bytes(machine.device.memory)} of {machine.device.name}",
            stacklevel=2,
        )
    return request


def check_ranks(ranks: int, cluster: Cluster) -> None:
    """Raise unless every rank of a plan has a device.

    Raises:
        PlanError: The cluster is too small.
    """
    if ranks > cluster.ranks:
        raise PlanError(
            f"the plan has {ranks} ranks, the cluster {cluster.ranks}",
            problems=[f"{ranks - cluster.ranks} ranks have no device"],
            fix="Take a larger cluster (--nodes with a preset), or another plan.",
        )


def device_price(wanted: PlanSearchOptions, cluster: Cluster) -> Price | None:
    """Of a device and hour; None: nobody said."""
    if wanted.price is not None:
        return wanted.price
    try:
        return cluster.price_of([0])
    except PlanError:
        return None


def recipe_workload(recipe: str | Recipe, plan: Plan | None) -> RecipeWorkload:
    """A recipe's model and optimizer, captured.

    Args:
        recipe: As for `load_recipe`.
        plan: That is to be priced for it.

    Raises:
        PlanError: The plan is of another batch, or the model cannot be captured.
        RecipeError: The recipe cannot be used.
    """
    from headway.api.recipe_workload import capture_workload  # imports torch

    captured = capture_workload(recipe)
    if plan is not None and captured.batch != plan.batch.samples:
        raise PlanError(
            "the plan is of another batch than the recipe",
            problems=[f"plan {plan.batch.samples} samples, recipe {captured.batch}"],
            fix="Take the recipe that the plan was made for.",
        )
    return captured


def note_unknown_operators(work: PlanningWorkload) -> None:
    """Log which operators can only be replicated."""
    if work.graph.unknown:
        _LOG.info("only replicated, as no rule is known: %s", ", ".join(work.graph.unknown))


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
        _LOG.info("how long the recipe trains is not known: %s", error.what)
        return TrainingLength()
