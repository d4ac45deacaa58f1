"""Headline facts, the state of the run and tables, as plain text.

The template escapes all of it.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.documents import to_type
from headway.errors import HeadwayError
from headway.plans import Plan, explain
from headway.report.history.records import LoggedAttempt, LoggedProof, RunHistory
from headway.units import format_bytes, format_seconds

ABSENT = "–"


@dataclass(frozen=True, slots=True)
class Fact:
    """One headline: a name, a value and a line that explains it; `tone` is good, bad or ""."""

    name: str
    value: str
    detail: str = ""
    tone: str = ""
    unit: str = ""


def headline(history: RunHistory) -> list[Fact]:
    """The facts at the top of the page; what is not known is left out."""
    found = [_state(history), *_losses(history), _steps(history), _throughput(history)]
    found += [_ranks(history), _restarts(history), _checkpoint(history), _verdict(history)]
    return [fact for fact in found if fact is not None]


def batch_equation(history: RunHistory) -> str:
    """How the global batch is made up: as the run said, else as the plan says; "" if unknown."""
    written = [attempt.batch for attempt in history.attempts if attempt.batch]
    if written:
        return written[-1]
    plan = read_plan(history)
    return plan.batch.equation(plan.data_degree, pipe=plan.pipe_degree) if plan is not None else ""


def read_plan(history: RunHistory) -> Plan | None:
    """The plan, or None where the run has none that this headway can read."""
    if not history.plan:
        return None
    try:
        plan: Plan = to_type(dict(history.plan), Plan, where="plan.json")
        plan.check()
    except HeadwayError:
        return None
    return plan


def plan_words(history: RunHistory) -> str:
    """The plan in sentences; "" where it cannot be read."""
    plan = read_plan(history)
    return explain(plan, _tokens(history)) if plan is not None else ""


def rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A document as a table: dotted keys and texts."""
    return [(key, _text(key, value)) for key, value in _flat(document, "")]


def moment(time: float) -> str:
    """Unix seconds as text in UTC; a dash where unknown."""
    try:
        when = datetime.datetime.fromtimestamp(time, tz=datetime.UTC)
    except (ValueError, OverflowError, OSError):  # NaN is unknown, too
        return ABSENT
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def ending(history: RunHistory, attempt: LoggedAttempt) -> str:
    """How an attempt ended, as far as it is written."""
    causes = [f for f in history.failures if f.attempt == attempt.attempt]
    if attempt.reason:
        return attempt.reason
    if causes:
        return f"{causes[0].kind or 'failure'} in rank {causes[0].rank}"
    if attempt is history.attempts[-1]:
        return "no end written: still running, or killed"
    return "killed, no reason written"


def number(value: float) -> str:
    """Four significant digits, a dash for what is not known."""
    if math.isnan(value):
        return ABSENT
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:.4g}"


def _state(history: RunHistory) -> Fact | None:
    if not history.attempts:
        return Fact("State", "not started", "no event is written yet")
    last = history.attempts[-1]
    took = _took(history)
    if last.reason == "complete":
        return Fact("State", "complete", took, "good")
    if last.reason:
        return Fact("State", "stopped", f"by {last.reason}; {took}" if took else last.reason)
    if any(failure.attempt == last.attempt for failure in history.failures):
        return Fact("State", "failed", ending(history, last), "bad")
    return Fact("State", "no end written", "still running, or killed")


def _took(history: RunHistory) -> str:
    times = [history.attempts[0].time, *(step.time for step in history.steps)]
    times += [entry.time for entry in history.validations]
    times += [entry.time for entry in history.checkpoints]
    times += [entry.time for entry in history.machine.steps]
    times = [time for time in times if math.isfinite(time)]
    return f"{format_seconds(max(times) - min(times))} from start to end" if times else ""


def _losses(history: RunHistory) -> list[Fact]:
    found = []
    if history.steps:
        first, last = history.steps[0], history.steps[-1]
        detail = f"{number(first.loss)} at step {first.step}"
        tone = "" if math.isfinite(last.loss) else "bad"
        value = str(last.loss) if not math.isfinite(last.loss) else number(last.loss)
        found.append(Fact("Training loss", value, detail, tone))
    if history.validations:
        latest = history.validations[-1]
        # Of losses of which the first is NaN `min` would take that one.
        finite = [entry for entry in history.validations if math.isfinite(entry.loss)]
        best = min(finite or history.validations[:1], key=lambda entry: entry.loss)
        detail = (
            f"the best, at step {latest.step}"
            if best is latest
            else f"at step {latest.step}; best {number(best.loss)} at step {best.step}"
        )
        found.append(Fact("Validation loss", number(latest.loss), detail))
        found += [
            Fact(f"Validation {name}", number(value), f"at step {latest.step}")
            for name, value in latest.metrics.items()
        ]
    return found


def _steps(history: RunHistory) -> Fact:
    if history.machine.steps:
        last = history.machine.steps[-1]
        detail = f"classes {last.classes}" if last.pairs > 1 else "of working sets"
        return Fact("Outer steps", number(float(last.step)), detail)
    if not history.steps:
        return Fact("Steps", "0", "no step is logged yet")
    samples = sum(step.samples for step in history.steps)
    epochs = history.steps[-1].epoch
    detail = f"{number(float(samples))} samples, epoch {epochs}"
    return Fact("Steps", number(float(history.steps[-1].step)), detail)


def _throughput(history: RunHistory) -> Fact | None:
    steps = history.settled_steps or history.steps
    rates = [step.rate for step in steps if math.isfinite(step.rate)]
    if not rates:
        return None
    middle = statistics.median(rates)
    tokens = _tokens(history)
    seconds = [step.seconds for step in steps if math.isfinite(step.seconds)]
    detail = f"median step {format_seconds(statistics.median(seconds))}" if seconds else ""
    if tokens:
        detail = f"{number(middle * tokens)} tokens/s; {detail}".rstrip("; ")
    return Fact("Throughput", number(middle), detail, unit="samples/s")


def _tokens(history: RunHistory) -> int | None:
    text = str(history.recipe.get("tokens_per_sample") or "")
    # `isdigit` alone holds for the digits of every script.
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _ranks(history: RunHistory) -> Fact | None:
    if not history.ranks:
        return None
    hosts = history.environment.get("hosts")
    known = [str(history.environment.get(key) or "") for key in ("device", "backend")]
    where = [f"on {len(hosts)} hosts"] if isinstance(hosts, list) and len(hosts) > 1 else []
    detail = ", ".join(part for part in (*where, *known) if part)
    return Fact("Ranks", str(history.ranks), detail)


def _restarts(history: RunHistory) -> Fact:
    count = len(history.restarts)
    lost = history.superseded
    detail = f"{lost} {'step' if lost == 1 else 'steps'} done again" if lost else ""
    return Fact("Restarts", str(count), detail)


def _checkpoint(history: RunHistory) -> Fact | None:
    if not history.checkpoints:
        return None
    last = history.checkpoints[-1]
    held = [c.held_seconds for c in history.checkpoints if math.isfinite(c.held_seconds)]
    detail = f"training paused {format_seconds(statistics.median(held))}" if held else ""
    size = f"{format_bytes(last.bytes)}; " if last.bytes else ""
    return Fact("Last checkpoint", f"step {last.step}", size + detail)


def _verdict(history: RunHistory) -> Fact | None:
    if not history.proofs:
        return None
    wrong = [proof for proof in history.proofs if verdict(proof) in ("different", "law broken")]
    if wrong:
        where = f"with {wrong[0].processes} processes: {wrong[0].first_difference}"
        source = "its law" if wrong[0].law else "the serial run"
        return Fact("Verification", "different", f"from {source} {where}", "bad")
    counts = ", ".join(str(proof.processes) for proof in history.proofs)
    plural = "process" if counts == "1" else "processes"
    if any(proof.law for proof in history.proofs):
        text = f"inexact by the plan, as its law says, with {counts} {plural}"
        return Fact("Verification", "law holds", text, "good")
    return Fact("Verification", "equal", f"to the serial run, with {counts} {plural}", "good")


def verdict(proof: LoggedProof) -> str:
    """Of a proof, in a word or two."""
    if proof.law:
        return f"law {proof.law}"
    return "equal" if proof.equal else "different"


def _flat(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        inner = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list) and any(isinstance(child, Mapping | list) for child in value):
        inner = [(str(index), child) for index, child in enumerate(value)]
    else:
        return [(path, value)]
    return [
        entry for key, child in inner for entry in _flat(child, f"{path}.{key}" if path else key)
    ]


def _text(key: str, value: Any) -> str:
    if value is None or value in ([], {}):
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and key.endswith("bytes") and math.isfinite(value):
        return format_bytes(value)
    if isinstance(value, list):
        return ", ".join(str(child) for child in value)
    return value if isinstance(value, str) else json.dumps(value)
