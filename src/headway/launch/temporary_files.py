"""Imported by the forkserver: at its end removes what a launcher that was killed has left.

multiprocessing keeps its sockets in a directory (pymp-...) that the launcher removes when it ends,
and that nobody removes if it is killed; the launch's own files are in it, too. The forkserver ends
after the launcher and all workers, whatever ended them.
"""

from __future__ import annotations

import atexit
import os
import shutil

from headway.run.distributed.launch_env import temporary_folder


def remove_after(launcher: int, own: int, folder: str) -> None:
    """Remove `folder` if this process is `own` and its parent `launcher` is gone."""
    # Forked workers inherit what is registered, and a launcher that lives still needs its files.
    if folder and os.getpid() == own and os.getppid() != launcher:
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(remove_after, os.getppid(), os.getpid(), temporary_folder())
