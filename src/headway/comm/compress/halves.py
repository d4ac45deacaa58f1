"""Sixteen bits on the wire: fp16 and bf16, summed by the network.

Elementwise, so any slice of a bucket may be exchanged alone and several at a time. Invariant: a
flag of 1.0 is a power of two on the wire and the sum of flags is exact, or at least not zero.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headway.comm.method import Fused, Method, Route, Waiting, all_reduce
from headway.errors import RunError


class _Half(Method):
    """A bucket is rounded to 16 bits, summed, and widened again.

    The wire buffers are kept for the next step: memory that is touched for the first time costs ten
    times as much as the rounding itself.
    """

    elementwise = True
    name: ClassVar[str]
    wire: ClassVar[torch.dtype]

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    @abstractmethod
    def factor(self, ranks: int) -> float:
        """Values are multiplied by this before they are summed, and divided by it afterwards."""

    def rounds(self, fused: Fused, route: Route) -> Iterator[Waiting]:
        buffer = fused.buffer
        if not buffer.is_floating_point():
            raise RunError(
                f"{self.name} cannot round gradients of type {buffer.dtype}",
                why="They are not real numbers.",
                fix='Give these parameters compress = "none" in exchange.parts.',
            )
        factor = self.factor(route.size)
        if factor != 1.0:
            buffer.mul_(factor)
        free = self._free.setdefault(buffer.numel(), [])
        half = free.pop() if free else torch.empty_like(buffer, dtype=self.wire)
        half.copy_(buffer)
        yield all_reduce(half, route)
        buffer.copy_(half)
        if factor != 1.0:
            buffer.mul_(1.0 / factor)
        free.append(half)


class Fp16(_Half):
    """11 significant bits, but a largest number of 65,504, which a sum over ranks may pass.

    So values are divided before the sum by the smallest power of two that is not below the number
    of ranks: if every rank's gradient fits, so does the sum. A power of two costs no rounding, only
    the numbers below 6e-8 times the ranks.
    """

    name = "fp16"
    wire = torch.float16

    def factor(self, ranks: int) -> float:
        return 2.0 ** -(ranks - 1).bit_length()


class Bf16(_Half):
    """8 significant bits with the range of float32: no scaling."""

    name = "bf16"
    wire = torch.bfloat16

    def factor(self, ranks: int) -> float:
        return 1.0
