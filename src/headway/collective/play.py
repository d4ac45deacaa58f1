"""One training step of the exchange, played: when each load leaves, arrives, and is waited for.

The link is one machine: loads leave in a fixed order, a load occupies the link for b * bytes, its
sum is there the latency later, and at most `credit` loads are on their way. With credit 1 this is
the a + b n model of MG-WFBP, one collective after the other; with more, latency is hidden. A load
is never interrupted. Invariant: nothing of a step is left on the link when its successor's backward
pass begins, because each forward pass has by then waited for every load; so one step tells all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.collective.link import LinkFit


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent at once: a bucket, or a chunk of one.

    Attributes:
        name: For people.
        num_bytes: Size of the buffer as the link sees it (compressed size, if it is compressed).
        ready: Its last gradient is there; seconds after the start of a step that waits nowhere.
        needed: The first layer that uses its parameters begins; seconds after the start of a
            forward pass that waits nowhere.
        encode: Seconds for which the progress thread packs it before it leaves.
        decode: Seconds from its arrival to its use.
    """

    name: str | int
    num_bytes: float
    ready: float
    needed: float
    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Trip:
    """What happened to one load; seconds after the start of its step, as in `comm`'s Flight.

    Attributes:
        ready: Its gradients were there.
        issued: The progress thread took it up (and began to encode it).
        sent: Its first byte entered the link.
        received: Its sum was there, decoded.
        needed: The training thread asked for it.
        waited: Seconds for which the training thread then stood still.
    """

    ready: float
    issued: float
    sent: float
    received: float
    needed: float
    waited: float


@dataclass(frozen=True, slots=True)
class Played:
    """A step in the steady state.

    Attributes:
        step: Seconds from the start of a step to the start of the next one, waits included.
        compute: Seconds of a step that waits nowhere.
        trips: One per load, in the order of `loads`.
    """

    step: float
    compute: float
    trips: tuple[Trip, ...]

    @property
    def exposed(self) -> float:
        """Seconds for which the training thread stands still in each step."""
        return self.step - self.compute


def play(
    loads: Sequence[Load],
    link: LinkFit,
    *,
    order: Sequence[int] | None = None,
    credit: int = 2,
    crossing: bool = True,
    compute: float | None = None,
) -> Played:
    """Play one step.

    Args:
        loads: What is sent in each step.
        link: Its price.
        order: Indices into `loads`, in sending order; None: as they become ready.
        credit: Loads on their way at the same time.
        crossing: The next forward pass begins at once and waits for each load where it is needed;
            else it begins when all sums are there.
        compute: Seconds of forward and backward; None: the last gradient ends the backward pass.

    Raises:
        ValueError: `order` is not a permutation, or `credit` is below 1.
    """
    sequence = tuple(order) if order is not None else ready_order(loads)
    if sorted(sequence) != list(range(len(loads))):
        raise ValueError(f"{sequence} is not an order of {len(loads)} loads")
    if credit < 1:
        raise ValueError(f"credit is {credit}; at least 1")
    end = max((load.ready for load in loads), default=0.0) if compute is None else compute
    moves = _send(loads, link, sequence, credit)
    needed, waited = _wait(loads, [move[2] for move in moves], end, crossing=crossing)
    trips = tuple(
        Trip(load.ready, *move, asked, stood)
        for load, move, asked, stood in zip(loads, moves, needed, waited, strict=True)
    )
    return Played(end + sum(waited), end, trips)


def ready_order(loads: Sequence[Load]) -> tuple[int, ...]:
    """First come, first served; of loads that come together the more urgent first."""
    return tuple(sorted(range(len(loads)), key=lambda i: (loads[i].ready, loads[i].needed, i)))


def _send(
    loads: Sequence[Load], link: LinkFit, order: Sequence[int], credit: int
) -> list[tuple[float, float, float]]:
    """(issued, sent, received) of each load."""
    moves = [(0.0, 0.0, 0.0)] * len(loads)
    thread = wire = 0.0
    arrivals: list[float] = []
    for place, i in enumerate(order):
        load = loads[i]
        allowed = arrivals[place - credit] if place >= credit else 0.0
        issued = max(load.ready, thread, allowed)
        thread = issued + load.encode
        sent = max(thread, wire)
        wire = sent + link.seconds_per_byte * load.num_bytes
        arrivals.append(wire + link.latency)
        moves[i] = (issued, sent, wire + link.latency + load.decode)
    return moves


def _wait(
    loads: Sequence[Load], received: Sequence[float], end: float, *, crossing: bool
) -> tuple[list[float], list[float]]:
    """(needed, waited) of each load; a wait delays everything that comes after it."""
    needed, waited = [0.0] * len(loads), [0.0] * len(loads)
    lost = 0.0
    due = [load.needed if crossing else 0.0 for load in loads]
    for i in sorted(range(len(loads)), key=lambda i: (due[i], received[i], i)):
        needed[i] = end + due[i] + lost
        waited[i] = max(0.0, received[i] - needed[i])
        lost += waited[i]
    return needed, waited
