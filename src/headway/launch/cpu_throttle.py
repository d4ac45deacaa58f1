"""Slows a rank down: its process is stopped and continued many times a second.

A helper process sends SIGSTOP and SIGCONT, so that all of the rank is slow: its computation, its
data, its side of an exchange. The helper ends with its rank, and leaves it stopped only if the
helper itself is killed. Work that a GPU has already been given continues.
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
        factor: The process runs 1 / factor of the time; above 1.
    """

    def __init__(self, factor: float) -> None:
        # Isolated and without site-packages: the helper starts fast, and imports neither headway
        # nor torch.
        self._helper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(factor)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C does not end it before its rank
        )

    def end(self) -> None:
        """Full speed again."""
        self._helper.terminate()
        self._helper.wait()


def stop_and_continue(pid: int, factor: float) -> None:
    """Stop and continue the parent process for as long as it lives."""
    ended: list[int] = []
    # Only noted, so that the loop always ends behind a SIGCONT.
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    # When the rank ends, its helper gets another parent.
    while not ended and os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(THROTTLE_PERIOD * (1.0 - 1.0 / factor))
        os.kill(pid, signal.SIGCONT)
        time.sleep(THROTTLE_PERIOD / factor)


if __name__ == "__main__":
    stop_and_continue(int(sys.argv[1]), float(sys.argv[2]))
