"""The star of connections between rank 0 and all others, and how the ranks meet to make it.

A message is a JSON text behind its length. Nothing is sent to or taken from a stranger: the first
bytes of a connection prove that the caller has read the token that rank 0 put into the store.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import DistStoreError

from headway.channel.facts import broadcast_facts, gather_facts
from headway.channel.job_secret import job_secret, seal, sign, unseal
from headway.channel.rendezvous import accept_calls, configure_connection
from headway.documents import parse_json
from headway.errors import TIMEOUT_SECONDS, RunError, Stalled
from headway.run.distributed.failure_record import name_ranks
from headway.run.distributed.job_store import call_job_store, host_job_store
from headway.run.distributed.launch_env import LaunchEnv, machine_identity
from headway.run.distributed.rendezvous import join_rendezvous, listen

_LENGTH = struct.Struct("<I")
# Proof, rank.
_HELLO = struct.Struct("<32sI")
_MOST_BYTES = 1 << 28
_CHUNK = 1 << 16
_STORE_SECONDS = 5.0
_TOKEN_BYTES = 32
# The last messages of a connection that ends are read for so long.
_FAREWELL_SECONDS = 5.0


class MessageConnection:
    """Messages on one TCP connection; for one thread."""

    def __init__(self, link: socket.socket) -> None:
        configure_connection(link)
        link.setblocking(False)
        self._link = link
        self._inbox = bytearray()
        self.ended = False
        _open.add(self)

    def fileno(self) -> int:
        """For a selector."""
        return self._link.fileno()

    def send(self, message: Any) -> None:
        """Send a message; one to an end that is gone is lost, and `receive` notices it."""
        text = json.dumps(message, separators=(",", ":")).encode()
        rest = memoryview(_LENGTH.pack(len(text)) + text)
        while rest and not self.ended:
            try:
                rest = rest[self._link.send(rest) :]
            except BlockingIOError:
                # What comes meanwhile is read: else two ends with full buffers wait for each other.
                moves = select.select([self._link], [self._link], [], TIMEOUT_SECONDS)
                if not (moves[0] or moves[1]):  # the other end is stopped
                    self.ended = True
                self._fill()
            except OSError:
                self.ended = True

    def receive(self, most: int = sys.maxsize) -> list[Any]:
        """The messages that are complete, or the first `most` of them; does not wait.

        Raises:
            RunError: The other end sends no messages.
        """
        self._fill()
        found: list[Any] = []
        while len(self._inbox) >= _LENGTH.size and len(found) < most:
            (length,) = _LENGTH.unpack_from(self._inbox)
            if length > _MOST_BYTES:
                raise RunError(f"a message of {length} bytes is announced to this rank")
            if len(self._inbox) < _LENGTH.size + length:
                break
            text = bytes(self._inbox[_LENGTH.size : _LENGTH.size + length])
            del self._inbox[: _LENGTH.size + length]
            found.append(parse_json(text))
        return found

    def part(self) -> None:
        """Say that nothing more will be sent, wait for the other end to say so, and close."""
        with suppress(OSError):
            # A connection that is closed with unread data is reset, and drops what it has sent.
            self._link.shutdown(socket.SHUT_WR)
            self._link.settimeout(_FAREWELL_SECONDS)
            while self._link.recv(_CHUNK):
                pass
        self.close()

    def close(self) -> None:
        """End the connection at once."""
        self.ended = True
        self._link.close()

    def _fill(self) -> None:
        while not self.ended:
            try:
                data = self._link.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._inbox += data
            self.ended = not data


_open: weakref.WeakSet[MessageConnection] = weakref.WeakSet()


def _close_in_fork() -> None:
    """A copy of the process (a worker of a `DataLoader`) must not keep connections open."""
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_fork)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """All ranks have met.

    Attributes:
        place: Of this process; its rank and number of ranks hold.
        store: In which groups meet; None: this process is alone.
        others: Of rank 0: the connection of each other rank; elsewhere that of rank 0.
        nodes: Of each rank, the name of its machine.
        newcomers: Whether some rank has never been in a session before.
    """

    place: LaunchEnv
    store: Any = None
    others: dict[int, MessageConnection]
    nodes: tuple[str, ...]
    newcomers: bool
    token: bytes


def meet(
    place: LaunchEnv,
    seconds: float,
    store: Any = None,
    over: threading.Event | None = None,
    *,
    newcomer: bool = True,
) -> Meeting:
    """Meet the other ranks; collective.

    Where the program has initialised torch.distributed, its default group says who they are and
    carries the first address; it is not used otherwise. Else the launcher's variables say so.

    Args:
        seconds: Longest wait for all ranks together.
        store: In which the ranks of an elastic job meet.
        over: Set when some of them will not come, because their world is over.
        newcomer: Whether this process has never been in a session.

    Raises:
        Stalled: Names the ranks that do not come.
        UsageError: The agreed port of rank 0 is taken.
    """
    over = over or threading.Event()
    if store is None and dist.is_available() and dist.is_initialized():
        place, store = _meet_in_default_group(place)
    elif store is None and place.ranks > 1:
        store = join_rendezvous(place, seconds).store
    if place.ranks == 1:
        return Meeting(place=place, others={}, nodes=(place.node,), newcomers=newcomer, token=b"")
    deadline = time.monotonic() + seconds
    # By mpirun's variables alone the machines cannot be told apart.
    node = socket.gethostname() if place.launcher == "mpi" else place.node
    own = _Arrival(node, newcomer)
    if place.rank == 0:
        return _gather(place, store, own, deadline, over)
    return _join(place, store, own, deadline, over)


class _Arrival(NamedTuple):
    """What each rank says of itself to rank 0, which tells all."""

    node: str
    newcomer: bool


def _meet_in_default_group(place: LaunchEnv) -> tuple[LaunchEnv, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if (place.rank, place.ranks) != (rank, ranks):
        # The program has made its group by other means than the launcher's variables.
        machines = gather_facts(machine_identity() or socket.gethostname())
        here = [other for other, machine in enumerate(machines) if machine == machines[rank]]
        place = replace(
            place,
            rank=rank,
            ranks=ranks,
            local_rank=here.index(rank),
            local_ranks=len(here),
            node_rank=list(dict.fromkeys(machines)).index(machines[rank]),
        )
    if ranks == 1:
        return place, None
    if rank > 0:
        address, _, port = str(broadcast_facts("")).rpartition(" ")
        store = call_job_store(address, int(port), _STORE_SECONDS)
        if store is None:
            raise Stalled(
                f"rank 0 listens at {address} {port}, but cannot be reached there",
                where=f"rank {rank}",
                fix="Check that this machine can reach the other one.",
            )
        return place, store
    server, address = listen(place)
    port_ = server.getsockname()[1]
    store = host_job_store(server, _STORE_SECONDS)
    broadcast_facts(f"{address} {port_}")
    return place, store


def _gather(
    place: LaunchEnv, store: Any, own: _Arrival, deadline: float, over: threading.Event
) -> Meeting:
    """Accept the calls of all other ranks, and tell them who is where."""
    server, address = listen(place)
    with server:
        token = secrets.token_bytes(_TOKEN_BYTES)
        notice = f"{address} {server.getsockname()[1]} {token.hex()}"
        store.set("horovod/address", seal(notice, job_secret(), "rank 0's address"))
        found: dict[int, MessageConnection] = {}
        calls = accept_calls([server], _HELLO.size, deadline, over)
        while len(found) < place.ranks - 1 and (call := next(calls, None)):
            link, hello = call
            said, rank = _HELLO.unpack(hello)
            new = 0 < rank < place.ranks and rank not in found
            if new and hmac.compare_digest(said, _proof(token, rank)):
                found[rank] = MessageConnection(link)
            else:
                link.close()
    arrivals = {0: own}
    while len(arrivals) < place.ranks and time.monotonic() < deadline and not over.is_set():
        waiting = [rank for rank in found if rank not in arrivals]
        if not waiting:
            break
        select.select([found[rank] for rank in waiting], [], [], 1.0)
        arrivals |= {
            rank: _Arrival(*said[0]) for rank in waiting if (said := found[rank].receive())
        }
    if missing := set(range(place.ranks)) - set(arrivals):
        raise Stalled(f"{name_ranks(missing)} did not come to hvd.init()", where="rank 0")
    told = [arrivals[rank] for rank in range(place.ranks)]
    for connection in found.values():
        connection.send(told)
    return _meeting(place, store, found, told, token)


def _join(
    place: LaunchEnv, store: Any, own: _Arrival, deadline: float, over: threading.Event
) -> Meeting:
    where = f"rank {place.rank}"
    if not _await_key(store, "horovod/address", deadline, over):
        raise Stalled("rank 0 did not come to hvd.init()", where=where)
    notice = unseal(store.get("horovod/address"), job_secret(), "rank 0's address")
    address, port, secret = notice.split(" ")
    token = bytes.fromhex(secret)
    link = socket.create_connection((address, int(port)), max(deadline - time.monotonic(), 0.1))
    link.sendall(_HELLO.pack(_proof(token, place.rank), place.rank))
    connection = MessageConnection(link)
    connection.send(own)
    while time.monotonic() < deadline and not (connection.ended or over.is_set()):
        select.select([connection], [], [], 1.0)
        if told := connection.receive(1):
            arrivals = [_Arrival(*one) for one in told[0]]
            return _meeting(place, store, {0: connection}, arrivals, token)
    raise Stalled("some rank did not come to hvd.init()", where=where)


def _meeting(
    place: LaunchEnv,
    store: Any,
    others: dict[int, MessageConnection],
    arrivals: Sequence[_Arrival],
    token: bytes,
) -> Meeting:
    return Meeting(
        place=place,
        store=store,
        others=others,
        nodes=tuple(arrival.node for arrival in arrivals),
        newcomers=any(arrival.newcomer for arrival in arrivals),
        token=token,
    )


def _await_key(store: Any, key: str, deadline: float, over: threading.Event) -> bool:
    """Wait until there is a value; whether there is."""
    while (left := deadline - time.monotonic()) > 0 and not over.is_set():
        try:
            store.wait([key], timedelta(seconds=min(left, 1.0)))
        except DistStoreError:
            continue
        except RuntimeError:  # rank 0 is gone, and the store with it
            return False
        return True
    return False


def _proof(token: bytes, rank: int) -> bytes:
    return sign(job_secret(), "horovod", token, str(rank))
