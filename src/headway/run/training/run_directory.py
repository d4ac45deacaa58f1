"""The run directory: files of a run that people can read, and its event log.

A directory holds one run. Events are JSON lines that the report and the progress display read; each
line is handed to the kernel when `EventLog.write` returns. Imports no torch.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any

from headway.errors import RunDirectoryTaken, RunError
from headway.plans import Plan


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run; a directory holds one run only."""

    path: Path

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.json"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rank_file(self, rank: int) -> Path:
        return self.path / "ranks" / f"rank-{rank:05d}.jsonl"

    def check_free(self, *, resume: bool) -> None:
        """Refuse a directory that already holds a run, unless that run is resumed.

        Raises:
            RunDirectoryTaken: With the two ways out.
        """
        if self.recipe_file.exists() and not resume:
            raise RunDirectoryTaken(
                "already holds a run",
                where=str(self.path),
                fix="Continue it with --resume, or choose another --directory.",
            )

    def describe(
        self, recipe: Mapping[str, str], plan: Plan, environment: Mapping[str, object]
    ) -> None:
        """Write what is run, how it is split and where (rank 0 only)."""
        for folder in (self.path, self.path / "ranks", self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        plan.save(self.plan_file)
        _write_json(self.path / "environment.json", environment)
        # Last: this file marks a directory as holding a run.
        _write_json(self.recipe_file, recipe)


def describe_environment(*, torch_version: str, device: str, backend: str) -> dict[str, object]:
    """The machine and the versions, for environment.json."""
    from headway import __version__

    return {
        "headway": __version__,
        "python": platform.python_version(),
        "torch": torch_version,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "device": device,
        "backend": backend,
        "host": platform.node(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class EventLog:
    """Appends one JSON object per line; each line is with the kernel when `write` returns."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._attempt = attempt
        self._file = path.open("ab+")
        # A killed process may have left half a line: end it, so that the next one stands alone.
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
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
                fix="Free space on this disk, then rerun with --resume.",
            ) from error

    def close(self) -> None:
        self._file.close()
