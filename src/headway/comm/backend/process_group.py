"""`init_process_group("headway")`: the process group, and the `Work` it returns.

A group is Gloo's, with other programs for what Gloo does badly (torch 2.13): reduce-scatter (a
whole all-reduce there), all-gather and all-to-all (half duplex there) go directly from rank to rank
with all receives posted first, and large messages are striped over several interfaces. The
all-reduce stays Gloo's ring, which is within 6 % of the limit on equal links, unless a program is
chosen. What a call does depends on sizes, dtype and operation alone, which are the same on all
ranks.

Whoever waits first executes the rest of the program: usually the caller. Where nobody would (a
program that was started asynchronously and cannot progress by itself, a future that somebody holds,
`is_completed` in a loop), the group's finisher thread does. One thread at a time executes a
program, and everyone who asks gets its outcome, good or bad.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from headway.collective.generators.direct import direct, write_all_to_all
from headway.collective.generators.program_builder import RankScript
from headway.collective.generators.rings import ring
from headway.collective.program.program import IN_PLACE, CollectiveProgram, CollectiveTask, Op
from headway.comm.backend import torch_compat as compat
from headway.comm.backend.interpreter import (
    FIRST_TAG,
    STRIPE_BYTES,
    Interpreter,
    ProgramExecution,
    RankOperations,
    Reduction,
    supports_reduction,
)
from headway.errors import UsageError
from headway.keywords import checks_keywords


class FinisherThread:
    """A thread that finishes programs in the order in which it gets them; made when needed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[SharedExecution | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def take(self, program: SharedExecution) -> None:
        """Queue a program to be finished."""
        with self._lock:
            # A Work's finaliser may come here when the interpreter can start no thread any more.
            if self._closed or sys.is_finalizing():
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="headway-finisher", daemon=True
                )
                self._thread.start()
        self._queue.put(program)

    def close(self) -> None:
        """Accept no more programs."""
        self._closed = True
        self.rest()

    def rest(self) -> None:
        """End the thread until it is needed again."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout=5.0)  # one that waits for a rank that has vanished stays

    def _run(self) -> None:
        while (program := self._queue.get()) is not None:
            program.finish()


class SharedExecution:
    """One program under way, for everyone who waits for it.

    Args:
        after: Called once when the program is through: puts results where they belong.
    """

    def __init__(
        self,
        running: ProgramExecution,
        outputs: list[Tensor],
        seconds: float,
        finisher: FinisherThread,
        after: Callable[[], None] | None = None,
    ) -> None:
        self.outputs = outputs
        self.error: BaseException | None = None
        self._running: ProgramExecution | None = running
        self._seconds = seconds
        self._finisher = finisher
        self._after = after
        self._execution_lock = threading.Lock()
        self._future_lock = threading.Lock()
        self._future: Any = None
        self._in_finisher = False

    @property
    def done(self) -> bool:
        return self._running is None

    def finish(self, seconds: float = 0.0) -> BaseException | None:
        """Execute what is left, or wait for the thread that does; returns the error, if any.

        Args:
            seconds: Longest wait; 0: that of the operation.
        """
        allowed = seconds or self._seconds
        if not self._execution_lock.acquire(timeout=allowed):
            running = self._running
            return self.error if running is None else running.late(allowed)
        try:
            if self._running is not None:
                self._carry_out(self._running, allowed)
        finally:
            self._execution_lock.release()
        return self.error

    def _carry_out(self, running: ProgramExecution, seconds: float) -> None:
        try:
            # Grad mode belongs to the thread, and any thread may come here.
            with torch.no_grad():
                running.finish(seconds)
                if self._after is not None:
                    self._after()
        except BaseException as error:
            self.error = error
        with self._future_lock:
            self._running = self._after = None
            future = self._future
        # Without the lock, because callbacks of the future run here and may ask for it themselves.
        if future is not None:
            self._set_outcome(future)

    def hand_over(self) -> None:
        """Let the finisher's thread execute what is left."""
        if self._running is not None and not self._in_finisher:
            self._in_finisher = True
            self._finisher.take(self)

    def future(self) -> Any:
        """The same future for all callers."""
        with self._future_lock:
            known, self._future = self._future, self._future or torch.futures.Future()
            late = known is None and self._running is None
        if late:
            self._set_outcome(self._future)
        self.hand_over()
        return self._future

    def _set_outcome(self, future: Any) -> None:
        if self.error is None:
            future.set_result(self.outputs)
        else:
            future.set_exception(self.error)


class ProgramWork(dist.Work):
    """A program as torch's `Work`; one that nobody waits for is finished all the same."""

    def __init__(self, program: SharedExecution) -> None:
        super().__init__()
        self._program = program

    def __del__(self) -> None:
        self._program.hand_over()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the outputs are there; without a timeout, within that of the operation."""
        error = self._program.finish(max(timeout.total_seconds(), 0.0) if timeout else 0.0)
        if error is not None:
            raise error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._program.done:
            return True
        self._program.hand_over()
        return False

    def is_success(self) -> bool:
        return self.is_completed() and self._program.error is None

    def exception(self) -> BaseException | None:
        return self._program.error

    def result(self) -> list[Tensor]:
        return self._program.outputs

    def get_future(self) -> Any:
        return self._program.future()


class CompoundWork(dist.Work):
    """Several operations that were started together."""

    def __init__(self, works: Sequence[dist.Work], outputs: list[Tensor]) -> None:
        super().__init__()
        self._works = works
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when all are done; raises the first error."""
        for work in self._works:
            # Zero is torch's kNoTimeout: the time-out of the operation.
            work.wait(timeout or timedelta(0))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        # A list first: asking hands each program to the finisher's thread, which all of them need.
        states = [work.is_completed() for work in self._works]
        return all(states)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception())), None)

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        outputs = self._outputs
        both = torch.futures.collect_all([work.get_future() for work in self._works])

        def take(done: Any) -> list[Tensor]:
            for each in done.value():
                each.value()  # raises what went wrong
            return outputs

        return both.then(take)


ChooseProgram = Callable[[CollectiveTask, tuple[int, ...], int], CollectiveProgram | None]
"""(what, global ranks of the group, bytes of an element) -> how; None: the backend's own way."""

Connections = Literal["own", "gloo"]

EXCHANGE_BACKEND = "headway_exchange"
STATE_BACKEND = "headway_state"
# Kept per group; an FSDP2 model has two per size of its units.
_ROLES = 256

# Up to so many ranks, or bytes for each rank, messages go directly; beyond in a ring.
_DIRECT_RANKS = 8
_SMALL_SHARE = 16 * 1024


@checks_keywords
def register_backend(
    *,
    interfaces: Sequence[str] = (),
    choose: ChooseProgram | None = None,
    connections: Connections = "own",
) -> None:
    """Make `torch.distributed.init_process_group("headway")` work in this process.

    Call it once, before `init_process_group`; all ranks give the same arguments.

    Args:
        interfaces: Names of network interfaces; large messages are divided among them. None: those
            in GLOO_SOCKET_IFNAME ("eth0,eth1"), else the one that Gloo finds.
        choose: Asked for the program of every all_reduce, reduce_scatter, all_gather, broadcast and
            reduce of a new size. It must answer the same on all ranks.
        connections: What programs travel over: the backend's "own" connections, or those of
            "gloo". Gloo's it is also where one rank of a group says so or has no IPv4 address.

    Raises:
        UsageError: This torch has no Gloo.
    """
    compat.register(
        partial(HeadwayGroup, interfaces=tuple(interfaces), choose=choose, connections=connections)
    )


def register_exchange_backend(choose: ChooseProgram) -> str:
    """Name of a backend whose new groups ask `choose`; one that the user registered stays."""
    compat.register(partial(HeadwayGroup, choose=choose), EXCHANGE_BACKEND)
    return EXCHANGE_BACKEND


def register_state_backend() -> str:
    """Name of a backend for the groups that keep state in parts; one that the user registered
    stays."""
    compat.register(HeadwayGroup, STATE_BACKEND)
    return STATE_BACKEND


@compat.both_names
class HeadwayGroup(dist.ProcessGroup):
    """One process group of the backend; keywords as of `register_backend`."""

    def __init__(
        self,
        info: compat.GroupInfo,
        *,
        interfaces: tuple[str, ...] = (),
        choose: ChooseProgram | None = None,
        connections: Connections = "own",
    ) -> None:
        super().__init__(info.rank, info.size)  # type: ignore[call-arg]
        self._size = info.size
        self._gloo = compat.make_gloo(info, interfaces)
        compat.adopt(self, self._gloo)
        self._stripes = compat.num_interfaces(self._gloo)
        self._ranks = info.ranks
        self._choose = choose
        self._finisher = FinisherThread()
        self._links = compat.connect(info, interfaces, own=connections == "own")
        self._interpreter = Interpreter(
            self._links or self._gloo,
            rank=info.rank,
            ranks=info.ranks,
            timeout_seconds=info.timeout.total_seconds(),
            stripes=self._stripes,
        )
        self._role = self._roles()

    def getBackendName(self) -> str:  # noqa: N802  # torch looks for this name
        return compat.NAME

    def shutdown(self) -> None:
        # The thread first, because it uses the connections.
        self._finisher.close()
        self._interpreter.scratch.clear()
        if self._links is not None:
            self._links.close()
        self._gloo.shutdown()

    def place_of(self, rank: int) -> int:
        """The place in the group of a global rank."""
        return self._ranks.index(rank)

    def choose_by(self, choose: ChooseProgram | None) -> None:
        """Ask `choose` from now on; all ranks between the same two operations."""
        self._choose = choose
        self._role = self._roles()

    def rest(self) -> None:
        """End the thread of programs that were started asynchronously, until there are more."""
        self._finisher.rest()

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        opts = compat.options("AllgatherOptions", opts)
        role = self._role("all_gather", output.numel(), output.element_size())
        fits = output.numel() == self._size * given.numel()
        if role is None or not fits or not _is_dense_cpu(output, given):
            return compat.first_of(self._gloo, *compat.ALIASES[0])(output, given, opts)
        return self._start(role, opts, output, given=given)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        opts = compat.options("ReduceScatterOptions", opts)
        role = self._role("reduce_scatter", given.numel(), given.element_size())
        reduction = _supported_reduction(compat.reduction_of(opts), given)
        fits = given.numel() == self._size * output.numel()
        if role is None or reduction is None or not fits or not _is_dense_cpu(output, given):
            return compat.first_of(self._gloo, *compat.ALIASES[1])(output, given, opts)
        return self._start(role, opts, output, given=given, reduction=reduction)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        opts = compat.options("AllToAllOptions", opts)
        received = _elements(output, output_splits, self._size)
        sent = _elements(given, input_splits, self._size)
        if self._size == 1 or received is None or sent is None or not _is_dense_cpu(output, given):
            call = compat.first_of(self._gloo, *compat.ALIASES[2])
            return call(output, given, output_splits, input_splits, opts)
        role = all_to_all_steps(self.rank(), sent, received)
        return self._start(role, opts, output, given=given)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any = None
    ) -> Any:
        pairs = zip(outputs, given, strict=True)
        return CompoundWork([self.all_gather_single(*pair, opts) for pair in pairs], outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any = None
    ) -> Any:
        pairs = zip(outputs, given, strict=True)
        return CompoundWork([self.reduce_scatter_single(*pair, opts) for pair in pairs], outputs)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None
    ) -> Any:
        opts = compat.options("AllgatherOptions", opts)
        wanted, own = outputs[0], given[0]
        role = self._role("all_gather", self._size * own.numel(), own.element_size())
        even = len(outputs) == 1 and {each.numel() for each in wanted} == {own.numel()}
        if role is None or not even or not _is_dense_cpu(own, *wanted):
            return self._gloo.allgather(outputs, given, opts)
        whole = own.new_empty(self._size * own.numel())
        return self._start(role, opts, whole, given=own, unpack=wanted)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], given: list[list[Tensor]], opts: Any = None
    ) -> Any:
        opts = compat.options("ReduceScatterOptions", opts)
        output, parts = outputs[0], given[0]
        role = self._role("reduce_scatter", self._size * output.numel(), output.element_size())
        reduction = _supported_reduction(compat.reduction_of(opts), output)
        even = len(given) == 1 and {each.numel() for each in parts} == {output.numel()}
        if role is None or reduction is None or not even or not _is_dense_cpu(output, *parts):
            return self._gloo.reduce_scatter(outputs, given, opts)
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        return self._start(role, opts, output, given=whole, reduction=reduction)

    def alltoall(self, outputs: list[Tensor], given: list[Tensor], opts: Any = None) -> Any:
        opts = compat.options("AllToAllOptions", opts)
        if self._size == 1 or not _is_dense_cpu(*outputs, *given):
            return self._gloo.alltoall(outputs, given, opts)
        sent, received = [[t.numel() for t in tensors] for tensors in (given, outputs)]
        whole = outputs[0].new_empty(sum(received))
        packed = torch.cat([part.detach().reshape(-1) for part in given])
        role = all_to_all_steps(self.rank(), sent, received)
        return self._start(role, opts, whole, given=packed, unpack=outputs)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        opts = compat.options("AllreduceOptions", opts)
        reduction = _supported_reduction(compat.reduction_of(opts), tensors[0])
        if reduction is not None and (work := self._chosen("all_reduce", tensors, opts, reduction)):
            return work
        return self._striped(self._gloo.allreduce, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        opts = compat.options("BroadcastOptions", opts)
        if work := self._chosen("broadcast", tensors, opts, "sum", opts.rootRank):
            return work
        return self._striped(self._gloo.broadcast, tensors, opts)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._gloo.send(tensors, peer, _free(tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._gloo.recv(tensors, peer, _free(tag))

    def _roles(self) -> Callable[..., RankOperations | None]:
        """What this rank does in a program, by its operation and size.

        The cache does not know the group, so that it ends with its last reference: one of Gloo's
        threads that drops a tensor while the interpreter ends would end the process with SIGABRT.
        """
        return lru_cache(maxsize=_ROLES)(
            partial(_make_role, self._ranks, self.rank(), self._choose)
        )

    def _start(
        self,
        role: RankOperations,
        opts: Any,
        output: Tensor,
        *,
        given: Tensor | None = None,
        reduction: Reduction = "sum",
        unpack: list[Tensor] | None = None,
    ) -> ProgramWork:
        """Begin a program; `unpack`: the tensors that the parts of `output` belong into."""
        out = output.detach()
        flat = out.view(-1) if out.is_contiguous() else out.new_empty(out.numel())
        after = None
        if unpack is not None:
            after = partial(_unpack, flat, unpack)
        elif not out.is_contiguous():
            after = partial(_unpack, flat, [output])
        source = None if given is None else given.detach().contiguous().view(-1)
        running = self._interpreter.start(role, out=flat, given=source, reduction=reduction)
        program = SharedExecution(
            running, unpack or [output], compat.timeout_of(self._gloo, opts), self._finisher, after
        )
        # Somebody has to move it: the caller may wait late or never, and other ranks depend on it.
        if compat.is_async(opts) and (role.rounds or not running.travels):
            program.hand_over()
        return ProgramWork(program)

    def _chosen(
        self,
        op: Op,
        tensors: list[Tensor],
        opts: Any,
        reduction: Reduction,
        root: int | None = None,
    ) -> ProgramWork | None:
        """An in-place program, if one was chosen."""
        tensor = tensors[0]
        dense = _is_dense_cpu(tensor) and tensor.is_contiguous()
        if self._choose is None or len(tensors) > 1 or not dense:
            return None
        role = self._role(op, tensor.numel(), tensor.element_size(), root)
        return None if role is None else self._start(role, opts, tensor, reduction=reduction)

    def _striped(self, call: Callable[..., Any], tensors: list[Tensor], opts: Any) -> Any:
        """An operation of Gloo's, which takes one interface, in one part for each interface."""
        tensor = tensors[0]
        least = self._stripes * STRIPE_BYTES
        if self._stripes == 1 or len(tensors) > 1 or tensor.is_sparse or tensor.nbytes < least:
            return call(tensors, opts)
        if not tensor.is_contiguous():
            return call(tensors, opts)
        parts = tensor.detach().view(-1).tensor_split(self._stripes)
        return CompoundWork([call([part], opts) for part in parts], tensors)


def _make_role(
    ranks: tuple[int, ...],
    place: int,
    choose: ChooseProgram | None,
    op: Op,
    elements: int,
    element_bytes: int,
    root: int | None = None,
) -> RankOperations | None:
    """What a place of a group does in a program; None: none is run, because Gloo does it."""
    size = len(ranks)
    if size == 1 or elements == 0 or (op not in IN_PLACE and elements % size):
        return None
    task = CollectiveTask.of(op, size, elements, root=root)
    program = choose(task, ranks, element_bytes) if choose else None
    # Gloo's own all-reduce and broadcast stay: the ring is within 6 % of the limit.
    if program is None and op not in IN_PLACE:
        small = elements * element_bytes <= size * _SMALL_SHARE
        program = direct(task) if size <= _DIRECT_RANKS or small else ring(task)
    return None if program is None else RankOperations.of(program, place)


def all_to_all_steps(rank: int, sent: Sequence[int], received: Sequence[int]) -> RankOperations:
    """One rank's part of an all_to_all; arguments as of `write_all_to_all`."""
    script = RankScript()
    write_all_to_all(script, rank, sent, received)
    return RankOperations.made(script.steps, script.scratch, "all_to_all (direct)")


def _is_dense_cpu(*tensors: Tensor) -> bool:
    """Dense, on the CPU, of one dtype: what programs move."""
    return all(
        t.layout == torch.strided and t.device.type == "cpu" and t.dtype == tensors[0].dtype
        for t in tensors
    )


def _supported_reduction(reduction: Reduction | None, tensor: Tensor) -> Reduction | None:
    if reduction is None or not supports_reduction(tensor.dtype, reduction):
        return None
    return reduction


def _elements(tensor: Tensor, splits: Sequence[int], size: int) -> list[int] | None:
    """Elements for each rank; None: the splits do not fit the tensor."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits:
        if len(splits) != size or sum(splits) != rows:
            return None
        return [count * (tensor.numel() // rows) if rows else 0 for count in splits]
    return None if rows % size else [tensor.numel() // size] * size


def _unpack(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    """Put the parts of a flat tensor where they belong."""
    parts = whole.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def _free(tag: int) -> int:
    """The tag, unless it is one of the programs' own."""
    if tag < FIRST_TAG:
        return tag
    raise UsageError(
        f"tag {tag} of a message is too large",
        why=f"The backend headway uses the tags from {FIRST_TAG} on for its own messages.",
        fix="Use a smaller tag.",
    )
