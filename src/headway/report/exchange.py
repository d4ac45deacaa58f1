"""What the page says of the gradient exchange: a sentence, figures, a table of buckets.

All of it is rank 0's view. What a run did not write down is left out: a run of one rank has no
exchange, and one of an earlier headway has no buckets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from headway.plan import explain
from headway.report.facts import ABSENT, Fact, read_plan
from headway.report.records import BucketRecord, ExchangeRecord, RunHistory
from headway.units import format_bytes, format_seconds

MOST_BUCKETS = 60
"""Most buckets in the table of the page; events.jsonl has all of them."""
_NAMES = 2


@dataclass(frozen=True, slots=True)
class BucketRow:
    """A line of the table, as texts."""

    bucket: str
    parameters: str
    size: str
    wire: str
    ready: str
    sent: str
    received: str
    applied: str
    needed: str
    exposed: str


@dataclass(frozen=True, kw_only=True)
class ExchangeView:
    """The section of the page.

    Attributes:
        sentence: The plan's exchange; "" where the plan cannot be read.
        facts: Figures over all steps.
        step: Of the table; 0 without one.
        rows: The buckets of that step, in order of their number.
        omitted: Buckets that the table leaves out.
        applies: The optimiser works bucket by bucket.
    """

    sentence: str
    facts: tuple[Fact, ...]
    step: int
    rows: tuple[BucketRow, ...]
    omitted: int
    applies: bool


def exchange_view(history: RunHistory, step: int | None = None) -> ExchangeView | None:
    """The section; None where there was no exchange.

    Args:
        history: What the run wrote down.
        step: The traced step that is drawn elsewhere, for the table if it has buckets.
    """
    facts = tuple(figures(history))
    traced = _chosen(history.exchanges, step)
    if not facts and traced is None:
        return None
    buckets = () if traced is None else traced.buckets
    return ExchangeView(
        sentence=sentence(history),
        facts=facts,
        step=0 if traced is None else traced.step,
        rows=tuple(_row(bucket) for bucket in buckets[:MOST_BUCKETS]),
        omitted=max(0, len(buckets) - MOST_BUCKETS),
        applies=any(math.isfinite(bucket.applied) for bucket in buckets),
    )


def sentence(history: RunHistory) -> str:
    """The plan's exchange in words; "" where the plan cannot be read."""
    plan = read_plan(history)
    lines = explain(plan).splitlines() if plan is not None else []
    return next((line for line in lines if line.startswith("exchange: ")), "")


def figures(history: RunHistory) -> list[Fact]:
    """Exposed seconds, hidden fraction and bytes of a step; what is not known is left out."""
    warm_up = {attempt.step + 1 for attempt in history.attempts}
    steps = [step for step in history.steps if step.step not in warm_up] or list(history.steps)
    exposed = [step.exposed for step in steps if math.isfinite(step.exposed)]
    hidden = [step.overlap for step in steps if math.isfinite(step.overlap)]
    wire = [step.wire_bytes for step in steps if math.isfinite(step.wire_bytes)]
    found = []
    if exposed:
        middle = statistics.median(exposed)
        seconds = [s.seconds for s in steps if math.isfinite(s.exposed) and s.seconds > 0]
        share = 100 * middle / statistics.median(seconds) if seconds else math.nan
        detail = f"{share:.1f} % of a step" if math.isfinite(share) else "of a step"
        found.append(Fact("Exposed communication", format_seconds(middle), f"median, {detail}"))
    if hidden:
        middle = statistics.median(hidden)
        plan = read_plan(history)
        what = "messages and sums" if plan and plan.pipe_degree > 1 else "buckets"
        detail = f"of the time that {what} are on their way"
        found.append(Fact("Hidden", f"{100 * middle:.0f} %", detail))
    if wire:
        gradients = sum(bucket.bytes for bucket in _latest(history))
        detail = f"for {format_bytes(gradients)} of gradients" if gradients else ""
        sent = format_bytes(statistics.median(wire))
        found.append(Fact("Sent per step and rank", sent, detail))
    return found


def _latest(history: RunHistory) -> Sequence[BucketRecord]:
    return history.exchanges[-1].buckets if history.exchanges else ()


def _chosen(exchanges: Sequence[ExchangeRecord], step: int | None) -> ExchangeRecord | None:
    """The exchange of a step, else the last one."""
    same = [exchange for exchange in exchanges if exchange.step == step] or exchanges
    return same[-1] if same else None


def _row(bucket: BucketRecord) -> BucketRow:
    return BucketRow(
        bucket=str(bucket.bucket),
        parameters=_names(bucket.parameters),
        size=format_bytes(bucket.bytes),
        wire=format_bytes(bucket.wire_bytes),
        ready=_moment(bucket.ready),
        sent=_moment(bucket.sent),
        received=_moment(bucket.received),
        applied=_moment(bucket.applied),
        needed=_moment(bucket.needed),
        exposed=format_seconds(bucket.waited) if bucket.waited > 0 else "0",
    )


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    rest = len(names) - _NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown


def _moment(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else ABSENT
