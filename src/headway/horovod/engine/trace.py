"""The timeline of rank 0's operations as Horovod writes it: a Chrome trace, a row for each tensor.

An operation waits for the other ranks (NEGOTIATE_ALLREDUCE) and is then done (ALLREDUCE).
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any


class OperationTrace:
    """A file of events; each line is complete, so that the file of a run that died can be read."""

    def __init__(self, path: Path, *, mark_cycles: bool) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._begun = time.monotonic()
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        self.mark_cycles = mark_cycles
        epoch = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
        self._file.write("[\n")
        self._write({"name": "HOROVOD_TIMELINE", "ph": "M", "pid": 0, "args": epoch})

    def operation(
        self, name: str, kind: str, asked: float, ready: float, done: float, num_bytes: int
    ) -> None:
        """One operation; times are of `time.monotonic`."""
        with self._lock:
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = len(self._rows)
                self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
            label = kind.upper()
            self._span(f"NEGOTIATE_{label}", row, asked, ready, {})
            self._span(label, row, ready, done, {"bytes": num_bytes})

    def cycle(self) -> None:
        """The coordinator has told what is ready."""
        if self.mark_cycles:
            with self._lock:
                self._write(
                    {"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "ts": self._micros()}
                )

    def close(self) -> None:
        """End the file; what is recorded later is dropped."""
        with self._lock:
            if not self._file.closed:
                end = {"name": "END", "ph": "i", "s": "g", "pid": 0, "ts": self._micros()}
                self._file.write(f"{json.dumps(end)}\n]\n")
                self._file.close()

    def _span(self, name: str, row: int, start: float, end: float, facts: dict[str, Any]) -> None:
        self._write(
            {
                "name": name,
                "ph": "X",
                "pid": row,
                "tid": 0,
                "ts": self._micros(start),
                "dur": max((end - start) * 1e6, 0.0),
                "args": facts,
            }
        )

    def _micros(self, when: float | None = None) -> float:
        return ((time.monotonic() if when is None else when) - self._begun) * 1e6

    def _write(self, event: dict[str, Any]) -> None:
        if not self._file.closed:
            self._file.write(f"{json.dumps(event)},\n")
            self._file.flush()
