"""One line about a training that runs, on standard error, once a second."""

from __future__ import annotations

import sys
import time

from headway.svm.training import MachineProgress
from headway.units import counted


class ProgressLine:
    """Called after every outer step (`training.Observe`)."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, at: MachineProgress) -> None:
        """Write the line, unless the last one is younger than a second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1.0
        progress = at.progress
        pair = f"{at.positive} against {at.negative} ({at.pair + 1} of {at.pairs}), "
        sys.stderr.write(
            f"{pair if at.pairs > 1 else ''}violation {progress.violation:.2g}, "
            f"{counted(progress.active, 'active sample')}, "
            f"{counted(progress.support, 'support vector')}, "
            f"{progress.values:.2g} kernel values, about {progress.remaining:.0f} s left\n"
        )
        sys.stderr.flush()
