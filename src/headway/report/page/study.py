"""A study of batch sizes and rates in words and rows, for its page and for the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.cost.batch_scaling import BatchResult, BatchScaling, Estimate, StudyRun, analyze
from headway.documents import to_type
from headway.errors import DocumentError
from headway.report.history.reader import read_json_object
from headway.report.pictures.batch_study import study_pictures
from headway.units import counted, format_number

HEADINGS = ("batch", "best rate", "optimum", "steps", "samples", "remarks")
_ENDS = {"reached": "reached", "budget": "over budget", "diverged": "diverged", "cut": "slower"}


@dataclass(frozen=True, kw_only=True)
class StudySection:
    """The section of the page.

    Attributes:
        pictures: Heading and SVG.
        rows: As `study_rows`.
        runs: Of each run: batch, rate, seed, how it ended, steps, samples, directory.
    """

    facts: tuple[tuple[str, str], ...]
    sentences: tuple[str, ...]
    pictures: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]
    runs: tuple[tuple[str, ...], ...]


def study_section(directory: Path) -> StudySection | None:
    """The section; None where the directory holds no study, or one that cannot be read."""
    facts, _ = read_json_object(directory / "study.json")
    rows, options = facts.get("runs"), facts.get("options")
    if not isinstance(rows, list) or not isinstance(options, Mapping):
        return None
    try:
        runs = [to_type(row, StudyRun, where="study.json") for row in rows]
    except DocumentError:
        return None
    found = analyze(runs)
    return StudySection(
        facts=tuple((str(key), str(value)) for key, value in options.items()),
        sentences=tuple(study_sentences(found)),
        pictures=tuple(study_pictures(found)),
        rows=tuple(study_rows(found)),
        runs=tuple(
            (
                str(run.batch), f"{run.rate:.4g}", str(run.seed), _ENDS.get(run.end, run.end),
                f"{'more than ' if run.end == 'cut' else ''}{run.steps:,}", f"{run.samples:,}",
                run.directory,
            )
            for run in runs
        ),
    )  # fmt: skip


def study_rows(found: BatchScaling) -> Iterator[tuple[str, ...]]:
    """A row for each batch, also for one that never reached the target."""
    for batch in found.batches:
        best = batch.best
        yield (
            str(batch.batch),
            f"{best.rate:.4g}" if best else "-",
            f"{batch.optimum:.4g}" if best else "-",
            format_number(best.steps) if best else "-",
            format_number(best.samples) if best else "-",
            _remarks(batch),
        )


def _remarks(batch: BatchResult) -> str:
    ends = Counter(end for one in batch.rates for end in one.ends if end not in ("reached", "cut"))
    said = [f"{counted(n, 'rate')} {_ENDS.get(end, end)}" for end, n in sorted(ends.items())]
    if batch.best is None:
        said.insert(0, "target not reached")
    if batch.edge:
        said.insert(0, f"the {batch.edge} rate of the grid")
    return ", ".join(said)


def study_sentences(found: BatchScaling) -> Iterator[str]:
    """What a study says, and what it cannot say."""
    yield _exponent_sentence(found)
    edges = [one for one in found.batches if one.edge]
    if edges:
        listed = ", ".join(f"{one.batch} ({one.edge})" for one in edges)
        yield (
            f"The best rate is at the edge of the grid for batch {listed}: a better one may lie "
            "beyond. Extend the rates and go on with --resume."
        )
    yield from _critical_sentences(found)
    if any("cut" in one.ends for batch in found.batches for one in batch.rates):
        yield (
            "Runs that were slower than the best of their batch were ended, except next to the "
            "best rate; the choice and the fits are those of all runs made to their end."
        )


def _exponent_sentence(found: BatchScaling) -> str:
    p = found.exponent
    if p is None:
        return (
            "The exponent of the best rate is not known: it needs three batches whose best rate is "
            "inside the grid."
        )
    rules = {"linear": 1.0, "square-root": 0.5}
    inside = [name for name, power in rules.items() if p.low <= power <= p.high]
    agrees = {0: "neither the linear nor the square-root rule is", 1: "the {} rule is"}.get(
        len(inside), "both the linear and the square-root rule are"
    )
    left = f"; without batch {', '.join(map(str, found.left_out))}" if found.left_out else ""
    return (
        f"Best rate ~ batch^{p.value:.2f}, interval {p.low:.2f} to {p.high:.2f}: "
        f"{agrees.format(*inside)} within it{left}."
    )


def _critical_sentences(found: BatchScaling) -> Iterator[str]:
    critical = found.critical
    if critical is None:
        yield "The critical batch is not known: it needs three batches that reach the target."
    else:
        yield (
            f"Critical batch {format_number(critical.value)} samples, {_interval(critical)}: "
            f"{format_number(found.min_steps)} steps at least, "
            f"{format_number(found.min_samples)} samples at least."
        )
    if found.stops_halving is not None:
        low, high = found.stops_halving
        yield f"Steps stop halving between batch {low} and {high}."
    elif critical is not None:
        yield "Steps fall faster than batch^-1/2 up to the largest batch."


def _interval(estimate: Estimate) -> str:
    low, high = format_number(estimate.low), format_number(estimate.high)
    if estimate.low == 0 and math.isinf(estimate.high):
        return "which these batches do not bound"
    if estimate.low == 0:
        return f"at most {high}"
    return f"at least {low}" if math.isinf(estimate.high) else f"interval {low} to {high}"
