"""`headway simulate`: a step of a plan, played event by event, on any hardware, with faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.asked import subject_of, without_subject
from headway.cli.console import note, say, say_json
from headway.cli.plan_question import precision_in, work_of
from headway.cli.schedule import write
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
from headway.simulator.ranks import NO_FAULTS, Faults
from headway.simulator.simulated import INSIDE, Simulated
from headway.simulator.simulated import simulate as play
from headway.simulator.what_if import changed, faults_of
from headway.simulator.work import StepWork
from headway.units import format_bytes, format_seconds, parse_bytes

WORDS = {
    "messages": "messages between stages",
    "sums": "sums of gradients",
    "scatters": "scattering of gradients (ZeRO)",
    "gathers": "gathering of parameters (ZeRO)",
    INSIDE: "collectives of the tensor axis",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
}
SAME = 5e-4
"""Shares below this are equal to what is printed."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A step on some hardware.

    Attributes:
        name: "as planned", "changed".
        step: Played.
        price: Seconds that the search says; None: it has no price, or there are faults.
        cap: Bytes of a device that may be used.
    """

    name: str
    step: Simulated
    price: float | None
    cap: float


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
            "device peak 2x", "memory 2x"; several are made together.
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
    machine = machine_of(found)
    other, faults = _scenario(machine, found, change, fault, ranks)
    question = _question(loaded, subject.recipe, machine, ranks, memory)
    job = _Job(loaded, question, share_links)
    work, price = job.step(machine)
    scenarios = [
        Scenario(name="as planned", step=play(work), price=price, cap=question.cap),
    ]
    if change or fault:
        after, price = job.step(other) if change else (work, price)
        scenarios.append(
            Scenario(
                name="changed",
                step=play(replace(after, faults=faults)),
                price=None if fault else price,
                cap=question.memory or other.device.memory,
            )
        )
    if svg is not None:
        from headway.report.simulated import picture

        write(svg, picture([(s.name, s.step) for s in scenarios], scenarios[-1].cap))
    if timeline is not None:
        write(timeline, chrome_json(scenarios[-1].step.timeline))
    if json:
        say_json({"plan": job.name, "change": change, "fault": fault} | facts(scenarios))
        return
    say("\n".join([job.words, "", *table(scenarios), "", *sentences(scenarios, change, fault)]))


def _scenario(
    machine: Machine, cluster: Cluster, change: Sequence[str], fault: Sequence[str], ranks: int
) -> tuple[Machine, Faults]:
    """Other hardware and what is wrong in a step; what is wrong in both is told together."""
    checks: list[Callable[[], object]] = [
        *(partial(changed, machine, cluster, [sentence]) for sentence in change),
        *(partial(faults_of, [sentence], ranks, cluster) for sentence in fault),
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
    return changed(machine, cluster, change), faults_of(fault, ranks, cluster)


def _ranks(plan: Plan | None, devices: int | None, cluster: Cluster) -> int:
    if plan is not None and devices is not None:
        raise UsageError(
            f"--devices {devices} beside a plan of {plan.ranks} ranks", fix="Leave one of them out."
        )
    ranks = plan.ranks if plan is not None else devices or cluster.ranks
    if not 1 <= ranks <= cluster.ranks:
        raise PlanError(
            f"{ranks} ranks on a cluster of {cluster.ranks}",
            problems=[f"{ranks - cluster.ranks} ranks have no device"],
            fix="Take a larger cluster (--nodes with a preset), or another plan.",
        )
    return ranks


def _question(
    plan: Plan | None, recipe: str, machine: Machine, ranks: int, memory: str | None
) -> Question:
    work, batch, found = work_of(recipe, plan)
    return Question(
        work=work,
        machine=machine,
        devices=(ranks,),
        batch=batch,
        memory=None if memory is None else parse_bytes(memory),
        objective="fastest",
        precision=precision_in(found.precision if plan is None else plan.memory.precision),
    )


class _Job:
    """A plan, read or found, on whatever hardware."""

    def __init__(self, plan: Plan | None, question: Question, shared: bool) -> None:
        self.plan = plan
        self.shared = shared
        self.question = question
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

    def step(self, machine: Machine) -> tuple[StepWork, float | None]:
        """On a machine, and its price there. Of a plan that was found the degrees stay."""
        work, price = self._step(replace(self.question, machine=machine))
        return replace(work, shared=self.shared), price

    def _step(self, question: Question) -> tuple[StepWork, float | None]:
        if self.plan is not None:
            work, point = step_of_plan(self.plan, Search(question))
            return work, None if point is None else point.seconds
        if question.machine is self.question.machine:
            return step_of_point(self.point, self.engine), self.point.seconds
        engine = Search(question)
        again = candidate_of(engine, self.point.degrees).fastest(float("inf"))
        assert again is not None  # it had a plan before, and memory is no limit here
        return step_of_point(again, engine), again.seconds


# -- what is printed ------------------------------------------------------------------------------


def table(scenarios: Sequence[Scenario]) -> Iterator[str]:
    """A column for each scenario, and the difference."""
    kinds = list(dict.fromkeys(kind for s in scenarios for kind in s.step.exposed))
    rows = [("", *(s.name for s in scenarios)), ("step", *(_step(s) for s in scenarios))]
    rows.append(("bubble", *(f"{s.step.bubble:.1%}" for s in scenarios)))
    rows.append(("exposed communication", *(_exposed(s.step) for s in scenarios)))
    rows += [
        (f"  {WORDS[kind]}", *(format_seconds(s.step.exposed.get(kind, 0.0)) for s in scenarios))
        for kind in kinds
    ]
    rows.append(("memory of the fullest rank", *(format_bytes(s.step.peak) for s in scenarios)))
    if len(scenarios) == 2:
        before, after = (s.step for s in scenarios)
        more = {
            "step": _than(after.seconds, before.seconds),
            "memory of the fullest rank": _than(after.peak, before.peak),
            "exposed communication": _than(
                sum(after.exposed.values()), sum(before.exposed.values())
            ),
        }
        rows = [(*row, more.get(row[0], "")) for row in rows]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _step(scenario: Scenario) -> str:
    return format_seconds(scenario.step.seconds)


def _exposed(step: Simulated) -> str:
    return format_seconds(sum(step.exposed.values()))


def _than(after: float, before: float) -> str:
    if abs(after - before) <= SAME * before:
        return "equal"
    return f"{after / before - 1:+.1%}" if before else "new"


def sentences(
    scenarios: Sequence[Scenario], change: Sequence[str], fault: Sequence[str]
) -> Iterator[str]:
    """The same for people."""
    if len(scenarios) == 2:
        yield f"changed: {'; '.join([*change, *fault])}"
    for scenario in scenarios:
        prefix = f"{scenario.name}: " if len(scenarios) > 1 else ""
        yield prefix + _decided(scenario.step)
        if scenario.price is not None:
            yield f"{prefix}{_priced(scenario)}"
        fullest = scenario.step.fullest
        share = fullest.peak / scenario.cap
        over = "; this does not fit" if share > 1 else ""
        yield (
            f"{prefix}rank {fullest.rank} is the fullest, {format_bytes(fullest.peak)} of "
            f"{format_bytes(scenario.cap)} ({share:.1%}){over}"
        )
    last = scenarios[-1].step
    played = len(last.accounts)
    if played < last.ranks:
        yield f"{played} of {last.ranks} ranks were played, the others behave alike"
    else:
        yield f"all {played} ranks were played"
    if scenarios[-1].step.work.faults != NO_FAULTS and _unmoved(scenarios):
        yield "no part of the step uses what is faulty"


def _unmoved(scenarios: Sequence[Scenario]) -> bool:
    return scenarios[0].step.seconds == scenarios[-1].step.seconds


def _decided(step: Simulated) -> str:
    shares = sorted(step.decided.items(), key=lambda item: -item[1])
    words = [f"{WORDS[kind]} {seconds / step.seconds:.1%}" for kind, seconds in shares]
    return f"the chain that decides the step is {', '.join(words)}"


def _priced(scenario: Scenario) -> str:
    assert scenario.price is not None
    said = format_seconds(scenario.price)
    than = _than(scenario.step.seconds, scenario.price)
    return f"the formulas of the search say {said}; the events take " + (
        "the same" if than == "equal" else f"{than}"
    )


def facts(scenarios: Sequence[Scenario]) -> dict[str, object]:
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
                "allowed": scenario.cap,
                "decided": scenario.step.decided,
                "path": [asdict(leg) for leg in scenario.step.path],
                "ranks": [asdict(account) for account in scenario.step.accounts],
            }
            for scenario in scenarios
        ]
    }
