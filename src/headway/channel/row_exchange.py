"""`RowExchange`: rows of a sharded table to and from all ranks, as embeddings need them.

There is a dynamic channel to each other rank, so that nobody has to know beforehand how much
arrives; rows are gathered straight into the region, and used where they lie. `fetch` looks up rows
of a table whose parts the ranks hold, and sends gradients back the same way. The n-th exchange of
one rank is the n-th of all; a rank sums in the same order each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.channel.channel import Channel, Provider
from headway.errors import TIMEOUT_SECONDS, RunError, UsageError

AllocateRows = Callable[[Sequence[int], torch.dtype], Tensor]
"""From shape and type to memory in which a tensor can be made that need not be copied."""


class RowExchange:
    """One rank's end of an exchange with all others; all ranks of the group make it.

    Args:
        group: None: the default one.
        timeout: Seconds that a wait may take.

    Attributes:
        rank: Of this process in the group.
        providers: Of the channel to each other rank: "shared_memory", or "socket".

    Raises:
        UsageError: There is no process group, or no such provider here.
        PeerLost: Another rank is gone.
        Stalled: One does not come in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        provider: Provider = "auto",
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "an exchange of rows without a process group",
                fix="Call torch.distributed.init_process_group first.",
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        # All ranks open channels in the order of their pairs, so that no circle of them waits.
        self._channels = {
            number: Channel(peer, provider=provider, group=group, timeout=timeout)
            for number, peer in enumerate(ranks)
            if number != self.rank
        }
        self.providers = {number: c.provider for number, c in self._channels.items()}

    def swap(
        self, make: Callable[[int, AllocateRows], Tensor], use: Callable[[int, Tensor], object]
    ) -> None:
        """Give each rank a tensor, and use that of each; collective. Errors as of `Channel.get`.

        Args:
            make: What goes to a rank of the group; not copied if it is made in the `AllocateRows`.
            use: What to do with what came from a rank; afterwards its memory is used again.
        """
        # Each rank begins with its neighbour; otherwise all would write to the same one at a time.
        steps = range(1, self.size)
        for other in ((self.rank + step) % self.size for step in steps):
            channel = self._channels[other]
            channel.put(make(other, channel.empty))
        use(self.rank, make(self.rank, _own_memory))
        for other in ((self.rank - step) % self.size for step in steps):
            with self._channels[other].get() as came:
                use(other, came)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Give each rank a part, of any shape and type; returns what each one gave, copied.

        Collective.
        """
        if len(parts) != self.size:
            raise RunError(f"{len(parts)} parts for {self.size} ranks", fix="Give one to each.")
        found: dict[int, Tensor] = {}
        self.swap(lambda to, _: parts[to], lambda by, came: found.update({by: came.clone()}))
        return [found[by] for by in range(self.size)]

    def rows_of(self, rank: int, rows: int) -> range:
        """The rows of a table that a rank holds: neighbours, in even shares."""
        return range(rank * rows // self.size, (rank + 1) * rows // self.size)

    def fetch(self, held: Tensor, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Look rows up in a table that all ranks hold together; collective, and so is backward.

        Args:
            held: This rank's rows of it [len(rows_of(rank, rows)), ...], of host memory.
            ids: Any shape, of integers: the rows that this rank wants.

        Returns:
            The rows [unique ids, ...], each once, and for each id its place among them [as ids]:
            `F.embedding(place, found)`, or `F.embedding_bag(place, found, offsets)`. Backward sums
            what all ranks have made of a row into the gradient of `held`.

        Raises:
            RunError: `held` has another number of rows, or there is no row of such a number.
        """
        own = self.rows_of(self.rank, rows)
        if len(held) != len(own):
            raise RunError(
                f"{len(held)} rows of a table of {rows}",
                where=f"rank {self.rank} of {self.size}",
                fix=f"Hold rows {own.start} to {own.stop - 1}, as rows_of says.",
            )
        # unique sorts, so that the rows of each owner are one slice of `wanted`.
        wanted, place = torch.unique(ids, return_inverse=True)
        if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < rows:
            raise RunError(
                f"rows {int(wanted[0])} to {int(wanted[-1])} are wanted of a table of {rows}",
                where=f"rank {self.rank} of {self.size}",
                fix="Give numbers from 0 to below the number of rows.",
            )
        return _Fetched.apply(held, wanted, rows, self), place  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End it on all ranks, after the last exchange. A second call does nothing."""
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> RowExchange:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for channel in self._channels.values():
            channel.__exit__(kind, error, trace)


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: Tensor, wanted: Tensor, rows: int, by: RowExchange) -> Tensor:
        """`wanted`: ascending, each number once."""
        ends = [by.rows_of(rank, rows).stop for rank in range(by.size)]
        cuts = [0, *torch.searchsorted(wanted, wanted.new_tensor(ends)).tolist()]
        spans = [slice(start, stop) for start, stop in pairwise(cuts)]
        first = by.rows_of(by.rank, rows).start
        asked = [ids - first for ids in by.all_to_all([wanted[span] for span in spans])]
        found = held.new_empty(len(wanted), *held.shape[1:])
        by.swap(
            lambda to, room: torch.index_select(
                held, 0, asked[to], out=room((len(asked[to]), *held.shape[1:]), held.dtype)
            ),
            lambda rank, came: found[spans[rank]].copy_(came),
        )
        # Backward sends gradients for the same ids, without asking for them again.
        ctx.asked, ctx.spans, ctx.by, ctx.shape = asked, spans, by, held.shape
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of `held`, from that of the rows that were found."""
        gradient = given.new_zeros(ctx.shape)
        # No id occurs twice in `asked`, and the order of ranks is fixed: equal sums in every run.
        ctx.by.swap(
            lambda to, _: given[ctx.spans[to]],
            lambda rank, came: gradient.index_add_(0, ctx.asked[rank], came),
        )
        return gradient, None, None, None


def _own_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)
