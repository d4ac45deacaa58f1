"""TCP connections between the ranks of a group, and tagged messages over them.

A message is a head (kind, tag, bytes) and the bytes of a tensor. Messages of one tag arrive in the
order in which they were sent. What nobody has asked for stays in the kernel, so that a rank cannot
run far ahead; it is buffered only where a requested message lies behind it.

`PeerConnection` never blocks: whoever waits calls `push` and `pull` when poll says so.
`ConnectionMessages` is what the interpreter uses in place of Gloo's connections, where a thread of
every group is woken for each piece that arrives. Here a call hands the kernel what it takes, and a
wait sleeps in poll and moves every message of the group until its own is done; other waiting
threads sleep until theirs is, or until it is their turn to poll. State changes under one lock,
which is not held in poll.

`connect_peers`: every rank listens on each of its interfaces, publishes the addresses in the
group's store, connects to the ranks below its own and accepts those above. What is published is
signed with the secret of the job, and a caller proves that it knows this secret and the callee's
random token in the store; anyone else is turned away. All ranks read the same entries: if one has
no address, or a different number of interfaces, all fall back to Gloo's connections.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import chain
from time import monotonic
from typing import Any

from torch import Tensor

from headway.channel.job_secret import job_secret, seal, sign, unseal
from headway.channel.region import memory_at
from headway.channel.rendezvous import (
    accept_calls,
    configure_connection,
    host_addresses,
    interface_address,
    read_object,
)
from headway.errors import PeerLost, RunError, Stalled

_HEAD = struct.Struct("<IIQ")
_DATA, _BYE = 0x68770001, 0x68770002
# A receiver is woken when so much has come, or all that it needs; otherwise by every packet.
_LOW_BYTES = 64 * 1024
# The kernel of a receiver takes so much in any case, while nobody reads.
KERNEL_BYTES = 32 * 1024
_HANG_UP = getattr(select, "POLLRDHUP", 0)
_NOTHING = memoryview(bytearray())


class MessageTransfer:
    """A message that is sent from or received into a contiguous tensor of the CPU.

    Attributes:
        done: It is in the tensor, or has left it.
    """

    __slots__ = ("_home", "done", "link", "memory", "nbytes", "sends", "tag", "tensor")

    def __init__(
        self,
        home: ConnectionMessages,
        link: PeerConnection,
        tag: int,
        tensor: Tensor,
        *,
        sends: bool,
    ) -> None:
        self._home, self.link, self.tag, self.tensor, self.sends = home, link, tag, tensor, sends
        self.nbytes = tensor.nbytes
        # It does not keep the tensor alive; the attribute `tensor` does.
        self.memory = memory_at(tensor.data_ptr(), self.nbytes) if self.nbytes else _NOTHING
        self.done = False

    @property
    def travels(self) -> bool:
        """Whether it is transferred although nobody in this process waits for it."""
        return self.done or (not self.sends and self.nbytes <= KERNEL_BYTES)

    def wait(self, timeout: timedelta) -> None:
        """Return when it is done.

        Raises:
            RuntimeError: It "timed out", or the connection to a rank broke (`ConnectionBroken`).
        """
        if not self.done:
            self._home.wait(self, timeout.total_seconds())


class PeerConnection:
    """One end of a new connection to the rank at place `peer` of the group.

    Attributes:
        ended: Why nothing comes any more; "" while something may.
        parted: The other end has said goodbye.
        draining: The other end sends nothing more: what it has sent is read in any case.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.ended = ""
        self.parted = False
        self.draining = False
        self._socket = connection
        connection.setblocking(False)
        configure_connection(connection)
        self.number = connection.fileno()
        self._leaving: deque[MessageTransfer] = deque()
        self._out: list[memoryview] = []
        self._wanted: dict[int, deque[MessageTransfer]] = {}
        self._early: dict[int, deque[bytearray | mmap.mmap]] = {}
        self._head = bytearray(_HEAD.size)
        self._room = memoryview(self._head)
        self._coming: tuple[int, MessageTransfer | bytearray | mmap.mmap] | None = None
        self._low = 1

    def send(self, transfer: MessageTransfer) -> None:
        """Begin to send; what the kernel takes leaves at once."""
        self._leaving.append(transfer)
        # Otherwise it waits its turn: messages of one connection leave whole and in order.
        if len(self._leaving) == 1:
            self._load()
            self.push()

    def _load(self) -> None:
        first = self._leaving[0]
        self._out = [memoryview(_HEAD.pack(_DATA, first.tag, first.nbytes)), first.memory]

    def push(self) -> None:
        """Hand the kernel what it takes."""
        try:
            while self._leaving and not self.ended:
                self._out = _rest(self._out, self._socket.sendmsg(self._out))
                if self._out:
                    return
                self._leaving.popleft().done = True
                if self._leaving:
                    self._load()
        # The kernel's buffer is full; poll says when it takes more.
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)

    def receive(self, transfer: MessageTransfer) -> None:
        """Begin to receive a message, which may have come already."""
        early = self._early.get(transfer.tag)
        if early:
            self._deliver(transfer, early.popleft())
            if not early:
                del self._early[transfer.tag]
        else:
            self._wanted.setdefault(transfer.tag, deque()).append(transfer)

    def pull(self) -> None:
        """Take from the kernel what was asked for; everything, if the other end has finished."""
        try:
            while (self._wanted or self._coming or self.draining) and not self.ended:
                # A message of no bytes has no room, and a receive into nothing looks like the end.
                count = self._socket.recv_into(self._room) if self._room else 0
                if self._room and not count:
                    self.ended = "has closed the group" if self.parted else "is gone"
                self._room = self._room[count:]
                if self._room:
                    return
                self._next()
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)

    def _next(self) -> None:
        """A head or the bytes of a message are complete."""
        if self._coming is None:
            kind, tag, nbytes = _HEAD.unpack(self._head)
            if kind == _BYE:
                self.parted = self.draining = True
            elif kind != _DATA:
                self.ended = "sent an invalid message"
            else:
                self._begin(tag, nbytes)
                if self._room or self.ended:
                    return
                self._close_message()
        else:
            self._close_message()
        self._room = memoryview(self._head)

    def _begin(self, tag: int, nbytes: int) -> None:
        transfer = self._claim(tag)
        if transfer is None:
            aside = _reserve(nbytes)
            if aside is None:
                self.ended = f"sent a message of {nbytes} bytes"
                return
            self._coming, self._room = (tag, aside), memoryview(aside)
        elif transfer.nbytes == nbytes:
            self._coming, self._room = (tag, transfer), transfer.memory
        else:
            self.ended = _unequal(nbytes, transfer.nbytes)

    def _claim(self, tag: int) -> MessageTransfer | None:
        """The first transfer that waits for this tag."""
        waiting = self._wanted.get(tag)
        if not waiting:
            return None
        transfer = waiting.popleft()
        if not waiting:
            del self._wanted[tag]
        return transfer

    def _close_message(self) -> None:
        assert self._coming is not None
        (tag, what), self._coming = self._coming, None
        if isinstance(what, MessageTransfer):
            what.done = True
        elif transfer := self._claim(tag):  # requested while its bytes were arriving
            self._deliver(transfer, what)
        else:
            self._early.setdefault(tag, deque()).append(what)

    def _deliver(self, transfer: MessageTransfer, came: bytearray | mmap.mmap) -> None:
        """Give a message that was put aside to whoever asks for it."""
        if len(came) == transfer.nbytes:
            transfer.memory[:] = memoryview(came)
            transfer.done = True
        else:
            self.ended = _unequal(len(came), transfer.nbytes)

    @property
    def events(self) -> int:
        """What poll should look for."""
        wants = select.POLLIN if self._wanted or self._coming else 0
        # POLLRDHUP: a rank that is gone is noticed even if nothing is asked of it.
        return wants | (select.POLLOUT if self._leaving else 0) | _HANG_UP

    def handle_events(self, events: int) -> None:
        """Act on the events that poll has found."""
        # Hung up: what has come is read all the same, and behind it the end of the connection.
        if events & ~(select.POLLIN | select.POLLOUT):
            self.draining = True
        if events & select.POLLOUT:
            self.push()
        if events & ~select.POLLOUT:
            self.pull()

    def set_low_water_mark(self) -> None:
        """Set the kernel's low-water mark, so that poll only returns when there is work."""
        if self._coming is not None:
            need = len(self._room)
        elif self._wanted:
            # Any of the wanted messages may be the next one; the rest of its head comes before it.
            sizes = (transfer.nbytes for waiting in self._wanted.values() for transfer in waiting)
            need = len(self._room) + min(sizes)
        else:
            return
        need = max(1, min(need, _LOW_BYTES))
        if need != self._low:
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, need)
            self._low = need

    def _end(self, error: OSError) -> None:
        self.ended = f"is gone ({error.strerror or error})"

    def close(self) -> None:
        """Say goodbye and close; what has been handed to the kernel still arrives."""
        # In the middle of a message a goodbye would be taken for its bytes.
        if not self._leaving and not self.ended:
            with suppress(OSError):
                self._socket.send(_HEAD.pack(_BYE, 0, 0))
        self.drop()

    def drop(self) -> None:
        """Close without a goodbye, as the death of this process would."""
        self.ended = self.ended or "was closed by this rank"
        self._socket.close()


def _reserve(nbytes: int) -> bytearray | mmap.mmap | None:
    """Room for a message that nobody has asked for yet; None: there is not so much."""
    if nbytes <= _LOW_BYTES:
        return bytearray(nbytes)
    # Not a bytearray, which is filled with zeros: here the kernel gives a page when it is written
    # to, so that a head alone costs nothing.
    with suppress(OSError, ValueError, OverflowError):
        return mmap.mmap(-1, nbytes)
    return None


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some buffers after their first `count` bytes."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else parts


def _unequal(came: int, expected: int) -> str:
    return f"sent {came} bytes where {expected} were expected: the ranks' calls differ"


# Messages of a group over its own connections, moved by whoever waits: no thread, no copies.


# After a rank has vanished, the others may finish what does not depend on it for this long.
_GRACE_SECONDS = 2.0

_SHORT_SECONDS = 5.0

_living: weakref.WeakSet[Any] = weakref.WeakSet()


class ConnectionBroken(RuntimeError):
    """The connection to a rank broke."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class ConnectionMessages:
    """The messages of one rank of a group.

    Args:
        links: For every other rank its connections, one for each interface.
    """

    def __init__(self, links: Sequence[Sequence[PeerConnection]]) -> None:
        self._links = [list(each) for each in links]
        self._by_number = {link.number: link for each in self._links for link in each}
        self._lost: dict[PeerConnection, float] = {}
        self._state = threading.Condition(threading.Lock())
        self._polling = False
        self._asleep: list[MessageTransfer] = []
        self._bell, self._ringer = socket.socketpair()
        for end in (self._bell, self._ringer):
            end.setblocking(False)
        everything = [link for each in self._links for link in each]
        self._end = weakref.finalize(self, _close, everything, (self._bell, self._ringer))
        _living.add(self)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> MessageTransfer:
        """Begin to send a tensor; it must stay as it is until that is done."""
        with self._state:
            link = self._link(peer, tag)
            transfer = MessageTransfer(self, link, tag, tensors[0], sends=True)
            link.send(transfer)
            if self._polling and not transfer.done:
                self._ring()
        return transfer

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> MessageTransfer:
        """Begin to receive into a tensor."""
        with self._state:
            link = self._link(peer, tag)
            transfer = MessageTransfer(self, link, tag, tensors[0], sends=False)
            link.receive(transfer)
            if self._polling:
                self._ring()
        return transfer

    def wait(self, transfer: MessageTransfer, seconds: float) -> None:
        """Move messages until one is done.

        Raises:
            RuntimeError: It "timed out".
            ConnectionBroken: Names the rank that is gone.
        """
        deadline = monotonic() + seconds
        with self._state:
            try:
                while not transfer.done:
                    self._progress(transfer, deadline)
            finally:
                # A thread that sleeps has to take over the polling, also if this one raises.
                self._state.notify_all()

    def close(self) -> None:
        """End all connections, once."""
        with self._state:
            if not self._end.alive:
                return
            for link in self._by_number.values():
                link.close()
            self._ring()
            # Descriptors that another thread still polls could be given to other files meanwhile.
            self._state.wait_for(lambda: not self._polling, _SHORT_SECONDS)
            self._end()

    def forget(self) -> None:
        """Close the copy of a forked process: the other ranks must notice when the owner dies."""
        self._end.detach()
        for link in self._by_number.values():
            link.drop()
        for end in (self._bell, self._ringer):
            end.close()

    def _link(self, peer: int, tag: int) -> PeerConnection:
        links = self._links[peer]
        # By the tag, so that both ends of a message use the same interface.
        return links[tag % len(links)]

    def _progress(self, transfer: MessageTransfer, deadline: float) -> None:
        """Move messages, or wait while another thread does."""
        limit = min(deadline, self._check(transfer))
        left = limit - monotonic()
        if left <= 0 and limit == deadline:
            raise RuntimeError("timed out")
        if self._polling:
            self._asleep.append(transfer)
            self._state.wait(max(left, 0.0))
            self._asleep.remove(transfer)
            return
        self._polling = True
        try:
            self._move(max(left, 0.0))
        finally:
            self._polling = False
        if any(other.done or other.link.ended for other in self._asleep):
            self._state.notify_all()

    def _move(self, seconds: float) -> None:
        """Sleep until something comes or may leave, and move it."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        for number, link in self._by_number.items():
            if not link.ended:
                link.set_low_water_mark()
                poll.register(number, link.events)
        self._state.release()
        try:
            # Rounded up: a wait that ended just before its deadline would be repeated in a loop.
            found = poll.poll(int(seconds * 1000) + 1)
        finally:
            self._state.acquire()
        for number, events in found:
            link_ = self._by_number.get(number)
            if link_ is not None:
                link_.handle_events(events)
            else:
                with suppress(BlockingIOError):
                    self._bell.recv(4096)

    def _ring(self) -> None:
        """Wake the thread in poll, because the events to look for have changed."""
        with suppress(BlockingIOError):
            self._ringer.send(b"!")

    def _check(self, transfer: MessageTransfer) -> float:
        """The `monotonic` time at which to give up because another rank is gone.

        Raises:
            ConnectionBroken: The transfer can never be done.
        """
        now = monotonic()
        for link in self._by_number.values():
            if link.ended and not link.parted:
                self._lost.setdefault(link, now)
        # The rank that vanished first is the cause; others may have ended because of it.
        first = min(self._lost, key=self._lost.__getitem__, default=None)
        late = self._lost[first] + _GRACE_SECONDS if first is not None else float("inf")
        if transfer.link.ended or now >= late:
            culprit = transfer.link if first is None else first
            raise ConnectionBroken(culprit.peer, f"It {culprit.ended}.")
        return late


def _close(links: Sequence[PeerConnection], bells: Sequence[socket.socket]) -> None:
    for link in links:
        link.drop()
    for bell in bells:
        bell.close()


def _forget_all() -> None:
    for messages in list(_living):
        messages.forget()


os.register_at_fork(after_in_child=_forget_all)


# Peer discovery: the ranks of a group connect to each other through its store.


# Proof, rank in the group.
_HELLO = struct.Struct("<32sI")
# Calls of strangers that may wait beside those of the group.
_STRANGERS = 128
_TOKEN_BYTES = 32


def connect_peers(
    store: Any, rank: int, ranks: Sequence[int], ways: Sequence[Sequence[str]], seconds: float
) -> list[list[PeerConnection]] | None:
    """For every rank of a group its connections, one for each interface; None: use Gloo's.

    Args:
        rank: The place of this process in the group.
        ranks: The global ranks of the group, for messages about errors.
        ways: For each interface the addresses to try; none: this rank wants no connections.

    Raises:
        Stalled: A rank does not come; names it.
        PeerLost: A rank cannot be reached, or is gone.
    """
    with ExitStack() as stack:
        servers = _listen(stack, ways, len(ranks) + _STRANGERS)
        token = secrets.token_bytes(_TOKEN_BYTES)
        at = [list(server.getsockname()[:2]) for server in servers]
        notice = json.dumps({"at": at, "token": token.hex()})
        store.set(f"{rank}", seal(notice, job_secret(), f"rank {ranks[rank]}'s addresses"))
        deadline = monotonic() + seconds
        notices = [_notice(store, peer, ranks[peer], deadline) for peer in range(len(ranks))]
        if not servers or any(len(found) != len(servers) for found, _ in notices):
            return None
        found: list[list[PeerConnection]] = [[] for _ in ranks]
        try:
            for way, server in enumerate(servers):
                # The kernel completes calls before anyone accepts: no circle waits.
                for peer in range(rank):
                    places, theirs = notices[peer]
                    hello = _HELLO.pack(_proof(theirs, peer, rank), rank)
                    at_peer = places[way]
                    called = _call(server, at_peer, hello, ranks[peer], deadline)
                    found[peer].append(PeerConnection(peer, called))
                _answer_all(server, token, rank, ranks, found, deadline)
        except BaseException:
            for link in chain(*found):
                link.drop()
            raise
    return found


def _listen(stack: ExitStack, ways: Sequence[Sequence[str]], backlog: int) -> list[socket.socket]:
    """A server on each interface; none at all if one of them has no address."""
    servers = []
    for way in ways:
        server = next(filter(None, (_serve(host, backlog) for host in way)), None)
        if server is None:
            return []
        servers.append(stack.enter_context(server))
    return servers


def _serve(host: str, backlog: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError):
        return socket.create_server((host, 0), family=family, backlog=backlog)
    return None


def interface_candidates(interfaces: Sequence[str]) -> list[list[str]]:
    """For each interface the addresses to try; without names those of the machine, as in Gloo."""
    if interfaces:
        return [interface_address(name) for name in interfaces]
    return [[*host_addresses(), "127.0.0.1"]]


def _notice(
    store: Any, peer: int, name: int, deadline: float
) -> tuple[list[tuple[str, int]], bytes]:
    """The addresses and the token that a rank has put into the store."""
    try:
        store.wait([f"{peer}"], timedelta(seconds=max(deadline - monotonic(), 0.001)))
    except RuntimeError as error:
        raise _late({name}) from error
    found = read_object(unseal(store.get(f"{peer}"), job_secret(), f"rank {name}'s addresses"))
    try:
        places = [(str(host), int(port)) for host, port in found["at"]]
        return places, bytes.fromhex(found["token"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(
            f"rank {name} does not say where it listens", where="backend headway", why=f"{error!r}"
        ) from None


def _proof(token: bytes, callee: int, caller: int) -> bytes:
    return sign(job_secret(), "links", token, str(callee), str(caller))


def _call(
    server: socket.socket, at: tuple[str, int], hello: bytes, name: int, deadline: float
) -> socket.socket:
    """A connection to a rank, from the interface on which `server` listens."""
    own, (host, port) = server.getsockname()[0], at
    try:
        left = max(deadline - monotonic(), 0.001)
        link = socket.create_connection((host, port), left, source_address=(own, 0))
        link.sendall(hello)
    except OSError as error:
        raise PeerLost(
            f"no connection to rank {name}",
            where="backend headway",
            why=f"{own} to {host}, port {port}: {error}",
            fix="Name the interfaces that the ranks share (GLOO_SOCKET_IFNAME), or let Gloo's "
            'connections do: headway.register_backend(connections="gloo").',
        ) from error
    return link


def _answer_all(
    server: socket.socket,
    token: bytes,
    rank: int,
    ranks: Sequence[int],
    found: list[list[PeerConnection]],
    deadline: float,
) -> None:
    """Accept the calls of all ranks above that prove who they are."""
    missing = set(range(rank + 1, len(ranks)))
    calls = accept_calls([server], _HELLO.size, deadline)
    while missing and (call := next(calls, None)):
        link, hello = call
        said, peer = _HELLO.unpack(hello)
        if peer in missing and hmac.compare_digest(said, _proof(token, rank, peer)):
            missing.discard(peer)
            found[peer].append(PeerConnection(peer, link))
        else:
            link.close()
    if missing:
        raise _late({ranks[peer] for peer in missing})


def _late(names: set[int]) -> Stalled:
    who = ", ".join(f"rank {name}" for name in sorted(names))
    return Stalled(
        f"{who} did not come to a group of the backend headway",
        fix="All ranks of a group make it, in the same order as their other groups; or allow more "
        "time (the timeout of init_process_group or new_group).",
    )
