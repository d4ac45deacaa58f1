"""Read a run directory into a `RunHistory`, whether finished, running or dead.

events.jsonl is replayed in file order: a resume at step s, or a step logged again, discards
everything logged beyond it. Rows of a rank count if they belong to the attempt whose step counts.
Files may still be growing or end in half a line: a damaged line or file costs that line or file,
never the report, and is named in a note.

A received message starts, in the trace, when its sender handed it over, not when the receiver asked
for it. Clocks of several machines may differ, so the start is clipped to the end.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from headway.documents import parse_json
from headway.errors import UsageError
from headway.report.history.records import (
    LoggedAttempt,
    LoggedCheckpoint,
    LoggedExchange,
    LoggedFailure,
    LoggedMachine,
    LoggedMachineStep,
    LoggedPair,
    LoggedPrediction,
    LoggedProof,
    LoggedRankStep,
    LoggedSample,
    LoggedStep,
    LoggedValidation,
    LoggedWarning,
    MachineHistory,
    RunHistory,
    parse_exchange,
    parse_record,
)
from headway.schedule.pipeline_schedule import Action, ActionKind
from headway.timeline import LANES, Span, Timeline


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The JSON objects of a file with one object per line.

    Returns:
        The objects, and notes about lines that could not be read. A missing file has no lines.
    """
    text, notes = _read_text(path)
    *whole, rest = (text or "").split("\n")
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, line in enumerate(whole, start=1):
        if not line.strip():
            continue
        row = _object(line)
        if row is None:
            damaged.append(number)
            row = _salvage(line)
        if row is not None:
            rows.append(row)
    # A last line without an end may still be written: it counts if it is whole, and is no damage
    # else.
    last = _object(rest)
    if last is not None:
        rows.append(last)
    return rows, [*notes, *_notes(path, damaged)]


def read_json_object(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The JSON object in a file; empty where the file is missing or damaged (with a note)."""
    text, notes = _read_text(path)
    if text is None:
        return {}, notes
    value = _object(text)
    return (value, []) if value is not None else ({}, [f"{path.name}: is not a JSON object"])


def _read_text(path: Path) -> tuple[str | None, list[str]]:
    """The text of a file, or None and, unless it is merely missing, a note why not."""
    try:
        # A file may end in the middle of a character.
        return path.read_bytes().decode("utf-8", errors="replace"), []
    except FileNotFoundError:
        return None, []
    except OSError as error:
        return None, [f"{path.name}: cannot be read ({error.strerror or error})"]


def read_json_objects(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The JSON objects of a file that holds a list of them, or one; none where it is missing."""
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError):
        return [], [f"{path.name}: is not a list of JSON objects"]
    found = value if isinstance(value, list) else [value]
    return [row for row in found if isinstance(row, dict)], []


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _salvage(line: str) -> dict[str, Any] | None:
    """What the next writer appended to the half line of a killed one, if that is what happened."""
    start = line.rfind('{"event"')
    return _object(line[start:]) if start > 0 else None


def _notes(path: Path, damaged: list[int]) -> list[str]:
    if not damaged:
        return []
    if len(damaged) == 1:
        return [f"{path.name}: line {damaged[0]} is damaged"]
    return [f"{path.name}: {len(damaged)} lines are damaged, the first is line {damaged[0]}"]


# The two ends of a message, put together: it was under way from its SEND to the end of its
# RECV.


MESSAGE_LANE = "messages"
MessageKey = tuple[int, str, int, int, int]
"""Sending rank, pipe, sending stage, receiving stage, micro-batch."""


def action_of(span: Span) -> Action | None:
    """Of a label such as "d0.s1.RECV.3<0: 4 KiB from rank 0"; None where it has none."""
    try:
        return Action.parse(span.label.partition(":")[0])
    except ValueError:
        return None


def align_message_starts(trace: Timeline) -> Timeline:
    """One step whose received messages begin when they were sent, not when asked for."""
    sent: dict[MessageKey, float] = {}
    for span in trace.spans:
        action = action_of(span) if span.lane == MESSAGE_LANE else None
        if action is not None and action.kind == ActionKind.SEND:
            ends = span.rank, action.pipe, action.stage, action.other, action.microbatch
            sent[ends] = span.start
    return Timeline.of(_align_span(span, sent) for span in trace.spans) if sent else trace


def _align_span(span: Span, sent: dict[MessageKey, float]) -> Span:
    action = action_of(span) if span.lane == MESSAGE_LANE else None
    if action is None or action.kind != ActionKind.RECV:
        return span
    sender = span.label.rpartition("from rank ")[2]
    if not sender.isdecimal():
        return span
    ends = int(sender), action.pipe, action.other, action.stage, action.microbatch
    return replace(span, start=min(span.end, sent.get(ends, span.start)))


# A run directory becomes a `RunHistory`.


_SIGNS = ("events.jsonl", "recipe.json", "plan.json", "environment.json")
_Stepped = TypeVar(
    "_Stepped",
    LoggedStep,
    LoggedValidation,
    LoggedCheckpoint,
    LoggedSample,
    LoggedExchange,
    LoggedMachineStep,
)


def read_history(directory: Path) -> RunHistory:
    """Read a run directory, of a run that is finished, still running, or dead.

    Args:
        directory: What `headway train` wrote; every file in it may be missing or damaged.

    Raises:
        UsageError: The directory does not exist or holds no run.
    """
    _must_hold_run(directory)
    notes: list[str] = []
    documents: dict[str, dict[str, Any]] = {}
    for name in ("recipe", "plan", "environment"):
        documents[name], found = read_json_object(directory / f"{name}.json")
        notes += found
    rows, found = read_json_lines(directory / "events.jsonl")
    replay = _Replay()
    notes += [*found, *_replay("events.jsonl", rows, replay.take)]
    rank_steps, traces, found = _ranks(directory / "ranks", replay)
    failures, more = _failures(directory / "failures")
    proofs, also = _proofs(directory / "verification.json")
    return RunHistory(
        directory=directory,
        **documents,
        attempts=tuple(replay.attempts),
        steps=tuple(replay.steps),
        validations=tuple(replay.validations),
        checkpoints=tuple(replay.checkpoints),
        showcases=tuple(replay.showcases),
        exchanges=tuple(replay.exchanges),
        warnings=tuple(replay.warnings),
        rank_steps=rank_steps,
        traces=traces,
        failures=failures,
        proofs=proofs,
        superseded=replay.superseded,
        notes=(*notes, *found, *more, *also),
        machine=MachineHistory(
            steps=tuple(replay.machine_steps),
            predictions=tuple(replay.predictions),
            pairs=tuple(replay.pairs),
            machine=replay.machine,
        ),
    )


def _must_hold_run(directory: Path) -> None:
    if not directory.is_dir():
        raise UsageError(
            "is not a directory" if directory.exists() else "does not exist",
            where=str(directory),
            fix="Give the run directory that headway train printed.",
        )
    if not any((directory / name).exists() for name in _SIGNS):
        raise UsageError(
            "is not a run directory",
            where=str(directory),
            why=f"It holds none of {', '.join(_SIGNS)}.",
            fix="Give the run directory that headway train printed.",
        )


class _Replay:
    """The state of the history while the events are read in order."""

    def __init__(self) -> None:
        self.attempts: list[LoggedAttempt] = []
        self.steps: list[LoggedStep] = []
        self.validations: list[LoggedValidation] = []
        self.checkpoints: list[LoggedCheckpoint] = []
        self.showcases: list[LoggedSample] = []
        self.exchanges: list[LoggedExchange] = []
        self.warnings: list[LoggedWarning] = []
        self.machine_steps: list[LoggedMachineStep] = []
        self.predictions: list[LoggedPrediction] = []
        self.pairs: list[LoggedPair] = []
        self.machine: LoggedMachine | None = None
        self.superseded = 0

    def counts(self) -> dict[int, int]:
        """step -> attempt of the history that counts."""
        return {step.step: step.attempt for step in self.steps}

    def take(self, row: Mapping[str, Any]) -> None:
        match row.get("event"):
            case "start":
                self._begin(parse_record(LoggedAttempt, row))
            case "resume":
                attempt = parse_record(LoggedAttempt, row)
                self._rewind(attempt.step)
                self._begin(attempt)
            case "step":
                self._step(parse_record(LoggedStep, row))
            case "svm_step":
                machine_step = parse_record(LoggedMachineStep, row)
                _put(self.machine_steps, machine_step)
                _drop_beyond(self.predictions, machine_step.step)
                self._amend(last=machine_step.step)
            case "svm_prediction":
                self.predictions.append(parse_record(LoggedPrediction, row))
            case "svm_pair":
                self.pairs.append(parse_record(LoggedPair, row))
            case "svm_end":
                self.machine = parse_record(LoggedMachine, row)
            case "validation":
                _put(self.validations, parse_record(LoggedValidation, row))
            case "checkpoint":
                _put(self.checkpoints, parse_record(LoggedCheckpoint, row))
            case "showcase":
                _put(self.showcases, parse_record(LoggedSample, row))
            case "exchange":
                _put(self.exchanges, parse_exchange(row))
            case "warning":
                self.warnings.append(parse_record(LoggedWarning, row))
            case "stop":
                self._amend(reason=str(row.get("reason") or "stopped"))
            case None:
                raise ValueError("event is missing")
            case _:
                pass  # a later headway may write events that this one does not draw

    def _begin(self, attempt: LoggedAttempt) -> None:
        """A start and a resume of the same attempt are one beginning."""
        last = self.attempts[-1] if self.attempts else None
        idle = last is not None and not last.last and not last.reason
        if last is not None and idle and last.attempt == attempt.attempt:
            self._amend(
                step=attempt.step,
                ranks=attempt.ranks or last.ranks,
                batch=attempt.batch or last.batch,
            )
        else:
            self.attempts.append(attempt)

    def _step(self, step: LoggedStep) -> None:
        if not self.attempts or self.attempts[-1].attempt != step.attempt:
            # The line that said so was lost in the kill.
            self._begin(LoggedAttempt(attempt=step.attempt, time=step.time, step=step.step - 1))
        self._rewind(step.step - 1)
        self.steps.append(step)
        self._amend(last=step.step)

    def _amend(self, **changes: Any) -> None:
        if self.attempts:
            self.attempts[-1] = dataclasses.replace(self.attempts[-1], **changes)

    def _rewind(self, step: int) -> None:
        """Remove what was logged beyond `step`: it is about to be done again."""
        before = len(self.steps) + len(self.machine_steps)
        stepped = (self.validations, self.checkpoints, self.showcases, self.exchanges)
        for entries in (self.steps, self.machine_steps, self.predictions, *stepped):
            _drop_beyond(entries, step)
        self.superseded += before - len(self.steps) - len(self.machine_steps)
        # Of an attempt that ended, and was resumed.
        self.pairs, self.machine = [], None


def _put(entries: list[_Stepped], entry: _Stepped) -> None:
    _drop_beyond(entries, entry.step - 1)
    entries.append(entry)


def _drop_beyond(entries: list[Any], step: int) -> None:
    while entries and entries[-1].step > step:
        entries.pop()


def _ranks(
    directory: Path, replay: _Replay
) -> tuple[dict[int, tuple[LoggedRankStep, ...]], dict[int, Timeline], list[str]]:
    """Steps per rank, spans per step, and notes."""
    attempts = replay.counts()
    newest = replay.attempts[-1].attempt if replay.attempts else None
    steps: dict[int, tuple[LoggedRankStep, ...]] = {}
    spans: dict[int, list[Span]] = {}
    notes: list[str] = []
    for path in sorted(directory.glob("*.jsonl")):
        rows, found = read_json_lines(path)
        notes += found
        rank = _RankReplay(attempts, newest)
        notes += _replay(path.name, rows, rank.take)
        if rank.steps:
            steps[_rank_of(path)] = tuple(rank.steps[step] for step in sorted(rank.steps))
        for step, span in rank.spans:
            spans.setdefault(step, []).append(span)
    return steps, _on_common_clock(spans), notes


class _RankReplay:
    """The state of one rank's history while its file is read in order.

    Attempt numbers alone do not tell lives apart: a job that is resumed by hand counts from 0
    again. So a step that comes again removes what the same file had beyond it.
    """

    def __init__(self, attempts: Mapping[int, int], newest: int | None) -> None:
        self._attempts = attempts
        self._newest = newest
        self._last: tuple[int, float] = (0, math.nan)
        self.steps: dict[int, LoggedRankStep] = {}
        self.spans: list[tuple[int, Span]] = []

    def take(self, row: Mapping[str, Any]) -> None:
        event = row.get("event")
        if event not in ("rank_step", "rank_end", "span"):
            return
        step, attempt = int(row["step"]), int(row.get("attempt") or 0)
        # A step that no event has named yet belongs to the newest attempt; without attempts all
        # rows count.
        if self._attempts.get(step, self._newest) not in (attempt, None):
            return
        if event == "span":
            self.spans.append((step, _span(row)))
            return
        taken = parse_record(LoggedRankStep, row)
        if event == "rank_end":
            # What others have pushed here since counts with the last step.
            if (last := self.steps.get(step)) is not None:
                every = last.staleness + taken.staleness
                self.steps[step] = dataclasses.replace(last, staleness=every)
            return
        self._rewind(step)
        self.steps[step] = taken
        self._last = (step, float(row.get("time") or math.nan))

    def _rewind(self, step: int) -> None:
        last, death = self._last
        if step > last:
            return
        self.steps = {number: old for number, old in self.steps.items() if number < step}
        self.spans = [
            (number, span)
            for number, span in self.spans
            if number < step or not span.start <= death  # `not`: a NaN keeps it
        ]


def _rank_of(path: Path) -> int:
    digits = re.findall(r"\d+", path.stem)
    return int(digits[-1]) if digits else 0


def _span(row: Mapping[str, Any]) -> Span:
    start, end = float(row["start"]), float(row["end"])
    if not (math.isfinite(start) and math.isfinite(end) and end >= start):
        raise ValueError("a span needs a finite start and an end that is not before it")
    if row["lane"] not in LANES:
        raise ValueError(f"{row['lane']!r} is not a lane")
    return Span(
        rank=int(row["rank"]),
        lane=str(row["lane"]),
        kind=str(row["kind"]),
        label=str(row.get("label") or ""),
        start=start,
        end=end,
        node=str(row.get("node") or ""),
    )


def _on_common_clock(spans: Mapping[int, list[Span]]) -> dict[int, Timeline]:
    """Seconds since the first span: unix seconds in a float64 of microseconds would lose digits."""
    first = min((span.start for entries in spans.values() for span in entries), default=0.0)
    return {
        step: align_message_starts(
            Timeline.of(
                dataclasses.replace(span, start=span.start - first, end=span.end - first)
                for span in spans[step]
            )
        )
        for step in sorted(spans)
    }


def _failures(directory: Path) -> tuple[tuple[LoggedFailure, ...], list[str]]:
    failures: list[LoggedFailure] = []
    notes: list[str] = []
    for path in sorted(directory.glob("*.json")):
        row, found = read_json_object(path)
        notes += found
        attempt = re.search(r"attempt-(\d+)", path.name)
        number = int(attempt.group(1)) if attempt else 0
        if row:
            try:
                failures.append(parse_record(LoggedFailure, {"attempt": number, **row}))
            except ValueError as error:
                notes.append(f"{path.name}: {error}")
    order = sorted(failures, key=_cause_first)
    return tuple(order), notes


def _replay(
    name: str, rows: Iterable[Mapping[str, Any]], take: Callable[[Mapping[str, Any]], None]
) -> list[str]:
    """Hand the rows of a file on one by one; a note about those that lack what they need."""
    count = 0
    for row in rows:
        try:
            take(row)
        except (KeyError, TypeError, ValueError, OverflowError):
            count += 1
    if not count:
        return []
    return [f"{name}: {count} {'entry' if count == 1 else 'entries'} without the needed values"]


def _proofs(path: Path) -> tuple[tuple[LoggedProof, ...], list[str]]:
    rows, notes = read_json_objects(path)
    proofs: list[LoggedProof] = []

    def take(row: Mapping[str, Any]) -> None:
        errors = row.get("errors")
        measured = errors.values() if isinstance(errors, Mapping) else ()
        error = max((e for e in measured if isinstance(e, int | float)), default=None)
        proofs.append(parse_record(LoggedProof, {"error": error, **row}))

    notes += _replay(path.name, rows, take)
    return tuple(sorted(proofs, key=lambda proof: proof.processes)), notes


def _cause_first(failure: LoggedFailure) -> tuple[int, bool, float, int]:
    time = failure.time if math.isfinite(failure.time) else math.inf
    return failure.attempt, failure.secondary, time, failure.rank
