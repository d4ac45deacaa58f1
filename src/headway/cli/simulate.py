"""`headway simulate`: simulate one step of a plan, on any hardware, with faults.

Prints the scenarios of `headway.simulate` side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.api.inputs import resolve_plan
from headway.api.simulation import NOT_ONE_STEP, SimulationScenario
from headway.api.simulation import simulate as simulate_plan
from headway.api.worker_simulation import WorkerScenario
from headway.cli.terminal.console import say, say_json, table_lines, write_file
from headway.errors import UsageError
from headway.report.trace_export import chrome_trace_json
from headway.simulator.ranks import NO_FAULTS
from headway.simulator.simulation import INSIDE, RankBreakdown, SimulatedStep
from headway.simulator.task_graph import HOST, LOOKUPS, TABLES
from headway.units import format_bytes, format_seconds

WORDS = {
    "messages": "messages between stages",
    "sums": "sums of gradients",
    "scatters": "scattering of gradients (ZeRO)",
    "gathers": "gathering of parameters (ZeRO)",
    TABLES: "exchanges of split tables",
    INSIDE: "collectives of the tensor axis",
    HOST: "what the host does beside kernels",
    LOOKUPS: "lookups in split tables",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
}
MOST_LINKS = 20
"""Between workers, in the table of bytes."""
EQUAL_TOLERANCE = 5e-4
"""Shares below this are equal to what is printed."""


def scenario_table(scenarios: Sequence[SimulationScenario]) -> Iterator[str]:
    """A column for each scenario, and the difference."""
    kinds = list(dict.fromkeys(kind for s in scenarios for kind in s.step.exposed))
    rows = [("", *(s.name for s in scenarios))]
    rows.append(("step", *(format_seconds(s.step.seconds) for s in scenarios)))
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
    return table_lines(rows, align=">")


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
        yield f"{played} of {last.ranks} ranks were simulated; the others behave identically"
    else:
        yield f"all {played} ranks were simulated"
    same = scenarios[0].step.seconds == last.seconds
    if last.work.faults != NO_FAULTS and same:
        yield "the step uses nothing that is faulty"


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


def _decisive_line(step: SimulatedStep) -> str:
    shares = sorted(step.decided.items(), key=lambda item: -item[1])
    words = [f"{WORDS[kind]} {seconds / step.seconds:.1%}" for kind, seconds in shares]
    return f"the critical path of the step is {', '.join(words)}"


def _priced(scenario: SimulationScenario) -> str:
    assert scenario.price is not None
    said = format_seconds(scenario.price)
    than = _relative_change(scenario.step.seconds, scenario.price)
    verdict = "agrees" if than == "equal" else f"takes {than}"
    return f"the search predicts {said}; the simulation {verdict}"


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


def worker_data(runs: Sequence[WorkerScenario]) -> dict[str, object]:
    """All figures of a run of workers as plain data."""
    return {
        "scenarios": [
            asdict(scenario) | {"links": [[*ends, size] for ends, size in scenario.links.items()]}
            for scenario in runs
        ]
    }


def worker_lines(
    runs: Sequence[WorkerScenario], change: Sequence[str], fault: Sequence[str]
) -> Iterator[str]:
    """The same for people."""
    if len(runs) == 2:
        yield f"changed: {'; '.join([*change, *fault])}"
        yield ""
    for scenario in runs:
        more = ""
        if scenario is not runs[0]:
            more = f" ({_relative_change(scenario.rate, runs[0].rate)})"
        yield (
            f"{scenario.name}: {scenario.rate:.4g} samples/s{more} in "
            f"{format_seconds(scenario.seconds)}"
        )
        yield from (f"assumed: {text}" for text in scenario.assumes)
        if scenario.least is not None:
            yield f"where every update comes to the bound: {scenario.least:.4g} samples/s"
        if scenario.ends:
            yield scenario.ends
        yield ""
        yield from table_lines(list(_worker_rows(scenario)), align=">")
        yield ""
        yield from _byte_lines(scenario)
        yield ""


def _worker_rows(scenario: WorkerScenario) -> Iterator[tuple[str, ...]]:
    causes = list(dict.fromkeys(cause for one in scenario.workers for cause in one.waits))
    stale = any(one.staleness for one in scenario.workers)
    yield (
        "worker",
        "steps",
        "samples/s",
        *(f"waits: {cause}" for cause in causes),
        *(("staleness: pushes",) if stale else ()),
    )
    for one in scenario.workers:
        yield (
            f"{one.worker}" + ("" if one.dies is None else f" (dies at step {one.dies})"),
            str(one.steps),
            f"{one.rate:.4g}",
            *(f"{one.waits.get(cause, 0.0) / scenario.seconds:.1%}" for cause in causes),
            *((histogram_words(one.staleness),) if stale else ()),
        )


def histogram_words(counts: Mapping[int, int]) -> str:
    """ "0: 12, 1: 30": staleness and how often; "-" where there is none."""
    return ", ".join(f"{stale}: {count}" for stale, count in sorted(counts.items())) or "-"


def _byte_lines(scenario: WorkerScenario) -> Iterator[str]:
    """What workers send in meetings, and the links that carry most."""
    if scenario.met:
        yield f"every worker sends {format_bytes(scenario.met)} in meetings of all"
    if scenario.links:
        largest = sorted(scenario.links.items(), key=lambda link: -link[1])[:MOST_LINKS]
        rows = [(str(a), str(b), format_bytes(size)) for (a, b), size in sorted(largest)]
        yield from table_lines([("from", "to", "bytes"), *rows], align=">")
        if len(largest) < len(scenario.links):
            yield f"and {len(scenario.links) - len(largest)} links with less: --json has all"


def _refuse_drawings(plan: Path | None, files: Mapping[str, Path | None]) -> None:
    """Refuse to draw the step of a plan of which a run is simulated.

    Raises:
        UsageError: Names all files.
    """
    given = [name for name, file in files.items() if file is not None]
    if given and plan is not None and not resolve_plan(plan).synchrony.by_all_reduce:
        raise UsageError(NOT_ONE_STEP, where=", ".join(given), fix="Leave it out.")


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
    steps: int | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Simulate a step: time, bubble, exposed communication, memory; before and after changes.

    Of a plan whose workers do not agree at every step a run is simulated: samples per second,
    waits by cause, staleness, bytes by link.

    Args:
        plan: A plan.json; without one, the fastest plan that the search finds.
        recipe: As for `headway train`; its model is captured, not allocated. By default the recipe
            and the cluster that `headway plan --out` recorded in the plan.
        cluster: A cluster.toml, or a preset such as dgx-a100.
        nodes: Number of nodes of a preset; by default 1.
        devices: Without a plan: number of devices; by default all of the cluster.
        memory: Memory of a device that may be used, as in "80 GiB"; by default all of it.
        change: Other hardware: "link node-node 100 Gbit/s", "link LEVEL 2x", "latency LEVEL 10 us",
            "device peak 2x", "memory 2x", for one type of devices "device TYPE peak 2x"; may be
            repeated.
        fault: "rank 3 slow 2x", "link a-b 10x slower"; in a run of workers also "rank 3 slow 2x
            from step 20 to step 40", "cut link a-b at step 5", "kill rank 3 at step 7"; may be
            repeated.
        share_links: Let messages and collectives of a rank share the bandwidth of each level of
            links: those in flight at the same time slow each other down.
        svg: Write the timelines and the memory to this file.
        timeline: Write a Chrome trace (opens in Perfetto) of the last step to this file.
        steps: Of a run of workers: how many steps an undisturbed worker makes; by default 100.
    """
    _refuse_drawings(plan, {"--svg": svg, "--timeline": timeline})
    result = simulate_plan(
        plan,
        recipe=recipe,
        cluster=cluster,
        nodes=nodes,
        devices=devices,
        memory=memory,
        change=change,
        fault=fault,
        share_links=share_links,
        steps=steps,
    )
    said = {"plan": result.plan, "change": change, "fault": fault}
    if runs := result.runs:
        if json:
            say_json(said | worker_data(runs))
        else:
            say("\n".join([result.words, "", *worker_lines(runs, change, fault)]))
        return
    scenarios = result.scenarios
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
        write_file(timeline, chrome_trace_json(result.timeline))
    if json:
        say_json(said | scenario_data(scenarios))
        return
    say(
        "\n".join(
            [
                result.words,
                "",
                *scenario_table(scenarios),
                "",
                *scenario_lines(scenarios, change, fault),
            ]
        )
    )
