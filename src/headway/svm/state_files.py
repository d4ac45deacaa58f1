"""What a training has reached, on disk: checkpoints with the multipliers that are not zero.

Each training has a folder of its own in the directory, named by its digest, so that a search over
parameters can share one directory. Committed checkpoints are the measure of progress by which a
launcher decides whether to restart killed workers.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.checkpoint.directory import (
    begin,
    check_file,
    commit,
    committed_steps,
    read_manifest,
    retain,
    step_path,
    write_file,
)
from headway.checkpoint.format import Manifest, StoredChunk, TensorEntry
from headway.errors import CheckpointError
from headway.run.training.run_directory import RunDirectory
from headway.svm.training import TrainingState, pack_state, unpack_state

_FILE = "multipliers.bin"
_KEPT = 2


@dataclass(frozen=True)
class StateFiles:
    """The states of one training, in a directory of trainings.

    Attributes:
        run: Folder of this training; `checkpoints/` in it has the states.
    """

    run: Path

    @classmethod
    def of(cls, directory: Path | str, digest: int) -> StateFiles:
        """The states of the training with this digest."""
        return cls(Path(directory) / f"fit-{digest:016x}")

    @property
    def _checkpoints(self) -> Path:
        return RunDirectory(self.run).checkpoints

    def newest(self) -> TrainingState | None:
        """The newest state that is sound; None: there is none."""
        for step in reversed(committed_steps(self._checkpoints)):
            folder = step_path(self._checkpoints, step)
            try:
                entry = read_manifest(folder).files[_FILE]
                check_file(folder / _FILE, entry)
            except (CheckpointError, KeyError):
                continue  # the one before is as good a beginning
            return unpack_state(np.fromfile(folder / _FILE, dtype=np.float64))
        return None

    def write(self, state: TrainingState) -> None:
        """Commit a state, and remove those before the last."""
        pack = pack_state(state)
        partial = begin(self._checkpoints, state.outer)
        entry = write_file(partial / _FILE, [memoryview(pack.tobytes())])
        chunk = StoredChunk(offsets=(0,), shape=pack.shape, file=_FILE, start=0, bytes=pack.nbytes)
        commit(
            self._checkpoints,
            Manifest(
                step=state.outer,
                facts={},
                tensors={"state": TensorEntry(dtype="float64", shape=pack.shape, chunks=(chunk,))},
                files={_FILE: entry},
            ),
        )
        retain(self._checkpoints, state.outer, _KEPT)

    def remove(self) -> None:
        """Remove all states of this training: it has finished."""
        shutil.rmtree(self.run, ignore_errors=True)
