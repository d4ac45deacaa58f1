"""The price of a plan's gradient exchange, and several of its steps as a timeline.

One step in the steady state is played by `headway.collective.model.overlap.simulate_link`; each
forward pass waits for every load, so nothing is left on the link when the next backward pass
begins, and the steps stand one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headway.collective.compression import CompressorSpeed, parse_compression
from headway.collective.model.bucket_cost import ExchangeNetwork
from headway.collective.model.scheme_ranking import (
    TYPICAL_COMPRESSOR_SPEEDS,
    ExchangePrediction,
    GradientLayer,
    predict_exchange,
    rank_schemes,
)
from headway.errors import PlanError
from headway.plans import ExchangePlan
from headway.plans.exchange_scheme import scheme_of
from headway.timeline import Span, Timeline
from headway.units import format_bytes


@dataclass(frozen=True)
class ExchangePrice:
    """What an exchange costs in each step.

    Attributes:
        exchange: With everything chosen that was left open.
        predicted: Buckets, loads, order, and the played step.
        node_bytes: What leaves the node that sends most.
    """

    exchange: ExchangePlan
    predicted: ExchangePrediction
    node_bytes: float


def price_exchange(
    exchange: ExchangePlan,
    layers: Sequence[GradientLayer],
    network: ExchangeNetwork,
    speeds: Mapping[str, CompressorSpeed] = TYPICAL_COMPRESSOR_SPEEDS,
) -> ExchangePrice:
    """Price the exchange of a plan; `compress = "auto"` is chosen here.

    Args:
        layers: In the order of the forward pass; names are matched by the plan's `parts`.

    Raises:
        PlanError: These exchange options cannot be combined, on these ranks and nodes.
    """
    problems = exchange.problems(network.nodes.ranks)
    if exchange.collective == "hierarchical" and not network.nodes.uniform:
        sizes = ", ".join(str(len(ranks)) for ranks in network.nodes.members)
        problems.append(f"exchange.collective hierarchical: the nodes have {sizes} ranks")
    if problems:
        raise PlanError("this exchange cannot be priced", problems=problems)
    own = with_exceptions(layers, exchange)
    scheme = scheme_of(exchange)
    if exchange.compress == "auto":
        scheme = rank_schemes(own, network, base=scheme, speeds=speeds)[0].scheme
        exchange = replace(exchange, compress=scheme.compress)
    try:
        predicted = predict_exchange(scheme, own, network, speeds)
    except ValueError as error:
        raise PlanError("this exchange cannot be priced", problems=[str(error)]) from None
    return ExchangePrice(exchange, predicted, predicted.traffic.busiest_node(network.nodes))


def with_exceptions(layers: Sequence[GradientLayer], exchange: ExchangePlan) -> list[GradientLayer]:
    """The layers with what the plan's `parts` say of them; of groups the largest is priced."""
    found = []
    for layer in layers:
        part = exchange.part(layer.name)
        if part and part.compress:
            layer = replace(layer, compression=parse_compression(part.compress))
        if part and part.ranks:
            sizes = [len(group) for group in part.ranks]
            # Groups exchange side by side: the step waits for the largest.
            largest = part.ranks[sizes.index(max(sizes))]
            layer = replace(layer, ranks=tuple(sorted(largest)))
        found.append(layer)
    return found


@dataclass(frozen=True, slots=True)
class SimulatedExchange:
    """Some steps.

    Attributes:
        timeline: Of rank 0; all ranks do the same at the same time. The exchange lane shows the
            link: a bar is the time for which a load occupies it.
        starts: When each step began, and when the last one ended.
    """

    timeline: Timeline
    starts: tuple[float, ...]

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of each step; the first one has nothing to wait for in its forward pass."""
        return tuple(b - a for a, b in pairwise(self.starts))


def simulate_exchange(
    predicted: ExchangePrediction, layers: Sequence[GradientLayer], *, steps: int = 3
) -> SimulatedExchange:
    """Lay out steps.

    With crossing, a step ends when its backward pass does, and the next one begins at once; without
    it ends when all sums are there.

    Args:
        steps: How many; the last one ends when all its sums have landed.
    """
    spans: list[Span] = []
    starts = [0.0]
    for step in range(steps):
        waits = _forward_waits(predicted) if predicted.crossing and step else {}
        clock = starts[-1]
        for span in _training(predicted, layers, waits, clock, step):
            spans.append(span)
            clock = span.end
        # Trips count from the start of a step that waits nowhere.
        begun = clock - predicted.played.compute
        spans.extend(_link(predicted, begun, step))
        if not predicted.crossing or step == steps - 1:
            landed = max((begun + trip.received for trip in predicted.played.trips), default=clock)
            if landed > clock:
                spans.append(_span("compute", "wait", "all sums", clock, landed, step))
                clock = landed
        starts.append(clock)
    return SimulatedExchange(Timeline.of(spans), tuple(starts))


def _forward_waits(predicted: ExchangePrediction) -> dict[int, tuple[float, int]]:
    """Of the first layer of each bucket: seconds that it waits for the last step's sums."""
    waits: dict[int, tuple[float, int]] = {}
    for number, trip in zip(predicted.home, predicted.played.trips, strict=True):
        # The next forward pass comes to this layer of the bucket first.
        layer = min(predicted.buckets[number])
        waits[layer] = waits.get(layer, (0.0, number))[0] + trip.waited, number
    return waits


def _training(
    predicted: ExchangePrediction,
    layers: Sequence[GradientLayer],
    waits: dict[int, tuple[float, int]],
    clock: float,
    step: int,
) -> Iterator[Span]:
    """The training thread from the start of a step to the end of its backward pass."""
    for i, layer in enumerate(layers):
        seconds, number = waits.get(i, (0.0, 0))
        parts = (("wait", f"bucket {number}", seconds), ("forward", layer.name, layer.forward))
        for kind, label, length in parts:
            if length > 0:
                yield _span("compute", kind, label, clock, clock + length, step)
                clock += length
    for layer in reversed(layers):
        if layer.backward > 0:
            yield _span("compute", "backward", layer.name, clock, clock + layer.backward, step)
            clock += layer.backward


def _link(predicted: ExchangePrediction, begun: float, step: int) -> Iterator[Span]:
    """The link; a bar is the time that a load takes of it."""
    for number in predicted.order:
        load, sent = predicted.loads[number], begun + predicted.played.trips[number].sent
        label = f"bucket {load.name}: {format_bytes(load.num_bytes)}"
        end = sent + predicted.link.seconds_per_byte * load.num_bytes
        yield _span("exchange", "exchange", label, sent, end, step)


def _span(lane: str, kind: str, label: str, start: float, end: float, step: int) -> Span:
    return Span(
        rank=0, lane=lane, kind=kind, label=label, start=start, end=end, node=f"step {step}"
    )
