"""What torch's DistributedDataParallel sends in a step, as torch 2.11 to 2.14 has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headway.collective.collective_calls import CollectiveCall, CollectiveCalls, merge_calls
from headway.collective.model.gradient_buckets import ddp_buckets
from headway.graph.model_graph import TensorSpec
from headway.planner.traffic.estimate import collective_call
from headway.planner.traffic.executor import parameters_by_dtype

FIRST_CAP = 2**20
"""Bytes at which DDP closes its first bucket by default."""
CAP = 25 * 2**20
"""Bytes at which it closes the others by default."""


def ddp_calls(
    arriving: Mapping[str, TensorSpec],
    ranks: int,
    *,
    cap: int | None = None,
    buffers: Sequence[TensorSpec] = (),
) -> CollectiveCalls:
    """From the second step on, when DDP has made its buckets anew in the order of arrival.

    Args:
        arriving: The trained parameters, in the order in which backward makes their gradients.
        cap: `bucket_cap_mb`, in bytes; None: the default, with a smaller first bucket.
        buffers: That rank 0 gives to all before each forward pass.
    """
    caps = (FIRST_CAP, CAP) if cap is None else (cap,)
    named = {str(number): spec for number, spec in enumerate(buffers)}
    found = [_broadcast(specs.values(), ranks) for specs in parameters_by_dtype(named)]
    for specs in parameters_by_dtype(arriving):
        sizes = [spec.bytes for spec in specs.values()]
        for bucket in ddp_buckets(sizes, range(len(sizes)), caps):
            size = sum(sizes[number] for number in bucket)
            found.append(collective_call("all_reduce", "gradients", "data", ranks, size))
    return merge_calls(found)


def _broadcast(specs: Iterable[TensorSpec], ranks: int) -> CollectiveCall:
    size = sum(spec.bytes for spec in specs)
    return collective_call("broadcast", "forward", "data", ranks, size)
