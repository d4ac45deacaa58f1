"""Messages of tensors from each rank to each other, all in one exchange.

Ranks of one machine hand them over in memory that both share (`TensorStream`): what comes is used
where it lies, and no other thread has a part in it. All others, and GPUs, use the process group.
"""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel.stream import TensorStream, open_streams
from headway.documents import parse_json
from headway.errors import TIMEOUT_SECONDS

Shape = tuple[tuple[int, ...], torch.dtype]
"""Of a tensor that is to come."""

_WHOLE = 512 * 1024
"""Bytes of a message that is sent as one over the group."""
_AHEAD = 64
"""Messages of a stream that its other end need not have looked at yet."""


def open_table_streams(
    group: dist.ProcessGroup | None,
    device: torch.device,
    together: Callable[[int, int], bool] = lambda a, b: True,
    timeout: float = TIMEOUT_SECONDS,
) -> dict[int, TensorStream]:
    """Streams to the ranks of a group with whom this one shares memory; collective.

    Args:
        device: Of the tensors; none but those of host memory go through streams.
        together: Whether two global ranks are on one machine; the same on all ranks.
        timeout: Seconds that a wait may take.

    Returns:
        By global rank.

    Raises:
        PeerLost: Another rank is gone.
        Stalled: It does not come in time.
    """
    if device.type != "cpu" or not dist.is_initialized():
        return {}
    if "cpu:gloo" not in dist.get_backend_config(group):
        return {}
    ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
    pairs = [pair for pair in combinations(ranks, 2) if together(*pair)]
    return open_streams(dict.fromkeys(pairs, _AHEAD), group=group, timeout=timeout)


@dataclass(eq=False)
class _OverGroup:
    """What comes over the process group; once there are no `works` it has arrived."""

    works: list[dist.Work]
    buffer: Tensor
    expected: Sequence[Sequence[Shape]]
    sent: Tensor  # must live until it has left

    def wait(self) -> list[list[Tensor]]:
        while self.works:
            self.works.pop().wait()
        found: list[list[Tensor]] = []
        start = 0
        for shapes in self.expected:
            found.append([])
            for shape, dtype in shapes:
                stop = start + prod(shape) * dtype.itemsize // self.buffer.itemsize
                part = self.buffer[start:stop]
                # A slice of bytes need not lie where a number of more bytes may; a copy does.
                part = part if dtype == self.buffer.dtype else part.clone().view(dtype)
                found[-1].append(part.view(shape))
                start = stop
        return found


class Flight(ABC):
    """Messages under way, from all ranks in one exchange."""

    @abstractmethod
    def wait(self) -> list[list[Tensor]]:
        """What came, by rank, to be read only: tensors may share memory.

        Raises:
            PeerLost: A rank with whom memory is shared is gone.
            Stalled: It does not come in time.
        """


class _UnderWay(Flight):
    """Of an exchange of a `Wire`.

    Args:
        tag: Of its messages in streams.
        own: Of this rank; they stay here.
    """

    def __init__(
        self,
        wire: Wire,
        tag: int,
        own: list[Tensor],
        expected: Sequence[Sequence[Shape]],
        over_group: _OverGroup | None,
    ) -> None:
        self._streams, self._rank, self._tag = wire.streams, wire.rank, tag
        self._own, self._expected, self._over_group = own, expected, over_group
        self._found: list[list[Tensor]] | None = None

    def wait(self) -> list[list[Tensor]]:
        if self._found is None:
            found: list[list[Tensor]] = [[] for _ in self._expected]
            if self._over_group is not None:
                found = self._over_group.wait()
            for rank, stream in self._streams.items():
                found[rank] = stream.take(self._tag, self._expected[rank])
            found[self._rank] = self._own
            self._found = found
        return self._found

    def __del__(self) -> None:
        # It went at once because the step before wanted it, and this one does not.
        if self._found is None:
            for rank, stream in self._streams.items():
                stream.forget(self._tag, self._expected[rank])


class Wire:
    """The ranks that share a batch; all of them make it.

    Args:
        streams: Of `open_table_streams`: to the ranks with whom this one shares memory.

    Attributes:
        rank: Of this process among them.
        streams: By rank among them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        streams: Mapping[int, TensorStream],
    ) -> None:
        self.group, self.device = group, device
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if streams else []
        self.streams = {ranks.index(peer): stream for peer, stream in streams.items()}
        # Exchanges so far: the same number on all ranks, so that it is the tag of their messages.
        self._count = 0
        self._recent: deque[weakref.ref[Flight]] = deque()
        # The group's exchanges are of all ranks, also of one that shares memory with each other.
        self._group_needed = self.size > 1
        self._group_needed = any(n + 1 < self.size for (n,) in self.gather([len(self.streams)]))

    def start(
        self, parts: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Shape]]
    ) -> Flight:
        """Give each rank tensors, and get some from each; collective.

        Args:
            parts: By rank, what goes to it.
            expected: By rank, what will come from it.

        Raises:
            PeerLost: A rank with whom memory is shared is gone.
            Stalled: It does not look at what came before.
        """
        own = [
            x.detach().contiguous().view(shape)
            for x, (shape, _) in zip(parts[self.rank], expected[self.rank], strict=True)
        ]
        self._count += 1
        over_group = self._start_over_group(parts, expected) if self._group_needed else None
        # Each rank begins with its neighbour, so that not all write to the same one at a time.
        for step in range(1, self.size):
            rank = (self.rank + step) % self.size
            if (stream := self.streams.get(rank)) is not None:
                stream.put(self._count, parts[rank])
        flight = _UnderWay(self, self._count, own, expected, over_group)
        self._recent.append(weakref.ref(flight))
        # A rank may start as many as it likes before it waits for any, and no put may wait then.
        if len(self._recent) > _AHEAD // 2 and (oldest := self._recent.popleft()()) is not None:
            oldest.wait()
        return flight

    def _start_over_group(
        self, parts: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Shape]]
    ) -> _OverGroup:
        """To and from the ranks without a stream; collective over all."""
        near = {self.rank, *self.streams}
        apart = [() if rank in near else part for rank, part in enumerate(parts)]
        awaited = [() if rank in near else x for rank, x in enumerate(expected)]
        dtypes = {x.dtype for part in apart for x in part}
        dtypes |= {dtype for shapes in awaited for _, dtype in shapes}
        # Bytes travel: each rank may look at them as suits it.
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        unit = dtype.itemsize
        sizes = [sum(x.nbytes for x in part) for part in apart]
        coming = [sum(prod(shape) * kind.itemsize for shape, kind in shapes) for shapes in awaited]
        sent = self._packed([x for part in apart for x in part], sum(sizes) // unit, dtype)
        buffer = torch.empty(sum(coming) // unit, dtype=dtype, device=self.device)
        works = self._travel(sent.view(torch.uint8), sizes, buffer.view(torch.uint8), coming)
        return _OverGroup(works, buffer, awaited, sent)

    def _travel(
        self, sent: Tensor, sizes: Sequence[int], buffer: Tensor, coming: Sequence[int]
    ) -> list[dist.Work]:
        """Bytes, so many to and from each rank."""
        other = 1 - self.rank
        if self.size != 2 or max(sizes[other], coming[other]) <= _WHOLE:
            return [self._exchange(sent, sizes, buffer, coming)]
        # Two halves at once: Gloo sends one large message first and receives the other one then.
        # Of more than two ranks, none knows how large the messages between others are.
        out, into = [0, 0], [0, 0]
        out[other], into[other] = sizes[other] // 2, coming[other] // 2
        return [
            self._exchange(sent[: sum(out)], out, buffer[: sum(into)], into),
            self._exchange(
                sent[sum(out) :], [a - b for a, b in zip(sizes, out, strict=True)],
                buffer[sum(into) :], [a - b for a, b in zip(coming, into, strict=True)],
            ),
        ]  # fmt: skip

    def _exchange(
        self, sent: Tensor, sizes: Sequence[int], buffer: Tensor, coming: Sequence[int]
    ) -> dist.Work:
        work: dist.Work = dist.all_to_all_single(
            buffer, sent, list(coming), list(sizes), group=self.group, async_op=True
        )
        return work

    def _packed(self, tensors: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        sent = torch.empty(size, dtype=dtype, device=self.device)
        start = 0
        for x in tensors:
            stop = start + x.nbytes // dtype.itemsize
            if x.dtype == dtype:
                sent[start:stop].view(x.shape).copy_(x.detach())
            else:
                sent[start:stop] = x.detach().contiguous().view(-1).view(dtype)
            start = stop
        return sent

    def swap(
        self, parts: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Shape]]
    ) -> list[list[Tensor]]:
        """`start`, and wait for it."""
        return self.start(parts, expected).wait()

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        """Numbers of all ranks, the same count of each; collective."""
        numbers = torch.tensor(own, dtype=torch.int64, device=self.device)
        expected = [[((len(own),), torch.int64)]] * self.size
        return [row.tolist() for (row,) in self.swap([[numbers]] * self.size, expected)]

    def documents(self, own: object) -> list[Any]:
        """What each rank says, as JSON has it; collective."""
        text = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8, device=self.device)
        sizes = [size for (size,) in self.gather([len(text)])]
        came = self.swap([[text]] * self.size, [[((size,), torch.uint8)] for size in sizes])
        return [parse_json(bytes(said.tolist())) for (said,) in came]
