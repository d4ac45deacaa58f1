"""What each rank of `headway train svm` does: read, train, write the machine, test.

A restart is a start that finds a state; a signal to stop ends the training in order: its state and
the machine so far are written, and all that is told of it says that it is unfinished.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.errors import CheckpointMismatch, DataError, UsageError, os_reason, shown_path
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.training.run_directory import RunDirectory, describe_environment
from headway.run.training.stop_request import StopRequest
from headway.svm.arrays import Array, Indices
from headway.svm.elimination import find_rule
from headway.svm.kernels import Kernel, KernelName
from headway.svm.machine import Machine
from headway.svm.model_files import save_machine
from headway.svm.peers import Peers
from headway.svm.run.job import MachineJob, MachineOutcome
from headway.svm.run.journal import MachineJournal
from headway.svm.run.libsvm_data import LabelledRows, count_columns, load_rows
from headway.svm.state_files import StateFiles
from headway.svm.training import (
    TrainingOptions,
    TrainingState,
    digest_training,
    pack_state,
    train_machine,
)


def train_rank(place: LaunchEnv, job: MachineJob) -> MachineOutcome:
    """Train as one rank of the world found at `place`.

    Raises:
        HeadwayError: Of the data, the disk, or another rank.
    """
    with ExitStack() as stack:
        world = stack.enter_context(
            World.join(
                place,
                timeout_seconds=job.timeout_seconds,
                patience_seconds=job.patience_seconds,
            )
        )
        stop = stack.enter_context(StopRequest())
        training = _RankTraining(world, job, stop, stack)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")
        # Of rank 0; what all ranks say is said once.
        warnings.showwarning = training.warn
        return training.run()


class _RankTraining:
    """The training of one rank; `run` is its whole life."""

    def __init__(self, world: World, job: MachineJob, stop: StopRequest, stack: ExitStack) -> None:
        self._world, self._job, self._stop = world, job, stop
        self._peers = stack.enter_context(Peers(world))
        self._directory = RunDirectory(job.directory)
        self._files = StateFiles(job.directory)
        self._open()
        self._journal = MachineJournal(
            self._directory, rank=world.rank, attempt=world.place.attempt, stack=stack
        )

    def run(self) -> MachineOutcome:
        """Read, train, write the machine, test."""
        job, peers, journal = self._job, self._peers, self._journal
        self._world.doing("reads %s", job.data)
        width = 0 if job.test is None else count_columns(job.test, peers)
        data = load_rows(job.data, peers, columns=width)
        classes = _classes(data, peers)
        options = self._options(data.rows.shape[1], classes)
        codes, factors = np.searchsorted(classes, data.labels), np.ones(len(data.labels))
        known = self._known_state(data, codes, factors, options)
        self._announce(data, classes, known)
        self._world.doing("trains a support vector machine")
        machine = train_machine(
            data.rows, codes, factors, classes, options, peers,
            observe=journal.progress,
            save=self._save,
            resume=known,
            stop=lambda: self._stop.requested is not None,
        )  # fmt: skip
        width = data.rows.shape[1]
        del data
        if self._world.rank == 0:
            self._write(machine)
        accuracy = self._test(machine, width)
        return self._finish(machine, accuracy)

    def warn(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Takes the place of `warnings.showwarning`: an event of the run."""
        self._journal.event("warning", text=str(message))

    def _open(self) -> None:
        job, world = self._job, self._world
        first = world.place.attempt == 0 or job.resume
        if world.rank == 0 and (first or not self._directory.recipe_file.exists()):
            self._directory.check_free(resume=job.resume)
            self._directory.describe(
                {"name": self._directory.path.resolve().name, **_told(job)},
                None,
                describe_environment(
                    torch_version=torch.__version__, device="cpu", backend=world.backend
                ),
            )
        world.barrier("opening the run directory")
        if not self._directory.recipe_file.exists():
            raise UsageError(
                "the ranks do not see the same run directory",
                where=f"rank {world.rank}, {self._directory.path.absolute()}",
                fix="Give a --directory on a file system that all machines share.",
            )

    def _options(self, columns: int, classes: Indices) -> TrainingOptions:
        job = self._job
        strangers = [f"{label:g}" for label in job.weights if label not in classes]
        if strangers:
            raise UsageError(
                f"there is no class {', '.join(strangers)}",
                why=f"The classes are {', '.join(map(str, classes))}.",
                fix="Correct --weights.",
            )
        gamma = job.gamma if job.gamma is not None else 1 / max(columns, 1)
        name: KernelName = job.kernel  # type: ignore[assignment]  # checked by `MachineJob`
        return TrainingOptions(
            kernel=Kernel(name, gamma=gamma, degree=job.degree, coef0=job.coef0),
            C=job.C,
            class_factors=tuple(job.weights.get(label, 1.0) for label in classes.tolist()),
            tolerance=job.tolerance,
            working_set=job.working_set,
            rule=find_rule(job.rule),
            most_steps=job.most_steps,
        )

    def _known_state(
        self, data: LabelledRows, codes: Indices, factors: Array, options: TrainingOptions
    ) -> TrainingState | None:
        """The newest state of the run; collective.

        Raises:
            CheckpointMismatch: It is of other data, or of another kernel or C.
        """
        known = self._files.newest()
        # All or none, whatever a rank sees of a disk that is shared.
        if not self._peers.gather(np.array([float(known is not None)]), "the state").all():
            return None
        assert known is not None
        if known.digest != digest_training(data.rows, codes, factors, options, self._peers):
            raise CheckpointMismatch(
                "the run's state is of other samples, or of another kernel, C or weights",
                where=str(self._directory.path),
                fix="Give the same, or begin anew in another --directory.",
            )
        return known

    def _announce(
        self, data: LabelledRows, classes: NDArray[np.int64], known: TrainingState | None
    ) -> None:
        journal, world = self._journal, self._world
        shown = ", ".join(map(str, classes[:4])) + (", ..." if len(classes) > 4 else "")
        kind = "dense" if isinstance(data.rows, np.ndarray) else "compressed rows"
        journal.event(
            "start",
            ranks=world.ranks,
            text=f"{data.total:,} samples x {data.rows.shape[1]:,} columns ({kind}), "
            f"{len(classes)} classes ({shown}), {world.ranks} "
            f"{'rank' if world.ranks == 1 else 'ranks'}",
            samples=data.total,
        )
        if known is not None:
            journal.step = known.outer
            journal.event("resume", ranks=world.ranks)

    def _save(self, state: TrainingState) -> None:
        if self._world.rank:
            return
        began = perf_counter()
        self._files.write(state)
        self._journal.event(
            "checkpoint", bytes=pack_state(state).nbytes, held_seconds=perf_counter() - began
        )

    def _write(self, machine: Machine) -> None:
        path = self._job.model
        try:
            save_machine(machine, path)
        except OSError as error:
            raise UsageError(
                f"the machine cannot be written: {os_reason(error, path)}",
                where=shown_path(path),
                fix="Name another file with --out, and go on with --resume.",
            ) from None

    def _test(self, machine: Machine, width: int) -> float | None:
        """The share of test samples that are predicted rightly; collective."""
        if self._job.test is None or self._stop.requested is not None:
            return None
        self._world.doing("tests the machine")
        data = load_rows(self._job.test, self._peers, columns=width)
        right = machine.classes[machine.predict(data.rows)] == data.labels
        counts = self._peers.sum(np.array([right.sum(), len(right)], dtype=float), "the test")
        return float(counts[0] / counts[1]) if counts[1] else None

    def _finish(self, machine: Machine, accuracy: float | None) -> MachineOutcome:
        journal, job = self._journal, self._job
        peaks = self._peers.gather(np.array([float(_peak_bytes())]), "the end")[:, 0]
        # Of one rank alone a signal may have come after all had finished.
        stopped_by = None if machine.finished else self._stop.requested
        bound = 0.0 if job.memory is None else job.memory.at_most(len(machine.numbers))
        outcome = MachineOutcome(
            step=journal.step,
            finished=machine.finished,
            classes=tuple(machine.classes.tolist()),
            support=tuple(machine.counts.tolist()),
            violation=float(machine.violation),
            objective=machine.objective,
            steps=machine.steps,
            values=machine.values,
            accuracy=accuracy,
            peak_bytes=int(peaks.max()),
            bound_bytes=bound,
            stopped_by=stopped_by,
        )
        journal.facts(machine)
        journal.event(
            "svm_end",
            finished=machine.finished,
            support=len(machine.numbers),
            violation=outcome.violation,
            objective=outcome.objective,
            values=outcome.values,
            accuracy=accuracy,
            peak_bytes=outcome.peak_bytes,
            bound_bytes=bound,
        )
        journal.event("stop", reason=stopped_by or "complete")
        return outcome


def _classes(data: LabelledRows, peers: Peers) -> NDArray[np.int64]:
    """The labels of all ranks in sorted order; collective.

    Raises:
        DataError: A label is no whole number, or there are fewer than two.
    """
    found = np.unique(np.concatenate(peers.gather_arrays(np.unique(data.labels), "the labels")))
    broken = found[(found != np.floor(found)) | (np.abs(found) > 2**31)]
    if len(broken):
        raise DataError(
            f"the label {broken[0]:g} is no whole number",
            why="Labels name classes; libsvm's files have whole numbers for them.",
            fix="Number the classes.",
        )
    if len(found) < 2:
        said = f"is one class only, {found[0]:g}" if len(found) else "are no samples"
        raise DataError(f"there {said}", fix="Give samples of at least two classes.")
    return found.astype(np.int64)


def _told(job: MachineJob) -> dict[str, str]:
    """What recipe.json says: all that is asked for."""
    told = {
        "data": job.data, "test": job.test, "kernel": job.kernel, "C": job.C, "gamma": job.gamma,
        "degree": job.degree, "coef0": job.coef0, "tolerance": job.tolerance,
        "weights": " ".join(f"{label:g}={weight:g}" for label, weight in job.weights.items()),
        "elimination": job.rule, "working_set": job.working_set, "max_steps": job.most_steps,
        "machine": job.model,
    }  # fmt: skip
    return {name: str(value) for name, value in told.items() if value not in (None, "")}


def _peak_bytes() -> int:
    """Largest memory of this process so far; 0 where the system does not say it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    # Not getrusage, which counts that of the process that this one was started by.
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
