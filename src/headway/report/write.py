"""Writes all files of a report into the run directory.

Safe at any moment and any number of times: each file is replaced as a whole, and a run that is
still writing is only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.errors import MissingExtra, UsageError
from headway.report.chrome import chrome_json
from headway.report.history import read_history
from headway.report.html import render_page
from headway.report.records import RunHistory
from headway.report.tensorboard import write_tensorboard


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFiles:
    """What was written.

    Attributes:
        html: The page.
        timeline: The Chrome trace of the traced steps.
        tensorboard: The directory for `tensorboard --logdir`; None where it could not be written.
        notes: Lines for the user: what could not be read or written.
    """

    html: Path
    timeline: Path
    tensorboard: Path | None
    notes: tuple[str, ...]


def write_report(directory: Path) -> ReportFiles:
    """Write report.html, timeline.json and tensorboard/ into a run directory.

    Args:
        directory: Of a run that is finished, still running, or dead.

    Raises:
        UsageError: The directory is no run directory, or cannot be written.
    """
    history = read_history(directory)
    notes: tuple[str, ...] = ()
    try:
        timeline = _replace(directory / "timeline.json", chrome_json(history.timeline))
        tensorboard, notes = _tensorboard(history, directory / "tensorboard")
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
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(text.encode("utf-8", errors="replace"))
    partial.replace(path)
    return path
