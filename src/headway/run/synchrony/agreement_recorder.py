"""What a worker has seen of the others: for how long it waited, and for what; how far models were
apart when they met. It is written to the file of its rank, step by step, for the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter

from headway.run.step.record import AgreementRecord
from headway.run.synchrony.bundle import Bundle

_MEASURED_EVERY = 0.2
"""Seconds between two measured distances: each reads two models."""


@dataclass
class AgreementRecorder:
    """Collects what happens between two steps; `taken` gives it to the journal.

    Attributes:
        waits: Seconds by cause.
        distance: Between two models that met here, as a share of the norm of one; None: not
            measured.
    """

    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    distance: float | None = None
    _next: float = 0.0

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Inside, the worker waits."""
        start = perf_counter()
        try:
            yield
        finally:
            self.waits[cause] += perf_counter() - start

    def waited(self, causes: Mapping[str, float]) -> None:
        """The worker has waited, so many seconds by cause."""
        for cause, seconds in causes.items():
            self.waits[cause] += seconds

    def met(self, read: Callable[[], Bundle], other: Bundle) -> None:
        """Two models have met; measured now and then.

        Args:
            read: Of one of them.
        """
        if monotonic() < self._next:
            return
        self._next = monotonic() + _MEASURED_EVERY
        own = read()
        norm = own.norm()
        self.distance = (own - other).norm() / norm if norm else None

    def taken(self, staleness: Sequence[tuple[int, int]] = ()) -> AgreementRecord:
        """For the journal; from here on anew."""
        found = AgreementRecord(dict(self.waits), staleness, self.distance)
        self.waits.clear()
        self.distance = None
        return found
