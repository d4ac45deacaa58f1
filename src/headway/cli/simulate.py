"""`headway simulate`: a step of a plan, played event by event, on any hardware, with faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

from cyclopts import Parameter

from headway.cli.asked import subject_of, without_subject
from headway.cli.console import note, say, say_json
from headway.cli.plan_mixed import kinds_of
from headway.cli.plan_question import memory_of, precision_in, work_of
from headway.cli.schedule import write
from headway.cli.simulate_answer import Scenario, facts, sentences, table
from headway.cli.simulate_mixed import MixedJob, places_of
from headway.cluster import Cluster
from headway.cost.presets import machine_of
from headway.cost.transformer import Machine
from headway.errors import PlanError, UsageError
from headway.plan import Plan
from headway.plan import explain as in_words
from headway.planner.degrees import describe
from headway.planner.planned import candidate_of, simplified
from headway.planner.played import step_of_plan, step_of_point
from headway.planner.point import Point
from headway.planner.search import Question, Search, search
from headway.report.chrome import chrome_json
from headway.simulator.ranks import Faults
from headway.simulator.simulated import simulate as play
from headway.simulator.what_if import changed_types, faults_of
from headway.simulator.work import StepWork

Machines = Mapping[str, Machine]
"""By type of device."""


class Job(Protocol):
    """A plan, read or found.

    Attributes:
        name: Its hash, or its degrees.
        words: What it does.
        kinds: As in `Scenario`.
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
        """As in `Scenario`."""
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
        json: Print the figures as JSON.
    """
    loaded = None if plan is None else Plan.load(plan)
    subject = subject_of(plan, loaded, recipe, cluster, nodes)
    if subject is None:
        raise without_subject("--recipe and --cluster")
    found = subject.cluster
    ranks = _ranks(loaded, devices, found)
    job: Job
    if len(kinds_of(found)) > 1:
        job = MixedJob(loaded, subject.recipe, found, memory, ranks)
    else:
        job = _Job(loaded, _question(loaded, subject.recipe, found, ranks, memory))
    places = places_of(job.kinds, found)
    other, faults = _scenario(job.machines, found, change, fault, ranks, places)
    work, price = job.step(job.machines)
    work = replace(work, shared=share_links)

    def scenario(name: str, work: StepWork, price: float | None, on: Machines) -> Scenario:
        return Scenario(name=name, step=play(work), price=price, caps=job.caps(on), kinds=job.kinds)

    scenarios = [scenario("as planned", work, price, job.machines)]
    if change:
        work, price = job.step(other)
    if change or fault:
        work = replace(work, shared=share_links, faults=faults)
        scenarios.append(scenario("changed", work, None if fault else price, other))
    if svg is not None:
        from headway.report.simulated import picture

        last = scenarios[-1]
        write(svg, picture([(s.name, s.step) for s in scenarios], last.cap(last.step.fullest.rank)))
    if timeline is not None:
        write(timeline, chrome_json(scenarios[-1].step.timeline))
    if json:
        say_json({"plan": job.name, "change": change, "fault": fault} | facts(scenarios))
        return
    say("\n".join([job.words, "", *table(scenarios), "", *sentences(scenarios, change, fault)]))


def _scenario(
    machines: Machines,
    cluster: Cluster,
    change: Sequence[str],
    fault: Sequence[str],
    ranks: int,
    places: Sequence[int],
) -> tuple[Machines, Faults]:
    """Other hardware and what is wrong in a step; what is wrong in both is told together."""
    checks: list[Callable[[], object]] = [
        *(partial(changed_types, machines, cluster, [sentence]) for sentence in change),
        *(partial(faults_of, [sentence], ranks, cluster, places) for sentence in fault),
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
    others = changed_types(machines, cluster, change)
    return others, faults_of(fault, ranks, cluster, places)


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
) -> Question:
    from headway.cli.optimizer_cost import with_optimizer  # imports torch

    work, batch, found = work_of(recipe, plan)
    return Question(
        work=work,
        machine=with_optimizer(machine_of(cluster), cluster, found),
        devices=(ranks,),
        batch=batch,
        memory=memory_of(memory),
        objective="fastest",
        precision=precision_in(found.precision if plan is None else plan.memory.precision),
    )


class _Job:
    """A plan, read or found, on whatever hardware."""

    kinds: tuple[str, ...] = ()

    def __init__(self, plan: Plan | None, question: Question) -> None:
        self.plan = plan
        self.question = question
        self.machines: Machines = {question.machine.device.name: question.machine}
        if plan is not None:
            self.name, self.words = plan.hash, in_words(plan)
            for sentence in simplified(plan):
                note(f"note: {sentence}")
            return
        outcome = search(question)
        self.point: Point = outcome.best
        self.engine = outcome.search
        self.name = describe(self.point.degrees)
        self.words = f"the fastest plan that the search finds: {self.name}"

    def step(self, machines: Machines) -> tuple[StepWork, float | None]:
        """On a machine, and its price there. Of a plan that was found the degrees stay."""
        question = self._on(machines)
        if self.plan is not None:
            work, point = step_of_plan(self.plan, Search(question))
            return work, None if point is None else point.seconds
        if machines is self.machines:
            return step_of_point(self.point, self.engine), self.point.seconds
        engine = Search(question)
        again = candidate_of(engine, self.point.degrees).fastest(float("inf"))
        assert again is not None  # it had a plan before, and memory is no limit here
        return step_of_point(again, engine), again.seconds

    def caps(self, machines: Machines) -> dict[str, float]:
        return {name: self._on(machines).cap for name in machines}

    def _on(self, machines: Machines) -> Question:
        return replace(self.question, machine=next(iter(machines.values())))
