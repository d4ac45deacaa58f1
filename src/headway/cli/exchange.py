"""`headway exchange compare`: predicted step time of each way to exchange gradients.

Nothing is run: layers and link are numbers on the command line, and every row is the predicted cost
of one `Exchange`.
"""

from __future__ import annotations

import json as json_format
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.terminal.console import parse_option, say, say_json, write_file
from headway.collective.all_reduce.algorithm import ALL_REDUCE_KINDS
from headway.collective.model.bucket_cost import ExchangeNetwork, ExchangeScheme
from headway.collective.model.gradient_buckets import backward_order, ddp_buckets
from headway.collective.model.overlap import LIMIT_WORDS, Consistency, step_bound
from headway.collective.model.scheme_ranking import (
    TYPICAL_COMPRESSOR_SPEEDS,
    GradientLayer,
    SchemeChoice,
    evaluate_scheme,
    exactness,
    gradient_moments,
    predict_exchange,
)
from headway.errors import UsageError
from headway.planner.collective_algorithm import choose_all_reduce, fit_all_reduce, parse_wires
from headway.plans import ExchangePlan
from headway.plans.exchange import DEFAULT_BUCKET
from headway.plans.exchange_scheme import scheme_of
from headway.simulator.collective import FREE_HOST
from headway.simulator.exchange import price_exchange
from headway.units import format_bytes, format_rate, format_seconds, parse_rate, parse_seconds
from headway.units import parse_bytes as parse_size

DDP_CAPS = (1, 2, 5, 10, 25)
"""MiB; the bucket sizes among which the best is looked for."""
FLAT_EXCHANGES: dict[str, ExchangePlan] = {
    f"buckets of {DEFAULT_BUCKET} (default)": ExchangePlan(),
    "fitted buckets": ExchangePlan(bucket="auto"),
    "fitted buckets, fp16": ExchangePlan(bucket="auto", compress="fp16"),
    "priority": ExchangePlan(bucket="auto", priority=True),
    "priority, fp16": ExchangePlan(bucket="auto", priority=True, compress="fp16"),
    "fitted buckets, int8": ExchangePlan(bucket="auto", compress="int8"),
    "fitted buckets, powersgd:4": ExchangePlan(bucket="auto", compress="powersgd:4"),
    "fitted buckets, topk:0.01": ExchangePlan(bucket="auto", compress="topk:0.01"),
}
HIERARCHICAL_EXCHANGES: dict[str, ExchangePlan] = {
    "hierarchical": ExchangePlan(bucket="auto", collective="hierarchical"),
    "hierarchical, priority": ExchangePlan(bucket="auto", collective="hierarchical", priority=True),
    "hierarchical, topk:0.01": ExchangePlan(
        bucket="auto", collective="hierarchical", compress="topk:0.01"
    ),
}


@dataclass(frozen=True)
class ExchangeEstimate:
    """One way of exchanging."""

    name: str
    choice: SchemeChoice
    exchange: ExchangePlan | None
    node_bytes: float

    @property
    def bound(self) -> float:
        found = self.choice.predicted
        how: Consistency = "crossing" if found.crossing else "overlap"
        return step_bound(found.forward, found.backward, found.communication, how)


def compare(
    *,
    layers: int = 25,
    size: str = "1 MiB",
    link: str = "1 Gbit/s",
    latency: str = "0.2 ms",
    forward: str,
    backward: str,
    ranks: int = 2,
    nodes: int | None = None,
    inside: str = "20 Gbit/s",
    cluster: Annotated[str | None, Parameter(alias="-c")] = None,
    svg: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Price the ways of exchanging gradients on a link, without running anything.

    The model is a chain of equal layers; the fastest rows are listed with what limits them.

    Args:
        layers: Number of layers.
        size: Size of one layer's gradients.
        link: Rate of a node's link.
        latency: Time of an all-reduce of a few bytes.
        forward: Time of the forward pass of the whole model, as in "30 ms".
        backward: Time of the backward pass of the whole model.
        ranks: Number of ranks.
        nodes: Number of nodes that the ranks share evenly; by default one node per rank.
        inside: Rate between two ranks of one node.
        cluster: A cluster.toml or a preset, in place of link, ranks and nodes: Gloo's ring and the
            best program are simulated on its links.
        svg: Write a picture of the steps to this file.
    """
    if layers < 1 or ranks < 2:
        raise UsageError(f"--layers {layers} --ranks {ranks}: at least 1 layer and 2 ranks")
    count = ranks if nodes is None else nodes
    if count < 1 or ranks % count:
        raise UsageError(f"--nodes {count}: {ranks} ranks cannot be spread evenly over them")
    network, special = _on_cluster(cluster) if cluster else (None, None)
    if network is None:
        network = ExchangeNetwork.of_rates(
            count,
            ranks // count,
            rate=parse_option("--link", link, parse_rate),
            inside=parse_option("--inside", inside, parse_rate),
            latency=parse_option("--latency", latency, parse_seconds),
        )
        special = HIERARCHICAL_EXCHANGES if 1 < count < ranks else {}
    chain = equal_layers(
        layers,
        parse_option("--size", size, parse_size),
        parse_option("--forward", forward, parse_seconds),
        parse_option("--backward", backward, parse_seconds),
    )
    rows = estimate_exchanges(chain, network, special or {})
    if svg is not None:
        from headway.report.pictures.simulated_steps import exchange_steps_svg

        shown = [(row.name, row.choice.predicted) for row in _shown(rows)]
        write_file(svg, exchange_steps_svg(shown, chain))
    if json:
        say_json([_facts(row) for row in rows])
    else:
        say(describe_estimates(rows, chain, network))


def equal_layers(
    count: int, num_bytes: int, forward: float, backward: float
) -> list[GradientLayer]:
    """A chain of equal layers, each one matrix that is as square as its size allows."""
    # Gradients in float32.
    elements = max(1, num_bytes // 4)
    # PowerSGD sends rank x (rows + columns): the square is where it saves most.
    rows = next(n for n in range(math.isqrt(elements), 0, -1) if elements % n == 0)
    shape = (rows, elements // rows)
    return [
        GradientLayer(
            name=f"layer {number}",
            shapes=(shape,),
            forward=forward / count,
            backward=backward / count,
        )
        for number in range(count)
    ]


def _on_cluster(text: str) -> tuple[ExchangeNetwork, Mapping[str, ExchangePlan]]:
    """Gloo's ring by number as the link, and exchanges whose sums the best program carries."""
    wires = parse_wires(text)
    ring = fit_all_reduce("ring", None, wires, host=FREE_HOST)
    found = choose_all_reduce("auto", wires, ExchangePlan().initial_bucket_bytes)
    if found.collective not in ALL_REDUCE_KINDS:
        return ExchangeNetwork(ring, wires.nodes), {}
    fit = fit_all_reduce(found.collective, found.carrier, wires)
    own = ExchangePlan(bucket="auto", collective=found.collective, carrier=found.carrier)
    rows = {
        f"fitted buckets, {found.collective}": own,
        f"priority, {found.collective}": replace(own, priority=True),
    }
    return ExchangeNetwork(ring, wires.nodes, carried=fit), rows


def estimate_exchanges(
    layers: Sequence[GradientLayer], network: ExchangeNetwork, special: Mapping[str, ExchangePlan]
) -> list[ExchangeEstimate]:
    """DDP first, to compare with; then exchanges from exact and simple to coarse."""
    rows = _ddp(layers, network)
    for name, exchange in (FLAT_EXCHANGES | dict(special)).items():
        price = price_exchange(exchange, layers, network)
        choice = evaluate_scheme(scheme_of(exchange), price.predicted, layers, network)
        rows.append(ExchangeEstimate(name, choice, exchange, price.node_bytes))
    return rows


def _ddp(layers: Sequence[GradientLayer], network: ExchangeNetwork) -> list[ExchangeEstimate]:
    """DDP with its default, and with the bucket size that is best for it."""
    ready, _ = gradient_moments(layers)
    sizes = [layer.num_bytes for layer in layers]
    order = backward_order(ready)

    def row(name: str, cap: int) -> ExchangeEstimate:
        # With its default cap DDP closes the first bucket at 1 MiB (torch 2.13,
        # `_DEFAULT_FIRST_BUCKET_BYTES`).
        caps = (min(cap, 1) << 20, cap << 20)
        buckets = ddp_buckets(sizes, order, caps)
        predicted = predict_exchange(
            ExchangeScheme(), layers, network, TYPICAL_COMPRESSOR_SPEEDS, buckets=buckets
        )
        choice = evaluate_scheme(ExchangeScheme(), predicted, layers, network)
        return ExchangeEstimate(name, choice, None, predicted.traffic.busiest_node(network.nodes))

    tuned = [row(f"DDP, best buckets ({cap} MiB)", cap) for cap in DDP_CAPS]
    best = min(tuned, key=lambda found: found.choice.step)
    # 25 MiB is DDP's default `bucket_cap_mb`.
    return [row("DDP, default buckets", 25), best]


def describe_estimates(
    rows: Sequence[ExchangeEstimate], layers: Sequence[GradientLayer], network: ExchangeNetwork
) -> str:
    """The table, and which exchange to take."""
    found = rows[0].choice.predicted
    total = sum(layer.num_bytes for layer in layers)
    nodes = network.nodes
    lines = [
        f"{len(layers)} layers, {format_bytes(total)} of gradients; forward "
        f"{format_seconds(found.forward)}, backward {format_seconds(found.backward)}",
        f"{nodes.ranks} ranks on {nodes.count} nodes; all-reduce: latency "
        f"{format_seconds(network.link.latency)}, {format_rate(network.link.rate)} per rank, "
        f"{format_seconds(network.link.seconds(total))} for all gradients",
        "",
        f"{'exchange':<30}{'step':>9}{'of DDP':>8}{'exposed':>10}{'sent/node':>11}{'bound':>9}"
        "  limited by",
        *(_line(row, rows[0]) for row in rows),
        "",
    ]
    # Rows without an exchange are DDP's, which no plan can ask for.
    exact = [row for row in rows if row.exchange and not _inexact(row)]
    best = min(exact, key=lambda row: row.choice.step)
    lines.append(f"best exact: {best.name}")
    # The sentence joins its clauses with these; each gets a line.
    lines.extend(f"  {part}" for part in re.split("[:;] ", best.choice.diagnosis.sentence))
    fastest = min((row for row in rows if row.exchange), key=lambda row: row.choice.step)
    if fastest is not best:
        gain = best.choice.step / fastest.choice.step
        lines.append(f"fastest: {fastest.name}")
        lines.append(f"  {gain:.2f}x as fast as the best exact one, and approximate")
    lines.extend(_toml(best))
    return "\n".join(lines)


def _inexact(row: ExchangeEstimate) -> bool:
    return exactness(row.choice.scheme) > 0


def _line(row: ExchangeEstimate, first: ExchangeEstimate) -> str:
    choice = row.choice
    return (
        f"{row.name:<30}{format_seconds(choice.step):>9}"
        f"{first.choice.step / choice.step:>7.2f}x"
        f"{format_seconds(choice.predicted.exposed):>10}{format_bytes(row.node_bytes):>11}"
        f"{format_seconds(row.bound):>9}  {LIMIT_WORDS[choice.diagnosis.limit]}"
    )


def _toml(row: ExchangeEstimate) -> list[str]:
    """The lines of a recipe that ask for it."""
    assert row.exchange is not None
    default = ExchangePlan()
    asked = {
        key: getattr(row.exchange, key)
        for key in ("bucket", "collective", "compress", "priority")
        if getattr(row.exchange, key) != getattr(default, key)
        # A carried one needs its carrier, too, which only --collective works out.
        and not (key == "collective" and row.exchange.carried)
    }
    values = [f"{key} = {json_format.dumps(value)}" for key, value in asked.items()]
    lines = ["in the plan: exchange = { " + ", ".join(values) + " }"] if values else []
    if row.exchange.carried:
        lines.append(
            f"its program: headway train --collective {row.exchange.collective} --cluster FILE"
        )
    return lines


def _shown(rows: Sequence[ExchangeEstimate]) -> list[ExchangeEstimate]:
    """For the picture: DDP's default, its best, and the best exact ones with and without border."""
    exact = sorted((row for row in rows[2:] if not _inexact(row)), key=lambda row: row.choice.step)
    inside = next(row for row in exact if not row.choice.predicted.crossing)
    across = next(row for row in exact if row.choice.predicted.crossing)
    return [*rows[:2], inside, across]


def _facts(row: ExchangeEstimate) -> dict[str, object]:
    predicted = row.choice.predicted
    return {
        "exchange": row.name,
        "plan": None if row.exchange is None else asdict(row.exchange),
        "step": row.choice.step,
        "exposed": predicted.exposed,
        "isolated": predicted.isolated,
        "bound": row.bound,
        "node_bytes": row.node_bytes,
        "rank_bytes": predicted.traffic.busiest_rank(),
        "buckets": len(predicted.buckets),
        "exact": not _inexact(row),
        "limit": row.choice.diagnosis.limit,
        "reason": row.choice.diagnosis.sentence,
    }
