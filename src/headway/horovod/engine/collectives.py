"""The operations of one process set, on the process group of its ranks; for one thread.

The group is of the backend "headway", and torch.distributed does not know it, so that a program may
use both side by side. All-reduces and broadcasts go through one flat buffer, in which several
tensors travel together; what is alone and contiguous travels without a copy. Reduce-scatters are an
all-to-all and a sum in the order of ranks: half of the bytes of an all-reduce, and uneven parts are
no special case.

Arithmetic as in Horovod: integers are scaled in float64 and cut off, 16 bits are scaled in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.collective.nodes import Nodes
from headway.comm.algorithms.adasum import Adasum
from headway.comm.algorithms.method import FusedBuffer, GradientSlice, Route, complete, split_evenly
from headway.comm.backend.process_group import HeadwayGroup
from headway.comm.backend.torch_compat import GroupInfo, options
from headway.horovod.engine.request import HorovodOp, Request

_TAG = 1
_REDUCTIONS = {
    HorovodOp.AVERAGE: dist.ReduceOp.SUM,
    HorovodOp.SUM: dist.ReduceOp.SUM,
    HorovodOp.MIN: dist.ReduceOp.MIN,
    HorovodOp.MAX: dist.ReduceOp.MAX,
    HorovodOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
# What Gloo cannot add travels as something that it can.
_WIDER = {torch.int16: torch.int32}
# A truth value: any of them for a sum, all of them for a product.
_OF_TRUTH = {
    HorovodOp.AVERAGE: dist.ReduceOp.MAX,
    HorovodOp.SUM: dist.ReduceOp.MAX,
    HorovodOp.MAX: dist.ReduceOp.MAX,
    HorovodOp.MIN: dist.ReduceOp.MIN,
    HorovodOp.PRODUCT: dist.ReduceOp.MIN,
}


class SetCollectives:
    """The ranks of one process set, as one of them sees them.

    Args:
        ranks: Global ranks, ascending.
        store: In which they meet; None: this rank is alone in the set.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Any, seconds: float) -> None:
        self.ranks = tuple(ranks)
        self.place = self.ranks.index(rank)
        self._group: HeadwayGroup | None = None
        if len(ranks) > 1:
            timeout = timedelta(seconds=seconds)
            self._group = HeadwayGroup(
                GroupInfo(store, self.place, len(ranks), self.ranks, timeout)
            )
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._adasum = Adasum()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def shutdown(self) -> None:
        """End the group; no collective."""
        if self._group is not None:
            self._group.shutdown()

    def allreduce(
        self,
        requests: Sequence[Request],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
    ) -> None:
        """Combine tensors of one type.

        Args:
            requests: Of each tensor: its operation and its factors.
            outputs: Where the results belong; None: this rank wants none.
        """
        op = HorovodOp(requests[0].op)
        dtype = inputs[0].dtype
        in_place = self._flat(inputs, outputs)
        flat = in_place
        if flat is None:
            flat = self._buffer(dtype, sum(map(torch.Tensor.numel, inputs)))
        parts = _parts(flat, inputs)
        for part, given, request in zip(parts, inputs, requests, strict=True):
            if in_place is None:
                part.copy_(given)
            scale_(part, request.before)
        if op == HorovodOp.ADASUM:
            self._combine(flat, inputs)
        else:
            self._reduce(flat, op)
        for part, request, out in zip(parts, requests, outputs, strict=True):
            if out is not None:
                mean = request.op == HorovodOp.AVERAGE
                with _writing(out):
                    scale_into(out, part, request.after, self.size if mean else 1)

    def broadcast(
        self, root: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]
    ) -> None:
        """The tensors of a global rank, on all."""
        flat = self._flat(inputs, outputs)
        travels = flat
        if travels is None:
            travels = self._buffer(inputs[0].dtype, sum(map(torch.Tensor.numel, inputs)))
            if self.ranks.index(root) == self.place:
                for part, given in zip(_parts(travels, inputs), inputs, strict=True):
                    part.copy_(given)
        if self._group is not None and travels.numel():
            opts = options("BroadcastOptions", None)
            opts.rootRank = self.ranks.index(root)
            self._group.broadcast([travels.view(torch.uint8)], opts).wait()
        if flat is None:
            for part, out in zip(_parts(travels, inputs), outputs, strict=True):
                if out is not None:
                    with _writing(out):
                        out.copy_(part)

    def allgather(self, given: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows of all ranks, in the order of ranks.

        Args:
            rows: How many each rank has.
        """
        given = given.contiguous()
        whole = given.new_empty((sum(rows), *given.shape[1:]))
        if self._group is None:
            return whole.copy_(given)
        if len(set(rows)) == 1:
            if whole.numel():
                self._group.all_gather_single(whole.view(-1), given.view(-1)).wait()
            return whole
        parts = whole.split(list(rows))
        peers = [(self.place + step) % self.size for step in range(1, self.size)]
        # Receives first: Gloo's notice that one is ready queues behind what is being sent.
        works = [
            self._group.recv([parts[peer]], peer, _TAG) for peer in peers if parts[peer].numel()
        ]
        if given.numel():
            works += [self._group.send([given], peer, _TAG) for peer in peers]
        parts[self.place].copy_(given)
        for work in works:
            work.wait()
        return whole

    def alltoall(self, given: Tensor, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """The rows that each rank has for this one, in the order of ranks, and their numbers.

        Args:
            rows: For each rank what it sends to each.
        """
        sent = list(rows[self.place])
        received = [each[self.place] for each in rows]
        given = given.contiguous()[: sum(sent)]
        whole = given.new_empty((sum(received), *given.shape[1:]))
        self._exchange(whole, given, received, sent)
        return whole, received

    def reducescatter(self, request: Request, given: Tensor, rows: Sequence[int]) -> Tensor:
        """This rank's rows of the sum; the first ranks have one more where they do not divide.

        Args:
            rows: Of each rank.
        """
        given = given.contiguous()
        if request.before != 1.0:
            given = given.clone()
            scale_(given, request.before)
        own = rows[self.place]
        gathered = given.new_empty((self.size, own, *given.shape[1:]))
        self._exchange(gathered.flatten(0, 1), given, [own] * self.size, list(rows))
        total = gathered[0].clone()
        for term in gathered[1:]:
            total.add_(term)
        mean = request.op == HorovodOp.AVERAGE
        scale_into(total, total, request.after, self.size if mean else 1)
        return total

    def _exchange(self, whole: Tensor, given: Tensor, received: list[int], sent: list[int]) -> None:
        if self._group is None:
            whole.copy_(given)
            return
        width = math.prod(given.shape[1:])
        counts = [[rows * width for rows in each] for each in (received, sent)]
        if width:
            self._group.all_to_all_single(whole.view(-1), given.view(-1), *counts).wait()

    def _reduce(self, flat: Tensor, op: HorovodOp) -> None:
        if self._group is None or not flat.numel():
            return
        opts = options("AllreduceOptions", None)
        opts.reduceOp = _REDUCTIONS[op]
        travels = flat
        if flat.dtype == torch.bool:
            travels, opts.reduceOp = flat.view(torch.uint8), _OF_TRUTH[op]
        elif flat.is_complex():
            travels = torch.view_as_real(flat).view(-1)
        elif flat.dtype in _WIDER:
            travels = flat.to(_WIDER[flat.dtype])
        self._group.allreduce([travels], opts).wait()
        if flat.dtype in _WIDER:
            flat.copy_(travels)

    def _combine(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Adasum of each tensor (docs/adasum.md)."""
        if self._group is None:
            return
        pieces, start = [], 0
        for number, tensor in enumerate(tensors):
            stop = start + tensor.numel()
            pieces.append(GradientSlice(str(number), start, stop, (stop - start,)))
            start = stop
        buffer = torch.cat((flat, flat.new_ones(len(pieces))))
        nodes = Nodes(tuple((rank,) for rank in self.ranks))
        route = Route(self.ranks, self.ranks[self.place], self._group, nodes)
        complete(self._adasum, FusedBuffer(buffer, tuple(pieces)), route)
        flat.copy_(buffer[: flat.numel()])

    def _flat(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> Tensor | None:
        """The one tensor that is written in place, where it can travel as it lies."""
        out = outputs[0]
        if len(inputs) > 1 or out is None or not (out.is_cpu and out.is_contiguous()):
            return None
        # The group's threads could not write the first, and would write other bytes into these.
        if out.is_inference() or out.is_conj() or out.is_neg():
            return None
        if out is not inputs[0]:
            out.copy_(inputs[0])
        return out.view(-1)

    def _buffer(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Memory that stays: the kernel clears each page of fresh memory."""
        held = self._buffers.get(dtype)
        if held is None or held.numel() < numel:
            held = self._buffers[dtype] = torch.empty(numel, dtype=dtype)
        return held[:numel]


def rows_of_ranks(rows: int, size: int) -> list[int]:
    """How a reduce-scatter divides rows: equally, one more for the first ranks."""
    return [span.stop - span.start for span in split_evenly(rows, size)]


def _parts(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The places of tensors in a buffer, in their shapes."""
    sizes = [tensor.numel() for tensor in tensors]
    return [
        part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors, strict=True)
    ]


def _writing(out: Tensor) -> torch.inference_mode:
    """In which a tensor may be written: one of `torch.inference_mode` only in that mode.

    The program's mode is that of its thread, and this is another one.
    """
    return torch.inference_mode(out.is_inference())


def scale_(values: Tensor, factor: float) -> None:
    """Multiply in place."""
    if factor != 1.0:
        scale_into(values, values, factor)


def scale_into(out: Tensor, values: Tensor, factor: float = 1.0, divisor: int = 1) -> None:
    """out = values * factor / divisor; they may be the same tensor."""
    if factor == 1.0 and divisor == 1:
        if out is not values and out.data_ptr() != values.data_ptr():
            out.copy_(values)
        return
    wide = _scaled_in(values.dtype)
    if wide is not None:
        out.copy_(values.to(wide).mul_(factor).div_(divisor))
    elif out.device != values.device:
        out.copy_(values.mul_(factor / divisor))
    elif factor == 1.0:
        torch.div(values, divisor, out=out)
    else:
        torch.mul(values, factor / divisor, out=out)


def _scaled_in(dtype: torch.dtype) -> torch.dtype | None:
    """The type in which values are scaled; None: their own."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return None if dtype.is_floating_point or dtype.is_complex else torch.float64
