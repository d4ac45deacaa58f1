"""What an inexact exchange must make of the gradients of all ranks, computed in one process.

Each compressor is written again from its paper, on whole buckets and without any message: the code
of `headway.comm` is not used. Random draws are those of the run, because they are a definition:
SFC64 (numpy) of (seed, crc32 of the name, step, rank).

Sources: int8: Alistarh et al. 2017 (QSGD); sign: Seide et al. 2014, Karimireddy et al. 2019, Tang
et al. 2021; top-k: Aji and Heafield 2017; MSTopK and HiTopKComm: Shi et al. 2021, algorithms 1 and
2; PowerSGD: Vogels et al. 2019, algorithm 1; Adasum: Maleki et al. 2021, equation 3.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.verification.exchange_recording import RecordedBucket

Row = NDArray[np.float64]
Choose = Callable[[Row, int, Row, np.random.Generator], NDArray[np.bool_]]
"""From u, how many of it are sent, what the run has kept, and random numbers: which are sent."""
State = Mapping[str, Tensor]

INT8_TABLE = 2**16
INT8_LEVELS = 126.9999
SMALLEST_SCALE = 1e-30
BLOCK = 256
SIGMAS = 6.0
"""By how many standard deviations a mean of rounding errors may be off."""


@dataclass
class ExpectedExchange:
    """The result of a bucket.

    Attributes:
        out: The sums, as one row.
        bound: By how much each element may be off; None: not at all, up to rounding in float64.
        kept: Of each rank, in the order of the bucket's: names as in the compressor's state -> what
            it keeps back.
        free: The result depends on directions that rounding decides (PowerSGD of a matrix whose
            rank is below its own): `out` is no more than one of several.
        directed: A factor that all elements share was rounded, so that their errors have a common
            direction.
    """

    out: Row
    bound: Row | None = None
    kept: list[dict[str, Row]] = field(default_factory=list)
    free: bool = False
    directed: bool = False


@dataclass(frozen=True)
class BucketInputs:
    """What is known of a bucket before its exchange.

    Attributes:
        rows: Gradients of each rank, in the order of `bucket.ranks`.
        before: The state of each rank's compressor before the step; of a first step empty.
        after: The same afterwards: it tells which of equal elements were sent.
        steps: How many steps the compressor has made before.
    """

    bucket: RecordedBucket
    rows: Sequence[Row]
    before: Sequence[State]
    after: Sequence[State]
    seed: int
    steps: int
    reduce: str
    hierarchical: bool

    @property
    def spans(self) -> list[tuple[str, slice, tuple[int, ...]]]:
        """Name, place and shape of each parameter."""
        found, start = [], 0
        for name, shape in zip(self.bucket.names, self.bucket.shapes, strict=True):
            found.append((name, slice(start, start + prod(shape)), shape))
            start += prod(shape)
        return found


# What a plan's text means: how many elements of which tensors travel (docs/compression.md).

ROUNDED = ("none", "fp16", "bf16")
SMALLEST = 1024
"""Elements below which a tensor is sent whole, as every vector is."""


@dataclass(frozen=True)
class CompressionSpec:
    """A compressor and its amount: the share of elements that are sent, or the rank of factors."""

    name: str
    amount: float

    @classmethod
    def of(cls, text: str) -> CompressionSpec:
        name, _, amount = text.strip().partition(":")
        return cls(name, float(amount or 0))

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is compressed."""
        if self.name == "int8":
            return True
        if len(shape) < 2 or prod(shape) < SMALLEST:
            return False
        if self.name != "powersgd":
            return True
        # Two factors must be half as large as the matrix, or smaller.
        return 2 * self.amount * (shape[0] + prod(shape[1:])) < prod(shape)

    def kept(self, size: int) -> int:
        """How many elements are sent, rounded up."""
        return max(1, math.ceil(self.amount * size - 1e-9))


def is_rounded(text: str) -> bool:
    """Whether a compressor only rounds each element, and keeps nothing."""
    return CompressionSpec.of(text).name in ROUNDED


def draws(seed: int, name: str, step: int = 0, rank: int = 0) -> np.random.Generator:
    """The generator of one parameter or bucket, in one step, on one rank."""
    words = (seed % 2**64, zlib.crc32(name.encode()), step, rank)
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(words)))


def expected_exchange(inputs: BucketInputs) -> ExpectedExchange:
    """The result of a bucket's exchange and what each rank keeps back."""
    if inputs.reduce == "adasum":
        return ExpectedExchange(_adasum(inputs))
    kind = CompressionSpec.of(inputs.bucket.compress).name
    if inputs.hierarchical and kind in ("topk", "mstopk"):
        return _hierarchical_topk(inputs, sampled=kind == "mstopk")
    if kind in ROUNDED:
        return _sixteen_bits(inputs, kind)
    return _COMPRESSORS[kind](inputs)


# Sums of rounded values.


def _sixteen_bits(inputs: BucketInputs, kind: str) -> ExpectedExchange:
    rows = [torch.from_numpy(row) for row in inputs.rows]
    ambiguous = False
    if inputs.hierarchical:
        place = {rank: number for number, rank in enumerate(inputs.bucket.ranks)}
        rows = [torch.stack([rows[place[r]] for r in node]).sum(0) for node in inputs.bucket.nodes]
        ambiguous = any(len(node) > 2 for node in inputs.bucket.nodes)
    if kind == "none" or len(rows) == 1:
        return ExpectedExchange(torch.stack(rows).sum(0).numpy())
    wire = torch.float16 if kind == "fp16" else torch.bfloat16
    # fp16 is divided before the sum, so that it cannot overflow.
    factor = 2.0 ** -math.ceil(math.log2(len(rows))) if kind == "fp16" else 1.0
    halves = [(row * factor).to(wire) for row in rows]
    total = torch.stack([half.double() for half in halves]).sum(0)
    magnitude = torch.stack([half.double().abs() for half in halves]).sum(0)
    info = torch.finfo(wire)
    # Each of the sums on the way rounds once, by half a unit in the last place.
    unit = magnitude * info.eps / 2 + info.smallest_normal * info.eps
    roundings = len(rows) - 1 + (2 * len(rows) if ambiguous else 0)
    if len(rows) == 2 and not ambiguous:
        # A sum of two does not depend on the order.
        out = (halves[0] + halves[1]).double() / factor
        return ExpectedExchange(out.numpy())
    return ExpectedExchange((total / factor).numpy(), (roundings * unit / factor).numpy())


def _int8(inputs: BucketInputs) -> ExpectedExchange:
    name, ranks = inputs.bucket.names[0], len(inputs.rows)
    size = inputs.rows[0].size
    generators = [draws(inputs.seed, name, inputs.steps, rank) for rank in inputs.bucket.ranks]
    tables = [_table(draw) for draw in generators]
    if ranks <= 2:  # both gather all of the other's bytes
        coded = [_int8_coded(row, t) for row, t in zip(inputs.rows, tables, strict=True)]
        return ExpectedExchange(_float32_sum(coded)[:size].astype(np.float64))
    part = math.ceil(math.ceil(size / BLOCK) / ranks) * BLOCK
    padded = [np.pad(row, (0, part * ranks - size)) for row in inputs.rows]
    out = []
    for owner in range(ranks):
        here = slice(owner * part, (owner + 1) * part)
        coded = [_int8_coded(row[here], t) for row, t in zip(padded, tables, strict=True)]
        # The owner's second rounding has numbers of its own.
        again = _int8_coded(_float32_sum(coded), _table(generators[owner]))
        out.append(_float32_sum([again]))
    return ExpectedExchange(np.concatenate(out)[:size].astype(np.float64))


def _table(draw: np.random.Generator) -> NDArray[np.float32]:
    return draw.random(INT8_TABLE, dtype=np.float32)


Coded = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Levels, and the scale of each."""


def _int8_coded(values: NDArray[np.floating], table: NDArray[np.float32]) -> Coded:
    count = -(-values.size // BLOCK) * BLOCK
    padded = np.zeros(count, np.float32)
    padded[: values.size] = values
    blocks = padded.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1) / np.float32(INT8_LEVELS)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale < SMALLEST_SCALE / INT8_LEVELS, 0, np.float32(1) / scale)
    random = np.resize(table, count).reshape(-1, BLOCK)
    levels = np.floor(blocks * inverse.astype(np.float32)[:, None] + random)
    return levels.ravel(), np.repeat(scale, BLOCK)


def _float32_sum(coded: Sequence[Coded]) -> NDArray[np.float32]:
    total = torch.zeros(coded[0][0].size)
    for levels, scales in coded:
        total.addcmul_(torch.from_numpy(levels), torch.from_numpy(scales))
    found: NDArray[np.float32] = total.numpy()
    return found


# Compressors with error feedback: u = gradient + residual is sent in part, the rest is kept.


def residual_of(state: State, name: str, size: int, what: str = "residual") -> Row:
    kept = state.get(f"{name}/{what}")
    found: Row = np.zeros(size) if kept is None else kept.double().flatten().numpy().copy()
    return found


def _by_layer(
    inputs: BucketInputs,
    sent: Callable[[str, Sequence[Row], Sequence[Row]], list[Row]],
    strays: Sequence[Mapping[str, Row]] = (),
) -> ExpectedExchange:
    """Sum layer by layer what `sent(name, us, kept afterwards by the run)` gives for each rank.

    Args:
        strays: For each rank and layer what is to be sent besides.
    """
    strays = strays or [{}] * len(inputs.rows)
    compression = CompressionSpec.of(inputs.bucket.compress)
    out = np.sum(inputs.rows, 0)
    kept: list[dict[str, Row]] = [{} for _ in inputs.rows]
    for name, span, shape in inputs.spans:
        if not compression.compresses(shape):
            continue
        us = [
            row[span] + residual_of(state, name, prod(shape)) + stray.get(name, 0.0)
            for row, state, stray in zip(inputs.rows, inputs.before, strays, strict=True)
        ]
        theirs = [residual_of(state, name, prod(shape)) for state in inputs.after]
        parts = sent(name, us, theirs)
        total = np.zeros(prod(shape))
        for own, u, part in zip(kept, us, parts, strict=True):
            own[f"{name}/residual"] = u - part
            total += part
        out[span] = total
    return ExpectedExchange(out, kept=kept)


def largest(u: Row, count: int, kept: Row, _: np.random.Generator) -> NDArray[np.bool_]:
    """The largest magnitudes; of equal ones those that the run has sent."""
    border = np.partition(np.abs(u), u.size - count)[u.size - count]
    above: NDArray[np.bool_] = np.abs(u) > border
    equal = np.abs(u) == border
    # Sent first: 0 was kept of what is not 0; else in order.
    tied = sorted(np.flatnonzero(equal).tolist(), key=lambda i: (kept[i] == u[i] != 0, i))
    above[tied[: count - int(above.sum())]] = True
    return above


def _selected(choose: Choose, inputs: BucketInputs) -> ExpectedExchange:
    """Of each layer and rank the elements that `choose` gives."""
    compression = CompressionSpec.of(inputs.bucket.compress)

    def sent(name: str, us: Sequence[Row], kept: Sequence[Row]) -> list[Row]:
        count = compression.kept(us[0].size)
        return [
            np.where(choose(u, count, left, draws(inputs.seed, name, inputs.steps, rank)), u, 0.0)
            for rank, u, left in zip(inputs.bucket.ranks, us, kept, strict=True)
        ]

    return _by_layer(inputs, sent)


def bisected(u: Row, count: int, kept: Row, draw: np.random.Generator) -> NDArray[np.bool_]:
    """MSTopK: all above the upper of two thresholds, and a run of those between them.

    Where that run begins is drawn at random.
    """
    magnitude = np.abs(u)
    mean, top = float(magnitude.mean()), float(magnitude.max())
    low, high, above, below = 0.0, 1.0, math.inf, 0.0
    most_above, least_below = 0, u.size
    for _ in range(SAMPLINGS):
        middle = low + (high - low) / 2
        threshold = mean + middle * (top - mean)
        found = int((magnitude >= threshold).sum())
        if found <= count:
            high = middle
            if found > most_above:
                most_above, above = found, threshold
        else:
            low = middle
            if found < least_below:
                least_below, below = found, threshold
    chosen: NDArray[np.bool_] = magnitude >= above
    between = np.flatnonzero((magnitude >= below) & ~chosen)
    missing = count - most_above
    start = int(draw.integers(between.size - missing + 1))
    chosen[between[start : start + missing]] = True
    return chosen


_NONE = np.random.default_rng(0)
"""For choices that draw nothing."""
SAMPLINGS = 30
"""N of algorithm 1, as in `comm.compress`."""


def _adaptive(inputs: BucketInputs) -> ExpectedExchange:
    compression = CompressionSpec.of(inputs.bucket.compress)
    layers = [(n, prod(s)) for n, _, s in inputs.spans if compression.compresses(s)]
    even = [compression.kept(size) for _, size in layers]
    budgets: list[dict[str, int]] = []
    shares_before: list[dict[str, float]] = []
    for state in inputs.before:
        shares = [float(state.get(f"{name}/share", torch.tensor(1.0))) for name, _ in layers]
        wanted = [e * s for e, s in zip(even, shares, strict=True)]
        counts = whole_numbers(wanted, [size for _, size in layers], sum(even))
        budgets.append(dict(zip((name for name, _ in layers), counts, strict=True)))
        shares_before.append(dict(zip((name for name, _ in layers), shares, strict=True)))
    smallest: list[dict[str, float]] = [{} for _ in inputs.rows]

    def sent(name: str, us: Sequence[Row], kept: Sequence[Row]) -> list[Row]:
        parts = []
        for rank, (u, left) in enumerate(zip(us, kept, strict=True)):
            chosen = largest(u, budgets[rank][name], left, _NONE)
            smallest[rank][name] = float(np.abs(u[chosen]).min())
            parts.append(np.where(chosen, u, 0.0))
        return parts

    found = _by_layer(inputs, sent)
    for own, known, least in zip(found.kept, shares_before, smallest, strict=True):
        moved = moved_shares(list(known.values()), even, [least[name] for name in known])
        for name, share in zip(known, moved, strict=True):
            own[f"{name}/share"] = np.array([share])
    return found


def whole_numbers(wanted: Sequence[float], sizes: Sequence[int], total: int) -> list[int]:
    """At least 1 each, the rest in proportion by largest remainders, none above its size."""
    counts = [1] * len(wanted)
    while (left := total - sum(counts)) > 0:
        open_ = [i for i in range(len(counts)) if counts[i] < sizes[i]]
        weight = math.fsum(wanted[i] for i in open_)
        quotas = {i: wanted[i] / weight * left for i in open_}
        for i in open_:
            counts[i] = min(sizes[i], counts[i] + math.floor(quotas[i]))
        rest = total - sum(counts)
        if rest < len(open_):
            order = sorted(open_, key=lambda i: (math.floor(quotas[i]) - quotas[i], i))
            for i in order[:rest]:
                counts[i] = min(sizes[i], counts[i] + 1)
    return counts


def moved_shares(
    shares: Sequence[float], even: Sequence[int], smallest: Sequence[float]
) -> list[float]:
    """Shares of the next step: by the root of smallest value over geometric mean, limited."""
    known = [i for i, value in enumerate(smallest) if 0 < value < math.inf]
    if not known:
        return list(shares)
    logs = math.fsum(even[i] * math.log(smallest[i]) for i in known)
    mean = logs / sum(even[i] for i in known)
    moved = []
    for share, value in zip(shares, smallest, strict=True):
        factor = math.exp((math.log(value) - mean) / 2) if 0 < value < math.inf else 0.5
        moved.append(share * min(max(factor, 0.5), 2.0))
    scale = sum(even) / math.fsum(e * s for e, s in zip(even, moved, strict=True))
    return [min(max(share * scale, 0.25), 4.0) for share in moved]


def _randomk(inputs: BucketInputs) -> ExpectedExchange:
    compression = CompressionSpec.of(inputs.bucket.compress)

    def sent(name: str, us: Sequence[Row], kept: Sequence[Row]) -> list[Row]:
        places = random_places(inputs, name, us[0].size, compression.kept(us[0].size))
        return [np.where(places, u, 0.0) for u in us]

    return _by_layer(inputs, sent)


def random_places(inputs: BucketInputs, name: str, size: int, count: int) -> NDArray[np.bool_]:
    """One place in each of `count` intervals, the same on all ranks."""
    borders = np.arange(count + 1) * size // count
    widths = np.diff(borders)
    random = draws(inputs.seed, name, inputs.steps).random(count)
    offsets = np.minimum((random * widths).astype(int), widths - 1)
    places = np.zeros(size, bool)
    places[borders[:-1] + offsets] = True
    return places


def _sign(inputs: BucketInputs) -> ExpectedExchange:
    ranks = len(inputs.rows)
    if ranks <= 2:
        layers = [(name, prod(shape)) for name, _, shape in inputs.spans]
        # Of ranks that were more, and served parts: due now.
        strays = [
            {name: residual_of(state, name, size, "server") for name, size in layers}
            for state in inputs.before
        ]
        return _by_layer(inputs, _one_bit_each, strays)
    return _sign_served(inputs)


def _one_bit_each(_: str, us: Sequence[Row], __: Sequence[Row]) -> list[Row]:
    return [_one_bit(u, _scale(u)) for u in us]


def _scale(u: Row) -> float:
    return float(np.float32(np.abs(u).mean())) if u.size else 0.0


def _one_bit(u: Row, scale: float) -> Row:
    # Minus zero counts as negative.
    return np.where(np.signbit(u), -scale, scale)


def _sign_served(inputs: BucketInputs) -> ExpectedExchange:
    """Of more than two ranks each serves a part, with a residual of its own second rounding."""
    compression = CompressionSpec.of(inputs.bucket.compress)
    ranks = len(inputs.rows)
    layers = [(n, span, prod(s)) for n, span, s in inputs.spans if compression.compresses(s)]
    # Bytes of eight signs, whole for each layer, in words of four.
    part = 32 * math.ceil(math.ceil(sum(-(-size // 8) for _, _, size in layers) / ranks) / 4)
    starts = np.cumsum([0, *(-(-size // 8) * 8 for _, _, size in layers)]).tolist()
    strays: list[dict[str, Row]] = [{} for _ in range(ranks)]
    for (name, _, size), start in zip(layers, starts, strict=False):
        for rank, stray in enumerate(strays):
            # After a resumption: what another rank serves now is sent to it.
            stray[name] = residual_of(inputs.before[rank], name, size, "server")
            stray[name][_served(rank, part, start, size)] = 0.0
    found = _by_layer(inputs, _one_bit_each, strays)
    for (name, span, size), start in zip(layers, starts, strict=False):
        total = found.out[span]
        again = np.zeros(size)
        for rank in range(ranks):
            own = _served(rank, part, start, size)
            left = np.zeros(size)
            if own.start < own.stop:
                served = total[own] + residual_of(inputs.before[rank], name, size, "server")[own]
                again[own] = _one_bit(served, _scale(served))
                left[own] = served - again[own]
            found.kept[rank][f"{name}/server"] = left
        found.out[span] = again
    return found


def _served(rank: int, part: int, start: int, size: int) -> slice:
    """Of a layer that begins at a place, what a rank serves."""
    low, high = rank * part - start, (rank + 1) * part - start
    return slice(min(max(low, 0), size), min(max(high, 0), size))


def _powersgd(inputs: BucketInputs) -> ExpectedExchange:
    compression = CompressionSpec.of(inputs.bucket.compress)
    rank = int(compression.amount)
    out, free = np.sum(inputs.rows, 0), False
    kept: list[dict[str, Row]] = [{} for _ in inputs.rows]
    for name, span, shape in inputs.spans:
        if not compression.compresses(shape):
            continue
        rows, columns = shape[0], prod(shape[1:])
        ms = [
            (row[span] + residual_of(state, name, prod(shape))).reshape(rows, columns)
            for row, state in zip(inputs.rows, inputs.before, strict=True)
        ]
        saved = inputs.before[0].get(f"{name}/q")
        start = draws(inputs.seed, name).standard_normal((rank, columns))
        q = start if saved is None else saved.double().numpy()
        p = np.sum([m @ q.T for m in ms], 0)
        lengths = np.abs(np.diag(np.linalg.qr(p).R))
        free = free or bool(lengths.min() < 1e-8 * lengths.max())
        p = np.linalg.qr(p).Q
        qs = [p.T @ m for m in ms]
        out[span] = (p @ np.sum(qs, 0)).ravel()
        for own, m, own_q in zip(kept, ms, qs, strict=True):
            own[f"{name}/residual"] = (m - p @ own_q).ravel()
    return ExpectedExchange(out, kept=kept, free=free)


# Between nodes.


def _hierarchical_topk(inputs: BucketInputs, *, sampled: bool) -> ExpectedExchange:
    """HiTopKComm: of the node's sum, each shard sends its largest elements; the node keeps the
    rest."""
    bucket = inputs.bucket
    place = {rank: number for number, rank in enumerate(bucket.ranks)}
    if len(bucket.nodes) == 1:
        return ExpectedExchange(np.sum(inputs.rows, 0))
    size = inputs.rows[0].size
    density = CompressionSpec.of(bucket.compress).amount
    out = np.zeros(size)
    kept: list[dict[str, Row]] = [{} for _ in inputs.rows]
    choose = bisected if sampled else largest
    for node in bucket.nodes:
        members = [place[rank] for rank in node]
        u = np.sum([inputs.rows[m] + whole_residual(inputs, m, inputs.before) for m in members], 0)
        left = np.sum([whole_residual(inputs, m, inputs.after) for m in members], 0)
        sent = np.zeros(size)
        for here in _shards(size, len(bucket.names), len(node)):
            if here.stop > here.start:
                count = max(1, round(density * (here.stop - here.start)))
                # Drawn from the content, so that a run that is resumed draws the same.
                first = torch.from_numpy(u[here][:8]).float().view(torch.uint8).tolist()
                chosen = choose(u[here], count, left[here], np.random.default_rng([count, *first]))
                sent[here] = np.where(chosen, u[here], 0.0)
        out += sent
        # Which rank of the node keeps which part is its own business: the sum counts.
        kept[members[0]]["node"] = u - sent
    return ExpectedExchange(out, kept=kept)


def _shards(size: int, flags: int, width: int) -> list[slice]:
    """The gradients in each rank's part of a bucket; flags lie behind all gradients."""
    small, longer = divmod(size + flags, width)
    borders = [place * small + min(place, longer) for place in range(width + 1)]
    return [slice(min(a, size), min(b, size)) for a, b in pairwise(borders)]


def whole_residual(
    inputs: BucketInputs, rank: int, states: Sequence[State], what: str = "residual"
) -> Row:
    """A rank's residual of the whole bucket, from pieces "name/offset/residual"."""
    row = np.zeros(inputs.rows[0].size)
    starts = {name: span.start for name, span, _ in inputs.spans}
    for key, value in states[rank].items():
        if not key.endswith(f"/{what}"):
            continue
        name, offset = key.removesuffix(f"/{what}"), 0
        inner, _, number = name.rpartition("/")
        if name not in starts and number.isdigit():
            name, offset = inner, int(number)
        if name in starts:
            first = starts[name] + offset
            row[first : first + value.numel()] += value.double().flatten().numpy()
    return row


def node_residuals(inputs: BucketInputs) -> dict[int, Row]:
    """What each node keeps after the step, by the number of its first rank."""
    place = {rank: number for number, rank in enumerate(inputs.bucket.ranks)}
    return {
        place[node[0]]: np.sum(
            [whole_residual(inputs, place[r], inputs.after) for r in node], axis=0
        )
        for node in inputs.bucket.nodes
    }


# What checkpoints hold of it.


def parse_kept(key: str) -> tuple[str, int, str]:
    """Name, offset and what of "name/what" or "name/offset/what"; names have no slash."""
    parts = key.split("/")
    return parts[0], int(parts[1]) if len(parts) > 2 else 0, parts[-1]


def kept_of(state: State, name: str, what: str) -> list[tuple[int, Row]]:
    """What a rank keeps of a parameter, each piece with its offset."""
    found = []
    for key, value in state.items():
        owner, offset, kind = parse_kept(key)
        if (owner, kind) == (name, what):
            found.append((offset, value.double().flatten().numpy()))
    return found


def sum_of_rows(pieces: Sequence[Sequence[tuple[int, Row]]]) -> Row:
    """The sum over ranks of pieces of a row."""
    every = [piece for own in pieces for piece in own]
    row = np.zeros(max((offset + values.size for offset, values in every), default=0))
    for offset, values in every:
        row[offset : offset + values.size] += values
    return row


# Adasum.


def _adasum(inputs: BucketInputs) -> Row:
    rows = list(inputs.rows)
    if inputs.hierarchical:
        place = {rank: number for number, rank in enumerate(inputs.bucket.ranks)}
        nodes = inputs.bucket.nodes
        rows = [np.mean([rows[place[rank]] for rank in node], 0) for node in nodes]
    layers = [span for _, span, _ in inputs.spans]
    power = 2 ** int(math.log2(len(rows)))
    level = rows[:power]
    for number, row in enumerate(rows[power:]):
        level[number] = _combined(level[number], row, layers)
    while len(level) > 1:
        level = [_combined(a, b, layers) for a, b in zip(level[0::2], level[1::2], strict=True)]
    return level[0]


def adasum_factors(x: Row, y: Row) -> tuple[float, float]:
    """The factors of both operands; 1 for one that is zero."""
    dot, xx, yy = float(x @ y), float(x @ x), float(y @ y)
    left = 1 - dot / (2 * xx) if xx > 1e-150 else 1.0
    return left, 1 - dot / (2 * yy) if yy > 1e-150 else 1.0


def _combined(a: Row, b: Row, layers: Sequence[slice]) -> Row:
    out = np.empty_like(a)
    for layer in layers:
        x, y = a[layer], b[layer]
        left, right = adasum_factors(x, y)
        out[layer] = left * x + right * y
    return out


_COMPRESSORS: Mapping[str, Callable[[BucketInputs], ExpectedExchange]] = {
    "int8": _int8,
    "sign": _sign,
    "topk": partial(_selected, largest),
    "mstopk": partial(_selected, bisected),
    "adaptive": _adaptive,
    "randomk": _randomk,
    "powersgd": _powersgd,
}
