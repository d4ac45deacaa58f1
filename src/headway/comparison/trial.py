"""A trial: the processes of one framework, started, watched and measured.

Every process is told its job over a pipe and leaves its readings in a file. A trial ends within its
time limit whatever its framework does, nothing of it runs on, and a failure is a result: it says
which process failed, in what, or where each one hangs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.comparison.worker import (
    RankReadings,
    WorkerJob,
    failure_file,
    readings_file,
    stack_file,
)
from headway.documents import parse_json, to_type
from headway.launch.preflight import threads_for
from headway.run.distributed.launch_env import free_port
from headway.units import counted, format_seconds

_POLL = 0.05
_GRACE = 3.0
"""Seconds that the others get to say what they make of the failure of one."""
_PORT = 29500
"""Of rank 0 on an emulated node, where nobody else listens."""
_LOOPBACK = "lo"


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a trial came to.

    Attributes:
        seconds: Of every step behind the first, the mean over the processes.
        steps: How many of these, the last ones, are measured.
        losses: Of each step from the first on, the mean over the processes that know it.
        first_step: Seconds from the start of the processes to the end of the first step.
        cpu_seconds: Of a step, all processes together.
        peak_bytes: Resident memory of the process with the most.
        sent_bytes: Of a step and process, the mean, with all headers; None where one process alone
            cannot send, or nobody counts.
        model_bytes: Of the parameters of the first process's model.
        draws: Whether a step draws random numbers, as dropout does.
    """

    seconds: tuple[float, ...]
    steps: int
    losses: tuple[float, ...]
    first_step: float
    cpu_seconds: float
    peak_bytes: int
    sent_bytes: float | None
    model_bytes: int
    draws: bool = False

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[-self.steps :])


class TrialFailed(Exception):
    """A framework did not get through its trial; the text says what happened, in one line."""


@dataclass(frozen=True, kw_only=True)
class TrialProcesses:
    """How the processes of a trial are started.

    Attributes:
        python: The interpreter of the framework's environment.
        variables: Of that environment.
        job: Of each process.
        limit: Seconds for the whole trial.
        threads: Of each process; None: a fair share of the cores, or OMP_NUM_THREADS.
    """

    python: Path
    variables: Mapping[str, str]
    job: Sequence[WorkerJob]
    limit: float
    threads: int | None = None

    def run(self) -> TrialResult:
        """Start them, wait for them, and put their readings together.

        Raises:
            TrialFailed: One failed, or the time limit passed.
        """
        port = free_port() if self.job[0].emulated is None else _PORT
        began = time.time()
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(self._started(job, port)) for job in self.job]
            self._wait(running)
        readings = [
            to_type(
                parse_json(readings_file(job.folder, job.rank).read_bytes()),
                RankReadings,
                where=str(readings_file(job.folder, job.rank)),
            )
            for job in self.job
        ]
        return _joined(readings, began, self.job[0].steps)

    @contextlib.contextmanager
    def _started(self, job: WorkerJob, port: int) -> Iterator[subprocess.Popen[bytes]]:
        with (job.folder / f"output-{job.rank}.txt").open("wb") as output:
            process = subprocess.Popen(
                [str(self.python), "-m", "headway.comparison.worker"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(job, port),
                start_new_session=True,  # so that what it starts ends with it
            )
        try:
            assert process.stdin is not None
            # One that has died already is found by whoever waits for it.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(pickle.dumps(job))
                process.stdin.flush()
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()

    def _environment(self, job: WorkerJob, port: int) -> dict[str, str]:
        emulated = job.emulated
        nodes = emulated.cluster.nodes_of_ranks if emulated else ("",) * job.ranks
        local = [rank for rank in range(job.ranks) if nodes[rank] == nodes[job.rank]]
        return {
            **os.environ,
            **self.variables,
            "RANK": str(job.rank),
            "WORLD_SIZE": str(job.ranks),
            "LOCAL_RANK": str(local.index(job.rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "GROUP_RANK": str(list(dict.fromkeys(nodes)).index(nodes[job.rank])),
            "MASTER_ADDR": emulated.node(nodes[0]).address if emulated else "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": emulated.interface if emulated else _LOOPBACK,
            "OMP_NUM_THREADS": str(threads_for(job.ranks, self.threads)),
        }

    def _wait(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        """Until all have ended well.

        Raises:
            TrialFailed: One has not, or they take too long.
        """
        deadline = time.monotonic() + self.limit
        while True:
            codes = [process.poll() for process in running]
            if not any(code is None or code for code in codes):
                return
            if any(codes):
                self._let_end(running)
                raise TrialFailed(self._failure([process.poll() for process in running]))
            if time.monotonic() > deadline:
                raise TrialFailed(self._hang(running))
            time.sleep(_POLL)

    def _let_end(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + _GRACE
        while any(process.poll() is None for process in running):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL)

    def _failure(self, codes: Sequence[int | None]) -> str:
        """Who failed, and in what: the first that says it is the likeliest cause."""
        said = [failure_file(job.folder, job.rank) for job in self.job]
        told = [(path.stat().st_mtime, rank) for rank, path in enumerate(said) if path.exists()]
        # One that a signal has ended tells nothing, and the others tell of its death.
        killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
        if killed:
            name = signal.Signals(-(codes[killed[0]] or 0)).name
            return f"process {killed[0]} was killed by {name}{self._last_line(killed[0])}"
        if told:
            rank = min(told)[1]
            return f"process {rank}: {_one_line(said[rank].read_text())}"
        rank = next(rank for rank, code in enumerate(codes) if code)
        return f"process {rank} ended with status {codes[rank]}{self._last_line(rank)}"

    def _last_line(self, rank: int) -> str:
        text = (self.job[rank].folder / f"output-{rank}.txt").read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return f": {_one_line(lines[-1])}" if lines else ""

    def _hang(self, running: Sequence[subprocess.Popen[bytes]]) -> str:
        """Where each process is, by the innermost line of Python."""
        waiting = [rank for rank, process in enumerate(running) if process.poll() is None]
        for rank in waiting:
            # Before it has begun the signal would end it, and its stack would not be there.
            if stack_file(self.job[rank].folder, rank).exists():
                running[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        places = []
        for rank in waiting:
            path = stack_file(self.job[rank].folder, rank)
            text = path.read_text() if path.exists() else ""
            found = re.search(r'File "([^"]+)", line (\d+) in (\S+)', text)
            place = f"{found[3]} ({Path(found[1]).name}:{found[2]})" if found else "its start"
            places.append(f"process {rank} in {place}")
        return (
            f"not finished after {format_seconds(self.limit)}: "
            f"{counted(len(waiting), 'process')} still running, {'; '.join(places)}"
        )


def _one_line(text: str) -> str:
    """The first line, and no more of it than a cell of a table holds."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else "no message"
    return line if len(line) <= 300 else f"{line[:297]}..."


def _joined(readings: Sequence[RankReadings], began: float, steps: int) -> TrialResult:
    counts = [one.sent_bytes for one in readings if one.sent_bytes is not None]
    known = [[loss for loss in one.losses if loss is not None] for one in readings]
    return TrialResult(
        seconds=tuple(map(statistics.fmean, zip(*(r.seconds for r in readings), strict=True))),
        steps=steps,
        losses=tuple(map(statistics.fmean, zip(*filter(None, known), strict=True))),
        first_step=max(one.first for one in readings) - began,
        cpu_seconds=sum(one.cpu_seconds for one in readings) / steps,
        peak_bytes=max(one.peak_bytes for one in readings),
        sent_bytes=sum(counts) / steps / len(readings) if counts else None,
        model_bytes=readings[0].model_bytes,
        draws=any(one.draws for one in readings),
    )
