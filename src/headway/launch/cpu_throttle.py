"""A rank that computes more slowly: its process is stopped and continued many times a second.

A small process of its own sends SIGSTOP and SIGCONT, so that all of the rank is slow: its
computation, its data, its side of an exchange. Invariant: the helper ends with its rank, and never
leaves it stopped unless somebody kills the helper itself. What a GPU was given to do goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

THROTTLE_PERIOD = 0.02
"""Seconds of one stop and one run: short against a step, long against the kernel's time slices."""


class ProcessThrottle:
    """Makes this process slower until `end`.

    Args:
        factor: Of its time it runs one part in so many; above 1.
    """

    def __init__(self, factor: float) -> None:
        self._helper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(factor)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt on the keyboard is not for it
        )

    def end(self) -> None:
        """Full speed again."""
        self._helper.terminate()
        self._helper.wait()


def stop_and_continue(pid: int, factor: float) -> None:
    """Stop and continue a process, this one's parent, as long as it lives."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    while not ended and os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(THROTTLE_PERIOD * (1.0 - 1.0 / factor))
        os.kill(pid, signal.SIGCONT)
        time.sleep(THROTTLE_PERIOD / factor)


if __name__ == "__main__":
    stop_and_continue(int(sys.argv[1]), float(sys.argv[2]))
