"""`headway verify RECIPE --processes 1,2,4`: compare the split run with the serial run.

Prints one row per number of processes, with the largest relative errors; the exit code is 4 unless
all of them hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.api.verification import EquivalenceResult, verdict_data
from headway.api.verification import verify as verify_recipe
from headway.cli.terminal.console import say, say_json
from headway.errors import UsageError
from headway.units import format_seconds


def verify(
    recipe: str,
    /,
    *,
    processes: Annotated[str, Parameter(alias="-n")] = "1,2,4",
    plan: Path | None = None,
    steps: int = 4,
    microbatches: Annotated[bool, Parameter(negative="")] = False,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    directory: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Prove that the split run computes what the serial run computes.

    What is inexact by its plan is held against its own law instead: compressed exchanges, and
    pipeline schedules without a flush, whose late updates one process makes again.

    Runs a plain serial loop and the split run in float64 from the same initial parameters and
    compares losses, gradients, updated parameters, buffers and optimiser state by logical name.
    The steps straddle the end of an epoch, so that a ragged last batch is among them. Exits with 4
    on a difference.

    Args:
        recipe: A recipe.toml, module:function that returns a Recipe, or a bundled workload's name.
        processes: Numbers of processes to prove, such as 1,2,4.
        plan: Prove this plan, with its number of processes, instead.
        microbatches: The serial run goes through the plan's micro-batches one after the other, not
            through each global batch in one piece: for models with batch normalisation, which sees
            one micro-batch at a time.
        overrides: KEY=VALUE, a change to the recipe; may be repeated.
        directory: A run directory, in which the verdict is kept for its report.
    """

    def show(run: EquivalenceResult) -> None:
        if not shown:
            say(_header(run))
        shown.append(run)
        say(_line(run))

    shown: list[EquivalenceResult] = []
    result = verify_recipe(
        recipe,
        processes=_process_counts(processes),
        plan=plan,
        steps=steps,
        microbatches=microbatches,
        overrides=overrides,
        directory=directory,
        on_run=None if json else show,
    )
    if json:
        say_json(verdict_data(result))
    result.check()
    if not json:
        say(_verdict_line(result.runs, steps))
    return 0


def _verdict_line(runs: Sequence[EquivalenceResult], steps: int) -> str:
    tensors = sum(len(run.comparison.differences) for run in runs)
    if any(run.laws for run in runs):
        buckets = sum(len(run.laws) for run in runs)
        return (
            f"INEXACT by its plan, and its law holds ({steps} steps, {buckets} buckets checked; "
            "all ranks hold the same parameters)"
        )
    if any(run.delayed for run in runs):
        return (
            f"INEXACT by its plan, and its law holds ({steps} steps, {tensors} tensors equal to "
            "those of one process that makes the same delayed updates)"
        )
    return f"EQUAL to the serial run ({steps} steps, {tensors} tensors compared)"


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
    """One row: the largest relative error of each kind, or the largest deviation from the law."""
    comparison = verdict.comparison
    if verdict.laws:
        worst_law = max(verdict.laws, key=lambda law: law.error / law.bound)
        return f"{verdict.processes:>9}  inexact; at its worst {worst_law}"
    errors = ["-" if error is None else f"{error:.1e}" for error in verdict.errors.values()]
    law = "law holds" if verdict.delayed else "equal"
    word = law if comparison.equal else "DIFFERENT"
    return (
        f"{verdict.processes:>9}  "
        + "".join(f"{error:>12}" for error in errors)
        + f"{len(comparison.differences):>10}{format_seconds(verdict.seconds):>9}  {word}"
    )
