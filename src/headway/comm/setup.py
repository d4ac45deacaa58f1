"""From the plan's description to a running exchange: buckets, methods, lane.

Invariant: everything here depends on the description, the parameters' names, shapes and types, and
on an `Arrangement` that all ranks share; so all ranks build the same buckets and lanes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from headway.collective.wire import bucket_traffic
from headway.comm.buckets import (
    FIRST_BUCKET_BYTES,
    Bucket,
    Layout,
    Toll,
    fuse,
    make_bucket,
    split_by_key,
)
from headway.comm.carried import check_alike
from headway.comm.crossing import Applier, CrossingExchange
from headway.comm.direct_lane import DirectLane
from headway.comm.exchange import GradientExchange
from headway.comm.lane import InlineLane
from headway.comm.method import Fused, Method, Route
from headway.comm.methods import make_exchange_method
from headway.comm.rounds_lane import RoundsLane
from headway.comm.routes import Partition, Routes
from headway.comm.swap import Scratch
from headway.errors import PlanError
from headway.plan import Compression, Exchange, parse_compression

DEFAULT_BUCKET_BYTES = 8 * 2**20
DEFAULT_CHUNK_BYTES = 2**20
"""Until the link has been measured."""
ELEMENTWISE = frozenset({"none", "fp16", "bf16"})
"""Compressors whose buckets can be cut into chunks."""


@dataclass(frozen=True)
class Key:
    """What the parameters of one bucket have in common."""

    compression: Compression
    partition: Partition | None

    @staticmethod
    def of(name: str, description: Exchange) -> Key:
        part = description.part(name)
        text = part.compress if part and part.compress else description.compress
        return Key(parse_compression(text), part.ranks if part else None)


@dataclass(frozen=True)
class Arrangement:
    """What is found by measuring, the same on all ranks.

    Attributes:
        layout: Logical names per bucket; of a priority exchange in forward order.
        chunk_bytes: Size of chunks; None: buckets are sent whole.
        order: Indices of the chunks (bucket by bucket) in sending order; None: the last first.
        urgency: Bucket numbers, the most urgent first; None: in order of their number.
    """

    layout: Layout
    chunk_bytes: int | None = None
    order: tuple[int, ...] | None = None
    urgency: tuple[int, ...] | None = None


def first_arrangement(parameters: Mapping[str, nn.Parameter], description: Exchange) -> Arrangement:
    """Before anything has been measured: registration stands for forward order."""
    keys: dict[str, Hashable] = {name: Key.of(name, description) for name in parameters}
    if not description.priority:
        layout = fuse(
            dict(reversed(list(parameters.items()))),
            keys,
            bucket_bytes=description.bucket_bytes or DEFAULT_BUCKET_BYTES,
            first_bytes=FIRST_BUCKET_BYTES,
        )
        return Arrangement(layout)
    chunk = description.chunk_bytes or DEFAULT_CHUNK_BYTES
    return Arrangement(fuse(parameters, keys, bucket_bytes=chunk), chunk)


def respect_keys(layout: Layout, description: Exchange) -> Layout:
    """A measured layout, cut where compressor or group change."""
    keys: dict[str, Hashable] = {
        name: Key.of(name, description) for names in layout for name in names
    }
    return split_by_key(layout, keys)


def make_buckets(
    parameters: Mapping[str, nn.Parameter],
    layout: Layout,
    description: Exchange,
    routes: Routes,
    *,
    seed: int,
) -> tuple[Bucket, ...]:
    """The buckets of a layout; collective where routes have to be made."""
    kinds = [Key.of(names[0], description) for names in layout]
    scratch = Scratch()
    methods = [
        make_exchange_method(description, kind.compression, seed=seed, scratch=scratch)
        for kind in kinds
    ]
    inline = is_inline(description, methods, kinds)
    credit = 1 if inline else description.credit
    found = []
    for number, (names, kind, method) in enumerate(zip(layout, kinds, methods, strict=True)):
        chosen: tuple[Route, ...]
        if inline:
            chosen = (routes.own(),)
        else:
            chosen = routes.get(
                credit, kind.partition, hierarchical=description.collective == "hierarchical"
            )
        bucket = make_bucket(number, names, parameters, method, chosen)
        if description.reduce == "mean":
            bucket.weight = routes.size / chosen[0].size
        _count_bytes(bucket, description, kind.compression, routes)
        found.append(bucket)
    return tuple(found)


def _count_bytes(
    bucket: Bucket, description: Exchange, compression: Compression, routes: Routes
) -> None:
    """What this rank will send for the bucket, by the plan's own arithmetic."""
    route = bucket.routes[0]
    traffic = bucket_traffic(
        [piece.shape for piece in bucket.fused.pieces],
        route.nodes,
        reduce=description.reduce,
        collective=description.collective,
        compressor=compression.name,
        amount=compression.amount,
        carrier=description.carrier,
        element_bytes=bucket.fused.buffer.element_size(),
    )
    bucket.wire_bytes = round(traffic.by_rank(route.rank))
    bucket.open(0)
    if routes.pace is not None:
        home = routes.nodes.inside(route.rank)
        leaving = (n for (a, b), n in traffic.sent.items() if a == route.rank and b not in home)
        bucket.toll = Toll(routes.pace, sum(leaving))


def is_inline(description: Exchange, methods: list[Method], kinds: list[Key]) -> bool:
    """Whether the training thread itself can drive the exchange."""
    return (
        not description.priority
        and _has_one_round(description, methods)
        and all(kind.partition is None for kind in kinds)
    )


def _has_one_round(description: Exchange, methods: list[Method]) -> bool:
    return description.collective != "hierarchical" and all(
        method.elementwise and not method.blocking for method in methods
    )


def make_exchange(
    parameters: Mapping[str, nn.Parameter],
    description: Exchange,
    arrangement: Arrangement,
    routes: Routes,
    *,
    seed: int,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> GradientExchange:
    """Build one; collective.

    Args:
        parameters: Logical name -> parameter, in order of registration.
        description: The plan's.
        arrangement: Of exactly these parameters.
        routes: Of this process.
        seed: Of random compressors.
        model: With `optimizer`: the exchange crosses the step's border.
        optimizer: Whose steps the exchange makes.
    """
    buckets = make_buckets(parameters, arrangement.layout, description, routes, seed=seed)
    methods = [bucket.method for bucket in buckets]
    kinds = [Key.of(bucket.names[0], description) for bucket in buckets]
    inline = is_inline(description, methods, kinds)
    on_gpu = any(bucket.fused.buffer.is_cuda for bucket in buckets)
    if description.carried and not on_gpu:
        sizes = sums_of(buckets, description, arrangement.chunk_bytes)
        check_alike(description, buckets[0].routes[0].size, sizes)
    if inline and not (description.carried and on_gpu):
        return GradientExchange(buckets, InlineLane(buckets), overlap=description.overlap)
    if on_gpu:
        raise PlanError(
            "this exchange cannot run here",
            problems=["its thread and its programs handle gradients in host memory only, no GPU's"],
            fix="Leave out priority, ranks of parts, every collective but all_reduce, and "
            "compressors other than fp16 and bf16, or use --device cpu.",
        )
    sequence = _sequence(buckets, description, arrangement)
    kind = DirectLane if _has_one_round(description, methods) else RoundsLane
    make_lane = partial(
        kind,
        buckets,
        sequence,
        credit=description.credit,
        threads=torch.get_num_threads(),
    )
    if model is None or optimizer is None:
        return GradientExchange(buckets, make_lane(), overlap=description.overlap)
    urgency = arrangement.urgency or tuple(range(len(buckets)))
    applier = Applier({number: place for place, number in enumerate(urgency)})
    lane = make_lane(landed=applier.landed, idle=applier.apply_one)
    return CrossingExchange(buckets, lane, applier, model=model, optimizer=optimizer)


def sums_of(
    buckets: tuple[Bucket, ...], description: Exchange, chunk_bytes: int | None
) -> list[tuple[int, int]]:
    """Elements, and bytes of an element as it travels, of all sums of a step."""
    return [
        (chunk.buffer.numel(), _width(bucket, Key.of(bucket.names[0], description)))
        for bucket in buckets
        for chunk in bucket.chunks(chunk_bytes)
    ]


def _width(bucket: Bucket, kind: Key) -> int:
    """Bytes of an element as it travels."""
    return 2 if kind.compression.name != "none" else bucket.fused.buffer.element_size()


def _sequence(
    buckets: tuple[Bucket, ...], description: Exchange, arrangement: Arrangement
) -> list[tuple[int, Fused]]:
    """The chunks in sending order, each with the number of its bucket."""
    chunks = [
        (bucket.number, chunk)
        for bucket in buckets
        for chunk in bucket.chunks(arrangement.chunk_bytes)
    ]
    if arrangement.order is not None:
        return [chunks[index] for index in arrangement.order]
    # A priority layout is in forward order: the last layers' gradients come first.
    return chunks[::-1] if description.priority else chunks
