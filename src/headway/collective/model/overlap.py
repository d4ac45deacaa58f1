"""How much of the exchange hides behind compute: one step simulated, and closed-form bounds.

The link is one machine: loads leave in a fixed order, each occupies the link for b * bytes, its
sum arrives the latency later, and at most `credit` loads are in flight. Credit 1 is the a + b n
model of MG-WFBP; more credit hides latency. A load is never interrupted. Each forward pass
waits for every load, so nothing is left on the link when the next backward begins and one step
in the steady state tells everything.

Bounds: with F, B and C the seconds of forward, backward and communication, a step takes F + B +
C without overlap, at least F + max(B, C) with overlap, and at least max(F + B, C) if
communication may cross the step boundary (own derivation; the bounds of ByteScheduler, Peng et
al. 2019). `diagnose` says which of compute, bytes, buckets or the boundary limits a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway.collective.model.link_fit import LinkFit
from headway.units import format_seconds


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What is sent at once: a bucket, or a chunk of one.

    Attributes:
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
class LoadTrip:
    """What happened to one load; seconds after the start of its step, as in `BucketTiming`.

    Attributes:
        sent: Its first byte entered the link.
        received: Its sum was there, decoded.
        waited: Seconds for which the training thread waited for it.
    """

    sent: float
    received: float
    waited: float


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """A step in the steady state.

    Attributes:
        step: Seconds from the start of a step to the start of the next one, waits included.
        compute: Seconds of a step that waits nowhere.
        trips: One per load, in the order of `loads`.
    """

    step: float
    compute: float
    trips: tuple[LoadTrip, ...]

    @property
    def exposed(self) -> float:
        """Seconds for which the training thread stands still in each step."""
        return self.step - self.compute


def simulate_link(
    loads: Sequence[LinkLoad],
    link: LinkFit,
    *,
    order: Sequence[int] | None = None,
    credit: int = 2,
    crossing: bool = True,
    compute: float | None = None,
) -> ExchangeStep:
    """Simulate one step.

    Args:
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
    waited = _wait(loads, [received for _, received in moves], end, crossing=crossing)
    trips = tuple(
        LoadTrip(sent, received, wait) for (sent, received), wait in zip(moves, waited, strict=True)
    )
    return ExchangeStep(end + sum(waited), end, trips)


def ready_order(loads: Sequence[LinkLoad]) -> tuple[int, ...]:
    """First come, first served; of loads that come together the more urgent first."""
    return tuple(sorted(range(len(loads)), key=lambda i: (loads[i].ready, loads[i].needed, i)))


def _send(
    loads: Sequence[LinkLoad], link: LinkFit, order: Sequence[int], credit: int
) -> list[tuple[float, float]]:
    """(sent, received) of each load."""
    moves = [(0.0, 0.0)] * len(loads)
    thread = wire = 0.0
    arrivals: list[float] = []
    for place, i in enumerate(order):
        load = loads[i]
        # At most `credit` loads are in flight: this one leaves when an earlier one has arrived.
        allowed = arrivals[place - credit] if place >= credit else 0.0
        # One thread packs all loads, also while earlier ones are on the link.
        thread = max(load.ready, thread, allowed) + load.encode
        sent = max(thread, wire)
        wire = sent + link.seconds_per_byte * load.num_bytes
        arrivals.append(wire + link.latency)
        moves[i] = (sent, wire + link.latency + load.decode)
    return moves


def _wait(
    loads: Sequence[LinkLoad], received: Sequence[float], end: float, *, crossing: bool
) -> list[float]:
    """The wait for each load; it delays everything that comes after it."""
    waited, lost = [0.0] * len(loads), 0.0
    due = [load.needed if crossing else 0.0 for load in loads]
    # In the order of use: a wait also moves every later use back.
    for i in sorted(range(len(loads)), key=lambda i: (due[i], received[i], i)):
        waited[i] = max(0.0, received[i] - (end + due[i] + lost))
        lost += waited[i]
    return waited


# How short a step can be, in closed forms, and what stands in the way.


Consistency = Literal["none", "overlap", "crossing"]
Limit = Literal["compute", "bytes", "buckets", "overlap", "border", "ends"]

# A step within this share of a bound counts as having reached it.
_NEAR = 0.03
LIMIT_WORDS: dict[Limit, str] = {
    "compute": "compute",
    "bytes": "the bytes",
    "buckets": "the buckets",
    "overlap": "sending after the backward pass",
    "border": "the border of the step",
    "ends": "the first and the last layer",
}
_NEXT: dict[Limit, str] = {
    "compute": "nothing in the exchange makes the step faster",
    "ends": "the first layer's gradient comes last and is needed first: only smaller layers at the "
    "ends, or fewer bytes, help",
    "bytes": "send fewer bytes (compress), or use a faster link",
    "buckets": 'other bucket sizes, fitted to the link (bucket = "auto")',
    "overlap": "let buckets leave while backward runs (overlap = true)",
    "border": "let the exchange cross the border of the step (priority = true)",
}


def step_bound(forward: float, backward: float, communication: float, how: Consistency) -> float:
    """The shortest step, in seconds, from F, B and C of the module's docstring.

    Args:
        how: "none": sent after the backward pass; "overlap": while it runs; "crossing": also during
            the next forward pass.
    """
    if how == "none":
        return forward + backward + communication
    if how == "overlap":
        return forward + max(backward, communication)
    return max(forward + backward, communication)


def sharp_step_bound(
    loads: Sequence[LinkLoad], link: LinkFit, *, compute: float, crossing: bool
) -> float:
    """A closer bound, which knows when gradients come and when they are needed.

    The link cannot begin before the first gradient is there, and the most urgent load (the first
    layer's, which comes last) is exposed for its own time: "first-layer exposure". For each moment
    t and each use u: what comes after t and is needed before u must pass the link in between. With
    crossing the bound is taken over the ready times and the uses that occur; without, all are
    needed at once.

    Latency is counted once, as with unlimited credit.

    Args:
        compute: Seconds of forward and backward.
        crossing: Across the border of the step.
    """
    worst = 0.0
    uses = {load.needed for load in loads} if crossing else {0.0}
    for use in uses:
        chosen = [x for x in loads if not crossing or x.needed <= use]
        chosen.sort(key=lambda load: -load.ready)
        work = 0.0
        for load in chosen:  # those that come at or after this one's moment
            work += link.seconds_per_byte * load.num_bytes
            worst = max(worst, load.ready + work + link.latency - compute - use)
    return compute + worst


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What limits a step.

    Attributes:
        limit: "compute": the step takes hardly longer than forward and backward alone; "bytes": the
            link is busy for longer than that; "buckets": gradients leave too late or cost too much
            latency; "overlap": they leave after the backward pass; "border": the wait for the last
            sums before the next forward pass; "ends": what the first and the last layer expose
            however they are fused.
        seconds: How much of the step is due to each of them, "compute" left out.
    """

    limit: Limit
    seconds: dict[Limit, float]
    sentence: str


def diagnose(
    step: float,
    forward: float,
    backward: float,
    communication: float,
    how: Consistency,
    *,
    sharp: float | None = None,
) -> Diagnosis:
    """Say which of bucket sizes, the border of the step, and bytes limits a step.

    From the step down to the sharp bound better buckets would help, from there to the plain bound
    smaller layers at the ends, from there to the bound across the border crossing it, and from
    there to forward + backward fewer bytes.

    Args:
        step: Seconds of the step as priced or measured; the others as for `step_bound`.
        sharp: `sharp_step_bound` of the layers; None: not known, as if it were the plain one.
    """
    compute = forward + backward
    own = step_bound(forward, backward, communication, how)
    plain = step_bound(forward, backward, communication, "overlap" if how == "none" else how)
    crossed = step_bound(forward, backward, communication, "crossing")
    closer = own if how == "none" else min(max(own, sharp or 0.0), max(step, own))
    gains: dict[Limit, float] = {
        "buckets": max(0.0, step - closer),
        "ends": closer - own,
        "overlap": own - plain,
        "border": plain - crossed,
        "bytes": crossed - compute,
    }
    limit: Limit = "compute"
    if step > compute * (1 + _NEAR):
        limit = max(gains, key=lambda name: gains[name])
    return Diagnosis(limit, gains, _sentence(limit, step, compute, communication, gains))


def _sentence(
    limit: Limit, step: float, compute: float, communication: float, gains: dict[Limit, float]
) -> str:
    head = (
        f"a step of {format_seconds(step)} computes for {format_seconds(compute)} and needs the "
        f"link for {format_seconds(communication)}"
    )
    if limit == "compute":
        return f"{head}: limited by compute; {_NEXT[limit]}"
    gain = format_seconds(gains[limit])
    return f"{head}: limited by {LIMIT_WORDS[limit]} ({gain} of it); {_NEXT[limit]}"
