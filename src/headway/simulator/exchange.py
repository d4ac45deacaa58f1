"""Several steps of a priced gradient exchange, simulated event by event into a timeline.
The price argues that one step in the steady state tells everything; this simulates several
steps in a row with a training thread, a progress thread and a link that interact through events
only, so that each confirms the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.collective.model.exchange_scheme import ExchangePrediction, GradientLayer
from headway.simulator.engine import TaskProgram, TaskTimes, run_tasks
from headway.timeline import Span, Timeline
from headway.units import format_bytes


@dataclass(frozen=True, slots=True)
class SimulatedExchange:
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


def simulate_exchange(
    predicted: ExchangePrediction,
    layers: Sequence[GradientLayer],
    *,
    steps: int = 3,
    overlap: bool = True,
) -> SimulatedExchange:
    """Play steps.

    With crossing, a step ends when its backward pass does, and the next one begins at once; without
    it ends when all sums are there.

    Args:
        predicted: What is sent, in which order.
        steps: How many; the last one is played until all its sums have landed.
        overlap: Whether loads leave while backward runs.
    """
    tasks = _Steps(predicted, layers, overlap)
    for step in range(steps):
        tasks.step(step, wait=not predicted.crossing or step == steps - 1)
    played = run_tasks(tasks.program)
    starts = (0.0, *(played.done[task] for task in tasks.borders))
    sent = sum(load.num_bytes for load in predicted.loads) * steps
    return SimulatedExchange(Timeline.of(tasks.spans(played)), starts, sent)


class _Steps:
    """Steps as tasks on three streams: training, progress thread, link."""

    def __init__(
        self, predicted: ExchangePrediction, layers: Sequence[GradientLayer], overlap: bool
    ) -> None:
        self.predicted = predicted
        self.layers = layers
        self.overlap = overlap
        self.bucket_of = {
            i: number for number, bucket in enumerate(predicted.buckets) for i in bucket
        }
        self.program = TaskProgram()
        self.training = self.program.stream(0, "compute")
        self.thread = self.program.stream(0, "exchange")
        self.wire = self.program.stream(0, "exchange")
        self.last: tuple[int, ...] = ()
        self.encoded: tuple[int, ...] = ()
        self.sent: list[int] = []
        self.landed: dict[int, int] = {}
        self.borders: list[int] = []
        self.shown: dict[int, tuple[str, int]] = {}

    def step(self, step: int, *, wait: bool) -> None:
        """Forward, backward, exchange; at the end of those that wait, all sums."""
        for i, layer in enumerate(self.layers):
            number = self.bucket_of.get(i)
            homes = self.predicted.home
            own = [task for load, task in self.landed.items() if homes[load] == number]
            self._train("forward", layer.name, layer.forward, step, own, f"bucket {number}")
        self.landed.clear()
        ready: dict[int, int] = {}
        for i in reversed(range(len(self.layers))):
            layer = self.layers[i]
            self._train("backward", layer.name, layer.backward, step)
            if i in self.bucket_of:
                ready[self.bucket_of[i]] = self.last[0]
        if not self.overlap:
            ready = dict.fromkeys(ready, self.last[0])
        for load in self.predicted.order:
            self._send(load, ready[self.predicted.home[load]], step)
        own = list(self.landed.values()) if wait else []
        self._train("end", "", 0.0, step, own, "all sums")
        self.borders.append(self.last[0])

    def _train(
        self,
        kind: str,
        name: str,
        seconds: float,
        step: int,
        sums: Sequence[int] = (),
        what: str = "",
    ) -> None:
        before = (*self.last, *sums)
        task = self.program.add(kind, (self.training,), seconds, before, label=name)
        self.last = (task,)
        self.shown[task] = what, step

    def _send(self, number: int, ready: int, step: int) -> None:
        """In the fixed order, as credit allows."""
        load, link = self.predicted.loads[number], self.predicted.link
        place = len(self.sent) - self.predicted.credit
        allowed = self.sent[place : place + 1] if place >= 0 else []
        before = (ready, *self.encoded, *allowed)
        encoded = self.program.add("encode", (self.thread,), load.encode, before)
        seconds = link.seconds_per_byte * load.num_bytes
        label = f"bucket {load.name}: {format_bytes(load.num_bytes)}"
        sent = self.program.add(
            "exchange", (self.wire,), seconds, (encoded,), delay=link.latency, label=label
        )
        self.encoded = (encoded,)
        self.sent.append(sent)
        self.shown[sent] = "", step
        self.landed[number] = self.program.add("decode", (), load.decode, (sent,))

    def spans(self, played: TaskTimes) -> Iterator[Span]:
        """Of the training thread and the link; a bar of the link is the time a load takes of it."""
        kinds, labels, now = self.program.kind, self.program.label, 0.0
        for task, (what, step) in self.shown.items():
            start, end = played.starts[task], played.ends[task]
            lane = "exchange" if kinds[task] == "exchange" else "compute"
            if lane == "compute":
                if start > now:
                    yield _span("compute", "wait", what, now, start, step)
                now = end
            if end > start or lane == "exchange":
                yield _span(lane, kinds[task], labels[task], start, end, step)


def _span(lane: str, kind: str, label: str, start: float, end: float, step: int) -> Span:
    return Span(
        rank=0, lane=lane, kind=kind, label=label, start=start, end=end, node=f"step {step}"
    )
