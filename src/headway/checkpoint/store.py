"""Asynchronous checkpoints: saved while training continues, restored from the newest whole one.

`save` pauses training only for the copy of this rank's part into host memory; planning, writing,
checksums, fsync and the commit happen on a background thread. A failure there is never silent: the
next `save`, `check` or `wait` raises it.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from headway.channel.facts import gather_facts
from headway.checkpoint.directory import (
    check_file,
    committed_steps,
    partial_path,
    read_manifest,
    remove_leftovers,
    step_path,
)
from headway.checkpoint.format import Manifest, decode_facts, encode_facts
from headway.checkpoint.save_plan import Holdings, SavePiece, partition_writes
from headway.checkpoint.staging import StagingBuffer, specs_of, staged_bytes
from headway.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch

T = TypeVar("T")


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used and an older one was taken."""


@dataclass(frozen=True, kw_only=True)
class SaveReceipt:
    """What a save cost.

    Attributes:
        bytes: Bytes of all tensors of the checkpoint, over all ranks.
        held_seconds: How long training paused, the wait for an earlier save included.
    """

    step: int
    bytes: int
    held_seconds: float


class CheckpointStore:
    """The checkpoints of one run, in one directory that all ranks see.

    Args:
        directory: Holds one folder per checkpoint; made when it is needed.
        rank: This process's rank in `group`.
        group: A Gloo group of all of them that nothing else uses, because its collectives run on
            a background thread. None where `ranks` is 1; torch.distributed is not needed then.
        keep: How many checkpoints stay on disk.
        late: Begin to write a checkpoint only once a later step has been made, or it is waited for:
            what training changes meanwhile must not be in it.

    Attributes:
        pinned: Steps of checkpoints that stay, beside the newest `keep`.
        skipped: Step -> why it could not be used, of what the last `restore` found damaged.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        ranks: int,
        group: ProcessGroup | None,
        keep: int = 2,
        late: bool = False,
    ) -> None:
        if keep < 1 or (ranks > 1 and group is None):
            raise ValueError(f"keep={keep} must be positive; {ranks} ranks need a group")
        self.directory = directory
        self.rank = rank
        self.ranks = ranks
        self.keep = keep
        self.pinned: frozenset[int] = frozenset()
        self.skipped: dict[int, str] = {}
        self._group = group if ranks > 1 else None
        self._staging = StagingBuffer()
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._late, self._checks, self._due = late, 0, threading.Event()

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, oldest first."""
        return committed_steps(self.directory)

    def reserve(self, tensors: Mapping[str, Tensor], holdings: Holdings | None = None) -> None:
        """Get ready in the background, so that the first save is short: memory and imports.

        Not collective; optional. The arguments are what `save` will be given, or have its shapes.
        """
        self.wait()
        everything = self._all(tensors, holdings)
        size = staged_bytes(partition_writes(everything, self.ranks)[self.rank], tensors)
        pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())

        def prepare() -> None:
            self._staging.reserve(size, pinned=pinned)
            from headway.checkpoint import storage  # noqa: F401

        self._start(prepare, "reserving host memory")

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        holdings: Holdings | None = None,
    ) -> SaveReceipt:
        """Save a checkpoint; returns when training may change the tensors again.

        Collective: all ranks give the same step, facts and holdings.

        Args:
            tensors: Logical name -> tensor; the same on every rank that has it.
            facts: Plain values; rank 0's are written.
            holdings: Which ranks have which tensors; None: all have all. The caller agrees on it,
                because `group` may still belong to the save before.

        Raises:
            CheckpointError: An earlier save failed (this one is not begun then), or a tensor or
                fact cannot be stored.
        """
        began = time.perf_counter()
        # The staging buffer and the group still belong to the save before.
        self.wait()
        snapshot = decode_facts(encode_facts(dict(facts)))  # training may change the facts too
        manifest = Manifest(step=step, facts=snapshot, tensors={}, files={})
        # Every rank computes the same partition without communication.
        everything = self._all(tensors, holdings)
        pieces = partition_writes(everything, self.ranks)
        staged = self._staging.copy(pieces[self.rank], tensors)
        self._checks = 0
        if self._late:
            self._due.clear()
        else:
            self._due.set()
        pinned = self.pinned
        self._start(lambda: self._write(manifest, pieces, staged, pinned), f"step {step}")
        held = time.perf_counter() - began
        return SaveReceipt(step=step, bytes=everything.bytes, held_seconds=held)

    def _all(self, tensors: Mapping[str, Tensor], holdings: Holdings | None) -> Holdings:
        return holdings or Holdings.everywhere(specs_of(tensors), self.ranks)

    def _start(self, work: Callable[[], None], task: str) -> None:
        """Run `work` on a daemon thread: waiting for a lost peer must not block the exit."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = self._explain(error, task)

        self._thread = threading.Thread(target=run, name="headway-checkpoint", daemon=True)
        self._thread.start()

    def _write(
        self,
        manifest: Manifest,
        pieces: Sequence[tuple[SavePiece, ...]],
        staged: Mapping[str, Tensor],
        pinned: frozenset[int],
    ) -> None:
        # Imported here because it costs 0.7 to 1.5 s once: training goes on meanwhile.
        from headway.checkpoint import storage

        self._due.wait()
        try:
            storage.save(
                self.directory,
                manifest,
                pieces,
                staged,
                rank=self.rank,
                group=self._group,
                explain=lambda error: self._explain(error, f"step {manifest.step}"),
                keep=self.keep,
                damaged=list(self.skipped),
                pinned=pinned,
            )
        except BaseException:
            if self.rank == 0:  # a full disk needs the space now, not at the next save
                shutil.rmtree(partial_path(self.directory, manifest.step), ignore_errors=True)
            raise

    def check(self) -> None:
        """Raise the failure of a save that has ended, before each step; never waits.

        Raises:
            CheckpointError: A save failed; raised once.
        """
        self._checks += 1
        if self._checks > 1:  # called before each step: one has been made since the save
            self._due.set()
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the save that is under way has been committed.

        Raises:
            CheckpointError: It failed; raised once.
        """
        self._due.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, *, wait: bool = True) -> None:
        """Wait for the save that is under way, and give the memory back.

        Args:
            wait: False leaves an unfinished save behind, for a job that stops because of an error:
                its peers may never answer. Nothing that it leaves counts as a checkpoint.

        Raises:
            CheckpointError: A save failed, and no call has raised that yet.
        """
        if not wait:
            self._thread = None
            self._failure = None
        try:
            self.wait()
        finally:
            # A save that is left behind still holds its views: only this reference goes.
            self._staging.release()

    def of(self, directory: Path) -> CheckpointStore:
        """The same ranks' store of another run, to read from."""
        return CheckpointStore(directory, rank=self.rank, ranks=self.ranks, group=self._group)

    def restore(
        self, prepare: Callable[[Manifest], dict[str, Tensor]], *, only: int | None = None
    ) -> Manifest | None:
        """Fill tensors from the newest checkpoint whose files are what its manifest says.

        Collective. The ranks share the checking of the files and agree on the verdict.

        Args:
            prepare: Gets the manifest and returns the tensors to fill in place, by logical name:
                all of the checkpoint's or some of them.
            only: Use the checkpoint of this step, and no other; nothing is tidied up.

        Returns:
            The manifest; None where there is no checkpoint at all.

        Raises:
            CheckpointDamaged: There are checkpoints and none is sound.
            CheckpointMismatch: `prepare` asks for tensors that the checkpoint does not hold, or
                for other shapes or element types.
            CheckpointError: Reading failed.
        """
        self.wait()
        # A run that is complete makes no other save, which would do it.
        if self.rank == 0 and only is None:
            remove_leftovers(self.directory)
        self.skipped = {}
        # Rank 0's list: the others may see a shared directory later, and must read the same one.
        for step in reversed(self._agree(self.steps())[0]):
            if only not in (None, step):
                continue
            path = step_path(self.directory, step)
            manifest, problem = self._inspect(path)
            # One rank's problem is enough; all take the same next checkpoint.
            problem = next(filter(None, self._agree(problem)), "")
            if manifest is not None and not problem:
                self._load(path, manifest, prepare(manifest))
                return manifest
            self._skip(step, problem)
        if self.skipped:
            raise CheckpointDamaged(
                f"none of {len(self.skipped)} checkpoints can be used",
                where=str(self.directory),
                why="\n  ".join(f"step {step}: {reason}" for step, reason in self.skipped.items()),
                fix="copy a sound checkpoint back, or start in a new run directory",
            )
        return None

    def _inspect(self, path: Path) -> tuple[Manifest | None, str]:
        """The manifest and what is wrong; every rank checks every `ranks`-th file."""
        try:
            manifest = read_manifest(path)
            for name in sorted(manifest.files)[self.rank :: self.ranks]:
                check_file(path / name, manifest.files[name])
        except CheckpointError as error:
            return None, " ".join(str(error).split())
        return manifest, ""

    def _skip(self, step: int, reason: str) -> None:
        self.skipped[step] = reason
        if self.rank == 0:
            warnings.warn(
                f"checkpoint of step {step} is not used, the one before it is: {reason}",
                CheckpointWarning,
                stacklevel=3,
            )

    def _load(self, path: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        from headway.checkpoint import storage

        check_match(tensors, manifest, str(path), complete=False)
        storage.load(
            path,
            manifest,
            tensors,
            group=self._group,
            explain=lambda error: self._explain(error, f"restoring step {manifest.step}"),
        )

    def _explain(self, error: BaseException, task: str) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        place = f"rank {self.rank}, {self.directory}" if self._group else str(self.directory)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            why, fix = f"the disk is full ({error})", "free some space, or keep fewer checkpoints"
        else:
            why, fix = f"{type(error).__name__}: {error}", "earlier checkpoints are untouched"
        explained = CheckpointError(f"checkpointing failed ({task})", where=place, why=why, fix=fix)
        explained.__cause__ = error
        return explained

    def _agree(self, value: T) -> list[T]:
        if self._group is None:
            return [value]
        return gather_facts(value, self._group)


def check_match(
    tensors: Mapping[str, Tensor], manifest: Manifest, where: str, *, complete: bool
) -> None:
    """Check that a checkpoint holds tensors of these names, shapes and element types.

    Args:
        complete: `tensors` must have every tensor of the checkpoint.

    Raises:
        CheckpointMismatch: Lists the differences.
    """
    problems = []
    for name, tensor in tensors.items():
        entry = manifest.tensors.get(name)
        here = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if entry is None:
            problems.append(f"missing in the checkpoint: {name}")
        elif (saved := f"{entry.dtype} {list(entry.shape)}") != here:
            problems.append(f"{name}: saved {saved}, here {here}")
    if complete:
        problems += [f"unknown to the model: {n}" for n in manifest.tensors if n not in tensors]
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise CheckpointMismatch(
            f"the checkpoint of step {manifest.step} is of another model or optimiser",
            where=where,
            why="\n  ".join([*problems[:8], *more]),
            fix="Resume with the recipe that was saved, or use a new run directory.",
        )
