"""How one bucket becomes the same on all ranks: the interface of every exchange method.

A method is written as a generator: it starts operations of torch.distributed, yields each one that
it must wait for, and goes on when it is done. So one method can be driven by the training thread,
by a progress thread with several buckets in flight, or by DDP's hook, without knowing which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from headway.collective import Nodes
from headway.comm.backend import Choose, carrying
from headway.errors import PlanError


@dataclass(frozen=True, slots=True)
class Route:
    """The ranks that exchange, as one of them sees them. No two threads may use one route.

    Attributes:
        ranks: Global ranks that exchange, ascending.
        rank: The global rank of this process.
        group: All of them.
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
class Piece:
    """Where one parameter's gradient lies in a bucket, in elements.

    `shape` is the parameter's shape in its memory order, so that `flat[start:stop].view(shape)` is
    valid for every parameter.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class Fused:
    """One bucket, or one chunk of it, as a method sees it.

    Attributes:
        buffer: 1-D; the gradients of `pieces` one after the other, then one flag per piece (1.0:
            this rank used the parameter, else 0.0). A method replaces it in place by the sum over
            the ranks of the route, or by what it approximates the sum with; flags must come out
            above 0 exactly where any rank had 1.0 (they are not part of the gradient: never
            compressed away, never in a norm or a selection).
        pieces: Empty for a chunk, which only an `elementwise` method gets.
        number: The bucket's number; the same on all ranks.
        gradients: The buffer without the flags.
        flags: One element per piece.
    """

    buffer: Tensor
    pieces: tuple[Piece, ...] = ()
    number: int = 0
    gradients: Tensor = field(init=False)
    flags: Tensor = field(init=False)

    def __post_init__(self) -> None:
        end = self.pieces[-1].stop if self.pieces else self.buffer.numel()
        self.gradients, self.flags = self.buffer[:end], self.buffer[end:]


@dataclass(frozen=True, slots=True)
class Blocking:
    """Point-to-point operations: torch gives them no future, so somebody has to wait for them."""

    works: Sequence[dist.Work]


Waiting = dist.Work | Blocking


class Method(ABC):
    """One object per bucket, so that it may keep state: residuals, factors, random generators.

    State belongs to parameters by logical name, never to bucket numbers or addresses, so that it
    survives checkpoints, other bucket sizes and other numbers of ranks.
    """

    elementwise: ClassVar[bool] = False
    """Any slice of the buffer may be exchanged alone; needed for chunks."""

    blocking: ClassVar[bool] = False
    """It yields `Blocking`: a lane drives it to its end in one go. Else two ranks that resume two
    methods in different order would wait for each other."""

    @abstractmethod
    def rounds(self, fused: Fused, route: Route) -> Iterator[Waiting]:
        """Exchange `fused.buffer` in place. All ranks start the same operations in the same order.

        Yields:
            Each operation that has to be done before the method goes on; it is resumed after that.
        """

    def state(self) -> dict[str, Tensor]:
        """What must survive a checkpoint: "logical name" or "logical name/what" -> tensor."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027  # most have no state
        """Take up what `state` returned; entries of other parameters are ignored."""


def wait(waiting: Waiting) -> None:
    """Block until the operation is done."""
    if isinstance(waiting, Blocking):
        for work in waiting.works:
            work.wait()
    else:
        waiting.wait()


def complete(method: Method, fused: Fused, route: Route) -> None:
    """Drive one exchange to its end in this thread."""
    finish(method.rounds(fused, route))


def finish(rounds: Iterator[Waiting], waiting: Waiting | None = None) -> None:
    """Drive a method that is under way to its end in this thread.

    Args:
        rounds: The method at work.
        waiting: What it waits for; None: it has not begun.
    """
    if waiting is not None:
        wait(waiting)
    for operation in rounds:
        wait(operation)


class AllReduce(Method):
    """The plain sum."""

    elementwise = True

    def rounds(self, fused: Fused, route: Route) -> Iterator[Waiting]:
        yield all_reduce(fused.buffer, route)


def all_reduce(buffer: Tensor, route: Route) -> dist.Work:
    """Start the sum of a buffer over a route, in place."""
    if buffer.is_complex():
        buffer = torch.view_as_real(buffer)
    # The function dist.all_reduce checks its arguments before this, for a third of its time.
    return route.group.allreduce([buffer])


def make_route(
    ranks: Sequence[int] | None,
    nodes: Nodes,
    *,
    hierarchical: bool = False,
    choose: Choose | None = None,
    timeout: timedelta | None = None,
) -> Route | None:
    """Make the groups of a route; collective over all ranks of the world, in the same order.

    Args:
        ranks: Who exchanges; None: all ranks of the world.
        nodes: Of the whole world.
        hierarchical: Make the groups inside and across nodes, too.
        choose: Of the programs that carry the sums over all of `ranks`; None: torch's own.
        timeout: Longest wait of an operation of the groups; None: torch's half an hour.

    Returns:
        None where this process is not one of `ranks`.

    Raises:
        PlanError: A hierarchical route over nodes with unequal numbers of its ranks.
    """
    chosen = tuple(range(dist.get_world_size())) if ranks is None else tuple(sorted(ranks))
    own = dist.get_rank()
    here = Nodes(
        tuple(
            kept
            for members in nodes.members
            if (kept := tuple(rank for rank in members if rank in chosen))
        )
    )
    if hierarchical:
        check_nodes(here)
    backend = _backend()
    carried = None if choose is None or dist.get_backend() == "fake" else carrying(choose)
    group = dist.new_group(list(chosen), backend=carried or backend, timeout=timeout)
    inside = across = None
    if hierarchical:
        for members in here.members:
            made = dist.new_group(list(members), backend=backend, timeout=timeout)
            inside = made if own in members and len(members) > 1 else inside
        for first in here.members[0]:
            column = here.across(first)
            made = dist.new_group(list(column), backend=backend, timeout=timeout)
            across = made if own in column and len(column) > 1 else across
    if own not in chosen:
        return None
    return Route(chosen, own, group, here, inside, across)


def check_nodes(nodes: Nodes) -> None:
    """A hierarchical exchange pairs the ranks of nodes by place.

    Raises:
        PlanError: The nodes have unequal numbers of ranks.
    """
    if not nodes.uniform:
        sizes = ", ".join(str(len(ranks)) for ranks in nodes.members)
        raise PlanError(
            "this exchange cannot run here",
            problems=[f"exchange.collective hierarchical: the nodes have {sizes} ranks"],
            fix='Start as many processes on every node, or use collective = "all_reduce".',
        )


def _backend() -> str | None:
    """Gloo on CPUs; where there are GPUs, and in a fake world, the default of the world."""
    return None if torch.cuda.is_available() or dist.get_backend() == "fake" else "gloo"
