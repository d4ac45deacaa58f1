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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir

from headway.launch.preflight import threads_for
from headway.run.distributed.launch_env import TEMPORARY

# A Unix socket's path has at most 107 characters: leave room for what multiprocessing appends.
MAX_FOLDER_CHARACTERS = 60
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
PRELOAD = (
    "headway.launch.temporary_files",
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
    # "__main__" is multiprocessing's own list, which the call below replaces.
    modules = ["__main__", *dict.fromkeys((*PRELOAD, *preload))]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    with short_paths():
        variables = {
            "OMP_NUM_THREADS": str(threads_for(processes, threads)),
            TEMPORARY: get_temp_dir(),
        }
        with restored_environment(variables):
            forkserver.ensure_running()


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
