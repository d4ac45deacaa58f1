"""Failure records: what went wrong in one rank, for the launcher and the report.

A record is one JSON file per rank and attempt, written aside and renamed, so that it is whole or
absent. Records of ranks that only noticed the end of another rank are secondary; the root cause is
the first primary one. Imports no torch.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from headway import errors
from headway.atomic_files import write_atomically
from headway.documents import parse_json, read_text, to_type
from headway.errors import DocumentError, HeadwayError, PeerLost, WorkerFailed
from headway.user_frames import innermost_user_frame

FAILURES_FOLDER = "failures"
# Attributes on exceptions, which keep their class and text on the way to the launcher.
_MOST_CAUSE = 500
_JOB_ERROR = "headway_job_error"
_ELSEWHERE = "headway_reported_elsewhere"


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """One rank's failure.

    Attributes:
        step: The optimiser step that was being computed; None: outside of the steps.
        kind: Name of the class of errors.py that explains it.
        what: See `HeadwayError`, as are `where` (with rank and step), `why` and `fix`.
        secondary: The rank only noticed the failure of another one.
        time: Unix seconds.
    """

    rank: int
    attempt: int
    step: int | None
    kind: str
    what: str
    where: str
    why: str
    fix: str
    code: str
    exit_code: int
    secondary: bool
    time: float
    trace: str
    problems: tuple[str, ...] = ()

    def error(self) -> HeadwayError:
        """The error to raise in the launcher: of the same class, with rank and step in `where`."""
        kind = getattr(errors, self.kind, WorkerFailed)
        if not (isinstance(kind, type) and issubclass(kind, HeadwayError)):
            kind = WorkerFailed
        # Past the constructors of subclasses, some of which take other arguments (`problems`).
        error: HeadwayError = kind.__new__(kind)
        HeadwayError.__init__(error, self.what, where=self.where, why=self.why, fix=self.fix)
        if self.problems:
            error.__dict__["problems"] = self.problems
        return error


def mark_as_job_error(error: HeadwayError) -> HeadwayError:
    """Mark an error that this rank reports to the user, although it began in another rank."""
    setattr(error, _JOB_ERROR, True)
    return error


def mark_reported_elsewhere(error: HeadwayError) -> HeadwayError:
    """Mark an error that began in another rank, which reports it itself."""
    setattr(error, _ELSEWHERE, True)
    return error


def should_report(record: FailureRecord, error: BaseException) -> bool:
    """Whether this rank reports a failure to the user: its own, and those marked for it."""
    return not record.secondary or getattr(error, _JOB_ERROR, False) is True


def describe_failure(rank: int, attempt: int, error: BaseException) -> FailureRecord:
    """The record of an exception; anything but a HeadwayError becomes a WorkerFailed."""
    known = error if isinstance(error, HeadwayError) else _explained(error)
    noted = re.search(r"\bstep (\d+)", known.where)
    step = int(noted.group(1)) if noted else None
    where = f"rank {rank}" if step is None else f"rank {rank}, step {step}"
    if known.where.startswith("rank "):  # maybe another one, of which all ranks tell
        where = known.where
    elif known.where and known.where not in (f"step {step}", f"rank {rank}"):
        where = f"{where}, {known.where}"
    return FailureRecord(
        rank=rank,
        attempt=attempt,
        step=step,
        kind=type(known).__name__,
        what=known.what,
        where=where,
        why=known.why,
        fix=known.fix,
        code=known.code,
        exit_code=known.exit_code,
        secondary=isinstance(error, PeerLost) or hasattr(error, _ELSEWHERE),
        time=time.time(),
        trace="".join(traceback.format_exception(error)),
        problems=tuple(getattr(known, "problems", ())),
    )


def summarize_exception(error: BaseException) -> str:
    """Type and text of an exception; of a long text (torch lists its kernels) the beginning."""
    lines = f"{type(error).__name__}: {error}".rstrip(": \n").splitlines()
    return "\n  ".join([*lines[:4], "..."] if len(lines) > 5 else lines)


def _explained(error: BaseException) -> WorkerFailed:
    """A foreign exception, with the line of the user's code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    why = summarize_exception(error)
    if frame := innermost_user_frame(frames) or (frames[-1] if frames else None):
        why += f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return WorkerFailed("an exception stopped this rank", why=why)


def write_failure(directory: Path, record: FailureRecord) -> None:
    """Write a record to DIRECTORY/failures.

    Raises:
        OSError: The disk is full, or there is no such directory (any more).
    """
    folder = directory / FAILURES_FOLDER
    # Without its parents: a run directory that was deleted is not made again.
    folder.mkdir(exist_ok=True)
    path = folder / f"attempt-{record.attempt}-rank-{record.rank:05d}.json"
    write_atomically(path, json.dumps(asdict(record), indent=1))


def read_failures(directory: Path, attempt: int) -> list[FailureRecord]:
    """All records of one attempt, by rank; of a damaged one it is said that it is damaged."""
    paths = sorted((directory / FAILURES_FOLDER).glob(f"attempt-{attempt}-rank-*.json"))
    return [_read(path, attempt) for path in paths]


def _read(path: Path, attempt: int) -> FailureRecord:
    try:
        return to_type(parse_json(read_text(path)), FailureRecord, where=str(path))
    except (ValueError, DocumentError) as error:
        digits = path.stem.rpartition("-")[2]
        failed = WorkerFailed(
            "its record of the failure is damaged", where=str(path), why=str(error)[:_MOST_CAUSE]
        )
        return describe_failure(int(digits) if digits.isdecimal() else 0, attempt, failed)


def root_cause(records: Iterable[FailureRecord]) -> FailureRecord | None:
    """The first primary record by time, then rank; None where all are secondary."""
    primary = [record for record in records if not record.secondary]
    return min(primary, key=lambda record: (record.time, record.rank), default=None)


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 1 and 3", "ranks 1, 2, 3 and 9 more"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > 8:
        return f"ranks {', '.join(names[:6])} and {len(names) - 6} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
