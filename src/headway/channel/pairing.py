"""The connection of the two ends of a channel over TCP: who listens where, and who is let in.

The lower rank listens: on the loopback where both ends are in one network, else at `address=`, on
the named interface, or at its end of the way to the other rank; never on all interfaces. The other
one calls every place that it was told at once, because a machine of its own network may have one of
these addresses, too. Each end proves that it knows the secret of the job and the token of this
pairing: the caller for the place that it has called, so that whoever is called by mistake can do
nothing with it elsewhere; then the listener, to one caller only.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

from headway.channel.gloo_listeners import named_interfaces
from headway.channel.job_secret import SIGNATURE_BYTES, job_secret, sign
from headway.channel.rendezvous import (
    CALL_SECONDS,
    ChannelRendezvous,
    accept_calls,
    host_addresses,
    interface_address,
    namespace_identity,
)
from headway.errors import PeerLost, RunError

Place = tuple[str, int]
"""An address, as it is called, and a port."""
LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 32
# Of a host's name or address.
_MOST_CHARACTERS = 255
_MOST_PLACES = 64


def pair(meeting: ChannelRendezvous, address: str | None) -> socket.socket:
    """A connection with the other end.

    Args:
        address: Of this end, as the other one reaches it; None: see above.

    Raises:
        PeerLost: Nobody answers where the other end says that it listens.
        RunError: This end finds no address to listen at, or the other one says none.
        Stalled: The other end does not call.
    """
    network = namespace_identity("net")
    own = [address] if address else own_addresses()
    # Both ends do the same rounds, whatever they find out.
    theirs = meeting.swap({"network": network, "addresses": own})
    shared = bool(network) and theirs.get("network") == network
    if meeting.rank < meeting.peer:
        link, why = _listen_and_accept(meeting, _chosen(shared, address, own, theirs))
    else:
        places, token = _read_notice(meeting.swap({}))
        link, why = call(places, token, meeting)
        meeting.swap({"why": why})
    if link is None:
        raise PeerLost(
            f"no connection between rank {meeting.rank} and rank {meeting.peer}",
            where="socket channel",
            why=why,
            fix="Give each end address=, as the other one reaches it, and open that way.",
        )
    return link


# -- where -----------------------------------------------------------------------------------------


def own_addresses() -> list[str]:
    """Of the named interfaces; else of all of this machine's, then of its name. No loopback."""
    names = named_interfaces() or [name for _, name in socket.if_nameindex()]
    found = [address for name in names for address in interface_address(name)]
    if not named_interfaces():
        found += host_addresses()
    return [a for a in dict.fromkeys(found) if not a.startswith(("127.", "::1"))]


def _chosen(
    shared: bool, address: str | None, own: Sequence[str], theirs: dict[str, Any]
) -> list[tuple[str, str]]:
    """At which addresses to listen, each with that which the other end is to call."""
    if shared:
        return [(LOOPBACK, LOOPBACK)]
    ends = route_ends(_texts(theirs.get("addresses")))
    if address:
        # A router's address is not this machine's: its packets come in by the way to the other end.
        return [(address, address), *((end, address) for end in ends if end != address)]
    if named_interfaces() and own:
        return [(one, one) for one in own]
    return [(one, one) for one in ends or own or [LOOPBACK]]


def route_ends(addresses: Sequence[str]) -> list[str]:
    """This machine's ends of the ways to some addresses, without those that are its own."""
    found = []
    for address in addresses:
        with suppress(OSError):
            family, kind, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:  # UDP: connecting sends nothing
                probe.connect(target)
                own = str(probe.getsockname()[0])
            # Each machine with containers has the address of their bridge.
            if own != target[0] and not own.startswith(("127.", "::1")):
                found.append(own)
    return list(dict.fromkeys(found))


# -- the end that listens --------------------------------------------------------------------------


def _listen_and_accept(
    meeting: ChannelRendezvous, chosen: Sequence[tuple[str, str]]
) -> tuple[socket.socket | None, str]:
    with _servers(chosen) as servers:
        if not servers:
            tried = ", ".join(address for address, _ in chosen)
            raise RunError(
                f"rank {meeting.rank} cannot listen for its channel to rank {meeting.peer}",
                why=f"None of {tried} is this machine's.",
                fix="Give each end address=, or GLOO_SOCKET_IFNAME the interface to use.",
            )
        token = secrets.token_bytes(_TOKEN_BYTES)
        places = [(called, server.getsockname()[1]) for server, called in servers]
        meeting.swap({"at": [list(place) for place in places], "token": token.hex()})
        # Strangers are turned away from the first moment on: they would fill the queue of calls.
        found: list[socket.socket] = []
        ended = threading.Event()
        listens = [server for server, _ in servers]
        thread = threading.Thread(
            target=lambda: found.extend(accept(listens, places, token, meeting, ended)),
            name=f"accepts rank {meeting.peer}",
            daemon=True,
        )
        thread.start()
        why = "this end has ended"
        try:
            why = str(meeting.swap({}).get("why", ""))
        finally:
            if why:
                ended.set()
            thread.join()
    if why:
        for link in found:
            link.close()
        return None, why
    if not found:
        raise meeting.late()
    return found[0], ""


@contextmanager
def _servers(
    chosen: Sequence[tuple[str, str]],
) -> Iterator[list[tuple[socket.socket, str]]]:
    """A listening socket for each address that is this machine's, with what is to be called."""
    with ExitStack() as stack:
        found = []
        for address, called in chosen[:_MOST_PLACES]:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with suppress(OSError):
                server = socket.create_server((address, 0), family=family)
                found.append((stack.enter_context(server), called))
        yield found


def accept(
    servers: Sequence[socket.socket],
    places: Sequence[Place],
    token: bytes,
    meeting: ChannelRendezvous,
    ended: threading.Event,
) -> Iterator[socket.socket]:
    """The first connection that proves to be the peer's, once it is told so; none in time: none."""
    deadline = time.monotonic() + meeting.seconds
    proofs = [proof(token, meeting.rank, meeting.peer, place) for place in places]
    for link, said in accept_calls(servers, SIGNATURE_BYTES, deadline, ended):
        if any(hmac.compare_digest(said, each) for each in proofs):
            with suppress(OSError):
                link.sendall(_answer(token, said))
                yield link
                return
        link.close()


# -- the end that calls ----------------------------------------------------------------------------


def call(
    places: Sequence[Place], token: bytes, meeting: ChannelRendezvous
) -> tuple[socket.socket | None, str]:
    """The connection to the place whose answer is the other end's; else why there is none."""
    links: dict[socket.socket, Place] = {}
    failed: dict[Place, str] = {}
    found = None
    try:
        for place in places:
            try:
                links[_dial(place)] = place
            except (OSError, UnicodeError) as error:
                failed[place] = str(error)
        found = _first_answer(links, failed, token, meeting)
    finally:
        for link in links:
            if link is not found:
                link.close()
    silent = {place: "nobody answers" for place in links.values() if place not in failed}
    told = [f"{at}, port {port}: {why}" for (at, port), why in (failed | silent).items()]
    return found, "" if found else "; ".join(told) or "there is no address"


def _dial(place: Place) -> socket.socket:
    """Begin to connect."""
    family, kind, _, _, target = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
    link = socket.socket(family, kind)
    link.setblocking(False)
    link.connect_ex(target)
    return link


def _first_answer(
    links: Mapping[socket.socket, Place],
    failed: dict[Place, str],
    token: bytes,
    meeting: ChannelRendezvous,
) -> socket.socket | None:
    """Prove at all places who calls; the link whose other end proves the same first.

    Args:
        failed: The reasons of those that cannot be it are added here.
    """
    heard: dict[socket.socket, bytearray] = {}
    begun = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for link in links:
            selector.register(link, selectors.EVENT_WRITE)
        while selector.get_map():
            # An answer may be late on a busy machine; a connection is the kernel's.
            limit = meeting.seconds if heard else min(CALL_SECONDS, meeting.seconds)
            if (left := begun + limit - time.monotonic()) <= 0:
                break
            for key, _ in selector.select(left):
                link = cast("socket.socket", key.fileobj)
                said = proof(token, meeting.peer, meeting.rank, links[link])
                try:
                    if link not in heard:
                        _raise_failure(link)
                        link.sendall(said)  # fits into the empty buffer of a new connection
                        heard[link] = bytearray()
                        selector.modify(link, selectors.EVENT_READ)
                    elif _hears(link, heard[link], _answer(token, said)):
                        return link
                except BlockingIOError:
                    continue
                except OSError as error:
                    failed[links[link]] = str(error)
                    heard.pop(link, None)
                    selector.unregister(link)
    return None


def _raise_failure(link: socket.socket) -> None:
    """OSError where a connection could not be made."""
    if number := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, os.strerror(number))


def _hears(link: socket.socket, heard: bytearray, expected: bytes) -> bool:
    """Whether all of an answer has come; ConnectionError where it is another or none."""
    came = link.recv(len(expected) - len(heard))
    heard += came
    if came and len(heard) < len(expected):
        return False
    if not hmac.compare_digest(bytes(heard), expected):
        raise ConnectionError("somebody else answers" if heard else "it is closed at once")
    return True


# -- what is said ----------------------------------------------------------------------------------


def proof(token: bytes, listener: int, caller: int, place: Place) -> bytes:
    """What a caller says: that it knows the token and the secret of the job, and calls there."""
    where = f"{place[0]} {place[1]}"
    return sign(job_secret(), "channel", token, str(listener), str(caller), where)


def _answer(token: bytes, said: bytes) -> bytes:
    """What the listener says to the one that it has let in."""
    return sign(job_secret(), "channel answer", token, said)


def _texts(said: Any) -> list[str]:
    return [str(a)[:_MOST_CHARACTERS] for a in said][:_MOST_PLACES] if type(said) is list else []


def _read_notice(notice: dict[str, Any]) -> tuple[list[Place], bytes]:
    """Places and token of the other end.

    Raises:
        RunError: The notice has others than these.
    """
    try:
        places = [(str(a)[:_MOST_CHARACTERS], int(port) & 0xFFFF) for a, port in notice["at"]]
        return places[:_MOST_PLACES], bytes.fromhex(notice["token"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(
            "the other end of a channel does not say where it listens", why=f"{error!r}"
        ) from None
