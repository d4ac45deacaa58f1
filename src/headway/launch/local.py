"""Workers on this machine: attempt after attempt until they are done or the policy says stop.

Importing this module does not import torch: `warm_up` starts the import in the process that all
workers are forked from, and only then this process imports it itself.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.launch.agent import Ending, run_attempt
from headway.launch.emulation import Emulated
from headway.launch.paced import Paced
from headway.launch.preflight import check_processes, threads_for
from headway.launch.warm import warm_up
from headway.launch.worker import Job
from headway.run.policies import AttemptFacts, Restart, RestartPolicy, explain_deaths

SHUTDOWN_SECONDS = 30.0
MONITOR_SECONDS = 0.05
_CHECKPOINT = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a launch ended in order.

    Attributes:
        results: What the entry returned, by rank; None for a rank that was killed because it did
            not stop in time.
        stopped_by: Name of the signal that stopped the job, or None when it is complete.
        attempts: How often the workers were started.
        killed: Ranks that did not stop in time after the signal.
    """

    results: list[Any]
    stopped_by: str | None
    attempts: int
    killed: tuple[int, ...] = ()


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
    emulated: Emulated | Paced | None = None,
    progress: Callable[[], int] | None = None,
    on_restart: Callable[[int, str], None] | None = None,
    shutdown_seconds: float = SHUTDOWN_SECONDS,
    monitor_seconds: float = MONITOR_SECONDS,
) -> LaunchResult:
    """Run entry(place, *arguments) in `processes` workers; restart them as the policy decides.

    Args:
        entry: A function of a module, or "module:function": then this process need not import
            what only the workers need (it is sent to them by name in any case).
        arguments: Anything that pickles.
        processes: Number of workers; more than cores is a warning.
        directory: The run directory: failures are recorded there, its newest checkpoint is the
            measure of progress. None: no record, no progress.
        policy: None: `RestartPolicy()`.
        preload: Modules that the warm process imports besides torch.
        threads: Of each worker; None: OMP_NUM_THREADS, or its share of the cores.
        first_attempt: Number of the first attempt (a resumed run goes on counting).
        emulated: The nodes that the workers pretend to be on, with as many ranks as `processes`.
        progress: Returns the newest checkpoint's step, -1 for none; None: looks in `directory`.
        on_restart: Called before a restart with the number of the new attempt and the reason.
        shutdown_seconds: After a signal, so long until workers that go on are killed.
        monitor_seconds: How often the agent looks at its workers.

    Returns:
        The results, also after an orderly stop by a signal (SIGTERM, Ctrl-C).

    Raises:
        UsageError: Fewer than one process.
        HeadwayError: The root cause of the failure, of the class raised in the rank (WorkerFailed
            for foreign exceptions), with `where` = "rank 1, step 17".
    """
    for text in check_processes(processes):
        warnings.warn(text, stacklevel=2)
    warm_up(processes, preload, threads)
    newest = progress or (lambda: newest_checkpoint(directory))
    history: list[AttemptFacts] = []
    with tempfile.TemporaryDirectory(prefix="headway-", ignore_cleanup_errors=True) as scratch:
        while True:
            attempt = first_attempt + len(history)
            outbox = Path(scratch) / f"attempt-{attempt}"
            outbox.mkdir()
            job = Job(
                entry=entry,
                arguments=arguments,
                outbox=outbox,
                directory=directory,
                attempt=attempt,
                threads=threads_for(processes, threads),
                environment=dict(os.environ),
                emulated=emulated,
            )
            before = newest()
            ending = run_attempt(
                job,
                processes,
                shutdown_seconds=shutdown_seconds,
                monitor_seconds=monitor_seconds,
            )
            history.append(
                AttemptFacts(
                    attempt=attempt,
                    records=ending.records,
                    deaths=ending.deaths,
                    progress_before=before,
                    progress_after=newest(),
                    stop=ending.stop,
                )
            )
            finished = _judge(history, ending, policy or RestartPolicy())
            if finished is not None:
                return finished
            if on_restart is not None:
                on_restart(attempt + 1, explain_deaths(history[-1]))


def _judge(
    history: list[AttemptFacts], ending: Ending, policy: RestartPolicy
) -> LaunchResult | None:
    """The result if the job is over, None for a restart; raises the root cause."""
    attempts = len(history)
    if not ending.silent and not ending.records:
        return LaunchResult(results=ending.results, stopped_by=ending.stop, attempts=attempts)
    decision = policy.decide(history)
    if isinstance(decision, Restart):
        return None
    if decision.error is not None:
        raise decision.error
    return LaunchResult(
        results=ending.results,
        stopped_by=ending.stop,
        attempts=attempts,
        killed=ending.silent,
    )


def newest_checkpoint(directory: Path | None) -> int:
    """The step of the newest committed checkpoint of a run directory; -1: none."""
    if directory is None or not (directory / "checkpoints").is_dir():
        return -1
    names = (_CHECKPOINT.fullmatch(p.name) for p in (directory / "checkpoints").iterdir())
    return max((int(match.group(1)) for match in names if match), default=-1)
