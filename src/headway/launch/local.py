"""Launches workers on this machine, attempt after attempt, under torch's elastic agent.

All that headway knows of torch's agent is here (its configuration, its errors, what it prints, what
it leaves changed in the process: signal handlers, environment) and in `agent_rendezvous`. Importing
this module does not import torch: `start_forkserver` begins the import in the process that all
workers are forked from, and only then this process imports it itself.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import secrets
import signal
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from headway.channel.job_secret import SECRET
from headway.checkpoint.directory import committed_steps
from headway.errors import RunError, Stalled
from headway.launch.agent_processes import SILENT, Workers
from headway.launch.emulation import EmulatedCluster, PacedCluster
from headway.launch.forkserver import (
    forkserver_pid,
    forkserver_status,
    gc_paused,
    main_left_alone,
    restored_environment,
    start_forkserver,
)
from headway.launch.preflight import check_processes, threads_for
from headway.launch.restart_policy import AttemptFacts, RestartPolicy, aborted, explain_deaths
from headway.launch.worker import (
    Job,
    first_death,
    has_reported,
    noted_deaths,
    noted_leaves,
    noted_losses,
    noted_pids,
    noted_stop,
    run_worker,
)
from headway.run.distributed.failure_record import FailureRecord, read_failures
from headway.run.distributed.launch_env import DEBUG, HEARTBEAT_TIMEOUT_SECONDS, LOOPBACK
from headway.run.training.recorded_attempt import RecordedAttempt
from headway.run.training.run_directory import RunDirectory

_MONITOR_SECONDS = 0.05
# A pipe closes some moments before its process counts as ended.
_DEATH_SECONDS = 1.0
_NOISY = ("torch.distributed.elastic", "torch.multiprocessing", "torchelastic-events-null")


def run_attempt(
    job: Job,
    processes: int,
    *,
    shutdown_seconds: float,
    stopped_seconds: float | None = None,
) -> AttemptFacts:
    """Start the workers and wait for their end.

    Args:
        job: For every worker; its outbox exists and is empty.
        shutdown_seconds: After a signal, kill workers that still run after this long.
        stopped_seconds: See `Workers.end_stopped_workers`.

    Raises:
        RunError: The workers could not be started.
    """
    with gc_paused():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

    statuses: dict[int, int] = {}
    messages: dict[int, str] = {}
    stop: str | None = None
    unborn = False
    job = replace(job, forkserver=forkserver_pid())
    workers = Workers(job.outbox, job.attempt, processes, job.threads)
    try:
        with (
            _agent_contained(),
            workers.given_to_agent(),
            workers.end_stopped_workers(stopped_seconds),
        ):
            config = _config(job, processes, shutdown_seconds)
            try:
                with nullcontext() if _is_of_main(job.entry) else main_left_alone():
                    elastic_launch(config, run_worker)(job)
            except ChildFailedError as error:
                statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
                messages = {rank: _kept(failure) for rank, failure in error.failures.items()}
            # Of multiprocessing, while it starts a worker.
            except (EOFError, ConnectionError) as error:
                status = forkserver_status(_DEATH_SECONDS)
                if status is not None and status >= 0:
                    raise RunError(
                        "the workers could not be started",
                        why="The process that they are forked from has ended "
                        f"({type(error).__name__}).",
                        fix="Its message is above: usually a module fails while it is imported.",
                    ) from error
                unborn = True
    # Around all of it: a second signal may come while what watched the workers is put away.
    except SignalException as error:
        stop = error.sigval.name
    # Ctrl-C before the agent has installed its own handlers.
    except KeyboardInterrupt:
        stop = "SIGINT"
    # The agent tells the status of one dead worker, and not always of the first.
    by_pid = workers.statuses()
    own = {rank: by_pid.get(pid) for rank, pid in noted_pids(job.outbox).items()}
    ending = replace(_ending(job, processes, statuses, own, stop), messages=messages)
    gone = _FORKSERVER_GONE in (*by_pid.values(), *statuses.values())
    ended = forkserver_status(_DEATH_SECONDS if gone else 0) is not None
    if ended or workers.forkserver_replaced:
        # Nobody knows then how the workers ended, and those that ran have been killed here: what
        # they have noted of a signal is the agent's.
        trouble = "the process that forks the workers was killed"
        return replace(ending, deaths={}, stop=stop, trouble=trouble)
    if unborn:
        # The others were stopped here, by SIGTERM: nobody has asked for it.
        return replace(ending, stop=stop, trouble="a worker was killed before it began")
    return ending


def _is_of_main(entry: Callable[..., Any] | str) -> bool:
    """Whether workers must import the main module to find the entry."""
    while isinstance(entry, partial):
        entry = entry.func
    return not isinstance(entry, str) and getattr(entry, "__module__", "") == "__main__"


def _kept(failure: Any) -> str:
    """What torch has kept of an exception outside of `run_worker`: its text, and its last line."""
    message = failure.message
    if not isinstance(message, dict):  # a remark of torch's own
        return ""
    stack = str(message.get("extraInfo", {}).get("py_callstack", ""))
    places = [line.strip() for line in stack.splitlines() if line.startswith('  File "')]
    return "\n  ".join([str(message.get("message", "")), *places[-1:]])


def _ending(
    job: Job,
    processes: int,
    statuses: Mapping[int, int],
    own: Mapping[int, int | None],
    stop: str | None,
) -> AttemptFacts:
    """The facts of an attempt.

    Args:
        statuses: Exit status of the worker that the agent names, by rank.
        own: Of all workers that noted their process id; None where it is not known.
    """
    # From files, because the agent returns nothing when a rank has failed.
    results = [_result(job.outbox, rank) for rank in range(processes)]
    silent = [rank for rank in range(processes) if not has_reported(job.outbox, rank)]
    left, lost = noted_leaves(job.outbox), noted_losses(job.outbox)
    if len(lost) == processes:  # nobody is left to have gone on
        silent = list(range(processes))
    deaths: dict[int, int | None] = {
        rank: 0 if status == SILENT else status
        for rank, status in statuses.items()
        if rank in silent and rank not in left
    }
    deaths |= {rank: -signal.Signals[lost[rank]] for rank in silent if rank in lost}
    # The siblings have seen more than the agent.
    for rank in noted_deaths(job.outbox):
        if rank in silent and rank not in left:
            deaths.setdefault(rank, _known(own.get(rank)))
    return AttemptFacts(
        attempt=job.attempt,
        results=tuple(results),
        silent=tuple(silent),
        unfinished=tuple(rank for rank in silent if rank in own),
        # After a death the agent ends the others by a signal, which then stopped nothing.
        stop=stop or (None if deaths else noted_stop(job.outbox)),
        records=_caused_by(first_death(job.outbox), read_failures(job.outbox, job.attempt)),
        deaths=deaths,
    )


def _caused_by(death: float, records: Sequence[FailureRecord]) -> tuple[FailureRecord, ...]:
    """The records of an attempt; the silence of a rank that was dead by then is no cause."""
    return tuple(
        replace(record, secondary=True)
        if record.kind == Stalled.__name__ and death < record.time
        else record
        for record in records
    )


_FORKSERVER_GONE = 255


def _known(status: int | None) -> int | None:
    """None for what multiprocessing reports where nobody is left who knows the status."""
    return None if status == _FORKSERVER_GONE else status


def _result(outbox: Path, rank: int) -> Any:
    """What a rank returned, or None; our own worker wrote it into our private directory."""
    path = outbox / f"result-{rank:05d}"
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _config(job: Job, processes: int, shutdown_seconds: float) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from headway.launch.agent_rendezvous import register

    facts: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": processes,
        "run_id": f"headway-{uuid.uuid4().hex[:12]}",
        "rdzv_backend": register(),
        # In emulated nodes the loopback is the node's own: the way to the others starts elsewhere.
        "local_addr": job.emulated.host if job.emulated else LOOPBACK,
        "max_restarts": 0,  # the agent restarts after any failure; `RestartPolicy` decides here
        "monitor_interval": _MONITOR_SECONDS,
        "start_method": "forkserver",
        "logs_specs": DefaultLogsSpecs(log_dir=str(job.outbox / "agent")),
        "signals_to_handle": ",".join(_signals()),
        # The agent takes whole seconds.
        "shutdown_timeout": max(1, round(shutdown_seconds)),
    }
    # The fields differ between versions of torch, and an unknown one is a TypeError.
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in facts.items() if name in known})


def _signals() -> list[str]:
    """The signals that end a job; SIGHUP not where nohup has switched it off."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ["SIGTERM", "SIGINT"] if ignored else ["SIGTERM", "SIGINT", "SIGHUP"]


@contextmanager
def _agent_contained() -> Iterator[None]:
    """Keep the agent from printing, and from leaving signal handlers and variables behind."""
    main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    before = {number: signal.getsignal(number) for number in numbers}
    with ExitStack() as stack:
        stack.enter_context(restored_environment())
        for name in _NOISY:
            stack.enter_context(_quiet(name))
        try:
            yield
        finally:
            # Python sets handlers in the main thread only; None is one of C code that it cannot put
            # back.
            for number, handler in before.items():
                if main and handler is not None:
                    signal.signal(number, handler)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    # What these loggers report, headway's one error says better.
    logger, silence = logging.getLogger(name), logging.NullHandler()
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(silence)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silence)


SHUTDOWN_SECONDS = 30.0
STOPPED_SECONDS = 2 * HEARTBEAT_TIMEOUT_SECONDS
"""The heartbeat, where one runs, is the first to notice a stopped worker."""


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a launch ended in order.

    Attributes:
        results: What the entry returned, by rank; None for a rank that was killed because it did
            not stop in time.
        stopped_by: Name of the signal that stopped the job, or None when it is complete.
        lost: Ranks that have died while the others went on and have not come back, and by which
            signal.
    """

    results: list[Any]
    stopped_by: str | None
    attempts: int
    killed: tuple[int, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)


def launch_local(
    entry: Callable[..., Any] | str,
    arguments: tuple[Any, ...] = (),
    *,
    processes: int,
    directory: Path | None = None,
    policy: RestartPolicy | None = None,
    preload: tuple[str, ...] = (),
    threads: int | None = None,
    first_attempt: int = 0,
    emulated: EmulatedCluster | PacedCluster | None = None,
    on_restart: Callable[[int, str], None] | None = None,
    shutdown_seconds: float = SHUTDOWN_SECONDS,
    stopped_seconds: float | None = STOPPED_SECONDS,
    guarded: bool = False,
    progress: Callable[[], int] | None = None,
) -> LaunchResult:
    """Run entry(place, *arguments) in `processes` workers; restart them as the policy decides.

    Args:
        entry: A function of a module, or "module:function": then this process need not import
            what only the workers need (it is sent to them by name in any case).
        directory: The run directory: failures are recorded there, and checkpoints. None: no record,
            no progress.
        preload: Modules that the warm process imports besides torch.
        threads: Of each worker; None: OMP_NUM_THREADS, or its share of the cores.
        first_attempt: Number of the first attempt (a resumed run goes on counting).
        on_restart: Called before a restart with the number of the new attempt and the reason.
        stopped_seconds: Kill a worker that stands still (SIGSTOP) for so long; None: never.
        guarded: Where all workers note that they are free of each other (`worker.FREE`), one that a
            signal ends, and on which the others do not depend, comes back in a new process as often
            as the policy's limit allows, and is left out then; the others go on.
        progress: How far the work has come, a number that never falls; None: the step of the newest
            checkpoint.

    Returns:
        The results, also after an orderly stop by a signal (SIGTERM, Ctrl-C).

    Raises:
        UsageError: Fewer than one process.
        HeadwayError: The root cause of the failure, of the class raised in the rank (WorkerFailed
            for foreign exceptions), with `where` = "rank 1, step 17".
    """
    for text in check_processes(processes):
        warnings.warn(text, stacklevel=2)
    start_forkserver(processes, preload, threads)
    measured = progress or partial(newest_checkpoint, directory)
    history: list[AttemptFacts] = []
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(
        # Where the forkserver removes it if this process is killed together with all workers.
        prefix="headway-",
        dir=get_temp_dir(),
        ignore_cleanup_errors=True,
    ) as scratch:
        while True:
            attempt = first_attempt + len(history)
            # An outbox of its own: no record of an earlier attempt can be taken for one of this.
            outbox = Path(scratch) / f"attempt-{attempt}"
            outbox.mkdir()
            job = Job(
                entry=entry,
                arguments=arguments,
                outbox=outbox,
                directory=directory,
                attempt=attempt,
                threads=threads_for(processes, threads),
                # A secret for each attempt: a rank of an earlier one is a stranger.
                environment={**environment, SECRET: secrets.token_hex(32)},
                emulated=emulated,
                guarded=guarded,
                returns=(policy or RestartPolicy()).limit,
            )
            before = measured()
            # Again: it may have been killed.
            start_forkserver(processes, preload, threads)
            ending = run_attempt(
                job,
                processes,
                shutdown_seconds=shutdown_seconds,
                stopped_seconds=stopped_seconds,
            )
            lost = noted_losses(outbox)
            history.append(replace(ending, progress_before=before, progress_after=measured()))
            finished = _judge(history, policy or RestartPolicy())
            if finished is not None:
                return replace(finished, lost=lost)
            if aborted(history[-1]):
                # Gloo aborts where ranks call different collectives: let torch compare them.
                environment[DEBUG] = "DETAIL"
            if on_restart is not None:
                on_restart(attempt + 1, _told(history[-1], directory))


def _told(facts: AttemptFacts, directory: Path | None) -> str:
    """Why workers are started again, and what is lost where they do not meet."""
    if directory is None:
        return explain_deaths(facts)
    attempt = RecordedAttempt(RunDirectory(directory), facts.attempt)
    lost = attempt.lost(max(facts.progress_after, 0))
    return f"{explain_deaths(facts)}; {lost}" if lost else explain_deaths(facts)


def _judge(history: list[AttemptFacts], policy: RestartPolicy) -> LaunchResult | None:
    """The result if the job is over, None for a restart; raises the root cause."""
    last = history[-1]
    if last.silent or last.records:
        decision = policy.decide(history)
        if decision is None:
            return None
        if decision.error is not None:
            raise decision.error
    return LaunchResult(
        results=list(last.results),
        stopped_by=last.stop,
        attempts=len(history),
        killed=last.unfinished,
    )


def newest_checkpoint(directory: Path | None) -> int:
    """The step of the newest committed checkpoint of a run directory; -1: none."""
    steps = [] if directory is None else committed_steps(RunDirectory(directory).checkpoints)
    return steps[-1] if steps else -1
