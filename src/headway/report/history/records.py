"""Frozen records of what a run wrote down.

A missing number is NaN, a missing text is "". `parse_record` is the only place where a row of JSON
becomes a record.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headway.timeline import Timeline

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedStep:
    """One optimiser step of the history that counts; `seconds` s, `rate` in samples/s.

    What it says of the exchange is rank 0's: `exposed` s of waiting, `overlap` the hidden fraction
    of the time that buckets were on their way, `wire_bytes` that the rank sends.
    """

    step: int
    attempt: int = 0
    time: float = math.nan
    loss: float = math.nan
    samples: int = 0
    epoch: int = 0
    position: int = 0
    seconds: float = math.nan
    rate: float = math.nan
    lr: float = math.nan
    norm: float = math.nan
    exposed: float = math.nan
    overlap: float = math.nan
    wire_bytes: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedBucket:
    """One bucket of a traced step; moments in seconds since the step began, NaN for never.

    Attributes:
        parameters: Logical names.
        wire_bytes: That the rank sends for it.
        sent: It was handed to the network.
        applied: The optimiser had used it, where it does so bucket by bucket.
        needed: The training thread asked for it.
        waited: Seconds for which the thread then stood still.
    """

    bucket: int
    parameters: tuple[str, ...] = ()
    bytes: int = 0
    wire_bytes: int = 0
    ready: float = math.nan
    sent: float = math.nan
    received: float = math.nan
    applied: float = math.nan
    needed: float = math.nan
    waited: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedExchange:
    """The exchange of one traced step, as rank 0 saw it."""

    step: int
    buckets: tuple[LoggedBucket, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedValidation:
    """One validation, made after `step` steps; `metrics` are the recipe's, by name."""

    step: int
    time: float = math.nan
    loss: float = math.nan
    samples: int = 0
    seconds: float = math.nan
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedCheckpoint:
    """One committed checkpoint; training stood still for `held_seconds`."""

    step: int
    time: float = math.nan
    bytes: int = 0
    held_seconds: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedSample:
    """A text that the recipe made from the trained model."""

    step: int
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedMachineStep:
    """One outer step of the training of a support vector machine.

    Attributes:
        pair: Number of the pair of classes, of `pairs`.
        violation: Of the active samples, before the step.
        values: Kernel values of the pair so far, of all ranks.
        seconds: Since the pair was begun.
    """

    step: int
    attempt: int = 0
    time: float = math.nan
    pair: int = 0
    pairs: int = 1
    classes: str = ""
    violation: float = math.nan
    active: int = 0
    support: int = 0
    values: float = math.nan
    seconds: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedPrediction:
    """Whether setting samples aside pays, as the rule "adaptive" saw it; in kernel values."""

    step: int
    time: float = math.nan
    saved: float = math.nan
    cost: float = math.nan
    rows: float = math.nan
    pays: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedPair:
    """How the problem of a pair of classes was solved."""

    classes: str
    samples: int = 0
    violation: float = math.nan
    objective: float = math.nan
    finished: bool = False
    steps: int = 0
    outer: int = 0
    values: float = math.nan
    reconstructions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedMachine:
    """A trained support vector machine; its violation and objective are over all pairs.

    Attributes:
        accuracy: On test samples; NaN: there were none.
        peak_bytes: Of the rank that needed most; `bound_bytes` is what was said before.
    """

    step: int
    finished: bool = False
    support: int = 0
    violation: float = math.nan
    objective: float = math.nan
    values: float = math.nan
    accuracy: float = math.nan
    peak_bytes: float = math.nan
    bound_bytes: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineHistory:
    """The training of a support vector machine.

    Attributes:
        steps: In order, each once; of a long training some are not written.
        pairs: Those that were solved when it ended.
        machine: None: it has not ended yet.
    """

    steps: tuple[LoggedMachineStep, ...] = ()
    predictions: tuple[LoggedPrediction, ...] = ()
    pairs: tuple[LoggedPair, ...] = ()
    machine: LoggedMachine | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedWarning:
    """A warning that the run printed."""

    attempt: int = 0
    time: float = math.nan
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedAttempt:
    """One life of the job: from a start or a restart to its end.

    Attributes:
        attempt: Its number, 0 for the first.
        time: Unix seconds of its beginning.
        step: Steps that were done when it began; more than 0 after a restart from a checkpoint.
        ranks: Number of processes; 0 where it was not written.
        last: The last step that it logged, superseded or not.
        reason: How it ended: "complete", a signal's name, or "" where it wrote no end.
    """

    attempt: int = 0
    time: float = math.nan
    step: int = 0
    ranks: int = 0
    batch: str = ""
    last: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRankStep:
    """Where one rank's time went in one step (seconds), and the memory it held.

    Attributes:
        time: When it ended, seconds since the epoch.
        loss: Of the samples of a worker that does not agree with the others at every step; so are
            the other fields below. NaN: there are no such workers.
        lr: The learning rate of its first parameters.
        samples: That it made.
        waits: Seconds by what it waited for.
        staleness: Of pushes that servers of this rank have handled: (worker, updates).
        distance: Between two models that met here, as a share of the norm; NaN: none.
    """

    step: int
    attempt: int = 0
    seconds: float = math.nan
    compute: float = 0.0
    exposed: float = 0.0
    data: float = 0.0
    update: float = 0.0
    memory_bytes: float = math.nan
    time: float = math.nan
    loss: float = math.nan
    lr: float = math.nan
    samples: int = 0
    waits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    staleness: tuple[tuple[int, int], ...] = ()
    distance: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedFailure:
    """Why a rank stopped; `step` is -1 outside of steps, `secondary`: it only lost its peer."""

    attempt: int = 0
    rank: int = 0
    step: int = -1
    kind: str = ""
    what: str = ""
    where: str = ""
    why: str = ""
    fix: str = ""
    code: str = ""
    secondary: bool = False
    time: float = math.nan
    trace: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedProof:
    """What `headway verify` found for one number of processes; `error` is the largest, relative.

    `law` is "holds" or "broken" for what is inexact by its plan, else "".
    """

    processes: int
    equal: bool
    law: str = ""
    tolerance: float = math.nan
    tensors: int = 0
    error: float = math.nan
    first_difference: str = ""
    seconds: float = math.nan


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The history that counts: steps that a restart threw away are not in it.

    Attributes:
        recipe: recipe.json; empty where missing, like the two below.
        attempts: The first start and every restart, in order.
        steps: In order, each step once.
        validations: In order, at most one per step.
        checkpoints: In order, at most one per step.
        exchanges: Of traced steps, in order.
        warnings: In order, of all attempts.
        rank_steps: Steps of each rank, in order.
        traces: The spans of each traced step; seconds since the first span of the run.
        failures: Of all attempts; the cause before its consequences.
        proofs: verification.json, by number of processes.
        superseded: Number of steps that were done and thrown away by restarts.
        machine: Of the training of a support vector machine; else it has no steps.
    """

    directory: Path
    recipe: Mapping[str, Any]
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    attempts: tuple[LoggedAttempt, ...]
    steps: tuple[LoggedStep, ...]
    validations: tuple[LoggedValidation, ...]
    checkpoints: tuple[LoggedCheckpoint, ...]
    showcases: tuple[LoggedSample, ...]
    exchanges: tuple[LoggedExchange, ...]
    warnings: tuple[LoggedWarning, ...]
    rank_steps: Mapping[int, tuple[LoggedRankStep, ...]]
    traces: Mapping[int, Timeline]
    failures: tuple[LoggedFailure, ...]
    proofs: tuple[LoggedProof, ...]
    superseded: int
    notes: tuple[str, ...]
    machine: MachineHistory = MachineHistory()

    @property
    def name(self) -> str:
        """The recipe's name, or the directory's."""
        return str(self.recipe.get("name") or self.directory.resolve().name)

    @property
    def timeline(self) -> Timeline:
        """All spans of the history that counts."""
        return Timeline.of(span for trace in self.traces.values() for span in trace.spans)

    @property
    def restarts(self) -> tuple[LoggedAttempt, ...]:
        """Every attempt but the first."""
        return self.attempts[1:]

    @property
    def warm_up(self) -> frozenset[int]:
        """The first step of every attempt, which is slower than those that follow."""
        return frozenset(attempt.step + 1 for attempt in self.attempts)

    @property
    def settled_steps(self) -> tuple[LoggedStep, ...]:
        """The steps without warm-up."""
        return tuple(step for step in self.steps if step.step not in self.warm_up)

    @property
    def ranks(self) -> int:
        """Number of ranks of the last attempt; from the rank files where it was not written."""
        written = [attempt.ranks for attempt in self.attempts if attempt.ranks]
        return written[-1] if written else len(self.rank_steps)


def parse_record(kind: type[R], row: Mapping[str, Any]) -> R:
    """Build a record from a row; keys that the record does not have are left out.

    Raises:
        ValueError: A needed value is missing or a value has the wrong type.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        given = row.get(field.name)
        if given is None:
            if field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"{field.name} is missing")
            continue
        # Annotations are texts in this module, because of the future import.
        values[field.name] = _CONVERT[str(field.type)](given)
    return kind(**values)


def parse_exchange(row: Mapping[str, Any]) -> LoggedExchange:
    """Build the record of an exchange from a row.

    Raises:
        ValueError: See `parse_record`.
    """
    rows = row.get("buckets")
    if not isinstance(rows, list) or not all(isinstance(bucket, Mapping) for bucket in rows):
        raise ValueError("buckets is not a list of objects")
    return LoggedExchange(
        step=_whole(row.get("step")),
        buckets=tuple(parse_record(LoggedBucket, bucket) for bucket in rows),
    )


def _whole(value: Any) -> int:
    # Another writer's JSON may have 3.0 for a count.
    if isinstance(value, int | float) and math.isfinite(value):
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _number(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise ValueError(f"{value!r} is not a number")


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not true or false")


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(map(str, value))
    raise ValueError(f"{value!r} is not a list of names")


def _named_numbers(value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {str(name): _number(number) for name, number in value.items()}
    raise ValueError(f"{value!r} is no table of numbers")


def _pairs(value: Any) -> tuple[tuple[int, int], ...]:
    if isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value):
        return tuple((_whole(first), _whole(second)) for first, second in value)
    raise ValueError(f"{value!r} is no list of pairs")


_CONVERT: Mapping[str, Callable[[Any], Any]] = {
    "int": _whole,
    "float": _number,
    "str": str,
    "bool": _truth,
    "tuple[str, ...]": _names,
    "Mapping[str, float]": _named_numbers,
    "tuple[tuple[int, int], ...]": _pairs,
}
