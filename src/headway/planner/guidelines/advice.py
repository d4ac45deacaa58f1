"""A practitioner's questions, answered with the lemma and its numbers.

An answer is there only where its facts are, and every number in its text is in its `numbers`.
Sources: Zou et al. 2017 (minibatch, devices, servers), Das et al. 2016 (samples, groups, windows).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.collective.model.link_fit import LinkFit, ring_factor
from headway.planner.guidelines import zou
from headway.planner.guidelines.layer_algorithms import Minibatch
from headway.planner.guidelines.layer_parallelism import (
    DasLayer,
    LayerTimes,
    best_groups,
    hybrid_volume,
    ideal_groups,
    least_samples,
    most_nodes,
    ratio_of,
    windows,
)
from headway.units import format_bytes, format_number, format_rate, format_seconds, format_share

EFFICIENCY = 0.8
"""Of devices that pay off, where nobody says another one."""


@dataclass(frozen=True, kw_only=True)
class AdviceFacts:
    """What is known of a job; what is not given is not asked about.

    Attributes:
        compute: T_C: seconds of forward and backward on one device.
        overhead: T_O: seconds of an iteration that more devices do not shorten.
        workers: N, devices or nodes that train.
        server_rate: B_ps, bytes/s of one parameter server.
        link_rate: Bytes/s of a node's network, in each direction.
        node_rate: FLOP/s that a node reaches.
        batch: MB, of all nodes.
        times: Of the model's layers on one node, for the windows.
        link: Of the gradient exchange, for the windows.
        minibatch: What `layer_algorithms.choose_minibatch` found.
        period: What its data set is to people: "an epoch".
    """

    compute: float | None = None
    overhead: float | None = None
    efficiency: float = EFFICIENCY
    parameter_bytes: float | None = None
    workers: int | None = None
    server_rate: float | None = None
    link_rate: float | None = None
    node_rate: float | None = None
    batch: int | None = None
    layers: Sequence[DasLayer] = ()
    times: Sequence[LayerTimes] = ()
    link: LinkFit | None = None
    minibatch: Minibatch | None = None
    period: str = "an epoch"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One answer.

    Attributes:
        numbers: By symbol; seconds, bytes, FLOP/s or counts.
    """

    question: str
    answer: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        return f"{self.question}\n  {self.answer}\n  ({self.source})"


def guidelines(facts: AdviceFacts) -> list[Advice]:
    """All answers that the facts allow, in the order of the questions above."""
    parts = (_minibatch, _devices, _servers, _all_reduce, _samples, _groups, _windows)
    return [advice for part in parts for advice in part(facts)]


def _minibatch(facts: AdviceFacts) -> Iterator[Advice]:
    if facts.minibatch is None or facts.minibatch.best.chosen is None:
        return
    best, chosen = facts.minibatch.best, facts.minibatch.best.chosen
    names = ", ".join(_named(chosen.algorithms))
    yield Advice(
        question="Which minibatch, and which algorithm for each layer?",
        answer=f"{best.batch} samples: {facts.period} takes {format_seconds(best.epoch)}. Of "
        f"{format_bytes(best.bound)} of work space {format_bytes(chosen.bytes)} are used: {names}.",
        numbers={
            "X_mini": best.batch,
            "M_bound": best.bound,
            "bytes": chosen.bytes,
            "epoch": best.epoch,
        },
        source="Zou et al. 2017, minibatch and algorithms under a memory bound",
    )


def _named(algorithms: Mapping[str, str]) -> Iterator[str]:
    """Each layer; of more than four, how many take which."""
    if len(algorithms) <= 4:
        yield from (f"{layer} {name}" for layer, name in algorithms.items())
        return
    for name in dict.fromkeys(algorithms.values()):
        layers = [layer for layer, taken in algorithms.items() if taken == name]
        yield f"{name} in {len(layers)} of {len(algorithms)} (from {layers[0]})"


def _devices(facts: AdviceFacts) -> Iterator[Advice]:
    if facts.compute is None or facts.overhead is None:
        return
    ratio = facts.overhead / facts.compute
    most = zou.most_devices(ratio, facts.efficiency)
    numbers = {"R_O": ratio, "alpha": facts.efficiency, "G_max": most, "limit": zou.ceiling(ratio)}
    if math.isinf(most):
        answer = "Any number: nothing in an iteration stays the same when devices are added."
    else:
        numbers["speed_up"] = zou.speed_up(ratio, most)
        answer = (
            f"At most {most:.0f} for {facts.efficiency:.0%} efficiency (speed-up "
            f"{format_number(numbers['speed_up'])}): what does not shrink takes "
            f"{format_share(ratio)} of the compute, which limits the speed-up to "
            f"{format_number(numbers['limit'])}."
        )
    if facts.workers and facts.workers > 1:
        reached = zou.efficiency(ratio, facts.workers)
        allowed = zou.allowed_overhead(facts.workers, facts.efficiency)
        numbers |= {"G": facts.workers, "alpha_G": reached, "allowed_R_O": allowed}
        answer += f" {facts.workers} devices reach {reached:.1%}"
        answer += f"; for {facts.efficiency:.0%} the overhead must not exceed {allowed:.2%}."
    yield Advice(
        question="How many devices are worth their while?",
        answer=answer,
        numbers=numbers,
        source="Zou et al. 2017, Lemma 1",
    )


def _servers(facts: AdviceFacts) -> Iterator[Advice]:
    if not (facts.parameter_bytes and facts.workers and facts.server_rate and facts.compute):
        return
    servers, exact = zou.parameter_servers(
        facts.parameter_bytes, facts.workers, facts.server_rate, facts.compute
    )
    yield Advice(
        question="How many parameter servers?",
        answer=f"{servers} (at least {format_number(exact)}): {facts.workers} workers move "
        f"{format_bytes(2 * facts.parameter_bytes * facts.workers)} in each round, which servers "
        f"of {format_rate(facts.server_rate)} must do within {format_seconds(facts.compute)}.",
        numbers={
            "N_ps": servers,
            "exact": exact,
            "N_w": facts.workers,
            "S_p": facts.parameter_bytes,
            "B_ps": facts.server_rate,
            "T_C": facts.compute,
        },
        source="Zou et al. 2017, Lemma 2",
    )


def _all_reduce(facts: AdviceFacts) -> Iterator[Advice]:
    """2 (N - 1) / N S_p / B <= T_C: the counterpart of Lemma 2 without servers."""
    if not (facts.parameter_bytes and facts.workers and facts.link_rate and facts.compute):
        return
    seconds = ring_factor(facts.workers) * facts.parameter_bytes / facts.link_rate
    hidden = seconds <= facts.compute
    yield Advice(
        question="Can an all-reduce hide behind the compute?",
        answer=f"{'Yes' if hidden else 'No'}: a ring of {facts.workers} takes "
        f"{format_seconds(seconds)}, the compute {format_seconds(facts.compute)}.",
        numbers={"seconds": seconds, "T_C": facts.compute, "N": facts.workers},
        source="ring all-reduce, 2 (N - 1) / N S_p / B; counterpart of Zou et al. 2017, Lemma 2",
    )


def _samples(facts: AdviceFacts) -> Iterator[Advice]:
    if not (facts.layers and facts.node_rate and facts.link_rate):
        return
    balance = facts.node_rate / facts.link_rate
    whole = ratio_of(facts.layers)
    samples = least_samples(balance, whole)
    numbers = {"balance": balance, "ratio": whole, "samples": samples}
    answer = (
        f"{samples}: a node computes {format_number(balance)} FLOP while a byte travels, the model "
        f"needs {format_number(whole)} FLOP per byte and sample."
    )
    if facts.batch:
        numbers["nodes"] = nodes = most_nodes(facts.batch, balance, whole)
        answer += f" A minibatch of {facts.batch} suffices for {nodes} nodes."
    yield Advice(
        question="How many samples per node hide the exchange?",
        answer=answer,
        numbers=numbers,
        source="Das et al. 2016, data parallelism, computation over communication",
    )


def _groups(facts: AdviceFacts) -> Iterator[Advice]:
    if not (facts.layers and facts.batch and facts.workers):
        return
    nodes = facts.workers
    for layer, names in names_of_alike(facts.layers).items():
        groups = best_groups(layer, facts.batch, nodes)
        if groups == nodes:
            continue
        volumes = {g: hybrid_volume(layer, facts.batch, nodes, g) for g in (groups, 1, nodes)}
        yield Advice(
            question=f"How should {one_and_more(names)} be split?",
            answer=f"{_grouped(groups, nodes)}: {format_bytes(volumes[groups])} per node and "
            f"iteration; data parallelism {format_bytes(volumes[nodes])}, model parallelism "
            f"{format_bytes(volumes[1])}.",
            numbers={
                "G": groups,
                "ideal": ideal_groups(layer, facts.batch, nodes),
                "hybrid": volumes[groups],
                "data": volumes[nodes],
                "model": volumes[1],
                "N": nodes,
            },
            source="Das et al. 2016, hybrid parallelism, G* = sqrt(N MB / ofm)",
        )


def _grouped(groups: int, nodes: int) -> str:
    return "Over all nodes" if groups == 1 else f"In {groups} groups of {nodes // groups} nodes"


def names_of_alike(layers: Iterable[DasLayer]) -> dict[DasLayer, list[str]]:
    """The names of equal layers, by what they have in common."""
    found: dict[DasLayer, list[str]] = {}
    for layer in layers:
        found.setdefault(replace(layer, name=""), []).append(layer.name or "a layer")
    return found


def one_and_more(names: Sequence[str]) -> str:
    """ "blocks.0.mlp and 3 more like it"."""
    return names[0] + (f" and {len(names) - 1} more like it" if len(names) > 1 else "")


def _windows(facts: AdviceFacts) -> Iterator[Advice]:
    if not facts.times or facts.link is None:
        return
    early = windows(facts.times, facts.link)
    late = windows(facts.times, facts.link, need="update")
    yield Advice(
        question="How much of the gradient exchange shows?",
        answer=f"{format_seconds(early.step - early.compute)} if each sum is waited for where it "
        f"is needed, {format_seconds(late.step - late.compute)} if the optimiser waits for all, "
        f"beside {format_seconds(early.compute)} of compute. The first layer's share always shows.",
        numbers={
            "exposed": early.step - early.compute,
            "exposed_update": late.step - late.compute,
            "compute": early.compute,
        },
        source="Das et al. 2016, analysis of overlap",
    )
