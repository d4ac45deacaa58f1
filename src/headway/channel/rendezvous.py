"""Rendezvous of the two ends of a channel over a group or a store; options of TCP connections.

A rendezvous exchanges short texts; both ends do the same number of rounds in the same order. Over a
group the n-th channel of one end meets the n-th of the other, because point-to-point messages keep
their order; over a store a counter does the same. Also here: the options of every TCP connection of
this program, and the addresses and namespaces of this machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from headway.channel.job_secret import job_secret, seal, unseal
from headway.documents import parse_json
from headway.errors import PeerLost, RunError, Stalled, UsageError

CALL_SECONDS = 5.0
"""For a connection to be made, and for its first bytes."""
_SIOCGIFADDR = 0x8915
# Seconds of silence before the other machine is probed, seconds between probes, and their number.
_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}


def configure_connection(connection: socket.socket) -> None:
    """No delay, and an error when the other machine vanishes silently."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive_exactly(link: socket.socket, memory: memoryview) -> bool:
    """Receive until some memory is full; False where the connection ended before."""
    while memory:
        count = link.recv_into(memory)
        if not count:
            return False
        memory = memory[count:]
    return True


# Connections that have not sent enough; of more, one is closed.
_MOST_CALLS = 256


Caller = TypeVar("Caller")


def connection_to_drop(callers: Sequence[Caller], addresses: Sequence[str]) -> Caller:
    """Which to close where too many wait: the oldest of the address that most come from.

    Args:
        callers: In the order of their calls, each with its address.
    """
    most = Counter(addresses).most_common(1)[0][0]
    return callers[addresses.index(most)]


def accept_calls(
    servers: Sequence[socket.socket],
    size: int,
    deadline: float,
    ended: threading.Event | None = None,
) -> Iterator[tuple[socket.socket, bytes]]:
    """New connections, each with the first bytes that it has sent; ends at a `monotonic` time.

    Args:
        ended: Once it is set, this ends within a second.

    They are heard side by side: a stranger that connects and says nothing, or too little within
    `CALL_SECONDS`, holds up nobody.
    """
    # In the order of their calls.
    calls: dict[socket.socket, tuple[bytearray, float, str]] = {}
    with selectors.DefaultSelector() as selector:
        for server in servers:
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ)

        def turn_away(link: socket.socket) -> None:
            selector.unregister(link)
            del calls[link]
            link.close()

        try:
            while (left := deadline - time.monotonic()) > 0:
                if ended is not None and ended.is_set():
                    return
                ready = [key.fileobj for key, _ in selector.select(min(left, CALL_SECONDS / 5))]
                now = time.monotonic()
                for late in [link for link, (_, until, _) in calls.items() if now > until]:
                    turn_away(late)
                for link in ready:
                    if link in servers and isinstance(link, socket.socket):
                        with suppress(OSError):
                            called, address = link.accept()
                            called.setblocking(False)
                            calls[called] = bytearray(), now + CALL_SECONDS, str(address[0])
                            selector.register(called, selectors.EVENT_READ)
                    elif isinstance(link, socket.socket) and link in calls:
                        said = calls[link][0]
                        try:
                            came = link.recv(size - len(said))
                        except BlockingIOError:
                            continue
                        except OSError:
                            came = b""
                        said += came
                        if not came:
                            turn_away(link)
                        elif len(said) == size:
                            selector.unregister(link)
                            del calls[link]
                            link.settimeout(CALL_SECONDS)
                            yield link, bytes(said)
                if len(calls) > _MOST_CALLS:
                    turn_away(
                        connection_to_drop([*calls], [where for _, _, where in calls.values()])
                    )
        finally:
            for stranger in calls:
                stranger.close()


def interface_address(interface: str) -> list[str]:
    """The IPv4 address of an interface, if it has one."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # struct ifreq: 16 bytes of name with its NUL, then sockaddr_in with its address at byte 20.
        asked = struct.pack("256s", interface.encode()[:15])
        return [socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24])]
    return []


def namespace_identity(kind: str) -> str:
    """The same text for processes of one machine in one namespace; "" where that is unknown.

    Args:
        kind: As in /proc/self/ns: "pid", "net".
    """
    with suppress(OSError):
        # The numbers of namespaces repeat from machine to machine; the boot id does not.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}"
    return ""


def host_addresses() -> list[str]:
    """The addresses of this machine's name; none where it cannot be looked up."""
    with suppress(OSError):
        own = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return [str(entry[4][0]) for entry in own]
    return []


# Of one text; an address list of a machine with many networks is below 1000.
_BYTES = 8192


class ChannelRendezvous(ABC):
    """A way to exchange texts with another rank."""

    def __init__(self, rank: int, peer: int, seconds: float) -> None:
        if rank == peer:
            raise UsageError(f"a channel of rank {rank} to itself", fix="Name another rank.")
        self.rank = rank
        self.peer = peer
        self.seconds = seconds

    @abstractmethod
    def swap(self, says: dict[str, Any]) -> dict[str, Any]:
        """Tell the other end something and hear what it tells.

        Raises:
            PeerLost: It is gone.
            Stalled: It does not come in time.
        """

    def _sealed(self, says: dict[str, Any]) -> str:
        return seal(json.dumps(says), job_secret(), f"a channel from {self.rank} to {self.peer}")

    def _unsealed(self, text: bytes) -> dict[str, Any]:
        context = f"a channel from {self.peer} to {self.rank}"
        return read_object(unseal(text, job_secret(), context))

    def check_same_request(self, wanted: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Raise a RunError where the two ends do not ask for the same channel."""
        for name, value in wanted.items():
            if theirs.get(name) != value:
                raise RunError(
                    f"the two ends of a channel differ in {name}",
                    where=f"rank {self.rank}",
                    why=f"{value} here, {theirs.get(name)} on rank {self.peer}.",
                    fix="Give both ends the same arguments, and make the channels of two ranks in "
                    "the same order.",
                )

    def late(self, why: str = "") -> Stalled:
        return Stalled(
            f"rank {self.peer} does not open its end of a channel within {self.seconds:g} s",
            where=f"rank {self.rank}",
            why=why,
            fix="Both ranks make the channel, in the same order as their other channels.",
        )


class GroupRendezvous(ChannelRendezvous):
    """Over a process group that carries tensors of host memory.

    Args:
        peer: A global rank.

    Raises:
        UsageError: There is no group, none that carries host memory, or the peer is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None, peer: int, seconds: float) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "a channel without a process group",
                fix="Call torch.distributed.init_process_group first, or give store= and rank=.",
            )
        super().__init__(dist.get_rank(), peer, seconds)
        if "cpu:" not in dist.get_backend_config(group):
            raise UsageError(
                f"a channel over a group of {dist.get_backend(group)}",
                why="Addresses are exchanged in host memory.",
                fix='Give group=dist.new_group(ranks, backend="gloo").',
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # Gloo would wait for it until the time-out of the group.
        if peer not in ranks:
            raise UsageError(
                f"a channel to rank {peer}, which is not in the group",
                where=f"rank {self.rank}",
                why=f"The group has {len(ranks)} ranks, {ranks[0]} to {ranks[-1]}.",
                fix="Name the global rank of another process of the group.",
            )
        self._group = group

    def swap(self, says: dict[str, Any]) -> dict[str, Any]:
        text = self._sealed(says).encode()
        # A receive has to know its size, so texts are padded to a fixed one.
        mine, theirs = torch.zeros(2, _BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        limit = timedelta(seconds=self.seconds)
        try:
            # The receive first, as everywhere over Gloo: its "ready" would wait behind a payload.
            works = [
                dist.irecv(theirs, self.peer, self._group),
                dist.isend(mine, self.peer, self._group),
            ]
            for work in works:
                assert work is not None
                work.wait(limit)
        except RuntimeError as error:
            text_ = str(error).partition("\n")[0]
            # Without the first letter, whose case differs; Gloo's errors have no type of their own.
            if "imed out" in text_ or "imeout" in text_:
                raise self.late(text_) from error
            raise PeerLost(
                f"rank {self.peer} vanished before a channel to it was open",
                where=f"rank {self.rank}",
                why=text_,
                fix="Its own error, or the signal that killed it, is the cause.",
            ) from error
        return self._unsealed(bytes(theirs.tolist()).rstrip(b"\0"))


class StoreRendezvous(ChannelRendezvous):
    """Over a key-value store."""

    def __init__(self, store: Store, rank: int, peer: int, seconds: float) -> None:
        super().__init__(rank, peer, seconds)
        self._store = store
        self._rounds = 0
        pair = f"headway/channel/{min(rank, peer)}-{max(rank, peer)}"
        self._key = f"{pair}/{store.add(f'{pair}/{rank}', 1)}"

    def swap(self, says: dict[str, Any]) -> dict[str, Any]:
        self._rounds += 1
        key = f"{self._key}/{self._rounds}"
        self._store.set(f"{key}/{self.rank}", self._sealed(says))
        try:
            self._store.wait([f"{key}/{self.peer}"], timedelta(seconds=self.seconds))
        except RuntimeError as error:
            raise self.late(str(error).partition("\n")[0]) from error
        return self._unsealed(self._store.get(f"{key}/{self.peer}"))


def read_object(text: str) -> dict[str, Any]:
    """A JSON object of another rank.

    Raises:
        RunError: It is none, or one that is larger than any that is sent.
    """
    found: Any = None
    if len(text) <= _BYTES:
        with suppress(ValueError):
            found = parse_json(text)
    if not isinstance(found, dict):
        raise RunError("the other end of a channel sends no JSON object", why=text[:200])
    return found
