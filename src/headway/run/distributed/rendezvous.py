"""Rendezvous: all ranks meet in a fresh store that rank 0 opens.

On one machine the stores are files in the launcher's private directory, which nobody else can read.
For several machines rank 0 answers those who know the secret of the job (`job_store`), at one
address only. The store of torch's agents asks nobody who he is: what is written here is signed.

No key of an earlier attempt is ever trusted. torch's agents keep one store over all restarts of
their workers, so the addresses that a dead attempt left there would be used again (torch 2.13: a
restart fails or hangs). Here the agents' store carries only questions and answers: a rank asks
under a random word, and only a living rank 0 can answer this word with the address of its fresh
store. Without an agent (Slurm, MPI) rank 0 opens the store at the agreed address itself.
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in __all__
    DistNetworkError,
    DistStoreError,
    FileStore,
    Store,
    TCPStore,
)

from headway.channel.job_secret import job_secret, seal, unseal
from headway.channel.rendezvous import interface_address
from headway.documents import parse_json
from headway.errors import Stalled, UsageError
from headway.run.distributed.failure_record import name_ranks
from headway.run.distributed.job_store import CONNECT_SECONDS, call_job_store, host_job_store
from headway.run.distributed.launch_env import LOOPBACK, LaunchEnv

_VERDICT = "headway/verdict"
_PROBE_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
# Calls of strangers may wait beside those of the ranks.
_BACKLOG = 1024
_FIX = "Look for errors of these ranks above; check that all machines can reach each other."


@dataclass(frozen=True, kw_only=True)
class RendezvousResult:
    """The ranks have met.

    Attributes:
        store: The fresh store; rank 0 hosts it.
        attempt: The highest restart count that any rank has received.
        notice: What rank 0 tells the others.
    """

    store: Store
    attempt: int
    notice: str = ""


def join_rendezvous(place: LaunchEnv, seconds: float, notice: str = "") -> RendezvousResult:
    """Wait until all ranks have arrived in one fresh store; collective.

    Args:
        seconds: Longest wait for all ranks together.

    Raises:
        Stalled: Names the ranks that have not arrived.
        UsageError: The agreed port of rank 0 is taken.
    """
    deadline = time.monotonic() + seconds
    if place.rank == 0:
        return _gather(place, seconds, deadline, notice)
    asks = place.agent_store or place.meeting
    found = _invitations(place, deadline) if asks else _encounters(place, deadline)
    for store in found:
        # The store of an old world of rank 0 may close at any request.
        with suppress(DistNetworkError, DistStoreError):
            # A count above one: this process reported here before, so it is such a store.
            if store.add(_key("arrived", place.rank), 1) > 1:
                continue
            _write(store, _key("attempt", place.rank), str(place.attempt))
            return _await_verdict(store, place, seconds, deadline)
    raise _absent([0], place, seconds)


def listen(place: LaunchEnv, port: int = 0, host: str = "") -> tuple[socket.socket, str]:
    """A listening socket of this rank, and the address at which the others reach it.

    It listens at that address only: the loopback where all ranks are on this machine, else the
    named interface, else the end of this machine's route to the master. Where that is not an
    address of this machine (a router or a service stands for it), it listens everywhere.

    Args:
        host: The agreed address, which the others use; "": they are told.

    Raises:
        OSError: The port is taken.
    """
    address = host or _own_address(place)
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        bound = str(found[4][0])
        # A master's name may stand for 127.0.1.1 on the master itself, and for more elsewhere.
        if _is_loopback(bound) and not _is_loopback(address):
            return _listen_everywhere(port), address
        return socket.create_server((bound, port), family=found[0], backlog=_BACKLOG), address
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            return _listen_everywhere(port), address
        raise


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        )
    return socket.create_server(("", port), backlog=_BACKLOG)


def _own_address(place: LaunchEnv) -> str:
    if _on_one_machine(place):
        return LOOPBACK
    named = interface_address(place.interface) if place.interface else []
    return named[0] if named else _reachable_address(place)


def _on_one_machine(place: LaunchEnv) -> bool:
    return place.local_ranks == place.ranks


def _master(place: LaunchEnv) -> str:
    """Where rank 0 opens the store if there is no agent."""
    return LOOPBACK if _on_one_machine(place) and not place.agent_store else place.master_address


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _reachable_address(place: LaunchEnv) -> str:
    """The address at which other ranks reach this one: its end of the route to the master."""
    own = LOOPBACK
    with suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(
            place.master_address, place.master_port or 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:  # UDP: connecting sends nothing
            probe.connect(target)
            own = str(probe.getsockname()[0])
    return place.master_address if _is_loopback(own) else own


# -- rank 0 ------------------------------------------------------------------------------------


def _gather(place: LaunchEnv, seconds: float, deadline: float, notice: str) -> RendezvousResult:
    """Open the fresh store, wait for the others, and announce who is missing, if any."""
    agents = _agent_store(place, deadline) if place.agent_store or place.meeting else None
    store, location = _open_store(place, agreed=agents is None)
    waiting = set(range(1, place.ranks))
    answered: set[str] = set()
    for _ in _polls(deadline):
        if agents is not None:
            # Questions of dead processes are answered as well; nobody reads those answers.
            for rank in waiting:
                word = _read(agents, _key("question", rank))
                if word is not None and word not in answered:
                    _write(agents, _key("answer", word), location)
                    answered.add(word)
        waiting -= {rank for rank in waiting if store.check([_key("attempt", rank)])}
        if not waiting:
            break
    if waiting:
        _write(store, _VERDICT, json.dumps({"missing": sorted(waiting), "attempt": 0}))
        time.sleep(1.0)  # the store ends with this process: let the others read the verdict
        raise _absent(sorted(waiting), place, seconds)
    told = (int(_read(store, _key("attempt", rank)) or 0) for rank in range(1, place.ranks))
    attempt = max([place.attempt, *told])
    verdict = {"missing": [], "attempt": attempt, "notice": notice}
    _write(store, _VERDICT, json.dumps(verdict))
    return RendezvousResult(store=store, attempt=attempt, notice=notice)


def _open_store(place: LaunchEnv, *, agreed: bool) -> tuple[Store, str]:
    """A fresh store, and where the others find it.

    Args:
        agreed: At the master's address and port, which the others know; else they are told.
    """
    if place.meeting is not None:
        path = f"{place.meeting}-{secrets.token_hex(8)}"
        return FileStore(path), path
    server, address = _listen_patiently(place, agreed=agreed)
    port = server.getsockname()[1]
    return host_job_store(server, _PATIENCE_SECONDS), f"{address} {port}"


def open_torch_store(place: LaunchEnv, store: Store) -> Store:
    """A TCPStore of torch's at rank 0, which the others find through the job's; collective.

    For NCCL, whose threads ask their store for as long as they live, without Python.

    Raises:
        Stalled: Rank 0 does not open it in time, or cannot be reached there.
    """
    key = _key("torch", "store")
    if place.rank == 0:
        server, address = listen(place)
        port = server.getsockname()[1]
        made = TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=_PATIENCE_SECONDS),
            # Else torch waits here for all clients, and nobody could say who is missing.
            wait_for_workers=False,
            # Torch's own socket would listen on all interfaces.
            master_listen_fd=server.detach(),
        )
        _write(store, key, f"{address} {port}")
        return made
    for _ in _polls(time.monotonic() + CONNECT_SECONDS):
        text = _read(store, key)
        if text is not None:
            address, _, port_ = text.partition(" ")
            found = _connect_torch(address, int(port_))
            if found is not None:
                return found
    raise _unreachable("torch's store at rank 0 cannot be reached", place)


def _listen_patiently(place: LaunchEnv, *, agreed: bool) -> tuple[socket.socket, str]:
    # The store of an earlier world of this process may need a moment to free the port.
    patience = time.monotonic() + _PATIENCE_SECONDS
    port, host = (place.master_port, _master(place)) if agreed else (0, "")
    while True:
        try:
            return listen(place, port, host)
        except OSError as error:
            if time.monotonic() < patience and error.errno == errno.EADDRINUSE:
                time.sleep(0.1)
                continue
            raise UsageError(
                f"rank 0 cannot listen at {host}:{port}",
                where="rank 0",
                why=str(error),
                fix="Set MASTER_PORT to a free port, and MASTER_ADDR to an address of rank 0.",
            ) from None


# -- the other ranks ---------------------------------------------------------------------------


def _invitations(place: LaunchEnv, deadline: float) -> Iterator[Store]:
    """Ask in the agents' store for the fresh store until rank 0 answers; again if it is lost."""
    agents = _agent_store(place, deadline)
    address = ""
    for _ in _polls(deadline):
        # A new word for each question: an answer to an older one may name a store that is gone.
        word = secrets.token_hex(8)
        _write(agents, _key("question", place.rank), word)
        for _ in _polls(deadline):
            text = _read(agents, _key("answer", word))
            if text is not None:
                break
        else:
            return
        if place.meeting is not None:
            yield FileStore(text)
            continue
        address, port = text.split()
        store = _connect(address, int(port))
        if store is not None:
            yield store
    if address:
        raise _unreachable(f"rank 0 listens at {address}, but cannot be reached there", place)


def _encounters(place: LaunchEnv, deadline: float) -> Iterator[Store]:
    """The store at the agreed address, as soon as somebody listens there."""
    for _ in _polls(deadline):
        store = _connect(_master(place), place.master_port)
        if store is not None:
            yield store


def _connect(host: str, port: int) -> Store | None:
    """The job's store at an address; None where nobody listens."""
    return call_job_store(host, port, _PATIENCE_SECONDS)


def _connect_torch(host: str, port: int) -> TCPStore | None:
    """A client of torch's store at an address; None where nobody listens."""
    # A plain connection first: torch's client would retry for a long time and fill the terminal.
    with suppress(OSError, DistNetworkError, DistStoreError):
        socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
        return TCPStore(
            host,
            port,
            is_master=False,
            timeout=timedelta(seconds=_PATIENCE_SECONDS),
            wait_for_workers=False,
        )
    return None


def _await_verdict(
    store: Store, place: LaunchEnv, seconds: float, deadline: float
) -> RendezvousResult:
    """Wait for rank 0 to announce that all are here.

    Raises:
        DistNetworkError, DistStoreError: The store is gone.
    """
    # Rank 0 gives up first and says who is missing; the others wait a little longer for that.
    for _ in _polls(deadline + 2.0):
        text = _read(store, _VERDICT)
        if text is not None:
            verdict = parse_json(text)
            if verdict["missing"]:
                raise _absent(verdict["missing"], place, seconds)
            return RendezvousResult(
                store=store, attempt=int(verdict["attempt"]), notice=verdict["notice"]
            )
    raise _absent([0], place, seconds)


def _agent_store(place: LaunchEnv, deadline: float) -> Store:
    """The store that all ranks know from their launcher: its file, or its agent's."""
    if place.meeting is not None:
        return FileStore(str(place.meeting))
    # The agent listened before it started its workers: where its port is closed, it has ended.
    ended = time.monotonic() + _PATIENCE_SECONDS
    for _ in _polls(deadline):
        store = _connect_torch(place.master_address, place.master_port)
        if store is not None:
            return store
        if not _is_closed(place.master_address, place.master_port):
            ended = time.monotonic() + _PATIENCE_SECONDS
        elif time.monotonic() >= ended:
            break
    address = f"{place.master_address}:{place.master_port}"
    raise _unreachable(f"nobody answers at {address} (MASTER_ADDR, MASTER_PORT)", place)


def _is_closed(host: str, port: int) -> bool:
    """Whether a machine answers that nobody listens there."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _unreachable(what: str, place: LaunchEnv) -> Stalled:
    return Stalled(
        what,
        where=f"rank {place.rank}",
        fix="Check that this machine can reach the other one, and that its firewall lets it.",
    )


def _write(store: Store, key: str, text: str) -> None:
    store.set(key, seal(text, job_secret(), key))


def _read(store: Store, key: str) -> str | None:
    """What another rank has written, if it has; RunError where it does not belong to this job."""
    # `get` alone would wait, and torch writes a page to the terminal when it gives up.
    return unseal(store.get(key), job_secret(), key) if store.check([key]) else None


def _key(what: str, whose: int | str) -> str:
    return f"headway/{what}/{whose}"


def _polls(deadline: float) -> Iterator[int]:
    """0, 1, 2, ... until the deadline, with pauses of 2 ms that grow to 50 ms; at least once."""
    number, pause = 0, 0.002
    while True:
        yield number
        if time.monotonic() >= deadline:
            return
        time.sleep(pause)
        number, pause = number + 1, min(pause * 1.5, 0.05)


def _absent(missing: Iterable[int], place: LaunchEnv, seconds: float) -> Stalled:
    names = name_ranks(missing)
    return Stalled(
        f"{names} did not arrive",
        where=f"rank {place.rank}",
        why=f"All {place.ranks} ranks should have met within {seconds:g} s.",
        fix=_FIX,
    )
