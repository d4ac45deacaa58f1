"""The ledger of a sub-volume: which seed is being filled by whom, and what has come of the others.

In the reference implementation objects are filled one after the other, in the order of the seeds,
and an object stays out of those before it. Here processes fill objects at the same time, ahead of
their turn, and the result is the same, bit by bit:

- Objects are *settled*, entered into the volume, in the order of the seeds alone.
- The network sees the image and the object's own mask. All that an object learns of the others is
  which voxels are taken: of its seed, around it, and wherever its field of view has been. A voxel
  that is taken stays so. So an object that was filled ahead of its turn is right if, when its turn
  comes, none of these voxels has been taken in the meantime; otherwise it is filled once more.

Which seeds are filled ahead decides only how much work is in vain. Most seeds end inside the object
of an earlier one, so that of each group of them that the image suggests to be of one body
(`seeds.py`) one is filled at a time, and none while an object reaches into the group. A process
gives up an object that meets one of an earlier seed. And there is a budget: what is filled ahead
in vain is taken from it, and where it is used up no object is begun ahead, and one that is being
filled ahead pauses until its turn, so that processes lend their threads to the object whose turn it
is (`segmentation_worker.py`), which is nearly as good.

All of it is in files of one folder, mapped by every process and changed under a lock, so that a
process may be killed at any moment: what is settled is settled, an object that is filled stays so
until its turn, and what was being filled begins anew. (The files are not flushed: this is for the
death of processes, not of machines.)
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.floodfill.canvas import FilledObject
from headway.floodfill.network import Triple

_FREE, _CLAIMED, _FILLED, _PAUSED = 0, 1, 2, 3
SKIPPED, WEAK, SMALL = 0, -1, -2
"""Outcomes of a seed that has no id: inside an object, too weak, too small."""
WINDOW = 4096
"""Seeds after the first one that is not settled which may be filled ahead."""
_SETTLED, _IN_VAIN, _BUDGET = 0, 1, 2
# Of the budget, for each field of view. Two threads on one object make 1.87 times the fields of
# one (benchmarks/2026-11-floodfill-inference.md), so that filling ahead pays from about four kept
# fields for each one in vain on; what an object earns whose turn it is lets it be tried again.
_LOST, _EARNED_AHEAD, _EARNED = 40, 10, 1
_FIRST_BUDGET, _LARGEST_BUDGET = 50 * _LOST, 200 * _LOST

Box = tuple[slice, ...]


@dataclass(frozen=True)
class LedgerFigures:
    """What has been done in a sub-volume.

    Attributes:
        seeds: How many there are.
        settled: How many of them, the first ones, are settled.
        objects: Kept ones.
        voxels: Of them.
        moves: Fields of view of settled seeds: as many as one process needs.
        in_vain: Further fields of view, of objects that had to be given up.
        under_way: Fields of view of seeds that are not settled yet.
        busy: Seeds that are being filled.
    """

    seeds: int
    settled: int
    objects: int
    voxels: int
    moves: int
    in_vain: int
    under_way: int
    busy: int


def prepare_ledger(
    folder: Path, shape: Triple, seeds: NDArray[np.int32], groups: NDArray[np.int32]
) -> None:
    """Make the files of a sub-volume, once.

    Args:
        groups: [seeds] which body each seed seems to lie in; seeds of 0 are not filled ahead.
    """
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    (aside / "filled").mkdir(parents=True)
    made: dict[str, tuple[Any, Any]] = {
        "segments": (shape, np.int32),
        "owners": (shape, np.int32),
        "status": ((len(seeds),), np.int8),
        "ahead": ((len(seeds),), np.bool_),
        "ids": ((len(seeds),), np.int32),
        "moves": ((len(seeds),), np.int32),
        "voxels": ((len(seeds),), np.int64),
        "counts": ((3,), np.int64),
    }
    for name, (size, kind) in made.items():
        # Of zeros, which a file system keeps as holes.
        array = np.lib.format.open_memmap(aside / f"{name}.npy", "w+", kind, size)
        if name == "counts":
            array[_BUDGET] = _FIRST_BUDGET
        array.flush()
    np.save(aside / "seeds.npy", seeds)
    np.save(aside / "groups.npy", groups)
    (aside / "lock").touch()
    aside.rename(folder)


def settled_seeds(folder: Path) -> int:
    """How many seeds of a ledger are settled."""
    return int(np.load(folder / "counts.npy", mmap_mode="r")[_SETTLED])


def release_claims(folder: Path) -> None:
    """Let the seeds go whose processes have ended; nobody may work on them."""
    status, owners, moves = (
        np.lib.format.open_memmap(folder / f"{name}.npy", "r+")
        for name in ("status", "owners", "moves")
    )
    if status.any():
        held = np.isin(status, (_CLAIMED, _PAUSED))
        moves[held] = 0
        status[held] = _FREE
        owners[:] = 0
    for left in (folder / "filled").glob("*.part.npz"):
        left.unlink()


class SeedLedger:
    """A process's access to the ledger.

    Args:
        distance: No seed is tried within this distance of an object.
        min_size: Objects with fewer voxels are dropped.
    """

    def __init__(self, folder: Path, *, distance: Triple, min_size: int) -> None:
        self._folder, self._distance, self._min_size = folder, distance, min_size
        self.seeds, self._groups = np.load(folder / "seeds.npy"), np.load(folder / "groups.npy")
        self.segments = self._mapped("segments")
        self._owners, self._status = self._mapped("owners"), self._mapped("status")
        self._ids, self._moves = self._mapped("ids"), self._mapped("moves")
        self._ahead = self._mapped("ahead")
        self._voxels, self._counts = self._mapped("voxels"), self._mapped("counts")

    def _mapped(self, name: str) -> NDArray[Any]:
        path = self._folder / f"{name}.npy"
        return np.lib.format.open_memmap(path, "r+")

    def figures(self) -> LedgerFigures:
        """As of now."""
        settled = self.settled
        kept = self._ids[:settled] > 0
        return LedgerFigures(
            seeds=len(self.seeds),
            settled=settled,
            objects=int(np.count_nonzero(kept)),
            voxels=int(self._voxels[:settled][kept].sum()),
            moves=int(self._moves[:settled].sum(dtype=np.int64)),
            in_vain=int(self._counts[_IN_VAIN]),
            under_way=int(self._moves[settled:].sum(dtype=np.int64)),
            busy=self.busy,
        )

    @property
    def settled(self) -> int:
        """How many seeds are settled: the index of the one whose turn it is."""
        return int(self._counts[_SETTLED])

    @property
    def busy(self) -> int:
        """How many seeds are being filled."""
        first = self.settled
        return int(np.count_nonzero(self._status[first : first + WINDOW] == _CLAIMED))

    @property
    def finished(self) -> bool:
        """Whether every seed is settled."""
        return self.settled == len(self.seeds)

    def seed(self, index: int) -> Triple:
        """The voxel of a seed."""
        z, y, x = (int(part) for part in self.seeds[index])
        return z, y, x

    def is_taken(self, voxel: Triple) -> bool:
        """Whether a settled object has a voxel."""
        return bool(self.segments[voxel] > 0)

    def claim(self) -> int | None:
        """A seed to fill now; None: none, until others have ended or all is finished."""
        with self._locked():
            self._settle()
            first = self.settled
            status = self._status[first : first + WINDOW]
            if not len(status):
                return None
            index: int | None = first
            if status[0] != _FREE:
                index = self._next_ahead(first, status) if self._counts[_BUDGET] > 0 else None
            if index is not None:
                self._ahead[index], self._status[index] = index > first, _CLAIMED
            return index

    def _next_ahead(self, first: int, status: NDArray[np.int8]) -> int | None:
        """The first free seed in no object and, as far as is known, of a body of its own."""
        seeds, groups = (array[first : first + WINDOW] for array in (self.seeds, self._groups))
        voxels = tuple(seeds.T)
        busy = (status != _FREE) | (self._owners[voxels] > 0)
        free = ~busy & (self.segments[voxels] <= 0) & (groups > 0)
        free &= ~np.isin(groups, groups[busy])
        return next(
            (
                first + int(number)
                for number in np.flatnonzero(free)
                if self._is_open(self.seed(first + int(number)), 0)
            ),
            None,
        )

    def mark(self, index: int, box: Box, inside: NDArray[np.bool_]) -> None:
        """Tell the others what an object seems to cover after one more move."""
        owner = index + 1
        self._moves[index] += 1
        owners = self._owners[box]
        owners[inside & ((owners == 0) | (owners > owner))] = owner

    def is_worthwhile(self, index: int) -> bool:
        """Whether to go on: a seed is in no object of an earlier one, as far as is known."""
        seed = self.seed(index)
        return not self.is_taken(seed) and not 0 < int(self._owners[seed]) < index + 1

    def pause(self, index: int) -> bool:
        """Whether an object that is filled ahead has to wait, as its fields exceed the budget."""
        allowed = int(self._counts[_BUDGET])
        waits = index != self.settled and int(self._moves[index]) * _LOST > allowed
        # Its own process alone changes it, until it is handed in or given up.
        self._status[index] = _PAUSED if waits else _CLAIMED
        return waits

    def give_up(self, index: int, box: Box | None, moves: int) -> None:
        """Return a seed that was claimed.

        Args:
            box: That has been marked.
        """
        with self._locked():
            self._free(index, box, moves)

    def submit(self, index: int, filled: FilledObject) -> None:
        """Hand in what came of a seed; it is settled when its turn comes."""
        # Of a weak object nothing is kept but what it has marked.
        mask = np.zeros(0, dtype=np.bool_) if filled.mask is None else filled.mask
        path = self._path(index)
        aside = path.with_suffix(".part.npz")
        np.savez(
            aside,
            moves=filled.moves,
            start=filled.start,
            shape=filled.shape,
            mask=np.packbits(mask),
        )
        aside.rename(path)
        with self._locked():
            self._status[index] = _FILLED
            self._settle()

    def _path(self, index: int) -> Path:
        return self._folder / "filled" / f"{index:09d}.npz"

    def _settle(self) -> None:
        """Settle all seeds whose turn it is."""
        while not self.finished:
            index = self.settled
            if self._status[index] == _FILLED:
                if not self._enter(index):
                    return
            elif self._status[index] == _FREE and not self._is_open(self.seed(index), 0):
                self._finish(index, SKIPPED)
            else:
                return

    def _enter(self, index: int) -> bool:
        """Enter a filled object; False: it has to be filled once more."""
        with np.load(self._path(index)) as file:
            moves, start, shape = file["moves"], file["start"], file["shape"]
            mask = np.unpackbits(file["mask"]).astype(bool)
        box = tuple(slice(int(a), int(a + n)) for a, n in zip(start, shape, strict=True))
        # Voxels with this id are left from a process that was killed at this place.
        new = int(np.count_nonzero(self._ids[:index] > 0)) + 1
        if not self._is_open(self.seed(index), new):
            self._lose(len(moves))
            self._finish(index, SKIPPED, box)
            return True
        visited = self.segments[tuple(moves.T)]
        if ((visited > 0) & (visited != new)).any():
            self._free(index, box, len(moves))
            return False
        outcome, voxels = WEAK, 0
        if mask.size:
            mask = mask[: np.prod(shape)].reshape(shape)
            part = self.segments[box]
            mask &= (part <= 0) | (part == new)
            voxels = int(np.count_nonzero(mask))
            outcome = new if voxels >= self._min_size else SMALL
        if outcome > 0:
            self.segments[box][mask] = outcome
        self._finish(index, outcome, box, moves=len(moves), voxels=voxels)
        return True

    def _is_open(self, seed: Triple, own: int) -> bool:
        """Whether a seed may be tried: no object but its own is near."""
        near = self.segments[
            tuple(
                slice(max(0, here - far), here + far + 1)
                for here, far in zip(seed, self._distance, strict=True)
            )
        ]
        return not bool(((near > 0) & (near != own)).any())

    def _finish(
        self, index: int, outcome: int, box: Box | None = None, *, moves: int = 0, voxels: int = 0
    ) -> None:
        self._ids[index], self._moves[index], self._voxels[index] = outcome, moves, voxels
        self._add_to_budget(moves * (_EARNED_AHEAD if self._ahead[index] else _EARNED))
        self._unmark(index, box)
        # Last, and eight bytes: a process is killed before it or after it.
        self._counts[_SETTLED] = index + 1
        self._path(index).unlink(missing_ok=True)

    def _free(self, index: int, box: Box | None, moves: int) -> None:
        self._unmark(index, box)
        self._lose(moves)
        self._moves[index] = 0
        self._status[index] = _FREE

    def _lose(self, moves: int) -> None:
        self._counts[_IN_VAIN] += moves
        self._add_to_budget(-_LOST * moves)

    def _add_to_budget(self, part: int) -> None:
        self._counts[_BUDGET] = min(_LARGEST_BUDGET, int(self._counts[_BUDGET]) + part)

    def _unmark(self, index: int, box: Box | None) -> None:
        if box is not None:
            owners = self._owners[box]
            owners[owners == index + 1] = 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The kernel releases it when a process dies.
        with (self._folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
