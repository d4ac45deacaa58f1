"""The forkserver: a process that has imported torch, from which all workers are forked.

Importing torch costs about a second of a core. The forkserver pays it once; workers, also those of
a restart, are forked from it in milliseconds. Start it before torch is imported here, and the two
imports overlap. It never runs anything but imports, and ends with this process, after all workers;
if this one was killed, it removes the directory of temporary files that was left.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from headway.launch.abandoned_files import claim, remove_abandoned
from headway.launch.preflight import threads_for
from headway.run.distributed.launch_env import TEMPORARY

# A Unix socket's path has at most 107 characters: leave room for what multiprocessing appends.
MAX_FOLDER_CHARACTERS = 60
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
PRELOAD = (
    "headway.launch.forkserver_process",
    "headway.launch.disable_gc",
    "torch",
    "torch.distributed",
    "headway.launch.worker",
    "headway.launch.preload",
)


def start_forkserver(
    processes: int, preload: Sequence[str] = (), threads: int | None = None
) -> None:
    """Start the forkserver if it does not run yet; returns at once, the imports go on beside.

    Args:
        preload: Modules to import besides torch; one that does not exist is ignored.
        threads: See `threads_for`. The forkserver keeps the environment of its start, and OpenMP
            reads OMP_NUM_THREADS when torch is loaded.
    """
    # Without "__main__", multiprocessing's own list: a script would be run again there.
    modules = [*dict.fromkeys((*PRELOAD, *preload))]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    with short_paths():
        remove_abandoned()
        claim(Path(get_temp_dir()))
        with forkserver_settings(threads_for(processes, threads)):
            forkserver.ensure_running()


@contextmanager
def forkserver_settings(threads: int) -> Iterator[None]:
    """Inside, a forkserver may be started: by `start_forkserver`, or by multiprocessing itself.

    multiprocessing starts another one as soon as a process is wanted and the last was killed.
    """
    # First, because it unblocks SIGINT when it starts this process.
    resource_tracker.ensure_running()
    variables = {"OMP_NUM_THREADS": str(threads), TEMPORARY: get_temp_dir()}
    # Processes that are started inside do not notice Ctrl-C until they unblock it (`worker`).
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with restored_environment(variables):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def main_left_alone() -> Iterator[None]:
    """Inside, processes that are started do not import the main module again.

    multiprocessing imports a script in every process, and what stands in it outside of
    `if __name__ == "__main__":` would be done there again: start workers, without end.
    """
    main: Any = sys.modules["__main__"]
    missing = object()
    before = {name: getattr(main, name, missing) for name in ("__file__", "__spec__")}
    main.__file__, main.__spec__ = None, None
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(main, name)
            else:
                setattr(main, name, value)


def forkserver_pid() -> int | None:
    """The process id of the forkserver that was started last, also if it has ended."""
    # A private name: only multiprocessing itself may wait for this process, and take its status.
    return getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)


def forkserver_status(seconds: float = 0.0) -> int | None:
    """The exit status of the forkserver that was started last (negative: a signal); None: it runs.

    Args:
        seconds: Wait so long for its end.
    """
    pid = forkserver_pid()
    deadline = time.monotonic() + seconds
    while pid is not None:
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # a forkserver of another process
            return None
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)
    return None


@contextmanager
def gc_paused() -> Iterator[None]:
    """For imports of torch: see `headway.launch.disable_gc`."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def restored_environment(changes: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set variables; on leaving, every variable is as it was before, whoever changed it."""
    before = dict(os.environ)
    os.environ.update(changes or {})
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def short_paths() -> Iterator[None]:
    """Use a short folder for temporary files where TMPDIR is too long for a Unix socket."""
    # multiprocessing keeps the folder that it makes here first, for all of its later sockets.
    before = tempfile.tempdir
    if len(tempfile.gettempdir()) > MAX_FOLDER_CHARACTERS:
        tempfile.tempdir = next(
            (path for path in SHORT_FOLDERS if os.access(path, os.W_OK)), before
        )
    try:
        yield
    finally:
        tempfile.tempdir = before
