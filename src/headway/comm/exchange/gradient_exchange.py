"""The gradient exchange: bucketed, and overlapped with the backward pass.

A `GradientExchange` fuses gradients into buckets (Das et al. 2016, section 3; as Horovod and DDP
do). When the last gradient of a bucket of the last micro-batch is there, the bucket is handed to a
lane, which runs its method. All ranks perform the same operations in the same order, whatever the
order in which gradients arrive. What is summed is the gradient times `factor`; nothing is divided
here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.comm.lanes.bucket_lanes import Lane
from headway.comm.lanes.buckets import Bucket, BucketTiming
from headway.errors import RunError


class ExchangeObserver(Protocol):
    """Is shown what buckets hold, by the thread that handles them; it must change nothing."""

    def departing(self, bucket: Bucket) -> None:
        """This rank's part is complete, and nothing of it has been sent."""

    def landed(self, bucket: Bucket) -> None:
        """The sums are there, and nothing has used them."""

    def applied(self, bucket: Bucket) -> None:
        """With priority: the update of its parameters has been made."""


@dataclass(slots=True)
class GradientSlot:
    """Where one parameter's gradient lives."""

    name: str
    bucket: Bucket
    index: int
    view: Tensor
    step: int = 0  # in which it came last, after `arm`
    phase: int = 0


class GradientExchange(ABC):
    """Sums the gradients of all ranks: what the two exchanges have in common.

    Of a step: `begin`, backward passes with `arm` called before the last one, `send`,
    `receive`, `settle`. A rank without work in a ragged batch calls all but the backward passes.
    Between `send` and `begin` gradients are somebody else's: another loss has passed through these
    parameters, as a generator's does through the discriminator. They are dropped.

    Attributes:
        factor: Gradients are multiplied by it when they enter their bucket.
        doing: Called with a text and its arguments before the training thread waits.
        profile: Where it is a dictionary, seconds are noted from the start of the step until each
            gradient is there, by logical name.
        observer: Of verification; None: nobody looks.
        overlap: Complete buckets leave during the backward pass; else all leave in `send`.
        repeated: Some gradient has come from two backward passes of a step, both after `arm`.
        phase: Counts what separates backward passes of a step: other exchanges' updates.
        warn_mixed: Called with a name when a gradient is added to one of an earlier phase.
    """

    def __init__(self, buckets: tuple[Bucket, ...], lane: Lane, *, overlap: bool = True) -> None:
        self.buckets = buckets
        self.factor = 1.0
        self.doing: Callable[..., None] = lambda *_: None
        self.step = 0
        self.profile: dict[str, float] | None = None
        self.observer: ExchangeObserver | None = None
        self.overlap = overlap
        self.repeated = False
        self.phase = 0
        self.warn_mixed: Callable[[str], None] = lambda _: None
        self._lane = lane
        self._armed = False
        self._sent = False
        self._foreign = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                partial(self._arrived, GradientSlot(name, bucket, index, bucket.views[index]))
            )
            for bucket in buckets
            for index, (name, parameter) in enumerate(
                zip(bucket.names, bucket.parameters, strict=True)
            )
        ]

    @abstractmethod
    def begin(self) -> None:
        """A step begins."""

    @abstractmethod
    def send(self) -> None:
        """Hand over every bucket that has not left; gradients that never came count as zero."""

    @abstractmethod
    def close(self) -> None:
        """Take the hooks off the parameters and end the lane."""

    @property
    @abstractmethod
    def _start(self) -> float:
        """When the forward pass of this step began."""

    @abstractmethod
    def _bucket_of(self, slot: GradientSlot) -> Bucket:
        """The bucket of a gradient that has come, open for this step."""

    def arm(self) -> None:
        """The next backward pass is the last one of the step: with `overlap`, buckets may leave."""
        self._armed = True

    def disarm(self) -> None:
        """The next backward pass only adds to the gradients."""
        self._armed = False

    def _arrived(self, slot: GradientSlot, parameter: Tensor) -> None:
        """Backward has added to `parameter.grad`: keep it in its bucket; send a complete bucket."""
        if self._sent:
            self._foreign = True
            return
        bucket = self._bucket_of(slot)
        if bucket.complete[slot.index]:
            raise RunError(
                f"the gradient of {slot.name} grew after it was handed to the exchange",
                why="A second backward pass of the same step has reached it: another loss, or "
                "reentrant activation checkpointing.",
                fix="Put the earlier passes into `with exchange.no_sync():` or set overlap = false "
                "(Exchange(..., overlap=False), exchange.overlap in a plan); "
                "checkpoint(..., use_reentrant=False) needs neither.",
            )
        if self._armed:
            self._note(slot, parameter)
        if not (self._armed and self.overlap):
            # Unscaled: the factor counts once, when the last micro-batch has added its part.
            self._take_in(parameter, slot, 1.0)
            return
        self._take_in(parameter, slot, self.factor * bucket.weight)
        bucket.complete[slot.index] = True
        bucket.missing -= 1
        if bucket.missing == 0:
            self._depart(bucket)

    def _note(self, slot: GradientSlot, parameter: Tensor) -> None:
        """Note when a gradient comes, and whether it is not the first one of this step."""
        if slot.step == self.step:
            self.repeated = True
            # Otherwise the user has cleared the earlier one.
            if slot.phase != self.phase and parameter.grad is slot.view:
                self.warn_mixed(slot.name)
        slot.step, slot.phase = self.step, self.phase
        if self.profile is not None:
            self.profile[slot.name] = perf_counter() - self._start

    @staticmethod
    def _take_in(parameter: Tensor, slot: GradientSlot, factor: float) -> None:
        """Point `parameter.grad` at its view, which then holds what backward has made so far."""
        gradient, view = parameter.grad, slot.view
        assert gradient is not None
        if gradient is view:  # backward has added to the view itself
            if factor != 1.0:
                view.mul_(factor)
        # A sparse gradient cannot be copied into a view; it can be added to it.
        elif gradient.is_sparse:
            view.zero_().add_(gradient, alpha=factor)
        elif factor == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)
        parameter.grad = view
        slot.bucket.arrived[slot.index] = True

    def _send_rest(self) -> None:
        self._sent = True
        for bucket in self.buckets:
            self._heed_cleared(bucket)
            if bucket.missing:
                bucket.missing = 0
                self._scale_late(bucket)
                self._depart(bucket)

    @staticmethod
    def _heed_cleared(bucket: Bucket) -> None:
        """Forget gradients that `zero_grad` has cleared since they came."""
        for index, (name, parameter) in enumerate(
            zip(bucket.names, bucket.parameters, strict=True)
        ):
            if not bucket.arrived[index] or parameter.grad is not None:
                continue
            if bucket.complete[index]:
                raise RunError(
                    f"the gradient of {name} was cleared after it was handed to the exchange",
                    fix="Clear gradients before the backward pass of the step, or use "
                    "Exchange(..., overlap=False).",
                )
            bucket.arrived[index] = False

    def _scale_late(self, bucket: Bucket) -> None:
        """Scale the gradients that no armed backward pass has touched."""
        factor = self.factor * bucket.weight
        if factor != 1.0:
            for view, arrived, complete in zip(
                bucket.views, bucket.arrived, bucket.complete, strict=True
            ):
                if arrived and not complete:
                    view.mul_(factor)

    def _depart(self, bucket: Bucket) -> None:
        bucket.fill()
        if self.observer is not None:
            self.observer.departing(bucket)
        bucket.flight.ready = perf_counter()
        self._lane.ready(bucket)

    def receive(self) -> tuple[BucketTiming, ...]:
        """Wait for all sums; returns what happened to each bucket.

        Raises:
            RuntimeError: As torch.distributed raises it: a peer vanished or a time-out ran out.
        """
        for bucket in self.buckets:
            self._land(bucket)
        return tuple(bucket.flight for bucket in self.buckets)

    def _land(self, bucket: Bucket) -> None:
        flight = bucket.flight
        flight.needed = perf_counter()
        self.doing("waits for bucket %d (%s ...)", bucket.number, bucket.names[0])
        self._lane.land(bucket)
        flight.waited = perf_counter() - flight.needed
        if self.observer is not None:
            self.observer.landed(bucket)

    def settle(self) -> None:
        """Point every parameter at its sum; a parameter that no rank used keeps no gradient.

        The serial run has no gradient there either, and optimisers skip such a parameter, while a
        gradient of zeros would still decay its weight and its momentum.
        """
        for bucket in self.buckets:
            for parameter, view, used in zip(
                bucket.parameters, bucket.views, bucket.used, strict=True
            ):
                parameter.grad = view if used else None

    def scale(self, factor: float) -> None:
        """Multiply all sums, where the global count is only known after the exchange."""
        for bucket in self.buckets:
            bucket.fused.gradients.mul_(factor)

    def waiting(self) -> Iterator[str]:
        """What each bucket of this step waits for, one line each; for messages about a stall."""
        for bucket in self.buckets:
            flight = bucket.flight
            if flight.received or bucket.step != self.step:
                continue
            names = ", ".join(bucket.names[:2]) + (" ..." if len(bucket.names) > 2 else "")
            if flight.sent:
                yield f"bucket {bucket.number} ({names}) is on its way"
            elif flight.ready:
                yield f"bucket {bucket.number} ({names}) is ready to leave"
            else:
                missing = f"{bucket.missing} of its gradients"
                yield f"bucket {bucket.number} ({names}) waits for {missing}"

    def state(self) -> dict[str, Tensor]:
        """Residuals and factors of the methods, by logical name of the parameter."""
        found: dict[str, Tensor] = {}
        for bucket in self.buckets:
            found |= bucket.method.state()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` returned, under any layout of the buckets."""
        for bucket in self.buckets:
            bucket.method.restore(state)

    def _drop_foreign(self) -> None:
        """Drop what other losses have left since `send`."""
        if self._foreign:
            self._foreign = False
            self._hide_gradients()

    def _hide_gradients(self) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                # Otherwise the next backward pass would add to the sums in the buckets.
                parameter.grad = None

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._lane.close()


class StepExchange(GradientExchange):
    """All sums arrive, and are used, in the step whose gradients they are."""

    def __init__(self, buckets: tuple[Bucket, ...], lane: Lane, *, overlap: bool = True) -> None:
        super().__init__(buckets, lane, overlap=overlap)
        self._began = 0.0

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self._armed = self._sent = False
        self.step += 1
        self._began = perf_counter()
        for bucket in self.buckets:
            bucket.open(self.step)
        self._hide_gradients()

    def send(self) -> None:
        self._send_rest()

    def close(self) -> None:
        self._detach()

    @property
    def _start(self) -> float:
        return self._began

    def _bucket_of(self, slot: GradientSlot) -> Bucket:
        return slot.bucket


class DeltaUpdate:
    """Exchange of optimizer updates (deltas) instead of gradients, as Adasum needs it.

    Each rank's optimizer steps from the common parameters w with the rank's own gradient; the
    differences w' - w are combined (Adasum: Maleki et al. 2021, section 3.3; so momentum, Adam and
    LAMB work unchanged), and every rank sets w plus the combination. The optimizer's state stays
    local.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._starts: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def propose(
        self,
        exchange: GradientExchange | None,
        parameters: Iterable[nn.Parameter],
        factor: float,
    ) -> None:
        """Step from the common parameters; put the differences into the exchange.

        Args:
            exchange: None in a world of one rank.
            factor: Turns this rank's gradients into those of the mean over its own samples.
        """
        # Copies, because the optimiser steps the parameters in place.
        self._starts = {p: p.detach().clone() for p in parameters if p.grad is not None}
        for parameter in self._starts:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        self._optimizer.step()
        if exchange is None:
            return
        for bucket in exchange.buckets:
            for index, (parameter, view) in enumerate(
                zip(bucket.parameters, bucket.views, strict=True)
            ):
                start = self._starts.get(parameter)
                bucket.arrived[index] = start is not None
                if start is not None:
                    torch.sub(parameter, start, out=view)

    @torch.no_grad()
    def adopt(self, exchange: GradientExchange | None) -> None:
        """Set every parameter to its start plus the combined difference."""
        if exchange is None:
            return
        for bucket in exchange.buckets:
            for parameter, view, used in zip(
                bucket.parameters, bucket.views, bucket.used, strict=True
            ):
                start = self._starts.get(parameter)
                if start is not None:
                    parameter.copy_(start)
                if used:
                    parameter.add_(view)
        self._starts.clear()
