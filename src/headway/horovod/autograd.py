"""The operations through which gradients flow.

Gradients are those of Horovod: of an average the average of the ranks' gradients, of a sum their
sum, of an allgather and a broadcast the average of the part that this rank has given, of an
alltoall the alltoall back. That of a reducescatter is the allgather of the ranks' gradients, times
the number of ranks where the operation is a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.horovod import operations
from headway.horovod.basics import global_process_set, rank
from headway.horovod.compression import Compression, Compressor
from headway.horovod.engine.process_set import ProcessSet
from headway.horovod.operations import Average, Sum, synchronize, which_op


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, facts: tuple[Any, ...], *tensors: Tensor) -> Any:
        ctx.facts = facts
        return synchronize(operations.grouped_allreduce_async(tensors, None, name, *facts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = synchronize(operations.grouped_allreduce_async(grads, None, None, *ctx.facts))
        return (None, None, *found)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return synchronize(operations.grouped_allgather_async(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = synchronize(
            operations.grouped_allreduce_async(
                grads, None, None, Average, process_set=ctx.process_set
            )
        )
        counts = torch.tensor([ctx.rows], dtype=torch.int64)
        counts = synchronize(operations.allgather_async(counts, process_set=ctx.process_set))
        place = ctx.process_set.members().index(rank())
        starts = counts[:place].sum(0).tolist()
        own = (
            grad.narrow(0, start, rows)
            for grad, start, rows in zip(mean, starts, ctx.rows, strict=True)
        )
        return (None, None, *own)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root, ctx.process_set = root, process_set
        return synchronize(operations.broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = synchronize(operations.allreduce_async(grads[0], process_set=ctx.process_set))
        return (mean if rank() == ctx.root else torch.zeros_like(mean)), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.process_set, ctx.rows = process_set, tensor.shape[0] if tensor.dim() else 0
        found = synchronize(operations.alltoall_async(tensor, splits, name, process_set))
        received, counts = found
        ctx.received = counts.tolist()
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sent = grads[0].contiguous()
        back, _ = synchronize(
            operations.alltoall_async(sent, ctx.received, process_set=ctx.process_set)
        )
        if back.shape[0] < ctx.rows:  # the last rows went to nobody
            rest = back.new_zeros((ctx.rows - back.shape[0], *back.shape[1:]))
            back = torch.cat((back, rest))
        return back, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, process_set: ProcessSet, scales: tuple[float, float],
        *tensors: Tensor,
    ) -> Any:  # fmt: skip
        ctx.process_set = process_set
        ctx.factor = scales[0] * scales[1] * (len(process_set.members()) if op == Sum else 1)
        return synchronize(
            operations.grouped_reducescatter_async(tensors, name, op, process_set, *scales)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scaled = [grad * ctx.factor for grad in grads]
        found = synchronize(operations.grouped_allgather_async(scaled, process_set=ctx.process_set))
        return (None, None, None, None, *found)


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Combine several tensors of all ranks as one operation; arguments as of `allreduce_async`.

    Args:
        compression: Of what travels; see `Compression`.

    Returns:
        New tensors; gradients flow through them.
    """
    chosen = which_op(average, op)
    packed = [compression.compress(tensor) for tensor in tensors]
    facts = (chosen, prescale_factor, postscale_factor, process_set)
    found = _apply(_AllReduce, name, facts, *(tensor for tensor, _ in packed))
    return [
        compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, packed, strict=True)
    ]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine a tensor of all ranks; arguments as of `grouped_allreduce`.

    Returns:
        A new tensor; gradients flow through it.
    """
    chosen = which_op(average, op)
    return grouped_allreduce(
        [tensor], None, name, compression, chosen, prescale_factor, postscale_factor, process_set
    )[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Concatenate several tensors of all ranks as one operation; see `allgather_async`."""
    return tuple(_apply(_AllGather, name, process_set, *tensors))


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate a tensor of all ranks; see `allgather_async`. Gradients flow through it."""
    return grouped_allgather([tensor], name, process_set)[0]


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor of one rank; see `broadcast_async`. Gradients flow through it."""
    return _apply(_Broadcast, tensor, root_rank, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rows from all ranks, with `splits` also how many came from each; see `alltoall_async`.

    Gradients flow through the rows.
    """
    received, counts = _apply(_AllToAll, tensor, splits, name, process_set)
    return received if splits is None else (received, counts)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """This rank's rows of several combined tensors, as one operation; see `reducescatter_async`."""
    chosen = which_op(None, op)
    packed = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    sent = (tensor for tensor, _ in packed)
    found = _apply(_ReduceScatter, name, chosen, process_set, scales, *sent)
    return [
        compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, packed, strict=True)
    ]


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the combined tensor; see `reducescatter_async`. Gradients flow."""
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]
