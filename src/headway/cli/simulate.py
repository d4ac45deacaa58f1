"""`headway simulate`: simulate one step of a plan, on any hardware, with faults.

A `SimulationJob` is a plan, given or found by the search, on devices of one type or of several; a
`SimulationScenario` is its step on some hardware, as planned or changed. The rest prints scenarios
side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

from cyclopts import Parameter

from headway.cli.plan.mixed_devices import (
    describe_mixed_point,
    device_type_counts,
    device_types_of_ranks,
    format_device_runs,
    mixed_plan_question,
)
from headway.cli.plan.plan_file import missing_option_error, pricing_target
from headway.cli.plan.question import parse_memory_limit, recipe_workload, search_precision
from headway.cli.schedule.show import write_file
from headway.cli.terminal.console import note, say, say_json
from headway.cluster import Cluster
from headway.cost.machine_presets import machine_of
from headway.cost.transformer import Machine
from headway.errors import PlanError, UsageError
from headway.plan import Plan
from headway.plan import explain as in_words
from headway.planner.estimate.degrees import describe_degrees
from headway.planner.export.mixed_devices import ranks_of, step_of_mixed_plan, step_of_mixed_point
from headway.planner.export.to_simulation import step_of_plan, step_of_point
from headway.planner.search.branch_and_bound import PlanSearch, find_plans
from headway.planner.search.mixed_search import MixedSearch, search_mixed
from headway.planner.search.plan_conversion import unpriced_parts
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest
from headway.report.trace_export import chrome_trace_json
from headway.simulator.ranks import NO_FAULTS, StepFaults
from headway.simulator.simulation import INSIDE, RankBreakdown, SimulatedStep
from headway.simulator.simulation import simulate_training_step as play
from headway.simulator.task_graph import HOST
from headway.simulator.what_if import change_device_types, parse_step_faults
from headway.simulator.work import StepWork
from headway.units import format_bytes, format_seconds

WORDS = {
    "messages": "messages between stages",
    "sums": "sums of gradients",
    "scatters": "scattering of gradients (ZeRO)",
    "gathers": "gathering of parameters (ZeRO)",
    INSIDE: "collectives of the tensor axis",
    HOST: "what the host does beside kernels",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
}
EQUAL_TOLERANCE = 5e-4
"""Shares below this are equal to what is printed."""


@dataclass(frozen=True, kw_only=True)
class SimulationScenario:
    """A step on some hardware.

    Attributes:
        name: "as planned", "changed".
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
        """The ranks that were played, by type of device; under "" where there is one."""
        found: dict[str, list[RankBreakdown]] = {}
        for account in self.step.accounts:
            found.setdefault(self.kinds[account.rank] if self.kinds else "", []).append(account)
        return found


def scenario_table(scenarios: Sequence[SimulationScenario]) -> Iterator[str]:
    """A column for each scenario, and the difference."""
    kinds = list(dict.fromkeys(kind for s in scenarios for kind in s.step.exposed))
    rows = [("", *(s.name for s in scenarios)), ("step", *(_step(s) for s in scenarios))]
    rows.append(("bubble", *(f"{s.step.bubble:.1%}" for s in scenarios)))
    rows.append(("exposed communication", *(_exposed(s.step) for s in scenarios)))
    rows += [
        (f"  {WORDS[kind]}", *(format_seconds(s.step.exposed.get(kind, 0.0)) for s in scenarios))
        for kind in kinds
    ]
    rows += [
        (f"{kind} computes", *(_computing(s.groups[kind], s.step) for s in scenarios))
        for kind in dict.fromkeys(scenarios[0].kinds)
    ]
    rows.append(("memory of the fullest rank", *(format_bytes(s.step.peak) for s in scenarios)))
    if len(scenarios) == 2:
        before, after = (s.step for s in scenarios)
        more = {
            "step": _relative_change(after.seconds, before.seconds),
            "memory of the fullest rank": _relative_change(after.peak, before.peak),
            "exposed communication": _relative_change(
                sum(after.exposed.values()), sum(before.exposed.values())
            ),
        }
        rows = [(*row, more.get(row[0], "")) for row in rows]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _step(scenario: SimulationScenario) -> str:
    return format_seconds(scenario.step.seconds)


def _exposed(step: SimulatedStep) -> str:
    return format_seconds(sum(step.exposed.values()))


def _computing(accounts: Sequence[RankBreakdown], step: SimulatedStep) -> str:
    """Which share of the step some ranks compute, on the average."""
    busy = sum(account.count * sum(account.busy.values()) for account in accounts)
    return f"{busy / sum(account.count for account in accounts) / step.seconds:.1%}"


def _relative_change(after: float, before: float) -> str:
    if abs(after - before) <= EQUAL_TOLERANCE * before:
        return "equal"
    return f"{after / before - 1:+.1%}" if before else "new"


def scenario_lines(
    scenarios: Sequence[SimulationScenario], change: Sequence[str], fault: Sequence[str]
) -> Iterator[str]:
    """The same for people."""
    if len(scenarios) == 2:
        yield f"changed: {'; '.join([*change, *fault])}"
    for scenario in scenarios:
        prefix = f"{scenario.name}: " if len(scenarios) > 1 else ""
        yield prefix + _decisive_line(scenario.step)
        if scenario.price is not None:
            yield f"{prefix}{_priced(scenario)}"
        yield from (f"{prefix}{line}" for line in _fullest(scenario))
    last = scenarios[-1].step
    played = len(last.accounts)
    if played < last.ranks:
        yield f"{played} of {last.ranks} ranks were played, the others behave alike"
    else:
        yield f"all {played} ranks were played"
    if scenarios[-1].step.work.faults != NO_FAULTS and _unmoved(scenarios):
        yield "no part of the step uses what is faulty"


def _fullest(scenario: SimulationScenario) -> Iterator[str]:
    """Of each type of devices."""
    for kind, accounts in scenario.groups.items():
        fullest = max(accounts, key=lambda account: account.peak)
        cap = scenario.cap(fullest.rank)
        over = "; this does not fit" if fullest.peak > cap else ""
        yield (
            f"rank {fullest.rank} is the fullest{f' {kind}' if kind else ''}, "
            f"{format_bytes(fullest.peak)} of {format_bytes(cap)} ({fullest.peak / cap:.1%}){over}"
        )


def _unmoved(scenarios: Sequence[SimulationScenario]) -> bool:
    return scenarios[0].step.seconds == scenarios[-1].step.seconds


def _decisive_line(step: SimulatedStep) -> str:
    shares = sorted(step.decided.items(), key=lambda item: -item[1])
    words = [f"{WORDS[kind]} {seconds / step.seconds:.1%}" for kind, seconds in shares]
    return f"the chain that decides the step is {', '.join(words)}"


def _priced(scenario: SimulationScenario) -> str:
    assert scenario.price is not None
    said = format_seconds(scenario.price)
    than = _relative_change(scenario.step.seconds, scenario.price)
    return f"the formulas of the search say {said}; the events take " + (
        "the same" if than == "equal" else f"{than}"
    )


def scenario_data(scenarios: Sequence[SimulationScenario]) -> dict[str, object]:
    """All figures as plain data."""
    return {
        "scenarios": [
            {
                "name": scenario.name,
                "seconds": scenario.step.seconds,
                "priced": scenario.price,
                "bubble": scenario.step.bubble,
                "exposed": scenario.step.exposed,
                "peak": scenario.step.peak,
                "allowed": scenario.caps if scenario.kinds else scenario.cap(0),
                "decided": scenario.step.decided,
                "path": [asdict(leg) for leg in scenario.step.path],
                "ranks": [
                    asdict(account) | ({"device": kind} if kind else {})
                    for kind, accounts in scenario.groups.items()
                    for account in accounts
                ],
            }
            for scenario in scenarios
        ]
    }


# `headway simulate` where the cluster has devices of several types.


class MixedSimulationJob:
    """A plan, read or found, on devices of several types.

    Args:
        plan: None: the fastest plan that the search finds.
        recipe: As for `headway train`.
        memory: Of a device that may be used.
        ranks: Devices, without a plan.
    """

    def __init__(
        self, plan: Plan | None, recipe: str, cluster: Cluster, memory: str | None, ranks: int
    ) -> None:
        self.plan = plan
        self.question = mixed_plan_question(plan, recipe, cluster, memory, ranks)
        if plan is not None:
            self.kinds = device_types_of_ranks(plan, cluster)
            self.name, words = plan.hash, in_words(plan)
            for sentence in unpriced_parts(plan, unlike=True):
                note(f"note: {sentence}")
        else:
            outcome = search_mixed(self.question)
            self.point, self.engine = outcome.best, outcome.search
            self.kinds, self.name = ranks_of(self.point), describe_mixed_point(self.point)
            words = f"the fastest plan that the search finds: {self.name}"
        self.words = f"{words}\nranks in the order of the mesh: {format_device_runs(self.kinds)}"

    @property
    def machines(self) -> Mapping[str, Machine]:
        return self.question.machines

    def step(self, machines: Mapping[str, Machine]) -> tuple[StepWork, float]:
        """On machines, and its price there. Of a plan that was found degrees, cells and sizes of
        micro-batches stay."""
        question = replace(self.question, machines=machines)
        if self.plan is not None:
            work, priced = step_of_mixed_plan(self.plan, MixedSearch(question), self.kinds)
            return work, priced.seconds
        if machines is self.machines:
            return step_of_mixed_point(self.point, self.engine), self.point.seconds
        engine = MixedSearch(question)
        sharing = engine.sharing(self.point.combination, self.point.sizes)
        again = sharing.fastest(dict.fromkeys(machines, float("inf")))
        assert again is not None  # it had a plan before, and memory is no limit here
        return step_of_mixed_point(again, engine), again.seconds

    def caps(self, machines: Mapping[str, Machine]) -> Mapping[str, float]:
        """Bytes of a device that may be used, by type."""
        return replace(self.question, machines=machines).caps


def device_numbers_of_ranks(kinds: tuple[str, ...], cluster: Cluster) -> tuple[int, ...]:
    """For each rank the number of its device in the cluster: of its type the next free one."""
    free: dict[str | None, list[int]] = {}
    for place, kind in enumerate(cluster.devices_of_ranks):
        free.setdefault(kind, []).append(place)
    return tuple(free[kind].pop(0) for kind in kinds)


# `headway simulate`: a step of a plan, played event by event, on any hardware, with faults.


Machines = Mapping[str, Machine]
"""By type of device."""


class SimulationJob(Protocol):
    """A plan, read or found.

    Attributes:
        name: Its hash, or its degrees.
        kinds: As in `SimulationScenario`.
    """

    name: str
    words: str
    kinds: tuple[str, ...]

    @property
    def machines(self) -> Mapping[str, Machine]:
        """As they are, by type of device."""
        ...

    def step(self, machines: Mapping[str, Machine]) -> tuple[StepWork, float | None]:
        """On some machines, and its price there."""
        ...

    def caps(self, machines: Mapping[str, Machine]) -> Mapping[str, float]:
        """As in `SimulationScenario`."""
        ...


def simulate(
    plan: Path | None = None,
    /,
    *,
    recipe: str | None = None,
    cluster: str | None = None,
    nodes: int | None = None,
    devices: int | None = None,
    memory: str | None = None,
    change: tuple[str, ...] = (),
    fault: tuple[str, ...] = (),
    share_links: Annotated[bool, Parameter(negative="")] = False,
    svg: Path | None = None,
    timeline: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Play a step of a plan: time, bubble, exposed communication, memory; before and after changes.

    Args:
        plan: A plan.json; without one, the fastest plan that the search finds.
        recipe: As for `headway train`; its model is captured, not built in memory. By default that
            of `headway plan --out`, which the plan's file names; so is the cluster.
        cluster: A cluster.toml, or a preset such as dgx-a100.
        nodes: Of a preset; by default 1.
        devices: Without a plan: how many; by default all of the cluster.
        memory: Of a device that may be used, as in "80 GiB"; by default all of it.
        change: Other hardware: "link node-node 100 Gbit/s", "link LEVEL 2x", "latency LEVEL 10 us",
            "device peak 2x", "memory 2x", of one type of devices "device TYPE peak 2x"; several are
            made together.
        fault: "rank 3 slow 2x", "link a-b 10x slower"; several happen together.
        share_links: Let all that a rank sends over one level of links share them evenly: messages
            and collectives under way at the same time slow each other down.
        svg: Write the timelines and the memory to this file.
        timeline: Write a Chrome trace (Perfetto opens it) of the last step to this file.
    """
    loaded = None if plan is None else Plan.load(plan)
    subject = pricing_target(plan, loaded, recipe, cluster, nodes)
    if subject is None:
        raise missing_option_error("--recipe and --cluster")
    found = subject.cluster
    ranks = _ranks(loaded, devices, found)
    job: SimulationJob
    if len(device_type_counts(found)) > 1:
        job = MixedSimulationJob(loaded, subject.recipe, found, memory, ranks)
    else:
        job = UniformSimulationJob(loaded, _question(loaded, subject.recipe, found, ranks, memory))
    places = device_numbers_of_ranks(job.kinds, found)
    other, faults = _scenario(job.machines, found, change, fault, ranks, places)
    work, price = job.step(job.machines)
    work = replace(work, shared=share_links)

    def scenario(
        name: str, work: StepWork, price: float | None, on: Machines
    ) -> SimulationScenario:
        return SimulationScenario(
            name=name, step=play(work), price=price, caps=job.caps(on), kinds=job.kinds
        )

    scenarios = [scenario("as planned", work, price, job.machines)]
    if change:
        work, price = job.step(other)
    if change or fault:
        work = replace(work, shared=share_links, faults=faults)
        scenarios.append(scenario("changed", work, None if fault else price, other))
    if svg is not None:
        from headway.report.pictures.simulated_steps import simulated_steps_svg

        last = scenarios[-1]
        write_file(
            svg,
            simulated_steps_svg(
                [(s.name, s.step) for s in scenarios], last.cap(last.step.fullest.rank)
            ),
        )
    if timeline is not None:
        write_file(timeline, chrome_trace_json(scenarios[-1].step.timeline))
    if json:
        say_json({"plan": job.name, "change": change, "fault": fault} | scenario_data(scenarios))
        return
    say(
        "\n".join(
            [
                job.words,
                "",
                *scenario_table(scenarios),
                "",
                *scenario_lines(scenarios, change, fault),
            ]
        )
    )


def _scenario(
    machines: Machines,
    cluster: Cluster,
    change: Sequence[str],
    fault: Sequence[str],
    ranks: int,
    places: Sequence[int],
) -> tuple[Machines, StepFaults]:
    """Other hardware and what is wrong in a step; what is wrong in both is told together."""
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
            f"{len(errors)} of the sentences mean nothing here",
            why="\n  ".join(f"{error.where}: {error.what}" for error in errors),
            fix="\n  ".join(dict.fromkeys(error.fix for error in errors if error.fix)),
        )
    others = change_device_types(machines, cluster, change)
    return others, parse_step_faults(fault, ranks, cluster, places)


def _ranks(plan: Plan | None, devices: int | None, cluster: Cluster) -> int:
    if plan is not None and devices is not None:
        raise UsageError(
            f"--devices {devices} beside a plan of {plan.ranks} ranks", fix="Leave one of them out."
        )
    said = cluster.ranks if devices is None else devices
    ranks = said if plan is None else plan.ranks
    if ranks < 1:
        raise UsageError(f"--devices {ranks}: at least 1 device is needed")
    if ranks > cluster.ranks:
        raise PlanError(
            f"{ranks} ranks on a cluster of {cluster.ranks}",
            problems=[f"{ranks - cluster.ranks} ranks have no device"],
            fix="Take a larger cluster (--nodes with a preset), or another plan.",
        )
    return ranks


def _question(
    plan: Plan | None, recipe: str, cluster: Cluster, ranks: int, memory: str | None
) -> PlanRequest:
    from headway.cli.plan.optimizer_cost import with_measured_optimizer  # imports torch

    work, batch, found = recipe_workload(recipe, plan)
    return PlanRequest(
        work=work,
        machine=with_measured_optimizer(machine_of(cluster), cluster, found),
        devices=(ranks,),
        batch=batch,
        memory=parse_memory_limit(memory),
        objective="fastest",
        precision=search_precision(found.precision if plan is None else plan.memory.precision),
    )


class UniformSimulationJob:
    """A plan, read or found, on whatever hardware."""

    kinds: tuple[str, ...] = ()

    def __init__(self, plan: Plan | None, question: PlanRequest) -> None:
        self.plan = plan
        self.question = question
        self.machines: Machines = {question.machine.device.name: question.machine}
        if plan is not None:
            self.name, self.words = plan.hash, in_words(plan)
            for sentence in unpriced_parts(plan):
                note(f"note: {sentence}")
            return
        outcome = find_plans(question)
        self.point: Point = outcome.best
        self.engine = outcome.search
        self.name = describe_degrees(self.point.degrees)
        self.words = f"the fastest plan that the search finds: {self.name}"

    def step(self, machines: Machines) -> tuple[StepWork, float | None]:
        """On a machine, and its price there. Of a plan that was found the degrees stay."""
        question = self._on(machines)
        if self.plan is not None:
            work, point = step_of_plan(self.plan, PlanSearch(question))
            return work, None if point is None else point.seconds
        if machines is self.machines:
            return step_of_point(self.point, self.engine), self.point.seconds
        engine = PlanSearch(question)
        again = engine.candidate(self.point.degrees).fastest(float("inf"))
        assert again is not None  # it had a plan before, and memory is no limit here
        return step_of_point(again, engine), again.seconds

    def caps(self, machines: Machines) -> dict[str, float]:
        return {name: self._on(machines).cap for name in machines}

    def _on(self, machines: Machines) -> PlanRequest:
        return replace(self.question, machine=next(iter(machines.values())))
