"""The slab store: each slab is read from its file once, and sent from rank to rank thereafter.

    epoch 1     file -> consumer, which keeps it and is its owner from now on
    later       owner -> consumer, while the step before computes; the file system is idle

What is delivered is bit for bit what the files hold. Messages pass only among the ranks of one
group, which hold the slabs of one offset; every wait has a time-out. Oyama et al. 2020, "The Case
for Strong Scaling in Deep Learning", section on I/O (LBANN's data store).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel.facts import gather_facts
from headway.comm.exchange_errors import is_timeout
from headway.data.loader import MicroBatch, RankBatch, checked_length
from headway.data.order import Cursor, GlobalBatch, GlobalBatches, SampleOrder
from headway.data.slabs.ownership import OwnerPolicy, SlabOwnership, SlabTransfer
from headway.data.slabs.slab_source import SlabSource
from headway.errors import TIMEOUT_SECONDS, DataError, HeadwayError, PeerLost, Stalled
from headway.plans import BatchSplit
from headway.units import parse_bytes

_GRACE = 5.0
"""Seconds for messages under way when an iteration is given up."""


@dataclass(frozen=True)
class _Message:
    """A slab under way; the tensor must not change until its work is done."""

    work: dist.Work
    peer: int
    sample: int
    slab: Tensor


@dataclass(frozen=True)
class _Flight:
    """A step whose messages have been started.

    `moves` are those to this rank, `slabs` what is there of them or will be; None: to be read.
    """

    step: GlobalBatch
    moves: list[SlabTransfer]
    slabs: list[Tensor | None]
    messages: list[_Message]


class SlabStore:
    """An iterable of `RankBatch`, as `Loader`, whose samples are kept in memory of all ranks.

    Position i of a global batch belongs to rank i mod `ranks` of the group, so that the places of
    a rank's micro-batches are a range with that step. Collective: every rank of the group iterates,
    and ends, alike. Beside what is kept, memory holds the batch that is given out and the slabs of
    the next one that are under way.

    Args:
        split: The global batch and its micro-batches, with even shares.
        group: The ranks that have this rank's slab of other samples: of equal offset, one for each
            partition of the data axis. Gloo, because slabs are in host memory.
        memory: Most bytes kept by this rank, "2 GiB"; None: without a limit. What does not fit is
            read again, by its consumer.
        keep: What is kept then: "recent" (LRU), or "first", of which more is found again.

    Raises:
        DataError: Too few samples, uneven shares, a cursor outside, no gloo, or ranks that were
            given different data, batches, cursors or rules.
    """

    def __init__(
        self,
        source: SlabSource,
        split: BatchSplit,
        *,
        group: dist.ProcessGroup,
        cursor: Cursor,
        shuffle: bool = True,
        drop_last: bool = False,
        epochs: int | None = None,
        memory: int | str | None = None,
        keep: OwnerPolicy = "recent",
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._length = checked_length(source, split.samples) or 0
        self._batches = GlobalBatches(cursor, self._length, split.samples, drop_last, epochs)
        _check(split, group)
        self._source, self._split, self._group = source, split, group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._order = SampleOrder(self._length, cursor.seed, shuffle=shuffle)
        self._timeout = timeout
        self._held: dict[int, Tensor] = {}
        self._keep: OwnerPolicy = keep
        self._rooms = _slab_capacities(self._facts(), memory, source, group)
        self._owners, self._confirmed = SlabOwnership(self._rooms, keep), False
        self._flight: _Flight | None = None
        self._broken = False

    def __iter__(self) -> Iterator[RankBatch]:
        self.close()
        if self._broken:
            raise DataError(
                "the slab store cannot go on",
                why="An iteration ended with messages under way that never came.",
                fix="Make a new one; all ranks must leave an iteration at the same step.",
            )
        steps = iter(self._batches)
        try:
            self._start(next(steps, None))
            while self._flight is not None:
                flight = self._flight
                slabs = self._land(flight)
                self._flight = None
                # Before the batch is given out: the next slabs travel while the step computes.
                self._start(next(steps, None))
                ready = [self._batch(flight.step, slabs)]
                del flight, slabs  # what arrived is not held while the batch is used
                yield ready.pop()
        finally:
            self.close()

    def close(self) -> None:
        """End the iteration that goes on; messages under way get a few seconds.

        What is kept stays if the iteration had come to its end; otherwise it is let go, on all
        ranks.
        """
        flight, self._flight = self._flight, None
        if flight is None or self._broken:
            return
        self._broken = True
        with suppress(PeerLost, Stalled):
            self._wait(flight, min(self._timeout, _GRACE))
            self._broken = False
        # On all ranks: one that kept its slabs would compute other transfers.
        self._held.clear()
        self._owners, self._confirmed = SlabOwnership(self._rooms, self._keep), False

    def __enter__(self) -> SlabStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _facts(self) -> dict[str, Any]:
        """What must be equal on all ranks of the group."""
        return {
            "slab": self._source.cut,
            "bytes of a slab": self._source.nbytes,
            "samples": self._length,
            "split": self._split,
            "cursor": self._batches.cursor,
            "shuffle": self._order.shuffle,
            "drop_last": self._batches.drop_last,
            "epochs": self._batches.epochs,
            "keep": self._keep,
        }

    def _start(self, step: GlobalBatch | None) -> None:
        if step is None:
            return
        first = step.start.position
        if first == 0 and step.start.epoch > self._batches.cursor.epoch:
            self._confirm()
        indices = self._order.indices(step.start.epoch, first, first + step.count)
        # Of all ranks: each computes every transfer, so that a message needs no request.
        moves = self._owners.plan(indices.tolist())
        mine = moves[self._rank :: self._ranks]
        slabs = [self._source_of(move) for move in mine]
        flight = self._flight = _Flight(step, mine, slabs, [])
        # Until all messages are started: an error here would leave some without a partner.
        self._broken = True
        for move, slab in zip(mine, slabs, strict=True):
            if slab is not None and move.owner not in (None, self._rank):
                flight.messages.append(self._message(move.sample, slab, move.owner, coming=True))
        # Before any slab is read, because a slab that leaves may be let go for one that is read.
        for move in moves:
            if move.owner == self._rank != move.consumer:
                slab = self._held[move.sample]
                flight.messages.append(self._message(move.sample, slab, move.consumer))
        self._broken = False

    def _source_of(self, move: SlabTransfer) -> Tensor | None:
        if move.owner is None:
            return None
        if move.owner == self._rank:
            return self._held[move.sample]
        return torch.empty(self._source.nbytes, dtype=torch.uint8)

    def _message(
        self, sample: int, slab: Tensor, peer: int | None, *, coming: bool = False
    ) -> _Message:
        with self._explained(f"the slab of sample {sample}", peer):
            if coming:
                work = dist.irecv(slab, group=self._group, group_src=peer, tag=sample)
            else:
                work = dist.isend(slab, group=self._group, group_dst=peer, tag=sample)
        assert work is not None
        assert peer is not None
        return _Message(work, peer, sample, slab)

    def _land(self, flight: _Flight) -> list[Tensor]:
        """The slabs of a step: those that are missing are read while messages arrive."""
        # Until all have arrived: an error here leaves messages without a partner.
        self._broken = True
        slabs: list[Tensor] = []
        for move, found in zip(flight.moves, flight.slabs, strict=True):
            if move.gone is not None:
                del self._held[move.gone]
            slab = self._source.load(move.sample) if found is None else found
            if move.kept:
                self._held[move.sample] = slab
            slabs.append(slab)
        self._wait(flight, self._timeout)
        self._broken = False
        return slabs

    def _wait(self, flight: _Flight, seconds: float) -> None:
        for message in flight.messages:
            with self._explained(f"the slab of sample {message.sample}", message.peer):
                message.work.wait(timedelta(seconds=seconds))

    def _batch(self, step: GlobalBatch, slabs: list[Tensor]) -> RankBatch:
        first = step.start.position
        places = range(first + self._rank, first + step.count, self._ranks)
        most = -(-step.count // self._ranks)
        return RankBatch(
            micros=tuple(
                MicroBatch(
                    data=self._source.batch(slabs[part.start : part.stop]),
                    positions=places[part.start : part.stop],
                )
                for part in self._split.microbatches(range(len(slabs)))
            ),
            samples=step.count,
            start=step.start,
            after=step.after,
            passes=len(self._split.microbatches(range(most))),
        )

    def _confirm(self) -> None:
        """Once, after the first epoch: compare the owner maps of all ranks with those computed."""
        if self._confirmed:
            return
        mine = torch.zeros(self._length, dtype=torch.uint8)
        mine[list(self._held)] = 1
        maps = [torch.empty_like(mine) for _ in range(self._ranks)]
        with self._explained("the owner map", None):
            work = dist.all_gather(maps, mine, group=self._group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self._timeout))
        for rank, held in enumerate(maps):
            if held.nonzero().flatten().tolist() != self._owners.held(rank):
                raise DataError(
                    f"rank {self._global(rank)} holds other slabs than it should",
                    why="The ranks did not leave an iteration at the same step.",
                    fix="Make a new store.",
                )
        self._confirmed = True

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)

    @contextmanager
    def _explained(self, thing: str, peer: int | None) -> Iterator[None]:
        """Say what torch's errors of broken or late exchanges mean.

        Raises:
            PeerLost: Another rank vanished.
            Stalled: It does not come in time.
        """
        try:
            yield
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            who = "another rank" if peer is None else f"rank {self._global(peer)}"
            late = is_timeout(error)
            kind: type[HeadwayError] = Stalled if late else PeerLost
            raise kind(
                f"{who} {'does not come' if late else 'vanished'} for the exchange of {thing}",
                where="slab store",
                why=text,
                fix="Look for what that rank does instead, or allow more time."
                if late
                else "Its own error, or the signal that killed it, is the cause.",
            ) from error


def _check(split: BatchSplit, group: dist.ProcessGroup) -> None:
    if split.shares:
        raise DataError(
            "uneven shares with a slab store",
            why="Position i of a batch belongs to rank i mod ranks.",
            fix="Give even shares, or read with a Loader.",
        )
    backend = dist.get_backend(group)
    if backend != "gloo":
        raise DataError(
            f"a slab store on a group of {backend}",
            why="Slabs are in host memory.",
            fix='Make the group with dist.new_group(ranks, backend="gloo").',
        )


def _slab_capacities(
    facts: Mapping[str, Any], memory: int | str | None, source: SlabSource, group: dist.ProcessGroup
) -> list[int]:
    """By rank the most slabs that it may hold; collective."""
    try:
        room = sys.maxsize if memory is None else parse_bytes(memory) // max(source.nbytes, 1)
    except ValueError as error:
        raise DataError(f"memory of the slab store: {error}") from None
    each = gather_facts((dict(facts), room), group)
    for rank, (theirs, _) in enumerate(each):
        for name, value in theirs.items():
            if value != each[0][0][name]:
                raise DataError(
                    f"the ranks of a slab store differ in {name}",
                    why=f"{each[0][0][name]} on rank {dist.get_global_rank(group, 0)}, {value} on "
                    f"rank {dist.get_global_rank(group, rank)}.",
                    fix="Give all ranks the same, and groups whose ranks have the same offset.",
                )
    return [theirs for _, theirs in each]
