"""How gradients are exchanged, as data: one decision in five parts.

What is sent (`compress`), when (`bucket`, `overlap`, `priority`, `chunk`, `credit`), by which
collective (`collective`, `carrier`), how it is combined (`reduce`, `values`), and for which
parameters something else holds (`parts`). MLSL (Das et al. 2016), CommLib (Shi et al. 2020), Adasum
(Maleki et al. 2020). Which parts can be combined is decided here and nowhere else.

A compressor is written as a text, "name" or "name:amount" ("mstopk:0.01", "powersgd:2").
`COMPRESSORS` says what each may be combined with and how many bytes it sends; `comm.compress` holds
the implementations, whose payloads must have exactly these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Literal

from headway.collective.all_reduce.algorithm import (
    ALL_REDUCE_KINDS,
    SUMMABLE_COMPRESSORS,
    AllReduceOptions,
    all_reduce_problems,
)
from headway.documents import document, nearest
from headway.units import parse_bytes

Amount = Literal["none", "density", "rank"]


@dataclass(frozen=True, kw_only=True)
class CompressorFacts:
    """What is known of a compressor without running it.

    Attributes:
        amount: What the number behind the colon means.
        summable: The network may add encoded payloads, so that any all-reduce carries them; the
            others are gathered from all ranks and decoded one by one.
        feedback: What was not sent is kept and added to the next gradient (error feedback).
        exact: The sum is that of the uncompressed exchange.
    """

    amount: Amount = "none"
    summable: bool
    feedback: bool
    exact: bool = False


COMPRESSORS: dict[str, CompressorFacts] = {
    "none": CompressorFacts(summable=True, feedback=False, exact=True),
    "fp16": CompressorFacts(summable=True, feedback=False),
    "bf16": CompressorFacts(summable=True, feedback=False),
    "int8": CompressorFacts(summable=False, feedback=False),
    "sign": CompressorFacts(summable=False, feedback=True),
    "topk": CompressorFacts(amount="density", summable=False, feedback=True),
    "mstopk": CompressorFacts(amount="density", summable=False, feedback=True),
    "adaptive": CompressorFacts(amount="density", summable=False, feedback=True),
    "randomk": CompressorFacts(amount="density", summable=True, feedback=True),
    "powersgd": CompressorFacts(amount="rank", summable=True, feedback=True),
}


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A compressor with its amount: density in (0, 1], or rank from 1."""

    name: str
    amount: float = 0.0

    @property
    def facts(self) -> CompressorFacts:
        return COMPRESSORS[self.name]

    @property
    def rank(self) -> int:
        """Of "powersgd:2": 2."""
        return int(self.amount)

    def __str__(self) -> str:
        return self.name if self.facts.amount == "none" else f"{self.name}:{self.amount:g}"


def parse_compression(text: str) -> Compression:
    """Read "fp16", "mstopk:0.01" or "powersgd:4".

    Raises:
        ValueError: No such compressor, or an amount that it cannot have; says what is legal.
    """
    name, colon, number = text.strip().partition(":")
    if name not in COMPRESSORS:
        raise ValueError(f"{name!r} is no compressor{nearest(name, list(COMPRESSORS))}")
    kind = COMPRESSORS[name].amount
    if kind == "none":
        if colon:
            raise ValueError(f"{name} takes no amount; write {name}")
        return Compression(name=name)
    example = f"{name}:0.01" if kind == "density" else f"{name}:2"
    try:
        amount = float(number)
    except ValueError:
        raise ValueError(f"{name} needs a {kind}; for example {example}") from None
    if kind == "density" and not 0 < amount <= 1:
        raise ValueError(f"{text}: a density lies between 0 and 1; for example {example}")
    if kind == "rank" and (amount < 1 or amount != int(amount)):
        raise ValueError(f"{text}: a rank is a whole number from 1; for example {example}")
    return Compression(name=name, amount=amount)


# How gradients become the same on all ranks, as data: one decision in five parts.


Reduce = Literal["mean", "sum", "adasum"]
AllReduceName = Literal[
    "all_reduce", "hierarchical", "ring", "direct", "halving-doubling", "servers", "trees"
]


@document
class ExchangePart:
    """Something else for the parameters whose logical name matches a pattern; first match wins.

    Attributes:
        parameters: A pattern as in file names: "*.bias", "blocks.0.*".
        compress: See `Exchange.compress`.
        ranks: Node groups (MLSL): these parameters are combined inside each of these groups of
            ranks only, instead of over the whole axis; the groups must be a partition of the ranks.
    """

    parameters: str
    compress: str | None = None
    ranks: tuple[tuple[int, ...], ...] | None = None


@document
class ExchangePlan:
    """The decision; the default is exact.

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
        compress: A compressor of `headway.plan.exchange`; "auto": chosen from the measured link.
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
    bucket: str = "8 MiB"
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
        """None: to be fitted."""
        return None if self.bucket == "auto" else parse_bytes(self.bucket)

    @property
    def chunk_bytes(self) -> int | None:
        """None: to be fitted."""
        return None if self.chunk == "auto" else parse_bytes(self.chunk)

    @property
    def compression(self) -> Compression | None:
        """None: to be chosen."""
        return None if self.compress == "auto" else parse_compression(self.compress)

    @property
    def carried(self) -> bool:
        """Whether a program carries the sums, on the backend headway."""
        return self.collective in ALL_REDUCE_KINDS

    @property
    def exact(self) -> bool:
        """Whether the result is that of the serial run, to rounding."""
        return (
            self.reduce == "mean"
            and self.compress == "none"
            and all(p.compress in (None, "none") and p.ranks is None for p in self.parts)
        )

    def part(self, name: str) -> ExchangePart | None:
        """The first part that matches a logical name."""
        return next((p for p in self.parts if fnmatchcase(name, p.parameters)), None)

    def problems(self, ranks: int) -> list[str]:
        """Every reason why this exchange cannot be, one line each; empty if it can."""
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


HIERARCHICAL = ("none", "fp16", "bf16", "topk", "mstopk")
"""Compressors of the step between nodes of a hierarchical exchange."""


def _hierarchical(exchange: ExchangePlan) -> list[str]:
    if exchange.collective != "hierarchical":
        return []
    texts = [exchange.compress, *(p.compress for p in exchange.parts if p.compress)]
    return [
        f"exchange.compress {text} does not go with collective hierarchical; "
        f"one of {', '.join(HIERARCHICAL)} does"
        for text in texts
        if text.partition(":")[0] not in HIERARCHICAL
    ]


def _carried(exchange: ExchangePlan, ranks: int) -> list[str]:
    found = [*all_reduce_problems(exchange.collective, exchange.carrier, ranks)]
    if not exchange.carried:
        return found
    with_it = f"with collective {exchange.collective}"
    texts = [exchange.compress, *(p.compress for p in exchange.parts if p.compress)]
    found += [
        f"exchange.compress {text} {with_it}: a program carries sums; one of "
        f"{', '.join(SUMMABLE_COMPRESSORS)}"
        for text in texts
        if text.partition(":")[0] not in SUMMABLE_COMPRESSORS
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
