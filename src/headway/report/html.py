"""The report page: one file, no network, no script, legible in light and dark and on a phone.

Every text of the run passes through the template's escaping; only the pictures, which `canvas`
made, are put in as they are.
"""

from __future__ import annotations

import json

import jinja2
from markupsafe import Markup

from headway import __version__
from headway.report import curves, facts, lanes
from headway.report.canvas import style_sheet
from headway.report.exchange import exchange_view
from headway.report.pipeline import pipeline_view
from headway.report.predicted import predicted_view
from headway.report.records import RunHistory, WarningRecord
from headway.units import format_bytes, format_seconds


def render_page(history: RunHistory, notes: tuple[str, ...] = ()) -> str:
    """The HTML text of the report.

    Args:
        history: What the run wrote down.
        notes: Lines about the report itself, added to those of the history.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headway.report", "templates"),
        autoescape=True,
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
    step = lanes.representative_step(history)
    trace = history.traces[step] if step is not None else None
    found = lanes.shares(history)
    return environment.get_template("report.html").render(
        version=__version__,
        light=Markup(style_sheet(0)),
        dark=Markup(style_sheet(1)),
        history=history,
        headline=facts.headline(history),
        batch=facts.batch_equation(history),
        curves=_curves(history),
        trace_step=step,
        trace_ranks=len(trace.ranks) if trace is not None else 0,
        most_ranks=lanes.MOST_RANKS,
        timeline=_picture(lanes.timeline_picture(trace)) if trace is not None else None,
        shares=found,
        parts=lanes.PARTS,
        shares_picture=_picture(lanes.shares_picture(found)),
        exchange=exchange_view(history, step),
        pipeline=pipeline_view(history, step),
        predicted=predicted_view(history, step),
        picture=Markup,
        exposed=_picture(curves.exposed_picture(history)),
        peaks=_peaks(history),
        attempts=[(attempt, facts.ending(history, attempt)) for attempt in history.attempts],
        warnings=_counted(history.warnings),
        recipe=facts.rows(history.recipe),
        plan=facts.rows(history.plan),
        plan_words=facts.plan_words(history),
        plan_json=json.dumps(history.plan, indent=2) if history.plan else "",
        environment=facts.rows(history.environment),
        notes=(*history.notes, *notes),
    )


def _curves(history: RunHistory) -> list[tuple[str, Markup]]:
    """The pictures over the steps that have something to show, with their headings."""
    drawn = (
        ("Loss", curves.loss_picture(history)),
        ("Throughput", curves.throughput_picture(history)),
        ("Memory per rank", curves.memory_picture(history)),
        ("Learning rate", curves.rate_picture(history)),
        ("Gradient norm", curves.norm_picture(history)),
    )
    return [(heading, Markup(svg)) for heading, svg in drawn if svg is not None]


def _picture(svg: str | None) -> Markup | None:
    return None if svg is None else Markup(svg)


def _peaks(history: RunHistory) -> dict[int, float]:
    """Rank -> largest memory of any step (bytes), for ranks that measured it."""
    peaks = {
        rank: max((s.memory_bytes for s in steps if s.memory_bytes >= 0), default=-1.0)
        for rank, steps in history.rank_steps.items()
    }
    return {rank: peak for rank, peak in peaks.items() if peak >= 0}


def _counted(warnings: tuple[WarningRecord, ...]) -> list[tuple[WarningRecord, int]]:
    """Each text once, with how often it came, in the order of its first appearance."""
    counts: dict[str, int] = {}
    for warning in warnings:
        counts[warning.text] = counts.get(warning.text, 0) + 1
    first = {warning.text: warning for warning in reversed(warnings)}
    return [(first[text], count) for text, count in counts.items()]
