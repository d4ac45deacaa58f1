"""The engine of one process: operations that are under way, and the thread that does them.

The program's threads put operations in and wait for them; the engine's thread sends what is asked
for to the coordinator at rank 0, hears from it what all ranks do next, and does it. Nothing polls:
the thread sleeps until a message comes, the program rings, or something is due.

An operation that nobody waits for leaves after `cycle_seconds`, or when many bytes have gathered;
`Engine.wait` and `Engine.hurry` make all that this rank has asked for leave at once.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from headway.horovod.engine.collectives import SetCollectives, rows_of_ranks
from headway.horovod.engine.connections import Meeting, MessageConnection
from headway.horovod.engine.coordinator import Batch, Coordinator
from headway.horovod.engine.request import GLOBAL_SET, Request, dtype_of
from headway.horovod.engine.settings import HorovodSettings
from headway.horovod.engine.trace import OperationTrace
from headway.horovod.exceptions import HorovodInternalError, InvalidArgument

_LOG = logging.getLogger("headway")
_JOIN_SECONDS = 30.0


class Operation:
    """One operation of this rank, from its request to its result.

    Args:
        inputs: The tensors of the request; they must not change before it is done.
        outputs: Where an allreduce or a broadcast writes, one for each input.
        result: Makes what the caller gets of the tensors that the operation gives.
    """

    __slots__ = (
        "_done",
        "asked",
        "error",
        "inputs",
        "num_bytes",
        "number",
        "outputs",
        "request",
        "result",
        "value",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        result: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.outputs = outputs
        self.result = result
        self.value: Any = None
        self.error: BaseException | None = None
        self.num_bytes = sum(tensor.nbytes for tensor in inputs)
        self.number = 0
        self.asked = 0.0
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def finish(self, value: Any) -> None:
        """The operation has given this."""
        self.value = value
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """The operation has failed."""
        self.error = error
        self._done.set()

    def sleep(self) -> None:
        """Wait until it is done or has failed."""
        self._done.wait()


class Engine:
    """See the module. `start` it, and `shutdown` it in the end."""

    def __init__(self, meeting: Meeting, settings: HorovodSettings) -> None:
        place = meeting.place
        self.rank, self.size = place.rank, place.ranks
        self.trace: OperationTrace | None = None
        self._settings = settings
        self._store = meeting.store
        self._others = meeting.others
        self._coordinator = (
            Coordinator(self.size, settings, _LOG.warning) if self.rank == 0 else None
        )
        self._sets: dict[int, SetCollectives] = {}
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, str], Operation] = {}
        self._outbox: list[Request] = []
        self._outbox_bytes = 0
        self._outbox_due = float("inf")
        self._count = 0
        self._heard = time.monotonic()
        self._unanswered: float | None = None
        self._hurried = 0
        self._hurry = False
        self._rung = False
        self._closing = False
        self._ended = ""
        self._pid = os.getpid()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="headway-horovod", daemon=True)

    def start(self) -> None:
        """Connect the ranks for data, and begin; collective."""
        self._sets[GLOBAL_SET] = self._collectives(GLOBAL_SET, range(self.size))
        self._selector.register(self._bell, selectors.EVENT_READ)
        for rank, connection in self._others.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self._thread.start()

    def submit(self, operation: Operation) -> Operation:
        """Begin an operation.

        Raises:
            InvalidArgument: One of the same name is under way.
            HorovodInternalError: The engine has ended.
        """
        request = operation.request
        with self._lock:
            if self._ended or os.getpid() != self._pid:
                raise HorovodInternalError(self._ended or "Horovod does not work in a forked copy")
            if request.key in self._pending:
                raise InvalidArgument(
                    f"Requested to {request.kind} a tensor with the same name as another tensor "
                    f"that is currently being processed: {request.name!r}. Give each its own name, "
                    "or wait for the first with hvd.synchronize()."
                )
            self._pending[request.key] = operation
            self._count += 1
            operation.number = self._count
            operation.asked = time.monotonic()
            if not self._outbox:
                self._outbox_due = operation.asked + self._settings.cycle_seconds
            self._outbox.append(request)
            before = self._outbox_bytes
            self._outbox_bytes += operation.num_bytes
            full = before < self._settings.flush_bytes <= self._outbox_bytes
            first = len(self._outbox) == 1
        if first or full:
            self._ring()
        return operation

    def hurry(self, operation: Operation | None = None) -> None:
        """Make what this rank has asked for leave at once: up to an operation, or all of it."""
        with self._lock:
            if operation is not None and operation.number <= self._hurried:
                return
            self._hurried = self._count
            self._hurry = True
        self._ring()

    def wait(self, operation: Operation) -> Any:
        """The result of an operation.

        Raises:
            HorovodInternalError: Ranks disagree about it, or one of them is lost or missing.
            InvalidArgument: An argument of some rank is wrong.
        """
        if not operation.done:
            self.hurry(operation)
            operation.sleep()
        if operation.error is not None:
            raise operation.error
        return operation.result(operation.value)

    def shutdown(self) -> None:
        """End the thread and all connections; others that need this rank get an error."""
        with self._lock:
            self._closing = True
        self._ring()
        if self._thread.ident is None:  # its start has failed
            self._release()
        elif self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)
        if self.trace is not None:
            self.trace.close()

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        why, lost = "Horovod has been shut down.", False
        try:
            with torch.no_grad():
                while not (self._closing or self._ended):
                    self._turn()
        except BaseException as error:
            why, lost = _text(error), True
        try:
            self._end(why, lost)
        finally:
            self._release()

    def _release(self) -> None:
        for connection in self._others.values():
            connection.close()
        self._selector.close()
        self._bell.close()
        self._ringer.close()

    def _turn(self) -> None:
        """Sleep until there is something to do, and do it."""
        self._sleep()
        now = time.monotonic()
        requests, hurry = self._collect(now)
        if self._coordinator is None:
            self._check_coordinator(now)
            if requests or hurry:
                asked = [request.to_message() for request in requests]
                self._others[0].send({"requests": asked, "hurry": hurry})
            return
        for request in requests:
            self._coordinator.submit(0, request, now)
        if hurry:
            self._coordinator.hurry(0)
        batches = self._coordinator.take(now)
        if not batches:
            return
        for rank, connection in self._others.items():
            told = [batch.to_message() for batch in batches if batch.only in (-1, rank)]
            if told and not connection.ended:
                connection.send({"batches": told})
        if self.trace is not None:
            self.trace.cycle()
        self._execute([batch for batch in batches if batch.only in (-1, 0)])

    def _sleep(self) -> None:
        with self._lock:
            due = 0.0 if self._hurry or self._closing else self._outbox_due
            if self._outbox_bytes >= self._settings.flush_bytes:
                due = 0.0
        due = min(
            due, self._silence_due() if self._coordinator is None else self._coordinator.due()
        )
        seconds = None if due == float("inf") else max(due - time.monotonic(), 0.0)
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._bell:
                with suppress(BlockingIOError):
                    self._bell.recv(4096)
                with self._lock:
                    self._rung = False
            else:
                self._hear(key.data)

    def _silence_due(self) -> float:
        """When rank 0 is to be asked whether it is there, or has not answered in time."""
        half = self._settings.stall_error_seconds / 2
        with self._lock:
            waits = bool(self._pending and half)
        return (self._unanswered or self._heard) + half if waits else float("inf")

    def _check_coordinator(self, now: float) -> None:
        """A rank 0 that is stopped cannot say that it is missing."""
        if now < self._silence_due():
            return
        if self._unanswered is None:
            self._unanswered = now
            self._others[0].send({"alive": True})
            return
        with self._lock:
            names = ", ".join(repr(name) for _, name in list(self._pending)[:3])
        self._ended_by(
            f"rank 0 has not answered for {now - self._unanswered:.0f} s; waiting: {names}"
        )

    def _collect(self, now: float) -> tuple[list[Request], bool]:
        """What is to be asked for now."""
        with self._lock:
            hurry, self._hurry = self._hurry, False
            full = self._outbox_bytes >= self._settings.flush_bytes
            if not (hurry or full or now >= self._outbox_due):
                return [], False
            requests, self._outbox = self._outbox, []
            self._outbox_bytes, self._outbox_due = 0, float("inf")
        return requests, hurry

    def _hear(self, rank: int) -> None:
        """Take what another rank says."""
        connection = self._others[rank]
        messages = connection.receive()
        if messages:
            self._heard, self._unanswered = time.monotonic(), None
        for message in messages:
            if "end" in message:
                self._ended_by(str(message["end"]))
                return
            if "batches" in message:
                self._execute([Batch.from_message(batch) for batch in message["batches"]])
            elif self._coordinator is not None:
                now = time.monotonic()
                if "alive" in message:
                    connection.send(message)
                    continue
                if why := message.get("bye"):
                    self._coordinator.leave(rank, str(why))
                    self._forget(connection)
                    return
                if why := message.get("failed"):
                    raise HorovodInternalError(str(why))
                for request in message["requests"]:
                    self._coordinator.submit(rank, Request.from_message(request), now)
                if message["hurry"]:
                    self._coordinator.hurry(rank)
        if connection.ended:
            self._forget(connection)
            why = f"rank {rank} is lost: its connection ended."
            if self._coordinator is None:
                self._ended_by(why)
            else:
                self._coordinator.leave(rank, why)

    def _forget(self, connection: MessageConnection) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _ended_by(self, why: str) -> None:
        with self._lock:
            self._ended = self._ended or why

    def _end(self, why: str, lost: bool) -> None:
        """Fail what is under way, and tell the others."""
        with self._lock:
            why = self._ended = self._ended or why
            pending, self._pending = self._pending, {}
        for operation in pending.values():
            operation.fail(HorovodInternalError(why))
        # First the groups: a rank that is in the middle of an exchange with this one gets an error.
        for collectives in self._sets.values():
            collectives.shutdown()
        self._sets.clear()
        self._store = None
        farewell = f"rank {self.rank} has shut Horovod down."
        if lost:
            farewell = f"rank {self.rank} failed: {why}"
        for connection in self._others.values():
            if self._coordinator is None:
                connection.send({"failed" if lost else "bye": farewell})
            else:
                connection.send({"end": farewell})
        for connection in self._others.values():
            connection.part()

    def _ring(self) -> None:
        with self._lock:
            if self._rung:
                return
            self._rung = True
        # An engine that has ended has no bell.
        with suppress(OSError):
            self._ringer.send(b"!")

    # -- operations --------------------------------------------------------------------------------

    def _execute(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            operations = [self._take((batch.process_set, name)) for name in batch.names]
            own = [operation for operation in operations if operation is not None]
            if batch.error:
                kind = InvalidArgument if batch.wrong_argument else HorovodInternalError
                for operation in own:
                    operation.fail(kind(batch.error))
                continue
            begun = time.monotonic()
            try:
                self._do(batch, operations)
            except BaseException as error:
                for operation in own:
                    operation.fail(HorovodInternalError(_text(error)))
                raise
            if self.trace is not None:
                done = time.monotonic()
                for operation in own:
                    self.trace.operation(
                        operation.request.name, batch.kind, operation.asked, begun, done,
                        operation.num_bytes,
                    )  # fmt: skip

    def _take(self, key: tuple[int, str]) -> Operation | None:
        with self._lock:
            return self._pending.pop(key, None)

    def _do(self, batch: Batch, operations: Sequence[Operation | None]) -> None:
        own = operations[0]
        match batch.kind:
            case "add_set":
                if self.rank in batch.ranks:
                    self._sets[batch.number] = self._collectives(batch.number, batch.ranks)
                value: Any = batch.number
            case "remove_set":
                ended = self._sets.pop(batch.number, None)
                if ended is not None:
                    ended.shutdown()
                value = batch.number >= 0
            case "join":
                value = batch.number
            case _ if batch.process_set not in self._sets:
                return
            case "allreduce" | "broadcast":
                self._together(batch, operations)
                return
            case "barrier":
                value = None
            case _:
                # Joined ranks have no part in these.
                assert own is not None
                value = self._alone(self._sets[batch.process_set], batch, own)
        if own is not None:
            own.finish(value)

    def _together(self, batch: Batch, operations: Sequence[Operation | None]) -> None:
        """All-reduces or broadcasts in one buffer; zeros where this rank has joined."""
        collectives = self._sets[batch.process_set]
        requests: list[Request] = []
        inputs: list[Tensor] = []
        outputs: list[Tensor | None] = []
        start = 0
        for place, operation in enumerate(operations):
            count = batch.counts[place] if batch.counts else 0
            if operation is not None:
                requests += [operation.request] * len(operation.inputs)
                inputs += operation.inputs
                outputs += operation.outputs
            else:  # this rank has joined: its part is zero
                kinds = slice(start, start + count)
                requests += [Request(batch.kind, batch.names[place], op=batch.op)] * count
                inputs += [
                    torch.zeros(shape, dtype=dtype_of(dtype))
                    for dtype, shape in zip(batch.dtypes[kinds], batch.shapes[kinds], strict=True)
                ]
                outputs += [None] * count
            start += count
        for places in _by_dtype(inputs):
            some = [inputs[place] for place in places]
            into = [outputs[place] for place in places]
            if batch.kind == "broadcast":
                collectives.broadcast(requests[0].root, some, into)
            else:
                collectives.allreduce([requests[place] for place in places], some, into)
        for operation in operations:
            if operation is not None:
                operation.finish(operation.outputs)

    def _alone(self, collectives: SetCollectives, batch: Batch, operation: Operation) -> Any:
        """An operation that is not fused; what it gives."""
        if batch.kind == "allgather":
            return [
                collectives.allgather(_on_host(given), rows)
                for given, rows in zip(operation.inputs, batch.rows, strict=True)
            ]
        if batch.kind == "alltoall":
            return collectives.alltoall(_on_host(operation.inputs[0]), batch.rows)
        return [
            collectives.reducescatter(
                operation.request, _on_host(given), rows_of_ranks(given.shape[0], collectives.size)
            )
            for given in operation.inputs
        ]

    def _collectives(self, number: int, ranks: Iterable[int]) -> SetCollectives:
        store = None if self._store is None else PrefixStore(f"horovod/{number}", self._store)
        return SetCollectives(tuple(ranks), self.rank, store, self._settings.transfer_seconds)


def _text(error: BaseException) -> str:
    known = isinstance(error, HorovodInternalError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Places of tensors of the same type; those of one operation may differ."""
    found: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(place)
    return list(found.values())


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.cpu()
