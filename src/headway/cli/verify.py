"""`headway verify RECIPE --processes 1,2,4`: compare the split run with the serial run.

Prints one row per number of processes, with the largest relative errors; the exit code is 4 unless
all of them hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.api.verification import PROCESSES, STEPS, EquivalenceResult, verdict_data
from headway.api.verification import verify as verify_recipe
from headway.cli.terminal.console import say, say_json
from headway.errors import UsageError
from headway.units import format_seconds


def verify(
    recipe: str,
    /,
    *,
    processes: Annotated[str, Parameter(alias="-n")] = ",".join(map(str, PROCESSES)),
    plan: Path | None = None,
    steps: int = STEPS,
    microbatches: Annotated[bool, Parameter(negative="")] = False,
    whole: Annotated[bool, Parameter(negative="")] = False,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    directory: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Compare a split run with the serial run, tensor by tensor.

    Runs a plain serial loop and the split run in float64 from the same initial parameters and
    compares losses, gradients, updated parameters, buffers and optimiser state by logical name.
    The steps cross the end of an epoch, so that they include a ragged last batch. Exits with 4 on a
    difference.

    Plans that are inexact by design are made again in one process: with the same compressors, or
    with the same delayed updates (pipeline schedules without a flush). With nothing compressed,
    they must equal the serial run.

    Args:
        recipe: A recipe.toml, module:function that returns a Recipe, or a bundled workload's name.
        processes: Numbers of processes to compare, such as 1,2,4.
        plan: Check this plan instead, with its number of processes.
        steps: Optimiser steps to compare.
        microbatches: Let the serial run, too, compute the plan's micro-batches one by one: for
            models with batch normalisation, which sees one micro-batch at a time.
        whole: Train from the first sample on, too, with checkpoints and validations, and resume in
            the middle with the same plan and with another one. Callbacks and loggers of the recipe
            are not called, and nothing stops early.
        overrides: KEY=VALUE, a change to the recipe; may be repeated.
        directory: A run directory in which to record the verdict for its report.
    """

    def show(run: EquivalenceResult) -> None:
        if not shown:
            say(_header(run))
        shown.append(run)
        say(_line(run))
        if run.rounding is not None:
            say(
                f"{'':11}rounding: off by one unit in the last place of its initial parameters, "
                f"the serial run differs by {run.rounding:.1e} from itself, and more is allowed"
            )
        for name, end in run.whole.items():
            say(f"{'':11}{name}: {'ends as the serial run' if end.equal else 'DIFFERENT'}")

    shown: list[EquivalenceResult] = []
    result = verify_recipe(
        recipe,
        processes=_process_counts(processes),
        plan=plan,
        steps=steps,
        microbatches=microbatches,
        whole=whole,
        overrides=overrides,
        directory=directory,
        on_run=None if json else show,
    )
    if json:
        say_json(verdict_data(result))
    # After the output, because it raises where the verdict does not hold.
    result.check()
    if not json:
        say(repr(result))
    return 0


def _process_counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--processes {text}: not a list of positive numbers", fix="Write --processes 1,2,4."
        ) from None


def _header(verdict: EquivalenceResult) -> str:
    kinds = "".join(f"{kind:>12}" for kind in verdict.errors)
    return f"processes  {kinds}   tensors     time  verdict"


def _line(verdict: EquivalenceResult) -> str:
    """One row: the largest relative error of each kind."""
    comparison = verdict.comparison
    errors = ["-" if error is None else f"{error:.1e}" for error in verdict.errors.values()]
    law = "law holds" if verdict.law else "equal"
    word = law if verdict.holds else "DIFFERENT"
    return (
        f"{verdict.processes:>9}  "
        + "".join(f"{error:>12}" for error in errors)
        + f"{len(comparison.differences):>10}{format_seconds(verdict.seconds):>9}  {word}"
    )
