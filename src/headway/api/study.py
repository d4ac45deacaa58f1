"""`headway.study`: a recipe trained with many batches and learning rates, each to one target.

One run after the other, each in a run directory of its own; what each came to is in its
outcome.json, so that a study that was killed goes on where it was. The numbers of a study depend on
the recipe, the grid and the seeds alone: a rerun makes the same choice.

A run that needs more steps than the best of its batch so far is ended, because it cannot become the
best; if it turns out to be a neighbour of the best rate, on whose steps the optimum between the
rates of the grid depends, it goes on to its end. So nothing is lost.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from headway.api.inputs import RecipeInput, sendable_recipe
from headway.api.training import PATIENCE, TIMEOUT, TrainingObserver, train
from headway.cost.batch_scaling import BatchScaling, StudyRun, analyze
from headway.documents import nearest, parse_json
from headway.errors import Diverged, UsageError
from headway.keywords import checks_keywords
from headway.launch.restart_policy import RESTARTS
from headway.optim.lr_scaling import Rule
from headway.report.pictures.batch_study import study_svg
from headway.report.write import write_report
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.training.run_directory import (
    RunDirectory,
    choose_directory,
    describe_environment,
)
from headway.run.training.target import OUTCOME, Target, TargetWatch, write_outcome
from headway.units import counted

if TYPE_CHECKING:
    from headway.api.study_grid import GridPoint, StudyGrid
    from headway.run.recipe.recipe import Recipe

Number = TypeVar("Number", int, float)
_LOG = logging.getLogger("headway")
RATES = ("linear", "square_root")
MULTIPLIERS = (0.25, 0.5, 1.0, 2.0, 4.0)
_GRID = ("batches", "rates", "seeds")
"""Options that may change when a study goes on: the grid grows."""


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """What a study has found.

    Attributes:
        directory: Of the study: study.json, study.csv, study.svg, report.html, and its runs.
        options: As recorded there.
        runs: Every run, by batch, rate and seed; of a study that was stopped those that ended.
        scaling: Best rates, exponent, critical batch.
        stopped_by: Name of the signal that stopped the study; None: it is complete.
    """

    directory: Path
    options: Mapping[str, str]
    runs: tuple[StudyRun, ...]
    scaling: BatchScaling
    stopped_by: str | None

    @property
    def num_cut(self) -> int:
        """Runs that were ended because another rate of their batch had been faster."""
        return sum(run.end == "cut" for run in self.runs)


@checks_keywords
def study(
    recipe: RecipeInput,
    *,
    batches: Sequence[int],
    target: str,
    rates: Sequence[str | float] = RATES,
    multipliers: Sequence[float] = MULTIPLIERS,
    base: str | None = None,
    budget: str | None = None,
    every: str | None = None,
    seeds: Sequence[int] = (),
    cut: bool = True,
    processes: int | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    restarts: int = RESTARTS,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout: str | float = TIMEOUT,
    patience: str | float = PATIENCE,
    observer: TrainingObserver | None = None,
) -> StudyResult:
    """Train a recipe with each batch and rate to a target: best rates, exponent, critical batch.

    Args:
        recipe: As for `headway.train`.
        batches: Samples of the global batch, whatever the number of processes.
        target: "loss<=0.45" or "accuracy>=0.9": of the validations, or, where the recipe has no
            validation data, of means of the training loss.
        rates: Numbers, rates of the optimiser's first group; or rules, "linear" and "square_root",
            each with all `multipliers`. All groups are multiplied alike.
        multipliers: Factors of what a rule says.
        base: The batch for which the recipe's rate is good, "32 samples"; by default that of its
            `scale_rate`, else its own batch.
        budget: Where a run ends without the target, "20k samples"; by default the recipe's `stop`.
        every: Between two judgements, "512 samples" or "10 steps"; by default a fiftieth of the
            budget.
        seeds: A run for each; by default the recipe's seed.
        cut: End runs that another rate of their batch has beaten; never with several seeds.
        processes: Local processes of each run; by default the recipe's stages.
        directory: Of the study; by default the next free runs/study-NAME-001.
        resume: Go on with a study, also with a larger grid; without `directory` the newest one.
        overrides: "key=value" changes to the recipe.
        restarts, device, timeout, patience, observer: Of each run, as for `headway.train`.

    Raises:
        UsageError: Options that contradict each other or those of the study that goes on.
        RecipeError: The recipe has no rate that can be set, or no such metric.
        PlanError: A batch cannot be split; all are listed.
        HeadwayError: Of a run, as for `headway.train`; a loss that diverges is a result.
    """
    from headway.api.study_grid import GridQuestion, make_grid

    place = LaunchEnv.here()
    if place.found_world:
        raise UsageError(
            "a study starts its own processes, and this one belongs to another launcher's",
            fix="Start it once, without torchrun, srun or mpirun; --processes says how many.",
        )
    reference = sendable_recipe(recipe, overrides)
    # An object has taken them in already.
    overrides = tuple(overrides) if isinstance(reference, str) else ()
    question = GridQuestion(
        batches=_positive("--batches", batches),
        rates=_rates(rates),
        multipliers=_positive("--multipliers", multipliers),
        base=base,
        budget=budget,
        every=every,
        target=_target(target),
        processes=processes,
    )
    grid = make_grid(reference, overrides, question)
    chosen = tuple(dict.fromkeys(seeds)) or (grid.seed,)
    options = {
        "name": f"study of {grid.name}",
        "recipe": reference if isinstance(reference, str) else reference.name,
        "overrides": ", ".join(overrides),
        "target": str(question.target),
        "judged": "validations" if grid.validates else "means of the training loss",
        "every": every or "a fiftieth of the budget",
        "budget": grid.budget,
        "base": f"rate {grid.base_rate:.6g} at {grid.base}",
        "processes": str(processes or "those of the recipe"),
        "batches": ", ".join(map(str, question.batches)),
        "rates": ", ".join(f"{point.rate:.6g}" for point in grid.points),
        "seeds": ", ".join(map(str, chosen)),
    }
    # The name becomes part of a path, and may hold anything.
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", grid.name)
    path = choose_directory(f"study-{name}", directory, place, resume=resume)
    _open(RunDirectory(path), options)
    runner = _Runner(
        reference,
        overrides,
        grid,
        question.target,
        path,
        {
            "processes": processes,
            "restarts": restarts,
            "device": device,
            "timeout": timeout,
            "patience": patience,
            "observer": observer,
            "trace_steps": 0,
        },
    )
    for batch in question.batches:
        if not runner.study_batch(batch, chosen, cut=cut and len(chosen) == 1):
            break
    runs = tuple(sorted(runner.runs.values(), key=lambda run: (run.batch, run.rate, run.seed)))
    result = StudyResult(
        directory=path,
        options=options,
        runs=runs,
        scaling=analyze(runs),
        stopped_by=runner.stopped_by,
    )
    _write(result)
    return result


class _Runner:
    """Trains the points of a grid, or reads what they came to.

    Attributes:
        runs: By run directory.
        stopped_by: The signal that came.
    """

    def __init__(
        self,
        reference: Recipe | str,
        overrides: tuple[str, ...],
        grid: StudyGrid,
        target: Target,
        directory: Path,
        options: dict[str, Any],
    ) -> None:
        self.runs: dict[str, StudyRun] = {}
        self.stopped_by: str | None = None
        self._reference, self._overrides = reference, overrides
        self._grid, self._target = grid, target
        self._directory, self._options = directory, options

    def study_batch(self, batch: int, seeds: Sequence[int], *, cut: bool) -> bool:
        """All rates of a batch; False: a signal came."""
        points = [point for point in self._grid.points if point.batch == batch]
        # From the middle outwards: the sooner a good rate is known, the sooner others are cut.
        order = sorted(range(len(points)), key=lambda n: (abs(2 * n - len(points) + 1), n))
        limit: int | None = None
        for number in order:
            for seed in seeds:
                run = self._run(points[number], seed, limit)
                if run is None:
                    return False
                if cut and run.end == "reached":
                    limit = run.steps if limit is None else min(limit, run.steps)
        if limit is None:
            return True
        found = [self.runs[_name(point, seeds[0])] for point in points]
        best = min(
            (n for n, run in enumerate(found) if run.end == "reached"),
            key=lambda n: found[n].steps,
        )
        # The optimum between the rates is interpolated from the steps of the two beside the best,
        # if both reach the target: only then these must be known.
        near = range(best - 1, best + 2, 2) if 0 < best < len(points) - 1 else ()
        for n in near:
            known = [self.runs[_name(points[one], seeds[0])].end for one in near]
            needed = found[n].end == "cut" and {*known} <= {"cut", "reached"}
            if needed and self._run(points[n], seeds[0], None) is None:
                return False
        return True

    def _run(self, point: GridPoint, seed: int, limit: int | None) -> StudyRun | None:
        """A run, made now or before; None: a signal came."""
        name = _name(point, seed)
        path = self._directory / name
        outcome = _outcome(path)
        # What was cut may be of interest after all, or under a higher limit.
        if outcome and outcome["end"] == "cut" and (limit is None or limit > outcome["steps"]):
            (path / OUTCOME).unlink()
            outcome = None
        if outcome is None:
            outcome = self._train(path, point, seed, limit)
        if outcome is None:
            return None
        run = StudyRun(
            batch=point.batch,
            rate=point.rate,
            seed=seed,
            end=outcome["end"],
            steps=outcome["steps"],
            samples=sum(n for step, n in _steps(path).items() if step <= outcome["steps"]),
            every=point.every,
            value=outcome["value"],
            directory=name,
        )
        self.runs[name] = run
        return None if self.stopped_by else run

    def _train(
        self, path: Path, point: GridPoint, seed: int, limit: int | None
    ) -> dict[str, Any] | None:
        """Make a run, or go on with it; what it came to, None where a signal came first."""
        try:
            result = train(
                self._reference,
                overrides=(*self._overrides, *point.overrides, f"seed={seed}"),
                directory=path,
                resume=RunDirectory(path).recipe_file.exists(),
                callbacks=(TargetWatch(self._target, point.every, self._grid.validates, limit),),
                **self._options,
            )
        except Diverged:
            write_outcome(path, "diverged", max(_steps(path), default=0), None)
        else:
            if (result.stopped_by or "").startswith("SIG"):
                self.stopped_by = result.stopped_by
            elif _outcome(path) is None:
                write_outcome(path, "budget", max(_steps(path), default=0), None)
        outcome = _outcome(path)
        if outcome is not None:
            _LOG.info(
                "batch %d, rate %.4g, seed %d: %s after %s",
                point.batch, point.rate, seed, outcome["end"], counted(outcome["steps"], "step"),
            )  # fmt: skip
        return outcome


def _name(point: GridPoint, seed: int) -> str:
    return f"batch-{point.batch}-rate-{point.rate:.6g}-seed-{seed}"


def _outcome(path: Path) -> dict[str, Any] | None:
    file = path / OUTCOME
    found: dict[str, Any] | None = parse_json(file.read_bytes()) if file.exists() else None
    return found


def _steps(path: Path) -> dict[int, int]:
    """The steps of a run and their samples; one that was made again counts once."""
    return {row["step"]: row["samples"] for row in RunDirectory(path).events("step")}


def _positive(option: str, values: Sequence[Number]) -> tuple[Number, ...]:
    """Each value once, in ascending order.

    Raises:
        UsageError: There is none, or one is not above 0.
    """
    for value in values:
        if not 0 < value < math.inf:
            raise UsageError(f"{option}: {value} is not a number above 0")
    if not values:
        raise UsageError(f"{option} names nothing", fix="Give at least one value.")
    return tuple(sorted(set(values)))


def _rates(rates: Sequence[str | float]) -> tuple[Rule | float, ...]:
    """Rules and numbers; a number may be a text, as the command line has it.

    Raises:
        UsageError: One is neither, or there is none.
    """
    rules: list[Rule] = [rule for rule in get_args(Rule) if rule in rates]
    numbers = []
    for rate in rates:
        if rate not in rules:
            try:
                numbers.append(float(rate))
            except ValueError:
                raise UsageError(
                    f"--rates: {rate!r} is neither a number nor a rule"
                    f"{nearest(str(rate), list(get_args(Rule)))}",
                    fix="For example --rates 0.01,0.02,0.04 or --rates linear,square_root.",
                ) from None
    if not rules or numbers:
        return (*rules, *_positive("--rates", numbers))
    return tuple(dict.fromkeys(rules))


def _target(text: str) -> Target:
    try:
        return Target.parse(text)
    except ValueError as error:
        raise UsageError(f"--target: {error}") from None


def _open(directory: RunDirectory, options: Mapping[str, str]) -> None:
    """Describe the study, or check that it is the one that goes on.

    Raises:
        UsageError: It is another study; says in what.
    """
    if directory.recipe_file.exists():
        known = parse_json(directory.recipe_file.read_bytes())
        differing = [
            f"{key}: {known.get(key, 'nothing')!s} there, {value} here"
            for key, value in options.items()
            if key not in _GRID and known.get(key) != value
        ]
        if differing:
            raise UsageError(
                "holds another study" if "target" in known else "holds a run, and no study",
                where=str(directory.path),
                why="; ".join(differing) + ".",
                fix="Go on with the options that it was begun with (batches, rates and seeds may "
                "change), or choose another --directory.",
            )
    directory.describe(options, None, describe_environment(torch_version="", device="", backend=""))


def _write(result: StudyResult) -> None:
    """study.json, study.csv, study.svg and report.html."""
    facts = {
        "options": dict(result.options),
        "stopped_by": result.stopped_by,
        "runs": [asdict(run) for run in result.runs],
        "scaling": _finite(asdict(result.scaling)),
    }
    table = io.StringIO()
    writer = csv.DictWriter(table, list(StudyRun.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(run) for run in result.runs)
    (result.directory / "study.csv").write_text(table.getvalue())
    (result.directory / "study.json").write_text(json.dumps(facts, indent=2) + "\n")
    picture = study_svg(result.scaling)
    if picture is not None:
        (result.directory / "study.svg").write_text(picture, encoding="utf-8")
    write_report(result.directory)


def _finite(value: Any) -> Any:
    """JSON has no infinity: what is not bounded or not known is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
