"""`headway train svm FILE`: workers here, or a world of another launcher.

What each process does is `rank_training.py`. A run has a run directory as any other training has:
events, states in `checkpoints/`, and the machine.
"""

from __future__ import annotations

import logging
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from headway.cost.support_vectors import RankMemory, SampleSet, rank_memory
from headway.errors import HeadwayError
from headway.launch.forkserver import start_forkserver
from headway.launch.local import launch_local
from headway.launch.preflight import check_processes, check_world
from headway.launch.restart_policy import RESTARTS, RestartPolicy
from headway.launch.worker import run_rank_here
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.training.run_directory import RunDirectory, choose_directory
from headway.svm.run.job import MachineJob, MachineOutcome
from headway.svm.run.libsvm_data import data_sizes, is_dense
from headway.units import format_bytes

_LOG = logging.getLogger("headway")
_ENTRY = "headway.svm.run.rank_training"
"""Imported by workers alone."""


@dataclass(frozen=True, kw_only=True)
class MachineResult:
    """What `train_file` returns.

    Attributes:
        model: The file of the machine.
        outcome: None: every rank was killed before it could say it.
        stopped_by: Name of the signal that stopped the run, or None.
        attempts: How often workers were started.
    """

    directory: Path
    model: Path
    outcome: MachineOutcome | None
    stopped_by: str | None
    attempts: int = 1


class MachineObserver(Protocol):
    """Follows a run while it lasts; see `headway.api.training.TrainingObserver`."""

    def watch(self, directory: Path, *, launched: bool) -> AbstractContextManager[object]: ...

    def restarted(self, attempt: int, cause: str) -> None: ...

    def failed(self, error: HeadwayError) -> None: ...


def train_file(
    job: MachineJob,
    *,
    processes: int | None = None,
    directory: Path | None = None,
    restarts: int = RESTARTS,
    observer: MachineObserver | None = None,
) -> MachineResult:
    """Train a machine on a file, on one process or many, here or in a world that exists already.

    Args:
        processes: Local ones; None: 1.
        directory: The run directory; None: the next free runs/svm-NAME-001.
        restarts: How often dead workers are started again without a new state between.
        observer: Follows the run.

    Raises:
        UsageError: Options that are impossible, or a run directory that is taken.
        DocumentError: A file cannot be read, or has broken lines.
        DataError: There are not two classes.
        RunError: A rank has failed, or was killed again and again.
    """
    place = LaunchEnv.here()
    if place.found_world:
        check_world(place, processes)
        ranks = place.ranks
    else:
        ranks = 1 if processes is None else processes
        check_processes(ranks)
    job.check()
    if not place.found_world:
        start_forkserver(ranks, (_ENTRY,))
    memory = None
    if place.rank == 0:
        # Before anything is made for the run: the file may be misspelt, or a machine too small.
        memory = file_memory(job, ranks)
        _LOG.info("%s", memory_words(memory))
    path = choose_directory(_name(job.data), directory, place, resume=job.resume)
    job = replace(job, directory=path, memory=memory)
    if place.found_world:
        return _train_as_rank(place, job, observer)
    return _launch(job, ranks, restarts, observer)


def _name(data: Path) -> str:
    """Of the run, from that of the file: svm-letter of letter.svm.gz."""
    return "svm-" + re.sub(r"[^A-Za-z0-9_-]", "-", data.name.split(".")[0] or "data")


def file_memory(job: MachineJob, ranks: int) -> RankMemory:
    """What the rank that reads most of the files needs at most.

    Raises:
        DocumentError: A file cannot be read.
    """
    sizes = data_sizes(job.data, ranks)
    others = [] if job.test is None else data_sizes(job.test, ranks)
    total, entries = sum(size.rows for size in sizes), sum(size.entries for size in sizes)
    width = max(size.columns for size in (*sizes, *others))
    most = max(sizes, key=lambda size: size.rows + size.entries)
    dense = is_dense(total, width, entries)
    described = SampleSet(
        rows=total,
        columns=width,
        nonzeros=None if dense else most.entries / max(most.rows, 1),
        classes=len({label for size in sizes for label in size.labels}),
    )
    rows = max(size.rows for size in sizes) if dense else most.rows
    memory = rank_memory(described, ranks, working_set=job.working_set, rows=rows)
    if not others:
        return memory
    tested = max(size.rows for size in others) * described.row_bytes
    return replace(memory, parts={**memory.parts, "test samples": tested})


def memory_words(memory: RankMemory) -> str:
    """The bound as a sentence."""
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    return (
        f"memory per rank: at most {format_bytes(memory.at_most(0))}, and "
        f"{format_bytes(memory.per_support)} for each support vector; most of it: {largest}"
    )


def _train_as_rank(
    place: LaunchEnv, job: MachineJob, observer: MachineObserver | None
) -> MachineResult:
    """Train as one rank of the world that another launcher has made; rank 0 is observed."""
    from headway.svm.run.rank_training import train_rank

    def tell(error: HeadwayError) -> None:
        # The process ends at once after this.
        _LOG.error("%s %s", error.code, error) if observer is None else observer.failed(error)

    watched = place.rank == 0 and observer is not None
    with observer.watch(job.directory, launched=False) if observer and watched else nullcontext():
        outcome = run_rank_here(train_rank, (job,), place=place, directory=job.directory, tell=tell)
    return MachineResult(
        directory=job.directory, model=job.model, outcome=outcome, stopped_by=outcome.stopped_by
    )


def _launch(
    job: MachineJob, ranks: int, restarts: int, observer: MachineObserver | None
) -> MachineResult:
    """Train in local workers of our own."""
    first = RunDirectory(job.directory).next_attempt if job.resume else 0
    with observer.watch(job.directory, launched=True) if observer else nullcontext():
        result = launch_local(
            f"{_ENTRY}:train_rank",
            (job,),
            processes=ranks,
            directory=job.directory,
            policy=RestartPolicy(limit=restarts),
            preload=(_ENTRY,),
            first_attempt=first,
            on_restart=None if observer is None else observer.restarted,
            stopped_seconds=2 * job.patience_seconds or None,
        )
    if result.killed:
        names = ", ".join(map(str, result.killed))
        warnings.warn(f"ranks {names} did not stop in time and were killed", stacklevel=2)
    outcome = next((value for value in result.results if value is not None), None)
    return MachineResult(
        directory=job.directory,
        model=job.model,
        outcome=outcome,
        stopped_by=result.stopped_by or (outcome.stopped_by if outcome else None),
        attempts=result.attempts,
    )
