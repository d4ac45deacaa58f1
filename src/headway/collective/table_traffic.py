"""What ranks exchange about split tables in a training step, and what they compute in between.

`run.measure.table_dry_run` observes it, cost models price it, and the simulator plays it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Way = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What kernels do: how many they are, their FLOPs, and bytes that they read and write."""

    kernels: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: KernelWork) -> KernelWork:
        return KernelWork(
            self.kernels + other.kernels, self.flops + other.flops, self.bytes + other.bytes
        )

    def __mul__(self, times: float) -> KernelWork:
        return KernelWork(self.kernels * times, self.flops * times, self.bytes * times)


@dataclass(frozen=True, slots=True)
class ExchangeMark:
    """A moment of a rank in a pass.

    Attributes:
        work: Done since the mark before it, or since the pass began.
        exchange: Number of the exchange that starts here, or is waited for.
        starts: Whether it starts.
    """

    work: KernelWork
    exchange: int
    starts: bool


@dataclass(frozen=True, slots=True)
class RankPass:
    """One pass of one micro-batch on a rank.

    Attributes:
        rest: Work behind the last mark.
    """

    way: Way
    microbatch: int
    marks: tuple[ExchangeMark, ...]
    rest: KernelWork

    @property
    def work(self) -> KernelWork:
        """Of the whole pass."""
        return sum((mark.work for mark in self.marks), self.rest)


@dataclass(frozen=True, slots=True)
class TableExchange:
    """Tensors that each rank gives to each other one, all at once.

    Attributes:
        bytes: Of each rank, to each rank; what a rank keeps is 0.
        counted: Of `bytes`, by table and kind; what is left is said beside: sizes and checks.
    """

    bytes: tuple[tuple[float, ...], ...]
    counted: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """ "ids", "sums", "rows", "gradients", "samples", or "sizes"."""
        return " + ".join(dict.fromkeys(kind for _, kind in self.counted)) or "sizes"

    @property
    def fullest(self) -> float:
        """Bytes that the busiest rank sends, or receives."""
        received = map(sum, zip(*self.bytes, strict=True))
        return max((*map(sum, self.bytes), *received), default=0.0)


@dataclass(frozen=True, kw_only=True)
class TableTraffic:
    """A step.

    Attributes:
        exchanges: In the order in which all ranks start them.
        passes: By rank.
        alone: What both passes of a micro-batch take where nothing is exchanged: of the model with
            tables of a row, on the first rank.
        sent: By rank: bytes to others, by table and kind, as `SplitTables.sent` counts them.
        scale: Times the samples that were looked at are those of a step.
    """

    exchanges: tuple[TableExchange, ...]
    passes: tuple[tuple[RankPass, ...], ...]
    alone: tuple[KernelWork, KernelWork]
    sent: tuple[Mapping[tuple[str, str], float], ...]
    scale: float = 1.0

    @property
    def ranks(self) -> int:
        return len(self.passes)

    @property
    def total(self) -> Mapping[tuple[str, str], float]:
        """Bytes of all ranks by table and kind."""
        return sum((Counter(own) for own in self.sent), Counter())

    def by_kind(self) -> dict[str, float]:
        """Bytes of all ranks."""
        found: dict[str, float] = {}
        for (_, kind), size in self.total.items():
            found[kind] = found.get(kind, 0.0) + size
        return found
