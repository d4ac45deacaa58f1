"""`headway.simulate`: one step of a plan, event by event, on any hardware, with faults.

A `SimulationJob` is a plan, given or found by the search; a `SimulationScenario` is its step on
some hardware, as planned or changed. Devices may be of several types. Where workers do not agree at
every step, a run is played instead (`worker_simulation`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headway.api.inputs import (
    ClusterInput,
    PlanInput,
    RecipeInput,
    missing_option_error,
    pricing_target,
    resolve_plan,
)
from headway.api.plan_request import (
    check_ranks,
    device_types_of_ranks,
    parse_memory_limit,
    pricing_request,
    recipe_workload,
)
from headway.api.table_pricing import SplitTablesOfPlan, split_tables_of
from headway.api.worker_simulation import WorkerScenario, worker_scenarios
from headway.cluster import Cluster
from headway.cost.machines import Machine
from headway.errors import UsageError
from headway.keywords import checks_keywords
from headway.planner.export.to_simulation import step_of_plan, step_of_point
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.plan_conversion import fastest_alike, unpriced_parts
from headway.planner.search.plan_point import describe_point, format_device_runs
from headway.planner.search.request import PlanRequest
from headway.plans import Plan
from headway.plans import explain as in_words
from headway.simulator.ranks import StepFaults
from headway.simulator.simulation import RankBreakdown, SimulatedStep, simulate_training_step
from headway.simulator.what_if import change_device_types, parse_step_faults
from headway.simulator.work import StepWork
from headway.timeline import Timeline

_LOG = logging.getLogger("headway")


@dataclass(frozen=True, kw_only=True)
class SimulationScenario:
    """A step on some hardware.

    Attributes:
        price: Seconds that the search says; None: it has no price, or there are faults.
        caps: Bytes of a device that may be used, by type.
        kinds: The type of each rank's device; empty: there is one.
    """

    name: str
    step: SimulatedStep
    price: float | None
    caps: Mapping[str, float]
    kinds: tuple[str, ...] = ()

    def cap(self, rank: int) -> float:
        """Bytes of a rank's device that may be used."""
        return self.caps[self.kinds[rank]] if self.kinds else next(iter(self.caps.values()))

    @property
    def groups(self) -> dict[str, list[RankBreakdown]]:
        """The simulated ranks, by type of device; under "" where there is one."""
        found: dict[str, list[RankBreakdown]] = {}
        for account in self.step.accounts:
            found.setdefault(self.kinds[account.rank] if self.kinds else "", []).append(account)
        return found


NOT_ONE_STEP = (
    "the workers of this plan do not agree at every step: a run is simulated, not one step"
)
RUN_STEPS = 100
"""Of an undisturbed worker, where nobody says how many."""
Machines = Mapping[str, Machine]
"""By type of device."""


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """A step as planned and, where something is changed or faulty, as it is then.

    Attributes:
        plan: Hash of the plan, or the degrees of the one that was found.
        scenarios: "as planned", and "changed" behind it; empty where workers do not agree at every
            step.
        runs: The same of such workers, of which no step says enough; else empty.
    """

    plan: str
    words: str
    scenarios: tuple[SimulationScenario, ...] = ()
    runs: tuple[WorkerScenario, ...] = ()

    @property
    def step(self) -> SimulatedStep:
        """Of the last scenario: seconds, bubble, exposed communication, bytes of each rank.

        Raises:
            UsageError: A run of workers was simulated.
        """
        if not self.scenarios:
            raise UsageError(NOT_ONE_STEP, fix="Use `runs`: the workers' figures.")
        return self.scenarios[-1].step

    @property
    def seconds(self) -> float:
        """Of a step in the last scenario."""
        return self.step.seconds

    @property
    def timeline(self) -> Timeline:
        """What each rank does when, in the last scenario."""
        return self.step.timeline


@checks_keywords
def simulate(
    plan: PlanInput | None = None,
    *,
    recipe: RecipeInput | None = None,
    cluster: ClusterInput | None = None,
    nodes: int | None = None,
    devices: int | None = None,
    memory: str | int | None = None,
    change: Sequence[str] = (),
    fault: Sequence[str] = (),
    share_links: bool = False,
    steps: int | None = None,
) -> SimulationResult:
    """Simulate a step of a plan: time, bubble, exposed communication, memory.

    Of a plan whose workers do not agree at every step a run is simulated: samples per second,
    waits by cause, staleness, bytes by link.

    Args:
        plan: A `Plan` or the path of a plan.json; without one, the fastest plan that the search
            finds.
        recipe: A `Recipe`, "module:function", a recipe.toml, or a bundled workload's name; its
            model is captured, not built in memory. By default what the plan says; so is `cluster`.
        cluster: A `Cluster`, the path of a cluster.toml, or a preset such as "dgx-a100".
        nodes: Of a preset; by default 1.
        devices: Without a plan: how many; by default all of the cluster.
        memory: Bytes of a device that may be used, or as in "80 GiB"; by default all of it.
        change: Other hardware: "link node-node 100 Gbit/s", "link LEVEL 2x", "latency LEVEL 10 us",
            "device peak 2x", "memory 2x"; several are made together.
        fault: "rank 3 slow 2x", "link a-b 10x slower"; in a run of workers also "rank 3 slow 2x
            from step 20 to step 40", "cut link a-b at step 5", and "kill rank 3 at step 7" where
            the others go on; several happen together.
        share_links: Let all that a rank sends over one level of links share them evenly.
        steps: Of a run of workers, by default 100: that each worker makes where all meet; else as
            long is played as the undisturbed workers take for so many.

    Returns:
        The step (`scenarios`) or the run (`runs`) as planned and, with `change` or `fault`, as
        changed; all times in seconds, all memory in bytes.

    Raises:
        UsageError: Neither recipe nor cluster is known, a sentence means nothing here, or an option
            is for the other of step and run.
        RecipeError: The recipe cannot be used.
        DocumentError: A file has problems; all are listed.
        PlanError: The plan is of another batch or for more devices, or nothing fits.
    """
    loaded = None if plan is None else resolve_plan(plan)
    file = None if plan is None or isinstance(plan, Plan) else Path(plan)
    subject = pricing_target(file, loaded, recipe, cluster, nodes)
    if subject is None:
        raise missing_option_error("--recipe and --cluster")
    by_step = loaded is None or loaded.synchrony.by_all_reduce
    _check_options(by_step=by_step, share_links=share_links, steps=steps)
    ranks = count_simulated_ranks(loaded, devices, subject.cluster)
    captured = recipe_workload(subject.recipe, loaded)
    tables = None
    if loaded is not None and loaded.split.tables:
        tables = split_tables_of(loaded, captured)
        captured = tables.captured
    question = pricing_request(
        captured,
        subject.cluster,
        devices=(ranks,),
        memory=parse_memory_limit(memory),
        precision=None if loaded is None else loaded.memory.precision,
    )
    if loaded is not None and not by_step:
        runs = worker_scenarios(
            loaded,
            question,
            subject.cluster,
            change=change,
            fault=fault,
            steps=RUN_STEPS if steps is None else steps,
        )
        return SimulationResult(plan=loaded.hash, words=in_words(loaded), runs=runs)
    # Without a plan one is searched for, and only the fastest is played.
    job = SimulationJob(loaded, replace(question, objective="fastest"), subject.cluster, tables)
    places = device_numbers_of_ranks(job.kinds, subject.cluster)
    other, faults = _scenario(job.machines, subject.cluster, change, fault, ranks, places)
    work, price = job.step(job.machines)
    work = replace(work, shared=share_links)

    def scenario(
        name: str, work: StepWork, price: float | None, on: Machines
    ) -> SimulationScenario:
        return SimulationScenario(
            name=name,
            step=simulate_training_step(work),
            price=price,
            caps=job.question.with_machines(on).caps,
            kinds=job.kinds,
        )

    scenarios = [scenario("as planned", work, price, job.machines)]
    # Faults alone leave the hardware as it is: the same work is played with them.
    if change:
        work, price = job.step(other)
    if change or fault:
        work = replace(work, shared=share_links, faults=faults)
        # The search prices no faults.
        scenarios.append(scenario("changed", work, None if fault else price, other))
    return SimulationResult(plan=job.name, words=job.words, scenarios=tuple(scenarios))


def _check_options(*, by_step: bool, share_links: bool, steps: int | None) -> None:
    """Refuse what is for a step where a run is simulated, and the other way round."""
    if share_links and not by_step:
        raise UsageError(NOT_ONE_STEP, where="--share-links", fix="Leave it out.")
    if steps is not None and by_step:
        raise UsageError(
            "all ranks agree at every step: one step is simulated, not a run",
            where="--steps",
            fix="Leave it out.",
        )


def device_numbers_of_ranks(kinds: tuple[str, ...], cluster: Cluster) -> tuple[int, ...]:
    """For each rank the number of its device in the cluster: of its type the next free one."""
    free: dict[str | None, list[int]] = {}
    for place, kind in enumerate(cluster.devices_of_ranks):
        free.setdefault(kind, []).append(place)
    return tuple(free[kind].pop(0) for kind in kinds)


def _scenario(
    machines: Machines,
    cluster: Cluster,
    change: Sequence[str],
    fault: Sequence[str],
    ranks: int,
    places: Sequence[int],
) -> tuple[Machines, StepFaults]:
    """Other hardware and what is wrong in a step; what is wrong in both is told together."""
    # Each sentence alone first, so that all wrong ones are named.
    checks: list[Callable[[], object]] = [
        *(partial(change_device_types, machines, cluster, [sentence]) for sentence in change),
        *(partial(parse_step_faults, [sentence], ranks, cluster, places) for sentence in fault),
    ]
    errors = []
    for check in checks:
        try:
            check()
        except UsageError as error:
            errors.append(error)
    if len(errors) > 1:
        raise UsageError(
            f"{len(errors)} of the sentences cannot be used here",
            why="\n  ".join(f"{error.where}: {error.what}" for error in errors),
            fix="\n  ".join(dict.fromkeys(error.fix for error in errors if error.fix)),
        )
    others = change_device_types(machines, cluster, change)
    return others, parse_step_faults(fault, ranks, cluster, places)


def count_simulated_ranks(plan: Plan | None, devices: int | None, cluster: Cluster) -> int:
    """Ranks of the plan; without one, as many as are asked for, else the cluster's.

    Raises:
        UsageError: Both are given, or fewer than one device.
        PlanError: The cluster is too small.
    """
    if plan is not None and devices is not None:
        raise UsageError(
            f"--devices {devices} beside a plan of {plan.ranks} ranks", fix="Leave one of them out."
        )
    said = cluster.ranks if devices is None else devices
    ranks = said if plan is None else plan.ranks
    if ranks < 1:
        raise UsageError(f"--devices {ranks}: at least 1 device is needed")
    check_ranks(ranks, cluster)
    return ranks


class SimulationJob:
    """A plan, read or found by the search, on whatever hardware.

    Attributes:
        name: The plan's hash, or the point in words.
        kinds: As in `SimulationScenario`.
        machines: As the cluster has them.
        tables: Split ones of the plan; `question` is that of the other layers.
    """

    def __init__(
        self,
        plan: Plan | None,
        question: PlanRequest,
        cluster: Cluster,
        tables: SplitTablesOfPlan | None = None,
    ) -> None:
        self.plan = plan
        self.tables = tables
        self.question = question
        self.machines: Machines = question.machines
        if plan is not None:
            self.kinds = device_types_of_ranks(plan, cluster)
            self.name, self.words = plan.hash, in_words(plan)
            for sentence in unpriced_parts(plan, unlike=bool(self.kinds)):
                _LOG.info("note: %s", sentence)
        else:
            outcome = find_plans(question)
            self.point, self.search = outcome.best, outcome.search
            self.kinds, self.name = self.point.rank_kinds, describe_point(self.point)
            self.words = f"the fastest plan that the search finds: {self.name}"
        if self.kinds:
            self.words += f"\nranks in the order of the mesh: {format_device_runs(self.kinds)}"

    def step(self, machines: Machines) -> tuple[StepWork, float | None]:
        """On some machines, and its price there. A plan that was found keeps its degrees, layout
        and sizes of micro-batches."""
        if self.plan is not None:
            search = PlanSearch(self.question.with_machines(machines))
            plan = self.plan if self.tables is None else self.tables.rest
            work, point = step_of_plan(plan, search, self.kinds)
            if self.tables is not None:
                # The search has no price for lookups.
                return self.tables.added(work, search, self.kinds), None
            return work, None if point is None else point.seconds
        if machines is self.machines:
            return step_of_point(self.point, self.search), self.point.seconds
        search = PlanSearch(self.question.with_machines(machines))
        again = fastest_alike(self.point, search)
        assert again is not None  # it had a plan before, and memory is no limit here
        return step_of_point(again, search), again.seconds
