"""`headway train svm FILE`: the options, the progress display, and the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headway.cli.terminal.console import exit_code, parse_option, say, say_json, warn
from headway.cli.terminal.progress import RunDisplay
from headway.errors import TIMEOUT_SECONDS, MissingExtra, UsageError
from headway.launch.restart_policy import RESTARTS
from headway.run.distributed.launch_env import HEARTBEAT_TIMEOUT_SECONDS, LaunchEnv
from headway.units import counted, format_bytes, format_number, parse_seconds

try:
    from headway.svm.run.file_training import MachineResult, train_file
    from headway.svm.run.job import MachineJob, MachineOutcome
except ModuleNotFoundError as error:
    if error.name != "numba":
        raise
    raise MissingExtra(
        "headway train svm needs the package numba, which is not installed",
        fix="pip install 'headway[svm]'",
    ) from None


def train_svm(
    data: Path,
    /,
    *,
    processes: Annotated[int | None, Parameter(alias="-n")] = None,
    kernel: Literal["rbf", "linear", "poly", "sigmoid"] = "rbf",
    cost: Annotated[float, Parameter(name="--C")] = 1.0,
    gamma: float | None = None,
    degree: float = 3,
    coef0: float = 0.0,
    tolerance: float = 1e-3,
    weights: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    elimination: str = "adaptive",
    working_set: int = 512,
    max_steps: int = -1,
    test: Path | None = None,
    out: Path | None = None,
    directory: Annotated[Path | None, Parameter(alias="-d")] = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    restarts: int = RESTARTS,
    timeout: str = f"{TIMEOUT_SECONDS / 60:g} min",
    patience: str = f"{HEARTBEAT_TIMEOUT_SECONDS:g} s",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a support vector machine on a file in libsvm's format, on one process or many.

    Args:
        data: A line for each sample: label index:value ...; also compressed, as .gz or .bz2.
        processes: Local processes, each with its share of the samples; by default 1.
        kernel: K(x, z) of two samples.
        cost: Bound of the multipliers: how much a sample on the wrong side counts.
        gamma: Of all kernels but the linear one; by default 1 / columns.
        degree: Of the polynomial kernel.
        coef0: Of the polynomial and the sigmoid kernel.
        tolerance: Largest violation of a finished machine.
        weights: CLASS=FACTOR, a factor of C for the samples of a class; may be repeated.
        elimination: When samples are eliminated: adaptive, none, or as published: single2,
            single500, single1000, single5pc, single10pc, single50pc, multi2, ...
        working_set: Samples that are solved for at once, 2 to 1024.
        max_steps: End unfinished after so many steps; by default 10^9.
        test: More samples: the share that is predicted rightly is told.
        out: Where to write the machine, in libsvm's format or, with a name in .safetensors, in
            that; by default in the run directory.
        directory: The run directory; by default the next free runs/svm-NAME-001.
        resume: Go on from the last state; without --directory, of the newest run.
        restarts: Most restarts of dead workers without a new state in between.
        timeout: Longest wait for another process, such as "30 s" or "5 min".
        patience: Declare a worker lost after this long without a heartbeat; "0 s": never.
    """
    job = MachineJob(
        data=data,
        test=test,
        out=out,
        kernel=kernel,
        C=cost,
        gamma=gamma,
        degree=degree,
        coef0=coef0,
        tolerance=tolerance,
        weights=dict(_weight(text) for text in weights),
        rule=elimination,
        working_set=working_set,
        most_steps=max_steps,
        resume=resume,
        timeout_seconds=parse_option("--timeout", timeout, parse_seconds),
        patience_seconds=parse_option("--patience", patience, parse_seconds),
    )
    result = train_file(
        job,
        processes=processes,
        directory=directory,
        restarts=restarts,
        observer=RunDisplay(),
    )
    place = LaunchEnv.here()
    # Under torchrun every rank runs this command; one of them speaks.
    if place.rank == 0:
        _print_result(result, json=json)
    # Launchers take any other code for a failed rank, and kill or restart the job.
    return 0 if place.found_world else exit_code(result.stopped_by)


def _weight(text: str) -> tuple[float, float]:
    label, sign, factor = text.partition("=")
    try:
        if sign:
            return float(label), float(factor)
    except ValueError:
        pass
    raise UsageError(f"--weights {text}: write CLASS=FACTOR, as in --weights 1=10")


def _print_result(result: MachineResult, *, json: bool) -> None:
    outcome = result.outcome
    if json:
        facts = {} if outcome is None else outcome.__dict__
        say_json(
            {
                "directory": str(result.directory),
                "model": str(result.model),
                **facts,
                "stopped_by": result.stopped_by,
                "attempts": result.attempts,
            }
        )
        return
    if outcome is not None:
        say("\n".join(_lines(outcome)))
        if not outcome.finished:
            warn(
                f"the machine is unfinished: its violation is {outcome.violation:.3g}; go on with "
                "--resume"
            )
    say(f"machine        {result.model}")
    say(f"run directory  {result.directory}")
    if result.stopped_by is None:
        say(f"next           headway report {result.directory}")


def _lines(outcome: MachineOutcome) -> list[str]:
    support = ", ".join(
        f"{count} of class {label}"
        for label, count in zip(outcome.classes, outcome.support, strict=True)
    )
    total = sum(outcome.support)
    lines = [
        f"support        {counted(total, 'vector')}: {support}"
        if len(outcome.classes) <= 4
        else f"support        {counted(total, 'vector')} of {len(outcome.classes)} classes",
        f"violation      {outcome.violation:.3g}{'' if outcome.finished else ', unfinished'}",
        f"objective      {outcome.objective:.8g}",
        f"work           {counted(outcome.step, 'outer step')}, {counted(outcome.steps, 'step')} "
        f"of pairs, {format_number(outcome.values)} kernel values",
    ]
    if outcome.peak_bytes:
        lines.append(
            f"memory         {format_bytes(outcome.peak_bytes)} in a rank; bound "
            f"{format_bytes(outcome.bound_bytes)}"
        )
    if outcome.accuracy is not None:
        lines.append(f"test           {outcome.accuracy:.4%} predicted rightly")
    return lines
