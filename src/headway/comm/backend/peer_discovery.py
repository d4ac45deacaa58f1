"""Peer discovery: the ranks of a group connect to each other through its store.

Every rank listens on each of its interfaces, publishes the addresses in the store, connects to the
ranks below its own and accepts those above. A caller shows the secret that its callee has put into
the store; whoever does not know it is turned away. All ranks read the same entries: where one has
no address, or another number of interfaces, all of them fall back to Gloo's connections.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import chain
from time import monotonic
from typing import Any

from headway.channel.rendezvous import host_addresses, interface_address
from headway.comm.backend.connection import PeerConnection
from headway.errors import PeerLost, Stalled

_HELLO = struct.Struct("<32sI")
"""Secret, rank in the group."""
_SHORT_SECONDS = 5.0
_STRANGERS = 128
"""Calls of others that may wait beside those of the group."""


def connect_peers(
    store: Any, rank: int, ranks: Sequence[int], ways: Sequence[Sequence[str]], seconds: float
) -> list[list[PeerConnection]] | None:
    """For every rank of a group its connections, one for each interface; None: there is no way.

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
        secret = secrets.token_bytes(32)
        at = [list(server.getsockname()[:2]) for server in servers]
        store.set(f"{rank}", json.dumps({"at": at, "secret": secret.hex()}))
        deadline = monotonic() + seconds
        notices = [_notice(store, peer, ranks[peer], deadline) for peer in range(len(ranks))]
        if not servers or any(len(notice["at"]) != len(servers) for notice in notices):
            return None
        found: list[list[PeerConnection]] = [[] for _ in ranks]
        try:
            for way, server in enumerate(servers):
                for peer in range(rank):
                    hello = _HELLO.pack(bytes.fromhex(notices[peer]["secret"]), rank)
                    at_peer = notices[peer]["at"][way]
                    called = _call(server, at_peer, hello, ranks[peer], deadline)
                    found[peer].append(PeerConnection(peer, called))
                _answer_all(server, secret, rank, ranks, found, deadline)
        except BaseException:
            for link in chain(*found):
                link.drop()
            raise
    return found


def _listen(stack: ExitStack, ways: Sequence[Sequence[str]], backlog: int) -> list[socket.socket]:
    """A server on each interface; none at all where one of them has no address."""
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
    """For each interface the addresses to try, as Gloo chooses them.

    Args:
        interfaces: Names; none: the one that has the address of the machine's name.
    """
    if interfaces:
        return [interface_address(name) for name in interfaces]
    return [[*host_addresses(), "127.0.0.1"]]


def _notice(store: Any, peer: int, name: int, deadline: float) -> dict[str, Any]:
    """What a rank has put into the store."""
    try:
        store.wait([f"{peer}"], timedelta(seconds=max(deadline - monotonic(), 0.001)))
    except RuntimeError as error:
        raise _late({name}) from error
    found: dict[str, Any] = json.loads(store.get(f"{peer}"))
    return found


def _call(
    server: socket.socket, at: Sequence[Any], hello: bytes, name: int, deadline: float
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
    secret: bytes,
    rank: int,
    ranks: Sequence[int],
    found: list[list[PeerConnection]],
    deadline: float,
) -> None:
    """Take the calls of all ranks above; whoever does not know the secret is turned away."""
    missing = set(range(rank + 1, len(ranks)))
    while missing:
        left = deadline - monotonic()
        if left <= 0:
            raise _late({ranks[peer] for peer in missing})
        server.settimeout(left)
        with suppress(OSError):
            link, _ = server.accept()
            link.settimeout(min(_SHORT_SECONDS, left))
            said, peer = _HELLO.unpack(_exactly(link, _HELLO.size))
            if hmac.compare_digest(said, secret) and peer in missing:
                missing.discard(peer)
                found[peer].append(PeerConnection(peer, link))
            else:
                link.close()


def _exactly(link: socket.socket, size: int) -> bytes:
    """So many bytes; zeros where a stranger says less."""
    said = b""
    with suppress(OSError):
        while len(said) < size and (more := link.recv(size - len(said))):
            said += more
    return said.ljust(size, b"\0")


def _late(names: set[int]) -> Stalled:
    who = ", ".join(f"rank {name}" for name in sorted(names))
    return Stalled(
        f"{who} did not come to a group of the backend headway",
        fix="All ranks of a group make it, in the same order as their other groups; or allow more "
        "time (the timeout of init_process_group or new_group).",
    )
