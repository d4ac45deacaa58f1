"""Laws of an inexact exchange, checked on every bucket in place of equality.

Compressors with error feedback: sent + kept back = gradient. Rounding compressors: the error stays
within what their type allows. Adasum: the tree of pairwise combinations over the ranks, in float64.
The exchange is observed from outside: what went into each method, what came out, and its residual.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from headway.collective.compression import parse_compression
from headway.comm.algorithms.adasum import adasum_tree
from headway.comm.algorithms.method import ExchangeMethod, FusedBuffer, PendingOperation, Route
from headway.comm.compress.state import SUMMED_STATE, parse_state_key
from headway.comm.exchange.gradient_exchange import GradientExchange
from headway.comm.lanes.buckets import Bucket
from headway.plans import ExchangePlan

LAW_TOLERANCE = 1e-9
"""Of laws that hold to rounding: residuals pass through a few sums more than gradients do."""
NAMES = {
    "feedback": "sent + kept back = gradient",
    "rounding": "error within the type's rounding",
    "adasum": "Adasum's tree over the ranks",
    "sum": "the sum over the ranks that exchange it",
}


@dataclass(frozen=True, slots=True)
class Law:
    """One bucket in one step.

    Attributes:
        error: Largest deviation over the largest element.
    """

    step: int
    bucket: int
    name: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        verb = "holds" if self.holds else "is BROKEN"
        return (
            f"step {self.step}, bucket {self.bucket}: {NAMES[self.name]} {verb}: "
            f"error {self.error:.1e}, bound {self.bound:.1e}"
        )


def save_laws(laws: Sequence[Law], path: Path) -> None:
    path.write_text(json.dumps([asdict(law) for law in laws]), encoding="utf-8")


def load_laws(path: Path) -> list[Law]:
    """Those that `save_laws` wrote; empty where the exchange was exact."""
    if not path.exists():
        return []
    return [Law(**facts) for facts in json.loads(path.read_text(encoding="utf-8"))]


class ObservedMethod(ExchangeMethod):
    """Passes everything on to a method, and remembers what it saw.

    Attributes:
        seen: Of one step: the gradients, what was kept back before, and the result.
    """

    def __init__(self, inner: ExchangeMethod, bucket: Bucket) -> None:
        self.inner = inner
        self.elementwise = inner.elementwise  # type: ignore[misc]
        self.blocking = inner.blocking  # type: ignore[misc]
        self._bucket = bucket
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def rounds(self, fused: FusedBuffer, route: Route) -> Iterator[PendingOperation]:
        if not fused.pieces:
            yield from self.inner.rounds(fused, route)
            return
        # A copy, because the method works in this buffer.
        into, kept_before = fused.gradients.clone(), residual_of(self.inner, self._bucket)
        yield from self.inner.rounds(fused, route)
        self.seen = into, kept_before, fused.gradients.clone()

    def state(self) -> dict[str, Tensor]:
        return self.inner.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.inner.restore(state)


@dataclass(slots=True)
class ExchangeLawMonitor:
    """Watches an exchange; `after_step` judges. Collective."""

    description: ExchangePlan
    laws: list[Law] = field(default_factory=list)

    def before_step(self, exchange: GradientExchange) -> None:
        """Stand beside every method that is not exact; again after the exchange was re-arranged."""
        for bucket in exchange.buckets:
            if not isinstance(bucket.method, ObservedMethod):
                bucket.method = ObservedMethod(bucket.method, bucket)

    def after_step(self, step: int, exchange: GradientExchange) -> None:
        """Judge every bucket of a step that is done."""
        for bucket in exchange.buckets:
            witness = bucket.method
            if isinstance(witness, ObservedMethod) and witness.seen:
                law = self._judge(step, bucket, witness)
                if law is not None:
                    self.laws.append(law)
                witness.seen = None

    def _judge(self, step: int, bucket: Bucket, witness: ObservedMethod) -> Law | None:
        assert witness.seen is not None
        into, kept_before, out = witness.seen
        group = bucket.routes[0].group
        part = self.description.part(bucket.names[0])
        text = part.compress if part and part.compress else self.description.compress
        if self.description.reduce == "adasum":
            expected = self._adasum(into, bucket)
            return _law(step, bucket, "adasum", expected, out, LAW_TOLERANCE)
        # The plan does not say which compressor was chosen, hence not which law holds.
        if text == "auto":
            return None
        compression = parse_compression(text)
        if compression.law == "feedback":
            # What this rank has sent: gradient and old residual, less what it keeps back now.
            expected = into + kept_before - residual_of(witness.inner, bucket)
            dist.all_reduce(expected, group=group)
            return _law(step, bucket, "feedback", expected, out, LAW_TOLERANCE)
        expected = into.clone()
        dist.all_reduce(expected, group=group)
        if compression.law == "rounding":
            largest = into.abs().max()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            ranks = bucket.routes[0].size
            scale = float(expected.abs().max()) or 1.0
            bound = 2 * ranks * compression.rounding * float(largest) / scale
            return _law(step, bucket, "rounding", expected, out, bound)
        return _law(step, bucket, "sum", expected, out, LAW_TOLERANCE)

    def _adasum(self, own: Tensor, bucket: Bucket) -> Tensor:
        """The reference; in a hierarchical exchange of the means of the nodes."""
        route = bucket.routes[0]
        everyone = [torch.empty_like(own) for _ in range(route.size)]
        dist.all_gather(everyone, own, group=route.group)
        if self.description.collective == "hierarchical":
            of_rank = dict(zip(route.ranks, everyone, strict=True))
            nodes = route.nodes.members
            everyone = [torch.stack([of_rank[r] for r in ranks]).mean(0) for ranks in nodes]
        return adasum_tree(everyone, bucket.fused.pieces)


def residual_of(method: ExchangeMethod, bucket: Bucket) -> Tensor:
    """What a method keeps back for a bucket, laid out as its gradients."""
    flat = torch.zeros_like(bucket.fused.gradients)
    starts = {piece.name: piece.start for piece in bucket.fused.pieces}
    for key, value in method.state().items():
        name, offset, what = parse_state_key(key)
        if what in SUMMED_STATE and name in starts:
            first = starts[name] + offset
            flat[first : first + value.numel()] += value.reshape(-1).to(flat)
    return flat


def _law(step: int, bucket: Bucket, name: str, expected: Tensor, out: Tensor, bound: float) -> Law:
    scale = float(expected.abs().max()) or 1.0
    return Law(step, bucket.number, name, float((expected - out).abs().max()) / scale, bound)
