"""The processes that torch's agent starts, and the queues and the event by which it ends them.

The agent takes all three from a context of multiprocessing, and is given these in their place,
because with multiprocessing's own (torch 2.11 to 2.14, `MultiprocessContext`)

- a process that ends with status 0 and without a word is waited for without end (`_exit` in C);
- to set the event waits without end for a process that was killed or stopped while it waited;
- locks are files in /dev/shm, which stay if all processes are killed at once.

`Workers` also ends what the agent has lost sight of: if the forkserver is killed, its workers run
on, and a stopped worker in which no heartbeat runs yet, or any more, is noticed by nobody else.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from headway.errors import Stalled
from headway.launch.forkserver import forkserver_pid, forkserver_settings
from headway.launch.worker import guarded_pids, has_reported, noted_pids
from headway.run.distributed.failure_record import describe_failure, write_failure

SILENT = 256
"""Instead of 0: the exit status of a process that has reported nothing."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_END_SECONDS = 2.0
_LOOK_SECONDS = 0.5


class ReturnQueue:
    """A queue from one process to another; what is put must fit into a pipe at once."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    def put(self, value: Any) -> None:
        """Send a value."""
        self._writer.send(value)

    def get(self) -> Any:
        """Wait for a value."""
        return self._reader.recv()

    def empty(self) -> bool:
        """Whether there is nothing to get."""
        return not self._reader.poll()


class OneShotEvent:
    """An event that is set once: its byte stays in the pipe, and all who wait see it."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    def set(self) -> None:
        """Release all who wait now or later; waits for none of them."""
        self._writer.send_bytes(b"1")

    def wait(self) -> None:
        """Wait until it is set."""
        self._reader.poll(None)


class WorkerProcess:
    """A process of multiprocessing, as the agent is to see it.

    Args:
        reported: Whether the process with this id has left a result or a failure.
        starting: Entered for the start of the process.
    """

    def __init__(
        self,
        process: Any,
        reported: Callable[[int], bool],
        starting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._process = process
        self._reported = reported
        self._starting = starting
        self._descriptor: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def start(self) -> None:
        """Start the process."""
        # A worker that is sent one half of its arguments prints a traceback.
        with _signals_deferred(), self._starting():
            self._process.start()
            # Before a signal is heard: a process without a descriptor is ended by nobody, and
            # waited for at the exit. Process ids are used again; and multiprocessing knows nothing
            # more of its processes if the forkserver is killed. Linux only.
            if hasattr(os, "pidfd_open"):
                with suppress(ProcessLookupError):
                    self._descriptor = os.pidfd_open(self._process.pid)

    @property
    def exitcode(self) -> int | None:
        """Negative: the signal that ended it; None: it runs."""
        status: int | None = self._process.exitcode
        return SILENT if status == 0 and not self._reported(self._process.pid) else status

    def wait(self, seconds: float) -> bool:
        """Whether the process ends within some time."""
        if self._descriptor is None:
            return True
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Forget the process, which has ended."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handlers of signals to stop that arrive inside are called at its end."""
    # Not by the signal mask, which a forkserver that is started inside would inherit.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in _STOPS}
    handled = {number: handler for number, handler in before.items() if callable(handler)}
    for number in handled:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


class Workers:
    """The processes of one attempt.

    Args:
        outbox: In which they note their process ids, results and failures.
        attempt: Its number.
        processes: How many there are going to be.
        threads: Of each, also if multiprocessing has to start another forkserver.
    """

    def __init__(self, outbox: Path, attempt: int, processes: int, threads: int) -> None:
        self._outbox, self._attempt, self._processes = outbox, attempt, processes
        self._threads = threads
        self._forkserver = forkserver_pid()
        self._made: list[WorkerProcess] = []

    @property
    def forkserver_replaced(self) -> bool:
        """Whether the forkserver was killed, and multiprocessing has started another since."""
        return forkserver_pid() != self._forkserver

    @contextmanager
    def given_to_agent(self) -> Iterator[None]:
        """Inside, the agent's processes are of this object; none of them is left behind."""
        # Of this one context object, which the agent asks for by the same name.
        context = multiprocessing.get_context("forkserver")
        make, folder = context.Process, tempfile.tempdir

        def make_worker(*args: Any, **kwargs: Any) -> WorkerProcess:
            process = make(*args, **kwargs)
            self._made.append(WorkerProcess(process, self._has_reported, self._starting))
            if len(self._made) == self._processes:
                tempfile.tempdir = folder
            return self._made[-1]

        def make_event() -> OneShotEvent:
            # The last that the agent makes before it makes files for tracebacks, which stay if a
            # signal comes in between: into the folder that multiprocessing removes at the end.
            tempfile.tempdir = get_temp_dir()
            return OneShotEvent()

        changes = {"Process": make_worker, "SimpleQueue": ReturnQueue, "Event": make_event}
        vars(context).update(changes)
        try:
            yield
        finally:
            tempfile.tempdir = folder
            for name in changes:
                del vars(context)[name]
            self._end_all()

    @contextmanager
    def _starting(self) -> Iterator[None]:
        with forkserver_settings(self._threads):
            yield
        # The workers that were forked before have died with the one that forked them.
        if self.forkserver_replaced:
            raise ConnectionResetError("the forkserver was killed while workers were started")

    def statuses(self) -> dict[int, int | None]:
        """Process id -> exit status of each process; 0 also of one that was silent."""
        return {worker.pid: worker._process.exitcode for worker in self._made if worker.pid}

    def _has_reported(self, pid: int) -> bool:
        return any(
            has_reported(self._outbox, rank)
            for rank, noted in noted_pids(self._outbox).items()
            if noted == pid
        )

    def _end_all(self) -> None:
        # The agent loses workers when a signal arrives in the middle of their start. Those that it
        # lost with the forkserver must not take this for a request to stop in order.
        lost = any(worker.exitcode is not None and not worker.wait(0) for worker in self._made)
        for number in (signal.SIGKILL,) if lost else (signal.SIGTERM, signal.SIGKILL):
            alive = [worker for worker in self._made if not worker.wait(0)]
            for worker in alive:
                worker.send_signal(number)
            deadline = time.monotonic() + _END_SECONDS
            for worker in alive:
                worker.wait(max(0.0, deadline - time.monotonic()))
        for worker in self._made:
            worker.close()

    # -- stopped workers -------------------------------------------------------------------------

    @contextmanager
    def end_stopped_workers(self, seconds: float | None) -> Iterator[None]:
        """Inside, a worker that is stopped for so long while others run is reported and killed.

        Args:
            seconds: More than the heartbeat's patience, which knows more; None: never.
        """
        over = threading.Event()
        if seconds is None or not hasattr(os, "pidfd_open"):
            yield
            return
        watch = threading.Thread(
            target=self._watch, args=(seconds, over), name="headway-stopped", daemon=True
        )
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()

    def _watch(self, seconds: float, over: threading.Event) -> None:
        # Counts looks, not time: nobody is blamed for what passed while this process was stopped.
        looks: dict[int, int] = {}
        while not over.wait(_LOOK_SECONDS):
            guarded = guarded_pids(self._outbox)
            states = {
                worker: process_state(guarded.get(worker.pid, worker.pid))
                for worker in self._running()
            }
            stopped = [worker for worker, state in states.items() if state in ("T", "t")]
            # All of them: somebody has paused the job.
            if len(stopped) == len(states):
                stopped = []
            looks = {worker.pid: looks.get(worker.pid, 0) + 1 for worker in stopped}
            for worker in stopped:
                if looks[worker.pid] * _LOOK_SECONDS > seconds:
                    self._report_stopped(worker, seconds)
                    worker.send_signal(signal.SIGKILL)

    def _running(self) -> list[WorkerProcess]:
        started = [worker for worker in list(self._made) if worker.pid]
        return [worker for worker in started if not worker.wait(0)]

    def _report_stopped(self, worker: WorkerProcess, seconds: float) -> None:
        ranks = {pid: rank for rank, pid in noted_pids(self._outbox).items()}
        rank = ranks.get(worker.pid, self._made.index(worker))
        if has_reported(self._outbox, rank):
            return
        error = Stalled(
            f"rank {rank} has stood still for {seconds:.0f} s",
            why=f"Its process ({worker.pid}) was stopped, by SIGSTOP or a debugger.",
            fix="Let it run (kill -CONT), or leave it alone. Then rerun with --resume.",
        )
        with suppress(OSError):
            write_failure(self._outbox, describe_failure(rank, self._attempt, error))


def process_state(pid: int) -> str:
    """The letter by which the kernel names the state of a process (proc(5)); "": it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
