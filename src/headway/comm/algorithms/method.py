"""The interface of every exchange method, and the operations that methods are made of.

A method is a generator: it starts operations of torch.distributed, yields each one that it must
wait for, and continues when that is done. So one method can be driven by the training thread, by a
progress thread with several buckets in flight, or by DDP's communication hook, without knowing
which.

The point-to-point operations post every receive before the first send. Gloo has one connection for
a pair of ranks, and the receiver's ready notice queues behind what it is sending itself, so that a
send posted first makes the exchange half duplex: twice the time. Gloo's own reduce-scatter is a
whole all-reduce and a slice, twice the bytes; the direct one here moves (n - 1) / n of the buffer
each way. What is sent under a tag to a rank must be received by it under the same tag with the same
size; nothing empty is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from headway.collective.nodes import Nodes
from headway.comm.backend.process_group import HeadwayGroup
from headway.errors import PlanError


@dataclass(frozen=True, slots=True)
class Route:
    """The ranks that exchange, as one of them sees them. No two threads may use one route.

    Attributes:
        ranks: Global ranks that exchange, ascending.
        rank: The global rank of this process.
        nodes: How `ranks` are spread over nodes; in global ranks.
        inside: The ranks of this node; None where the node has one rank or was not asked for.
        across: The ranks with the same place in the other nodes; None where there is one node or
            it was not asked for.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup
    nodes: Nodes
    inside: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class GradientSlice:
    """Where one parameter's gradient lies in a bucket, in elements.

    `shape` is the parameter's shape in its memory order, so that `flat[start:stop].view(shape)` is
    valid for every parameter.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class FusedBuffer:
    """One bucket, or one chunk of it, as a method sees it.

    Attributes:
        buffer: 1-D; the gradients of `pieces` one after the other, then one flag per piece (1.0:
            this rank used the parameter, else 0.0). A method replaces it in place by the sum over
            the ranks of the route, or by what it approximates the sum with; flags must come out
            above 0 exactly where any rank had 1.0 (they are not part of the gradient: never
            compressed away, never in a norm or a selection).
        pieces: Empty for a chunk, which only an `elementwise` method gets.
        number: The bucket's number; the same on all ranks.
    """

    buffer: Tensor
    pieces: tuple[GradientSlice, ...] = ()
    number: int = 0
    gradients: Tensor = field(init=False)
    flags: Tensor = field(init=False)

    def __post_init__(self) -> None:
        end = self.pieces[-1].stop if self.pieces else self.buffer.numel()
        self.gradients, self.flags = self.buffer[:end], self.buffer[end:]


@dataclass(frozen=True, slots=True)
class PointToPointOperations:
    """Point-to-point operations: torch gives them no future, so somebody has to wait for them."""

    works: Sequence[dist.Work]


PendingOperation = dist.Work | PointToPointOperations


class ExchangeMethod(ABC):
    """One object per bucket, so that it may keep state: residuals, factors, random generators.

    State belongs to parameters by logical name, never to bucket numbers or addresses, so that it
    survives checkpoints, other bucket sizes and other numbers of ranks.
    """

    elementwise: ClassVar[bool] = False
    """Any slice of the buffer may be exchanged alone; needed for chunks."""

    blocking: ClassVar[bool] = False
    """It yields `PointToPointOperations`: a lane drives it to its end in one go. Else two ranks
    that resume two methods in different order would wait for each other.
    """

    @abstractmethod
    def rounds(self, fused: FusedBuffer, route: Route) -> Iterator[PendingOperation]:
        """Exchange `fused.buffer` in place. All ranks start the same operations in the same order.

        Yields:
            Each operation that has to be done before the method goes on; it is resumed after that.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """What must survive a checkpoint: "logical name" or "logical name/what" -> tensor."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` returned; entries of other parameters are ignored."""


class StatelessMethod(ExchangeMethod):
    """One that keeps nothing from step to step."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        pass


def wait(waiting: PendingOperation) -> None:
    """Block until the operation is done."""
    if isinstance(waiting, PointToPointOperations):
        for work in waiting.works:
            work.wait()
    else:
        waiting.wait()


def complete(method: ExchangeMethod, fused: FusedBuffer, route: Route) -> None:
    """Drive one exchange to its end in this thread."""
    finish(method.rounds(fused, route))


def finish(rounds: Iterator[PendingOperation], waiting: PendingOperation | None = None) -> None:
    """Drive a method to its end in this thread; `waiting` is what it waits for if it has begun."""
    if waiting is not None:
        wait(waiting)
    for operation in rounds:
        wait(operation)


class AllReduce(StatelessMethod):
    """The plain sum."""

    elementwise = True

    def rounds(self, fused: FusedBuffer, route: Route) -> Iterator[PendingOperation]:
        yield all_reduce(fused.buffer, route)


def all_reduce(buffer: Tensor, route: Route) -> dist.Work:
    """Start the sum of a buffer over a route, in place."""
    if buffer.is_complex():
        buffer = torch.view_as_real(buffer)
    # The function dist.all_reduce checks its arguments before this, for a third of its time.
    return route.group.allreduce([buffer])


def check_uniform_nodes(nodes: Nodes) -> None:
    """Raise a PlanError unless all nodes have as many ranks, which are paired by place."""
    if not nodes.uniform:
        sizes = ", ".join(str(len(ranks)) for ranks in nodes.members)
        raise PlanError(
            "this exchange cannot run here",
            problems=[f"exchange.collective hierarchical: the nodes have {sizes} ranks"],
            fix='Start as many processes on every node, or use collective = "all_reduce".',
        )


# Point-to-point building blocks: every receive is posted before the first send.


ElementSpan = slice
"""A part of a flat buffer: start and stop in elements."""

TRANSFER_CHUNK_BYTES = 2**19
# A large message travels in parcels of this size, so many under way: a whole one that fills the
# socket's buffers in both directions is slower now and then, and its parts could not be used yet.
TRANSFER_CHUNKS_IN_FLIGHT = 3

Rounds = Generator[PendingOperation, None, None]


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """Ranks that exchange directly with each other, each known by its place.

    Attributes:
        group: A process group that holds them all, and perhaps more.
        members: The rank inside `group` of each place.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    place: int

    @staticmethod
    def of(group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> PeerGroup:
        """From global ranks; their order is that of the places."""
        if isinstance(group, HeadwayGroup):  # torch may not have been told of it
            members = tuple(map(group.place_of, ranks))
        else:
            members = tuple(dist.get_group_rank(group, member) for member in ranks)
        return PeerGroup(group, members, ranks.index(rank))

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def others(self) -> tuple[int, ...]:
        """All places but one's own, beginning behind it: no place gets all messages at once."""
        return tuple((self.place + step) % self.size for step in range(1, self.size))


PeerMessage = tuple[Tensor, int]
"""A contiguous tensor, and the place that it comes from or goes to."""


def send_receive(
    circle: PeerGroup, receives: Iterable[PeerMessage], sends: Iterable[PeerMessage], tag: int
) -> PointToPointOperations:
    """Start to receive and to send; returns what has to be waited for.

    The tensors must not be touched before that. Several messages of one tag between the same two
    ranks arrive in the order in which they were posted.
    """
    group, members = circle.group, circle.members
    arriving = [(tensor, members[place]) for tensor, place in receives if tensor.numel()]
    leaving = [(tensor, members[place]) for tensor, place in sends if tensor.numel()]
    if not arriving and not leaving:
        return PointToPointOperations(())
    if (arriving or leaving)[0][0].is_cpu:
        works = [dist.irecv(t, group=group, group_src=peer, tag=tag) for t, peer in arriving]
        works += [dist.isend(t, group=group, group_dst=peer, tag=tag) for t, peer in leaving]
        return PointToPointOperations([work for work in works if work is not None])
    # As one batch NCCL carries receives and sends out at the same time.
    batch = [dist.P2POp(dist.irecv, t, None, group, tag, peer) for t, peer in arriving]
    batch += [dist.P2POp(dist.isend, t, None, group, tag, peer) for t, peer in leaving]
    return PointToPointOperations(dist.batch_isend_irecv(batch))


def send_receive_chunked(
    circle: PeerGroup, receive: Tensor, send: Tensor, place: int, tag: int
) -> Generator[tuple[PointToPointOperations, ElementSpan], None, None]:
    """Exchange two large messages with one place, parcel by parcel; both sides give both lengths.

    Yields:
        What has to be waited for, and the part of `receive` that is there after that.
    """
    size = max(receive.numel(), send.numel()) * send.element_size()
    count = max(1, -(-size // TRANSFER_CHUNK_BYTES))
    flying: deque[tuple[PointToPointOperations, ElementSpan]] = deque()
    for into, out in zip(
        split_evenly(receive.numel(), count), split_evenly(send.numel(), count), strict=True
    ):
        if len(flying) == TRANSFER_CHUNKS_IN_FLIGHT:
            yield flying.popleft()
        flying.append(
            (send_receive(circle, [(receive[into], place)], [(send[out], place)], tag), into)
        )
    yield from flying


def first_tag(number: int, turn: int) -> int:
    """The first of the 1024 tags of one exchange.

    Args:
        number: Of the bucket, below 2^17.
        turn: How many exchanges of this bucket were begun before, equal on all ranks: chunks of
            one bucket that are under way together have different tags.
    """
    # A tag has 31 bits: 17 for the bucket, 4 for the turn, 10 for the exchange itself.
    return (number << 14) + (turn % 16 << 10)


def split_evenly(length: int, count: int, start: int = 0) -> tuple[ElementSpan, ...]:
    """Cut [start, start + length) into `count` parts whose sizes differ by at most one.

    Longer ones come first; with fewer elements than parts the last ones are empty.
    """
    size, longer = divmod(length, count)
    bounds = [start + place * size + min(place, longer) for place in range(count + 1)]
    return tuple(slice(low, high) for low, high in pairwise(bounds))


def span_length(span: ElementSpan) -> int:
    """Elements of a span."""
    size: int = span.stop - span.start
    return size


class ScratchBuffers:
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
    flat: Tensor, spans: Sequence[ElementSpan], circle: PeerGroup, tag: int, scratch: ScratchBuffers
) -> Rounds:
    """Direct reduce-scatter: afterwards `flat[spans[circle.place]]` holds the sum over the circle.

    Sends and receives (n - 1) / n of the spans, one for each place. Terms are added in order of
    place, whoever owns the span: the sum does not depend on where a buffer is cut. The rest of
    `flat` is left as it is.
    """
    own = flat[spans[circle.place]]
    received = scratch.take(own.numel() * (circle.size - 1), own)
    parts = dict(zip(circle.others, received.view(circle.size - 1, own.numel()), strict=True))
    yield send_receive(
        circle,
        [(parts[place], place) for place in circle.others],
        [(flat[spans[place]], place) for place in circle.others],
        tag,
    )
    # Formed in the memory of the first term: `own` may be a later one, and is written last.
    total, *others = (parts.get(place, own) for place in range(circle.size))
    for term in others[:-1]:
        total.add_(term)
    torch.add(total, others[-1], out=own)
    scratch.give(received)


def all_gather(flat: Tensor, spans: Sequence[ElementSpan], circle: PeerGroup, tag: int) -> Rounds:
    """Direct all-gather in place: every place owns its span and gets those of the others."""
    own = flat[spans[circle.place]]
    yield send_receive(
        circle,
        [(flat[spans[place]], place) for place in circle.others],
        [(own, place) for place in circle.others],
        tag,
    )


def pipeline_rounds(tasks: Iterable[Iterator[PendingOperation]], window: int) -> Rounds:
    """Carry out tasks of several rounds, `window` of them under way at the same time.

    While one waits for its answer the payload of the next ones keeps the link busy. They are
    resumed in turn, so that all ranks whose tasks have the same rounds go through them in the same
    order: no rank waits for a message that its peer sends only after one that it waits for itself.
    """
    rest = iter(tasks)
    flying: deque[tuple[Iterator[PendingOperation], PendingOperation]] = deque()
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
