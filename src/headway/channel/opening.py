"""From two ends that meet to two wires: what both want, which provider, and opening it.

Invariant: both ends decide from the same two offers, hence alike; and where an end cannot open
shared memory, both learn of it in the next round and go on to sockets, or raise, together.
"""

from __future__ import annotations

from typing import Any, Literal

from headway.channel import shared_memory, sockets
from headway.channel.meeting import Meeting
from headway.channel.region import Form, Layout
from headway.channel.wire import Wire
from headway.errors import RunError, UsageError

Provider = Literal["auto", "shared_memory", "socket", "mpi"]


def open_wire(
    meeting: Meeting,
    provider: Provider,
    form: Form | None,
    slots: int,
    address: str | None,
    *,
    credit: bool,
) -> Wire:
    """One end of a channel; the other end calls the same.

    Args:
        meeting: The way to the other end.
        provider: What is wanted; "auto": shared memory where both processes can, else sockets.
        form: Of all tensors; None: dynamic.
        slots: Tensors that may be under way.
        address: Of this end for sockets; None: all addresses of this machine.
        credit: Whether a put waits until its slot is free.

    Raises:
        UsageError: The provider cannot be had here.
        RunError: The two ends want different things.
        PeerLost: The other end is gone.
        Stalled: The other end does not come.
    """
    layout = Layout(slots, 0 if form is None else form.nbytes)
    wanted = {
        "shape": None if form is None else list(form.shape),
        "dtype": None if form is None else str(form.dtype),
        "slots": slots,
        "credit": credit,
        "provider": provider,
    }
    here = "" if shared_memory.why_not() else shared_memory.machine()
    theirs = meeting.swap({**wanted, "machine": here})
    _compare(meeting, wanted, theirs)
    together = bool(here) and theirs["machine"] == here
    if provider == "shared_memory" and not together:
        raise _refused(meeting, shared_memory.why_not() or "It is in another machine or container.")
    if provider != "socket" and together:
        wire, why = _shared(meeting, layout, dynamic=form is None, credit=credit)
        if wire is not None:
            return wire
        if provider == "shared_memory":
            raise _refused(meeting, why)
    return sockets.open_socket_wire(meeting, layout, address)


def _shared(
    meeting: Meeting, layout: Layout, *, dynamic: bool, credit: bool
) -> tuple[Wire | None, str]:
    """The wire, or why one of the two ends cannot open it."""
    offer = shared_memory.Offer.make(layout)
    try:
        theirs = meeting.swap(offer.says())
        wire, why = None, ""
        try:
            wire = shared_memory.SharedMemoryWire(
                f"rank {meeting.peer}",
                meeting.seconds,
                offer,
                theirs,
                dynamic=dynamic,
                credit=credit,
            )
        except OSError as error:
            why = str(error) or type(error).__name__
        answer = meeting.swap({"why": why})  # only now may the descriptors go
    finally:
        offer.close()
    why = why or answer["why"]
    return (None, why) if why else (wire, "")


def _compare(meeting: Meeting, wanted: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if theirs.get(name) != value:
            raise RunError(
                f"the two ends of a channel differ in {name}",
                where=f"rank {meeting.rank}",
                why=f"{value} here, {theirs.get(name)} on rank {meeting.peer}.",
                fix="Make both ends alike, and the channels of two ranks in the same order.",
            )


def _refused(meeting: Meeting, why: str) -> UsageError:
    return UsageError(
        f"no shared memory with rank {meeting.peer}",
        where=f"rank {meeting.rank}",
        why=why,
        fix='Use provider="socket", or "auto", which takes the best that both ends have.',
    )
