"""Steps of a priced exchange, played event by event into a timeline.

Unlike the price, which argues that one step tells all, this plays several steps one after the
other with a training thread, a progress thread and a link that know nothing of each other but the
events; so each confirms the other. Invariant: no lane does two things at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headway.collective.predict import Layer, Predicted
from headway.timeline import Span, Timeline
from headway.units import format_bytes


@dataclass(frozen=True, slots=True)
class Simulated:
    """Some steps.

    Attributes:
        timeline: Of rank 0; all ranks do the same at the same time. The exchange lane shows the
            link: a bar is the time for which a load occupies it.
        starts: When each step began, and when the last one ended.
        bytes_sent: Bytes of all loads that went over the link.
    """

    timeline: Timeline
    starts: tuple[float, ...]
    bytes_sent: float

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of each step; the first one has nothing to wait for in its forward pass."""
        return tuple(b - a for a, b in pairwise(self.starts))


@dataclass(slots=True)
class _State:
    """Clocks of the three, and what has landed."""

    training: float = 0.0
    thread: float = 0.0
    wire: float = 0.0
    landed: dict[int, float] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    sent: float = 0.0


def simulate_exchange(
    predicted: Predicted, layers: Sequence[Layer], *, steps: int = 3, overlap: bool = True
) -> Simulated:
    """Play steps.

    With crossing, a step ends when its backward pass does, and the next one begins at once; without
    it ends when all sums are there.

    Args:
        predicted: What is sent, in which order.
        layers: As they were priced.
        steps: How many; the last one is played until all its sums have landed.
        overlap: Whether loads leave while backward runs.
    """
    state = _State()
    starts = [0.0]
    bucket_of = {i: number for number, bucket in enumerate(predicted.buckets) for i in bucket}
    for step in range(steps):
        _forward(state, predicted, layers, bucket_of, step)
        ready = _backward(state, layers, bucket_of, step)
        if not overlap:
            ready = dict.fromkeys(ready, state.training)
        _exchange(state, predicted, ready, step)
        if not predicted.crossing or step == steps - 1:
            _wait(state, max(state.landed.values(), default=0.0), "all sums", step)
        starts.append(state.training)
    return Simulated(Timeline.of(state.spans), tuple(starts), state.sent)


def _forward(
    state: _State,
    predicted: Predicted,
    layers: Sequence[Layer],
    bucket_of: dict[int, int],
    step: int,
) -> None:
    """Layer by layer; each waits for the sums of its own bucket, if any is still under way."""
    for i, layer in enumerate(layers):
        number = bucket_of.get(i)
        landed = [
            time
            for load, time in state.landed.items()
            if predicted.home[load] == number and time > state.training
        ]
        if landed:
            _wait(state, max(landed), f"bucket {number}", step)
        _compute(state, "forward", layer.name, layer.forward, step)
    state.landed.clear()


def _backward(
    state: _State, layers: Sequence[Layer], bucket_of: dict[int, int], step: int
) -> dict[int, float]:
    """Against the order; returns when the last gradient of each bucket was there."""
    ready: dict[int, float] = {}
    for i in reversed(range(len(layers))):
        _compute(state, "backward", layers[i].name, layers[i].backward, step)
        if i in bucket_of:
            ready[bucket_of[i]] = state.training
    return ready


def _exchange(state: _State, predicted: Predicted, ready: dict[int, float], step: int) -> None:
    """The progress thread: in the fixed order, as credit allows."""
    for i in predicted.order:
        load, link = predicted.loads[i], predicted.link
        place = len(state.arrivals) - predicted.credit
        allowed = state.arrivals[place] if place >= 0 else 0.0
        begin = max(ready[predicted.home[i]], state.thread, allowed)
        state.thread = begin + load.encode
        start = max(state.thread, state.wire)
        state.wire = start + link.seconds_per_byte * load.num_bytes
        state.arrivals.append(state.wire + link.latency)
        state.landed[i] = state.arrivals[-1] + load.decode
        state.sent += load.num_bytes
        label = f"bucket {load.name}: {format_bytes(load.num_bytes)}"
        state.spans.append(_span("exchange", "exchange", label, start, state.wire, step))


def _compute(state: _State, kind: str, name: str, seconds: float, step: int) -> None:
    start = state.training
    state.training += seconds
    if seconds:
        state.spans.append(_span("compute", kind, name, start, state.training, step))


def _wait(state: _State, until: float, what: str, step: int) -> None:
    if until > state.training:
        state.spans.append(_span("compute", "wait", what, state.training, until, step))
        state.training = until


def _span(lane: str, kind: str, label: str, start: float, end: float, step: int) -> Span:
    return Span(
        rank=0, lane=lane, kind=kind, label=label, start=start, end=end, node=f"step {step}"
    )
