"""The price of a plan's exchange: step seconds, exposed seconds, bytes on the wire, the limit.

A thin layer: it turns the plan's exchange into an `ExchangeScheme` and asks
`headway.collective.model.exchange_scheme`. `headway.simulator.exchange` lays its step out as a
timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headway.collective.compression import CompressorSpeed, parse_compression
from headway.collective.model.bucket_cost import ExchangeNetwork
from headway.collective.model.exchange_scheme import (
    TYPICAL_COMPRESSOR_SPEEDS,
    ExchangePrediction,
    GradientLayer,
    evaluate_scheme,
    predict_exchange,
    rank_schemes,
)
from headway.collective.model.overlap import Consistency, Diagnosis, step_bound
from headway.errors import PlanError
from headway.plans import ExchangePlan
from headway.plans.exchange_scheme import scheme_of


@dataclass(frozen=True, kw_only=True)
class ExchangePrice:
    """What an exchange costs in each step.

    Attributes:
        exchange: With everything chosen that was left open.
        predicted: Buckets, loads, order, and the played step.
        bound: The shortest step that this kind of exchange allows; seconds.
        rank_bytes: What the rank that sends most sends.
        node_bytes: What leaves the node that sends most.
    """

    exchange: ExchangePlan
    predicted: ExchangePrediction
    bound: float
    rank_bytes: float
    node_bytes: float
    diagnosis: Diagnosis

    @property
    def step(self) -> float:
        """Seconds from the start of a step to the start of the next one."""
        return self.predicted.step

    @property
    def exposed(self) -> float:
        """Seconds of a step in which the training thread waits for the exchange."""
        return self.predicted.exposed

    @property
    def isolated(self) -> float:
        """Seconds that the exchange would take on its own."""
        return self.predicted.isolated

    @property
    def overlap(self) -> float:
        """Share of the communication that is hidden: 1 - exposed / isolated."""
        return 1 - self.exposed / self.isolated if self.isolated else 1.0


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
    return ExchangePrice(
        exchange=exchange,
        predicted=predicted,
        bound=step_bound(
            predicted.forward, predicted.backward, predicted.communication, _how(exchange)
        ),
        rank_bytes=predicted.traffic.busiest_rank(),
        node_bytes=predicted.traffic.busiest_node(network.nodes),
        diagnosis=evaluate_scheme(scheme, predicted, own, network).diagnosis,
    )


def with_exceptions(layers: Sequence[GradientLayer], exchange: ExchangePlan) -> list[GradientLayer]:
    """The layers with what the plan's `parts` say of them; of groups the largest is priced."""
    found = []
    for layer in layers:
        part = exchange.part(layer.name)
        if part and part.compress:
            layer = replace(layer, compression=parse_compression(part.compress))
        if part and part.ranks:
            sizes = [len(group) for group in part.ranks]
            largest = part.ranks[sizes.index(max(sizes))]
            layer = replace(layer, ranks=tuple(sorted(largest)))
        found.append(layer)
    return found


def _how(exchange: ExchangePlan) -> Consistency:
    if not exchange.overlap:
        return "none"
    return "crossing" if exchange.priority else "overlap"
