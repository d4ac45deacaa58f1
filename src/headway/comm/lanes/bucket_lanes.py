"""Buckets of fused gradients, their timing, and the lanes that send them.

A bucket is one flat buffer of one type on one device; its parameters share a compressor and a node
group. Which parameters share a bucket depends on the layout alone, never on the order in which
gradients arrive. `BucketTiming` records what happened to it in one step: timeline, report and
messages read it.

A lane starts the operations of buckets and waits for them. The order of operations on each process
group is the same on all ranks and independent of timing. `InlineLane` starts a bucket from the
training thread as soon as it is ready and finishes it when its sum is needed. A `ProgressLane` has
a thread that keeps `credit` chunks in flight in a planned order and hands finished buckets on (to
the optimizer, say); the n-th chunk of a step uses route n modulo credit.

`SingleRoundLane`: for plain and rounded sums. Whoever has something to start does it, and the
thread sleeps in the operation that was started first, because only its route can be used next. A
chunk costs one hand-over between threads; with an inbox and torch's futures it is three, each
contending for the GIL. `MultiRoundLane`: the thread sleeps on an inbox that futures and the
training thread write to, so that methods of several rounds progress independently of each other.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.collective.model.gradient_buckets import chunk_spans
from headway.comm.algorithms.method import (
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    PendingOperation,
    PointToPointOperations,
    Route,
    finish,
    wait,
)
from headway.comm.traffic_shaper import TrafficShaper
from headway.errors import RunError


@dataclass(slots=True)
class BucketTiming:
    """Times are `perf_counter` seconds; 0.0: not yet.

    Attributes:
        bucket: Number, in the order of the plan.
        parameters: Logical names whose gradients it holds.
        wire_bytes: What this rank sends for it by the plan's own arithmetic.
        ready: The last of its gradients was there.
        sent: Its first byte was handed to the network.
        applied: The optimiser had used it (exchanges across the step's border; else 0.0).
        needed: The training thread asked for it.
        waited: Seconds for which the training thread then stood still: exposed communication.
        name: Of what is no bucket: the all-reduce of a pipeline's stage.
    """

    bucket: int
    parameters: tuple[str, ...]
    num_bytes: int
    wire_bytes: int
    ready: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    applied: float = 0.0
    needed: float = 0.0
    waited: float = 0.0
    name: str = ""


# Fused buckets: where each parameter's gradient lies, and what happened to it in this step.


FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the link does not idle until a full one is there."""

BucketNames = tuple[tuple[str, ...], ...]
"""Logical names per bucket, in the order in which the buckets become ready."""


class ShapedTransfer:
    """What an emulated link asks for a bucket: how long its bytes need to leave this node.

    Args:
        pace: The node's interface.
        num_bytes: That this rank sends to other nodes.
    """

    def __init__(self, pace: TrafficShaper, num_bytes: float) -> None:
        self._pace = pace
        self._num_bytes = num_bytes

    def reserve(self, share: float) -> float:
        """Queue a share (0 to 1) of the bytes; returns the `time.monotonic` when they have left."""
        return self._pace.reserve(round(self._num_bytes * share))


@dataclass(slots=True, eq=False)
class Bucket:
    """One flat buffer; `views[i]` is the part that holds the gradient of `parameters[i]`.

    Attributes:
        names: Logical names of the parameters.
        fused: Buffer, pieces and flags, as the method sees them.
        method: How it becomes the same on all ranks; keeps state of this bucket.
        routes: One per place in flight.
        arrived: Which gradients have been put into the buffer in this step.
        missing: How many gradients have not arrived for the last time in this step.
        step: The step to which the content belongs.
        weight: Ranks of the world by ranks that exchange this bucket: a mean over a node group is
            one over its own ranks.
    """

    number: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    fused: FusedBuffer
    views: tuple[Tensor, ...]
    method: ExchangeMethod
    routes: tuple[Route, ...]
    arrived: list[bool] = field(default_factory=list)
    complete: list[bool] = field(default_factory=list)
    missing: int = 0
    step: int = 0
    wire_bytes: int = 0
    weight: float = 1.0
    toll: ShapedTransfer | None = None
    flight: BucketTiming = field(default_factory=lambda: BucketTiming(0, (), 0, 0))
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = self.fused.gradients.numel() * self.fused.buffer.element_size()
        self.open(0)

    def open(self, step: int) -> None:
        """Begin a new step: no gradient is there."""
        self.step = step
        self.missing = len(self.parameters)
        self.arrived = [False] * self.missing
        self.complete = [False] * self.missing
        self.flight = BucketTiming(self.number, self.names, self.num_bytes, self.wire_bytes)

    def fill(self) -> None:
        """All that will come has come: the rest counts as zero; set the flags."""
        flags = self.fused.flags
        if all(self.arrived):
            flags.fill_(1.0)
            return
        for view, arrived in zip(self.views, self.arrived, strict=True):
            if not arrived:
                view.zero_()
        flags.copy_(torch.tensor(self.arrived, dtype=flags.dtype))

    @property
    def used(self) -> list[bool]:
        """After the exchange: which parameters any rank has used."""
        if all(self.arrived):
            return self.arrived  # the flags of this rank alone say so
        flags = self.fused.flags
        return ((flags.real if flags.is_complex() else flags) > 0).tolist()

    def chunks(self, chunk_bytes: int | None) -> list[FusedBuffer]:
        """The buffer in parts that can be exchanged alone; the whole where the method cannot."""
        if chunk_bytes is None or not self.method.elementwise:
            return [self.fused]
        buffer = self.fused.buffer
        spans = chunk_spans(self.num_bytes, chunk_bytes)
        if len(spans) == 1:
            return [self.fused]
        starts = [start // buffer.element_size() for start, _ in spans]
        ends = [*starts[1:], buffer.numel()]  # the flags travel with the last one
        return [
            FusedBuffer(buffer[a:b], number=self.number) for a, b in zip(starts, ends, strict=True)
        ]


def fuse_parameters(
    parameters: Mapping[str, nn.Parameter],
    keys: Mapping[str, Hashable],
    *,
    bucket_bytes: int,
    first_bytes: int | None = None,
) -> BucketNames:
    """Cut parameters into buckets in the order given.

    Args:
        parameters: Logical name -> parameter, in the order in which gradients are expected.
        keys: Only parameters with equal keys share a bucket.
        bucket_bytes: Largest size; a larger parameter has a bucket of its own.
        first_bytes: Another largest size of the first bucket of each kind.
    """
    limits: dict[Hashable, int] = {}
    opened: dict[Hashable, tuple[list[str], int]] = {}
    closed: list[tuple[str, ...]] = []
    for name, parameter in parameters.items():
        key = (keys[name], parameter.dtype, parameter.device)
        limit = limits.setdefault(key, min(first_bytes or bucket_bytes, bucket_bytes))
        num_bytes = parameter.numel() * parameter.element_size()
        names, size = opened.get(key, ([], 0))
        if names and size + num_bytes > limit:
            closed.append(tuple(names))
            if size >= limit // 2:
                limits[key] = bucket_bytes
            names, size = [], 0
        opened[key] = ([*names, name], size + num_bytes)
    closed += [tuple(names) for names, _ in opened.values()]
    # A bucket is ready with its last gradient.
    place = {name: number for number, name in enumerate(parameters)}
    return tuple(sorted(closed, key=lambda names: place[names[-1]]))


def split_by_key(layout: Iterable[Sequence[str]], keys: Mapping[str, Hashable]) -> BucketNames:
    """A layout that was found without looking at keys, cut further where keys differ."""
    found: list[tuple[str, ...]] = []
    for names in layout:
        groups: dict[Hashable, list[str]] = {}
        for name in names:
            groups.setdefault(keys[name], []).append(name)
        found.extend(map(tuple, groups.values()))
    return tuple(found)


def make_bucket(
    number: int,
    names: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    method: ExchangeMethod,
    routes: tuple[Route, ...],
) -> Bucket:
    """One bucket of the layout, with zeroed buffer."""
    chosen = tuple(parameters[name] for name in names)
    first = chosen[0]
    total = sum(p.numel() for p in chosen)
    buffer = torch.zeros(total + len(chosen), dtype=first.dtype, device=first.device)
    places = buffer[:total].split([p.numel() for p in chosen])
    pieces, start = [], 0
    for name, parameter in zip(names, chosen, strict=True):
        stop = start + parameter.numel()
        pieces.append(GradientSlice(name, start, stop, _memory_shape(parameter)))
        start = stop
    return Bucket(
        number=number,
        names=tuple(names),
        parameters=chosen,
        fused=FusedBuffer(buffer, tuple(pieces), number),
        views=tuple(_view_as_parameter(place, p) for place, p in zip(places, chosen, strict=True)),
        method=method,
        routes=routes,
    )


def _dims_by_stride(parameter: Tensor) -> list[int]:
    return sorted(range(parameter.ndim), key=parameter.stride, reverse=True)


def _memory_shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape[dim] for dim in _dims_by_stride(parameter))


def _view_as_parameter(place: Tensor, parameter: Tensor) -> Tensor:
    """A flat piece in the parameter's shape and memory order (transposed, channels last)."""
    order = _dims_by_stride(parameter)
    back = sorted(range(parameter.ndim), key=order.__getitem__)
    return place.view(_memory_shape(parameter)).permute(back)


# Lanes: who starts the operations of the buckets, and who waits for them.


class Lane(ABC):
    """What an exchange asks of a lane."""

    @abstractmethod
    def ready(self, bucket: Bucket) -> None:
        """The content of a bucket is complete; called in any order, once a step and bucket."""

    @abstractmethod
    def land(self, bucket: Bucket) -> None:
        """Wait until a bucket's sum is there; raises what went wrong in the exchange."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is under way; no thread is left behind."""


class InlineLane(Lane):
    """Everything happens in the training thread; buckets leave in order of their number."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._ready = [False] * len(buckets)
        self._next = 0
        self._rounds: dict[int, tuple[Iterator[PendingOperation], PendingOperation | None]] = {}
        self._leave: dict[int, float] = {}

    def ready(self, bucket: Bucket) -> None:
        self._ready[bucket.number] = True
        while self._next < len(self._buckets) and self._ready[self._next]:
            self._start(self._buckets[self._next])

    def _start(self, bucket: Bucket) -> None:
        bucket.flight.sent = perf_counter()
        if bucket.toll is not None:
            self._leave[bucket.number] = bucket.toll.reserve(1.0)
        rounds = bucket.method.rounds(bucket.fused, bucket.routes[0])
        self._rounds[bucket.number] = (rounds, next(rounds, None))
        self._next = bucket.number + 1

    def land(self, bucket: Bucket) -> None:
        rounds, waiting = self._rounds.pop(bucket.number)
        while waiting is not None:
            wait(waiting)
            waiting = next(rounds, None)
        if bucket.toll is not None:
            sleep(max(0.0, self._leave[bucket.number] - monotonic()))
        bucket.flight.received = perf_counter()
        if not self._rounds and self._next == len(self._buckets):
            self._ready, self._next = [False] * len(self._buckets), 0

    def close(self) -> None:
        self._rounds.clear()


# The progress thread of an exchange: what its two lanes have in common.


@dataclass(slots=True, eq=False)
class ChunkTask:
    """One chunk of one bucket.

    Attributes:
        ready_step: The step whose content is complete.
        rounds: The method at work; None: not in flight.
        leave: On an emulated link: when its bytes have left.
    """

    bucket: Bucket
    chunk: FusedBuffer
    ready_step: int = 0
    rounds: Iterator[PendingOperation] | None = None
    waiting: PendingOperation | None = None
    leave: float = 0.0

    @property
    def share(self) -> float:
        """Of the bucket's bytes."""
        return self.chunk.buffer.numel() / self.bucket.fused.buffer.numel()

    def embark(self, place: int) -> Iterator[PendingOperation]:
        """The method, about to be started with the route of a place in flight."""
        bucket = self.bucket
        bucket.flight.sent = bucket.flight.sent or perf_counter()
        self.leave = bucket.toll.reserve(self.share) if bucket.toll is not None else 0.0
        return bucket.method.rounds(self.chunk, bucket.routes[place])


@dataclass(slots=True)
class _BucketProgress:
    """What the training thread waits for, of one bucket."""

    landed_step: int = 0
    done: int = 0
    chunks: int = 1


class ConditionGate:
    """Where the training thread sleeps until the other thread has brought something about."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._condition: Callable[[], bool] | None = None

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Sleep until a condition holds."""
        self._opened.clear()
        self._condition = true
        while not true():
            self._opened.wait()
            self._opened.clear()
        self._condition = None

    def tell(self) -> None:
        """Something has changed: wake the sleeper if it is what he waits for.

        He sets his condition before he looks, and this looks after the change was made: one of the
        two sees the other.
        """
        condition = self._condition
        if condition is not None and condition():
            self._opened.set()


class ProgressLane(Lane):
    """A lane with a thread of its own.

    Args:
        order: The chunks in sending order, each as (bucket number, chunk).
        credit: Chunks in flight; every bucket has as many routes.
        landed: Called in the thread when a bucket's sum is there.
        idle: Called in the thread whenever nothing can be started: returns whether it did some
            work (and may have more).
        threads: torch's threads for the arithmetic of this lane.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        order: Sequence[tuple[int, FusedBuffer]],
        *,
        credit: int,
        landed: Callable[[Bucket], None] | None = None,
        idle: Callable[[], bool] | None = None,
        threads: int = 1,
    ) -> None:
        for bucket in buckets:
            # Two chunks in flight on one group could be in another order on another rank.
            if len(bucket.routes) < credit:
                raise RunError(f"bucket {bucket.number}: {len(bucket.routes)} routes for {credit}")
        self._tasks = [ChunkTask(buckets[number], chunk) for number, chunk in order]
        self._of_bucket: dict[int, list[ChunkTask]] = {bucket.number: [] for bucket in buckets}
        for task in self._tasks:
            self._of_bucket[task.bucket.number].append(task)
        self._states = {
            number: _BucketProgress(chunks=len(tasks)) for number, tasks in self._of_bucket.items()
        }
        self._credit = credit
        self._on_landed = landed
        self._idle = idle
        self._step = 1
        self._position = 0
        self._flying: list[ChunkTask | None] = [None] * credit
        self._gate = ConditionGate()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._live, args=(threads,), name="headway-lane", daemon=True
        )

    # -- called by the training thread ---------------------------------------------------------

    @abstractmethod
    def nudge(self) -> None:
        """Something that `idle` looks at has changed."""

    def land(self, bucket: Bucket) -> None:
        state = self._states[bucket.number]
        self.wait_for(lambda: state.landed_step >= bucket.step)

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Sleep until a condition holds that this lane's thread brings about.

        Raises:
            BaseException: What went wrong in the thread.
        """
        if not true():
            self._gate.wait_for(lambda: true() or self._error is not None)
        if self._error is not None:
            raise self._error

    def tell(self) -> None:
        """Wake who waits, if it is for what has happened; called in this lane's thread."""
        self._gate.tell()

    def close(self) -> None:
        self._stop()
        # A thread that waits for a rank that has vanished ends with the process.
        self._thread.join(timeout=5.0)

    @abstractmethod
    def _stop(self) -> None:
        """Let `_work` return."""

    # -- the thread --------------------------------------------------------------------------

    def _live(self, threads: int) -> None:
        try:
            torch.set_num_threads(threads)
            with torch.no_grad():
                self._work()
        except BaseException as error:
            self._error = error
            self.tell()

    @abstractmethod
    def _work(self) -> None:
        """Until `_stop`."""

    def _next(self) -> int | None:
        """The place of the next chunk if it can be started, which is then in flight."""
        if self._position == len(self._tasks):
            if any(task is not None for task in self._flying):
                return None
            self._step, self._position = self._step + 1, 0
        task, place = self._tasks[self._position], self._position % self._credit
        if self._flying[place] is not None or task.ready_step < self._step:
            return None
        self._position += 1
        self._flying[place] = task
        return place

    def _count(self, bucket: Bucket) -> None:
        """A chunk is done; with the last one the bucket has landed."""
        state = self._states[bucket.number]
        state.done += 1
        if state.done < state.chunks:
            return
        state.done = 0
        bucket.flight.received = perf_counter()
        if self._on_landed is not None:
            self._on_landed(bucket)
        state.landed_step = bucket.step
        self.tell()


# The lane for methods of one round (plain and rounded sums): the least work per chunk.


class SingleRoundLane(ProgressLane):
    """See `ProgressLane`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._starting = threading.Lock()
        self._ended = 0  # of the chunks of this step
        self._asleep = False
        self._stopping = False
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._thread.start()

    def ready(self, bucket: Bucket) -> None:
        for task in self._of_bucket[bucket.number]:
            task.ready_step = bucket.step
        self._start_all()
        self.nudge()

    def nudge(self) -> None:
        # The thread sets this before it looks around for the last time: none of us misses it.
        if self._asleep:
            self._asleep = False
            self._bell.put(None)

    def _stop(self) -> None:
        self._stopping = True
        self._bell.put(None)

    def _start_all(self) -> None:
        """Start chunks in order for as long as the next one is ready and its place is free."""
        with self._starting:
            while (place := self._next()) is not None:
                task = self._flying[place]
                assert task is not None
                task.rounds = task.embark(place)
                task.waiting = next(task.rounds)

    # -- the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stopping:
            self._start_all()
            self._asleep = True
            task = self._flying[self._ended % self._credit]
            if task is not None:
                self._asleep = False
            if (task is None or not _is_done(task)) and self._idle is not None and self._idle():
                continue
            if task is None:
                self._bell.get()
            else:
                self._end(task)

    def _end(self, task: ChunkTask) -> None:
        """Wait for the oldest chunk; its place is free then."""
        assert task.rounds is not None
        assert task.waiting is not None
        finish(task.rounds, task.waiting)
        if task.leave:
            sleep(max(0.0, task.leave - monotonic()))
        place = self._ended % self._credit
        task.rounds = task.waiting = None
        self._ended = (self._ended + 1) % len(self._tasks)
        self._flying[place] = None
        self._count(task.bucket)


def _is_done(task: ChunkTask) -> bool:
    return isinstance(task.waiting, dist.Work) and task.waiting.is_completed()


# The lane for methods of several rounds: each is resumed as soon as its operation is done.


_STOP = object()
_NUDGE = object()


class MultiRoundLane(ProgressLane):
    """See `ProgressLane`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._thread.start()

    def ready(self, bucket: Bucket) -> None:
        for task in self._of_bucket[bucket.number]:
            task.ready_step = bucket.step
        self._inbox.put(_NUDGE)

    def nudge(self) -> None:
        self._inbox.put(_NUDGE)

    def _stop(self) -> None:
        self._inbox.put(_STOP)

    # -- the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        busy = False
        while True:
            try:
                item = self._inbox.get(block=not busy)
            except Empty:
                busy = self._idle() if self._idle is not None else False
                continue
            if item is _STOP:
                return
            if isinstance(item, int):
                self._resume(item)
            while (place := self._next()) is not None:
                self._start(place)
            busy = self._idle is not None

    def _start(self, place: int) -> None:
        task = self._flying[place]
        assert task is not None
        method = task.bucket.method
        task.rounds = task.embark(place)
        if method.blocking:
            finish(task.rounds)
            sleep(max(0.0, task.leave - monotonic()) if task.leave else 0.0)
            self._end(task, place)
        else:
            self._go_on(task, place)

    def _resume(self, place: int) -> None:
        task = self._flying[place]
        assert task is not None
        assert task.waiting is not None
        wait(task.waiting)  # is done: returns at once, and raises what went wrong
        self._go_on(task, place)

    def _go_on(self, task: ChunkTask, place: int) -> None:
        """Run the method until it has to wait for the network or is done."""
        assert task.rounds is not None
        task.waiting = next(task.rounds, None)
        if task.waiting is None:
            self._end(task, place)
            return
        assert not isinstance(task.waiting, PointToPointOperations)
        self._call_when_done(task.waiting, place, task.leave)

    def _call_when_done(self, work: dist.Work, place: int, leave: float) -> None:
        """Put the place into the inbox; on an emulated link not before the bytes have left."""
        inbox = self._inbox

        def done(_: object) -> None:
            late = leave - monotonic() if leave else 0.0
            if late > 0:
                threading.Timer(late, inbox.put, (place,)).start()
            else:
                inbox.put(place)

        work.get_future().add_done_callback(done)

    def _end(self, task: ChunkTask, place: int) -> None:
        self._flying[place] = task.rounds = None
        self._count(task.bucket)
