"""The journal of a training: events of the run, from which progress display and report are made.

Steps may take less than a millisecond: the first ones are all written, and later ones a few times a
second.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

from headway.run.training.run_directory import EventLog, RunDirectory
from headway.svm.machine import Machine, pairs_of
from headway.svm.training import MachineProgress

_ALL = 500
"""Outer steps of an attempt of which every one is written."""
_EVERY_SECONDS = 0.2


class MachineJournal:
    """Written by rank 0; elsewhere nothing is.

    Attributes:
        step: Outer steps so far, over all attempts.
    """

    def __init__(
        self, directory: RunDirectory, *, rank: int, attempt: int, stack: ExitStack
    ) -> None:
        self.step = 0
        self._log: EventLog | None = None
        self._next = 0.0
        self._written = 0
        if rank == 0:
            self._log = EventLog(directory.events_file, attempt=attempt)
            stack.enter_context(closing(self._log))

    def event(self, name: str, **values: Any) -> None:
        """An event of the run."""
        if self._log is not None:
            self._log.write(name, step=self.step, **values)

    def progress(self, at: MachineProgress) -> None:
        """An outer step, with what was predicted in it (`training.Observe`)."""
        self.step += 1
        found, now = at.progress, time.monotonic()
        if self._written >= _ALL and now < self._next:
            return
        self._written += 1
        self._next = now + _EVERY_SECONDS
        for prediction in found.predictions:
            self.event("svm_prediction", pays=prediction.pays, **asdict(prediction))
        self.event(
            "svm_step",
            pair=at.pair,
            pairs=at.pairs,
            classes=f"{at.positive}, {at.negative}",
            violation=found.violation,
            active=found.active,
            support=found.support,
            values=found.values,
            seconds=found.seconds,
            remaining=found.remaining,
        )

    def facts(self, machine: Machine) -> None:
        """How each pair of classes was solved."""
        for (one, other), pair in zip(pairs_of(len(machine.classes)), machine.pairs, strict=False):
            names = machine.classes[[one, other]].tolist()
            self.event("svm_pair", classes=", ".join(map(str, names)), **asdict(pair))
