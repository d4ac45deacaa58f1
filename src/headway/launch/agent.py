"""One attempt: all workers once, started and supervised by torch's elastic agent.

Everything that this module knows of torch's agent is here: its configuration, its errors, what it
prints, and what it leaves changed in the process (signal handlers, environment).
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import pickle
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import RunError
from headway.launch.warm import environment, uncollected
from headway.launch.watch import deaths_noted, spoke, stop_noted
from headway.launch.worker import Job, work
from headway.run.failure import FailureRecord, read_failures

_KILL_SECONDS = 2.0
_NOISY = ("torch.distributed.elastic", "torch.multiprocessing", "torchelastic-events-null")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended.

    Attributes:
        results: What the entry returned, by rank; None where a rank returned nothing.
        silent: Ranks that left neither a result nor a failure.
        stop: Name of the signal that asked the launcher, or a worker, to stop, or None.
        records: Failures that the ranks wrote down.
        deaths: Ranks that ended without a word -> exit status where known (negative: a signal).
    """

    results: list[Any]
    silent: tuple[int, ...]
    stop: str | None
    records: tuple[FailureRecord, ...]
    deaths: Mapping[int, int | None]


def run_attempt(
    job: Job, processes: int, *, shutdown_seconds: float, monitor_seconds: float
) -> Ending:
    """Start the workers and wait for their end.

    Args:
        job: For every worker; its outbox exists and is empty.
        processes: How many.
        shutdown_seconds: After a signal, so long until workers that go on are killed.
        monitor_seconds: How often the agent looks at its workers.

    Raises:
        RunError: The workers could not be started.
    """
    with uncollected():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

    statuses: dict[int, int] = {}
    stop: str | None = None
    with _agent_contained(), _no_child_left():
        config = _config(job, processes, shutdown_seconds, monitor_seconds)
        try:
            elastic_launch(config, work)(job)
        except SignalException as error:
            stop = error.sigval.name
        except ChildFailedError as error:
            statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except KeyboardInterrupt:
            stop = "SIGINT"
        except (EOFError, ConnectionError) as error:
            raise RunError(
                "the workers could not be started",
                why=f"The process that they are forked from has ended ({type(error).__name__}).",
                fix="Its message is above: usually a module fails while it is imported.",
            ) from error
    return _ending(job, processes, statuses, stop)


def _ending(job: Job, processes: int, statuses: Mapping[int, int], stop: str | None) -> Ending:
    results = [_result(job.outbox, rank) for rank in range(processes)]
    silent = [rank for rank in range(processes) if not spoke(job.outbox, rank)]
    deaths: dict[int, int | None] = {
        rank: status for rank, status in statuses.items() if rank in silent
    }
    # The agent names one dead worker, and not always the first: the siblings saw more.
    for rank in deaths_noted(job.outbox):
        if rank in silent:
            deaths.setdefault(rank, None)
    return Ending(
        results=results,
        silent=tuple(silent),
        stop=stop or stop_noted(job.outbox),
        records=tuple(read_failures(job.outbox, job.attempt)),
        deaths=deaths,
    )


def _result(outbox: Path, rank: int) -> Any:
    """What a rank returned, or None; our own worker wrote it into our private directory."""
    path = outbox / f"result-{rank:05d}"
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _config(job: Job, processes: int, shutdown_seconds: float, monitor_seconds: float) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    facts: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": processes,
        "run_id": f"headway-{uuid.uuid4().hex[:12]}",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "local_addr": job.emulated.host if job.emulated else "127.0.0.1",
        "max_restarts": 0,
        "monitor_interval": monitor_seconds,
        "start_method": "forkserver",
        "logs_specs": DefaultLogsSpecs(log_dir=str(job.outbox / "agent")),
        "signals_to_handle": ",".join(_signals()),
        "shutdown_timeout": max(1, round(shutdown_seconds)),
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in facts.items() if name in known})


def _signals() -> list[str]:
    """The signals that end a job; SIGHUP not where nohup has switched it off."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ["SIGTERM", "SIGINT"] if ignored else ["SIGTERM", "SIGINT", "SIGHUP"]


@contextmanager
def _agent_contained() -> Iterator[None]:
    """The agent neither prints nor leaves its signal handlers and variables behind."""
    main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    before = {number: signal.getsignal(number) for number in numbers}
    with ExitStack() as stack:
        stack.enter_context(environment())
        for name in _NOISY:
            stack.enter_context(_quiet(name))
        try:
            yield
        finally:
            for number, handler in before.items():
                if main and handler is not None:
                    signal.signal(number, handler)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """What loggers below `name` have to say is said better by headway's one error."""
    logger, silence = logging.getLogger(name), logging.NullHandler()
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(silence)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silence)


@contextmanager
def _no_child_left() -> Iterator[None]:
    """Kill workers that the agent lost (a signal in the middle of their start)."""
    before = {child.pid for child in multiprocessing.active_children()}
    try:
        yield
    finally:
        left = [c for c in multiprocessing.active_children() if c.pid not in before]
        for child in left:
            child.terminate()
        for child in left:
            child.join(_KILL_SECONDS)
            if child.is_alive():
                child.kill()
                child.join()
