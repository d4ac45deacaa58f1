"""What a step will take under one way of exchanging: from layers and links to a played step.

The way is a `Scheme`: the part of the plan's `Exchange` that matters for time. Here its buckets are
made as `comm` makes them, each becomes a load of the link with the bytes and rounds of its method,
and the step is played. Invariant: whatever a scheme changes, the layers' gradients all travel once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headway.collective.bound import sharp_bound
from headway.collective.carrier import Carrier
from headway.collective.chunks import cut
from headway.collective.fusion import Buckets, backward_order, fill_buckets, merge_buckets
from headway.collective.link import LinkFit
from headway.collective.order import chunk_size, planned_order
from headway.collective.play import Load, Played, play, ready_order
from headway.collective.service import Network, Service, Speed, seen_link, service
from headway.collective.traffic import NOTHING, Traffic
from headway.collective.wire import ELEMENTWISE, bucket_traffic

FIRST_BUCKET = 2**20
"""The first bucket is small, so that the link does not idle until a full one is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Parameters whose gradients come at the same time, in the order of the forward pass.

    Attributes:
        name: Logical name, or any text.
        shapes: Of its parameters; empty for a layer without.
        forward: Seconds.
        backward: Seconds.
        element_bytes: Of a gradient.
        compressor: Something else than the scheme's, with its `amount`.
        amount: Density or rank of `compressor`.
        ranks: It is summed inside this group of ranks only.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    forward: float = 0.0
    backward: float = 0.0
    element_bytes: int = 4
    compressor: str | None = None
    amount: float = 0.0
    ranks: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Of its gradients."""
        return self.element_bytes * sum(map(math.prod, self.shapes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How gradients are exchanged; the words are those of the plan's `Exchange`.

    Attributes:
        compressor: Name.
        amount: Its density or rank.
        reduce: "mean", "sum" or "adasum".
        collective: "all_reduce", "hierarchical", or a program of `carrier.CARRIED`.
        carrier: Of a program.
        bucket: Bytes; None: fitted to the link.
        overlap: Buckets leave while backward runs.
        priority: Chunks in planned order across the border of the step.
        chunk: Bytes; None: fitted to the link.
        credit: Chunks on their way at the same time.
    """

    compressor: str = "none"
    amount: float = 0.0
    reduce: str = "mean"
    collective: str = "all_reduce"
    carrier: Carrier | None = None
    bucket: int | None = None
    overlap: bool = True
    priority: bool = False
    chunk: int | None = None
    credit: int = 2

    @property
    def compress(self) -> str:
        """As it is written in a plan."""
        return f"{self.compressor}:{self.amount:g}" if self.amount else self.compressor


@dataclass(frozen=True, kw_only=True)
class Predicted:
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
        credit: Loads on their way at the same time.
        crossing: The step's border is crossed.
        link: That the loads are priced with.
        played: The step.
        traffic: Bytes that ranks send to each other in a step.
    """

    forward: float
    backward: float
    communication: float
    isolated: float
    buckets: Buckets
    loads: tuple[Load, ...]
    home: tuple[int, ...]
    order: tuple[int, ...]
    credit: int
    crossing: bool
    link: LinkFit
    played: Played
    traffic: Traffic

    @property
    def step(self) -> float:
        return self.played.step

    @property
    def exposed(self) -> float:
        """Seconds of a step in which the training thread waits for the exchange."""
        return self.played.exposed


def predict(
    scheme: Scheme,
    layers: Sequence[Layer],
    network: Network,
    speeds: Mapping[str, Speed],
    *,
    buckets: Buckets | None = None,
) -> Predicted:
    """Price a scheme.

    Args:
        scheme: How to exchange.
        layers: In the order of the forward pass.
        network: Links and nodes.
        speeds: Of compressors, by name; one that is missing costs nothing.
        buckets: Indices of layers bucket by bucket, instead of those of the scheme.
    """
    forward = sum(layer.forward for layer in layers)
    backward = sum(layer.backward for layer in layers)
    ready, needed = moments(layers)
    if not scheme.overlap:
        ready = [forward + backward] * len(layers)
    fused = make_buckets(scheme, layers, network, ready, needed) if buckets is None else buckets
    loads, home = _loads(scheme, layers, network, speeds, fused, ready, needed)
    link = network.link_of(scheme.collective)
    inline = not scheme.priority and scheme.compressor in ELEMENTWISE
    credit = 1 if inline else scheme.credit
    if scheme.priority:
        order = planned_order(loads, link, credit=credit)
    else:
        order = ready_order([replace(load, needed=0.0) for load in loads])
    played = play(
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
    return Predicted(
        forward=forward,
        backward=backward,
        communication=math.fsum(busy),
        isolated=math.fsum(whole),
        buckets=fused,
        loads=tuple(loads),
        home=tuple(home),
        order=order,
        credit=credit,
        crossing=scheme.priority,
        link=link,
        played=played,
        traffic=_traffic(scheme, layers, network, fused),
    )


def moments(layers: Sequence[Layer]) -> tuple[list[float], list[float]]:
    """When each layer's gradients come, and when each layer begins; seconds, as for `Load`."""
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
    scheme: Scheme,
    layers: Sequence[Layer],
    network: Network,
    ready: Sequence[float],
    needed: Sequence[float],
) -> Buckets:
    """The buckets of a scheme; layers of different methods or groups never share one.

    With priority gradients are fused in forward order up to the size of a chunk, whatever the
    scheme's bucket: a larger bucket would only delay what is urgent in it.
    """
    sizes = [layer.num_bytes for layer in layers]
    keys = [(layer.compressor, layer.amount, layer.ranks) for layer in layers]
    chosen = [i for i, size in enumerate(sizes) if size]
    if scheme.bucket is None and not scheme.priority:
        link = effective_link(scheme, layers, network)
        found = merge_buckets([sizes[i] for i in chosen], [ready[i] for i in chosen], link)
        return tuple(
            same
            for bucket in found
            for key in dict.fromkeys(keys[chosen[i]] for i in bucket)
            if (same := tuple(chosen[i] for i in bucket if keys[chosen[i]] == key))
        )
    if scheme.priority:
        limit = first = chunk_bytes(scheme, layers, network)
        order = sorted(chosen, key=lambda i: (needed[i], i))
    else:
        assert scheme.bucket is not None
        limit, first = scheme.bucket, FIRST_BUCKET
        order = [i for i in backward_order(ready) if sizes[i]]
    place = {i: number for number, i in enumerate(order)}
    made = [
        bucket
        for key in dict.fromkeys(keys[i] for i in order)
        for bucket in fill_buckets(sizes, [i for i in order if keys[i] == key], limit, first)
    ]
    return tuple(sorted(made, key=lambda bucket: place[bucket[-1]]))


def effective_link(scheme: Scheme, layers: Sequence[Layer], network: Network) -> LinkFit:
    """The link as the layers' gradients see it; see `seen_link`."""
    shapes = [shape for layer in layers for shape in layer.shapes]
    return seen_link(scheme, shapes, network, layers[0].element_bytes if layers else 4)


def layer_bound(scheme: Scheme, layers: Sequence[Layer], network: Network) -> float:
    """The shortest step that any buckets and any order could reach; see `sharp_bound`."""
    ready, needed = moments(layers)
    compute = max(ready, default=0.0)
    if not scheme.overlap:
        ready = [compute] * len(layers)
    loads = [
        Load(layer.name, layer.num_bytes, come, used)
        for layer, come, used in zip(layers, ready, needed, strict=True)
        if layer.num_bytes
    ]
    link = effective_link(scheme, layers, network)
    return sharp_bound(loads, link, compute=compute, crossing=scheme.priority)


def chunk_bytes(scheme: Scheme, layers: Sequence[Layer], network: Network) -> int:
    """Of gradients, before they are compressed."""
    largest = max((layer.num_bytes for layer in layers), default=1)
    return scheme.chunk or chunk_size(network.link_of(scheme.collective), largest=largest)


def _loads(
    scheme: Scheme,
    layers: Sequence[Layer],
    network: Network,
    speeds: Mapping[str, Speed],
    buckets: Buckets,
    ready: Sequence[float],
    needed: Sequence[float],
) -> tuple[list[Load], list[int]]:
    loads: list[Load] = []
    home: list[int] = []
    chunk = chunk_bytes(scheme, layers, network)
    for number, bucket in enumerate(buckets):
        own, where = _method(scheme, layers[bucket[0]], network)
        shapes = [shape for i in bucket for shape in layers[i].shapes]
        size = sum(layers[i].num_bytes for i in bucket)
        served = service(own, shapes, where, speeds, layers[bucket[0]].element_bytes)
        whole = not scheme.priority or not _elementwise(own)
        parts = ((0, size),) if whole else cut(size, chunk)
        come, used = max(ready[i] for i in bucket), min(needed[i] for i in bucket)
        for place, (start, stop) in enumerate(parts):
            name = f"{number}" if len(parts) == 1 else f"{number}.{place}"
            loads.append(_load(name, served, (stop - start) / size, come, used))
            home.append(number)
    return loads, home


def _elementwise(scheme: Scheme) -> bool:
    return scheme.compressor in ELEMENTWISE and scheme.reduce != "adasum"


def _method(scheme: Scheme, layer: Layer, network: Network) -> tuple[Scheme, Network]:
    """The scheme and the network of a layer with its exceptions."""
    if layer.compressor is not None:
        scheme = replace(scheme, compressor=layer.compressor, amount=layer.amount)
    return scheme, network if layer.ranks is None else network.among(layer.ranks)


def _load(name: str, served: Service, share: float, ready: float, needed: float) -> Load:
    return Load(
        name=name,
        num_bytes=served.num_bytes * share,
        ready=ready,
        needed=needed,
        encode=served.encode * share,
        decode=served.decode * share + served.delay,
    )


def _traffic(
    scheme: Scheme, layers: Sequence[Layer], network: Network, buckets: Buckets
) -> Traffic:
    total = NOTHING
    for bucket in buckets:
        own, where = _method(scheme, layers[bucket[0]], network)
        total += bucket_traffic(
            [shape for i in bucket for shape in layers[i].shapes],
            where.nodes,
            reduce=own.reduce,
            collective=own.collective,
            compressor=own.compressor,
            amount=own.amount,
            carrier=own.carrier,
            element_bytes=layers[bucket[0]].element_bytes,
        )
    return total
