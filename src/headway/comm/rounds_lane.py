"""The lane for methods of several rounds: each is resumed as soon as its operation is done.

The thread sleeps on an inbox in which the training thread puts nudges, and torch's futures the
places whose operation has ended; so methods in flight go on independently of each other.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from headway.comm.buckets import Bucket
from headway.comm.method import Blocking, finish, wait
from headway.comm.progress import ProgressLane, Task

_STOP = object()
_NUDGE = object()


class RoundsLane(ProgressLane):
    """See `ProgressLane`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._thread.start()

    def ready(self, bucket: Bucket) -> None:
        for task in self._of_bucket[bucket.number]:
            task.ready_step = bucket.step
        self._inbox.put(_NUDGE)

    def nudge(self) -> None:
        self._inbox.put(_NUDGE)

    def _stop(self) -> None:
        self._inbox.put(_STOP)

    # -- the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        busy = False
        while True:
            try:
                item = self._inbox.get(block=not busy)
            except Empty:
                busy = self._idle() if self._idle is not None else False
                continue
            if item is _STOP:
                return
            if isinstance(item, int):
                self._resume(item)
            while (place := self._next()) is not None:
                self._start(place)
            busy = self._idle is not None

    def _start(self, place: int) -> None:
        task = self._flying[place]
        assert task is not None
        method = task.bucket.method
        task.rounds = task.embark(place)
        if method.blocking:
            finish(task.rounds)
            sleep(max(0.0, task.leave - monotonic()) if task.leave else 0.0)
            self._end(task, place)
        else:
            self._go_on(task, place)

    def _resume(self, place: int) -> None:
        task = self._flying[place]
        assert task is not None
        assert task.waiting is not None
        wait(task.waiting)  # is done: returns at once, and raises what went wrong
        self._go_on(task, place)

    def _go_on(self, task: Task, place: int) -> None:
        """Run the method until it has to wait for the network or is done."""
        assert task.rounds is not None
        task.waiting = next(task.rounds, None)
        if task.waiting is None:
            self._end(task, place)
            return
        assert not isinstance(task.waiting, Blocking)
        self._call_when_done(task.waiting, place, task.leave)

    def _call_when_done(self, work: dist.Work, place: int, leave: float) -> None:
        """Put the place into the inbox; on an emulated link not before the bytes have left."""
        inbox = self._inbox

        def done(_: object) -> None:
            late = leave - monotonic() if leave else 0.0
            if late > 0:
                threading.Timer(late, inbox.put, (place,)).start()
            else:
                inbox.put(place)

        work.get_future().add_done_callback(done)

    def _end(self, task: Task, place: int) -> None:
        self._flying[place] = task.rounds = None
        self._count(task.bucket)
