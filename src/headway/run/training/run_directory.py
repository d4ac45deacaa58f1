"""The run directory: its name, and how it is found again; its files, event log and environment.

A directory holds one run: the user's, or the next free runs/NAME-001. Events are JSON lines that
the report and the progress display read; each line is handed to the kernel when `EventLog.write`
returns. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from time import time
from typing import Any

from headway.atomic_files import write_atomically
from headway.documents import nearest, parse_json
from headway.errors import RunDirectoryTaken, RunError, UsageError, os_reason, shown_path
from headway.plans import Plan
from headway.run.distributed.launch_env import LaunchEnv

_LOG = logging.getLogger("headway")
RUNS = Path("runs")


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

    @property
    def history(self) -> Path:
        """Of an asynchronous run: in which order each worker's holders have handled messages."""
        return self.path / "history"

    def history_of(self, attempt: int) -> Path:
        """That of one attempt: a restart begins another one."""
        return self.history / f"attempt-{attempt:03d}"

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of a name that rank 0 has written; lines that were cut off are left out."""
        found: list[dict[str, Any]] = []
        for line in self.events_file.read_text().splitlines() if self.events_file.exists() else ():
            with suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict) and row.get("event") == name:
                    found.append(row)
        return found

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

    @property
    def next_attempt(self) -> int:
        """A resumed run goes on counting, so that the history knows which step was done last."""
        attempts = [-1]  # without any event the next attempt is 0
        for line in self.events_file.read_bytes().splitlines() if self.events_file.exists() else ():
            try:
                event = parse_json(line)
            except ValueError:  # the last line of a process that was killed
                continue
            attempt = event.get("attempt") if isinstance(event, dict) else None
            attempts.append(attempt if isinstance(attempt, int) else 0)
        return max(attempts) + 1

    def describe(
        self, recipe: Mapping[str, str], plan: Plan | None, environment: Mapping[str, object]
    ) -> None:
        """Write what is run, how it is split and where (rank 0 only).

        Args:
            plan: None: of what has no plan, a support vector machine.
        """
        for folder in (self.path, self.path / "ranks", self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        if plan is not None:
            plan.save(self.plan_file)
        _write_json(self.path / "environment.json", environment)
        # Last: this file marks a directory as holding a run.
        _write_json(self.recipe_file, recipe)

    def add_to_recipe(self, facts: Mapping[str, str]) -> None:
        """Add what is known of the recipe only when its parts are built (rank 0 only)."""
        known = parse_json(self.recipe_file.read_bytes())
        _write_json(self.recipe_file, {**known, **facts})


def choose_directory(
    name: str, given: str | Path | None, place: LaunchEnv, *, resume: bool
) -> Path:
    """The run directory. In a world of another launcher all ranks must come to the same one, so
    that it is runs/NAME there, without a number.

    Raises:
        UsageError: There is no run to resume, or the directory cannot be made or written: too long
            a name, a file of this name, a file system that is read-only.
        RunDirectoryTaken: It holds a run.
    """
    if given is None and place.found_world:
        given = RUNS / name
    try:
        if given is None:
            return _newest(name) if resume else _next_free(name)
        given = Path(given)
        # Only the first rank of the first attempt: later ones find what this very run has written.
        if place.attempt == 0 and place.rank == 0:
            RunDirectory(given).check_free(resume=resume)
            if resume and not RunDirectory(given).recipe_file.exists():
                _check_resumed(given)
                _LOG.info("%s holds no run yet; starting at step 0", given)
            given.mkdir(parents=True, exist_ok=True)
            # `os.access` says yes to root on a file system that is read-only.
            with TemporaryFile(dir=given):
                pass
    except OSError as error:
        raise UsageError(
            f"there can be no such run directory: {os_reason(error, given or RUNS / name)}",
            where=shown_path(given or RUNS / name),
            fix="Choose another --directory."
            if given
            else "Choose a --directory, or another name of the recipe.",
        ) from None
    return given


def _check_resumed(given: Path) -> None:
    """Refuse to resume a directory that does not exist: it is more likely misspelt than new.

    Raises:
        UsageError: Names the nearest runs.
    """
    if given.is_dir():
        return
    parent = given.parent
    others = sorted(path.name for path in parent.iterdir()) if parent.is_dir() else []
    runs = [name for name in others if RunDirectory(parent / name).recipe_file.exists()]
    raise UsageError(
        f"there is no such run to resume{nearest(given.name, runs)}",
        where=str(given),
        fix="Correct the name; or make the directory first, if this job is to begin there.",
    )


def _numbered(name: str) -> dict[int, Path]:
    """The run directories of this name, by number."""
    pattern = re.compile(re.escape(name) + r"-(\d{3,})")
    found = {}
    for path in RUNS.iterdir() if RUNS.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match:
            found[int(match.group(1))] = path
    return found


def _newest(name: str) -> Path:
    runs = {n: p for n, p in _numbered(name).items() if RunDirectory(p).recipe_file.exists()}
    if not runs:
        raise UsageError(
            f"there is no run of {name} to resume",
            where=str(RUNS),
            fix="Name it with --directory, or leave --resume out.",
        )
    return runs[max(runs)]


def _next_free(name: str) -> Path:
    """Creates the directory, so that a run started at the same moment gets another one."""
    RUNS.mkdir(exist_ok=True)
    number = max(_numbered(name), default=0) + 1
    for candidate in range(number, number + 100):
        path = RUNS / f"{name}-{candidate:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise RunDirectoryTaken("no free directory name for the run", where=str(RUNS / name))


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
        **_loaded_versions(),
        **_git_commit(),
    }


PACKAGES = ("numpy", "transformers", "datasets", "peft", "accelerate", "timm", "torchvision")
"""Whose versions are recorded where they are loaded."""


def _loaded_versions() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in PACKAGES:
        if name in sys.modules:
            with suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
    return found


def _git_commit() -> dict[str, object]:
    """The commit of the current folder, and whether files that git knows have been changed."""
    try:
        commit, status = (
            subprocess.run(
                ["git", *words.split()], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for words in ("rev-parse HEAD", "status --porcelain --untracked-files=no")
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or a very large one
        return {}
    return {"git": f"{commit}, with changes" if status else commit}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


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
            RunError: The disk is full or gone, or the file has been deleted.
        """
        row = {"event": event, "attempt": self._attempt, "time": time(), **values}
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            # Writing to a deleted file succeeds, and is lost.
            deleted = os.fstat(self._file.fileno()).st_nlink == 0
        except OSError as error:
            raise RunError(
                f"cannot write {self._file.name}: {error.strerror}",
                fix="Free space on this disk, then rerun with --resume.",
            ) from error
        if deleted:
            raise RunError(
                f"{self._file.name} has been deleted while the run was writing it",
                why="Events and checkpoints would be lost.",
                fix="Start again, with a run directory that nobody deletes.",
            )

    def close(self) -> None:
        self._file.close()
