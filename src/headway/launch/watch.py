"""Workers watch their launcher and each other, so that none stays behind in whatever it is doing.

A thread of each worker waits for the end of the launcher (then the worker ends at once) and of its
siblings. When a sibling has ended without a result, this attempt is over: the worker gets a short
grace to notice by itself and to report, then it ends, too, even in the middle of slow user code.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
import sys
import threading
import time
from multiprocessing import connection
from pathlib import Path

from headway.run.failure import FOLDER
from headway.run.place import Place

GRACE_SECONDS = {"failed": 2.0, "gone": 1.0}
ORPHANED = 137
ABANDONED = 3
_POLL_SECONDS = 0.1


def watch_others(outbox: Path, place: Place) -> None:
    """Start the watching thread of this worker.

    Args:
        outbox: Directory of this attempt that all workers share.
        place: Of this worker.
    """
    note(outbox / f"pid-{place.rank:05d}", str(os.getpid()).encode())
    watcher = _Watcher(outbox, place)
    threading.Thread(target=watcher.run, name="headway-watch", daemon=True).start()


def note(path: Path, content: bytes) -> None:
    """Write a small file that is whole or absent."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    aside.write_bytes(content)
    aside.replace(path)


def end_process(status: int, *, flush: bool = True) -> None:
    """End this process and its data-loading children now; nothing is cleaned up or waited for.

    Args:
        status: The exit status.
        flush: Write out what was printed; not from the watching thread, which could wait for ever.
    """
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr) if flush else ():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def deaths_noted(outbox: Path) -> list[int]:
    """Ranks that were seen to end without a word, first to die first."""
    notes = [(float(p.read_text()), int(p.name.partition("-")[2])) for p in outbox.glob("gone-*")]
    return [rank for _, rank in sorted(notes)]


def stop_noted(outbox: Path) -> str | None:
    """Name of the signal by which a rank was stopped in order, or None."""
    return next((path.read_text() for path in sorted(outbox.glob("stopped-*"))), None)


def spoke(outbox: Path, rank: int) -> bool:
    """Whether a rank left a result or a failure."""
    if (outbox / f"result-{rank:05d}").exists():
        return True
    return any((outbox / FOLDER).glob(f"attempt-*-rank-{rank:05d}.json"))


class _Watcher:
    """The state of the watching thread: file descriptors that become ready when a process ends."""

    def __init__(self, outbox: Path, place: Place) -> None:
        self._outbox = outbox
        # File descriptors of processes exist on Linux only; elsewhere the launcher is watched.
        others = set(range(place.ranks)) - {place.rank} if hasattr(os, "pidfd_open") else set()
        self._unknown = others
        self._siblings: dict[int, int] = {}
        self._launcher = multiprocessing.parent_process()

    def run(self) -> None:
        launcher = [] if self._launcher is None else [self._launcher.sentinel]
        while True:
            self._meet_siblings()
            waiting: list[int] = [*launcher, *self._siblings]
            pause = _POLL_SECONDS if self._unknown else None
            ready = connection.wait(waiting, timeout=pause)
            if any(item in launcher for item in ready):
                # Nobody else is left to remove the launcher's temporary directory.
                shutil.rmtree(self._outbox.parent, ignore_errors=True)
                end_process(ORPHANED, flush=False)
            for descriptor in ready:
                assert isinstance(descriptor, int)
                os.close(descriptor)
                self._ended(self._siblings.pop(descriptor))

    def _meet_siblings(self) -> None:
        for rank in sorted(self._unknown):
            try:
                pid = int((self._outbox / f"pid-{rank:05d}").read_text())
            except FileNotFoundError:
                continue
            self._unknown.discard(rank)
            try:
                self._siblings[os.pidfd_open(pid)] = rank
            except ProcessLookupError:
                self._ended(rank)

    def _ended(self, rank: int) -> None:
        """A sibling has ended: in order, with an error, or without a word."""
        if (self._outbox / f"result-{rank:05d}").exists():
            return
        how = "failed" if spoke(self._outbox, rank) else "gone"
        path = self._outbox / f"gone-{rank:05d}"
        if how == "gone" and not path.exists():
            with contextlib.suppress(OSError):
                note(path, repr(time.time()).encode())
        end = functools.partial(end_process, ABANDONED, flush=False)
        threading.Timer(GRACE_SECONDS[how], end).start()
