"""The gradient exchange: bucketed, overlapped with backward, or prioritized across steps.

`GradientExchange` fuses gradients into buckets (Das et al. 2016, section 3; as Horovod and DDP do).
When the last gradient of a bucket of the last micro-batch is there, the bucket is handed to a lane,
which runs its method. All ranks perform the same operations in the same order, whatever the order
in which gradients arrive. What is summed is the gradient times `factor`; nothing is divided here.

`PriorityExchange` crosses the border of the step (ByteScheduler, Peng et al. 2019; P3, Jayarajan et
al. 2019): the optimizer is stepped bucket by bucket, in the order in which the next forward pass
needs the parameters, as soon as their sums have arrived, while the training thread is already in
that forward pass. Exact, not stale: every module waits for its own parameters, and a bucket takes
new gradients only after its old ones have been used.

`BucketOptimizers` keeps the user's optimizer: for each bucket a shadow of the same class, whose
parameters share storage with the model's and whose gradients are the bucket's views. State lives in
the original's `state`, so that its `state_dict` is whole; hyper-parameters are those that the
original had when the step was released. Equal to one `step()` of the original for every optimizer
that treats parameters one by one (all of torch.optim that take no closure).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.comm.exchange.forward_hooks import ForwardHooks
from headway.comm.lanes.bucket_lanes import Bucket, BucketTiming, Lane, ProgressLane
from headway.errors import RunError


@dataclass(slots=True)
class _GradientSlot:
    """Where one parameter's gradient lives."""

    name: str
    bucket: Bucket
    index: int
    view: Tensor


class GradientExchange:
    """Sums the gradients of all ranks.

    Life of a step: `begin`, backward passes with `arm` called before the last one, `send`,
    `receive`, `settle`. A rank without work in a ragged batch calls all but the backward passes.

    Args:
        buckets: Of all parameters that take part; see `headway.comm.tuning.autotuning`.
        overlap: Buckets leave while the backward pass still runs.

    Attributes:
        factor: Gradients are multiplied by it when they enter their bucket.
        doing: Called with a text and its arguments before the training thread waits.
        step: Number of the step, from 1.
        profile: Where it is a dictionary, seconds are noted from the start of the step until each
            gradient is there, by logical name.
    """

    def __init__(self, buckets: tuple[Bucket, ...], lane: Lane, *, overlap: bool = True) -> None:
        self.buckets = buckets
        self.factor = 1.0
        self.doing: Callable[..., None] = lambda *_: None
        self.step = 0
        self.profile: dict[str, float] | None = None
        self._began = 0.0
        self._lane = lane
        self._overlap = overlap
        self._armed = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                partial(self._arrived, _GradientSlot(name, bucket, index, bucket.views[index]))
            )
            for bucket in buckets
            for index, (name, parameter) in enumerate(
                zip(bucket.names, bucket.parameters, strict=True)
            )
        ]

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """Bytes of the gradients of each bucket."""
        return tuple(bucket.num_bytes for bucket in self.buckets)

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self._armed = False
        self.step += 1
        self._began = perf_counter()
        for bucket in self.buckets:
            bucket.open(self.step)
            for parameter in bucket.parameters:
                parameter.grad = None

    def arm(self) -> None:
        """The next backward pass is the last one of the step: complete buckets may leave."""
        self._armed = self._overlap

    def disarm(self) -> None:
        """The next backward pass only adds to the gradients."""
        self._armed = False

    def _arrived(self, slot: _GradientSlot, parameter: Tensor) -> None:
        """Backward has added to `parameter.grad`: keep it in its bucket; send a complete bucket."""
        bucket = self._bucket_of(slot)
        if not self._armed:
            self._take_in(parameter, slot, 1.0)
            return
        if bucket.complete[slot.index]:
            raise RunError(
                f"the gradient of {slot.name} grew after it was handed to the exchange",
                why="The model uses it in several backward passes of one micro-batch, as reentrant "
                "activation checkpointing does.",
                fix="Use checkpoint(..., use_reentrant=False), or exchange.overlap = false in the "
                "plan.",
            )
        self._take_in(parameter, slot, self.factor * bucket.weight)
        bucket.complete[slot.index] = True
        if self.profile is not None:
            self.profile[slot.name] = perf_counter() - self._start
        bucket.missing -= 1
        if bucket.missing == 0:
            self._depart(bucket)

    def _bucket_of(self, slot: _GradientSlot) -> Bucket:
        return slot.bucket

    @property
    def _start(self) -> float:
        """When the forward pass of this step began."""
        return self._began

    @staticmethod
    def _take_in(parameter: Tensor, slot: _GradientSlot, factor: float) -> None:
        """Point `parameter.grad` at its view, which then holds what backward has made so far."""
        gradient, view = parameter.grad, slot.view
        assert gradient is not None
        if gradient is view:  # backward has added to the view itself
            if factor != 1.0:
                view.mul_(factor)
        elif gradient.is_sparse:
            view.zero_().add_(gradient, alpha=factor)
        elif factor == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)
        parameter.grad = view
        slot.bucket.arrived[slot.index] = True

    def send(self) -> None:
        """Hand over every bucket that has not left; gradients that never came count as zero."""
        for bucket in self.buckets:
            if bucket.missing:
                bucket.missing = 0
                self._scale_late(bucket)
                self._depart(bucket)

    def _scale_late(self, bucket: Bucket) -> None:
        """Gradients that no armed backward pass has touched: from earlier micro-batches only."""
        factor = self.factor * bucket.weight
        if factor != 1.0:
            for view, arrived, complete in zip(
                bucket.views, bucket.arrived, bucket.complete, strict=True
            ):
                if arrived and not complete:
                    view.mul_(factor)

    def _depart(self, bucket: Bucket) -> None:
        bucket.fill()
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
        """Take up what `state` returned, under any cut of the buckets."""
        for bucket in self.buckets:
            bucket.method.restore(state)

    def close(self) -> None:
        """Take the hooks off the parameters and end the lane."""
        for hook in self._hooks:
            hook.remove()
        self._lane.close()


# The user's optimiser, bucket by bucket: the same class, hyper-parameters and state, in slices.


OptimizerSettings = list[dict[str, Any]]


class _BucketOptimizer:
    """The shadow of one bucket."""

    def __init__(self, original: Optimizer, bucket: Bucket, groups: Mapping[Tensor, int]) -> None:
        self.bucket = bucket
        self.shadows = [parameter.detach() for parameter in bucket.parameters]
        members: dict[int, list[Tensor]] = {}
        for parameter, shadow in zip(bucket.parameters, self.shadows, strict=True):
            members.setdefault(groups[parameter], []).append(shadow)
        self.numbers = list(members)
        self.optimizer = _empty_copy(original)
        self.optimizer.param_groups = [
            {**_settings(original.param_groups[number]), "params": params}
            for number, params in members.items()
        ]

    def link(self, original: Optimizer) -> None:
        """Use the state that the original has; none where a parameter has not been stepped yet."""
        self.optimizer.state.clear()
        for parameter, shadow in zip(self.bucket.parameters, self.shadows, strict=True):
            if parameter in original.state:
                self.optimizer.state[shadow] = original.state[parameter]

    def step(self, original: Optimizer, settings: OptimizerSettings, used: Sequence[bool]) -> None:
        for number, group in zip(self.numbers, self.optimizer.param_groups, strict=True):
            group.update(settings[number])
        for shadow, view, wanted in zip(self.shadows, self.bucket.views, used, strict=True):
            shadow.grad = view if wanted else None
        self.optimizer.step()
        for parameter, shadow in zip(self.bucket.parameters, self.shadows, strict=True):
            if parameter not in original.state and shadow in self.optimizer.state:
                original.state[parameter] = self.optimizer.state[shadow]

    def changed_settings(self, settings: OptimizerSettings) -> bool:
        """Whether the optimiser has written into its groups: then it cannot be cut."""
        return any(
            _settings(group) != settings[number]
            for number, group in zip(self.numbers, self.optimizer.param_groups, strict=True)
        )


class BucketOptimizers:
    """One shadow per bucket.

    Args:
        original: The user's optimiser; its `step()` is never called with gradients.
        buckets: Disjoint; parameters of the optimiser in no bucket are not stepped.

    Raises:
        RunError: A bucket holds a parameter that the optimiser does not have.
    """

    def __init__(self, original: Optimizer, buckets: Sequence[Bucket]) -> None:
        self._original = original
        groups = {
            parameter: number
            for number, group in enumerate(original.param_groups)
            for parameter in group["params"]
        }
        self._slices: dict[int, _BucketOptimizer] = {}
        for bucket in buckets:
            known = [parameter in groups for parameter in bucket.parameters]
            if all(known):
                self._slices[bucket.number] = _BucketOptimizer(original, bucket, groups)
            elif any(known):
                raise RunError(
                    f"the optimiser has some parameters of bucket {bucket.number} and not others",
                    fix="Give the optimiser all parameters that require gradients, or freeze the "
                    "others with requires_grad_(False).",
                )
        self._settings: OptimizerSettings = []
        self._state: object = None
        self._checked = False

    def release(self) -> None:
        """Take the hyper-parameters of this step; called by the training thread."""
        self._settings = [_settings(group) for group in self._original.param_groups]
        if self._state is not self._original.state:  # the first time, or after load_state_dict
            self._state = self._original.state
            for one in self._slices.values():
                one.link(self._original)

    def step(self, bucket: Bucket, used: Sequence[bool]) -> None:
        """Step the parameters of one bucket with the gradients that its buffer holds.

        Args:
            used: Which of its parameters any rank has used; the others are left alone.

        Raises:
            RunError: The optimiser keeps state in its parameter groups.
        """
        one = self._slices.get(bucket.number)
        if one is None or not any(used):
            return
        one.step(self._original, self._settings, used)
        if not self._checked:
            self._checked = True
            if one.changed_settings(self._settings):
                raise RunError(
                    f"{type(self._original).__name__} cannot step bucket by bucket",
                    why="It counts or keeps state in its parameter groups.",
                    fix="Set exchange.priority = false in the plan.",
                )


def optimizer_parameters(optimizer: Optimizer) -> set[nn.Parameter]:
    """The parameters that an optimiser steps."""
    return {p for group in optimizer.param_groups for p in group["params"]}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _empty_copy(original: Optimizer) -> Optimizer:
    """An optimiser of the same class with empty state and no hooks; attributes are shared.

    `copy.copy` goes through the optimiser's own __getstate__, which leaves out hooks, and leaves
    out attributes of subclasses, which are put back here. "step" there is the wrapper that a
    learning-rate scheduler has laid around the original.
    """
    shadow = copy.copy(original)
    for name, value in vars(original).items():
        if name not in vars(shadow) and name != "step":
            setattr(shadow, name, value)
    shadow.state = type(original.state)(dict)
    return shadow


# The exchange across the border of the step: each layer waits for its own parameters only.


class BucketUpdater:
    """Steps the parameters of landed buckets, most urgent first.

    The lane's thread does it when nothing is to be sent; a bucket that the training thread stands
    still for is left to that thread, which has nothing else to do.

    Args:
        urgency: Of each bucket, by number: smaller is needed earlier.
    """

    def __init__(self, urgency: dict[int, int]) -> None:
        self._urgency = urgency
        self._lock = threading.Lock()
        self._landed: dict[int, Bucket] = {}
        self._usable: list[tuple[int, int]] = []  # a heap of (urgency, number); some are gone
        self._early: list[Bucket] = []  # landed before their step was released
        self._released = 0
        self._factor = 1.0
        self._discard = False
        self._awaited = -1
        self.applied: dict[int, int] = dict.fromkeys(urgency, 0)
        self.slices: BucketOptimizers | None = None
        self.tell: Callable[[], None] = lambda: None

    def landed(self, bucket: Bucket) -> None:
        """In the lane's thread: a sum is there."""
        with self._lock:
            self._landed[bucket.number] = bucket
            if bucket.step <= self._released:
                self._offer(bucket)
            else:
                self._early.append(bucket)

    def release(self, step: int, factor: float, *, discard: bool) -> None:
        """In the training thread: sums of this step may be used, multiplied by `factor`."""
        with self._lock:
            self._factor, self._discard, self._released = factor, discard, step
            for bucket in self._early:
                self._offer(bucket)
            self._early.clear()

    def _offer(self, bucket: Bucket) -> None:
        heappush(self._usable, (self._urgency[bucket.number], bucket.number))

    def _may_be_used(self, number: int) -> bool:
        """An entry that the training thread has forestalled may meet the sums of the next step."""
        landed = self._landed.get(number)
        return landed is not None and landed.step <= self._released

    def apply_one(self) -> bool:
        """In the lane's thread: use a landed bucket; False: there is none."""
        bucket = None
        with self._lock:
            while self._usable and bucket is None:
                _, number = heappop(self._usable)
                if number != self._awaited and self._may_be_used(number):
                    bucket = self._landed.pop(number)
        if bucket is None:
            return False
        self._apply(bucket)
        self.tell()
        return True

    def stand_still(self, bucket: Bucket, wait_for: Callable[[Callable[[], bool]], None]) -> None:
        """In the training thread: return when a released bucket has been used."""
        number = bucket.number
        self._awaited = number
        wait_for(lambda: number in self._landed or self.applied[number] == bucket.step)
        with self._lock:
            mine = self._landed.pop(number, None)
            self._awaited = -1
        if mine is not None:
            with torch.no_grad():
                self._apply(mine)
        else:  # the other thread was about to
            wait_for(lambda: self.applied[number] == bucket.step)

    def _apply(self, bucket: Bucket) -> None:
        if not self._discard:
            if self._factor != 1.0:
                bucket.fused.gradients.mul_(self._factor)
            assert self.slices is not None
            self.slices.step(bucket, bucket.used)
        bucket.flight.applied = perf_counter()
        self.applied[bucket.number] = bucket.step


class PriorityExchange(GradientExchange):
    """As `GradientExchange`, but `release` takes the place of `receive`, `settle` and the update.

    Args:
        lane: A thread whose hooks are those of `applier`.
        model: The whole model; gets forward hooks.
        optimizer: Steps are made by slices of it.
    """

    def __init__(
        self,
        buckets: tuple[Bucket, ...],
        lane: ProgressLane,
        applier: BucketUpdater,
        *,
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(buckets, lane)
        self._thread = lane
        self._applier = applier
        self._optimizer = optimizer
        applier.slices = BucketOptimizers(optimizer, buckets)
        applier.tell = lane.tell
        named = {
            name: parameter
            for bucket in buckets
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
        }
        self.waits = ForwardHooks(model, named, self._await)
        self._home = {name: bucket for bucket in buckets for name in bucket.names}
        self._released = 0
        self._flights: tuple[BucketTiming, ...] = ()

    def begin(self) -> None:
        """A step begins; the last one's buckets may still be on their way."""
        self._armed = False
        self.step += 1

    @property
    def _start(self) -> float:
        return self.waits.began

    def _await(self, names: Iterable[str]) -> None:
        for name in names:
            bucket = self._home[name]
            if self._pending(bucket):
                self._stand_still(bucket)

    def _pending(self, bucket: Bucket) -> bool:
        """Its update has been released and not been made; gradients of a step may still gather."""
        return self._applier.applied[bucket.number] < bucket.step <= self._released

    def _stand_still(self, bucket: Bucket) -> None:
        flight = bucket.flight
        start = perf_counter()
        flight.needed = flight.needed or start
        self.doing("waits for bucket %d (%s ...)", bucket.number, bucket.names[0])
        self._applier.stand_still(bucket, self._thread.wait_for)
        flight.waited += perf_counter() - start

    def _bucket_of(self, slot: _GradientSlot) -> Bucket:
        """The bucket, opened for this step; its old content has been used by now, or is awaited."""
        bucket = slot.bucket
        self.waits.check(slot.name)
        if bucket.step != self.step:
            self._open(bucket)
        return bucket

    def _open(self, bucket: Bucket) -> None:
        if self._pending(bucket):
            self._stand_still(bucket)
        bucket.open(self.step)

    def send(self) -> None:
        """Hand over every bucket that has not left; from here on gradients belong to the lane."""
        for bucket in self.buckets:
            if bucket.step != self.step:
                self._open(bucket)
        super().send()
        self._hide_gradients()

    def _hide_gradients(self) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def release(self, factor: float = 1.0, *, discard: bool = False) -> tuple[BucketTiming, ...]:
        """Let the lane use the sums of this step; returns at once.

        Args:
            discard: No update is made of them.

        Returns:
            What happened to the buckets of the step before.
        """
        before, self._flights = self._flights, tuple(b.flight for b in self.buckets)
        if not discard:
            assert self._applier.slices is not None
            self._applier.slices.release()
            # Runs the optimiser's own hooks and counters; without gradients it changes nothing.
            self._optimizer.step()
        self._released = self.step
        self._applier.release(self.step, factor, discard=discard)
        self._thread.nudge()
        self.waits.next_step()
        return before

    def flush(self) -> None:
        """Wait until every released update has been made."""
        for bucket in self.buckets:
            if self._pending(bucket):
                self._stand_still(bucket)
        self.waits.settled()

    def discard(self) -> None:
        """Let the sums of this step go unused; parameters stay those of the step before."""
        self.release(discard=True)
        self.flush()
        self._hide_gradients()

    def close(self) -> None:
        """Wait for what was released; take all hooks off; end the thread."""
        self.waits.close()
        super().close()
