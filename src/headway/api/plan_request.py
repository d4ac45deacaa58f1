"""The request to the search, made of options, recipe and cluster.

Options are texts as on the command line, or the values that they stand for; all problems of them
are reported in one error. Functions that need the recipe's model or optimizer import torch when
they are called.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from headway.cluster import Cluster
from headway.cost.machines import Machine, machine_of
from headway.cost.network import network_of
from headway.documents import nearest
from headway.errors import HeadwayError, PlanError, UsageError
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.search.request import (
    DeviceGroup,
    ForcedModules,
    Objective,
    PlanRequest,
    parse_force,
    resolve_force,
    restrict_to_executor,
    restrict_to_force,
)
from headway.plans.tensor_layout import divisors
from headway.schedule.generators.registry import RUNNABLE_SCHEDULES
from headway.units import Price, format_bytes, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from headway.api.recipe_workload import RecipeWorkload
    from headway.plans import Plan
    from headway.run.recipe.recipe import Recipe

_LOG = logging.getLogger("headway")
ValueT = TypeVar("ValueT")

DeviceCounts = str | int | Sequence[int]
"""8, (6, 12), "8", "6,12" or "1..64"."""


@dataclass(frozen=True, kw_only=True)
class PlanSearchOptions:
    """The options of a search, read.

    Attributes:
        counts: Numbers of devices, ascending; None: the cluster's.
        memory: Bytes of a device; None: all of it.
        price: Of a device and hour; None: the cluster file's, if any.
        tensor: Degrees of the tensor axis that the model's annotations allow; None: any.
        seconds: Time limit of the search.
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

    Raises:
        UsageError: With the problems of all options.
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

    def read(name: str, parse: Callable[[Any], ValueT], said: object) -> ValueT | None:
        try:
            return None if said is None else parse(said)
        except ValueError as error:
            problems.append(f"--{name} {error}")
            return None

    options = PlanSearchOptions(
        counts=read("devices", parse_device_counts, devices),
        memory=read("memory", parse_memory, memory),
        price=price if isinstance(price, Price) else read("price", Price.parse, price),
        force=forced,
        objective=objective,
        runnable=runnable,
        schedules=named,
        seconds=read("time-limit", parse_duration, time_limit),
    )
    if problems:
        raise UsageError(
            "these options cannot be read",
            why="\n  ".join(problems),
            fix="See headway plan search --help.",
        )
    return options


def parse_duration(said: str | float) -> float:
    """Seconds; of a text as in "10 s".

    Raises:
        ValueError: The text is no duration.
    """
    return parse_seconds(said) if isinstance(said, str) else float(said)


def parse_memory_limit(said: str | int | None) -> int | None:
    """As `parse_memory`; None: all of a device's.

    Raises:
        UsageError: Not a size, or without a unit.
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
    numbers = (said,) if isinstance(said, int) else said
    text = numbers if isinstance(numbers, str) else ",".join(map(str, numbers))
    low, dots, high = text.partition("..")
    try:
        # (1, 1) passes the checks below, which are about ranges.
        ends = (int(low), int(high)) if dots else (1, 1)
        found = {int(word) for word in text.split(",")} if not dots else {*ends}
    except ValueError:
        raise ValueError(f"{text}: not a number of devices; write 8, 6,12 or 1..64") from None
    if min(found) < 1:
        raise ValueError(f"{text}: at least 1 device is needed")
    if ends[0] > ends[1]:
        raise ValueError(f"{text}: {ends[0]} is more than {ends[1]}; write the smaller one first")
    if dots:
        found |= {2**n for n in range(ends[1].bit_length()) if ends[0] <= 2**n <= ends[1]}
    return tuple(sorted(found))


def device_type_counts(cluster: Cluster) -> dict[str, int]:
    """Devices of each type, in the order of the cluster."""
    return dict(Counter(name for name in cluster.devices_of_ranks if name is not None))


def pricing_request(
    captured: RecipeWorkload,
    cluster: Cluster,
    *,
    devices: tuple[int, ...] | None,
    memory: int | None = None,
    precision: str | None = None,
) -> PlanRequest:
    """A recipe on a cluster, with the update of its optimizer as measured there.

    Args:
        devices: None: all devices of one type; of several types each whole or not at all.
        precision: Of a plan that is to be priced; None: the recipe's.

    Raises:
        PlanError: The cluster does not say which devices it has.
    """
    from headway.api.recipe_workload import with_measured_optimizer  # imports torch

    counts = device_type_counts(cluster)
    if len(counts) > 1 and sum(counts.values()) < cluster.ranks:
        raise PlanError(
            "this request cannot be planned",
            problems=["some nodes do not say which device they have"],
            fix="Describe the devices of all nodes in the cluster file.",
        )

    def machine(kind: str | None) -> Machine:
        found = machine_of(cluster, device=kind)
        return with_measured_optimizer(found, cluster, captured.recipe)

    groups: tuple[DeviceGroup, ...] = ()
    if len(counts) > 1:
        # A fitted preset brings links of its own; a request has one network that joins all groups.
        network = network_of(cluster)
        groups = tuple(
            DeviceGroup(kind=kind, machine=replace(machine(kind), network=network), count=number)
            for kind, number in counts.items()
        )
    said = captured.recipe.precision if precision is None else precision
    return PlanRequest(
        work=captured.work,
        machine=groups[0].machine if groups else machine(None),
        groups=groups,
        devices=devices if devices is not None else () if groups else (cluster.ranks,),
        batch=captured.batch,
        memory=memory,
        # Autocast to bfloat16 or, as "", the precision of the tensors: the search knows no other.
        precision="bfloat16" if said == "bfloat16" else "",
    )


def build_question(
    options: PlanSearchOptions, captured: RecipeWorkload, cluster: Cluster
) -> PlanRequest:
    """The request to the search.

    Raises:
        PlanError: With everything that cannot be on this cluster with this model.
    """
    force, unknown = resolve_force(captured.work, options.force)
    problems = list(unknown)
    if options.counts and options.counts[-1] > cluster.ranks:
        problems.insert(0, f"--devices: {options.counts[-1]}, and the cluster has {cluster.ranks}")
    request = pricing_request(captured, cluster, devices=options.counts, memory=options.memory)
    prices = {kind: price.per_hour for kind, price in device_prices(options, cluster).items()}
    request = replace(
        request,
        objective=options.objective,
        schedules=options.schedules,
        force=force,
        seconds=options.seconds,
        price=None if request.groups else next(iter(prices.values()), None),
        groups=tuple(replace(group, price=prices.get(group.kind)) for group in request.groups),
    )
    if options.runnable:
        request = restrict_to_executor(request, zero=request.zero)
    if not problems:
        # The tensor axis is always innermost: all its ranks share that level of links.
        inner = request.machine.network.levels[0].width
        numbers = request.devices or tuple(group.count for group in request.groups)
        degrees = {t for n in numbers for t in divisors(n) if t <= inner}
        allowed = request.tensor or options.tensor or sorted(degrees)
        request, problems = restrict_to_force(request, allowed)
    if problems:
        raise PlanError(
            "this request cannot be planned",
            problems=problems,
            fix=(
                "Ask for fewer devices or describe a larger cluster (--nodes with a preset); force "
                "only what the model has."
            ),
        )
    largest = max((one.device for one in request.machines.values()), key=lambda one: one.memory)
    if options.memory is not None and options.memory > largest.memory:
        warnings.warn(
            f"--memory {format_bytes(options.memory)} is more than the "
            f"{format_bytes(largest.memory)} of {largest.name}",
            stacklevel=2,
        )
    return request


def device_types_of_ranks(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """The type of each rank's device: as the search has written it into the plan's prediction, else
    in the order of the cluster's file. Empty where all devices are of one type.

    Raises:
        PlanError: The cluster has fewer devices of a type, or does not say what it has.
    """
    if len(device_type_counts(cluster)) < 2:
        return ()
    there = [kind for kind in cluster.devices_of_ranks if kind is not None]
    said = plan.prediction.device if plan.prediction else ""
    kinds = there[: plan.ranks]
    # Of devices of one type a prediction has the name alone, without numbers.
    if re.fullmatch(r"\d+ [^ ,]+(, \d+ [^ ,]+)*", said):
        runs = (run.split(" ") for run in said.split(", "))
        kinds = [kind for number, kind in runs for _ in range(int(number))]
    lacking = Counter(kinds) - Counter(there)
    if len(kinds) != plan.ranks or lacking:
        raise PlanError(
            "the plan is for other devices than the cluster's",
            problems=[f"{n} x {kind} too few" for kind, n in lacking.items()]
            or [f"{plan.ranks} ranks, and {len(kinds)} of them have a known device"],
            fix="Name the cluster that it was made for, or make a plan for this one.",
        )
    return tuple(kinds)


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


def device_prices(options: PlanSearchOptions, cluster: Cluster) -> Mapping[str, Price]:
    """Of a device and hour, by type; empty unless all are known."""
    counts = device_type_counts(cluster)
    if options.price is not None:
        return dict.fromkeys(counts, options.price)
    prices = {kind: cluster.devices[kind].price for kind in counts}
    known = {kind: price for kind, price in prices.items() if price is not None}
    # A cost that leaves some types out would look like a low one.
    return known if len(known) == len(counts) else {}


def recipe_workload(recipe: str | Recipe, plan: Plan | None) -> RecipeWorkload:
    """A recipe's model and optimizer, captured.

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
        _LOG.info("replicated, as no sharding rule is known: %s", ", ".join(work.graph.unknown))


def training_length(recipe: Recipe) -> TrainingLength:
    """How many steps a recipe trains, where it says and its data are there."""
    from headway.run.recipe.batch_units import steps_per_epoch, stop_steps
    from headway.run.recipe.training_data import (  # imports torch
        recipe_epoch_length,
        training_data,
    )

    try:
        length = recipe_epoch_length(recipe, training_data(recipe))
        return TrainingLength(
            stop=stop_steps(recipe, length), epoch=steps_per_epoch(recipe, length)
        )
    # The data may be missing on the machine that plans: costs of the whole run are then left out.
    except HeadwayError as error:
        _LOG.info("the length of training is unknown: %s", error.what)
        return TrainingLength()
