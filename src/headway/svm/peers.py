"""What the ranks that train a machine together say to each other; alone, nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from scipy import sparse

from headway.run.distributed.world import World
from headway.svm.arrays import Array, Matrix


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

    def gather_arrays(self, values: Array, doing: str) -> list[Array]:
        """Arrays of any length in their first dimension, by rank; collective."""
        if self.world is None:
            return [values]
        counts = self.gather(np.array([len(values)], dtype=np.float64), doing)[:, 0].astype(int)
        room = np.zeros((int(counts.max(initial=0)), *values.shape[1:]), dtype=values.dtype)
        room[: len(values)] = values
        return [part[:count] for part, count in zip(self.gather(room, doing), counts, strict=True)]

    def gather_rows(self, rows: Matrix, doing: str) -> Matrix:
        """Samples of all ranks, in the order of the ranks; collective."""
        if self.world is None:
            return rows
        if not sparse.issparse(rows):
            return np.concatenate(self.gather_arrays(rows, doing))
        # Three arrays in one message.
        parts = self.gather_arrays(_packed(rows), doing)
        return sparse.vstack([_unpacked(part, rows.shape[1]) for part in parts], format="csr")

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
                yield _with_weights(pack, width)
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
            yield _with_weights(pack, width)
            with self.world.explained(doing):
                for work in works:
                    assert work is not None
                    work.wait()
            pack = coming


def _packed(rows: Matrix, weights: Array | None = None) -> Array:
    """Samples, and a weight of each, as one array of float64."""
    weights = np.zeros(0) if weights is None else weights
    if not sparse.issparse(rows):
        head = np.array([rows.shape[0], -1.0, len(weights)])
        return np.concatenate([head, weights, rows.ravel()])
    head = np.array([rows.shape[0], rows.nnz, len(weights)])
    # Indices below 2^53 are exact in float64.
    return np.concatenate([head, weights, np.diff(rows.indptr), rows.indices, rows.data])


def _unpacked(pack: Array, width: int) -> Matrix:
    return _with_weights(pack, width)[0]


def _with_weights(pack: Array, width: int) -> tuple[Matrix, Array]:
    count, entries, weighted = (int(value) for value in pack[:3])
    weights, rest = pack[3 : 3 + weighted], pack[3 + weighted :]
    if entries < 0:
        return rest.reshape(count, width), weights
    indptr = np.concatenate([[0], np.cumsum(rest[:count])]).astype(np.int32)
    indices = rest[count : count + entries].astype(np.int32)
    rows = sparse.csr_matrix((rest[count + entries :], indices, indptr), shape=(count, width))
    return rows, weights
