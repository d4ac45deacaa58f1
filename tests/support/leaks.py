"""What a test may leave behind: nothing. Each check is a function, so that it can be tested.

A process counts as a test's own if this process is its parent, or if it inherited the mark of this
session in its environment (grandchildren whose parent has ended).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

MARK = "HEADWAY_TEST_SESSION"
PROCESSES_ALLOWED = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
THREADS_ALLOWED = ("MainThread", "pytest_timeout", "execnet")
VARIABLES_ALLOWED = (
    *("PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "TORCHINDUCTOR_CACHE_DIR"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # set where scikit-learn is imported
)
KEPT: set[int] = set()
"""Processes that the tests of a session share."""
PATIENCE = 1.0
"""Seconds that a thread or a process gets to end after its test."""


def alive_threads() -> list[str]:
    """Names of the Python threads of this process, without those of pytest."""
    return [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if not thread.name.startswith(THREADS_ALLOWED)
    ]


def gloo_threads() -> int:
    """How many threads of this process do operations of Gloo's groups (Linux)."""
    count = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            count += task.read_text().startswith("pt_gloo_run")
    return count


def process_ids() -> frozenset[int]:
    """Of all processes of this machine; empty where the kernel does not show them."""
    if not Path("/proc/self/stat").exists():
        return frozenset()
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())


def alive_children(known: Collection[int] = ()) -> list[str]:
    """Processes that this process or its test started and that still run; not the forkserver's.

    Args:
        known: Ran before and are not looked at: to look at one takes 0.1 ms.
    """
    me, mark = os.getpid(), f"{MARK}={os.getpid()}".encode()
    found = []
    for pid in process_ids().difference(known, KEPT):
        facts = _process(pid)
        if facts is None or pid == me:
            continue
        parent, state, command, environment = facts
        own = parent == me or mark in environment.split(b"\0")
        if own and state not in "ZX" and not any(name in command for name in PROCESSES_ALLOWED):
            found.append(f"process {pid} ({command[:120]})")
    return found


def _process(pid: int) -> tuple[int, str, str, bytes] | None:
    """Parent, state, command line and environment of a process; None if it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (OSError, ValueError):
        return None
    try:
        environment = (folder / "environ").read_bytes()
    except OSError:
        environment = b""
    return int(parent), state, command.strip(), environment


def settled(check: Callable[[], list[str]], patience: float = PATIENCE) -> list[str]:
    """The findings of `check` that are still there after `patience` seconds."""
    deadline = time.monotonic() + patience
    while (found := check()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """One line per environment variable that differs."""
    names = sorted(set(before) | set(after))
    return [
        f"environment variable {name}: {before.get(name, 'unset')} -> {after.get(name, 'unset')}"
        for name in names
        if before.get(name) != after.get(name) and name not in VARIABLES_ALLOWED
    ]


def open_group() -> list[str]:
    """Whether a default process group is initialised; never imports torch."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    return [f"default process group of {dist.get_world_size()} ranks"]


class Snapshot:
    """The state before a test; `leaks()` says what differs after it and puts it right."""

    def __init__(self) -> None:
        self._threads = frozenset(alive_threads())
        self._processes = process_ids()
        self._variables = dict(os.environ)
        self._directory = os.getcwd()

    def leaks(self, patience: float = PATIENCE) -> list[str]:
        """One line per thing left behind."""
        found = settled(self._running, patience)
        found += changed_variables(self._variables, os.environ)
        if not _same_directory(self._directory):
            found.append(f"current directory changed from {self._directory}")
        found += open_group()
        self._restore()
        return found

    def _running(self) -> list[str]:
        threads = [name for name in alive_threads() if name not in self._threads]
        return threads + alive_children(self._processes)

    def _restore(self) -> None:
        for name in set(os.environ) - set(self._variables) - set(VARIABLES_ALLOWED):
            del os.environ[name]
        kept = {k: v for k, v in self._variables.items() if k not in VARIABLES_ALLOWED}
        os.environ.update(kept)
        os.chdir(self._directory)
        if open_group():
            sys.modules["torch.distributed"].destroy_process_group()


def _same_directory(path: str) -> bool:
    try:
        return os.getcwd() == path
    except FileNotFoundError:
        return False
