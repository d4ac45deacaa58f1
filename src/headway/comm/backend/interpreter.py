"""Interpreter: executes one rank's part of a `CollectiveProgram` with tagged messages.

Messages are matched by (peer, tag), so that programs may overlap on one group as long as all ranks
start them in the same order. Sums are formed in the order of the program's steps and in the dtype
of the tensors. `start` executes the steps up to the first Wait; nothing is waited for, and no sum
is formed, before `finish`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from time import monotonic
from typing import Literal, Protocol

import torch
from torch import Tensor

from headway.collective.program.program import (
    Buffer,
    BufferSpan,
    CollectiveProgram,
    Combine,
    Copy,
    Recv,
    Send,
    Step,
    Wait,
)
from headway.comm.backend.connection import ConnectionBroken
from headway.errors import HeadwayError, PeerLost, Stalled

Reduction = Literal["sum", "avg", "min", "max", "product", "band", "bor", "bxor"]

FIRST_TAG = 1 << 30
"""Tags of programs lie from here to 2^31 - 1; below they belong to the user's own messages."""

# A message is only divided among interfaces where each part has at least so many bytes.
STRIPE_BYTES = 64 * 1024


class MessageHandle(Protocol):
    """A message under way; one that does not `travels` by itself moves while somebody waits."""

    def wait(self, timeout: timedelta, /) -> object: ...


class MessageTransport(Protocol):
    """What a group must offer: tagged point-to-point operations (`ConnectionMessages`, or Gloo)."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> MessageHandle: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> MessageHandle: ...


@dataclass(frozen=True, slots=True)
class RankOperations:
    """What one rank does in a program.

    Attributes:
        scratch: Elements of "tmp".
        name: Of operation and algorithm, for messages.
        tags: How many the program uses, from 0; the same number on all ranks.
        rounds: Messages begin after a wait: somebody has to drive it, or the others wait for us.
    """

    steps: tuple[Step, ...]
    scratch: int
    name: str
    tags: int
    rounds: bool

    @classmethod
    def of(cls, program: CollectiveProgram, rank: int) -> RankOperations:
        """The part of a rank in a program."""
        tags = max(
            (s.tag for steps in program.steps for s in steps if isinstance(s, Recv | Send)),
            default=0,
        )
        return cls.made(
            program.steps[rank], program.scratch[rank], f"{program.op} ({program.name})", tags + 1
        )

    @classmethod
    def made(cls, steps: Sequence[Step], scratch: int, name: str, tags: int = 1) -> RankOperations:
        """From steps that were written for one rank alone."""
        waits = [place for place, step in enumerate(steps) if isinstance(step, Wait)]
        late = steps[waits[0] :] if waits else ()
        rounds = any(isinstance(step, Recv | Send) for step in late)
        return cls(tuple(steps), scratch, name, tags, rounds)


class Interpreter:
    """Executes programs on one group.

    Args:
        messages: Of the group; nothing else may use its tags from `FIRST_TAG`.
        timeout_seconds: Longest wait for one program, unless `finish` is given another one.
        stripes: Interfaces of the group; tag t travels over interface t modulo this number.
    """

    def __init__(
        self,
        messages: MessageTransport,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout_seconds: float,
        stripes: int = 1,
    ) -> None:
        self.messages = messages
        self.rank = rank
        self.ranks = tuple(ranks)
        self.timeout_seconds = timeout_seconds
        self.stripes = stripes
        self.scratch = ReceiveBufferPool()
        self._used_tags = 0
        self._lock = threading.Lock()

    def start(
        self,
        role: RankOperations,
        *,
        out: Tensor,
        given: Tensor | None = None,
        reduction: Reduction = "sum",
    ) -> ProgramExecution:
        """Begin; all ranks begin the programs of a group in the same order.

        Args:
            out: 1-D, contiguous, on the CPU, without gradient: the program's "out".
            given: The same of its "in", of the same dtype.
            reduction: How Combine combines; "avg" divides "out" by the number of ranks at the end.
        """
        running = ProgramExecution(self, role, out, given, reduction)
        running.begin()
        return running

    def reserve(self, role: RankOperations) -> int:
        """The first of the numbers that a program's tags get on this group."""
        with self._lock:
            self._used_tags += role.tags
            return self._used_tags - role.tags

    def tags(self, number: int) -> range:
        """One tag for each interface."""
        # Numbers wrap around, so that tags stay below 2^31.
        first = FIRST_TAG + number % (FIRST_TAG // self.stripes) * self.stripes
        return range(first, first + self.stripes)


class ProgramExecution:
    """One program under way on this rank."""

    def __init__(
        self,
        interpreter: Interpreter,
        role: RankOperations,
        out: Tensor,
        given: Tensor | None,
        reduction: Reduction,
    ) -> None:
        self.role = role
        self._interpreter = interpreter
        self._first = interpreter.reserve(role)
        self._out = out
        self._combine = COMBINE[reduction]
        self._divide = reduction == "avg"
        self._held = (
            interpreter.scratch.take(role.scratch * out.element_size()) if role.scratch else None
        )
        self._buffers: dict[Buffer, Tensor] = {"out": out}
        if given is not None:
            self._buffers["in"] = given
        if self._held is not None:
            length = role.scratch * out.element_size()
            self._buffers["tmp"] = self._held[:length].view(out.dtype)
        self._place = 0
        self._awaited: Recv | Send | None = None
        self._works: dict[int, list[MessageHandle]] = {}

    def begin(self) -> None:
        """Execute the steps before the first wait."""
        steps = self.role.steps
        while self._place < len(steps) and not isinstance(steps[self._place], Wait):
            self._do(steps[self._place])
            self._place += 1

    @property
    def travels(self) -> bool:
        """Whether the messages that have begun get there although nobody waits."""
        # Gloo's handles do not say: a thread of Gloo moves their messages in any case.
        return all(
            getattr(work, "travels", True) for works in self._works.values() for work in works
        )

    def finish(self, seconds: float | None = None) -> None:
        """Execute the rest.

        Args:
            seconds: The longest it may take; None: the time-out of the group.

        Raises:
            Stalled: A rank did not send or take a message in time; names it.
            PeerLost: The connection to a rank broke.
        """
        allowed = self._interpreter.timeout_seconds if seconds is None else seconds
        deadline = monotonic() + allowed
        steps = self.role.steps
        while self._place < len(steps):
            step = steps[self._place]
            if isinstance(step, Wait):
                for place in step.steps:
                    self._await(place, deadline, allowed)
            else:
                self._do(step)
            self._place += 1
        if self._divide:
            self._out.div_(len(self._interpreter.ranks))
            self._divide = False
        if self._held is not None:
            # Only here: a late message may still be written to the memory of a program that failed.
            self._interpreter.scratch.give(self._held)
            self._held = None
        self._buffers.clear()

    def _do(self, step: Step) -> None:
        if isinstance(step, Recv):
            receive = self._interpreter.messages.recv
            self._works[self._place] = self._move(receive, step.peer, step.tag, step.into)
        elif isinstance(step, Send):
            send = self._interpreter.messages.send
            self._works[self._place] = self._move(send, step.peer, step.tag, step.of)
        elif isinstance(step, Combine):
            self._combine(self._piece(step.dst), self._piece(step.src))
        elif isinstance(step, Copy):
            dst, src = self._piece(step.dst), self._piece(step.src)
            if dst.data_ptr() != src.data_ptr():
                dst.copy_(src)

    def _move(
        self,
        call: Callable[[list[Tensor], int, int], MessageHandle],
        peer: int,
        tag: int,
        span: BufferSpan,
    ) -> list[MessageHandle]:
        piece = self._piece(span)
        number = self._first + tag
        tags = self._interpreter.tags(number)
        try:
            # Small messages take the interfaces in turn.
            if len(tags) == 1 or piece.nbytes < len(tags) * STRIPE_BYTES:
                return [call([piece], peer, tags[number % len(tags)])]
            parts = piece.tensor_split(len(tags))
            return [call([part], peer, tag) for part, tag in zip(parts, tags, strict=True)]
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _piece(self, span: BufferSpan) -> Tensor:
        return self._buffers[span.buffer][span.start : span.stop]

    def _await(self, place: int, deadline: float, allowed: float) -> None:
        step = self.role.steps[place]
        assert isinstance(step, Recv | Send)
        self._awaited = step
        for work in self._works.pop(place):
            # Never zero: that is torch's kNoTimeout, the time-out of the group.
            left = max(deadline - monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                # Gloo raises the same type for a time-out and for a broken connection.
                if monotonic() < deadline and "timed out" not in str(error).lower():
                    raise self._lost(step.peer, error) from error
                raise self._stalled(step, allowed) from error

    def late(self, allowed: float) -> HeadwayError:
        """The error of a caller whose wait for another thread's `finish` timed out."""
        messages = (step for step in self.role.steps if isinstance(step, Recv | Send))
        return self._stalled(self._awaited or next(messages), allowed)

    def _stalled(self, step: Recv | Send, allowed: float) -> HeadwayError:
        peer = self._interpreter.ranks[step.peer]
        span = step.into if isinstance(step, Recv) else step.of
        size = f"{span.size * self._out.element_size()} bytes"
        what = f"{size} from rank {peer}" if isinstance(step, Recv) else f"rank {peer} took {size}"
        return Stalled(
            f"{self.role.name}: rank {peer} did not come",
            where=f"rank {self._interpreter.ranks[self._interpreter.rank]}",
            why=f"Waited {allowed:g} s until {what}"
            f"{' were there' if isinstance(step, Recv) else ''}.",
            fix="Look for what that rank does instead (another order of operations, a hang, slow "
            "data), or allow more time (the timeout of init_process_group or new_group).",
        )

    def _lost(self, peer: int, error: RuntimeError) -> HeadwayError:
        gone = self._interpreter.ranks[error.peer if isinstance(error, ConnectionBroken) else peer]
        return PeerLost(
            f"{self.role.name}: the connection to rank {gone} broke",
            where=f"rank {self._interpreter.ranks[self._interpreter.rank]}",
            why=str(error).strip().partition("\n")[0],
            fix="Its own error, or the signal that killed it, is the cause.",
        )


class ReceiveBufferPool:
    """Memory for what programs receive and then add: kept between programs, never shared by two.

    A piece that proves too small is dropped, so that there are as many pieces as programs were
    under way at once. The memory of a program that failed never comes back: a late message may
    still be written to it.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """At least so many bytes; 1-D, uint8, undefined."""
        with self._lock:
            fitting = [held for held in self._free if held.numel() >= size]
            # The smallest that fits; where none does, the smallest is dropped for a new one.
            chosen = min(fitting or self._free, key=Tensor.numel, default=None)
            if chosen is not None:
                self._free = [held for held in self._free if held is not chosen]
        if chosen is None or chosen.numel() < size:
            return torch.empty(size, dtype=torch.uint8)
        return chosen

    def give(self, held: Tensor) -> None:
        """Take memory back from a program that is done."""
        with self._lock:
            self._free.append(held)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()

    @property
    def num_bytes(self) -> int:
        return sum(held.numel() for held in self._free)


def _into(function: Callable[..., Tensor], dst: Tensor, src: Tensor) -> None:
    function(dst, src, out=dst)


def _add(dst: Tensor, src: Tensor) -> None:
    dst.add_(src)


COMBINE: Mapping[Reduction, Callable[[Tensor, Tensor], None]] = {
    "sum": _add,
    "avg": _add,
    "min": partial(_into, torch.minimum),
    "max": partial(_into, torch.maximum),
    "product": partial(_into, torch.mul),
    "band": partial(_into, torch.bitwise_and),
    "bor": partial(_into, torch.bitwise_or),
    "bxor": partial(_into, torch.bitwise_xor),
}


@cache
def supports_reduction(dtype: torch.dtype, reduction: Reduction) -> bool:
    """Whether torch can combine this dtype in this way (no float8, no average of integers)."""
    one = torch.ones(1, dtype=dtype)
    try:
        COMBINE[reduction](one, one.clone())
        if reduction == "avg":
            one.div_(1)
    except (RuntimeError, NotImplementedError):
        return False
    return True
