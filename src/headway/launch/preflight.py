"""Checks before any process is started, and the number of threads per process."""

from __future__ import annotations

from headway.cluster.local_machine import cores
from headway.errors import UsageError
from headway.run.distributed.launch_env import LaunchEnv, user_threads

MAX_PROCESSES = 4096
"""On one machine; each takes some 100 MB."""


def check_processes(processes: int) -> tuple[str, ...]:
    """Check the number of processes for this machine.

    Returns:
        Warnings, each one sentence.

    Raises:
        UsageError: Fewer than one process, or more than a machine can hold.
    """
    if not 1 <= processes <= MAX_PROCESSES:
        raise UsageError(
            f"cannot start {processes} processes",
            where="--processes",
            fix=f"Give at least 1 and at most {MAX_PROCESSES}.",
        )
    available = cores()
    if processes <= available:
        return ()
    return (
        f"{processes} processes share {available} CPU cores: they will wait for each other; "
        f"on CPUs use --processes {available} or fewer",
    )


def check_world(place: LaunchEnv, processes: int | None) -> None:
    """Refuse another number of processes than the world has that a launcher has made.

    Raises:
        UsageError: With both numbers.
    """
    if processes not in (None, place.ranks):
        raise UsageError(
            f"--processes {processes} contradicts the {place.ranks} that {place.launcher} "
            "has started",
            fix="Leave --processes out: the launcher decides.",
        )


def threads_for(processes: int, threads: int | None = None) -> int:
    """Threads of each process: as given, else the user's OMP_NUM_THREADS, else a fair share."""
    return threads or user_threads() or max(1, cores() // max(1, processes))
