"""Root inside of a user namespace: emulated nodes for users who are not root, where Linux allows.

The process becomes root of a user, a network and a mount namespace of its own; to everybody else,
and to files, it stays the user that it was. It cannot go back, and it has left the machine's
network: only the emulated links are there. When the process and its children end, the kernel
removes everything that was made inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

from headway.launch.namespaces import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    MS_REC,
    MS_SLAVE,
    RUN,
    library_call,
    mount,
)

_CLONE_NEWUSER = 0x10000000


def become_root_inside() -> bool:
    """Move this process into namespaces in which it may emulate nodes.

    Returns:
        Whether it worked; if not, the process is as it was before. It does not where the process
        has several threads, where the system forbids user namespaces, or gives them no rights.
    """
    if not _alone() or not _tried():
        return False
    _move()
    return True


def _alone() -> bool:
    """The kernel moves single-threaded processes only."""
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1


def _tried() -> bool:
    """Whether a child can do it: some systems grant the namespace and then refuse its use."""
    child = os.fork()
    if child == 0:
        good = False
        with contextlib.suppress(OSError):
            _move()
            _run("ip netns add try && ip -n try link set lo up")
            good = True
        os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _move() -> None:
    user, group = os.geteuid(), os.getegid()
    library_call("unshare", ctypes.c_int(_CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS))
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"0 {user} 1")
    (own / "gid_map").write_text(f"0 {group} 1")
    mount("none", "/", MS_REC | MS_SLAVE)
    # `ip netns` keeps names there; the machine's folder belongs to the real root.
    mount("tmpfs", str(RUN if RUN.is_dir() else RUN.parent), 0, "tmpfs")
    _run("ip link set lo up")


def _run(commands: str) -> None:
    done = subprocess.run(["sh", "-c", commands], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr)
