"""Training in worker processes of this machine, which read the samples from memory-mapped files.

Each worker maps the files and copies its own stretch of rows. States go to disk now and then:
after the death of a worker all are started again and go on from the newest one, as long as each
restart brings a newer one (`launch.restart_policy`).
"""

from __future__ import annotations

import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from headway.errors import RunError
from headway.launch.local import LaunchResult, launch_local
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.training.stop_request import StopRequest
from headway.svm.arrays import Array, Indices, Matrix
from headway.svm.kernels import Kernel
from headway.svm.machine import Machine
from headway.svm.peers import Peers
from headway.svm.progress_line import ProgressLine
from headway.svm.state_files import StateFiles
from headway.svm.training import TrainingOptions, TrainingState, train_machine


class RestartWarning(UserWarning):
    """A worker was killed, and the training goes on from its last state."""


@dataclass(frozen=True)
class _Task:
    """What a worker is told.

    Attributes:
        folder: With the samples.
        trained: Labels of the classes and `TrainingOptions`, pickled by value: a kernel may be a
            function that workers cannot import.
        files: Where states are written.
    """

    folder: Path
    trained: bytes
    files: StateFiles
    verbose: bool


@dataclass(frozen=True)
class WorkersResult:
    """What workers have trained.

    Attributes:
        state: Of an unfinished machine, to go on from.
    """

    machine: Machine
    state: TrainingState | None


def train_in_workers(
    rows: Matrix,
    codes: Indices,
    factors: Array,
    classes: NDArray[Any],
    options: TrainingOptions,
    *,
    processes: int,
    files: StateFiles | None,
    resume: TrainingState | None = None,
    verbose: bool = False,
) -> WorkersResult:
    """Train in `processes` workers; see `train_machine`.

    Args:
        files: Where states are kept; None: in a temporary folder, for restarts alone.
        verbose: Whether the first worker writes a line about progress to standard error.

    Raises:
        HeadwayError: A worker has failed, or workers were killed again and again.
    """
    with tempfile.TemporaryDirectory(
        # Where the process that workers are forked from removes it if this one is killed.
        prefix="headway-svm-",
        dir=get_temp_dir(),
        ignore_cleanup_errors=True,
    ) as scratch:
        folder = Path(scratch)
        trained = cloudpickle.dumps((classes, options))
        task = _Task(folder, trained, files or StateFiles(folder / "run"), verbose)
        task.files.run.mkdir(parents=True, exist_ok=True)
        if resume is not None and task.files.newest() is None:
            task.files.write(resume)
        _write_samples(folder, rows, codes, factors)
        launched = launch_local(
            f"{__name__}:train_in_worker",
            (task,),
            processes=processes,
            directory=task.files.run,
            preload=(__name__,),
            on_restart=_tell_restart,
        )
        return _result(launched, options.kernel)


def _tell_restart(_: int, reason: str) -> None:
    warnings.warn(
        f"{reason}: the workers are started again, and go on from the last state",
        RestartWarning,
        stacklevel=4,
    )


def _result(launched: LaunchResult, kernel: Kernel) -> WorkersResult:
    found = launched.results[0]
    if found is None:
        raise RunError(
            "the workers were stopped before they could return a machine",
            why=f"{launched.stopped_by or 'A signal'} came, and they did not end in time.",
            fix="Fit again; with directory=... it goes on from the last state.",
        )
    machine, state = found
    return WorkersResult(replace(machine, kernel=kernel), state)


def _write_samples(folder: Path, rows: Matrix, codes: Indices, factors: Array) -> None:
    arrays = {"codes": codes, "factors": factors}
    if sparse.issparse(rows):
        arrays |= {"values": rows.data, "columns": rows.indices, "ends": rows.indptr}
        (folder / "width").write_text(str(rows.shape[1]))
    else:
        arrays["rows"] = rows
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def _read_samples(folder: Path, place: LaunchEnv) -> tuple[Matrix, Indices, Array]:
    """The stretch of rows of this rank, copied; nothing else of the files is read."""

    def mapped(name: str) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode="r")

    total = len(mapped("codes"))
    first, last = (total * rank // place.ranks for rank in (place.rank, place.rank + 1))
    codes, factors = (np.array(mapped(name)[first:last]) for name in ("codes", "factors"))
    if (folder / "rows.npy").exists():
        return np.array(mapped("rows")[first:last]), codes, factors
    ends = np.array(mapped("ends")[first : last + 1])
    values, columns = (np.array(mapped(name)[ends[0] : ends[-1]]) for name in ("values", "columns"))
    width = int((folder / "width").read_text())
    rows = sparse.csr_matrix((values, columns, ends - ends[0]), shape=(last - first, width))
    return rows, codes, factors


def train_in_worker(place: LaunchEnv, task: _Task) -> tuple[Machine, TrainingState | None] | None:
    """What every worker does; the first one returns the machine."""
    classes, options = cloudpickle.loads(task.trained)
    rows, codes, factors = _read_samples(task.folder, place)
    states: list[TrainingState] = []
    with ExitStack() as stack:
        request = stack.enter_context(StopRequest())
        world = stack.enter_context(World.join(place))
        # Until all have taken what it has put last, a worker must not end.
        peers = stack.enter_context(Peers(world))

        def save(state: TrainingState) -> None:
            states[:] = [state]
            if place.rank == 0:
                task.files.write(state)

        machine = train_machine(
            rows, codes, factors, classes, options, peers,
            observe=ProgressLine() if task.verbose and place.rank == 0 else None,
            save=save,
            resume=task.files.newest() if place.rank == 0 else None,
            stop=lambda: request.requested is not None,
        )  # fmt: skip
    if place.rank:
        return None
    # The way back is plain pickle, which a function may not be able to go.
    kernel = replace(machine.kernel, function=None)
    return replace(machine, kernel=kernel), None if machine.finished else states[-1]
