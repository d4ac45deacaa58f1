"""`headway study RECIPE`: the options, and what the study says."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headway.api.study import MULTIPLIERS, RATES, StudyResult
from headway.api.study import study as study_recipe
from headway.api.training import PATIENCE, TIMEOUT
from headway.cli.terminal.console import exit_code, parse_option, say, say_json, table_lines
from headway.documents import parse_json
from headway.launch.restart_policy import RESTARTS
from headway.report.page.study import HEADINGS, study_rows, study_sentences

_MULTIPLIERS = ",".join(str(Fraction(factor)) for factor in MULTIPLIERS)


def study(
    recipe: str,
    /,
    *,
    batches: str,
    target: str,
    rates: str = ",".join(RATES),
    multipliers: str = _MULTIPLIERS,
    base: str | None = None,
    budget: str | None = None,
    every: str | None = None,
    seeds: str = "",
    cut: bool = True,
    processes: Annotated[int | None, Parameter(alias="-n")] = None,
    directory: Annotated[Path | None, Parameter(alias="-d")] = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    restarts: int = RESTARTS,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout: str = TIMEOUT,
    patience: str = PATIENCE,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a recipe with many batches and learning rates, each to a target.

    Finds the best rate of each batch, the exponent with which it grows, and the critical batch.

    Args:
        recipe: A recipe.toml, module:function that returns a Recipe, or a bundled workload's name.
        batches: Samples of the global batch, as in 4,8,16,32,64.
        target: As in loss<=0.45 or accuracy>=0.9: of the validations; without validation data of
            means of the training loss.
        rates: Rates as in 0.01,0.02,0.04; or rules, linear and square_root, each with all
            multipliers. Every parameter group is multiplied alike.
        multipliers: Factors of what a rule says.
        base: The batch for which the recipe's rate is good, as in "32 samples"; by default that of
            its scale_rate, else its own batch.
        budget: Where a run ends without the target, as in "20k samples"; by default the recipe's
            stop.
        every: Between two judgements, as in "512 samples" or "10 steps"; by default a fiftieth of
            the budget.
        seeds: A run for each, as in 0,1,2; by default the recipe's seed.
        cut: End runs that another rate of their batch has beaten; never with several seeds.
        processes: Local processes of each run; by default the recipe's stages.
        directory: Of the study; by default the next free runs/study-NAME-001.
        resume: Go on with a study, also with a larger grid; without --directory the newest one.
        overrides: KEY=VALUE, a change to the recipe; may be repeated.
        restarts: Most restarts of dead workers without a new checkpoint in between.
        device: Where to compute; auto: on GPUs where there are some.
        timeout: Longest wait for another process, such as "30 s" or "5 min".
        patience: Declare a worker lost after this long without a heartbeat; "0 s": never.
    """
    result = study_recipe(
        recipe,
        batches=parse_option("--batches", batches, _whole_numbers),
        target=target,
        rates=_words(rates),
        multipliers=parse_option("--multipliers", multipliers, _factors),
        base=base,
        budget=budget,
        every=every,
        seeds=parse_option("--seeds", seeds, _whole_numbers),
        cut=cut,
        processes=processes,
        directory=directory,
        resume=resume,
        overrides=overrides,
        restarts=restarts,
        device=device,
        timeout=timeout,
        patience=patience,
    )
    if json:
        say_json(parse_json((result.directory / "study.json").read_bytes()))
    else:
        _print_result(result)
    return exit_code(result.stopped_by)


def _print_result(result: StudyResult) -> None:
    for line in table_lines([HEADINGS, *study_rows(result.scaling)]):
        say(line)
    say()
    for sentence in study_sentences(result.scaling):
        say(sentence)
    say()
    say(f"study directory  {result.directory}")
    if result.stopped_by is None:
        say(f"next             open {result.directory / 'report.html'}")
    else:
        say("next             the same command with --resume")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _whole_numbers(text: str) -> Sequence[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers such as 4,8,16") from None


def _factors(text: str) -> Sequence[float]:
    try:
        return [float(Fraction(word)) for word in _words(text)]
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is not a list of factors such as 1/2,1,2") from None
