"""The gradient exchange across the border of the step, the most urgent buckets first.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.comm.exchange.gradient_exchange import (
    ExchangeObserver,
    GradientExchange,
    GradientSlot,
)
from headway.comm.lanes.bucket_lanes import ProgressLane
from headway.comm.lanes.buckets import Bucket, BucketTiming
from headway.errors import RunError

OptimizerSettings = list[dict[str, Any]]


class _BucketOptimizer:
    def __init__(self, original: Optimizer, bucket: Bucket, groups: Mapping[Tensor, int]) -> None:
        self.bucket = bucket
        # The same memory, each with a `.grad` of its own: the parameter's may be the next step's.
        self.shadows = [parameter.detach() for parameter in bucket.parameters]
        members: dict[int, list[Tensor]] = {}
        for parameter, shadow in zip(bucket.parameters, self.shadows, strict=True):
            members.setdefault(groups[parameter], []).append(shadow)
        self.numbers = list(members)
        self.optimizer = empty_copy(original)
        self.optimizer.param_groups = [
            {**_settings(original.param_groups[number]), "params": params}
            for number, params in members.items()
        ]

    def link(self, original: Optimizer) -> None:
        """Share the state of the original, which has none for a parameter before its first step."""
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
        """Whether the optimiser has written into its groups: then it cannot step by bucket."""
        return any(
            _settings(group) != settings[number]
            for number, group in zip(self.numbers, self.optimizer.param_groups, strict=True)
        )


class BucketOptimizers:
    """One shadow optimizer per bucket.

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
        self._shadows: dict[int, _BucketOptimizer] = {}
        for bucket in buckets:
            known = [parameter in groups for parameter in bucket.parameters]
            if all(known):
                self._shadows[bucket.number] = _BucketOptimizer(original, bucket, groups)
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
            for one in self._shadows.values():
                one.link(self._original)

    def step(self, bucket: Bucket, used: Sequence[bool]) -> None:
        """Step the parameters of one bucket with the gradients that its buffer holds.

        Args:
            used: Which of its parameters any rank has used; the others are left alone.

        Raises:
            RunError: The optimiser keeps state in its parameter groups.
        """
        one = self._shadows.get(bucket.number)
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


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def empty_copy(original: Optimizer) -> Optimizer:
    """An optimiser of the same class with empty state and no hooks; attributes are shared."""
    # `copy.copy` goes through the optimiser's own __getstate__, which leaves out hooks, and also
    # attributes of subclasses. Of these "step" is a learning-rate scheduler's wrapper.
    shadow = copy.copy(original)
    for name, value in vars(original).items():
        if name not in vars(shadow) and name != "step":
            setattr(shadow, name, value)
    # A defaultdict, as in every optimiser of torch.
    shadow.state = type(original.state)(dict)
    return shadow


class BucketUpdater:
    """Steps the parameters of landed buckets, most urgent first.

    The lane's thread does it when nothing is to be sent; a bucket that the training thread waits
    for is left to that thread, which has nothing else to do.

    Args:
        urgency: Of each bucket, by number: smaller is needed earlier.

    Attributes:
        observer: The exchange's, asked at each bucket.
    """

    def __init__(self, urgency: dict[int, int]) -> None:
        self._urgency = urgency
        self._lock = threading.Lock()
        self._landed: dict[int, Bucket] = {}
        # A heap of (urgency, number); some entries' buckets may have been used already.
        self._usable: list[tuple[int, int]] = []
        self._early: list[Bucket] = []  # landed before their step was released
        self._released = 0
        self._factor = 1.0
        self._discard = False
        self._awaited = -1
        self.applied: dict[int, int] = dict.fromkeys(urgency, 0)
        self.optimizers: BucketOptimizers | None = None
        self.tell: Callable[[], None] = lambda: None
        self.observer: Callable[[], ExchangeObserver | None] = lambda: None

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

    def apply_one(self) -> bool:
        """In the lane's thread: use a landed bucket; False: there is none."""
        bucket = None
        with self._lock:
            while self._usable and bucket is None:
                _, number = heappop(self._usable)
                # The training thread may have used it, and the sums of the next step be there.
                landed = self._landed.get(number)
                released = landed is not None and landed.step <= self._released
                if number != self._awaited and released:
                    bucket = self._landed.pop(number)
        if bucket is None:
            return False
        # Without the lock: an update is long, and the training thread may want to release others.
        self._apply(bucket)
        self.tell()
        return True

    def wait_applied(self, bucket: Bucket, wait_for: Callable[[Callable[[], bool]], None]) -> None:
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
        else:  # the lane's thread has taken it
            wait_for(lambda: self.applied[number] == bucket.step)

    def _apply(self, bucket: Bucket) -> None:
        if not self._discard:
            observer = self.observer()
            if observer is not None:
                observer.landed(bucket)
            if self._factor != 1.0:
                bucket.fused.gradients.mul_(self._factor)
            assert self.optimizers is not None
            self.optimizers.step(bucket, bucket.used)
            if observer is not None:
                observer.applied(bucket)
        bucket.flight.applied = perf_counter()
        # Last: a module that waits for this reads the parameters right after it.
        self.applied[bucket.number] = bucket.step


class ForwardHooks:
    """Hooks on the modules of a model, which make each wait for its own parameters.

    A parameter is awaited by every module that owns it directly, just before that module's forward.
    One that is used without a call of its owner (`F.linear(x, self.head.weight)`, a ParameterList)
    is found in the first steps, in which every update is awaited anyway, and from then on it is
    awaited before the whole model. No forward pass reads a parameter that is still to be updated:
    if a gradient shows that one did, the run stops.

    Args:
        wait: Called with names of parameters that must be up to date when it returns.

    Attributes:
        began: When the forward pass of this step began; 0.0: not yet.
        needed: Seconds after that at which each parameter was first used, by logical name.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        wait: Callable[[Iterable[str]], None],
    ) -> None:
        self._wait = wait
        # By name, not by tensor: every layer looks them up, and tensors hash slowly.
        self._awaited = dict.fromkeys(parameters, 0)
        self._unhooked: dict[str, None] = {}
        self._step = 1
        self._learning = True
        self.began = 0.0
        self.needed: dict[str, float] = {}
        names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        self._hooks = [model.register_forward_pre_hook(self._at_start, prepend=True)]
        for module in model.modules():
            own = tuple(names[p] for p in module.parameters(recurse=False) if p in names)
            if own:
                self._hooks.append(module.register_forward_pre_hook(partial(self._before, own)))

    def next_step(self) -> None:
        """A step is over; its updates may still be under way in the next forward pass."""
        self._step += 1
        self._learning = False
        self.began = 0.0

    def settled(self) -> None:
        """All updates have been made: uses that no hook has seen are safe, and are learnt."""
        self._learning = True

    def _at_start(self, model: nn.Module, inputs: Any) -> None:
        self._before(tuple(self._unhooked), model, inputs)

    def _before(self, own: tuple[str, ...], module: nn.Module, inputs: Any) -> None:
        if not self.began:
            self.began = perf_counter()
        for name in own:
            if self._awaited[name] != self._step:
                self._awaited[name] = self._step
                if self._learning:
                    self.needed.setdefault(name, perf_counter() - self.began)
        self._wait(own)

    def check(self, name: str) -> None:
        """A gradient has come: raise a RunError if its forward pass did not wait for it."""
        if self._awaited[name] == self._step:
            return
        if name not in self._unhooked:
            self._unhooked[name] = None
            self.needed.setdefault(name, 0.0)
        self._awaited[name] = self._step
        if not self._learning:
            raise RunError(
                f"{name} was read while its update may have been under way",
                why="It is used without a call of the module that owns it, and was not used so in "
                "the first steps.",
                fix="Call the module (self.head(x), not F.linear(x, self.head.weight)), or set "
                "exchange.priority = false.",
            )

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


class PriorityExchange(GradientExchange):
    """Crosses the border of the step: `release` replaces `receive`, `settle` and the update.

    Args:
        lane: Its callbacks `landed` and `idle` are those of `applier`.
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
        applier.optimizers = BucketOptimizers(optimizer, buckets)
        applier.tell = lane.tell
        applier.observer = lambda: self.observer
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
        self._armed = self._sent = False
        self._drop_foreign()
        self.step += 1

    @property
    def _start(self) -> float:
        return self.waits.began

    def _await(self, names: Iterable[str]) -> None:
        for name in names:
            bucket = self._home[name]
            if self._pending(bucket):
                self._wait_applied(bucket)

    def _pending(self, bucket: Bucket) -> bool:
        """Whether its update has been released and not been made."""
        return self._applier.applied[bucket.number] < bucket.step <= self._released

    def _wait_applied(self, bucket: Bucket) -> None:
        flight = bucket.flight
        start = perf_counter()
        flight.needed = flight.needed or start
        self.doing("waits for bucket %d (%s ...)", bucket.number, bucket.names[0])
        self._applier.wait_applied(bucket, self._thread.wait_for)
        flight.waited += perf_counter() - start

    def _bucket_of(self, slot: GradientSlot) -> Bucket:
        """The bucket, opened for this step once its old content has been used."""
        bucket = slot.bucket
        self.waits.check(slot.name)
        if bucket.step != self.step:
            self._open(bucket)
        return bucket

    def _open(self, bucket: Bucket) -> None:
        if self._pending(bucket):
            self._wait_applied(bucket)
        bucket.open(self.step)

    def send(self) -> None:
        """Hand over every bucket that has not left; from here on gradients belong to the lane."""
        # A bucket without any gradient in this step has not been opened by one.
        for bucket in self.buckets:
            if bucket.step != self.step:
                self._open(bucket)
        self._send_rest()
        self._hide_gradients()

    def release(self, factor: float = 1.0, *, discard: bool = False) -> tuple[BucketTiming, ...]:
        """Let the lane use the sums of this step, or discard them; returns at once.

        The result is what happened to the buckets of the step before.
        """
        before, self._flights = self._flights, tuple(b.flight for b in self.buckets)
        if not discard:
            assert self._applier.optimizers is not None
            # Before the lane may use them: a scheduler may change the original's right after this.
            self._applier.optimizers.release()
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
                self._wait_applied(bucket)
        self.waits.settled()

    def discard(self) -> None:
        """Let the sums of this step go unused; parameters stay those of the step before."""
        self.release(discard=True)
        self.flush()
        self._hide_gradients()

    def close(self) -> None:
        """Wait for what was released; take all hooks off; end the thread."""
        self.waits.close()
        self._detach()
