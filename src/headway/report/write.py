"""Render the report page and write all files of a report into the run directory.

Safe at any moment, any number of times: each file is replaced atomically, and the run's own files
are only read. The page is one HTML file without network access or scripts; every text passes
through the template's escaping, and only our own pictures are inserted as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from headway import __version__
from headway.atomic_files import write_atomically
from headway.errors import MissingExtra, UsageError
from headway.report.history.reader import read_history
from headway.report.history.records import LoggedWarning, RunHistory
from headway.report.page import facts
from headway.report.page.machine import machine_section
from headway.report.page.sections import exchange_section, pipeline_section, prediction_section
from headway.report.page.study import study_section
from headway.report.page.workers import workers_section
from headway.report.pictures import step_timeline, training_curves
from headway.report.pictures.canvas import style_sheet
from headway.report.trace_export import chrome_trace_json, write_tensorboard
from headway.units import format_bytes, format_seconds


def render_page(history: RunHistory, notes: tuple[str, ...] = ()) -> str:
    """The HTML text of the report.

    Args:
        notes: Lines about the report itself, added to those of the history.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headway.report", "templates"),
        autoescape=True,
        # A misspelt name in the template is an error, not an empty text.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "seconds": format_seconds,
        "moment": facts.moment,
        "number": facts.number,
        "verdict": facts.verdict,
    }
    step = step_timeline.representative_step(history)
    trace = history.traces[step] if step is not None else None
    found = step_timeline.shares(history)
    study = study_section(history.directory)
    return environment.get_template("report.html").render(
        version=__version__,
        light=Markup(style_sheet(0)),
        dark=Markup(style_sheet(1)),
        history=history,
        headline=facts.headline(history) if study is None else (),
        study=study,
        batch=facts.batch_equation(history),
        curves=_curves(history),
        trace_step=step,
        trace_ranks=len(trace.ranks) if trace is not None else 0,
        most_ranks=step_timeline.MOST_RANKS,
        timeline=step_timeline.timeline_picture(trace) if trace is not None else None,
        shares=found,
        parts=step_timeline.PARTS,
        shares_picture=step_timeline.shares_picture(found),
        exchange=exchange_section(history, step),
        pipeline=pipeline_section(history, step),
        predicted=prediction_section(history, step),
        workers=workers_section(history),
        machine=machine_section(history),
        # Our own pictures alone: the template escapes everything else.
        picture=Markup,
        peaks=_peaks(history),
        attempts=[(attempt, facts.ending(history, attempt)) for attempt in history.attempts],
        warnings=_with_counts(history.warnings),
        recipe=facts.rows(history.recipe),
        plan=facts.rows(history.plan),
        plan_words=facts.plan_words(history),
        plan_json=json.dumps(history.plan, indent=2) if history.plan else "",
        environment=facts.rows(history.environment),
        notes=(*history.notes, *notes),
    )


def _curves(history: RunHistory) -> list[tuple[str, str]]:
    """The pictures over the steps that have something to show, with their headings."""
    drawn = (
        ("Loss", training_curves.loss_picture(history)),
        *((f"Validation {n}", svg) for n, svg in training_curves.metric_pictures(history)),
        ("Throughput", training_curves.throughput_picture(history)),
        ("Memory per rank", training_curves.memory_picture(history)),
        ("Learning rate", training_curves.rate_picture(history)),
        ("Gradient norm", training_curves.norm_picture(history)),
    )
    return [(heading, svg) for heading, svg in drawn if svg is not None]


def _peaks(history: RunHistory) -> dict[int, float]:
    """Rank -> largest memory of any step (bytes), for ranks that measured it."""
    peaks = {
        rank: max((s.memory_bytes for s in steps if s.memory_bytes >= 0), default=-1.0)
        for rank, steps in history.rank_steps.items()
    }
    return {rank: peak for rank, peak in peaks.items() if peak >= 0}


def _with_counts(warnings: tuple[LoggedWarning, ...]) -> list[tuple[LoggedWarning, int]]:
    """Each text once, with how often it came, in the order of its first appearance."""
    # Backwards, so that of equal texts the first one stays.
    first = {warning.text: warning for warning in reversed(warnings)}
    # A Counter keeps the order in which it met its keys.
    return [(first[text], n) for text, n in Counter(one.text for one in warnings).items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFiles:
    """What was written.

    Attributes:
        tensorboard: The directory for `tensorboard --logdir`; None where it could not be written.
        notes: Lines for the user: what could not be read or written.
    """

    html: Path
    timeline: Path
    tensorboard: Path | None
    notes: tuple[str, ...]


def write_report(directory: Path) -> ReportFiles:
    """Write report.html, timeline.json and tensorboard/ into a run directory.

    Raises:
        UsageError: The directory is no run directory, or cannot be written.
    """
    history = read_history(directory)
    notes: tuple[str, ...] = ()
    try:
        timeline = _replace(directory / "timeline.json", chrome_trace_json(history.timeline))
        tensorboard, notes = _tensorboard(history, directory / "tensorboard")
        # Last, because the page carries the notes about the other two.
        html = _replace(directory / "report.html", render_page(history, notes))
    except OSError as error:
        raise UsageError(
            "the report cannot be written",
            where=str(directory),
            why=f"{error.filename or directory}: {error.strerror or error}",
            fix="Make the run directory writable, or copy it to a place that is.",
        ) from error
    return ReportFiles(
        html=html, timeline=timeline, tensorboard=tensorboard, notes=(*history.notes, *notes)
    )


def _tensorboard(history: RunHistory, directory: Path) -> tuple[Path | None, tuple[str, ...]]:
    try:
        return write_tensorboard(history, directory), ()
    except MissingExtra as error:
        return None, (f"{error.what}: {error.fix}",)


def _replace(path: Path, text: str) -> Path:
    """Write aside and rename; text that has no UTF-8 form (lone surrogates) becomes "?"."""
    write_atomically(path, text.encode("utf-8", errors="replace"))
    return path
