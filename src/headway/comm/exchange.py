"""The gradient exchange of synchronous data parallelism, overlapped with the backward pass.

Gradients are fused into flat buckets in the reverse order of registration, which is close to the
order in which backward makes them. When the last gradient of a bucket of the last micro-batch is
there, the bucket is summed over the ranks while backward goes on (Das et al. 2016, section 3; the
fusion is that of Horovod and DDP). Invariant: all ranks start the buckets in the same order, so
that collectives match, whatever order gradients come in. Sums only: the loss is already divided by
the global count, so a sum over the ranks is the serial gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.errors import RunError
from headway.plan import Exchange

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the link does not idle until a full one is there."""


@dataclass(frozen=True, slots=True)
class Flight:
    """When a bucket left and when its sum was taken up, in `perf_counter` seconds."""

    bucket: int
    num_bytes: int
    sent: float
    received: float


@dataclass(slots=True)
class _Bucket:
    """One flat buffer; `views[i]` is the part that holds the gradient of `parameters[i]`."""

    number: int
    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]
    missing: int = 0
    sent: float = 0.0
    work: dist.Work | None = None


@dataclass(slots=True)
class _Slot:
    """Where one parameter's gradient lives, and what happened to it in this step."""

    name: str
    bucket: _Bucket
    view: Tensor
    used: bool = False
    ready: bool = field(default=False)


class GradientExchange:
    """Sums the gradients of all ranks of a group.

    Life of a step: `begin`, backward passes with `arm` called before the last one, `send`,
    `receive`. A rank without work in a ragged batch calls all but the backward passes.

    Args:
        parameters: Logical name -> parameter; shared parameters once. Only those that require
            gradients take part.
        description: Bucket size and overlap, from the plan.
        group: The ranks that sum; None: all.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        description: Exchange,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        self._description = description
        self._group = group
        self._buckets = _make_buckets(
            list(trainable.values()), description.bucket_bytes or 8 * 2**20
        )
        self._slots = _make_slots(trainable, self._buckets)
        self._armed = False
        self._next = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrived)
            for parameter in trainable.values()
        ]

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """Bytes of each bucket, in sending order."""
        return tuple(b.flat.numel() * b.flat.element_size() for b in self._buckets)

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self._armed = False
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work = None
            for parameter in bucket.parameters:
                parameter.grad = None
        for slot in self._slots.values():
            slot.used = slot.ready = False

    def arm(self) -> None:
        """The next backward pass is the last one of the step: complete buckets may leave."""
        self._armed = self._description.overlap

    def _arrived(self, parameter: Tensor) -> None:
        """Backward has added to `parameter.grad`: keep it in its bucket; send a complete bucket."""
        slot = self._slots[parameter]
        if parameter.grad is not slot.view:
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                slot.view.zero_().add_(parameter.grad)
            else:
                slot.view.copy_(parameter.grad)
            parameter.grad = slot.view
        slot.used = True
        if not self._armed:
            return
        if slot.ready:
            raise RunError(
                f"the gradient of {slot.name} grew after it was handed to the exchange",
                why="The model uses it in several backward passes of one micro-batch, as reentrant "
                "activation checkpointing does.",
                fix="Use checkpoint(..., use_reentrant=False), or exchange.overlap = false in the "
                "plan.",
            )
        slot.ready = True
        slot.bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._start(self._buckets[self._next])

    def send(self) -> None:
        """Start every bucket that has not left; gradients that never came count as zero."""
        for bucket in self._buckets[self._next :]:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if not self._slots[parameter].used:
                    view.zero_()
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        bucket.sent = perf_counter()
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        self._next = bucket.number + 1

    @property
    def used(self) -> Tensor:
        """One entry per parameter, in the order given: 1.0 where this rank made a gradient."""
        return torch.tensor([slot.used for slot in self._slots.values()], dtype=torch.float64)

    def receive(self) -> tuple[Flight, ...]:
        """Wait for all sums; returns when each bucket left and came back.

        Raises:
            RuntimeError: As torch.distributed raises it: a peer vanished or a time-out ran out.
        """
        flights = []
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            size = bucket.flat.numel() * bucket.flat.element_size()
            flights.append(Flight(bucket.number, size, bucket.sent, perf_counter()))
        return tuple(flights)

    def settle(self, used: Iterable[bool]) -> None:
        """Point every parameter at its sum; a parameter that no rank used keeps no gradient.

        The serial run has no gradient there either, and optimisers skip such a parameter, while a
        gradient of zeros would still decay its weight and its momentum.

        Args:
            used: Whether any rank used the parameter, in the order of `parameters`.
        """
        for (parameter, slot), wanted in zip(self._slots.items(), used, strict=True):
            parameter.grad = slot.view if wanted else None

    def scale(self, factor: float) -> None:
        """Multiply all sums, where the global count is only known after the exchange."""
        for bucket in self._buckets:
            bucket.flat.mul_(factor)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def _make_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Fuse in reverse order of registration; a bucket holds one type on one device."""
    groups: list[list[nn.Parameter]] = []
    size, limit = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
    for parameter in reversed(parameters):
        num_bytes = parameter.numel() * parameter.element_size()
        same = groups and (
            groups[-1][0].dtype == parameter.dtype and groups[-1][0].device == parameter.device
        )
        if not same or size + num_bytes > limit:
            if groups and size >= limit // 2:
                limit = bucket_bytes
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += num_bytes
    return [_make_bucket(number, group) for number, group in enumerate(groups)]


def _make_bucket(number: int, parameters: list[nn.Parameter]) -> _Bucket:
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    pieces = flat.split([p.numel() for p in parameters])
    views = [_shaped(piece, p) for piece, p in zip(pieces, parameters, strict=True)]
    return _Bucket(number, flat, parameters, views)


def _shaped(piece: Tensor, parameter: Tensor) -> Tensor:
    """A flat piece in the parameter's shape and memory order (transposed, channels last)."""
    order = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
    back = sorted(range(parameter.ndim), key=order.__getitem__)
    return piece.view([parameter.shape[dim] for dim in order]).permute(back)


def _make_slots(
    parameters: Mapping[str, nn.Parameter], buckets: list[_Bucket]
) -> dict[Tensor, _Slot]:
    homes = {
        parameter: (bucket, view)
        for bucket in buckets
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    }
    return {p: _Slot(name, *homes[p]) for name, p in parameters.items()}
