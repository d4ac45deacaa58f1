"""Every rank hears of every other one, whatever their main threads are doing.

A thread of each rank beats once a second on a connection of its own to rank 0, and rank 0 beats
back. Invariant: rank 0 alone judges the others and sends its verdict to all; they judge only rank
0. A closed connection is noticed at once, a cut or frozen one by its silence. Nothing here blocks,
so that a dead network cannot hold the judge up; and a process that stood still itself (a
suspended machine, a debugger on all ranks) judges nobody for it.

Beats are single bytes. Only a rank that has been at the same thing for more than a second says
what, which is what a message about a stall is made of.
"""

from __future__ import annotations

import atexit
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from headway.run.loss import Loss, Spread, failed, gone, silent, spread_of
from headway.run.peer import Identity, Peer, hello, read_identity

PATIENCE_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.25
_STOOD_STILL_SECONDS = 2.0
_TOGETHER_SECONDS = 1.5
"""Ranks that fell silent this shortly after each other belong to one verdict."""
_AFTER_RANK_0_SECONDS = 0.75
"""Where a link is cut in the middle, rank 0, who sees most, is to speak first."""
_CONNECT_SECONDS = 5.0

Said = Callable[[], tuple[str, float, bool]]
"""What a rank is doing, since when (`time.monotonic`), and whether it still prepares."""


@dataclass(frozen=True)
class Listener:
    """Where rank 0 waits for the others.

    Attributes:
        socket: Bound to a free port of all interfaces.
        token: What the ranks of this job know.
    """

    socket: socket.socket
    token: str

    @classmethod
    def open(cls) -> Listener:
        """Listen at a free port."""
        if socket.has_dualstack_ipv6():
            server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", 0))
        server.setblocking(False)
        return cls(server, secrets.token_hex(16))

    @property
    def notice(self) -> str:
        """For the others: port and token."""
        return f"{self.socket.getsockname()[1]} {self.token}"


def connect(host: str, notice: str, own: Identity) -> Peer:
    """The connection of another rank to rank 0.

    Raises:
        OSError: It cannot be reached there.
    """
    port, token = notice.split()
    link = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
    peer = Peer(link, time.monotonic())
    peer.send(hello(own, token))
    return peer


class Heartbeat:
    """The thread of one rank; `start`, then `stop` in the end.

    Args:
        own: This rank.
        listener: Of rank 0.
        hub: Of the others: the connection to rank 0.
        patience: Seconds of silence until a rank is lost.
        said: What this rank is doing.
        on_loss: Called once, in the thread, when somebody is lost.
    """

    def __init__(
        self,
        own: Identity,
        *,
        listener: Listener | None = None,
        hub: Peer | None = None,
        patience: float = PATIENCE_SECONDS,
        said: Said = lambda: ("", time.monotonic(), False),
        on_loss: Callable[[Loss], None] = lambda loss: None,
    ) -> None:
        self.loss: Loss | None = None
        self.lost = threading.Event()
        self._own = own
        self._listener = listener
        self._patience = patience + (_AFTER_RANK_0_SECONDS if listener is None else 0.0)
        self._said = said
        self._on_loss = on_loss
        self._peers: list[Peer] = [] if hub is None else [hub]
        self._states: dict[int, tuple[str, float]] = {}
        self._answered = threading.Event()
        self._question = False
        self._ended = False
        self._farewell: dict[str, Any] | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        if listener is not None:
            self._selector.register(listener.socket, selectors.EVENT_READ)
        for peer in self._peers:
            self._selector.register(peer.link, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="headway-heartbeat", daemon=True)
        _close_in_children(self)

    def start(self) -> None:
        """Begin to beat."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self, failure: str | None = None) -> None:
        """End the thread; the others hear a goodbye, or with `failure` why this rank fails.

        Args:
            failure: One line about this rank's own error.
        """
        if self._ended or (failure is not None and self.loss is not None):
            return
        self._farewell = {"bye": 1} if failure is None else {"failed": failure}
        self._ended = True
        self.beat_now()
        atexit.unregister(self.stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_BEAT_SECONDS)

    def beat_now(self) -> None:
        """Have the thread say at once what this rank does, and not at its next second."""
        with suppress(OSError):
            self._wake.send(b"\0")

    def states(self, seconds: float = 1.0) -> dict[int, tuple[str, float]]:
        """What the ranks do and for how many seconds; "" for those that move on.

        Args:
            seconds: Longest wait for rank 0, which knows.
        """
        if self._listener is None:
            self._answered.clear()
            self._question = True
            self.beat_now()
            self._answered.wait(seconds)
            return dict(self._states)
        return self._known_states(time.monotonic())

    def close_copies(self) -> None:
        """In a forked child: it must not hold the connections open when this rank dies."""
        sockets = [self._wake, self._woken, *(peer.link for peer in list(self._peers))]
        if self._listener is not None:
            sockets.append(self._listener.socket)
        for copy in sockets:
            with suppress(OSError):
                os.close(copy.detach())

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        last = beat = time.monotonic()
        while not self._ended and self.loss is None:
            ready = self._selector.select(_TICK_SECONDS)
            now = time.monotonic()
            for key, _ in ready:
                self._take(key, now)
            if now - last > _STOOD_STILL_SECONDS:
                for peer in self._peers:
                    peer.forgive(now)
            last = now
            if now >= beat:
                self._beat(now)
                beat = now + _BEAT_SECONDS
            if self.loss is None:
                self._judge(now)
        if self.loss is None:
            self._say_goodbye()
        else:
            self._on_loss(self.loss)
        self._close()

    def _beat(self, now: float) -> None:
        text, since, preparing = self._said()
        long = text and now - since > _BEAT_SECONDS
        facts: dict[str, Any] = {"doing": text, "seconds": now - since} if long else {}
        if preparing:
            facts["preparing"] = True
        for peer in self._partners():
            peer.send(facts or None)

    def _take(self, key: selectors.SelectorKey, now: float) -> None:
        """Something is ready: a word to the thread, a new connection, or a message."""
        if key.fileobj is self._woken:
            with suppress(BlockingIOError):
                self._woken.recv(64)
            self._beat(now)
            if self._question:
                self._question = False
                for peer in self._peers:
                    peer.send({"ask": 1})
        elif isinstance(key.data, Peer):
            self._hear(key.data, now)
        else:
            self._welcome(now)

    def _welcome(self, now: float) -> None:
        assert self._listener is not None
        with suppress(OSError):
            link, _ = self._listener.socket.accept()
            peer = Peer(link, now)
            self._peers.append(peer)
            self._selector.register(link, selectors.EVENT_READ, peer)

    def _hear(self, peer: Peer, now: float) -> None:
        messages = peer.receive(now)
        if messages is None:
            if peer.identity is not None and not peer.left:
                # A frozen process that somebody else has just given up and killed was silent.
                quiet = now - peer.heard > max(self._patience - _TOGETHER_SECONDS, _BEAT_SECONDS)
                loss = silent([peer], self._own, now, self._spread()) if quiet else None
                self._lose(loss or gone(peer, self._own, self._spread()))
            self._drop(peer)
            return
        for message in messages:
            if peer.identity is None and not self._introduced(peer, message):
                return
            self._obey(peer, message, now)

    def _introduced(self, peer: Peer, message: dict[str, Any]) -> bool:
        """Whether a connection says who it is; a stranger is turned away."""
        known = self._listener is None or secrets.compare_digest(
            str(message.get("token")), self._listener.token
        )
        peer.identity = read_identity(message) if known else None
        if peer.identity is None:
            self._drop(peer)
        elif self._listener is not None:
            peer.send({"hello": asdict(self._own)})
        return peer.identity is not None

    def _obey(self, peer: Peer, message: dict[str, Any], now: float) -> None:
        if "verdict" in message:
            with suppress(KeyError, TypeError, ValueError):
                self._lose(Loss.heard(message["verdict"]))
        elif "failed" in message:
            assert peer.identity is not None
            self._lose(failed(peer.identity, str(message["failed"]), self._spread()))
        elif "bye" in message:
            peer.left = True
        elif "ask" in message:
            states = {str(rank): state for rank, state in self._known_states(now).items()}
            peer.send({"states": states})
        elif "states" in message:
            self._states = {int(rank): (s[0], s[1]) for rank, s in message["states"].items()}
            self._answered.set()
        elif "hello" not in message:
            peer.take_beat(message, now)

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.link)
        self._peers.remove(peer)
        peer.link.close()

    # -- judging -----------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        for peer in self._peers:
            peer.flush()
        machine = self._own.machine
        if not any(peer.overdue(now, self._patience, machine) for peer in self._peers):
            return
        shorter = max(self._patience - _TOGETHER_SECONDS, 0.0)
        late = [peer for peer in self._peers if peer.overdue(now, shorter, machine)]
        self._lose(silent(late, self._own, now, self._spread()))

    def _lose(self, loss: Loss) -> None:
        """The first loss counts; rank 0 tells it to all, also to those that are given up."""
        if self.loss is not None:
            return
        self.loss = loss
        if self._listener is not None:
            for peer in self._partners():
                peer.send({"verdict": loss.message()})
        self.lost.set()

    def _say_goodbye(self) -> None:
        if self._listener is not None and self._farewell and "failed" in self._farewell:
            text = self._farewell["failed"]
            loss = failed(self._own, text, self._spread())
            self._farewell = {"verdict": loss.message()}
        for peer in self._partners():
            peer.send(self._farewell)

    def _close(self) -> None:
        for peer in self._peers:
            peer.link.close()
        self._peers.clear()
        self._selector.close()
        self._wake.close()
        self._woken.close()
        if self._listener is not None:
            self._listener.socket.close()

    def _partners(self) -> list[Peer]:
        """Those to talk to: everybody who has said who it is, and rank 0 in any case."""
        return [p for p in self._peers if p.identity is not None or self._listener is None]

    def _spread(self) -> Spread:
        known = [peer.identity for peer in self._peers if peer.identity is not None]
        return spread_of([self._own, *known])

    def _known_states(self, now: float) -> dict[int, tuple[str, float]]:
        text, since, _ = self._said()
        states = {self._own.rank: (text, now - since)}
        for peer in list(self._peers):
            if peer.identity is not None:
                states[peer.identity.rank] = (peer.doing[0], now - peer.doing[1])
        return states


def _close_in_children(heartbeat: Heartbeat) -> None:
    """Data-loading children are forked: with a copy of the connection they would hide a death."""
    reference = weakref.ref(heartbeat)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close_copies()

    os.register_at_fork(after_in_child=close)
