"""Interruption of a training by a signal: the first asks it to stop in order, a second one at once.

Handlers that the user's program has set stay.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields whether SIGINT or SIGTERM has asked to stop since.

    Outside of the main thread, where Python sets no handlers, nothing asks.
    """
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        before = {
            number: default
            for number, default in defaults.items()
            if signal.getsignal(number) == default
        }
    for number in before:
        signal.signal(number, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for number, default in before.items():
            signal.signal(number, default)
