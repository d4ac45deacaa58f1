"""The parent of one worker on its host: it ends the worker when the launcher is gone.

Started as `python -m headway.launch.elastic.guardian`, here or through ssh. The first line of its
standard input says what to run; the end of that input, which comes with the end of the launcher or
of the connection, that the worker is to end. Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from headway.documents import parse_json

GRACE_SECONDS = 5.0
"""Between the request to end and the kill."""
_POLL_SECONDS = 0.1
_SET_DEATH_SIGNAL = 1  # prctl(2), linux/prctl.h


def guard(told: dict[str, Any], lifeline: int) -> int:
    """Run a command until it ends or the lifeline does.

    Args:
        told: "command", "folder", and "variables" of its environment.
        lifeline: A file descriptor.

    Returns:
        Its exit status, as a shell says it: 128 and the number of the signal that has ended it.
    """
    guardian = os.getpid()
    process = subprocess.Popen(
        told["command"],
        cwd=told["folder"],
        env={**os.environ, **told["variables"]},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _end_with(guardian),
    )
    ended = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
    waiting = [lifeline] if ended is None else [lifeline, ended]
    while process.poll() is None:
        ready = select.select(waiting, [], [], _POLL_SECONDS if ended is None else None)[0]
        if lifeline in ready:
            _signal(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            _signal(process, signal.SIGKILL)
            process.wait()
    _signal(process, signal.SIGKILL)  # what it has left behind
    status = process.returncode
    return status if status >= 0 else 128 - status


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the worker and all processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_with(guardian: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL))
        if os.getppid() != guardian:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    # The group of a terminal gets Ctrl-C, of which the launcher hears, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    os._exit(guard(parse_json(line.decode()), sys.stdin.fileno()) if line else 0)
