"""How gradients are exchanged, as data: one decision in five parts.

What is sent (`compress`), when (`bucket`, `overlap`, `priority`, `chunk`, `credit`), by which
collective (`collective`, `carrier`), how it is combined (`reduce`, `values`), and for which
parameters something else holds (`parts`). MLSL (Das et al. 2016), CommLib (Shi et al. 2020), Adasum
(Maleki et al. 2020). Which parts can be combined is decided here and nowhere else.

`headway.collective.compression` says of each compressor what it may be combined with.
"""

from __future__ import annotations

from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Literal

from headway.collective.all_reduce.algorithm import (
    ALL_REDUCE_KINDS,
    AllReduceOptions,
    all_reduce_problems,
)
from headway.collective.compression import (
    ELEMENTWISE_NAMES,
    HIERARCHICAL_NAMES,
    Compression,
    parse_compression,
)
from headway.documents import document
from headway.keywords import checks_keywords
from headway.units import parse_bytes

DEFAULT_BUCKET, DEFAULT_CHUNK = "8 MiB", "1 MiB"
"""Of an exchange that fits them to the link, until it has been measured."""

Reduce = Literal["mean", "sum", "adasum"]
AllReduceName = Literal[
    "all_reduce", "hierarchical", "ring", "direct", "halving-doubling", "servers", "trees"
]


@document
class ExchangePart:
    """Other settings for parameters whose logical name matches a pattern; the first match wins.

    Attributes:
        parameters: A pattern as in file names: "*.bias", "blocks.0.*".
        ranks: Node groups (MLSL): these parameters are combined inside each of these groups of
            ranks only, instead of over the whole axis; the groups must be a partition of the ranks.
    """

    parameters: str
    compress: str | None = None
    ranks: tuple[tuple[int, ...], ...] | None = None


@checks_keywords
@document
class ExchangePlan:
    """How gradients are exchanged; the default is exact.

    Attributes:
        axis: The mesh axis along which gradients are exchanged.
        reduce: "mean": the gradient of the global mean loss; "sum": that times the ranks;
            "adasum": the adaptive sum of the ranks' own mean gradients (inexact).
        values: What is combined: "gradients", or the "updates" that each rank's own optimiser step
            would make (the combining optimiser of Adasum).
        collective: "all_reduce" over all ranks, or "hierarchical": reduce-scatter inside a node,
            exchange between nodes, all-gather inside; or the name of a program that carries the
            sums (see docs/collectives.md).
        carrier: What the program needs besides: chunks, the order of a ring, packed trees.
        repack: Where `carrier.rates` says for which links a program was found, they are measured
            now and then, and another program takes its place when they have drifted.
        compress: A compressor of `headway.collective.compression`; "auto": chosen from the
            measured link.
        bucket: Gradients are fused into buckets of about this size ("8 MiB"), or "auto": fitted to
            the measured latency and bandwidth (MG-WFBP).
        overlap: Buckets leave while the backward pass still runs.
        priority: Most urgent first, across the border of the step: gradients leave in the order in
            which the next forward pass needs them, large buckets are cut into chunks so that urgent
            ones can pass, the optimiser steps bucket by bucket, and each layer of the next forward
            pass waits for its own parameters only. Exact.
        chunk: Size of the chunks of `priority`, or "auto".
        credit: Chunks that are on their way at the same time.
    """

    axis: str = "data"
    reduce: Reduce = "mean"
    values: Literal["gradients", "updates"] = "gradients"
    collective: AllReduceName = "all_reduce"
    carrier: AllReduceOptions | None = None
    repack: bool = True
    compress: str = "none"
    bucket: str = DEFAULT_BUCKET
    overlap: bool = True
    priority: bool = False
    chunk: str = "auto"
    credit: int = 2
    parts: tuple[ExchangePart, ...] = ()

    def __str__(self) -> str:
        """What differs from the default: "compress=fp16, priority=True"."""
        default = ExchangePlan()
        return ", ".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name != "carrier" and getattr(self, field.name) != getattr(default, field.name)
        )

    @property
    def bucket_bytes(self) -> int | None:
        """None: fitted to the link."""
        return None if self.bucket == "auto" else parse_bytes(self.bucket)

    @property
    def initial_bucket_bytes(self) -> int:
        """Before anything has been measured."""
        return self.bucket_bytes or parse_bytes(DEFAULT_BUCKET)

    @property
    def initial_chunk_bytes(self) -> int:
        """Before anything has been measured."""
        return self.chunk_bytes or parse_bytes(DEFAULT_CHUNK)

    @property
    def chunk_bytes(self) -> int | None:
        """None: fitted to the link."""
        return None if self.chunk == "auto" else parse_bytes(self.chunk)

    @property
    def compression(self) -> Compression | None:
        """None: chosen from the measured link."""
        return None if self.compress == "auto" else parse_compression(self.compress)

    @property
    def carried(self) -> bool:
        """Whether a collective program performs the sums, on the backend "headway"."""
        return self.collective in ALL_REDUCE_KINDS

    @property
    def exact(self) -> bool:
        """Whether the result equals that of the serial run, up to rounding."""
        return (
            self.reduce == "mean"
            and self.compress == "none"
            and all(p.compress in (None, "none") and p.ranks is None for p in self.parts)
        )

    def part(self, name: str) -> ExchangePart | None:
        """The first part that matches a logical name."""
        return next((p for p in self.parts if fnmatchcase(name, p.parameters)), None)

    def problems(self, ranks: int) -> list[str]:
        """Every problem of this exchange, one line each; empty if it is legal."""
        found = [*_sizes(self), *_compressors(self)]
        if self.credit < 1:
            found.append(f"exchange.credit is {self.credit}; at least 1")
        if self.priority and not self.overlap:
            found.append("exchange.priority needs overlap; leave out overlap = false")
        found.extend(_adasum(self))
        found.extend(_hierarchical(self))
        found.extend(_carried(self, ranks))
        found.extend(
            f"exchange.parts {part.parameters}: groups {list(map(list, part.ranks))} are not a "
            f"partition of the ranks 0 to {ranks - 1}"
            for part in self.parts
            if part.ranks is not None
            and sorted(rank for group in part.ranks for rank in group) != [*range(ranks)]
        )
        return found


def _sizes(exchange: ExchangePlan) -> list[str]:
    found = []
    for key, text in (("bucket", exchange.bucket), ("chunk", exchange.chunk)):
        if text == "auto":
            continue
        try:
            size = parse_bytes(text)
        except ValueError as error:
            found.append(f"exchange.{key}: {error}, or auto")
        else:
            if size < 1:
                found.append(f"exchange.{key} is {size} bytes; at least 1")
    return found


def _compressors(exchange: ExchangePlan) -> list[str]:
    texts = [("exchange.compress", exchange.compress)]
    texts += [(f"exchange.parts {p.parameters}", p.compress or "none") for p in exchange.parts]
    found = []
    for key, text in texts:
        if text == "auto" and key == "exchange.compress":
            continue
        try:
            parse_compression(text)
        except ValueError as error:
            found.append(f"{key}: {error}")
    return found


def _hierarchical(exchange: ExchangePlan) -> list[str]:
    if exchange.collective != "hierarchical":
        return []
    texts = [exchange.compress, *(p.compress for p in exchange.parts if p.compress)]
    return [
        f"exchange.compress {text} does not go with collective hierarchical; "
        f"one of {', '.join(HIERARCHICAL_NAMES)} does"
        for text in texts
        if text.partition(":")[0] not in HIERARCHICAL_NAMES
    ]


def _carried(exchange: ExchangePlan, ranks: int) -> list[str]:
    # Also for a collective that is no program: a carrier there would be ignored.
    found = [*all_reduce_problems(exchange.collective, exchange.carrier, ranks)]
    if not exchange.carried:
        return found
    with_it = f"with collective {exchange.collective}"
    texts = [exchange.compress, *(p.compress for p in exchange.parts if p.compress)]
    found += [
        f"exchange.compress {text} {with_it}: a program carries sums; one of "
        f"{', '.join(ELEMENTWISE_NAMES)}"
        for text in texts
        if text.partition(":")[0] not in ELEMENTWISE_NAMES
    ]
    if exchange.reduce == "adasum":
        found.append(f"exchange.reduce adasum {with_it}: it has a program of its own")
    found += [
        f"exchange.parts {part.parameters}: ranks {with_it}, which is for all ranks together"
        for part in exchange.parts
        if part.ranks is not None
    ]
    return found


def _adasum(exchange: ExchangePlan) -> list[str]:
    found = []
    if exchange.reduce == "adasum":
        if exchange.compress != "none" or any(p.compress for p in exchange.parts):
            found.append("exchange.reduce adasum works on decoded gradients: compress must be none")
        if exchange.priority:
            found.append("exchange.reduce adasum does not go with priority: leave one of them out")
    if exchange.values == "updates" and exchange.reduce != "adasum":
        found.append("exchange.values updates is for reduce adasum only")
    return found
