"""`headway verify RECIPE --processes 1,2,4`: compare the split run with the serial run.

Prints one row per number of processes, with the largest relative errors; the exit code is 4 unless
all of them hold.
"""

from __future__ import annotations

import json as json_format
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headway.cli.terminal.console import note, say, say_json
from headway.errors import NotEqual, UsageError
from headway.launch.forkserver import gc_paused, start_forkserver
from headway.plan import Plan
from headway.run.recipe.check import check_recipe
from headway.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from headway.verification import Comparison, Law, Recording, VerifyJob


@dataclass(frozen=True, slots=True)
class EquivalenceResult:
    """What one number of processes gave.

    Attributes:
        comparison: With the serial run; of a schedule without a flush with the emulation of its
            delayed updates.
    """

    processes: int
    comparison: Comparison
    seconds: float
    laws: tuple[Law, ...] = ()
    delayed: bool = False

    @property
    def holds(self) -> bool:
        """Equal; an inexact exchange: its law holds in every bucket."""
        return all(law.holds for law in self.laws) if self.laws else self.comparison.equal

    @property
    def law(self) -> str | None:
        """Of what is inexact by its plan: "holds" or "broken"."""
        if not (self.laws or self.delayed):
            return None
        return "holds" if self.holds else "broken"


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
    check_recipe(recipe, overrides)
    counts = [Plan.load(plan).ranks] if plan else _process_counts(processes)
    if steps < 1:
        raise UsageError(f"--steps {steps}: at least 1")
    start_forkserver(1, ("headway.verification",))  # its imports run beside the one here
    with gc_paused():
        from headway.verification import VerifyJob  # imports torch
    job = VerifyJob(recipe=recipe, overrides=overrides, steps=steps, plan=plan)
    verdicts = _verify_split_runs(job, counts, pieces=microbatches, quiet=json)
    facts = [_facts(verdict) for verdict in verdicts]
    if directory is not None:
        (directory / "verification.json").write_text(json_format.dumps(facts, indent=2) + "\n")
    if json:
        say_json(facts)
    wrong = [verdict for verdict in verdicts if not verdict.holds]
    if wrong and wrong[0].laws:
        raise _broken(wrong[0])
    if wrong:
        raise _not_equal(wrong, steps)
    if not json and any(verdict.laws for verdict in verdicts):
        total = sum(len(verdict.laws) for verdict in verdicts)
        say(
            f"INEXACT by its plan, and its law holds ({steps} steps, {total} buckets checked; all "
            "ranks hold the same parameters)"
        )
    elif not json and any(verdict.delayed for verdict in verdicts):
        total = sum(len(v.comparison.differences) for v in verdicts)
        say(
            f"INEXACT by its plan, and its law holds ({steps} steps, {total} tensors equal to "
            "those of one process that makes the same delayed updates)"
        )
    elif not json:
        total = sum(len(v.comparison.differences) for v in verdicts)
        say(f"EQUAL to the serial run ({steps} steps, {total} tensors compared)")
    return 0


def _process_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UsageError(
            f"--processes {text}: not a list of positive numbers", fix="Write --processes 1,2,4."
        )
    return counts


def _verify_split_runs(
    job: VerifyJob, counts: list[int], *, pieces: bool, quiet: bool
) -> list[EquivalenceResult]:
    from headway.verification import (
        Recording,
        compare,
        cut_file,
        laws_file,
        load_laws,
        record_serial,
        record_split,
    )

    with tempfile.TemporaryDirectory(prefix="headway-verify-") as folder:
        serial = Path(folder) / "serial.safetensors"
        verdicts = []
        for number, count in enumerate(counts):
            if pieces or not number:
                ranks = count if pieces else None
                _start(partial(record_serial, ranks=ranks), job, serial, 1)
                reference = Recording.load(serial)
            target = Path(folder) / f"split-{count}.safetensors"
            start = perf_counter()
            _start(record_split, job, target, count)
            delayed = cut_file(target).exists()
            expected = _delayed_reference(job, target, count) if delayed else reference
            comparison = compare(expected, Recording.load(target))
            laws = tuple(load_laws(laws_file(target)))
            verdicts.append(
                EquivalenceResult(count, comparison, perf_counter() - start, laws, delayed)
            )
            if not quiet:
                if number == 0:
                    say(_HEADER)
                say(_line(verdicts[-1]))
    return verdicts


def _delayed_reference(job: VerifyJob, split: Path, processes: int) -> Recording:
    """What one process makes of the table and the cut of a split run."""
    from headway.verification import Recording, cut_file, record_delayed

    stages = json_format.loads(cut_file(split).read_text(encoding="utf-8"))
    target = split.with_name(f"delayed-{processes}.safetensors")
    _start(partial(record_delayed, ranks=processes, stages=stages), job, target, 1)
    return Recording.load(target)


def _start(entry: Callable[..., None], job: VerifyJob, target: Path, processes: int) -> None:
    from headway.launch.local import launch_local
    from headway.launch.restart_policy import RestartPolicy

    result = launch_local(
        entry,
        (job, target),
        processes=processes,
        directory=target.parent,
        policy=RestartPolicy(limit=0),
    )
    if result.stopped_by is not None:
        note(f"stopped by {result.stopped_by}")
        raise KeyboardInterrupt


_KINDS = ("loss", "gradient", "parameter", "buffer", "optimizer")
_HEADER = "processes  " + "".join(f"{kind:>12}" for kind in _KINDS) + "   tensors     time  verdict"


def _line(verdict: EquivalenceResult) -> str:
    """One row: the largest relative error of each kind, or the largest deviation from the law."""
    comparison = verdict.comparison
    if verdict.laws:
        worst_law = max(verdict.laws, key=lambda law: law.error / law.bound)
        return f"{verdict.processes:>9}  inexact; at its worst {worst_law}"
    errors = []
    for kind in _KINDS:
        worst = comparison.worst(kind)
        errors.append("-" if worst is None else f"{worst.error:.1e}")
    law = "law holds" if verdict.delayed else "equal"
    word = law if comparison.equal else "DIFFERENT"
    return (
        f"{verdict.processes:>9}  "
        + "".join(f"{error:>12}" for error in errors)
        + f"{len(comparison.differences):>10}{format_seconds(verdict.seconds):>9}  {word}"
    )


def _facts(verdict: EquivalenceResult) -> dict[str, object]:
    comparison = verdict.comparison
    return {
        "processes": verdict.processes,
        "equal": comparison.equal and not verdict.delayed,
        "law": verdict.law,
        "laws": [str(law) for law in verdict.laws if not law.holds] if verdict.laws else None,
        "tolerance": comparison.tolerance,
        "tensors": len(comparison.differences),
        "errors": {
            kind: worst.error for kind in _KINDS if (worst := comparison.worst(kind)) is not None
        },
        "first_difference": str(comparison.first) if comparison.first else None,
        "seconds": verdict.seconds,
    }


def _broken(verdict: EquivalenceResult) -> NotEqual:
    broken = [str(law) for law in verdict.laws if not law.holds]
    return NotEqual(
        f"the inexact exchange breaks its own law: {broken[0]}",
        where=f"{verdict.processes} processes",
        why=f"{len(broken)} of {len(verdict.laws)} buckets:\n  " + "\n  ".join(broken[:5]),
        fix="This is a mistake of the exchange; please report it with the plan.",
    )


def _not_equal(wrong: list[EquivalenceResult], steps: int) -> NotEqual:
    first = wrong[0].comparison.first
    assert first is not None
    others = [str(difference) for difference in wrong[0].comparison.wrong]
    what = "the serial run"
    if wrong[0].delayed:
        what = "what one process makes of the same table with its delayed updates"
    return NotEqual(
        f"the split run is NOT {what}; first difference: {first}",
        where=f"{wrong[0].processes} processes",
        why=f"{len(others)} tensors differ by more than {wrong[0].comparison.tolerance:.0e} in "
        f"{steps} steps, in the order of execution:\n  " + "\n  ".join(others[:5]),
        fix="A loss that is not a mean over samples, batch statistics, or random numbers from "
        "outside torch depend on the split; see docs/verification.md.",
    )
