"""What a group of the backend hands out for an operation under way: torch's `Work`.

Whoever waits first carries out the rest of the program: usually the caller. Where nobody would (a
program that was started asynchronously and does not travel by itself, a future that somebody holds,
`is_completed` in a loop), the group's finisher thread does. Invariant: a program is carried out by
one thread at a time, and its outcome, good or bad, is told to everyone who asks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.comm.interpreter import Running


class Finisher:
    """A thread that finishes programs in the order in which it gets them; made when needed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Program | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def take(self, program: Program) -> None:
        """Finish it by and by."""
        with self._lock:
            if self._closed or sys.is_finalizing():
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._live, name="headway-finisher", daemon=True
                )
                self._thread.start()
        self._queue.put(program)

    def close(self) -> None:
        """Take nothing more."""
        self._closed = True
        self.rest()

    def rest(self) -> None:
        """End the thread until it is needed again; one that waits for a vanished rank ends with the
        process."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout=5.0)

    def _live(self) -> None:
        while (program := self._queue.get()) is not None:
            program.finish()


class Program:
    """One program under way, for everyone who asks for its end.

    Args:
        running: It, begun.
        outputs: The tensors that the operation fills.
        seconds: Longest wait.
        finisher: Of the group.
        after: Called once when the program is through: puts results where they belong.
    """

    def __init__(
        self,
        running: Running,
        outputs: list[Tensor],
        seconds: float,
        finisher: Finisher,
        after: Callable[[], None] | None = None,
    ) -> None:
        self.outputs = outputs
        self.error: BaseException | None = None
        self._running: Running | None = running
        self._seconds = seconds
        self._finisher = finisher
        self._after = after
        self._turn = threading.Lock()
        self._telling = threading.Lock()
        self._future: Any = None
        self._handed = False

    @property
    def done(self) -> bool:
        return self._running is None

    def finish(self, seconds: float = 0.0) -> BaseException | None:
        """Carry out what is left, or wait for whoever does.

        Args:
            seconds: Longest wait; 0: that of the operation.

        Returns:
            What went wrong.
        """
        allowed = seconds or self._seconds
        if not self._turn.acquire(timeout=allowed):
            running = self._running
            return self.error if running is None else running.late(allowed)
        try:
            if self._running is not None:
                self._carry_out(self._running, allowed)
        finally:
            self._turn.release()
        return self.error

    def _carry_out(self, running: Running, seconds: float) -> None:
        try:
            with torch.no_grad():
                running.finish(seconds)
                if self._after is not None:
                    self._after()
        except BaseException as error:
            self.error = error
        with self._telling:
            self._running = self._after = None
            future = self._future
        if future is not None:
            self._tell(future)

    def hand_over(self) -> None:
        """Let the finisher's thread do what is left."""
        if self._running is not None and not self._handed:
            self._handed = True
            self._finisher.take(self)

    def future(self) -> Any:
        """Always the same one."""
        with self._telling:
            known, self._future = self._future, self._future or torch.futures.Future()
            late = known is None and self._running is None
        if late:
            self._tell(self._future)
        self.hand_over()
        return self._future

    def _tell(self, future: Any) -> None:
        if self.error is None:
            future.set_result(self.outputs)
        else:
            future.set_exception(self.error)


class ProgramWork(dist.Work):
    """A program as torch knows it; one that is dropped is finished all the same."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def __del__(self) -> None:
        self._program.hand_over()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the outputs are there.

        Args:
            timeout: Longest wait; None or 0: that of the operation.

        Raises:
            Stalled: Names the rank that did not come.
            PeerLost: Names the rank whose connection broke.
        """
        error = self._program.finish(max(timeout.total_seconds(), 0.0) if timeout else 0.0)
        if error is not None:
            raise error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._program.done:
            return True
        self._program.hand_over()
        return False

    def is_success(self) -> bool:
        return self.is_completed() and self._program.error is None

    def exception(self) -> BaseException | None:
        return self._program.error

    def result(self) -> list[Tensor]:
        return self._program.outputs

    def get_future(self) -> Any:
        return self._program.future()


class ManyWorks(dist.Work):
    """Several operations that were started together; done when all are."""

    def __init__(self, works: Sequence[dist.Work], outputs: list[Tensor]) -> None:
        super().__init__()
        self._works = works
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when all are done; an error is that of the first that failed."""
        for work in self._works:
            work.wait(timeout or timedelta(0))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        states = [work.is_completed() for work in self._works]  # asks all: each is handed over
        return all(states)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception())), None)

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        outputs = self._outputs
        both = torch.futures.collect_all([work.get_future() for work in self._works])

        def take(done: Any) -> list[Tensor]:
            for each in done.value():
                each.value()  # raises what went wrong
            return outputs

        return both.then(take)
