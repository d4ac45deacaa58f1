"""What of the gradient exchange nobody sees, because computation goes on beside it.

The network carries one message at a time. Without ZeRO, and with ZeRO 1, gradients leave in buckets
while the last micro-batch's backward goes on (Das windows, `cost.guidelines.windows`); with ZeRO 2
they are scattered behind every micro-batch, with ZeRO 3 weights are gathered in front of every
pass, one unit ahead. Invariant: `bucketed` and `played` give what playing every message on a serial
network gives, and are never below `hidden_at_most` leaves. Sources: Das et al. 2016, section on
overlap; Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP, prefetch of one unit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headway.collective.fusion import fill_buckets
from headway.collective.predict import FIRST_BUCKET
from headway.cost.guidelines.windows import serial_ends
from headway.planner.operators import Floats

Price = Callable[[Floats], Floats]
"""Seconds of a collective by its bytes."""
BUCKETS = tuple(2.0**n * 2**20 for n in (3, 5, 7, 9, 11))
"""Bytes of a bucket that are tried; the first one is the plan's default."""


class Exchange(NamedTuple):
    """Seconds of a step: of all messages, and of those that computation waits for."""

    seconds: float
    exposed: float
    bucket: float = BUCKETS[0]


class Gradients(NamedTuple):
    """Of a model's parameters, as backward makes them: bytes, and the unit that is done then."""

    sizes: tuple[int, ...]
    units: tuple[int, ...]

    def messages(self, limit: float, shares: Floats) -> tuple[Floats, np.ndarray]:
        """(bytes, unit) of the buckets of at most `limit` bytes.

        Args:
            limit: See `collective.fusion.fill_buckets`.
            shares: Of each unit's parameters, what one device holds.
        """
        own = [size * shares[unit] for size, unit in zip(self.sizes, self.units, strict=True)]
        whole = [max(1, round(size)) for size in own]
        buckets = fill_buckets(whole, range(len(whole)), int(min(limit, 2.0**62)), FIRST_BUCKET)
        found = np.array([sum(own[n] for n in bucket) for bucket in buckets])
        return found, np.array([self.units[bucket[-1]] for bucket in buckets], dtype=np.int64)


def bucketed(
    gradients: Gradients,
    backward: Floats,
    shares: Floats,
    price: Price,
    *,
    limits: Sequence[float] = BUCKETS,
    overlap: float = 1.0,
) -> Exchange:
    """The exchange behind one backward pass, with the best bucket size.

    Args:
        gradients: Of the model.
        backward: Seconds of each unit.
        shares: As in `Gradients.messages`.
        price: Of one bucket.
        limits: Sizes of a bucket to choose from; of equals the first.
        overlap: Share of what is under way that computation beside it does not feel; 0: nothing
            leaves before backward has ended.
    """
    done = np.cumsum(backward[::-1])[::-1]
    best: Exchange | None = None
    for limit in limits:
        sizes, units = gradients.messages(limit, shares)
        if not len(sizes):
            return Exchange(0.0, 0.0)
        seconds = np.asarray(price(sizes))
        # The first message is the last of `serial_ends`, which goes by the forward pass.
        ends = serial_ends(done[units][::-1], seconds[::-1], np.ones(len(sizes), dtype=bool))
        whole = float(seconds.sum())
        late = max(0.0, float(ends[0]) - float(done[0]))
        found = Exchange(whole, whole - overlap * (whole - late), limit)
        if best is None or found.exposed < best.exposed:
            best = found
        if len(sizes) == 1:
            break
    assert best is not None
    return best


def hidden_at_most(message: Floats, compute: Floats, overlap: float) -> Floats:
    """Seconds of messages that can be hidden behind so much computation."""
    return overlap * np.minimum(message, compute)


def played(
    forward: Floats,
    backward: Floats,
    scatters: Floats,
    gathers: Floats | None,
    microbatches: int,
    *,
    overlap: float = 1.0,
) -> tuple[float, Exchange]:
    """(seconds of all micro-batches, what of them is exchange).

    A unit's gather starts when the one before it begins to compute, its scatter when its backward
    has ended; messages follow each other in the order in which they start to wait.

    Args:
        forward: Seconds of each unit.
        backward: The same.
        scatters: Seconds of each unit's reduce-scatter, behind its backward.
        gathers: Seconds of each unit's all-gather, in front of both passes; None: there are none.
        microbatches: Of a step. Rounds that take as long as the one before are not played.
        overlap: As in `bucketed`.
    """
    own = np.zeros_like(forward) if gathers is None else gathers
    turn = list(
        zip(
            [*forward.tolist(), *backward[::-1].tolist()],
            [*own.tolist(), *own[::-1].tolist()],
            [*([0.0] * len(forward)), *scatters[::-1].tolist()],
            strict=True,
        )
    )
    coming = [gather for _, gather, _ in turn[1:]] + [turn[0][1]]
    clock, lane = 0.0, turn[0][1]
    there = lane  # when the weights of the next unit are there
    steps: list[tuple[float, float, float]] = []
    left = microbatches
    while left:
        before = (clock, lane, there)
        left -= 1
        for place, (compute, _, scatter) in enumerate(turn, 1):
            start = max(clock, there)
            following = coming[place - 1] if left or place < len(turn) else 0.0
            if following:
                lane = max(lane, start) + following
                there = lane
            clock = start + compute
            if scatter:
                lane = max(lane, clock) + scatter
        steps.append((clock - before[0], lane - before[1], there - before[2]))
        if left > 1 and len(steps) > 1 and np.allclose(steps[-1], steps[-2], rtol=1e-12, atol=0):
            jump = left - 1
            clock, lane, there = (
                now + jump * each for now, each in zip((clock, lane, there), steps[-1], strict=True)
            )
            left = 1
    whole = max(clock, lane)
    compute = microbatches * float(forward.sum() + backward.sum())
    sent = microbatches * float(scatters.sum() + 2.0 * own.sum())
    exposed = sent - overlap * (sent - (whole - compute))
    return compute + exposed, Exchange(sent, exposed)


def passes(
    forward: Floats,
    backward: Floats,
    scatters: Floats,
    gathers: Floats | None,
    *,
    overlap: float = 1.0,
) -> tuple[float, float, float]:
    """(forward, backward, scatters behind it) of one micro-batch of a stage, in seconds.

    Each pass begins without weights and ends with its computation; what is scattered then goes on
    beside what the rank does next. Arguments as in `played`.
    """
    own = np.zeros_like(forward) if gathers is None else gathers

    def one(compute: Floats, sent: Floats) -> tuple[float, float]:
        clock, lane = 0.0, float(own[0] if compute is forward else own[-1])
        there = lane
        ahead = [*(own if compute is forward else own[::-1])[1:].tolist(), 0.0]
        turn = compute if compute is forward else compute[::-1]
        for seconds, following, scatter in zip(
            turn.tolist(), ahead, sent[::-1].tolist(), strict=True
        ):
            start = max(clock, there)
            if following:
                there = lane = max(lane, start) + following
            clock = start + seconds
            lane = max(lane, clock) + scatter if scatter else lane
        whole = float(own.sum() + sent.sum())
        late = max(clock, lane) - clock
        hidden = whole - late - (clock - float(compute.sum()))
        return clock + (1.0 - overlap) * hidden, late

    ahead, _ = one(forward, np.zeros_like(forward))
    back, late = one(backward, scatters)
    return ahead, back, late
