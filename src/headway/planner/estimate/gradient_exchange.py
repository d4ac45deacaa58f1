"""Gradients and tied parameters of a model, and how much of their exchange backward hides.

`ModelParameters` says once for all combinations of degrees what the graph says of parameters: the
order in which their gradients appear, and which of them several units share. A parameter counts
once on a device, however many operators use it.

The network carries one message at a time. Without ZeRO, and with ZeRO 1, gradients leave in buckets
while the last micro-batch's backward runs (Das et al. 2016, section on overlap); with ZeRO 2 they
are scattered behind every micro-batch; with ZeRO 3 weights are gathered in front of every pass, one
unit ahead (Zhao et al. 2023, FSDP). Stages of ZeRO: Rajbhandari et al. 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.collective.model.gradient_buckets import fill_buckets
from headway.collective.model.scheme_ranking import FIRST_BUCKET
from headway.cost.device import Array
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.estimate.stage_cut import IntervalClasses, LayerUnit, unnameable_units

PriceOfBytes = Callable[[Array], Array]
"""Seconds of a collective by its bytes."""
BUCKETS = tuple(2.0**n * 2**20 for n in (3, 5, 7, 9, 11))
"""Bytes of a bucket that are tried; the first one is the plan's default."""


class ExchangeSeconds(NamedTuple):
    """Seconds of a step: of all messages, and of those that computation waits for."""

    seconds: float
    exposed: float
    bucket: float = BUCKETS[0]


class GradientArrivals(NamedTuple):
    """Of a model's parameters, as backward makes them: bytes, and the unit that is done then."""

    sizes: tuple[int, ...]
    units: tuple[int, ...]

    def messages(self, limit: float, shares: Array) -> tuple[Array, np.ndarray]:
        """(bytes, unit) of the buckets of at most `limit` bytes.

        Args:
            limit: See `collective.model.gradient_buckets.fill_buckets`.
            shares: Of each unit's parameters, what one device holds.
        """
        own = [size * shares[unit] for size, unit in zip(self.sizes, self.units, strict=True)]
        # Buckets are filled in whole bytes; a device's share of a split parameter need not be
        # whole.
        whole = [max(1, round(size)) for size in own]
        buckets = fill_buckets(whole, range(len(whole)), int(min(limit, 2.0**62)), FIRST_BUCKET)
        found = np.array([sum(own[n] for n in bucket) for bucket in buckets])
        # A bucket leaves with its last gradient.
        return found, np.array([self.units[bucket[-1]] for bucket in buckets], dtype=np.int64)


def serial_ends(
    ready: Array,
    seconds: Array,
    sent: NDArray[np.bool_],
) -> Array:
    """When each message has been sent, on a link that carries one at a time, the last one first.

    end_k = max over j >= k of (ready_j + s_k + ... + s_j): the recurrence
    start_k = max(ready_k, end_{k+1}) as one running maximum (Das et al. 2016, analysis of overlap).

    Args:
        sent: What is not sent ends when it is ready.
    """
    until = np.cumsum(seconds[::-1])
    begin = np.where(sent[::-1], ready[::-1] - (until - seconds[::-1]), -np.inf)
    end = (until + np.maximum.accumulate(begin))[::-1]
    return np.where(sent, end, ready)


def bucket_exchange(
    gradients: GradientArrivals,
    backward: Array,
    shares: Array,
    price: PriceOfBytes,
    *,
    limits: Sequence[float] = BUCKETS,
    overlap: float = 1.0,
) -> ExchangeSeconds:
    """The exchange behind one backward pass, with the best bucket size.

    Args:
        limits: Sizes of a bucket to choose from; of equals the first.
        overlap: Share of what is under way that computation beside it does not feel; 0: nothing
            leaves before backward has ended.
    """
    done = np.cumsum(backward[::-1])[::-1]
    best: ExchangeSeconds | None = None
    for limit in limits:
        sizes, units = gradients.messages(limit, shares)
        if not len(sizes):
            return ExchangeSeconds(0.0, 0.0)
        seconds = np.asarray(price(sizes))
        # The first message is the last of `serial_ends`, which goes by the forward pass.
        ends = serial_ends(done[units][::-1], seconds[::-1], np.ones(len(sizes), dtype=bool))
        whole = float(seconds.sum())
        late = max(0.0, float(ends[0]) - float(done[0]))
        found = ExchangeSeconds(whole, whole - overlap * (whole - late), limit)
        if best is None or found.exposed < best.exposed:
            best = found
        # All gradients in one message: larger buckets change nothing.
        if len(sizes) == 1:
            break
    assert best is not None
    return best


def most_hidden(message: Array, compute: Array, overlap: float) -> Array:
    """Seconds of messages that can be hidden behind so much computation."""
    return overlap * np.minimum(message, compute)


class _LaneTimes(NamedTuple):
    """Until when computation and messages are busy, and when the next unit's weights are there."""

    clock: float
    lane: float
    there: float


def _simulate_units(
    now: _LaneTimes,
    compute: Sequence[float],
    gathers: Sequence[float],
    scatters: Sequence[float],
) -> _LaneTimes:
    """Simulate units one after the other: gather ahead, compute, scatter behind.

    Args:
        gathers: Beside each unit the gather of the unit after it; 0: there is none.
    """
    clock, lane, there = now
    for seconds, gather, scatter in zip(compute, gathers, scatters, strict=True):
        start = max(clock, there)
        if gather:
            lane = there = max(lane, start) + gather
        clock = start + seconds
        if scatter:
            lane = max(lane, clock) + scatter
    return _LaneTimes(clock, lane, there)


def sharded_exchange(
    forward: Array,
    backward: Array,
    scatters: Array,
    gathers: Array | None,
    microbatches: int,
    *,
    overlap: float = 1.0,
) -> tuple[float, ExchangeSeconds]:
    """(seconds of all micro-batches, what of them is exchange).

    A unit's gather starts when the one before it begins to compute, its scatter when its backward
    has ended; messages follow each other in the order in which they start to wait.

    Args:
        scatters: Seconds of each unit's reduce-scatter, behind its backward.
        gathers: Seconds of each unit's all-gather, in front of both passes; None: there are none.
    """
    own = np.zeros_like(forward) if gathers is None else gathers
    passes = [*forward.tolist(), *backward[::-1].tolist()]
    ahead = [*own.tolist(), *own[::-1].tolist()]
    behind = [*([0.0] * len(forward)), *scatters[::-1].tolist()]
    # Nothing can be computed beside the first gather.
    now = _LaneTimes(0.0, ahead[0], ahead[0])
    steps: list[list[float]] = []
    # Rounds that take as long as the one before are not simulated one by one.
    left = microbatches
    while left:
        before = now
        left -= 1
        now = _simulate_units(now, passes, [*ahead[1:], ahead[0] if left else 0.0], behind)
        steps.append([b - a for a, b in zip(before, now, strict=True)])
        # The last micro-batch gathers nothing ahead, so that it is always played itself.
        # With numpy's default atol, 1e-8, all rounds of a small model would be equal.
        if left > 1 and len(steps) > 1 and np.allclose(steps[-1], steps[-2], rtol=1e-12, atol=0):
            jump = left - 1
            now = _LaneTimes(*(a + jump * each for a, each in zip(now, steps[-1], strict=True)))
            left = 1
    whole = max(now.clock, now.lane)
    compute = microbatches * float(forward.sum() + backward.sum())
    # ZeRO 3 gathers the weights in front of forward and again in front of backward.
    sent = microbatches * float(scatters.sum() + 2.0 * own.sum())
    exposed = sent - overlap * (sent - (whole - compute))
    return compute + exposed, ExchangeSeconds(sent, exposed)


def sharded_passes(
    forward: Array,
    backward: Array,
    scatters: Array,
    gathers: Array | None,
    *,
    overlap: float = 1.0,
) -> tuple[float, float, float]:
    """(forward, backward, scatters behind it) of one micro-batch of a stage, in seconds.

    Each pass begins without weights and ends with its computation; what is scattered then goes on
    beside what the rank does next. Arguments as in `sharded_exchange`.
    """
    own = np.zeros_like(forward) if gathers is None else gathers

    def one(compute: Array, sent: Array) -> tuple[float, float]:
        order = slice(None) if compute is forward else slice(None, None, -1)
        ahead = own[order].tolist()
        clock, lane, _ = _simulate_units(
            _LaneTimes(0.0, ahead[0], ahead[0]),
            compute[order].tolist(),
            [*ahead[1:], 0.0],
            sent[::-1].tolist(),
        )
        whole = float(own.sum() + sent.sum())
        late = max(clock, lane) - clock
        hidden = whole - late - (clock - float(compute.sum()))
        return clock + (1.0 - overlap) * hidden, late

    ahead, _ = one(forward, np.zeros_like(forward))
    back, late = one(backward, scatters)
    return ahead, back, late


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several units use, or one unit more than once.

    Attributes:
        units: That use it, ascending, with repetitions.
    """

    bytes: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class ModelParameters:
    """Facts of a row of units."""

    work: PlanningWorkload
    row: tuple[LayerUnit, ...]
    classes: IntervalClasses

    @cached_property
    def nameless(self) -> frozenset[int]:
        """Units at which no stage can begin."""
        return unnameable_units(self.row)

    @cached_property
    def _uses(self) -> dict[str, list[int]]:
        """The units that use each parameter, in the order of the forward pass."""
        operators = self.work.graph.operators
        found: dict[str, list[int]] = {}
        for number, unit in enumerate(self.row):
            for operator in operators[unit.start : unit.stop]:
                # An operator that takes a parameter as two of its inputs uses it once.
                for name in dict.fromkeys(operator.inputs):
                    if name in operator.parameters:
                        found.setdefault(name, []).append(number)
        return found

    @cached_property
    def ties(self) -> tuple[TiedParameter, ...]:
        tensors = self.work.graph.tensors
        return tuple(
            TiedParameter(tensors[name].bytes, tuple(units))
            for name, units in self._uses.items()
            if len(units) > 1
        )

    def doubled(self, start: int, stop: int) -> float:
        """Bytes that the units of an interval count more than once."""
        return float(
            sum(
                tie.bytes * max(0, sum(start <= unit < stop for unit in tie.units) - 1)
                for tie in self.ties
            )
        )

    @cached_property
    def doubles(self) -> Array:
        """`doubled` of every class of intervals."""
        return np.array([self.doubled(*example) for example in self.classes.examples])

    @cached_property
    def whole(self) -> Array:
        """(1,): `doubled` of the whole row."""
        return np.array([self.doubled(0, len(self.row))])

    def between(self, borders: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
        """Of what several stages use: (bytes, first stage, last stage, stages).

        Args:
            borders: The first unit of each stage, and the number of units.
        """
        for tie in self.ties:
            stages = sorted({int(np.searchsorted(borders, u, "right")) - 1 for u in tie.units})
            if len(stages) > 1:
                yield tie.bytes, stages[0], stages[-1], len(stages)

    @cached_property
    def gradients(self) -> GradientArrivals:
        """In the order in which backward makes them."""
        graph = self.work.graph
        frozen = set(graph.frozen)
        found = [
            (graph.tensors[name].bytes, units[0])
            for name, units in self._uses.items()
            if name not in frozen
        ]
        # What is used more than once comes with its first use, when it is complete.
        found.reverse()
        return GradientArrivals(tuple(size for size, _ in found), tuple(unit for _, unit in found))

    @cached_property
    def held(self) -> Array:
        """Bytes of the parameters of each unit, as its operators count them."""
        tensors = self.work.graph.tensors
        found = np.zeros(len(self.row))
        for name, units in self._uses.items():
            for unit in units:
                found[unit] += tensors[name].bytes
        return found

    def weight_shares(self, starts: np.ndarray, stops: np.ndarray) -> Array:
        """Which part of the backward of intervals makes gradients of weights, by its FLOPs."""
        inputs, weights = (sums[stops] - sums[starts] for sums in self._gradient_flops)
        both = inputs + weights
        return np.asarray(np.divide(weights, both, out=np.zeros_like(both), where=both > 0))

    @cached_property
    def _gradient_flops(self) -> tuple[Array, Array]:
        """Running sums over the units."""
        operators = self.work.graph.operators
        units = [operators[unit.start : unit.stop] for unit in self.row]
        inputs = [sum(o.flops.input_gradient for o in unit) for unit in units]
        weights = [sum(o.flops.weight_gradient for o in unit) for unit in units]
        each = np.array([inputs, weights], dtype=float).T
        sums = np.concatenate([np.zeros((1, 2)), np.cumsum(each, axis=0)])
        return sums[:, 0], sums[:, 1]
