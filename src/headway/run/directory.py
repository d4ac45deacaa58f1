"""The run directory: everything that is known of a run, in files that people can read."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headway.errors import RunDirectoryTaken
from headway.plan import Plan


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run, and the rule that a directory holds one run only."""

    path: Path

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.json"

    @property
    def environment_file(self) -> Path:
        return self.path / "environment.json"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rank_file(self, rank: int) -> Path:
        return self.path / "ranks" / f"rank-{rank:05d}.jsonl"

    def check_free(self, *, resume: bool) -> None:
        """Refuse a directory that already holds a run, unless that run is to go on.

        Raises:
            RunDirectoryTaken: With the two ways out.
        """
        if self.recipe_file.exists() and not resume:
            raise RunDirectoryTaken(
                "already holds a run",
                where=str(self.path),
                fix="Go on with it by --resume, or choose another --directory.",
            )

    def describe(
        self, recipe: Mapping[str, str], plan: Plan, environment: Mapping[str, object]
    ) -> None:
        """Write what is run, how it is split and where (rank 0 only)."""
        for folder in (self.path, self.path / "ranks", self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        plan.save(self.plan_file)
        _write_json(self.environment_file, environment)
        _write_json(self.recipe_file, recipe)


def environment(*, torch_version: str, device: str, backend: str, cores: int) -> dict[str, object]:
    """The machine and the versions, for environment.json."""
    from headway import __version__

    return {
        "headway": __version__,
        "python": platform.python_version(),
        "torch": torch_version,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": cores,
        "device": device,
        "backend": backend,
        "host": platform.node(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
