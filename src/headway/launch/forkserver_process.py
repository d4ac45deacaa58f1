"""First module that the forkserver imports: what it does at a signal, and at its end.

Ctrl-C goes to all processes of a terminal, SIGTERM to all of a unit or batch job. The forkserver
outlives them, because its workers have a step to finish; a worker that has not begun yet
(`worker.run_worker`) is ended by them without a traceback.

multiprocessing keeps its sockets in a directory (pymp-...) that the launcher removes when it ends,
and that nobody removes if it is killed; the launch's own files are in it, too. The forkserver ends
after the launcher and all workers, whatever ended them, and removes it then. If it was killed as
well, the next launch does (`abandoned_files`).
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
from types import FrameType

from headway.run.distributed.launch_env import temporary_folder

_FORKSERVER = os.getpid()


def remove_after(launcher: int, own: int, folder: str) -> None:
    """Remove `folder` if this process is `own` and its parent `launcher` is gone."""
    # Forked workers inherit what is registered, and a launcher that lives still needs its files.
    if folder and os.getpid() == own and os.getppid() != launcher:
        shutil.rmtree(folder, ignore_errors=True)


def _end_worker(number: int, _: FrameType | None) -> None:
    if os.getpid() != _FORKSERVER:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


# SIGINT is blocked (`start_forkserver`): multiprocessing has the forkserver ignore it when its
# imports are done, and workers get back what is set here, and unblock it.
signal.signal(signal.SIGINT, signal.SIG_DFL)
for _number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_DFL:
        signal.signal(_number, _end_worker)
atexit.register(remove_after, os.getppid(), _FORKSERVER, temporary_folder())
