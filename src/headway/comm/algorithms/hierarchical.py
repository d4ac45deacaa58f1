"""Hierarchical all-reduce: only 1/n of the buffer of each rank crosses between nodes.

Reduce-scatter inside the node, all-reduce of the shard with the ranks of the same position in the
other nodes, all-gather inside (Shi et al. 2021, section 3.2, dense). Of d elements on m nodes a
node's link carries 2 (m - 1) / m d each way, however many ranks share it; a flat ring over P ranks
carries 2 (P - 1) / P d across it. The sum is the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from headway.collective.model.bucket_cost import SEGMENT_BYTES
from headway.collective.nodes import Nodes
from headway.comm.algorithms.method import (
    AllReduce,
    ElementSpan,
    ExchangeMethod,
    FusedBuffer,
    PeerGroup,
    PendingOperation,
    Route,
    ScratchBuffers,
    all_gather,
    check_uniform_nodes,
    first_tag,
    pipeline_rounds,
    reduce_scatter,
    span_length,
    split_evenly,
)
from headway.errors import PlanError

# One segment in each of the three phases keeps both links busy.
SEGMENTS_IN_FLIGHT = 3


class HierarchicalAllReduce(ExchangeMethod):
    """Reduce-scatter inside the node, `inner` across nodes, all-gather inside.

    Args:
        inner: What is done across nodes with each shard; it must be elementwise, as shards cut
            parameters anywhere (plain, fp16, bf16).

    Raises:
        PlanError: `inner` is not elementwise.
    """

    elementwise: ClassVar[bool] = True
    blocking: ClassVar[bool] = True

    def __init__(
        self, inner: ExchangeMethod | None = None, scratch: ScratchBuffers | None = None
    ) -> None:
        self._inner = inner or AllReduce()
        self._scratch = scratch or ScratchBuffers()
        self._turn = 0
        if not self._inner.elementwise:
            raise PlanError(
                "these exchange options cannot be combined",
                problems=[
                    f"exchange.collective hierarchical cuts gradients anywhere, and "
                    f"{type(self._inner).__name__} needs whole ones"
                ],
                fix='Use compress = "none", "fp16", "bf16", "topk:..." or "mstopk:..." with '
                'hierarchical, or collective = "all_reduce".',
            )

    def rounds(self, fused: FusedBuffer, route: Route) -> Iterator[PendingOperation]:
        check_uniform_nodes(route.nodes)
        if route.nodes.count == 1:
            # Nothing is slow here, and nothing has to be compressed.
            yield from AllReduce().rounds(fused, route)
            return
        if len(route.nodes.members[0]) == 1:
            yield from self._inner.rounds(fused, route)
            return
        tag = first_tag(fused.number, self._turn)
        self._turn += 1
        inside, across = intra_node_group(route), inter_node_route(route)
        spans = segments(fused.buffer, SEGMENT_BYTES)
        tasks = (
            self._segment(fused, span, inside, across, tag + place)
            for place, span in enumerate(spans)
        )
        yield from pipeline_rounds(tasks, SEGMENTS_IN_FLIGHT)

    def _segment(
        self, fused: FusedBuffer, span: ElementSpan, inside: PeerGroup, across: Route, tag: int
    ) -> Iterator[PendingOperation]:
        flat = fused.buffer
        spans = split_evenly(span_length(span), inside.size, span.start)
        yield from reduce_scatter(flat, spans, inside, tag, self._scratch)
        own = flat[spans[inside.place]]
        # The same decision on all nodes, since the ranks of one place have equal shards.
        if own.numel():
            yield from self._inner.rounds(FusedBuffer(own, (), fused.number), across)
        yield from all_gather(flat, spans, inside, tag)

    def state(self) -> dict[str, Tensor]:
        return self._inner.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._inner.restore(state)


def segments(flat: Tensor, size: int) -> tuple[ElementSpan, ...]:
    """Cut a buffer into even segments of about `size` bytes, 1024 at most; never an empty one."""
    count = round(flat.numel() * flat.element_size() / size)
    # Each segment needs a tag, and an exchange has 1024 of them.
    return split_evenly(flat.numel(), max(1, min(count, flat.numel(), 1024)))


def intra_node_group(route: Route) -> PeerGroup:
    """The ranks of this node."""
    assert route.inside is not None, "this route was made without groups inside nodes"
    return PeerGroup.of(route.inside, route.nodes.inside(route.rank), route.rank)


def inter_node_group(route: Route) -> PeerGroup:
    """The ranks of this place in all nodes, in order of the nodes."""
    assert route.across is not None, "this route was made without groups across nodes"
    return PeerGroup.of(route.across, route.nodes.across(route.rank), route.rank)


def inter_node_route(route: Route) -> Route:
    """The same ranks as a route of their own: one rank per node."""
    assert route.across is not None, "this route was made without groups across nodes"
    column = route.nodes.across(route.rank)
    return replace(
        route,
        ranks=tuple(sorted(column)),
        group=route.across,
        nodes=Nodes(tuple((rank,) for rank in column)),
        inside=None,
        across=None,
    )
