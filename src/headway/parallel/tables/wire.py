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


@dataclass(eq=False)
class Flight:
    """Messages under way; where `work` is None they have arrived."""

    work: dist.Work | None
    buffer: Tensor
    expected: Sequence[Sequence[Shape]]
    sent: Tensor  # must live until it has left

    def wait(self) -> list[list[Tensor]]:
        """What came, by rank, to be read only: tensors may share memory."""
        if self.work is not None:
            self.work.wait()
            self.work = None
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
        dtypes = {x.dtype for part in parts for x in part}
        dtypes |= {dtype for shapes in expected for _, dtype in shapes}
        # Bytes travel: each rank may look at them as suits it.
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        sizes = [sum(x.nbytes for x in part) // dtype.itemsize for part in parts]
        coming = [
            sum(prod(shape) * kind.itemsize for shape, kind in shapes) // dtype.itemsize
            for shapes in expected
        ]
        sent = self._packed([x for part in parts for x in part], sum(sizes), dtype)
        if self.size == 1:
            return Flight(None, sent, expected, sent)
        buffer = torch.empty(sum(coming), dtype=dtype, device=self.device)
        work = dist.all_to_all_single(
            buffer.view(torch.uint8), sent.view(torch.uint8),
            [n * dtype.itemsize for n in coming], [n * dtype.itemsize for n in sizes],
            group=self.group, async_op=True,
        )  # fmt: skip
        return Flight(work, buffer, expected, sent)

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
