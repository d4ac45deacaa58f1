"""What a simulated step does about split tables: exchanges of all ranks, and work between them.

Every rank computes what its passes would compute alone, in stretches between the moments at which
an exchange starts or is waited for, and does what lookups take besides. An exchange begins when all
ranks have started it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from headway.cost.network import HierarchicalNetwork


@dataclass(frozen=True, slots=True)
class PricedExchange:
    """Of all ranks.

    Attributes:
        kind: "ids", "sums", ...; see `collective.table_traffic.TableExchange`.
        fullest: Bytes that the busiest rank sends, or receives.
        bytes: That ranks send to others, all together.
    """

    kind: str
    ranks: int
    fullest: float
    bytes: float

    def seconds(self, network: HierarchicalNetwork, stride: int = 1) -> float:
        """As if all ranks sent as much as the busiest one.

        Args:
            stride: Between neighbours among the ranks.
        """
        if self.ranks == 1:
            return 0.0
        # The cost model counts what a rank keeps, too.
        buffer = self.fullest * self.ranks / (self.ranks - 1)
        return float(network.all_to_all(buffer, self.ranks, stride))


@dataclass(frozen=True, slots=True)
class TableStretch:
    """What a rank does before a moment of a pass.

    Attributes:
        share: Of the pass's own seconds.
        lookups: Seconds beside these.
        exchange: Number of the one that starts then, or is waited for; None: the pass ends.
        starts: Whether it starts.
    """

    share: float
    lookups: float
    exchange: int | None = None
    starts: bool = False


@dataclass(frozen=True, kw_only=True)
class TableWork:
    """Of a step without stages.

    Attributes:
        forward, backward: By rank of the data axis and micro-batch.
        update: Seconds by rank in which rows are updated.
        state: Bytes by rank of rows, with the optimiser's state.
    """

    exchanges: tuple[PricedExchange, ...]
    forward: tuple[tuple[tuple[TableStretch, ...], ...], ...]
    backward: tuple[tuple[tuple[TableStretch, ...], ...], ...]
    update: tuple[float, ...]
    state: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return len(self.state)

    @property
    def bytes(self) -> float:
        """That ranks send to others in a step, all together."""
        return sum(one.bytes for one in self.exchanges)

    @property
    def lookups(self) -> tuple[float, ...]:
        """Seconds by rank beside the passes, updates included."""
        return tuple(
            sum(s.lookups for row in (*ahead, *back) for s in row) + update
            for ahead, back, update in zip(self.forward, self.backward, self.update, strict=True)
        )


def merged(
    chunks: Sequence[float], stretches: Sequence[TableStretch]
) -> list[tuple[float, bool, TableStretch | None]]:
    """The parts of a pass that is cut for two reasons, in order.

    Args:
        chunks: Shares of the pass; behind each something leaves.
        stretches: Their shares add up to 1, as those of the chunks do.

    Returns:
        Of each part its share, whether a chunk ends with it, and the stretch that does, if any.
    """
    # Rounding must not put what ends a pass behind its last chunk.
    ends = [(round(end, 9), 0, n) for n, end in enumerate(accumulate(s.share for s in stretches))]
    ends += [(round(end, 9), 1, n) for n, end in enumerate(accumulate(chunks))]
    found, passed = [], 0.0
    for end, of_chunk, number in sorted(ends):
        share, passed = max(0.0, end - passed), max(end, passed)
        found.append((share, bool(of_chunk), None if of_chunk else stretches[number]))
    return found
