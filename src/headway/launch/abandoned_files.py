"""Directories for temporary data that launchers have left which were killed with all processes.

A note in each directory says whose it is; the next launch of the same user on the same machine
removes those of dead launchers.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from headway.run.distributed.launch_env import machine_identity

_NOTE = "headway-launcher"
_MOST_BYTES = 4096


def claim(folder: Path) -> None:
    """Note in a directory of multiprocessing that it belongs to this process."""
    # A child of another program uses the directory of that program.
    if multiprocessing.parent_process() is None:
        with suppress(OSError):
            (folder / _NOTE).write_text(f"{os.getpid()} {_start(os.getpid())} {machine_identity()}")


def remove_abandoned() -> None:
    """Remove the directories of launchers of this machine and user that were killed."""
    machine = machine_identity()
    for folder in Path(tempfile.gettempdir()).glob("pymp-*") if machine else ():
        with suppress(OSError, ValueError):
            # Whatever another user may have put there: links, and pipes that are never written to.
            facts = folder.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                continue
            pid, start, where = _noted(folder / _NOTE).split(" ", 2)
            if where == machine and _start(int(pid)) != start and not _in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _noted(note: Path) -> str:
    with open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{note} is no file")
        return file.read(_MOST_BYTES).decode()


def _start(pid: int) -> str:
    """The start time of a process in the kernel's clock ticks, as process ids are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _in_use(folder: Path) -> bool:
    """Whether a forkserver still listens there: of a program that went on in a child of its own."""
    for path in folder.glob("listener-*"):
        with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
            client.connect(str(path))
            return True
    return False
