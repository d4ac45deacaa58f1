"""`headway compare RECIPE`: the options, and the table."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.api.comparison import LIMIT, REPORT, ROUNDS, STEPS, WARM_UP, ComparisonResult
from headway.api.comparison import compare as compare_frameworks
from headway.api.framework_evaluation import FrameworkEvaluation, evaluate_frameworks
from headway.cli.terminal.console import note, parse_option, say, say_json, table_lines
from headway.comparison.environments import Installed, install_environments
from headway.comparison.table import HEADINGS, headway_sentences, table_rows
from headway.documents import parse_json
from headway.errors import UsageError


def compare(
    recipe: str = "",
    /,
    *,
    paper: Annotated[bool, Parameter(negative="")] = False,
    install: str = "",
    frameworks: Annotated[str, Parameter(name="--with")] = "",
    processes: Annotated[str, Parameter(alias="-n")] = "",
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    rounds: int = ROUNDS,
    limit: str = LIMIT,
    threads: int | None = None,
    emulate: Path | None = None,
    environments: Path | None = None,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    directory: Annotated[Path | None, Parameter(alias="-d")] = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a recipe under several frameworks, and measure what each costs.

    Args:
        recipe: A recipe.toml, module:function that returns a Recipe, or a bundled workload's name.
        paper: Instead of a recipe: a GPT on text and a ResNet on images, and a page about both.
        frameworks: Such as ddp,fsdp2,headway,headway-auto; an adapter of your own is module:Class.
            By default all that are installed.
        install: Make the environments of these frameworks, or all, first; without a recipe that is
            all.
        processes: Numbers of local processes, as in 1,2,4; by default 1,2.
        steps: That are measured in each trial.
        warm_up: Steps before them.
        rounds: Trials of each framework and number of processes; frameworks take turns.
        limit: Longest time of one trial.
        threads: Of each process; by default a fair share of the cores.
        emulate: A cluster.toml: all of them run behind its links; needs root.
        environments: The folder of the frameworks' environments.
        overrides: KEY=VALUE, a change to the recipe; may be repeated.
        directory: By default the next free runs/compare-NAME-001.
    """
    missing = _install(install, environments) if install else 0
    if not recipe and not paper:
        if install:
            return 1 if missing else 0
        raise UsageError(
            "headway compare needs a recipe",
            fix="Write headway compare my_module:recipe --with ddp,headway; or --install all.",
        )
    if paper and (recipe or overrides):
        raise UsageError(
            "--paper brings recipes of its own",
            fix="Leave the recipe and --set out, or leave --paper out.",
        )
    run = evaluate_frameworks if paper else partial(compare_frameworks, recipe, overrides=overrides)
    found = run(
        frameworks=_words(frameworks),
        processes=parse_option("--processes", processes, _whole_numbers),
        steps=steps,
        warm_up=warm_up,
        rounds=rounds,
        limit=limit,
        threads=threads,
        emulate=emulate,
        environments=environments,
        directory=directory,
    )
    results = found.results if isinstance(found, FrameworkEvaluation) else {recipe: found}
    if json:
        facts = {
            name: parse_json((result.directory / "compare.json").read_bytes())
            for name, result in results.items()
        }
        say_json(facts if paper else facts[recipe])
        return 0
    for name, result in results.items():
        if paper:
            say(name)
        _show(result)
    page = found.page if isinstance(found, FrameworkEvaluation) else found.directory / REPORT
    say(f"directory  {page.parent}")
    say(f"next       open {page}")
    return 0


def _show(result: ComparisonResult) -> None:
    for line in table_lines([HEADINGS, *table_rows(result.cells, result.lines)]):
        say(line)
    say()
    for sentence in headway_sentences(result.cells):
        say(sentence)
    say()


def _install(names: str, folder: Path | None) -> int:
    """Make environments, and say what came of each; how many could not be made."""
    missing = 0
    for found in install_environments(_words(names), folder, note):
        if isinstance(found, Installed):
            state = "was there" if found.kept else f"installed in {found.seconds:.0f} s"
            say(f"{found.name} {found.version}: {state}, {found.megabytes:.0f} MB")
        else:
            missing += 1
            say(f"{found.name}: not installed\n{found.why}")
    return missing


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers such as 1,2,4") from None
