"""Anonymous files in memory (memfd_create), opened across processes of one user.

The kernel frees them with the last process that has them open. A process that inherited nothing can
open those of another one, while that one lives, through /proc: by its process id, the descriptor,
and a random token in the file's label.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def memfd_available() -> bool:
    return hasattr(os, "memfd_create")


def create_memfds(count: int) -> tuple[str, list[int]]:
    """New empty files: their token and their descriptors."""
    token = os.urandom(8).hex()
    return token, [os.memfd_create(_label(token, number)) for number in range(count)]


def attach_memfds(pid: int, token: str, descriptors: Sequence[int]) -> list[int] | None:
    """Descriptors of our own for the files that a process has; None if it has them no more."""
    files: list[int] = []
    try:
        for number, descriptor in enumerate(descriptors):
            files.append(os.open(f"/proc/{int(pid)}/fd/{int(descriptor)}", os.O_RDWR))
            # The process number may belong to another process by now, and the descriptor to another
            # file.
            found = os.readlink(f"/proc/self/fd/{files[-1]}")
            if found != f"/memfd:{_label(token, number)} (deleted)":
                raise FileNotFoundError(found)
    except OSError:
        for file in files:
            os.close(file)
        return None
    return files


def _label(token: str, number: int) -> str:
    return f"headway-{token}-{number}"
