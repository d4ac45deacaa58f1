"""Events of a run as JSON lines: what the report, the progress display and people read."""

from __future__ import annotations

import json
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any

from headway.errors import RunError


class EventLog:
    """Appends one JSON object per line; each line is on its way to the disk when `write` returns.

    A file that a killed process left with half a last line is closed off first, so that the next
    line stands alone.
    """

    def __init__(self, path: Path, *, attempt: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._attempt = attempt
        self._file = path.open("ab+")
        if self._file.tell() and not _ends_with_newline(path):
            self._file.write(b"\n")

    def write(self, event: str, **values: Any) -> None:
        """Append {"event": event, "attempt": ..., "time": now, **values}.

        Raises:
            RunError: The disk is full or gone.
        """
        row = {"event": event, "attempt": self._attempt, "time": time(), **values}
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"cannot write {self._file.name}: {error.strerror}",
                fix="Free space on this disk, then go on with --resume.",
            ) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
