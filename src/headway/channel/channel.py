"""`Channel`: tensors to and from one other process, through memory that both can reach.

A put writes into a free slot, then the flag; a get polls the flag, returns the tensor where it
lies, and gives the slot back when its user is done. Static (shape and type are given): the slots
are the receiver's. Dynamic: metadata comes with the flag, and the tensor has any shape. The numbers
of a slot's flag are k, k + S, k + 2S, ...; anything else is an error, never a wrong tensor. One
thread puts and one thread gets.

`open_transport` selects the provider: both ends decide from the same two offers, and where one
cannot open shared memory, both learn of it in the next round and use sockets, or raise, together.
`wait_any` waits for whichever of many channels has a tensor; of several, the one not served for
longest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from headway.channel import shared_memory, sockets
from headway.channel.region import METADATA_WORDS, RegionLayout, TensorMetadata
from headway.channel.rendezvous import ChannelRendezvous, GroupRendezvous, StoreRendezvous
from headway.channel.transport import ChannelTransport, WaitBackoff
from headway.errors import TIMEOUT_SECONDS, HeadwayError, RunError, Stalled, UsageError
from headway.keywords import checks_keywords

Provider = Literal["auto", "shared_memory", "socket", "mpi"]


def open_transport(
    meeting: ChannelRendezvous,
    provider: Provider,
    form: TensorMetadata | None,
    slots: int,
    address: str | None,
    *,
    credit: bool,
) -> ChannelTransport:
    """One end of a channel; arguments and errors as of `Channel`. The other end calls the same."""
    layout = RegionLayout(slots, 0 if form is None else form.nbytes)
    wanted = {
        "shape": None if form is None else list(form.shape),
        "dtype": None if form is None else str(form.dtype),
        "slots": slots,
        "credit": credit,
        "provider": provider,
    }
    here = "" if shared_memory.unavailable_reason() else shared_memory.machine()
    theirs = meeting.swap({**wanted, "machine": here})
    meeting.check_same_request(wanted, theirs)
    together = bool(here) and theirs["machine"] == here
    if provider == "shared_memory" and not together:
        raise _provider_unavailable(
            meeting, shared_memory.unavailable_reason() or "It is in another machine or container."
        )
    if provider != "socket" and together:
        wire, why = _open_shared_memory(meeting, layout, dynamic=form is None, credit=credit)
        if wire is not None:
            return wire
        if provider == "shared_memory":
            raise _provider_unavailable(meeting, why)
    return sockets.open_socket_transport(meeting, layout, address)


def _open_shared_memory(
    meeting: ChannelRendezvous, layout: RegionLayout, *, dynamic: bool, credit: bool
) -> tuple[ChannelTransport | None, str]:
    """The transport, or why one of the two ends cannot open it."""
    offer = shared_memory.Offer.make(layout)
    try:
        theirs = meeting.swap(offer.message())
        wire, why = None, ""
        try:
            wire = shared_memory.SharedMemoryTransport(
                f"rank {meeting.peer}",
                meeting.seconds,
                offer,
                theirs,
                dynamic=dynamic,
                credit=credit,
            )
        except OSError as error:
            why = str(error) or type(error).__name__
        answer = meeting.swap({"why": why})  # both have opened the descriptors: they may go
    finally:
        offer.close()
    why = why or answer["why"]
    return (None, why) if why else (wire, "")


def _provider_unavailable(meeting: ChannelRendezvous, why: str) -> UsageError:
    return UsageError(
        f"no shared memory with rank {meeting.peer}",
        where=f"rank {meeting.rank}",
        why=why,
        fix='Use provider="socket", or "auto", which takes the best that both ends have.',
    )


class ReceivedTensor:
    """A tensor that came, in the region; `with` it, or `release` it, to give its slot back.

    Attributes:
        tensor: Where it lies; not to be used once it is released, a later put writes there.
    """

    __slots__ = ("_channel", "_number", "tensor")

    def __init__(self, channel: Channel, number: int, tensor: Tensor) -> None:
        self._channel: Channel | None = channel
        self._number = number
        self.tensor = tensor

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *_: object) -> None:
        channel = self._channel
        if channel is not None:
            self._channel = None
            channel._release(self._number)

    def release(self) -> None:
        """Give the slot back; a second time does nothing.

        Raises:
            RunError: Without credits: the tensor has been overwritten while it was held.
        """
        self.__exit__()


@checks_keywords
class Channel:
    """One end of a channel between two ranks; both make theirs, alike.

    Args:
        peer: The rank of the other end: a global one, or with `store` as it calls itself.
        shape: Of all tensors; None: dynamic, each has its own form.
        dtype: Of all tensors, with `shape`.
        provider: "shared_memory" (one machine), "socket", "mpi", or "auto": the first where both
            ends can, else the second.
        slots: Tensors that may be under way in each direction.
        credit: Whether a put waits until its slot is free. Without, the caller sees to it (a
            step's backward behind its forward), and what was overwritten is an error of the reader.
        group: Over which addresses are exchanged, once; None: the default one.
        store: The same over a store, together with `rank`.
        rank: Of this end, with `store`.
        address: Of this end for sockets; None: all of this machine.
        capacity: With "mpi" and dynamic, the most bytes of a tensor; the others grow by themselves.
        timeout: Seconds that any wait may take.

    Raises:
        UsageError: The provider cannot be had here, or there is nothing to meet over.
        MissingExtra: "mpi" without mpi4py.
        RunError: The two ends want different things.
        PeerLost: The other end is gone.
        Stalled: The other end does not come in time.
    """

    def __init__(
        self,
        peer: int,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        provider: Provider = "auto",
        slots: int = 2,
        credit: bool = True,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
        rank: int | None = None,
        address: str | None = None,
        capacity: int = 1 << 24,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        form = None if shape is None else TensorMetadata(tuple(shape), dtype)
        _check(form, slots, credit, timeout)
        if provider == "mpi":
            from headway.channel.mpi_window import open_mpi_transport

            self._wire: ChannelTransport = open_mpi_transport(peer, form, slots, capacity, timeout)
        else:
            meeting = _rendezvous(peer, group, store, rank, timeout)
            self._wire = open_transport(meeting, provider, form, slots, address, credit=credit)
        self.peer = peer
        self.provider = self._wire.provider
        self._form, self._slots, self._credits = form, slots, credit
        self._words, self._acquire = self._wire.words, self._wire.acquire
        layout = self._wire.layout
        self._flag_of = [layout.flag(slot) for slot in range(slots)]
        self._credit_of = [layout.credit(slot) for slot in range(slots)]
        self._seen: list[tuple[tuple[int, ...], Tensor] | None] = [None] * slots
        self._sent = self._taken = 0
        self._given_back = [0] * slots
        self._served = 0
        self._open = True

    # -- put ---------------------------------------------------------------------------------

    @property
    def buffer(self) -> Tensor:
        """Static: the next slot as a tensor to compute into; `put()` then sends it, uncopied.

        Waits for the credit, and raises as `put` does; RunError where the channel is dynamic.
        """
        if self._form is None:
            raise RunError("the buffer of a dynamic channel", fix="Use empty(shape, dtype).")
        return self._make(self._form)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Dynamic: a tensor of the region to compute into; `put` of it sends it, uncopied.

        Waits for the credit, and raises as `put` does; RunError where the channel is static.
        """
        if self._form is not None:
            raise RunError("an empty tensor of a static channel", fix="Use its buffer.")
        return self._make(TensorMetadata(tuple(shape), dtype))

    def _make(self, form: TensorMetadata) -> Tensor:
        slot = self._free_slot(self._sent + 1)
        return form.view(self._wire.room(slot, form.nbytes))

    def put(self, tensor: Tensor | None = None) -> None:
        """Write a tensor into the next slot, then its flag; waits for the credit.

        Args:
            tensor: Of any device and strides; None: what has been made in `buffer`. One from
                `buffer` or `empty` is not copied.

        Raises:
            RunError: The tensor has another form than the channel, or the channel is closed.
            PeerLost: The other end is gone.
            Stalled: The slot does not become free in time.
        """
        form = self._form
        if form is None:
            if tensor is None:
                raise RunError("a put of nothing", fix="Put the tensor that empty(...) has made.")
            form = TensorMetadata(tuple(tensor.shape), tensor.dtype)
        elif tensor is not None and (tensor.dtype != form.dtype or tensor.shape != form.shape):
            raise self._other_form(tensor, form)
        number = self._sent + 1
        slot = number % self._slots
        # Tested here as well as in `_free_slot`, because a small put is bound by its Python calls.
        if not self._open or (
            self._credits and self._words[self._credit_of[slot]] + self._slots < number
        ):
            self._free_slot(number)
        self._wire.send(slot, number, tensor, form)
        self._sent = number

    def _other_form(self, tensor: Tensor, form: TensorMetadata) -> RunError:
        return RunError(
            f"a tensor {list(tensor.shape)} of {tensor.dtype} in a channel to rank {self.peer}",
            why=f"It was made for {list(form.shape)} of {form.dtype}.",
            fix="Make a channel without shape=, for tensors of all forms.",
        )

    def _free_slot(self, number: int) -> int:
        """The slot of a put, once its credit is there."""
        self._require_open()
        slot = number % self._slots
        if self._credits:
            least = number - self._slots
            if self._words[self._credit_of[slot]] < least:
                self._wire.wait(self._credit_of[slot], least, "give a slot back")
        return slot

    # -- get ---------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a tensor has come; never waits.

        Raises:
            PeerLost: None has, and the other end is gone.
        """
        number = self._taken + 1
        # Larger if a later put has overwritten it (no credits); `get` reports that.
        if self._words[self._flag_of[number % self._slots]] >= number:
            return True
        self._require_open()
        self._wire.check()
        return False

    def get(self) -> ReceivedTensor:
        """The next tensor, in the region; `with channel.get() as tensor:` gives its slot back.

        Raises:
            RunError: Without credits: it has been overwritten. All slots are held.
            PeerLost: The other end is gone; what it had put before is delivered first.
            Stalled: None comes in time.
        """
        number = self._taken + 1
        slot = number % self._slots
        words, flag = self._words, self._flag_of[slot]
        if words[flag] < number:
            self._await(slot, number)
        if words[flag] != number:
            raise self._overwritten(number)
        if self._acquire is not None:
            self._acquire()
        if self._form is not None and (known := self._seen[slot]) is not None:
            tensor = known[1]
        else:
            tensor = self._view(slot, flag)
        self._taken = number
        return ReceivedTensor(self, number, tensor)

    def get_into(self, tensor: Tensor) -> Tensor:
        """Copy the next tensor into one of the caller's; returns that, and raises as `get` does."""
        with self.get() as came, torch.no_grad():
            return tensor.copy_(came)

    def add_into(self, accumulator: Tensor) -> Tensor:
        """Add the next tensor to an accumulator, straight out of the region; as `get_into`."""
        with self.get() as came, torch.no_grad():
            return accumulator.add_(came)

    def _await(self, slot: int, number: int) -> None:
        self._require_open()
        # The peer cannot put before a slot is released here: the wait could only time out.
        if self._credits and self._given_back[slot] < number - self._slots:
            raise RunError(
                f"all {self._slots} slots of a channel from rank {self.peer} are held",
                fix="Release what get() gave (`with` does), or make the channel with more slots=.",
            )
        self._wire.wait(self._flag_of[slot], number, "put a tensor")

    def _view(self, slot: int, flag: int) -> Tensor:
        """The tensor in a slot; made anew only where its form or its place has changed."""
        wire, form = self._wire, self._form
        block = tuple(self._words[flag + 2 : flag + 2 + METADATA_WORDS]) if form is None else ()
        known = self._seen[slot]
        if known is None or known[0] != block:
            bytes_ = wire.arrived(slot, block)
            tensor = (TensorMetadata.of(block) if form is None else form).view(bytes_)
            known = self._seen[slot] = block, tensor
        return known[1]

    def _release(self, number: int) -> None:
        slot = number % self._slots
        if not self._credits:
            # A later put stores `begun` first, so that even a half-finished overwrite is noticed.
            if self._words[self._flag_of[slot] + 1] != number:
                raise self._overwritten(number)
            return
        self._given_back[slot] = number
        if self._open:
            self._wire.give_back(slot, number)

    def _overwritten(self, number: int) -> RunError:
        return RunError(
            f"tensor {number} from rank {self.peer} was overwritten before it was used",
            why=f"The channel has no credits and {self._slots} slots.",
            fix="Make it with credit=True, or with more slots=.",
        )

    # -- the end -----------------------------------------------------------------------------

    def allow(self, seconds: float) -> None:
        """Let any wait from now on take so long."""
        self._wire.seconds = seconds

    def close(self) -> None:
        """End the channel at both ends; the other one still gets what has been put.

        Waits until it has taken dynamic tensors out of the memory of this end. Tensors that were
        received keep their memory. A second call does nothing.
        """
        self._close(patient=True)

    def _close(self, *, patient: bool) -> None:
        if self._open:
            self._open = False
            # These views would keep the memory in use, and an MPI window could not be freed.
            self._seen = [None] * self._slots
            # Later calls read zeros, not memory that may be unmapped by then.
            self._words, self._acquire = memoryview(bytes(len(self._words) * 8)).cast("Q"), None
            self._wire.close(patient=patient)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close(patient=error is None)

    def _require_open(self) -> None:
        if not self._open:
            raise RunError(f"the channel to rank {self.peer} is closed", fix="Make a new one.")


def _rendezvous(
    peer: int,
    group: dist.ProcessGroup | None,
    store: Store | None,
    rank: int | None,
    seconds: float,
) -> ChannelRendezvous:
    if store is None:
        return GroupRendezvous(group, peer, seconds)
    if rank is None:
        raise UsageError("a channel over a store without rank=", fix="Give this end's number.")
    return StoreRendezvous(store, rank, peer, seconds)


def _check(form: TensorMetadata | None, slots: int, credit: bool, seconds: float) -> None:
    if form is not None:
        form.block()
    if slots < 1 or not seconds > 0:
        raise UsageError(f"a channel of {slots} slots and {seconds:g} s", fix="Give more.")
    if form is None and not credit:
        raise UsageError(
            "a dynamic channel without credits",
            why="The sender would free a tensor that is still being read.",
            fix="Give shape=, or leave credit=True.",
        )


def wait_any(channels: Sequence[Channel], timeout: float | None = None) -> Channel:
    """Wait until some channel has a tensor; of several, the one that was not served for longest.

    Args:
        timeout: Seconds; None: the shortest of the channels'.

    Raises:
        PeerLost: One of them can never have any more, and no other has one.
        Stalled: None has one in time.
    """
    if not channels:
        raise UsageError("a wait for any of no channels", fix="Give at least one.")
    seconds = min(c._wire.seconds for c in channels) if timeout is None else timeout
    names = ", ".join(str(channel.peer) for channel in channels)
    # The pauses check nothing: `ready` raises for a peer that is gone.
    pauses = WaitBackoff(
        seconds,
        lambda: None,
        lambda limit: Stalled(
            f"no tensor came from any of the ranks {names} within {limit:g} s",
            where="channels",
            fix="Look for what they do instead, or allow more time with timeout=.",
        ),
    )
    while True:
        order = sorted(channels, key=lambda channel: channel._served)
        lost = None
        for channel in order:
            try:
                if channel.ready():
                    channel._served = time.monotonic_ns()
                    return channel
            except HeadwayError as error:
                lost = error
        # Only after all have been asked, because another channel may have a tensor.
        if lost is not None:
            raise lost
        pauses.pause()
