"""The section of workers that do not agree at every step: what each made and what it waited for.

From the files of the ranks (`rank_step`), so that all workers are shown, and not only rank 0's.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from headway.report.history.records import LoggedRankStep, RunHistory
from headway.report.page.facts import Fact, read_plan
from headway.report.pictures.workers import lines_picture, staleness_picture, waits_picture

_WINDOWS = 40
"""Pieces of a run over which a worker's speed is a mean."""


@dataclass(frozen=True, kw_only=True)
class WorkersSection:
    """The section of the page.

    Attributes:
        sentence: How they agree.
        pictures: Heading and SVG.
        rows: Of each worker: number, steps, samples, samples per second, share of its time in
            which it waited, staleness in the mean, the largest; "" where there is none.
    """

    sentence: str
    facts: tuple[Fact, ...]
    pictures: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]


Steps = Mapping[int, Sequence[LoggedRankStep]]


def workers_section(history: RunHistory) -> WorkersSection | None:
    """The section; None where all ranks agree at every step."""
    plan = read_plan(history)
    if plan is None or plan.synchrony.by_all_reduce:
        return None
    inner = plan.ranks // plan.workers
    # Of a worker of several ranks the first one counts samples for all of them.
    steps = {
        rank // inner: rows
        for rank, rows in sorted(history.rank_steps.items())
        if rank % inner == 0 and any(isfinite(row.loss) for row in rows)
    }
    if not steps:
        return None
    stale = _staleness(history, plan.workers)
    waits = {worker: _waited(rows) for worker, rows in steps.items()}
    return WorkersSection(
        sentence=f"{plan.workers} workers ({plan.synchrony})",
        facts=tuple(_facts(steps, waits, stale, inner)),
        pictures=tuple(_pictures(steps, waits, stale, inner)),
        rows=tuple(
            _row(worker, rows, waits[worker], stale[worker], inner)
            for worker, rows in steps.items()
        ),
    )


def _staleness(history: RunHistory, workers: int) -> dict[int, Counter[int]]:
    """Worker -> updates -> pushes, over all servers."""
    found: dict[int, Counter[int]] = {worker: Counter() for worker in range(workers)}
    for rows in history.rank_steps.values():
        for row in rows:
            for worker, updates in row.staleness:
                if worker in found:
                    found[worker][updates] += 1
    return found


def _seconds(rows: Sequence[LoggedRankStep]) -> float:
    return sum(row.seconds for row in rows if isfinite(row.seconds))


def _waited(rows: Sequence[LoggedRankStep]) -> dict[str, float]:
    """Cause -> share of the time of all steps."""
    whole, sums = _seconds(rows), defaultdict[str, float](float)
    for row in rows:
        for cause, seconds in row.waits.items():
            sums[cause] += seconds
    return {cause: seconds / whole for cause, seconds in sums.items()} if whole else {}


def _rate(rows: Sequence[LoggedRankStep], inner: int) -> float:
    whole = _seconds(rows)
    return inner * sum(row.samples for row in rows) / whole if whole else 0.0


def _facts(
    steps: Steps,
    waits: Mapping[int, Mapping[str, float]],
    stale: Mapping[int, Counter[int]],
    inner: int,
) -> list[Fact]:
    rates = [_rate(rows, inner) for rows in steps.values()]
    found = [Fact("All workers", f"{sum(rates):,.0f}", "samples/s, each in its own time")]
    causes: dict[str, float] = defaultdict(float)
    for worker in waits:
        for cause, share in waits[worker].items():
            causes[cause] += share / len(waits)
    if causes:
        cause, share = max(causes.items(), key=lambda one: one[1])
        found.append(Fact("Waiting", f"{100 * share:.0f} %", f"of the time, for: {cause}"))
    every = sum(stale.values(), Counter())
    if every:
        values = sorted(every.elements())
        detail = f"updates in the middle; at most {values[-1]}"
        found.append(Fact("Staleness", f"{statistics.median(values):g}", detail))
    return found


def _row(
    worker: int,
    rows: Sequence[LoggedRankStep],
    waits: Mapping[str, float],
    stale: Counter[int],
    inner: int,
) -> tuple[str, ...]:
    values = sorted(stale.elements())
    return (
        str(worker),
        str(len(rows)),
        f"{inner * sum(row.samples for row in rows):,}",
        f"{_rate(rows, inner):,.0f}",
        ", ".join(f"{cause} {100 * share:.0f} %" for cause, share in waits.items()),
        f"{statistics.mean(values):.2f}" if values else "",
        str(values[-1]) if values else "",
    )


def _pictures(
    steps: Steps,
    waits: Mapping[int, Mapping[str, float]],
    stale: Mapping[int, Counter[int]],
    inner: int,
) -> list[tuple[str, str]]:
    begin = min((r.time - r.seconds for rows in steps.values() for r in rows), default=0.0)
    speeds = {worker: _speeds(rows, begin, inner) for worker, rows in steps.items()}
    made = _samples_made(steps, inner)
    by_samples = {
        worker: [(made[worker, row.step], row.loss) for row in rows]
        for worker, rows in steps.items()
    }
    by_time = {
        worker: [(row.time - begin, row.loss) for row in rows] for worker, rows in steps.items()
    }
    rates = {worker: [(row.time - begin, row.lr) for row in rows] for worker, rows in steps.items()}
    # At the same step it is the same for all, by their schedule: workers are at different steps.
    differ = len({lr for points in rates.values() for _, lr in points if isfinite(lr)}) > 1
    apart = {
        worker: [(float(row.step), row.distance) for row in rows] for worker, rows in steps.items()
    }
    drawn = (
        ("Staleness", staleness_picture(stale)),
        ("What workers wait for", waits_picture(waits)),
        ("Speed", lines_picture("speeds", speeds, across="seconds", up="samples/s")),
        (
            "Learning rate by time",
            lines_picture("worker-rates", rates, across="seconds", up="rate") if differ else None,
        ),
        (
            "Distance between models that met",
            lines_picture("apart", apart, across="step", up="share of the norm", smoothed=True),
        ),
        (
            "Loss by samples",
            lines_picture(
                "loss-samples", by_samples, across="samples of all workers", up="loss",
                smoothed=True,
            ),
        ),
        (
            "Loss by time",
            lines_picture("loss-time", by_time, across="seconds", up="loss", smoothed=True),
        ),
    )  # fmt: skip
    return [(heading, svg) for heading, svg in drawn if svg is not None]


def _speeds(rows: Sequence[LoggedRankStep], begin: float, inner: int) -> list[tuple[float, float]]:
    """Seconds since the beginning -> samples per second, over some steps each."""
    width = max(1, -(-len(rows) // _WINDOWS))
    pieces = [rows[at : at + width] for at in range(0, len(rows), width)]
    return [(piece[-1].time - begin, _rate(piece, inner)) for piece in pieces]


def _samples_made(steps: Steps, inner: int) -> dict[tuple[int, int], float]:
    """Worker and step -> samples that all workers had made when it ended."""
    ends = sorted(
        (row.time, worker, row.step, row.samples) for worker, rows in steps.items() for row in rows
    )
    found, total = {}, 0.0
    for _, worker, step, samples in ends:
        total += inner * samples
        found[worker, step] = total
    return found
