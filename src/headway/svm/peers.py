"""What the ranks that train a machine together say to each other; alone, nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from scipy import sparse

from headway.channel import RowExchange
from headway.run.distributed.world import World
from headway.svm.arrays import NOTHING, Array, Matrix, stack_rows


class Peers:
    """All ranks of a world, or this process alone; closed by all at the end, as `with` does.

    What is gathered goes through memory that two ranks of one machine share, or their sockets: a
    message of Gloo's takes ten times as long, and there are hundreds a second.

    Attributes:
        sent: Bytes that this rank has given to others.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = None if world is None or world.alone else world
        # Always of gloo, also where the program's own group is NCCL's.
        self._group = None if self.world is None else self.world.side_group
        self._exchange: RowExchange | None = None
        self.sent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self.world is None or self._exchange is None:
            return
        if error is not None:
            self._exchange.__exit__(kind, error, trace)
            return
        with self.world.explained("the end"):
            self._exchange.close()

    @property
    def rank(self) -> int:
        return 0 if self.world is None else self.world.rank

    @property
    def ranks(self) -> int:
        return 1 if self.world is None else self.world.ranks

    def gather(self, values: Array, doing: str) -> Array:
        """Equal arrays of all ranks, [ranks, ...]; collective."""
        return values[None] if self.world is None else np.stack(self.gather_arrays(values, doing))

    def gather_arrays(self, values: Array, doing: str) -> list[Array]:
        """Arrays of any length in their first dimension, by rank; collective."""
        if self.world is None:
            return [values]
        own = torch.from_numpy(np.ascontiguousarray(values))
        with self.world.explained(doing):
            if self._exchange is None:
                seconds = self.world.timeout_seconds
                self._exchange = RowExchange(self._group, timeout=seconds)
            parts = self._exchange.all_to_all([own] * self.ranks)
        self.sent += own.nbytes * (self.ranks - 1)
        return [part.numpy() for part in parts]

    def gather_rows(
        self, rows: Matrix, doing: str, beside: Array = NOTHING
    ) -> tuple[Matrix, Array]:
        """Samples of all ranks, in the order of the ranks, in one message; collective.

        Args:
            beside: Numbers that travel with them, as many on every rank.

        Returns:
            The samples; what has travelled with them, [ranks, numbers].
        """
        if self.world is None:
            return rows, beside[None]
        packs = self.gather_arrays(_packed(rows, beside), doing)
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


def _packed(rows: Matrix, beside: Array) -> Array:
    """Samples, and other numbers, as one array of float64."""
    if not sparse.issparse(rows):
        head = np.array([rows.shape[0], -1.0, len(beside)])
        return np.concatenate([head, beside, rows.ravel()])
    head = np.array([rows.shape[0], rows.nnz, len(beside)])
    # Indices below 2^53 are exact in float64.
    return np.concatenate([head, beside, np.diff(rows.indptr), rows.indices, rows.data])


def _unpacked(pack: Array, width: int) -> tuple[Matrix, Array]:
    count, entries, others = (int(value) for value in pack[:3])
    beside, rest = pack[3 : 3 + others], pack[3 + others :]
    if entries < 0:
        return rest.reshape(count, width), beside
    indptr = np.concatenate([[0], np.cumsum(rest[:count])]).astype(np.int32)
    indices = rest[count : count + entries].astype(np.int32)
    rows = sparse.csr_matrix((rest[count + entries :], indices, indptr), shape=(count, width))
    return rows, beside
