"""The section of a support vector machine: pictures, pairs of classes, predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.report.history.records import LoggedPrediction, RunHistory
from headway.report.page.facts import Fact
from headway.report.pictures.machine import machine_pictures, samples_of_pairs
from headway.units import format_bytes, format_number, format_seconds, format_share

MOST_ROWS = 50
"""Of a table; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class MachineSection:
    """The section of the page.

    Attributes:
        pictures: Heading and SVG.
        pairs: Of each pair of classes: labels, samples, violation, objective, outer steps, steps,
            kernel values, how often gamma was reconstructed.
        predictions: Of the rule "adaptive": outer step, rows left, saved, cost, verdict.
        more_pairs, more_predictions: Rows that are left out.
    """

    pictures: tuple[tuple[str, str], ...]
    facts: tuple[Fact, ...]
    pairs: tuple[tuple[str, ...], ...]
    more_pairs: int
    predictions: tuple[tuple[str, ...], ...]
    more_predictions: int


def machine_section(history: RunHistory) -> MachineSection | None:
    """The section; None where no support vector machine was trained."""
    found = history.machine
    if not found.steps and found.machine is None:
        return None
    pairs = [
        (
            f"{pair.classes}{'' if pair.finished else ' (unfinished)'}",
            f"{pair.samples:,}", f"{pair.violation:.3g}", f"{pair.objective:.8g}",
            f"{pair.outer:,}", f"{pair.steps:,}", format_number(pair.values),
            str(pair.reconstructions),
        )
        for pair in found.pairs
    ]  # fmt: skip
    predictions = [
        (
            f"{one.step:,}", format_number(one.rows), format_number(one.saved),
            format_number(one.cost), "pays" if one.pays else "does not pay",
        )
        for one in _spread(found.predictions)
    ]  # fmt: skip
    return MachineSection(
        pictures=tuple(machine_pictures(history)),
        facts=tuple(_facts(history)),
        pairs=tuple(pairs[:MOST_ROWS]),
        more_pairs=max(0, len(pairs) - MOST_ROWS),
        predictions=tuple(predictions),
        more_predictions=len(found.predictions) - len(predictions),
    )


def _spread(predictions: Sequence[LoggedPrediction]) -> list[LoggedPrediction]:
    """As many as a table has, from the beginning to the end."""
    count = min(len(predictions), MOST_ROWS)
    return [predictions[number * len(predictions) // count] for number in range(count)]


def _facts(history: RunHistory) -> Iterator[Fact]:
    found = history.machine
    machine = found.machine
    if machine is not None:
        if machine.finished:
            yield Fact("Machine", "finished", "every pair of classes within the tolerance", "good")
        else:
            yield Fact("Machine", "unfinished", "stopped before the tolerance was reached", "bad")
        yield Fact("Support vectors", f"{machine.support:,}", "of all classes")
        yield Fact("Violation", f"{machine.violation:.3g}", "over all samples, reconstructed")
        yield Fact("Dual objective", f"{machine.objective:.8g}", "of all pairs of classes")
        yield Fact("Kernel values", format_number(machine.values), "of all ranks")
        if math.isfinite(machine.accuracy):
            yield Fact("Test", f"{machine.accuracy:.3%}", "of the test samples predicted rightly")
        if machine.peak_bytes > 0:
            detail = f"in a rank; bound {format_bytes(machine.bound_bytes)}"
            yield Fact("Memory", format_bytes(machine.peak_bytes), detail)
    if found.steps:
        last, whole = found.steps[-1], samples_of_pairs(found.steps)
        share = sum(1 - s.active / max(whole[s.pair], 1) for s in found.steps) / len(found.steps)
        yield Fact("Eliminated", format_share(share), "of the samples, in the mean of outer steps")
        if machine is None:
            detail = f"{last.support:,} support vectors at step {last.step}"
            yield Fact("Violation", f"{last.violation:.3g}", detail)
        if last.seconds > 0:
            pace = last.values / last.seconds
            detail = f"values a second, in the last pair; {format_seconds(last.seconds)} long"
            yield Fact("Pace", format_number(pace), detail)
    if found.predictions:
        paid = sum(one.pays for one in found.predictions)
        yield Fact("Predictions", f"{paid} of {len(found.predictions)}", "that elimination pays")
