"""`headway.compare`: a recipe under several frameworks, the same work by each, side by side.

Every framework trains in processes and an environment of its own. Trials of different frameworks
take turns, round by round, so that what disturbs the machine disturbs all of them. In the first
round each is checked to do the same work: its losses are those of a serial reference.
"""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from headway import __version__
from headway.api.emulation import read_emulation_options
from headway.api.inputs import ClusterInput, RecipeInput, sendable_recipe
from headway.api.plan_request import parse_duration
from headway.api.plan_selection import MEASURE, AutoPlanSearch
from headway.comparison.changed_lines import changed_lines
from headway.comparison.environments import PINNED, Environment, find_environment
from headway.comparison.frameworks.registry import FRAMEWORKS, PLAIN, Framework
from headway.comparison.results import INDEPENDENT, REFERENCE, Cell, SameWork
from headway.comparison.table import (
    CSV_COLUMNS,
    HEADINGS,
    csv_rows,
    headway_sentences,
    hindrances,
    table_rows,
)
from headway.comparison.trial import TrialFailed, TrialProcesses, TrialResult
from headway.comparison.worker import WorkerJob
from headway.documents import nearest
from headway.errors import HeadwayError, RunError, UsageError
from headway.keywords import checks_keywords
from headway.launch.emulation import EmulatedCluster, PacedCluster
from headway.plans import Plan, explain
from headway.report.comparison_page import comparison_page
from headway.report.pictures.canvas import stack_svg
from headway.report.pictures.framework_comparison import (
    FrameworkPoint,
    cost_picture,
    learning_picture,
    time_picture,
)
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.recipe.sent_recipe import send_recipe
from headway.run.training.run_directory import (
    RunDirectory,
    choose_directory,
    describe_environment,
)
from headway.units import counted, format_seconds

if TYPE_CHECKING:
    from headway.run.recipe.recipe import Recipe

_LOG = logging.getLogger("headway")
STEPS, WARM_UP, ROUNDS, LIMIT = 30, 3, 3, "3 min"
"""Defaults."""
REPORT = "report.html"
PICTURES = (
    ("time", "Time of a step"),
    ("learning", "Statistical efficiency"),
    ("costs", "Memory, bytes, processor time, lines"),
)
"""File and heading."""


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """What a comparison has found.

    Attributes:
        directory: compare.json, compare.csv, three pictures, report.html, and what each process of
            each trial has printed.
        options: What was compared, and where.
        cells: Serial and independent processes first, then each framework, by processes.
        lines: Framework -> the lines that it adds to the plain loop.
        model_bytes: Of the model's parameters.
        machine: Where it was measured.
    """

    directory: Path
    options: dict[str, str]
    cells: tuple[Cell, ...]
    lines: dict[str, tuple[str, ...]]
    model_bytes: int
    machine: dict[str, str]

    def cell(self, framework: str, processes: int) -> Cell:
        """One of them.

        Raises:
            KeyError: There is none.
        """
        for cell in self.cells:
            if (cell.framework, cell.processes) == (framework, processes):
                return cell
        raise KeyError((framework, processes))


@checks_keywords
def compare(
    recipe: RecipeInput,
    *,
    frameworks: Sequence[str] = (),
    processes: Sequence[int] = (),
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    rounds: int = ROUNDS,
    limit: str | float = LIMIT,
    threads: int | None = None,
    emulate: ClusterInput | None = None,
    environments: str | Path | None = None,
    overrides: Sequence[str] = (),
    directory: str | Path | None = None,
) -> ComparisonResult:
    """Train a recipe under several frameworks, in turn, and measure what each costs.

    Args:
        recipe: As for `headway.train`; precision float32 or bfloat16.
        frameworks: Names of `FRAMEWORKS`, or "module:Class" of an adapter of one's own; by default
            all that are installed.
        processes: Numbers of local processes; by default 1 and 2; with `emulate` the cluster's.
        steps: That are measured in each trial.
        warm_up: Steps before them, at least 1.
        rounds: Trials of each framework and number of processes.
        limit: Longest time of one trial; who takes longer is said not to have finished.
        threads: Of each process; by default a fair share of the cores.
        emulate: A `Cluster` or a cluster.toml: all frameworks run behind its links; needs root.
        environments: Where those of the frameworks are; by default in the user's cache.
        overrides: "key=value" changes to the recipe.
        directory: By default the next free runs/compare-NAME-001.

    Raises:
        UsageError: Options that contradict each other; no such framework.
        RecipeError: The recipe cannot be used.
        RunError: The recipe does not even train in one process.
    """
    place = LaunchEnv.here()
    if place.found_world:
        raise UsageError(
            "a comparison starts its own processes, and this one belongs to another launcher's",
            fix="Start it once, without torchrun, srun or mpirun.",
        )
    for option, value in (("--steps", steps), ("--warm-up", warm_up), ("--rounds", rounds)):
        if value < 1:
            raise UsageError(f"{option} {value}: at least 1")
    try:
        seconds = parse_duration(limit)
    except ValueError as error:
        raise UsageError(f"--limit: {error}") from None
    folder = None if environments is None else Path(environments)
    chosen = _chosen(frameworks, folder)
    scene = read_emulation_options(emulate, (), place, "cpu")
    counts = _counts(processes, None if scene.cluster is None else scene.cluster.ranks)
    reference = sendable_recipe(recipe, overrides)
    # An object has taken them in already.
    overrides = tuple(overrides) if isinstance(reference, str) else ()
    name, batch = _checked(reference, overrides, counts, steps + warm_up)
    with scene.nodes() as emulated:
        if isinstance(emulated, PacedCluster):
            raise UsageError(
                "without root links are emulated inside of headway's exchange, and no other "
                "framework would see them",
                fix="Use sudo, or a container with CAP_NET_ADMIN and CAP_SYS_ADMIN.",
            )
        path = choose_directory(
            f"compare-{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}", directory, place, resume=False
        )
        run = _Comparison(
            recipe=reference,
            overrides=overrides,
            batch=batch,
            chosen=chosen,
            counts=counts,
            steps=steps,
            warm_up=warm_up,
            limit=seconds,
            threads=threads,
            emulated=emulated,
            directory=path,
        )
        options = run.options(name, rounds)
        RunDirectory(path).describe(
            options, None, describe_environment(torch_version="", device="cpu", backend="")
        )
        for number in range(rounds):
            run.round(number)
            # After each round: one that is interrupted has the figures of those before it.
            result = run.result(options)
            write_comparison(result)
    return result


def _chosen(names: Sequence[str], folder: Path | None) -> tuple[_Contender, ...]:
    """The frameworks, each with its environment or the reason why it has none.

    Raises:
        UsageError: There is no such framework.
    """
    if not names:
        found = [_Contender.of(framework, folder) for framework in FRAMEWORKS.values()]
        return tuple(one for one in found if isinstance(one.environment, Environment))
    chosen = []
    for name in dict.fromkeys(names):
        if ":" in name:
            framework = Framework(name=name, adapter=name, what="an adapter of the user's")
        elif name in FRAMEWORKS:
            framework = FRAMEWORKS[name]
        else:
            raise UsageError(
                f"--with: there is no framework {name!r}{nearest(name, list(FRAMEWORKS))}",
                fix=f"Known are {', '.join(FRAMEWORKS)}; one of your own is module:Class.",
            )
        chosen.append(_Contender.of(framework, folder))
    return tuple(chosen)


def _counts(processes: Sequence[int], ranks: int | None) -> tuple[int, ...]:
    """The numbers of processes, in ascending order.

    Raises:
        UsageError: One is below 1, or another one than the emulated cluster's.
    """
    counts = tuple(sorted(set(processes)))
    if any(count < 1 for count in counts):
        raise UsageError(f"--processes {','.join(map(str, counts))}: at least 1 each")
    if ranks is None:
        return counts or (1, 2)
    if counts not in ((), (ranks,)):
        raise UsageError(
            f"--processes {','.join(map(str, counts))} contradicts the {ranks} of the emulated "
            "cluster",
            fix="Leave --processes out: the cluster decides.",
        )
    return (ranks,)


def _checked(
    reference: Recipe | str, overrides: Sequence[str], counts: Sequence[int], steps: int
) -> tuple[str, int]:
    """Name and batch of a recipe that every framework can train.

    Raises:
        RecipeError: It cannot be used.
        UsageError: Its batch has no equal shares, or its precision is not every framework's.
    """
    from headway.run.recipe.batch_units import resolve_batch
    from headway.run.recipe.factory import load_recipe
    from headway.run.recipe.training_data import with_loader_batch

    recipe = with_loader_batch(load_recipe(reference, overrides))
    batch = resolve_batch(recipe)
    uneven = [count for count in counts if batch % count]
    if uneven:
        raise UsageError(
            f"a batch of {counted(batch, 'sample')} has no {uneven[0]} equal shares",
            why="Most frameworks take the mean of the processes' means, which is that of the batch "
            "for equal shares only.",
            fix=f"Choose numbers of processes that divide {batch}, or --set batch=...",
        )
    if recipe.precision == "float64":
        raise UsageError(
            "frameworks are compared in float32 or bfloat16, and the recipe is in float64",
            fix="Add --set precision=float32.",
        )
    return recipe.name, batch


@dataclass(frozen=True, kw_only=True)
class _Contender:
    """A framework, and where it runs or why it does not."""

    framework: Framework
    environment: Environment | str

    @classmethod
    def of(cls, framework: Framework, folder: Path | None) -> _Contender:
        return cls(framework=framework, environment=find_environment(framework.environment, folder))


_WITHOUT_DROPOUT = "without dropout"
_STILL_DRAWS = "without dropout; the model draws other random numbers"
_PLAIN_MODULE = PLAIN.partition(":")[0]
_SERIAL = _Contender(
    framework=Framework(
        name=REFERENCE, adapter=f"{_PLAIN_MODULE}:SerialShares", what="one process"
    ),
    environment=Environment(python=Path(sys.executable)),
)
_ULP_APART = _Contender(
    framework=Framework(name="ulp-apart", adapter=f"{_PLAIN_MODULE}:SerialUlp", what="one process"),
    environment=Environment(python=Path(sys.executable)),
)
_INDEPENDENT = _Contender(
    framework=Framework(
        name=INDEPENDENT,
        adapter=f"{_PLAIN_MODULE}:Independent",
        what="processes that never talk",
        least=2,
        exact=False,
    ),
    environment=Environment(python=Path(sys.executable)),
)
"""What sharing a machine costs, without any exchange: the bound of the others' step times."""


@dataclass(kw_only=True)
class _Comparison:
    """The trials of a comparison, round by round.

    Attributes:
        cells: By framework and number of processes.
        reached: By number of processes, the losses of the serial reference.
        expected: Those that the others must have: the same, or without dropout.
        note: Of the losses, where the recipe draws random numbers in each step; "": it does not.
        ulp_apart: As `expected`, of parameters a last bit apart; made once some losses differ.
    """

    recipe: Recipe | str
    overrides: tuple[str, ...]
    batch: int
    chosen: tuple[_Contender, ...]
    counts: tuple[int, ...]
    steps: int
    warm_up: int
    limit: float
    threads: int | None
    emulated: EmulatedCluster | None
    directory: Path
    cells: dict[tuple[str, int], Cell] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    reached: dict[int, tuple[float, ...]] = field(default_factory=dict)
    expected: dict[int, tuple[float, ...]] = field(default_factory=dict)
    note: str = ""
    ulp_apart: dict[int, tuple[float, ...] | None] = field(default_factory=dict)
    model_bytes: int = 0

    def options(self, name: str, rounds: int) -> dict[str, str]:
        """What was compared, for the page."""
        links = "this machine's loopback"
        if self.emulated is not None:
            nodes = self.emulated.cluster.names
            link = self.emulated.cluster.link(nodes[0], nodes[-1])
            links = f"{counted(len(nodes), 'emulated node')}, {link or 'links without a limit'}"
        return {
            "name": f"comparison of frameworks: {name}",
            "recipe": self.recipe if isinstance(self.recipe, str) else self.recipe.name,
            "overrides": ", ".join(self.overrides),
            "batch": counted(self.batch, "sample"),
            "frameworks": ", ".join(one.framework.name for one in self.chosen),
            "processes": ", ".join(map(str, self.counts)),
            "links": links,
            "versions": ", ".join(_versions(self.chosen)),
            "threads": str(self.threads or "a fair share of the cores"),
            "steps": f"{self.steps} measured behind {self.warm_up} others, {rounds} rounds",
            "limit": format_seconds(self.limit),
        }

    def round(self, number: int) -> None:
        """A trial of each framework on each number of processes.

        Raises:
            RunError: The serial reference fails: the recipe itself does not train.
        """
        for count in self.counts:
            if number == 0:
                self._refer(count)
            if count == self.counts[0]:
                self._try(_SERIAL, 1, number)
            if count > 1:
                self._try(_INDEPENDENT, count, number)
            first = number % len(self.chosen)  # nobody is always behind the same one
            for contender in (*self.chosen[first:], *self.chosen[:first]):
                self._try(contender, count, number)

    def result(self, options: dict[str, str]) -> ComparisonResult:
        """As it stands now."""
        order = [REFERENCE, INDEPENDENT, *(one.framework.name for one in self.chosen)]
        return ComparisonResult(
            directory=self.directory,
            options=options,
            cells=tuple(
                sorted(self.cells.values(), key=lambda c: (order.index(c.framework), c.processes))
            ),
            lines={
                one.framework.name: changed_lines(one.framework.adapter, PLAIN)
                for one in self.chosen
            },
            model_bytes=self.model_bytes,
            machine=_machine(),
        )

    def _refer(self, count: int) -> None:
        """The losses that all must have: those of one process, share by share."""
        try:
            result = self._run(_SERIAL, 1, 0, shares=count)
            self.reached[count] = self.expected[count] = result.losses
            if result.draws:
                still = self._run(_SERIAL, 1, 0, shares=count, dropout=False)
                self.expected[count] = still.losses
                self.note = _STILL_DRAWS if still.draws else _WITHOUT_DROPOUT
        except TrialFailed as failure:
            raise RunError(
                "the recipe does not train in one plain process",
                why=f"{failure}.",
                fix=f"See what it has printed: {self._folder(_SERIAL, 1, 0, count)}.",
            ) from None
        self.model_bytes = result.model_bytes

    def _try(self, contender: _Contender, count: int, number: int) -> None:
        framework, where = contender.framework, contender.environment
        key = framework.name, count
        cell = self.cells.get(key) or Cell(
            framework=framework.name,
            processes=count,
            batch=self.batch,
            # The plain process runs once, for all numbers of processes.
            target=min(self.reached.get(count, self.reached[self.counts[0]])),
        )
        if cell.failure:  # it would fail again, and take its time limit each time
            return
        try:
            if isinstance(where, str):
                raise TrialFailed(where)
            if count < framework.least:
                raise TrialFailed(f"needs {framework.least} processes")
            if framework.name == "headway-auto" and number == 0:
                cell = self._planned(cell)
            result = self._run(contender, count, number)
            work = cell.work
            if number == 0 and framework.name not in (REFERENCE, INDEPENDENT):
                work = self._same_work(contender, count, result)
        except TrialFailed as failure:
            self.cells[key] = replace(cell, failure=str(failure))
            _LOG.warning("%s on %s: %s", framework.name, counted(count, "process"), failure)
            return
        self.cells[key] = replace(cell, rounds={**cell.rounds, number: result}, work=work)
        _LOG.info(
            "round %d, %s on %s: %s a step%s",
            number + 1, framework.name, counted(count, "process"),
            format_seconds(result.median), f", losses {work}" if number == 0 and work else "",
        )  # fmt: skip

    def _same_work(self, contender: _Contender, count: int, result: TrialResult) -> SameWork:
        """Of a first round.

        Raises:
            TrialFailed: Without dropout the framework does not get through.
        """
        losses, expected = result.losses, self.expected[count]
        if self.note:
            losses = self._run(contender, count, 0, dropout=False).losses
        work = SameWork.compare(losses, expected)
        if work.step is not None:
            work = SameWork.compare(losses, expected, self._losses_ulp_apart(count))
        return replace(work, note=self.note)

    def _losses_ulp_apart(self, count: int) -> tuple[float, ...] | None:
        """Of the reference from parameters a last bit apart; None: it does not train."""
        if count not in self.ulp_apart:
            self.ulp_apart[count] = None
            with contextlib.suppress(TrialFailed):
                apart = self._run(_ULP_APART, 1, 0, shares=count, dropout=not self.note)
                self.ulp_apart[count] = apart.losses
        return self.ulp_apart[count]

    def _planned(self, cell: Cell) -> Cell:
        """The cell with headway's plan for its processes.

        Raises:
            TrialFailed: There is none.
        """
        search = AutoPlanSearch(
            recipe=self.recipe,
            overrides=self.overrides,
            cluster=MEASURE,
            device="cpu",
            fallback=False,
        )
        run = RunDirectory(self.directory / f"plan-{cell.processes}")
        try:
            file = search.find(run, cell.processes, self.emulated, resume=False)
        except HeadwayError as error:
            raise TrialFailed(f"no plan: {error.what}") from None
        assert file is not None
        plan = self.plans[cell.processes] = Plan.load(file)
        return replace(
            cell,
            plan=explain(plan).replace("\n", "; "),
            predicted=None if plan.prediction is None else plan.prediction.seconds,
        )

    def _run(
        self,
        contender: _Contender,
        count: int,
        number: int,
        shares: int = 0,
        *,
        dropout: bool = True,
    ) -> TrialResult:
        """A trial.

        Args:
            shares: Of the serial reference; 0: this trial is none.
            dropout: As the recipe has it; else the trial is for its losses only.

        Raises:
            TrialFailed: The framework did not get through.
        """
        environment = contender.environment
        assert isinstance(environment, Environment)
        folder = self._folder(contender, count, number, shares)
        if not dropout:
            folder = folder.with_name(f"{folder.name}-without-dropout")
        folder.mkdir(parents=True)
        # Processes that never talk, and one alone, are not behind links.
        alone = contender in (_SERIAL, _ULP_APART, _INDEPENDENT)
        emulated = None if alone else self.emulated
        nodes = emulated.cluster.nodes_of_ranks if emulated else ("",) * count
        sent = send_recipe(self.recipe)
        jobs = [
            WorkerJob(
                recipe=sent,
                overrides=self.overrides,
                adapter=contender.framework.adapter,
                rank=rank,
                ranks=count,
                warm_up=self.warm_up,
                steps=self.steps,
                plan=self.plans.get(count) if contender.framework.name == "headway-auto" else None,
                shares=max(1, shares),
                dropout=dropout,
                emulated=emulated,
                node=nodes[rank],
                # One process of each node counts for all of them.
                interface=_interface(emulated, alone) if nodes.index(nodes[rank]) == rank else "",
                folder=folder.resolve(),
                path=tuple(str(Path(part).resolve()) for part in sys.path),
            )
            for rank in range(count)
        ]
        return TrialProcesses(
            python=environment.python,
            variables=environment.variables,
            job=jobs,
            limit=self.limit,
            threads=self.threads,
        ).run()

    def _folder(self, contender: _Contender, count: int, number: int, shares: int) -> Path:
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", contender.framework.name)
        last = f"{count}-round-{number + 1}" if shares == 0 else f"reference-of-{shares}"
        return self.directory / "trials" / f"{name}-{last}"


def _versions(chosen: Sequence[_Contender]) -> Iterator[str]:
    yield f"torch {metadata.version('torch')}"
    yield f"headway {__version__}"
    names = dict.fromkeys(one.framework.environment for one in chosen)
    for pinned in (PINNED[name] for name in names if name):
        yield f"{pinned.package} {pinned.version}"


def _interface(emulated: EmulatedCluster | None, alone: bool) -> str:
    if alone:
        return ""
    return "lo" if emulated is None else emulated.interface


def _machine() -> dict[str, str]:
    model = ""
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        model = found[1] if found else ""
    return {
        "machine": f"{counted(os.cpu_count() or 1, 'core')}, {model or platform.machine()}",
        "date": datetime.now(UTC).date().isoformat(),
    }


def write_comparison(result: ComparisonResult) -> None:
    """compare.json, compare.csv, three pictures and report.html."""
    cells, directory = result.cells, result.directory
    facts = {
        "options": result.options,
        "model_bytes": result.model_bytes,
        "lines": result.lines,
        "cells": [asdict(cell) for cell in cells],
    }
    (directory / "compare.json").write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n")
    with (directory / "compare.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(csv_rows(cells, result.lines))
    pictures = []
    points = [_point(cell, result.lines) for cell in cells if cell.measured]
    drawings = (time_picture, learning_picture, cost_picture)
    for (name, heading), draw in zip(PICTURES, drawings, strict=True):
        svg = draw(points)
        pictures.append((heading, svg))
        (directory / f"{name}.svg").write_text(stack_svg([(heading, svg)]), encoding="utf-8")
    page = comparison_page(
        result.options["name"],
        [*result.options.items(), *result.machine.items()],
        [HEADINGS, *table_rows(cells, result.lines)],
        pictures,
        sentences=[*headway_sentences(cells)],
        hindrances=[*hindrances(cells, result.model_bytes)],
        lines=result.lines,
    )
    (directory / REPORT).write_text(page, encoding="utf-8")


def _point(cell: Cell, lines: dict[str, tuple[str, ...]]) -> FrameworkPoint:
    step = cell.step
    return FrameworkPoint(
        framework=cell.framework,
        processes=cell.processes,
        batch=cell.batch,
        step=(step.value, step.low, step.high),
        losses=cell.losses,
        times=cell.times,
        costs={
            "peak memory, MB": cell.memory / 1e6,
            "sent per step, MB": None if cell.sent is None else cell.sent / 1e6,
            "CPU seconds per step": cell.cpu.value,
            "lines": float(len(lines[cell.framework])) if cell.framework in lines else None,
        },
    )
