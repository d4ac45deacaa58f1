"""The store in which the ranks of several machines meet: only who knows the secret is answered.

torch's TCPStore lets everyone who reaches its port read, change and delete all keys, among them the
addresses of Gloo's ranks. Here rank 0 answers those who know the secret of the job, on connections
whose lines are signed in both directions (`heartbeat_message.SignedLines`); a stranger's connection
ends with its first wrong line, after 10 s, or when more than 256 of them wait. A request is one
line, and so is its answer; a wait is a request that is repeated.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in __all__
    DistNetworkError,
    DistStoreError,
    Store,
)

from headway.channel.job_secret import SECRET, job_secret, sign
from headway.channel.rendezvous import configure_connection, connection_to_drop
from headway.errors import RunError
from headway.run.distributed.heartbeat_message import (
    MOST_BYTES,
    LineError,
    SignedLines,
    number,
)

CONNECT_SECONDS = 5.0
# Rank 0's interpreter may be busy; a rank 0 that is gone is noticed at once.
_ANSWER_SECONDS = 60.0
_CHUNK = 65536
_MOST_STRANGERS = 256
_STRANGER_SECONDS = 10.0
_TICK_SECONDS = 1.0
# What is told instead of an answer to those whose lines are signed with another secret.
_DENIED = b"denied\n"
# Written twice as long, in a line with a key and a signature.
MOST_VALUE_BYTES = MOST_BYTES // 4

Request = Mapping[str, str]


class KeyTable:
    """Keys and values at rank 0; any thread may ask."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def answer(self, request: Request) -> dict[str, str]:
        """What a request gives.

        Raises:
            ValueError: It is none.
            KeyError: It lacks a part.
        """
        key = request["key"]
        with self._lock:
            match request["do"]:
                case "set":
                    self._values[key] = bytes.fromhex(request["value"])
                case "append":
                    self._values[key] = self._values.get(key, b"") + bytes.fromhex(request["value"])
                case "get":
                    found = self._values.get(key)
                    return {} if found is None else {"value": found.hex()}
                case "add":
                    sign_, amount = request["sign"], number(request["amount"])
                    count = int(self._values.get(key, b"0")) + (-amount if sign_ else amount)
                    self._values[key] = str(count).encode()
                    return {"count": str(count)}
                case "compare":
                    return {"value": self._compare(key, request).hex()}
                case "delete":
                    return {"count": str(int(self._values.pop(key, None) is not None))}
                case "size":
                    return {"count": str(len(self._values))}
                case _:
                    raise ValueError(f"no request: {request['do'][:40]!r}")
        return {}

    def _compare(self, key: str, request: Request) -> bytes:
        """As torch's stores do: where there is no value, an expected nothing is met."""
        expected, desired = bytes.fromhex(request["expected"]), bytes.fromhex(request["value"])
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self._values[key] = desired
            return desired
        return expected if found is None else found


class JobStore(Store):
    """torch's interface to the keys at rank 0.

    Args:
        ask: Sends a request there and returns its answer; kept as an attribute.
        seconds: Of `get` and `wait`, where they are not told.
    """

    def __init__(self, ask: Callable[[Request], Mapping[str, str]], seconds: float) -> None:
        super().__init__()
        self.ask = ask
        self._seconds = seconds

    def set(self, key: str, value: str | bytes) -> None:
        self.ask({"do": "set", "key": key, "value": _hex(value)})

    def append(self, key: str, value: str | bytes) -> None:
        self.ask({"do": "append", "key": key, "value": _hex(value)})

    def add(self, key: str, value: int) -> int:
        parts = {"sign": "-" if value < 0 else "", "amount": str(abs(value))}
        return int(self.ask({"do": "add", "key": key, **parts})["count"])

    def get(self, key: str) -> bytes:
        """Waits until there is a value.

        Raises:
            DistStoreError: There is none in time.
            DistNetworkError: Rank 0 is gone.
        """
        self.wait([key])
        return bytes.fromhex(self.ask({"do": "get", "key": key}).get("value", ""))

    def check(self, keys: Sequence[str]) -> bool:
        return all("value" in self.ask({"do": "get", "key": key}) for key in keys)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        parts = {"expected": _hex(expected_value), "value": _hex(desired_value)}
        return bytes.fromhex(self.ask({"do": "compare", "key": key, **parts})["value"])

    def delete_key(self, key: str) -> bool:
        return self.ask({"do": "delete", "key": key})["count"] == "1"

    def num_keys(self) -> int:
        return int(self.ask({"do": "size", "key": ""})["count"])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    # As torch's own code calls them, behind a prefix for instance.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Raises:
            DistStoreError: They have not in time.
            DistNetworkError: Rank 0 is gone.
        """
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline, pause = time.monotonic() + seconds, 0.0005
        for key in keys:
            while not self.check([key]):
                if time.monotonic() > deadline:
                    raise DistStoreError(f"wait timeout after {seconds:g} s, key: {key}")
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)


def _hex(value: str | bytes) -> str:
    raw = value.encode() if isinstance(value, str) else bytes(value)
    if len(raw) > MOST_VALUE_BYTES:
        raise DistStoreError(f"a value of {len(raw)} bytes is too large for the store of a job")
    return raw.hex()


# -- rank 0 ------------------------------------------------------------------------------------


def host_job_store(server: socket.socket, seconds: float) -> JobStore:
    """The store of rank 0, which answers the others at a listening socket as long as it lives."""
    table = KeyTable()
    wake, woken = socket.socketpair()
    service = _Service(server, woken, table, _key())
    thread = threading.Thread(target=service.run, name="headway-store", daemon=True)
    store = JobStore(table.answer, seconds)
    # The thread knows the table and the sockets only: the store can be collected.
    weakref.finalize(store, wake.close)
    _close_in_forks(service, wake)
    thread.start()
    return store


class _Caller:
    """A connection to rank 0, as rank 0 sees it."""

    def __init__(self, link: socket.socket, address: str, key: bytes) -> None:
        self.link, self.address = link, address
        self.begun = time.monotonic()
        self.lines = SignedLines(key, calls=False)
        self.out = self.lines.greeting

    def flush(self) -> None:
        if self.out:
            with suppress(BlockingIOError):
                self.out = self.out[self.link.send(self.out) :]


class _Service:
    """The thread that answers."""

    def __init__(
        self, server: socket.socket, woken: socket.socket, table: KeyTable, key: bytes
    ) -> None:
        self._server, self._woken, self._table, self._key = server, woken, table, key
        self._callers: list[_Caller] = []
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, mask in self._selector.select(_TICK_SECONDS):
                if key.fileobj is self._woken:
                    self._close()
                    return
                if isinstance(key.data, _Caller):
                    self._serve(key.data, mask)
                else:
                    self._accept()
            late = time.monotonic() - _STRANGER_SECONDS
            strangers = [each for each in self._callers if not each.lines.trusted]
            for caller in [each for each in strangers if each.begun < late]:
                self._drop(caller)

    def _accept(self) -> None:
        with suppress(OSError):
            link, address = self._server.accept()
            link.setblocking(False)
            configure_connection(link)
            caller = _Caller(link, str(address[0]), self._key)
            self._callers.append(caller)
            self._selector.register(link, selectors.EVENT_READ, caller)
            self._answer(caller)
        strangers = [each for each in self._callers if not each.lines.trusted]
        if len(strangers) > _MOST_STRANGERS:
            self._drop(connection_to_drop(strangers, [each.address for each in strangers]))

    def _serve(self, caller: _Caller, mask: int) -> None:
        if caller not in self._callers:  # dropped since `select` returned
            return
        try:
            if mask & selectors.EVENT_READ:
                data = caller.link.recv(_CHUNK)
                if not data:
                    self._drop(caller)
                    return
                requests, more = caller.lines.read(data)
                caller.out += more
                for request in requests:
                    caller.out += caller.lines.write(self._table.answer(request))
        except BlockingIOError:
            return
        except LineError:
            with suppress(OSError):
                caller.link.send(_DENIED)
            self._drop(caller)
            return
        except (OSError, ValueError, KeyError):
            self._drop(caller)
            return
        self._answer(caller)

    def _answer(self, caller: _Caller) -> None:
        try:
            caller.flush()
        except OSError:
            self._drop(caller)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.out else 0)
        if self._selector.get_key(caller.link).events != wanted:
            self._selector.modify(caller.link, wanted, caller)

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.link)
        self._callers.remove(caller)
        caller.link.close()

    def _close(self) -> None:
        for caller in self._callers:
            caller.link.close()
        self._selector.close()
        self._server.close()
        self._woken.close()

    def close_copies(self) -> None:
        """In a forked child, which would keep port and connections open."""
        for link in (self._server, self._woken, *(each.link for each in self._callers)):
            with suppress(OSError):
                os.close(link.detach())


def _close_in_forks(service: _Service, wake: socket.socket) -> None:
    # A weak reference, because functions registered here are never removed.
    found = weakref.ref(service)

    def close() -> None:
        with suppress(OSError):
            os.close(wake.detach())
        if (living := found()) is not None:
            living.close_copies()

    os.register_at_fork(after_in_child=close)


# -- the other ranks ---------------------------------------------------------------------------


def call_job_store(host: str, port: int, seconds: float) -> JobStore | None:
    """The store at an address; None where nobody who knows it answers.

    Raises:
        RunError: Its owner has another secret.
    """
    try:
        connection = _StoreConnection(socket.create_connection((host, port), CONNECT_SECONDS))
    except OSError:
        return None
    store = JobStore(connection.ask, seconds)
    weakref.finalize(store, connection.close)
    try:
        store.num_keys()
    except DistNetworkError:
        return None
    return store


class _StoreConnection:
    """A connection to rank 0; one request at a time."""

    def __init__(self, link: socket.socket) -> None:
        configure_connection(link)
        self._link = link
        self._lines = SignedLines(_key(), calls=True)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        link.settimeout(CONNECT_SECONDS)
        self._greeting = self._lines.greeting

    def ask(self, request: Request) -> Mapping[str, str]:
        """Send a request and return its answer.

        Raises:
            DistNetworkError: Rank 0 is gone, or does not answer; the connection is of no more use.
            RunError: It has another secret.
        """
        if os.getpid() != self._owner:  # two processes would mix their lines
            raise DistNetworkError("the store of a job in a forked process")
        with self._lock:
            try:
                self._link.sendall(self._greeting + self._lines.write(request))
                self._greeting = b""
                while True:
                    data = self._link.recv(_CHUNK)
                    if not data:
                        raise DistNetworkError("the store of rank 0 has closed the connection")
                    answers, more = self._lines.read(data)
                    if more:
                        self._link.sendall(more)
                    if answers:
                        self._link.settimeout(_ANSWER_SECONDS)
                        return answers[0]
            except LineError as error:
                self.close()
                if _DENIED.strip() in data:
                    raise RunError(
                        "the store of rank 0 belongs to another job, or has another secret",
                        fix=f"Start all ranks with the same {SECRET}, and see docs/security.md.",
                    ) from None
                raise DistNetworkError(f"no store of a job answers: {error}") from None
            except OSError as error:
                self.close()
                raise DistNetworkError(f"the store of rank 0 does not answer: {error}") from None

    def close(self) -> None:
        """End it; whoever asks afterwards is told that rank 0 is gone."""
        self._link.close()


def _key() -> bytes:
    """Of all connections to the store; the lines of each are signed for its random numbers."""
    return sign(job_secret(), "store")
