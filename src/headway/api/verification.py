"""`headway.verify`: compare the split run with the serial run.

Runs a plain serial loop and the split run in float64 from the same initial parameters, each in
workers of its own, and compares what they recorded.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from headway.api.inputs import PlanInput, RecipeInput, resolve_plan, sendable_recipe
from headway.api.training import train_to_prove
from headway.documents import parse_json, read_text
from headway.errors import HeadwayError, NotEqual, UsageError, WorkerFailed
from headway.keywords import checks_keywords
from headway.launch.forkserver import gc_paused, start_forkserver
from headway.launch.preflight import check_processes, threads_for
from headway.run.recipe.check import check_recipe
from headway.units import counted

if TYPE_CHECKING:
    from headway.plans import Plan
    from headway.verification.compare import Comparison
    from headway.verification.recording import Recording, VerifyJob

_LOG = logging.getLogger("headway")

# Defaults of `headway.verify` and of the command.
PROCESSES = (1, 2, 4)
STEPS = 4


@dataclass(frozen=True, slots=True)
class EquivalenceResult:
    """What one number of processes gave.

    Attributes:
        comparison: With the serial run; of a schedule without a flush with the emulation of its
            delayed updates; of an inexact exchange that of the same plan with nothing compressed.
        replay: Of an inexact exchange: the run with what one process makes of it with the same
            compressor.
        failure: The error that has ended the run after the first difference.
        whole: With `whole`: what training runs leave behind ("trained", "resumed", "resumed with 1
            process", of a plan that keeps parts also "resumed from 1 process") with the serial run;
            of an inexact exchange training runs with it, too, with their replay.
        own_precision: Two steps of data parallelism in the recipe's own precision with what one
            process makes of them, within the bounds of rounding; None: not data parallelism, or
            float64 is its own.
        workers: Its workers do not agree at every step; compared is with one process that makes the
            steps of all of them.
    """

    processes: int
    comparison: Comparison
    seconds: float
    replay: Comparison | None = None
    delayed: bool = False
    failure: HeadwayError | None = None
    whole: Mapping[str, Comparison] = field(default_factory=dict)
    own_precision: Comparison | None = None
    workers: bool = False

    @property
    def holds(self) -> bool:
        """Equal to the serial run, and an inexact exchange to its replay."""
        others = [*self.whole.values(), self.replay, self.own_precision]
        return self.comparison.equal and not any(map(_differs, others))

    @property
    def errors(self) -> dict[str, float | None]:
        """The largest relative error of each kind of tensor, in the order of a step; None: the run
        has no such tensor."""
        from headway.verification.recording import STEP_KINDS  # imports torch

        worst = {kind: self.comparison.worst(kind) for kind in STEP_KINDS}
        return {kind: one.error if one else None for kind, one in worst.items()}

    @property
    def rounding(self) -> float | None:
        """What becomes of one unit in the last place of the initial parameters in the serial run,
        as a relative error; None: it was not asked for, as the usual tolerance is enough."""
        from headway.verification.compare import NOISE_FACTOR  # imports torch

        worst = max(self.comparison.noise.values(), default=None)
        return None if worst is None else worst / NOISE_FACTOR

    @property
    def law(self) -> str | None:
        """Of what is inexact by its plan: "holds" or "broken"."""
        if self.replay is None and not self.delayed and not self.workers:
            return None
        return "holds" if self.holds else "broken"


@dataclass(frozen=True, repr=False)
class VerificationResult:
    """The verdict on a recipe; printed, or as the last line of a notebook's cell, a sentence.

    Attributes:
        runs: One for each number of processes, in the order asked.
        steps: Optimiser steps that were compared.
    """

    runs: tuple[EquivalenceResult, ...]
    steps: int

    @property
    def holds(self) -> bool:
        """Every split run is equal to the serial run; an inexact one keeps its law."""
        return all(run.holds for run in self.runs)

    def check(self) -> None:
        """Raise unless the verdict holds.

        Raises:
            NotEqual: With the first tensor, or the bucket, that differs.
        """
        wrong = [run for run in self.runs if not run.holds]
        if wrong:
            if wrong[0].comparison.wrong:
                raise _not_equal(wrong, self.steps)
            if _differs(wrong[0].replay):
                raise _broken(wrong[0], wrong[0].replay, "with the inexact exchange")
            if _differs(wrong[0].own_precision):
                raise _broken(wrong[0], wrong[0].own_precision, "in the recipe's own precision")
            raise _not_whole(wrong[0])

    def __repr__(self) -> str:
        try:
            self.check()
        except NotEqual as error:
            return f"DIFFERENT: {error.what}"
        made = counted(self.steps, "step")
        tensors = sum(len(run.comparison.differences) for run in self.runs)
        if any(run.replay for run in self.runs):
            replayed = sum(len(run.replay.differences) for run in self.runs if run.replay)
            return (
                "INEXACT by its plan, and its law holds: without compression EQUAL to the serial "
                f"run ({made}, {tensors} tensors), with it equal to a replay in one process "
                f"({replayed} gradients, sums, residuals and updates)"
            )
        if any(run.delayed for run in self.runs):
            return (
                f"INEXACT by its plan, and its law holds ({made}, {tensors} tensors equal to "
                "those of one process that makes the same delayed updates)"
            )
        if any(run.workers for run in self.runs):
            return (
                f"INEXACT by its plan, and its law holds ({made}, {tensors} tensors of all workers "
                "equal to those of one process that makes the steps of each)"
            )
        return f"EQUAL to the serial run ({made}, {tensors} tensors compared)"


@checks_keywords
def verify(
    recipe: RecipeInput,
    *,
    processes: int | Sequence[int] = PROCESSES,
    plan: PlanInput | None = None,
    steps: int = STEPS,
    microbatches: bool = False,
    whole: bool = False,
    overrides: Sequence[str] = (),
    directory: str | Path | None = None,
    on_run: Callable[[EquivalenceResult], None] | None = None,
) -> VerificationResult:
    """Compare the split run with the serial run: losses, gradients, updates, by logical name.

    An inexact exchange is proved in two parts: the same plan with nothing compressed equals the
    serial run, and every step with the compressor equals what one process makes of it. Of pipeline
    schedules without a flush one process makes the late updates again. The steps straddle the end
    of an epoch, so that a ragged last batch is among them.

    Args:
        recipe: As for `headway.train`, sent to workers likewise.
        processes: Numbers of processes to prove.
        plan: Prove this plan, with its number of processes, instead.
        steps: Optimiser steps to compare, at least 1; with priority some more are made, so that
            updates cross the border of a step.
        microbatches: The serial run goes through the plan's micro-batches one after the other, not
            through each global batch in one piece: for models with batch normalisation, which sees
            one micro-batch at a time.
        whole: Train, too, twice as many steps from the first sample on, with checkpoints and
            validations, and resume in the middle with the same plan and with another one: each run
            must end as the serial one. An inexact exchange is exact in these runs, and resumed
            runs with it are replayed as well. Not of schedules without a flush.
        overrides: "key=value" changes to the recipe.
        directory: A run directory, in which the verdict is kept for its report.
        on_run: Called with the verdict on each number of processes as soon as it is known.

    Returns:
        The verdict; `check()` raises unless it holds.

    Raises:
        UsageError: No steps, no number of processes, or no such directory.
        RecipeError: The recipe cannot be used, or not be sent to workers.
        PlanError: There can be no such plan.
        RunError: An exception in a rank.
    """
    # Now, and not after an hour of verification.
    if directory is not None and not Path(directory).is_dir():
        raise UsageError(
            f"there is no run directory {directory} for the verdict",
            fix="Name one that `headway train` has made, or leave the option away.",
        )
    reference = sendable_recipe(recipe, overrides)
    # An object has taken them in already.
    overrides = tuple(overrides) if isinstance(reference, str) else ()
    if isinstance(reference, str):
        # Without torch, so that a mistyped key shows at once.
        check_recipe(reference, overrides)
    asked = (processes,) if isinstance(processes, int) else tuple(processes)
    counts = (resolve_plan(plan).ranks,) if plan is not None else asked
    if not counts or not all(isinstance(count, int) and count > 0 for count in counts):
        raise UsageError(
            f"--processes {','.join(map(str, counts))}: not a list of positive numbers",
            fix="Write --processes 1,2,4.",
        )
    for count in counts:
        check_processes(count)
    if steps < 1:
        raise UsageError(f"--steps {steps}: at least 1")
    start_forkserver(1, ("headway.verification",))  # its imports run beside the one here
    with gc_paused():
        from headway.run.recipe.sent_recipe import send_recipe
        from headway.verification.recording import VerifyJob
    given = Path(plan) if isinstance(plan, str) else plan
    job = VerifyJob(recipe=send_recipe(reference), overrides=overrides, steps=steps, plan=given)
    runs = _verify_split_runs(job, counts, microbatches, whole, on_run)
    made = (difference.step for run in runs for difference in run.comparison.differences)
    result = VerificationResult(runs, max(made, default=steps))
    if directory is not None:
        text = json.dumps(verdict_data(result), indent=2)
        (Path(directory) / "verification.json").write_text(text + "\n")
    return result


def _verify_split_runs(
    job: VerifyJob,
    counts: Sequence[int],
    pieces: bool,
    whole: bool,
    on_run: Callable[[EquivalenceResult], None] | None,
) -> tuple[EquivalenceResult, ...]:
    from headway.verification.compare import compare
    from headway.verification.distributed_run import inexact_file, narrow_file, record_split
    from headway.verification.recording import Recording
    from headway.verification.serial_run import cut_file
    from headway.verification.worker_run import workers_file

    with tempfile.TemporaryDirectory(prefix="headway-verify-") as folder:
        verdicts = []
        for number, count in enumerate(counts):
            target = Path(folder) / f"split-{count}.safetensors"
            start = perf_counter()
            failure = _recorded_until_failure(record_split, job, target, count)
            delayed, workers = cut_file(target).exists(), workers_file(target).exists()
            given = Recording.load(target)
            # The serial run is the same for all counts, unless it follows their micro-batches.
            if pieces or workers or not number:
                alone = count if pieces else None
                of = (count, target) if workers else None
                reference = _SerialRun(job, Path(folder), alone, of)
            if delayed:
                comparison = compare(_delayed_reference(job, target, count), given)
            else:
                comparison = reference.compared(given)
            inexact = inexact_file(target)
            try:
                replay = _replayed(job, inexact, count) if inexact.exists() else None
            except HeadwayError as error:
                raise failure or error from None
            narrow = narrow_file(target)
            if failure is not None and comparison.equal and not _differs(replay):
                # What was recorded before does not explain it.
                apart = inexact.exists() and not narrow.exists()
                raise _failed_alone(inexact, failure) if apart else failure
            own = None
            if narrow.exists() and comparison.equal and not _differs(replay):
                own = _replayed(replace(job, narrow=True), narrow, count)
            ended = delayed or workers or failure is not None
            ends = _whole_runs(job, count, pieces) if whole and not ended else {}
            seconds = perf_counter() - start
            verdict = EquivalenceResult(
                count, comparison, seconds, replay, delayed, failure, ends, own, workers
            )
            verdicts.append(verdict)
            if on_run is not None:
                on_run(verdict)
    return tuple(verdicts)


class _SerialRun:
    """The reference of split runs, and how far rounding alone moves it, made where it is asked for.

    Args:
        ranks: As for `record_serial`.
        workers: In its place: of so many ranks, whose workers do not agree at every step, with
            their recording; None: it is the serial run.
    """

    def __init__(
        self,
        job: VerifyJob,
        folder: Path,
        ranks: int | None,
        workers: tuple[int, Path] | None = None,
    ) -> None:
        self._job, self._folder, self._ranks, self._workers = job, folder, ranks, workers
        self.recording = self._recorded(job, "serial.safetensors")
        self._perturbed_runs: dict[int, Recording] = {}

    def compared(
        self, split: Recording, view: Callable[[Recording], Recording] = lambda whole: whole
    ) -> Comparison:
        """A split run with this one.

        Args:
            view: What of this run is compared.
        """
        from headway.verification.compare import PERTURBED_RUNS, compare

        comparison = compare(view(self.recording), split)
        for count in range(1, PERTURBED_RUNS + 1):
            if not comparison.may_be_rounding:
                break
            perturbed = [view(self._perturbed(number)) for number in range(1, count + 1)]
            comparison = compare(view(self.recording), split, perturbed=perturbed)
        return comparison

    def _perturbed(self, number: int) -> Recording:
        if number not in self._perturbed_runs:
            job = replace(self._job, perturbed=number)
            self._perturbed_runs[number] = self._recorded(job, f"perturbed-{number}.safetensors")
        return self._perturbed_runs[number]

    def _recorded(self, job: VerifyJob, name: str) -> Recording:
        from headway.verification.history_run import history_file, record_history
        from headway.verification.recording import Recording
        from headway.verification.serial_run import record_serial
        from headway.verification.worker_run import record_workers

        target = self._folder / name
        entry = partial(record_serial, ranks=self._ranks)
        if self._workers is not None:
            ranks, split = self._workers
            entry = partial(record_workers, ranks=ranks, split=split)
            if history_file(split, 0).exists():
                entry = partial(record_history, ranks=ranks, split=split)
        _start(entry, job, target, 1)
        return Recording.load(target)


def _recorded_until_failure(
    entry: Callable[..., None], job: VerifyJob, target: Path, processes: int
) -> HeadwayError | None:
    """The error that has ended a run of which something was recorded."""
    try:
        _start(entry, job, target, processes)
    except HeadwayError as error:
        if isinstance(error, NotEqual) or not target.exists():
            raise
        return error
    return None


def _failed_alone(recording: Path, failure: HeadwayError) -> HeadwayError:
    """The verdict on an inexact exchange that has failed, where the same steps without it went
    well."""
    from headway.verification.recording import Recording

    if not isinstance(failure, WorkerFailed):
        return failure  # that says what to do
    step = Recording.load(recording).complete_steps + 1
    return NotEqual(
        f"the run with the inexact exchange fails in step {step}, and without compression it does "
        "not",
        where=failure.where,
        why=str(failure),
    )


def _whole_runs(job: VerifyJob, processes: int, pieces: bool) -> dict[str, Comparison]:
    """Training runs of a plan against the serial one: from the beginning, and resumed."""
    from headway.verification.distributed_run import simple_plan, trained_plan, uncompressed
    from headway.verification.whole_run import (
        check_end,
        check_resumption,
        expected_end,
        recorded_end,
        without_last,
    )

    job = replace(job, whole=True)
    middle, last, found = job.steps, 2 * job.steps, {}
    # More than one checkpoint, of which the newest is the one to resume from.
    overrides = _training_overrides(job, last, max(1, job.steps // 2))
    other = 1 if processes > 1 else 2
    with tempfile.TemporaryDirectory(prefix="headway-verify-") as folder:
        reference = _SerialRun(job, Path(folder), processes if pieces else None)

        def run(name: str, plan: Plan, start: Path | None) -> Path:
            directory = Path(folder) / name.replace(" ", "-")
            if start is not None:
                shutil.copytree(start, directory)
                without_last(directory, middle)
            try:
                train_to_prove(
                    job.recipe,
                    plan,
                    overrides=overrides,
                    directory=directory,
                    resume=start is not None,
                    validate_every=job.validate_every,
                )
            except HeadwayError as error:
                if start is None:
                    raise
                # The same steps went well without a checkpoint between them.
                raise NotEqual(
                    f"a training run ({name}) does NOT end as the serial run: it fails",
                    where=f"{counted(plan.ranks, 'process')}",
                    why=str(error),
                    fix="Look at what is restored from the checkpoint.",
                ) from error
            check_end(directory, name, last)
            if start is not None:
                check_resumption(directory, name, middle)
            given = recorded_end(directory, (middle, last), reference.recording)
            view = partial(expected_end, steps=(middle, last), given=given)
            found[name] = reference.compared(given, view)
            return directory

        wanted = trained_plan(job, processes)
        exact = uncompressed(wanted)
        first = run("trained", exact, None)
        run("resumed", exact, first)
        elsewhere = run(f"resumed with {_counted(other)}", simple_plan(job, other), first)
        if exact.memory.zero or exact.needs_batch or exact.split.ranks > 1:
            # Parts of what was saved whole.
            run(f"resumed from {_counted(other)}", exact, elsewhere)
        if not wanted.exchange.exact and processes > 1:
            found |= _resumed_exchanges(job, wanted, Path(folder))
    return found


def _training_overrides(job: VerifyJob, stop: int, often: int) -> tuple[str, ...]:
    """Changes to the recipe for runs that are compared from end to end."""
    settings = {
        "stop": stop,
        "checkpoint_every": often,
        "checkpoint_keep": 5,
        "early_stopping": 0,
        "precision": '"float64"',
    }
    return (*job.overrides, *(f"{key}={value}" for key, value in settings.items()))


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _resumed_exchanges(job: VerifyJob, plan: Plan, folder: Path) -> dict[str, Comparison]:
    """A training run with its inexact exchange, and what is resumed from its checkpoint."""
    from headway.checkpoint.directory import step_path
    from headway.run.training.job import TrainJob
    from headway.run.training.run_directory import RunDirectory
    from headway.verification.distributed_run import simple_plan
    from headway.verification.resumed_run import ResumedRun, record_replays, record_training

    def run(name: str, plan: Plan, stop: int, start: Path | None) -> ResumedRun:
        target = folder / f"{name.replace(' ', '-')}.safetensors"
        directory = target.with_suffix("")
        if start is not None:
            shutil.copytree(start, directory)
        asked = TrainJob(
            recipe=job.recipe,
            overrides=_training_overrides(job, stop, job.steps),
            directory=directory,
            plan=plan,
            resume=start is not None,
            device="cpu",
            timeout_seconds=job.timeout_seconds,
            patience_seconds=job.timeout_seconds,
            trace_every=0,
            validate_every=job.validate_every,
        )
        _start(partial(record_training, train=asked), job, target, plan.ranks)
        return ResumedRun(target, plan)

    names = {"resumed with its exchange": plan}
    other = 2 if plan.ranks != 2 else 3
    # Ranks of parts belong to one number of processes.
    alone = plan.data_degree == plan.ranks and not any(part.ranks for part in plan.exchange.parts)
    if alone and other <= plan.batch.samples:
        exchanging = f"resumed with its exchange and {_counted(other)}"
        names[exchanging] = simple_plan(job, other, plan)
    first = run("trained with its exchange", plan, job.steps, None)
    directory = first.target.with_suffix("")
    resumed = {name: run(name, one, 2 * job.steps, directory) for name, one in names.items()}
    checkpoint = step_path(RunDirectory(directory).checkpoints, job.steps)
    entry = partial(
        record_replays, first=first, checkpoint=checkpoint, resumed=tuple(resumed.values())
    )
    _start(entry, job, first.target, 1)
    runs = {"trained with its exchange": first, **resumed}
    return {name: _compared_replay(one.target) for name, one in runs.items()}


def _replayed(job: VerifyJob, run: Path, processes: int) -> Comparison:
    """A run with an inexact exchange against what one process makes of it."""
    from headway.verification.replay import record_replay

    # In the recipe's own precision sums are rounded as the ranks' threads split them.
    _start(partial(record_replay, ranks=processes), job, run, 1, threads=threads_for(processes))
    return _compared_replay(run)


def _compared_replay(run: Path) -> Comparison:
    from headway.verification.compare import compare
    from headway.verification.recording import Recording
    from headway.verification.replay import replay_files

    expected, given = map(Recording.load, replay_files(run))
    return compare(expected, given)


def _delayed_reference(job: VerifyJob, split: Path, processes: int) -> Recording:
    """What one process makes of the table and the cut of a split run."""
    from headway.verification.recording import Recording
    from headway.verification.serial_run import cut_file, record_delayed

    stages = parse_json(read_text(cut_file(split)))
    target = split.with_name(f"delayed-{processes}.safetensors")
    _start(partial(record_delayed, ranks=processes, stages=stages), job, target, 1)
    return Recording.load(target)


def _start(
    entry: Callable[..., None],
    job: VerifyJob,
    target: Path,
    processes: int,
    threads: int | None = None,
) -> None:
    from headway.launch.local import launch_local
    from headway.launch.restart_policy import RestartPolicy

    result = launch_local(
        entry,
        (job, target),
        processes=processes,
        directory=target.parent,
        threads=threads,
        # No second attempt: a recording of two lives would prove nothing.
        policy=RestartPolicy(limit=0),
    )
    if result.stopped_by is not None:
        _LOG.info("stopped by %s", result.stopped_by)
        raise KeyboardInterrupt


def verdict_data(result: VerificationResult) -> list[dict[str, object]]:
    """The verdict as plain data, one entry for each number of processes."""
    return [_run_data(run) for run in result.runs]


def _run_data(verdict: EquivalenceResult) -> dict[str, object]:
    comparison, replay, own = verdict.comparison, verdict.replay, verdict.own_precision
    # Equal to the emulation of its delays is not equal to the serial run.
    exact = comparison.equal and verdict.law is None
    first = comparison.first or (own and own.first)
    return {
        "processes": verdict.processes,
        "equal": exact and not _differs(own),
        "law": verdict.law,
        "laws": None if replay is None else [str(one) for one in replay.wrong],
        "own_precision": None if own is None else [str(one) for one in own.wrong],
        "tolerance": comparison.tolerance,
        "rounding": verdict.rounding,
        "tensors": len(comparison.differences),
        "errors": {kind: error for kind, error in verdict.errors.items() if error is not None},
        "first_difference": str(first) if first else None,
        "whole": {name: one.equal for name, one in verdict.whole.items()} or None,
        "seconds": verdict.seconds,
    }


def _differs(comparison: Comparison | None) -> bool:
    return comparison is not None and not comparison.equal


def _not_whole(verdict: EquivalenceResult) -> NotEqual:
    name, end = next((n, one) for n, one in verdict.whole.items() if not one.equal)
    others = [str(difference) for difference in end.wrong]
    must = "is NOT what one process makes of it" if "its exchange" in name else ""
    return NotEqual(
        f"a training run ({name}) {must or 'does NOT end as the serial run'}; "
        f"first difference: {others[0]}",
        where=f"{counted(verdict.processes, 'process')}",
        why=f"{len(others)} values differ:\n  " + "\n  ".join(others[:5]),
        fix="The steps themselves are equal: look at checkpoints, at what is restored from them, "
        "and at the validation.",
    )


def _then(verdict: EquivalenceResult) -> str:
    return f"\n  The run then ended: {verdict.failure.what}" if verdict.failure else ""


def _broken(verdict: EquivalenceResult, replay: Comparison | None, which: str) -> NotEqual:
    assert replay is not None
    broken = [str(one) for one in replay.wrong]
    return NotEqual(
        f"the run {which} is NOT what one process makes of it; first difference: {broken[0]}",
        where=f"{counted(verdict.processes, 'process')}",
        why=f"{len(broken)} of {len(replay.differences)} values differ, in the order of "
        "execution:\n  " + "\n  ".join(broken[:5]) + _then(verdict),
        fix="This is a mistake of headway; please report it with the plan.",
    )


def _not_equal(wrong: list[EquivalenceResult], steps: int) -> NotEqual:
    first = wrong[0].comparison.first
    assert first is not None
    others = [str(difference) for difference in wrong[0].comparison.wrong]
    what = "the serial run"
    if wrong[0].delayed:
        what = "what one process makes of the same table with its delayed updates"
    if wrong[0].workers:
        what = "what one process makes of the steps of all its workers"
    return NotEqual(
        f"the split run is NOT {what}; first difference: {first}",
        where=f"{counted(wrong[0].processes, 'process')}",
        why=f"{len(others)} tensors differ by more than {wrong[0].comparison.tolerance:.0e} in "
        f"{counted(steps, 'step')}, in the order of execution:\n  "
        + "\n  ".join(others[:5])
        + _then(wrong[0]),
        fix="A loss that is not a mean over samples, batch statistics, or random numbers from "
        "outside torch depend on the split; see docs/verification.md.",
    )
