"""Signals that ask for the end of a run: SIGTERM, SIGHUP and the first Ctrl-C set a flag."""

from __future__ import annotations

import signal
import threading
from time import monotonic
from types import FrameType
from typing import Any

# A terminal's Ctrl-C may arrive twice: from the terminal and again from the launching agent.
SAME_REQUEST_SECONDS = 0.5


class StopRequest:
    """Context manager that turns signals into a request; does nothing outside the main thread.

    Attributes:
        requested: Name of the first signal that came ("SIGTERM", "SIGINT", "SIGHUP"), else None.

    Once the request is a Ctrl-C, another signal that comes more than half a second later raises
    KeyboardInterrupt: on a second Ctrl-C the agent of the workers sends them SIGTERM.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            before = signal.getsignal(number)
            # nohup: who started the job asked for it to survive the terminal.
            if number is signal.SIGHUP and before is signal.SIG_IGN:
                continue
            self._previous[number] = before
            signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._previous.items():
            # None: a handler that C code had installed; Python can only fall back to the default.
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._previous.clear()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
            self._since = monotonic()
        elif self.requested == "SIGINT" and monotonic() - self._since > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
