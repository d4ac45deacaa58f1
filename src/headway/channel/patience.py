"""Waiting for a word of memory without starving others, and with an end.

Spins for some 20 us (a put between two cores takes 1), then gives the core away (`sched_yield`) for
half a millisecond, unless somebody else takes it, then sleeps: until it is rung (`bell`), or an
eighth of what it has waited, at most 1 ms: whoever waits long costs 0.5 % of a core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from headway.errors import PeerLost, Stalled

_SPINS = 300
_YIELD_SECONDS = 0.0005
_CROWDED_SECONDS = 0.00005
"""A core that is given away for longer is wanted by others."""
_LONGEST_PAUSE = 0.001


class Pauses:
    """One wait: `pause` again and again, until it has come or raises.

    Args:
        seconds: Until the deadline.
        check: Raises if it can never come.
        late: The error of the deadline, from the seconds.
        sleep: Until it may have come; None: an eighth of the time waited.
    """

    def __init__(
        self,
        seconds: float,
        check: Callable[[], None],
        late: Callable[[float], Stalled],
        sleep: Callable[[], None] | None = None,
    ) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._check = check
        self._late = late
        self._sleep = sleep
        self._crowded = False

    def pause(self) -> None:
        """Give the core away for a while.

        Raises:
            PeerLost: From `check`.
            Stalled: The deadline is over.
        """
        now = time.monotonic()
        waited = now - self._began
        if waited < _YIELD_SECONDS and not self._crowded:
            os.sched_yield()
            self._crowded = time.monotonic() - now > _CROWDED_SECONDS
            return
        self._check()
        if waited > self._seconds:
            raise self._late(self._seconds)
        if self._sleep is None:
            time.sleep(min(_LONGEST_PAUSE, waited / 8))
        else:
            self._sleep()


def await_word(words: memoryview, index: int, least: int, pauses: Callable[[], Pauses]) -> None:
    """Wait until a word is at least `least`.

    Raises:
        PeerLost: The other end is gone, and the word had not been stored before.
        Stalled: The deadline is over.
    """
    for _ in range(_SPINS):
        if words[index] >= least:
            return
    waiting = pauses()
    while words[index] < least:
        try:
            waiting.pause()
        except (PeerLost, Stalled):
            if words[index] < least:
                raise
