"""How short a step can be, in closed forms, and what stands in the way.

With F, B the seconds of the forward and the backward pass and C those of the whole communication:
without overlap a step takes F + B + C, with overlap at least F + max(B, C), and at least
max(F + B, C) if it crosses the border of the step (own derivation; the same bounds as in
ByteScheduler, Peng et al. 2019). Invariant: no played step is below its bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway.collective.link import LinkFit
from headway.collective.play import Load
from headway.units import format_seconds

Consistency = Literal["none", "overlap", "crossing"]
Limit = Literal["compute", "bytes", "buckets", "overlap", "border", "ends"]

_NEAR = 0.03
"""A step within this share of a bound counts as having reached it."""
WORDS: dict[Limit, str] = {
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


def bound(forward: float, backward: float, communication: float, how: Consistency) -> float:
    """The shortest step.

    Args:
        forward: F, seconds.
        backward: B, seconds.
        communication: C: seconds for which the link is busy in each step.
        how: "none": sent after the backward pass; "overlap": while it runs; "crossing": also during
            the next forward pass.
    """
    if how == "none":
        return forward + backward + communication
    if how == "overlap":
        return forward + max(backward, communication)
    return max(forward + backward, communication)


def crossing_gain(forward: float, backward: float) -> float:
    """The most that crossing can gain over overlap: 1 + F / (F + B), reached at C = F + B."""
    return 1 + forward / (forward + backward)


def sharp_bound(loads: Sequence[Load], link: LinkFit, *, compute: float, crossing: bool) -> float:
    """A closer bound, which knows when gradients come and when they are needed.

    The link cannot begin before the first gradient is there, and the most urgent load (the first
    layer's, which comes last) is exposed for its own time: "first-layer exposure". For each moment
    t and each use u: what comes after t and is needed before u must pass the link in between. With
    crossing the bound is taken over the ready times and the uses that occur; without, all are
    needed at once.

    Args:
        loads: What is sent in each step.
        link: Its price; latency is counted once, as with unlimited credit.
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
        sentence: The same in words, with the numbers and the remedy.
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

    The step is taken apart from the top: down to the sharp bound better buckets would lead, from
    there to the plain bound smaller layers at the ends, from there to the bound across the border
    crossing it, and from there to forward + backward fewer bytes.

    Args:
        step: Seconds of the step as priced or measured.
        forward: F, seconds.
        backward: B, seconds.
        communication: C, seconds for which the link is busy.
        how: As for `bound`.
        sharp: `sharp_bound` of the layers; None: not known, as if it were the plain one.
    """
    compute = forward + backward
    own = bound(forward, backward, communication, how)
    plain = bound(forward, backward, communication, "overlap" if how == "none" else how)
    crossed = bound(forward, backward, communication, "crossing")
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
    return f"{head}: limited by {WORDS[limit]} ({gain} of it); {_NEXT[limit]}"
