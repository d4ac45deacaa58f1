"""What an attempt of a run leaves behind, where workers do not meet: to be repeated, or lost.

Each attempt has a history of its own, which begins at the start of the run or at a checkpoint: that
stays as long as the attempt is the last one. Imports no torch.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headway.documents import parse_json
from headway.errors import UsageError
from headway.run.training.run_directory import RunDirectory
from headway.synchrony.history import History, merged
from headway.units import counted


@dataclass(frozen=True)
class RecordedAttempt:
    """One attempt of a run: since the workers were started, or started again.

    Attributes:
        number: 0 for the first one.
    """

    run: RunDirectory
    number: int

    @classmethod
    def last(cls, run: RunDirectory) -> RecordedAttempt | None:
        """The last attempt in which anything was handled; None: there is none."""
        found = [
            cls(run, int(match.group(1)))
            for path in (run.history.iterdir() if run.history.is_dir() else ())
            if (match := re.fullmatch(r"attempt-(\d+)", path.name))
        ]
        used = [one for one in found if one.history().events]
        return max(used, key=lambda one: one.number, default=None)

    def history(self) -> History:
        """What all its holders have handled."""
        files = sorted(self.run.history_of(self.number).glob("worker-*"))
        # Of a worker that was killed the last word may be cut off.
        return merged({n: History.load(file, killed=True) for n, file in enumerate(files)})

    @property
    def began_at(self) -> int | None:
        """The step of the checkpoint that it began with; None: the beginning of the run."""
        return self._last_event("resume").get("step")

    @property
    def checkpoint_every(self) -> int:
        """How often a checkpoint was due: the questions for it are in the history."""
        return int(self._last_event("start").get("checkpoint_every", 0))

    @property
    def ended(self) -> dict[str, Any]:
        """The event of its end; empty: nobody came so far."""
        return self._last_event("stop")

    def last_step(self, rank: int) -> int:
        """The last step that a rank has made; 0: none."""
        return max((step for step, _ in self.steps(rank)), default=0)

    def check_repeatable(self, total: int) -> None:
        """Refuse to repeat a run that has made other steps, or has not come to its end.

        Args:
            total: The steps that the run is to make now.

        Raises:
            UsageError: It cannot be repeated.
        """
        why = ""
        if not self.ended:
            why = "It has not come to its end: what its workers had pushed is incomplete."
        elif self.ended.get("reason") == "complete" and self.ended.get("step") != total:
            why = f"It made {self.ended.get('step')} steps, and this run makes {total}."
        if why:
            raise UsageError(
                "this run cannot be repeated",
                where=str(self.run.path),
                why=why,
                fix="Repeat a run that has come to its end, or was stopped, with its `stop`.",
            )

    def lost(self, step: int) -> str:
        """What is lost where all go on from the checkpoint of a step; "": nothing.

        Args:
            step: 0: from the beginning.
        """
        if self.ended or not self.run.history_of(self.number).is_dir():
            return ""
        taken = [row for row in self._events("checkpoint") if row.get("step") == step]
        since = taken[-1]["time"] if taken else 0.0
        lost = []
        left_out = []
        for rank in range(len(list((self.run.path / "ranks").glob("rank-*.jsonl")))):
            rows = self.steps(rank)
            after = sum(time > since for _, time in rows)
            if after:
                lost.append(f"{counted(after, 'step')} of rank {rank}")
            # Who was behind when the checkpoint was made begins at its step all the same.
            made = max((number for number, time in rows if time <= since), default=step)
            if taken and made < step:
                left_out.append(f"{step - made} of rank {rank}")
        told = [f"lost: {', '.join(lost)}"] if lost else []
        told += [f"never made: {', '.join(left_out)}"] if left_out else []
        place = f"from the checkpoint of step {step}" if step else "from the beginning"
        return f"all go on {place}; {'; '.join(told)}" if told else ""

    def _events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.run.events(name) if row.get("attempt") == self.number]

    def _last_event(self, name: str) -> dict[str, Any]:
        return (self._events(name) or [{}])[-1]

    def steps(self, rank: int) -> list[tuple[int, float]]:
        """The steps that a rank has made, in their order, and when they were."""
        file, found = self.run.rank_file(rank), []
        for line in file.read_bytes().splitlines() if file.exists() else ():
            with suppress(ValueError):  # the last line of a process that was killed
                row = parse_json(line)
                made = isinstance(row, dict) and row.get("event") == "rank_step"
                if made and row.get("attempt", 0) == self.number:
                    found.append((int(row["step"]), float(row["time"])))
        return found
