"""The step time under an exchange scheme, and the ranking from which "auto" takes the best.

An `ExchangeScheme` is the part of the plan's exchange that matters for time. Its buckets are
formed as `headway.comm` forms them, each becomes a load on the link with the bytes and rounds
of its method, and the step is simulated.

The ranking puts exact candidates first among equals. An inexact one is considered only where
inexact results are allowed, and chosen only where it gains enough to be worth an approximation.
The result depends on the arguments alone, so that ranks with the same numbers choose the same
scheme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.collective.compression import (
    COMPRESSORS,
    Compression,
    CompressorSpeed,
    parse_compression,
)
from headway.collective.model.bucket_cost import (
    ExchangeNetwork,
    ExchangeScheme,
    bucket_service,
    bucket_traffic,
    compressed_link,
    is_hierarchical,
)
from headway.collective.model.gradient_buckets import (
    Buckets,
    backward_order,
    chunk_spans,
    fill_buckets_by_key,
    merge_buckets,
    split_by_key,
)
from headway.collective.model.link_fit import LinkFit
from headway.collective.model.overlap import (
    Consistency,
    Diagnosis,
    ExchangeStep,
    LinkLoad,
    diagnose,
    ready_order,
    sharp_step_bound,
    simulate_link,
)
from headway.collective.model.priority_order import chunk_size, planned_order
from headway.collective.nodes import NOTHING, Traffic
from headway.units import format_seconds

# The first bucket is small, so that the link does not idle until a full one is there.
FIRST_BUCKET = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientLayer:
    """Parameters whose gradients come at the same time, in the order of the forward pass.

    Attributes:
        forward: Seconds, like `backward`.
        compression: Something else than the scheme's.
        ranks: It is summed inside this group of ranks only.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    forward: float = 0.0
    backward: float = 0.0
    element_bytes: int = 4
    compression: Compression | None = None
    ranks: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Of its gradients."""
        return self.element_bytes * sum(map(math.prod, self.shapes))


@dataclass(frozen=True, kw_only=True)
class ExchangePrediction:
    """A step under a scheme.

    Attributes:
        forward: F, seconds.
        backward: B, seconds.
        communication: C: seconds for which the link is busy in a step.
        isolated: Seconds that the exchange would take on its own, one load after the other.
        buckets: Indices of layers, bucket by bucket.
        loads: Chunks of the buckets, or whole buckets.
        home: Of each load, its bucket.
        order: Of the loads, as they are sent.
        crossing: The step's border is crossed.
        link: That the loads are priced with.
        traffic: Bytes that ranks send to each other in a step.
    """

    forward: float
    backward: float
    communication: float
    isolated: float
    buckets: Buckets
    loads: tuple[LinkLoad, ...]
    home: tuple[int, ...]
    order: tuple[int, ...]
    crossing: bool
    link: LinkFit
    played: ExchangeStep
    traffic: Traffic

    @property
    def step(self) -> float:
        return self.played.step

    @property
    def exposed(self) -> float:
        """Seconds of a step in which the training thread waits for the exchange."""
        return self.played.exposed


def predict_exchange(
    scheme: ExchangeScheme,
    layers: Sequence[GradientLayer],
    network: ExchangeNetwork,
    speeds: Mapping[str, CompressorSpeed],
    *,
    buckets: Buckets | None = None,
) -> ExchangePrediction:
    """Price a scheme.

    Args:
        layers: In the order of the forward pass.
        speeds: Of compressors, by name; one that is missing costs nothing.
        buckets: Indices of layers bucket by bucket, instead of those of the scheme.
    """
    forward = sum(layer.forward for layer in layers)
    backward = sum(layer.backward for layer in layers)
    ready, needed = gradient_moments(layers)
    if not scheme.overlap:
        ready = [forward + backward] * len(layers)
    fused = make_buckets(scheme, layers, network, ready, needed) if buckets is None else buckets
    loads, home = _loads(scheme, layers, network, speeds, fused, ready, needed)
    link = network.link_of(scheme.collective)
    inline = not scheme.priority and scheme.compression.elementwise
    credit = 1 if inline else scheme.credit
    if scheme.priority:
        order = planned_order(loads, link, credit=credit)
    else:
        # Urgency must not break ties: without priority buckets leave in the order of their numbers.
        order = ready_order([replace(load, needed=0.0) for load in loads])
    played = simulate_link(
        loads,
        link,
        order=order,
        credit=credit,
        crossing=scheme.priority,
        compute=forward + backward,
    )
    busy = [link.seconds_per_byte * load.num_bytes for load in loads]
    whole = [
        time + link.latency + load.encode + load.decode
        for time, load in zip(busy, loads, strict=True)
    ]
    return ExchangePrediction(
        forward=forward,
        backward=backward,
        communication=math.fsum(busy),
        isolated=math.fsum(whole),
        buckets=fused,
        loads=tuple(loads),
        home=tuple(home),
        order=order,
        crossing=scheme.priority,
        link=link,
        played=played,
        traffic=_traffic(scheme, layers, network, fused),
    )


def gradient_moments(layers: Sequence[GradientLayer]) -> tuple[list[float], list[float]]:
    """When each layer's gradients come, and when each layer begins; seconds, as for `LinkLoad`."""
    needed, clock = [], 0.0
    for layer in layers:
        needed.append(clock)
        clock += layer.forward
    ready = [0.0] * len(layers)
    for i in reversed(range(len(layers))):
        clock += layers[i].backward
        ready[i] = clock
    return ready, needed


def make_buckets(
    scheme: ExchangeScheme,
    layers: Sequence[GradientLayer],
    network: ExchangeNetwork,
    ready: Sequence[float],
    needed: Sequence[float],
) -> Buckets:
    """The buckets of a scheme; layers of different methods or groups never share one.

    With priority gradients are fused in forward order up to the size of a chunk, whatever the
    scheme's bucket: a larger bucket would only delay what is urgent in it.
    """
    sizes = [layer.num_bytes for layer in layers]
    keys = [(layer.compression, layer.ranks) for layer in layers]
    chosen = [i for i, size in enumerate(sizes) if size]
    if scheme.bucket is None and not scheme.priority:
        link = effective_link(scheme, layers, network)
        found = merge_buckets([sizes[i] for i in chosen], [ready[i] for i in chosen], link)
        return split_by_key(([chosen[i] for i in bucket] for bucket in found), keys)
    if scheme.priority:
        limit = first = chunk_bytes(scheme, layers, network)
        order = sorted(chosen, key=lambda i: (needed[i], i))
    else:
        assert scheme.bucket is not None
        limit, first = scheme.bucket, FIRST_BUCKET
        order = [i for i in backward_order(ready) if sizes[i]]
    return fill_buckets_by_key(sizes, keys, order, limit, first)


def effective_link(
    scheme: ExchangeScheme, layers: Sequence[GradientLayer], network: ExchangeNetwork
) -> LinkFit:
    """The link as the layers' gradients see it; see `compressed_link`."""
    shapes = [shape for layer in layers for shape in layer.shapes]
    return compressed_link(scheme, shapes, network, layers[0].element_bytes if layers else 4)


def layer_bound(
    scheme: ExchangeScheme, layers: Sequence[GradientLayer], network: ExchangeNetwork
) -> float:
    """The shortest step that any buckets and any order could reach; see `sharp_step_bound`."""
    ready, needed = gradient_moments(layers)
    compute = max(ready, default=0.0)
    if not scheme.overlap:
        ready = [compute] * len(layers)
    loads = [
        LinkLoad(layer.name, layer.num_bytes, come, used)
        for layer, come, used in zip(layers, ready, needed, strict=True)
        if layer.num_bytes
    ]
    link = effective_link(scheme, layers, network)
    return sharp_step_bound(loads, link, compute=compute, crossing=scheme.priority)


def chunk_bytes(
    scheme: ExchangeScheme, layers: Sequence[GradientLayer], network: ExchangeNetwork
) -> int:
    """Of gradients, before they are compressed."""
    largest = max((layer.num_bytes for layer in layers), default=1)
    return scheme.chunk or chunk_size(network.link_of(scheme.collective), largest=largest)


def _loads(
    scheme: ExchangeScheme,
    layers: Sequence[GradientLayer],
    network: ExchangeNetwork,
    speeds: Mapping[str, CompressorSpeed],
    buckets: Buckets,
    ready: Sequence[float],
    needed: Sequence[float],
) -> tuple[list[LinkLoad], list[int]]:
    loads: list[LinkLoad] = []
    home: list[int] = []
    chunk = chunk_bytes(scheme, layers, network)
    for number, bucket in enumerate(buckets):
        own, where = _method(scheme, layers[bucket[0]], network)
        shapes = [shape for i in bucket for shape in layers[i].shapes]
        size = sum(layers[i].num_bytes for i in bucket)
        served = bucket_service(own, shapes, where, speeds, layers[bucket[0]].element_bytes)
        # Adasum's factors belong to whole layers, other compressors' payloads to whole tensors.
        cuttable = own.compression.elementwise and own.reduce != "adasum"
        whole = not scheme.priority or not cuttable
        parts = ((0, size),) if whole else chunk_spans(size, chunk)
        come, used = max(ready[i] for i in bucket), min(needed[i] for i in bucket)
        for place, (start, stop) in enumerate(parts):
            name = f"{number}" if len(parts) == 1 else f"{number}.{place}"
            share = (stop - start) / size
            # The delay counts as decoding: further rounds hold up the result, but not the link.
            loads.append(
                LinkLoad(
                    name=name,
                    num_bytes=served.num_bytes * share,
                    ready=come,
                    needed=used,
                    encode=served.encode * share,
                    decode=served.decode * share + served.delay,
                )
            )
            home.append(number)
    return loads, home


def _method(
    scheme: ExchangeScheme, layer: GradientLayer, network: ExchangeNetwork
) -> tuple[ExchangeScheme, ExchangeNetwork]:
    """The scheme and the network of a layer with its exceptions."""
    if layer.compression is not None:
        scheme = replace(scheme, compression=layer.compression)
    return scheme, network if layer.ranks is None else network.among(layer.ranks)


def _traffic(
    scheme: ExchangeScheme,
    layers: Sequence[GradientLayer],
    network: ExchangeNetwork,
    buckets: Buckets,
) -> Traffic:
    total = NOTHING
    for bucket in buckets:
        own, where = _method(scheme, layers[bucket[0]], network)
        total += bucket_traffic(
            [shape for i in bucket for shape in layers[i].shapes],
            where.nodes,
            reduce=own.reduce,
            collective=own.collective,
            compression=own.compression,
            carrier=own.carrier,
            element_bytes=layers[bucket[0]].element_bytes,
        )
    return total


# Which exchange is fastest on this link: candidates, ranked by their predicted step.


CANDIDATE_COMPRESSORS = tuple(
    map(
        parse_compression,
        ("none", "fp16", "int8", "powersgd:4", "powersgd:2", "powersgd:1", "topk:0.01"),
    )
)
"""From exact to coarse: of equally fast ones the first is taken."""
REQUIRED_GAIN = (1.0, 1.02, 1.05)
"""By class of exactness: an inexact exchange must be so many times faster than an exact one."""
TYPICAL_COMPRESSOR_SPEEDS: dict[str, CompressorSpeed] = {
    name: kind.typical_speed for name, kind in COMPRESSORS.items() if kind.exactness
} | {"adasum": CompressorSpeed(0.15e-9)}
"""Until they have been measured."""


@dataclass(frozen=True, kw_only=True)
class SchemeChoice:
    """One candidate with its price.

    Attributes:
        exactness: 0: exact; 1: rounded to fewer bits; 2: coarse, with error feedback.
        reason: One sentence: why it stands where it stands.
    """

    scheme: ExchangeScheme
    predicted: ExchangePrediction
    diagnosis: Diagnosis
    exactness: int
    reason: str = ""

    @property
    def step(self) -> float:
        return self.predicted.step


def exactness(scheme: ExchangeScheme) -> int:
    """0: the sum is exact; 1: rounded; 2: coarse."""
    return 2 if scheme.reduce == "adasum" else scheme.compression.exactness


def rank_schemes(
    layers: Sequence[GradientLayer],
    network: ExchangeNetwork,
    *,
    base: ExchangeScheme,
    speeds: Mapping[str, CompressorSpeed] = TYPICAL_COMPRESSOR_SPEEDS,
    candidates: Iterable[Compression] = CANDIDATE_COMPRESSORS,
) -> list[SchemeChoice]:
    """Rank compressors, the best first: by the step, multiplied by what an approximation must gain.

    Args:
        layers: With measured times, in forward order.
        base: The rest of the exchange; its compressor is varied.
        speeds: Measured, by compressor.
    """
    layered = is_hierarchical(network.nodes, base.collective)
    found = []
    for compression in candidates:
        if compression.hierarchical or not layered:
            scheme = replace(base, compression=compression)
            predicted = predict_exchange(scheme, layers, network, speeds)
            found.append(evaluate_scheme(scheme, predicted, layers, network))
    # A stable sort: of equally good candidates the first, which is the more exact one.
    ranked = sorted(found, key=lambda choice: choice.step * REQUIRED_GAIN[choice.exactness])
    return [
        replace(choice, reason=_reason(choice, ranked, number))
        for number, choice in enumerate(ranked)
    ]


def evaluate_scheme(
    scheme: ExchangeScheme,
    predicted: ExchangePrediction,
    layers: Sequence[GradientLayer],
    network: ExchangeNetwork,
) -> SchemeChoice:
    """A candidate, diagnosed."""
    how: Consistency = "none"
    if scheme.overlap:
        how = "crossing" if predicted.crossing else "overlap"
    diagnosis = diagnose(
        predicted.step,
        predicted.forward,
        predicted.backward,
        predicted.communication,
        how,
        sharp=layer_bound(scheme, layers, network),
    )
    return SchemeChoice(
        scheme=scheme, predicted=predicted, diagnosis=diagnosis, exactness=exactness(scheme)
    )


def _reason(choice: SchemeChoice, ranked: Sequence[SchemeChoice], number: int) -> str:
    step = format_seconds(choice.step)
    if number == 0:
        exact = next((c for c in ranked if not c.exactness), None)
        if choice.exactness == 0 or exact is None:
            head = "exact, and " if choice.exactness == 0 else ""
            return f"{head}{step} a step: {choice.diagnosis.sentence}"
        gain = exact.step / choice.step
        return f"{step} a step, {gain:.2f}x as fast as the best exact exchange"
    best = ranked[0]
    if choice.step < best.step:
        gain = best.step / choice.step
        need = REQUIRED_GAIN[choice.exactness] / REQUIRED_GAIN[best.exactness]
        return (
            f"{gain:.2f}x as fast as {best.scheme.compress}, but less exact: it must be {need:.2f}x"
        )
    return f"{choice.step / best.step:.2f}x the step of {best.scheme.compress}"
