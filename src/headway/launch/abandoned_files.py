"""Directories for temporary data that launchers have left which were killed with all processes.

A note in each directory says whose it is; the next launch of the same user on the same machine
removes those of dead launchers.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from headway.run.distributed.launch_env import machine_identity

_NOTE = "headway-launcher"


def claim(folder: Path) -> None:
    """Note in a directory of multiprocessing that it belongs to this process."""
    # A child of another program uses the directory of that program.
    if multiprocessing.parent_process() is None:
        with suppress(OSError):
            (folder / _NOTE).write_text(f"{os.getpid()} {_start(os.getpid())} {machine_identity()}")


def remove_abandoned() -> None:
    """Remove the directories of launchers of this machine and user that were killed."""
    machine = machine_identity()
    for note in Path(tempfile.gettempdir()).glob(f"pymp-*/{_NOTE}") if machine else ():
        with suppress(OSError, ValueError):
            pid, start, where = note.read_text().split(" ", 2)
            mine = note.stat().st_uid == os.getuid() and where == machine
            if mine and _start(int(pid)) != start and not _in_use(note.parent):
                shutil.rmtree(note.parent, ignore_errors=True)


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
