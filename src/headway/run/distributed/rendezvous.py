"""Rendezvous: all ranks meet in a fresh store that rank 0 opens.

No key of an earlier attempt is ever trusted. torch's agents keep one store over all restarts of
their workers, so the addresses that a dead attempt left there would be used again (torch 2.13: a
restart fails or hangs). Here the agents' store carries only questions and answers: a rank asks
under a random word, and only a living rank 0 can answer this word with the address of its fresh
store. Without an agent (Slurm, MPI) rank 0 opens the store at the agreed address itself.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from headway.errors import Stalled, UsageError
from headway.run.distributed.failure_record import name_ranks
from headway.run.distributed.launch_env import LaunchEnv

_VERDICT = "headway/verdict"
_PROBE_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
_FIX = "Look for errors of these ranks above; check that all machines can reach each other."


@dataclass(frozen=True, kw_only=True)
class RendezvousResult:
    """The ranks have met.

    Attributes:
        store: The fresh store; rank 0 hosts it.
        attempt: The highest restart count that any rank has received.
    """

    store: TCPStore
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
    found = _invitations(place, deadline) if place.agent_store else _encounters(place, deadline)
    for store in found:
        # A count above one: this process reported here before, so it is the store of an old world.
        if store.add(_key("arrived", place.rank), 1) > 1:
            continue
        store.set(_key("attempt", place.rank), str(place.attempt))
        meeting = _await_verdict(store, place, seconds, deadline)
        if meeting is not None:
            return meeting
    raise _absent([0], place, seconds)


def reachable_address(place: LaunchEnv) -> str:
    """The address at which other ranks reach this one: its end of the route to the master."""
    family, kind, _, _, target = socket.getaddrinfo(
        place.master_address, place.master_port or 1, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:  # UDP: connecting sends nothing
        probe.connect(target)
        own = str(probe.getsockname()[0])
    # The host name of the master may stand for 127.0.1.1 on the master itself: other machines must
    # use the name then.
    loopback = own.startswith("127.") or own == "::1"
    return place.master_address if loopback and place.local_ranks < place.ranks else own


# -- rank 0 ------------------------------------------------------------------------------------


def _gather(place: LaunchEnv, seconds: float, deadline: float, notice: str) -> RendezvousResult:
    """Open the fresh store, wait for the others, and announce who is missing, if any."""
    if place.agent_store:
        address = reachable_address(place)
        store = _host(address, 0)
        agents = _agent_store(place, deadline)
    else:
        address = place.master_address
        store, agents = _host(address, place.master_port), None
    waiting = set(range(1, place.ranks))
    answered: set[str] = set()
    for _ in _polls(deadline):
        if agents is not None:
            # Questions of dead processes are answered as well; nobody reads those answers.
            for rank in waiting:
                word = _read(agents, _key("question", rank))
                if word is not None and word not in answered:
                    agents.set(_key("answer", word), f"{address} {store.port}")
                    answered.add(word)
        waiting -= {rank for rank in waiting if store.check([_key("attempt", rank)])}
        if not waiting:
            break
    if waiting:
        store.set(_VERDICT, json.dumps({"missing": sorted(waiting), "attempt": 0}))
        time.sleep(1.0)  # the store ends with this process: let the others read the verdict
        raise _absent(sorted(waiting), place, seconds)
    told = (int(store.get(_key("attempt", rank))) for rank in range(1, place.ranks))
    attempt = max([place.attempt, *told])
    store.set(_VERDICT, json.dumps({"missing": [], "attempt": attempt, "notice": notice}))
    return RendezvousResult(store=store, attempt=attempt, notice=notice)


def _host(address: str, port: int) -> TCPStore:
    # The store of an earlier world of this process may need a moment to free the port.
    patience = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return TCPStore(
                address,
                port,
                is_master=True,
                timeout=timedelta(seconds=_PATIENCE_SECONDS),
                # Else torch waits here for all clients, and nobody could say who is missing.
                wait_for_workers=False,
            )
        except DistNetworkError as error:
            if time.monotonic() < patience and "EADDRINUSE" in str(error):
                time.sleep(0.1)
                continue
            raise UsageError(
                f"rank 0 cannot listen at {address}:{port}",
                where="rank 0",
                why=str(error).splitlines()[0],
                fix="Set MASTER_PORT to a free port, and MASTER_ADDR to an address of rank 0.",
            ) from None


# -- the other ranks ---------------------------------------------------------------------------


def _invitations(place: LaunchEnv, deadline: float) -> Iterator[TCPStore]:
    """Ask in the agents' store for the fresh store until rank 0 answers; again if it is lost."""
    agents = _agent_store(place, deadline)
    address = ""
    for _ in _polls(deadline):
        # A new word for each question: an answer to an older one may name a store that is gone.
        word = secrets.token_hex(8)
        agents.set(_key("question", place.rank), word)
        for _ in _polls(deadline):
            text = _read(agents, _key("answer", word))
            if text is not None:
                break
        else:
            return
        address, port = text.split()
        store = _connect(address, int(port))
        if store is not None:
            yield store
    if address:
        raise _unreachable(f"rank 0 listens at {address}, but cannot be reached there", place)


def _encounters(place: LaunchEnv, deadline: float) -> Iterator[TCPStore]:
    """The store at the agreed address, as soon as somebody listens there."""
    for _ in _polls(deadline):
        store = _connect(place.master_address, place.master_port)
        if store is not None:
            yield store


def _connect(host: str, port: int) -> TCPStore | None:
    """A client of the store at an address; None where nobody listens."""
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
    store: TCPStore, place: LaunchEnv, seconds: float, deadline: float
) -> RendezvousResult | None:
    """Wait for rank 0 to announce that all are here; None: the store is gone."""
    # Rank 0 gives up first and says who is missing; the others wait a little longer for that.
    for _ in _polls(deadline + 2.0):
        try:
            text = _read(store, _VERDICT)
        except (DistNetworkError, DistStoreError):
            return None
        if text is not None:
            verdict = json.loads(text)
            if verdict["missing"]:
                raise _absent(verdict["missing"], place, seconds)
            return RendezvousResult(
                store=store, attempt=int(verdict["attempt"]), notice=verdict["notice"]
            )
    raise _absent([0], place, seconds)


def _agent_store(place: LaunchEnv, deadline: float) -> TCPStore:
    """A client of the store that the launching agent keeps."""
    for store in _encounters(place, deadline):
        return store
    address = f"{place.master_address}:{place.master_port}"
    raise _unreachable(f"nobody answers at {address} (MASTER_ADDR, MASTER_PORT)", place)


def _unreachable(what: str, place: LaunchEnv) -> Stalled:
    return Stalled(
        what,
        where=f"rank {place.rank}",
        fix="Check that this machine can reach the other one, and that its firewall lets it.",
    )


def _read(store: Store, key: str) -> str | None:
    # `get` alone would wait, and torch writes a page to the terminal when it gives up.
    return store.get(key).decode() if store.check([key]) else None


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
