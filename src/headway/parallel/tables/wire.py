"""Messages of tensors from each rank to each other, all in one exchange."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.documents import parse_json

Shape = tuple[tuple[int, ...], torch.dtype]
"""Of a tensor that is to come."""

_WHOLE = 512 * 1024
"""Bytes of a message that is sent as one."""


@dataclass(eq=False)
class Flight:
    """Messages under way; once there are no `works` they have arrived.

    Attributes:
        expected: By rank; of this one nothing, since `own` stays here.
    """

    works: list[dist.Work]
    rank: int
    own: list[Tensor]
    buffer: Tensor
    expected: Sequence[Sequence[Shape]]
    sent: Tensor  # must live until it has left

    def wait(self) -> list[list[Tensor]]:
        """What came, by rank, to be read only: tensors may share memory."""
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
        found[self.rank] = self.own
        return found


class Wire:
    """The ranks that share a batch.

    Attributes:
        rank: Of this process among them.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1

    def start(
        self, parts: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Shape]]
    ) -> Flight:
        """Give each rank tensors, and get some from each; collective.

        Args:
            parts: By rank, what goes to it.
            expected: By rank, what will come from it.
        """
        own = [
            x.detach().contiguous().view(shape)
            for x, (shape, _) in zip(parts[self.rank], expected[self.rank], strict=True)
        ]
        apart = [() if rank == self.rank else part for rank, part in enumerate(parts)]
        awaited = [() if rank == self.rank else x for rank, x in enumerate(expected)]
        dtypes = {x.dtype for part in apart for x in part}
        dtypes |= {dtype for shapes in awaited for _, dtype in shapes}
        # Bytes travel: each rank may look at them as suits it.
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        sizes = [sum(x.nbytes for x in part) // dtype.itemsize for part in apart]
        coming = [
            sum(prod(shape) * kind.itemsize for shape, kind in shapes) // dtype.itemsize
            for shapes in awaited
        ]
        sent = self._packed([x for part in apart for x in part], sum(sizes), dtype)
        if self.size == 1:
            return Flight([], 0, own, sent, awaited, sent)
        buffer = torch.empty(sum(coming), dtype=dtype, device=self.device)
        unit = dtype.itemsize
        works = self._travel(
            sent.view(torch.uint8), [n * unit for n in sizes],
            buffer.view(torch.uint8), [n * unit for n in coming],
        )  # fmt: skip
        return Flight(works, self.rank, own, buffer, awaited, sent)

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
        if self.size == 1:
            return [numbers.tolist()]
        found = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(found, numbers, group=self.group)
        return [x.tolist() for x in found]

    def documents(self, own: object) -> list[Any]:
        """What each rank says, as JSON has it; collective."""
        text = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8, device=self.device)
        sizes = [size for (size,) in self.gather([len(text)])]
        came = self.swap([[text]] * self.size, [[((size,), torch.uint8)] for size in sizes])
        return [parse_json(bytes(said.tolist())) for (said,) in came]
