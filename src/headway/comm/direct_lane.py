"""The lane for methods of one round (plain and rounded sums): the least work per chunk.

Whoever has something to start does it: the training thread when a bucket is ready and a place is
free, the lane's thread when a chunk has ended. The thread sleeps in the operation that was started
first, because only its place can be used next. So a chunk costs one hand-over between threads; with
an inbox and torch's futures it is three, each with a fight for the interpreter's lock.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from headway.comm.buckets import Bucket
from headway.comm.method import finish
from headway.comm.progress import ProgressLane, Task


class DirectLane(ProgressLane):
    """See `ProgressLane`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._starting = threading.Lock()
        self._ended = 0  # of the chunks of this step
        self._asleep = False
        self._stopping = False
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._thread.start()

    def ready(self, bucket: Bucket) -> None:
        for task in self._of_bucket[bucket.number]:
            task.ready_step = bucket.step
        self._start_all()
        self.nudge()

    def nudge(self) -> None:
        # The thread sets this before it looks around for the last time: none of us misses it.
        if self._asleep:
            self._asleep = False
            self._bell.put(None)

    def _stop(self) -> None:
        self._stopping = True
        self._bell.put(None)

    def _start_all(self) -> None:
        """Start chunks in order for as long as the next one is ready and its place is free."""
        with self._starting:
            while (place := self._next()) is not None:
                task = self._flying[place]
                assert task is not None
                task.rounds = task.embark(place)
                task.waiting = next(task.rounds)

    # -- the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stopping:
            self._start_all()
            self._asleep = True
            task = self._flying[self._ended % self._credit]
            if task is not None:
                self._asleep = False
            if (task is None or not _is_done(task)) and self._idle is not None and self._idle():
                continue
            if task is None:
                self._bell.get()
            else:
                self._end(task)

    def _end(self, task: Task) -> None:
        """Wait for the oldest chunk; its place is free then."""
        assert task.rounds is not None
        assert task.waiting is not None
        finish(task.rounds, task.waiting)
        if task.leave:
            sleep(max(0.0, task.leave - monotonic()))
        place = self._ended % self._credit
        task.rounds = task.waiting = None
        self._ended = (self._ended + 1) % len(self._tasks)
        self._flying[place] = None
        self._count(task.bucket)


def _is_done(task: Task) -> bool:
    return isinstance(task.waiting, dist.Work) and task.waiting.is_completed()
