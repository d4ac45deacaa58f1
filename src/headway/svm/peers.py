"""What the ranks that train a machine together say to each other; alone, nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from scipy import sparse

from headway.run.distributed.world import World
from headway.svm.arrays import NOTHING, Array, Indices, Matrix, stack_rows


class Peers:
    """All ranks of a world, or this process alone.

    Attributes:
        sent: Bytes that this rank has given to others.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = None if world is None or world.alone else world
        # Always of gloo, also where the program's own group is NCCL's.
        self._group = None if self.world is None else self.world.side_group
        self.sent = 0

    @property
    def rank(self) -> int:
        return 0 if self.world is None else self.world.rank

    @property
    def ranks(self) -> int:
        return 1 if self.world is None else self.world.ranks

    def gather(self, values: Array, doing: str) -> Array:
        """Equal arrays of all ranks, [ranks, ...]; collective."""
        if self.world is None:
            return values[None]
        own = torch.from_numpy(np.ascontiguousarray(values))
        out = torch.empty((self.ranks, *own.shape), dtype=own.dtype)
        with self.world.explained(doing):
            dist.all_gather(list(out), own, group=self._group)
        self.sent += own.nbytes * (self.ranks - 1)
        return out.numpy()

    def gather_arrays(
        self, values: Array, doing: str, counts: Indices | None = None
    ) -> list[Array]:
        """Arrays of any length in their first dimension, by rank; collective.

        Args:
            counts: Their lengths by rank, where all ranks know them: it saves a message.
        """
        if self.world is None:
            return [values]
        if counts is None:
            own = np.array([len(values)], dtype=np.float64)
            counts = self.gather(own, doing)[:, 0].astype(np.int64)
        room = np.zeros((int(counts.max(initial=0)), *values.shape[1:]), dtype=values.dtype)
        room[: len(values)] = values
        return [part[:count] for part, count in zip(self.gather(room, doing), counts, strict=True)]

    def gather_rows(
        self, rows: Matrix, doing: str, beside: Array = NOTHING, counts: Indices | None = None
    ) -> tuple[Matrix, Array]:
        """Samples of all ranks, in the order of the ranks, in one message; collective.

        Args:
            beside: Numbers that travel with them, as many on every rank.
            counts: By rank, `packed_sizes` of its samples added up, where all ranks know them.

        Returns:
            The samples; what has travelled with them, [ranks, numbers].
        """
        if self.world is None:
            return rows, beside[None]
        if counts is not None:
            counts = counts + _HEAD + len(beside)
        packs = self.gather_arrays(_packed(rows, beside), doing, counts)
        parts = [_unpacked(pack, rows.shape[1]) for pack in packs]
        return stack_rows([part for part, _ in parts]), np.stack([other for _, other in parts])

    def sum(self, values: Array, doing: str) -> Array:
        """The sum over all ranks; collective."""
        total: Array = self.gather(values, doing).sum(axis=0)
        return total

    def ring(self, rows: Matrix, weights: Array, doing: str) -> Iterator[tuple[Matrix, Array]]:
        """Every rank's samples and weights, one rank's at a time, own first; collective.

        What comes next travels while the caller works on what is there; there is room for two.
        """
        width = rows.shape[1]
        pack = _packed(rows, weights)
        for hop in range(self.ranks):
            if hop == self.ranks - 1 or self.world is None:
                yield _unpacked(pack, width)
                return
            with self.world.explained(doing):
                sizes = self.gather(np.array([len(pack)], dtype=np.float64), doing)[:, 0]
                before, behind = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
                coming = np.empty(int(sizes[before]), dtype=np.float64)
                works = [
                    dist.isend(torch.from_numpy(pack), behind, group=self._group),
                    dist.irecv(torch.from_numpy(coming), before, group=self._group),
                ]
            self.sent += pack.nbytes
            yield _unpacked(pack, width)
            with self.world.explained(doing):
                for work in works:
                    assert work is not None
                    work.wait()
            pack = coming


_HEAD = 3
"""Numbers before everything else in a message of samples."""


def packed_sizes(rows: Matrix) -> Array:
    """Numbers that each sample takes in a message, [n]."""
    if sparse.issparse(rows):
        sizes: Array = 1.0 + 2 * np.diff(rows.indptr)
        return sizes
    return np.full(len(rows), float(rows.shape[1]))


def _packed(rows: Matrix, beside: Array) -> Array:
    """Samples, and other numbers, as one array of float64."""
    if not sparse.issparse(rows):
        head = np.array([rows.shape[0], -1.0, len(beside)])
        return np.concatenate([head, beside, rows.ravel()])
    head = np.array([rows.shape[0], rows.nnz, len(beside)])
    # Indices below 2^53 are exact in float64.
    return np.concatenate([head, beside, np.diff(rows.indptr), rows.indices, rows.data])


def _unpacked(pack: Array, width: int) -> tuple[Matrix, Array]:
    count, entries, others = (int(value) for value in pack[:_HEAD])
    beside, rest = pack[_HEAD : _HEAD + others], pack[_HEAD + others :]
    if entries < 0:
        return rest.reshape(count, width), beside
    indptr = np.concatenate([[0], np.cumsum(rest[:count])]).astype(np.int32)
    indices = rest[count : count + entries].astype(np.int32)
    rows = sparse.csr_matrix((rest[count + entries :], indices, indptr), shape=(count, width))
    return rows, beside
