"""What torch's own wrappers send in one step: DistributedDataParallel and `fully_shard`.

Follows the documentation and behaviour of torch 2.11 to 2.14; stages of ZeRO as in Rajbhandari et
al. 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.collective.collective_calls import CollectiveCall, CollectiveCalls, merge_calls
from headway.collective.model.gradient_buckets import ddp_buckets
from headway.graph.model_graph import TensorSpec

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
    found = [_broadcast(specs, ranks) for specs in _by_type(buffers)]
    for specs in _by_type(list(arriving.values())):
        sizes = [spec.bytes for spec in specs]
        for bucket in ddp_buckets(sizes, range(len(sizes)), caps):
            size = sum(sizes[number] for number in bucket)
            found.append(
                CollectiveCall(
                    kind="all_reduce", axis="data", ranks=ranks, bytes=size, phase="gradients"
                )
            )
    return merge_calls(found)


def _broadcast(specs: Sequence[TensorSpec], ranks: int) -> CollectiveCall:
    size = sum(spec.bytes for spec in specs)
    return CollectiveCall(kind="broadcast", axis="data", ranks=ranks, bytes=size, phase="forward")


def _by_type(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    found: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        found.setdefault(spec.dtype, []).append(spec)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class FullyShardedModule:
    """A module for which `fully_shard` was called.

    Attributes:
        parameters: Those that no wrapped module inside of it has, as they lie on this rank where a
            tensor axis splits them.
        reshard: `reshard_after_forward`.
    """

    parameters: Mapping[str, TensorSpec]
    reshard: bool = True
    frozen: frozenset[str] = frozenset()


def fsdp2_wrapper_calls(
    modules: Sequence[FullyShardedModule],
    ranks: int,
    *,
    zero: int = 3,
    microbatches: int = 1,
    copies: int = 1,
) -> CollectiveCalls:
    """FSDP2, and how it does ZeRO.

    ZeRO 3: parameters are gathered for each pass of each micro-batch. ZeRO 2: they stay until the
    step has ended (`set_reshard_after_backward(False)` but for the last micro-batch, and no
    `reshard_after_forward`). ZeRO 1: also gradients are summed once, with the last micro-batch
    (`set_requires_gradient_sync`).

    Args:
        zero: 1, 2 or 3.
        copies: Of the shards, over which gradients are also summed (a mesh of two axes).
    """
    found: list[CollectiveCall] = []
    for module in modules:
        gathered, filled = padded_shard_bytes(module.parameters, ranks)
        common = CollectiveCall(
            kind="all_gather",
            axis="data",
            ranks=ranks,
            bytes=gathered,
            phase="forward",
            beside=filled,
        )
        each = microbatches if zero == 3 else 1
        found.append(replace(common, count=each))
        if zero == 3 and module.reshard:
            found.append(replace(common, count=each, phase="backward"))
        summed, filled = padded_shard_bytes(module.parameters, ranks, module.frozen)
        sums = replace(
            common,
            kind="reduce_scatter",
            bytes=summed,
            beside=filled,
            phase="gradients",
            count=1 if zero == 1 else microbatches,
        )
        found.append(sums)
        found.append(
            replace(
                sums, kind="all_reduce", axis="replicate", ranks=copies,
                bytes=summed / ranks, beside=filled / ranks,
            )
        )  # fmt: skip
    return merge_calls(found)


def padded_shard_bytes(
    parameters: Mapping[str, TensorSpec], ranks: int, without: frozenset[str] = frozenset()
) -> tuple[float, float]:
    """(of all shards, filled up to equal sizes; of what is filled up)."""
    whole = filled = 0
    for name, spec in parameters.items():
        if name not in without:
            full = _rows(spec, ranks) * math.prod(spec.shape[1:]) * spec.itemsize
            whole += full
            filled += full - spec.bytes
    return float(whole), float(filled)


def _rows(spec: TensorSpec, ranks: int) -> int:
    """Of all shards along the first dimension."""
    return -(-spec.shape[0] // ranks) * ranks


def tensor_shards(
    parameters: Mapping[str, TensorSpec], split: Mapping[str, int], parts: int
) -> Iterator[tuple[str, TensorSpec]]:
    """What a rank of a tensor axis holds: the named dimension of some parameters in parts."""
    for name, spec in parameters.items():
        shape = list(spec.shape)
        if name in split:
            shape[split[name]] //= parts
        yield name, replace(spec, shape=tuple(shape))
