"""Results on standard output; notes, warnings and errors on standard error.

Text is written without control sequences, so that it can be piped and compared; only the progress
display uses rich.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeVar

from headway.errors import HeadwayError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

BUG_CODE = "HW-9000"
BUG_EXIT = 70
ValueT = TypeVar("ValueT")


def say(text: str = "") -> None:
    """A line of the result, to standard output."""
    sys.stdout.write(f"{text}\n")
    # A pipe is buffered: lines of worker processes would overtake these.
    sys.stdout.flush()


def say_json(value: Mapping[str, object] | Sequence[object]) -> None:
    """The result for machines, to standard output."""
    import json

    say(json.dumps(value, indent=2, default=str))


def note(text: str) -> None:
    """A line for people that is not the result, to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def warn(text: str) -> None:
    """A warning, to standard error."""
    note(f"warning: {text}")


def show_warning(message: Warning | str, *place: object, **options: object) -> None:
    """Takes the place of `warnings.showwarning`: the text without a line of headway's source."""
    warn(str(message))


@contextmanager
def shown_log() -> Iterator[None]:
    """Notes of the library (logger "headway") go to standard error while the `with` lasts."""
    import logging  # 15 ms, for which `headway --help` does not wait

    class NoteHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())

    logger, handler = logging.getLogger("headway"), NoteHandler()
    before = logger.level
    logger.addHandler(handler)
    # Else it has the root's level, WARNING, and drops every note.
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def parse_option(option: str, text: str, parse: Callable[[str], ValueT]) -> ValueT:
    """The value of an option whose text has a unit.

    Raises:
        UsageError: `parse` cannot read it.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def table_lines(rows: Sequence[Sequence[str]], *, align: Literal["<", ">"] = "<") -> Iterator[str]:
    """Rows in columns as wide as their widest cell; `align` is that of all but the first."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    for label, *cells in rows:
        rest = (f"{cell:{align}{width}}" for cell, width in zip(cells, others, strict=True))
        yield "  ".join([label.ljust(first), *rest]).rstrip()


def write_pictures(*pictures: tuple[Path | None, Callable[[], str | bytes]]) -> None:
    """Draw and write each picture for which the command line names a file.

    Raises:
        UsageError: A file cannot be written.
    """
    for path, draw in pictures:
        if path is not None:
            write_file(path, draw())


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file that the command line names.

    Raises:
        UsageError: It cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(
            "cannot be written",
            where=str(path),
            why=error.strerror or str(error),
            fix="Name another file.",
        ) from None


def error_text(error: HeadwayError) -> str:
    """Code, where, what, why and fix, each where there is one; golden files hold this form."""
    return f"{error.code} {error}"


def exit_code(stopped_by: str | None) -> int:
    """0, or 128 + the number of the signal that asked for the end, as shells have it."""
    if stopped_by is None:
        return 0
    import signal  # with `enum`, for which `headway --help` does not wait

    number = getattr(signal, stopped_by, None)
    return 128 + int(number) if number is not None else 130


def show_error(error: HeadwayError, *, trace: bool) -> int:
    """Write an error of the user's; returns its exit code."""
    if trace:
        note(_trace(error))
    note(error_text(error))
    return error.exit_code


def show_bug(error: BaseException) -> int:
    """Write an error of ours, with its trace; returns the exit code for it."""
    note(_trace(error))
    note(
        f"{BUG_CODE} this is a bug in headway: {type(error).__name__}: {error}\n"
        "  Please report it with the trace above and the run directory's recipe.json, plan.json "
        "and environment.json."
    )
    return BUG_EXIT


def _trace(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error)).rstrip()
