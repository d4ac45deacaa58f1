"""Point-to-point building blocks: every receive is posted before the first send.

Gloo has one connection for a pair of ranks. The receiver's notice that it is ready queues behind
what it is sending itself, so that a send posted first makes the exchange half duplex: twice the
time. Gloo's own reduce-scatter is a whole all-reduce and a slice, twice the bytes; the direct one
here moves (n - 1) / n of the buffer each way. Invariant: what is sent under a tag to a rank is
received by it under the same tag with the same size, and nothing empty travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from headway.comm.method import Blocking, Waiting

Span = slice
"""A part of a flat buffer: start and stop in elements."""

PARCEL_BYTES = 2**19
PARCELS = 3
"""A large message travels in parcels of this size, so many under way: a whole one that fills the
socket's buffers in both directions is slower now and then, and its parts could not be used yet."""

Rounds = Generator[Waiting, None, None]


@dataclass(frozen=True, slots=True)
class Circle:
    """Ranks that exchange directly with each other, each known by its place.

    Attributes:
        group: A process group that holds them all, and perhaps more.
        members: The rank inside `group` of each place.
        place: Of this process.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    place: int

    @staticmethod
    def of(group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> Circle:
        """From global ranks; their order is that of the places."""
        members = tuple(dist.get_group_rank(group, member) for member in ranks)
        return Circle(group, members, ranks.index(rank))

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def others(self) -> tuple[int, ...]:
        """All places but one's own, beginning behind it: no place gets all messages at once."""
        return tuple((self.place + step) % self.size for step in range(1, self.size))


Message = tuple[Tensor, int]
"""A contiguous tensor, and the place that it comes from or goes to."""


def swap(
    circle: Circle, receives: Iterable[Message], sends: Iterable[Message], tag: int
) -> Blocking:
    """Start to receive and to send; returns what has to be waited for.

    The tensors must not be touched before that. Several messages of one tag between the same two
    ranks arrive in the order in which they were posted.
    """
    group, members = circle.group, circle.members
    arriving = [(tensor, members[place]) for tensor, place in receives if tensor.numel()]
    leaving = [(tensor, members[place]) for tensor, place in sends if tensor.numel()]
    if not arriving and not leaving:
        return Blocking(())
    if (arriving or leaving)[0][0].is_cpu:
        works = [dist.irecv(t, group=group, group_src=peer, tag=tag) for t, peer in arriving]
        works += [dist.isend(t, group=group, group_dst=peer, tag=tag) for t, peer in leaving]
        return Blocking([work for work in works if work is not None])
    # As one batch NCCL carries receives and sends out at the same time.
    batch = [dist.P2POp(dist.irecv, t, None, group, tag, peer) for t, peer in arriving]
    batch += [dist.P2POp(dist.isend, t, None, group, tag, peer) for t, peer in leaving]
    return Blocking(dist.batch_isend_irecv(batch))


def stream(
    circle: Circle, receive: Tensor, send: Tensor, place: int, tag: int
) -> Generator[tuple[Blocking, Span], None, None]:
    """Exchange two large messages with one place, parcel by parcel.

    Both sides must give the same two lengths, which may differ from each other.

    Yields:
        What has to be waited for, and the part of `receive` that is there after that.
    """
    size = max(receive.numel(), send.numel()) * send.element_size()
    count = max(1, -(-size // PARCEL_BYTES))
    flying: deque[tuple[Blocking, Span]] = deque()
    for into, out in zip(shards(receive.numel(), count), shards(send.numel(), count), strict=True):
        if len(flying) == PARCELS:
            yield flying.popleft()
        flying.append((swap(circle, [(receive[into], place)], [(send[out], place)], tag), into))
    yield from flying


def first_tag(number: int, turn: int) -> int:
    """The first of the 1024 tags of one exchange.

    Args:
        number: Of the bucket, below 2^17.
        turn: How many exchanges of this bucket were begun before, on every rank alike: chunks of
            one bucket that are under way together have different tags.
    """
    return (number << 14) + (turn % 16 << 10)


def shards(length: int, count: int, start: int = 0) -> tuple[Span, ...]:
    """Cut [start, start + length) into `count` parts whose sizes differ by at most one.

    Longer ones come first; with fewer elements than parts the last ones are empty.
    """
    size, longer = divmod(length, count)
    bounds = [start + place * size + min(place, longer) for place in range(count + 1)]
    return tuple(slice(low, high) for low, high in pairwise(bounds))


def length(span: Span) -> int:
    """Elements of a span."""
    size: int = span.stop - span.start
    return size


class Scratch:
    """Buffers that are used again and again.

    Fresh memory costs more than the sum that is made in it: the kernel clears each of its pages.
    Not for use by two threads.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, numel: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A 1-D tensor with any content, of the type and on the device of `like`."""
        key = (numel, dtype or like.dtype, like.device)
        free = self._free.get(key)
        if free:
            return free.pop()
        return torch.empty(numel, dtype=key[1], device=key[2])

    def give(self, *tensors: Tensor) -> None:
        """Hand back what `take` returned, once no operation uses it any more."""
        for tensor in tensors:
            key = (tensor.numel(), tensor.dtype, tensor.device)
            self._free.setdefault(key, []).append(tensor)


def reduce_scatter(
    flat: Tensor, spans: Sequence[Span], circle: Circle, tag: int, scratch: Scratch
) -> Rounds:
    """Direct reduce-scatter: afterwards `flat[spans[circle.place]]` holds the sum over the circle.

    Sends and receives (n - 1) / n of the spans. Terms are added in order of place, whoever owns the
    span: the sum does not depend on where a buffer is cut. The rest of `flat` is left as it is.

    Args:
        flat: 1-D.
        spans: Of each place; of any size.
    """
    own = flat[spans[circle.place]]
    received = scratch.take(own.numel() * (circle.size - 1), own)
    parts = dict(zip(circle.others, received.view(circle.size - 1, own.numel()), strict=True))
    yield swap(
        circle,
        [(parts[place], place) for place in circle.others],
        [(flat[spans[place]], place) for place in circle.others],
        tag,
    )
    _add_in_order([*(parts.get(place, own) for place in range(circle.size))], own)
    scratch.give(received)


def _add_in_order(terms: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of two or more terms, added from the left, to `out`, which is one of them.

    The other terms are overwritten.
    """
    total = terms[0]
    for term in terms[1:-1]:
        total.add_(term)
    torch.add(total, terms[-1], out=out)


def all_gather(flat: Tensor, spans: Sequence[Span], circle: Circle, tag: int) -> Rounds:
    """Direct all-gather in place: every place owns its span and gets those of the others."""
    own = flat[spans[circle.place]]
    yield swap(
        circle,
        [(flat[spans[place]], place) for place in circle.others],
        [(own, place) for place in circle.others],
        tag,
    )


def conveyor(tasks: Iterable[Iterator[Waiting]], window: int) -> Rounds:
    """Carry out tasks of several rounds, `window` of them under way at the same time.

    While one waits for its answer the payload of the next ones keeps the link busy. They are
    resumed in turn, so that all ranks whose tasks have the same rounds go through them in the same
    order: nobody waits for a message that is to be sent after the one he is waiting for himself.
    """
    rest = iter(tasks)
    flying: deque[tuple[Iterator[Waiting], Waiting]] = deque()
    while True:
        while len(flying) < window and (task := next(rest, None)) is not None:
            if (waiting := next(task, None)) is not None:
                flying.append((task, waiting))
        if not flying:
            return
        task, waiting = flying.popleft()
        yield waiting
        if (following := next(task, None)) is not None:
            flying.append((task, following))
