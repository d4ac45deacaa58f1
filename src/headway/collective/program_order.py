"""In which order the steps of all ranks can happen, and how long the longest chain of messages is.

Messages meet: a send is through only when its receive has begun, and the other way round. That is
the strictest of transports, so an order found here exists on every one. Invariant: the order keeps
each rank's own, and every Wait stands behind the beginnings of both ends of what it waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from headway.collective.program import CollectiveProgram, Place, Recv, Wait


def in_order(
    program: CollectiveProgram, partners: Mapping[Place, Place]
) -> tuple[list[Place], dict[int, Place]]:
    """All steps in an order in which they can happen.

    Args:
        program: Any; a message without a partner is never through.
        partners: `program.partners()`.

    Returns:
        The places, and of each rank that cannot go on the Recv or Send that it waits for.
    """
    at = [0] * program.ranks
    order: list[Place] = []
    stuck: dict[int, Place] = {}
    waiting: dict[int, list[int]] = {}  # by whom they wait for
    queue = deque(range(program.ranks))
    while queue:
        rank = queue.popleft()
        steps = program.steps[rank]
        stuck.pop(rank, None)
        while at[rank] < len(steps):
            blocked = _blocked(rank, steps[at[rank]], partners, at)
            if blocked is not None:
                stuck[rank] = blocked
                if blocked in partners:
                    waiting.setdefault(partners[blocked][0], []).append(rank)
                break
            order.append((rank, at[rank]))
            at[rank] += 1
        waits = waiting.pop(rank, [])
        woken = [one for one in waits if at[rank] > partners[stuck[one]][1]]
        queue.extend(woken)
        waiting[rank] = [one for one in waits if one not in woken]
    return order, stuck


def _blocked(
    rank: int, step: object, partners: Mapping[Place, Place], at: list[int]
) -> Place | None:
    """What a Wait waits for and whose other end has not begun."""
    if not isinstance(step, Wait):
        return None
    for place in step.steps:
        other = partners.get((rank, place))
        if other is None or at[other[0]] <= other[1]:
            return rank, place
    return None


def rounds(program: CollectiveProgram) -> int:
    """Messages on the longest chain in which each needs what the one before brought.

    The time of a program whose messages cost one unit each and whose bytes cost nothing.

    Raises:
        ValueError: It cannot be carried out: see `program_check`.
    """
    partners = program.partners()
    order, stuck = in_order(program, partners)
    if stuck:
        raise ValueError(f"{program.name}: ranks {sorted(stuck)} wait forever")
    now = [0] * program.ranks
    begun: dict[Place, int] = {}
    for rank, place in order:
        step = program.steps[rank][place]
        begun[rank, place] = now[rank]
        if isinstance(step, Wait):
            for one in step.steps:
                met = max(begun[rank, one], begun[partners[rank, one]])
                arrived = met + isinstance(program.steps[rank][one], Recv)
                now[rank] = max(now[rank], arrived)
    return max(now, default=0)
