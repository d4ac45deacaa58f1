"""Heartbeat: detects a lost rank while main threads compute, and says which one it was and why.

A thread of each rank sends a heartbeat to rank 0 once a second on a connection of its own, and rank
0 answers. Rank 0 alone declares others lost and sends its verdict to all; they watch only rank 0.
Heartbeats are empty messages; a rank that has been doing one thing for more than a second also says
what it is doing, for messages about a stall. All messages are signed (`heartbeat_message`), so that
nobody outside of the job can end it or keep a lost rank alive.

`HeartbeatConnection` distinguishes a cut network from a frozen process: the other machine's kernel
acknowledges what is sent as long as it can be reached (TCP_INFO), and this machine's kernel knows
what a process on it does (/proc). Both are evidence only; other systems have silence alone.

`RankFailure` is the verdict, given once for the whole job and sent to all. One rank reports it to
the user; where rank 0 is lost, one on each machine.
"""

from __future__ import annotations

import atexit
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from headway.channel.job_secret import job_secret, sign
from headway.channel.rendezvous import connection_to_drop
from headway.errors import HeadwayError, PeerLost, Stalled
from headway.run.distributed.failure_record import mark_as_job_error, name_ranks
from headway.run.distributed.heartbeat_message import LineError, SignedLines, clip, number, seconds
from headway.run.distributed.launch_env import (
    HEARTBEAT_TIMEOUT_SECONDS,
    LaunchEnv,
    machine_identity,
)

_CHUNK = 65536
# Offsets of tcpi_unacked and tcpi_retransmits in Linux's struct tcp_info (linux/tcp.h).
_UNACKED, _RETRANSMITS = 24, 2
# Below this silence /proc and TCP_INFO are not even read.
_SUSPICIOUS_SECONDS = 2.0
# Code may hold Python's lock (a large pickle, a compiler), which stops this thread, too.
_LENIENCE = 10.0
_BUSY_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process of the job, as the others know it.

    Attributes:
        host: Name of its machine, as the launcher calls it, or else the machine itself.
        machine: The same text for all processes that can see each other in /proc; "" elsewhere.
        started: Start time in the kernel's clock ticks, because process ids are used again.
    """

    rank: int
    local_rank: int
    node: int
    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def here(cls, place: LaunchEnv) -> ProcessIdentity:
        """The identity of this process."""
        return cls(
            rank=place.rank,
            local_rank=place.local_rank,
            node=place.node_rank,
            host=place.node_name or socket.gethostname(),
            machine=machine_identity(),
            pid=os.getpid(),
            started=_facts(os.getpid())[2],
        )

    @classmethod
    def from_message(cls, message: Mapping[str, str]) -> ProcessIdentity:
        """The sender of a hello, which has all attributes.

        Raises:
            ValueError: The message is none.
        """
        try:
            whole = {name: number(message[name]) for name in ("rank", "local_rank", "node", "pid")}
            texts = {name: message[name] for name in ("host", "machine", "started")}
        except KeyError as error:
            raise ValueError(f"no {error} in a hello") from None
        return cls(**whole, **texts)  # type: ignore[arg-type]


class HeartbeatConnection:
    """A connection to another rank; only the heartbeat's thread uses it.

    Attributes:
        identity: Who it is; None until it has said so.
        address: From which it has called; "" where this end called.
        begun: When the connection was made, in `time.monotonic` seconds.
        heard: When a message last arrived from it.
        doing: What it has done for more than a second, and since when; "" while it progresses.
        preparing: It has not begun its first step.
        left: It said goodbye: no more heartbeats are expected.
    """

    def __init__(
        self,
        link: socket.socket,
        now: float,
        key: bytes,
        *,
        calls: bool = False,
        address: str = "",
    ) -> None:
        # Nothing here may block: a dead network must not stop the thread that detects it.
        link.setblocking(False)
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link = link
        self.address = address
        self.identity: ProcessIdentity | None = None
        self.begun = self.heard = now
        self.doing: tuple[str, float] = ("", now)
        self.preparing = True
        self.left = False
        self._stopped = False
        self._lines = SignedLines(key, calls=calls)
        self._out = self._lines.greeting
        self._cpu: tuple[float, float] | None = None
        self.flush()

    def send(self, message: Mapping[str, object] | None = None) -> None:
        """Send a message; without one, an empty heartbeat."""
        self._out += self._lines.write(message or {})
        self.flush()

    @property
    def greeted(self) -> bool:
        """Whether what is sent can leave: the other end has said its random number."""
        return self._lines.greeted

    def flush(self) -> None:
        """Send what the socket's buffer had no room for."""
        if self._out:
            with suppress(OSError):
                self._out = self._out[self.link.send(self._out) :]

    def receive(self, now: float) -> list[dict[str, str]] | None:
        """The messages that have come (a heartbeat is empty); None: closed, or a stranger's."""
        try:
            data = self.link.recv(_CHUNK)
            messages, answer = self._lines.read(data)
        except BlockingIOError:
            return []
        except (OSError, LineError):
            return None
        if not data:
            return None
        self._out += answer
        self.flush()
        # Only what is signed counts as a sign of life.
        if messages:
            self.restart_timer(now)
        return messages

    def take_beat(self, message: Mapping[str, str], now: float) -> None:
        """Note what the rank is doing, and for how long; nothing while it progresses."""
        self.preparing = "preparing" in message
        try:
            ago = seconds(message.get("seconds", "0"))
        except ValueError:
            ago = 0.0
        self.doing = (message.get("doing", ""), now - ago)

    def restart_timer(self, now: float) -> None:
        """Measure silence from now on."""
        self.heard, self._cpu, self._stopped = now, None, False

    def overdue(self, now: float, patience: float, machine: str) -> bool:
        """Whether the rank has been silent for too long.

        Args:
            now: `time.monotonic` seconds.
            patience: Seconds of silence that are allowed. A process that prepares (reads data,
                builds a model) or computes gets ten times as much while its machine answers.
        """
        silent = now - self.heard
        if self.left or self.identity is None or silent < min(patience / 2, _SUSPICIOUS_SECONDS):
            return False
        excused = self.busy(now, machine) or (self.preparing and not self._stopped)
        if excused and self.answers() is not False:
            patience *= _LENIENCE
        return silent > patience

    def answers(self) -> bool | None:
        """Whether the other machine acknowledges what is sent to it; None: not known."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        try:
            # 104 bytes are the struct as glibc knows it; newer kernels append fields behind these.
            info = self.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        except OSError:
            return None
        (unacknowledged,) = struct.unpack_from("=I", info, _UNACKED)
        # Unacknowledged alone is normal for a round trip; sent again as well, nobody answers.
        return not (unacknowledged and info[_RETRANSMITS])

    def busy(self, now: float, machine: str) -> bool:
        """Whether it is a process of this machine that computes or waits for a core or a disk."""
        if not self.is_here(machine):
            return False
        assert self.identity is not None
        state, seconds, _ = _facts(self.identity.pid)
        # Until it is heard again: one that is killed while it is stopped ends as any other.
        self._stopped |= state in ("T", "t")
        if self._cpu is None:
            self._cpu = (now, seconds)
        since, before = self._cpu
        # R: running or waiting for a core; D: uninterruptible, as a rule in a disk access. Of any
        # thread: on a crowded machine the one that sends heartbeats may be the one that waits.
        if any(state in ("R", "D") for state in _thread_states(self.identity.pid)):
            return True
        return seconds - before > _BUSY_SHARE * (now - since)

    def is_here(self, machine: str) -> bool:
        """Whether its process is alive and visible in this machine's /proc."""
        known = self.identity
        if known is None or not self._same_machine(machine):
            return False
        return bool(known.started) and _facts(known.pid)[2] == known.started

    def has_ended(self, machine: str) -> bool:
        """Whether its process is known to have ended; of another machine nothing is known."""
        known = self.identity
        if known is None or not known.started or not self._same_machine(machine):
            return False
        state, _, started = _facts(known.pid)
        return started != known.started or state in ("Z", "X")

    def seems_frozen(self, machine: str) -> bool:
        """Whether it may have been frozen since it was last heard; it may be gone by now.

        Silence alone proves nothing on this machine, where a crowd of processes may have kept it
        from sending.
        """
        return self._stopped or not self._same_machine(machine)

    def _same_machine(self, machine: str) -> bool:
        return bool(machine) and self.identity is not None and self.identity.machine == machine


def _facts(pid: int) -> tuple[str, float, str]:
    """State letter, CPU seconds and start of a process; empty where it is gone or unknown."""
    try:
        # proc(5): behind the command's name, which may contain spaces and brackets itself, stand
        # the state (field 3), user and system time (14, 15) and the start (22).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return fields[0], seconds, fields[19]
    except (OSError, ValueError, IndexError):
        return "", 0.0, ""


def _thread_states(pid: int) -> list[str]:
    """The state letter of each thread of a process."""
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, IndexError):
                text = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
                found.append(text.rpartition(")")[2].split()[0])
    return found


FailureKind = Literal["silent", "gone", "failed"]
MachineNaming = Literal["", "node", "host"]
"""How machines are named: not at all (there is one), by number, by host name."""
_RESUME = "Then rerun with --resume."


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why the job cannot continue.

    Attributes:
        kind: "silent": no heartbeat for too long; "gone": the connection closed unexpectedly;
            "failed": the rank itself reported an error.
        what: See `HeadwayError`, as are `why` and `fix`.
        detected: This rank detected the failure itself.
        reports: This rank reports it to the user.
        frozen: Process ids of silent ranks on this machine, which nobody else would end.
    """

    kind: FailureKind
    ranks: tuple[int, ...]
    what: str
    why: str = ""
    fix: str = ""
    detected: bool = field(default=False, compare=False)
    reports: bool = field(default=False, compare=False)
    frozen: tuple[int, ...] = field(default=(), compare=False)

    def error(self, where: str = "") -> HeadwayError:
        """The error to raise: `Stalled` where this rank waited in vain, else `PeerLost`."""
        kind = Stalled if self.kind == "silent" and self.detected else PeerLost
        error = kind(self.what, where=where, why=self.why, fix=self.fix)
        return mark_as_job_error(error) if self.reports else error

    def to_message(self) -> dict[str, str]:
        """The verdict for the other ranks."""
        texts = {name: clip(getattr(self, name)) for name in ("what", "why", "fix")}
        return {"verdict": self.kind, "ranks": " ".join(map(str, self.ranks)), **texts}

    @classmethod
    def from_message(cls, verdict: Mapping[str, str]) -> RankFailure:
        """The verdict of another rank.

        Raises:
            ValueError: The message is none.
        """
        kind = verdict.get("verdict", "")
        if kind not in ("silent", "gone", "failed"):
            raise ValueError(f"no kind of failure: {kind[:40]!r}")
        texts = {name: verdict.get(name, "") for name in ("what", "why", "fix")}
        ranks = tuple(map(number, verdict.get("ranks", "").split()))
        return cls(kind=kind, ranks=ranks, **texts)  # type: ignore[arg-type]


def silent_ranks(
    peers: Collection[HeartbeatConnection], own: ProcessIdentity, now: float, naming: MachineNaming
) -> RankFailure:
    """The failure of ranks without a heartbeat."""
    seconds = min(now - peer.heard for peer in peers)
    names = name_rank_machines((_known(peer) for peer in peers), naming)
    to_hub = own.rank != 0
    if to_hub:
        what = f"{names} cannot be reached from {name_rank_machines([own], naming)}"
        why = f"No heartbeat has arrived for {seconds:.0f} s. "
    else:
        have = "has" if len(peers) == 1 else "have"
        what = f"{names} {have} sent no heartbeat for {seconds:.0f} s"
        why = ""
    answers = {peer.answers() for peer in peers}
    why += _reason(answers)
    spoken = [(_known(peer).rank, peer.doing[0]) for peer in peers if peer.doing[0]]
    words = [f"Last report of rank {rank}: {doing}." for rank, doing in spoken]
    return RankFailure(
        kind="silent",
        ranks=tuple(sorted(_known(peer).rank for peer in peers)),
        what=what,
        why="\n  ".join([why, *words[:4]]),
        fix="Check these processes, their machine and its link. Code that holds Python's lock for "
        f"long needs more --patience. {_RESUME}",
        detected=True,
        reports=not to_hub or _reports_for_node(own, _known(next(iter(peers)))),
        frozen=tuple(
            _known(peer).pid
            for peer in peers
            if peer.is_here(own.machine) and peer.answers() is not False
        ),
    )


def closed_connection(
    peer: HeartbeatConnection, own: ProcessIdentity, naming: MachineNaming
) -> RankFailure:
    """The failure of a rank whose connection closed without a goodbye."""
    lost = _known(peer)
    return RankFailure(
        kind="gone",
        ranks=(lost.rank,),
        what=f"{name_rank_machines([lost], naming)} vanished",
        why="Its connection closed unexpectedly: the process was killed, or it crashed.",
        fix="Its own error, or the signal that killed it (see dmesg), is the cause. " + _RESUME,
        detected=True,
        reports=own.rank == 0 or _reports_for_node(own, lost),
    )


def reported_failure(rank: ProcessIdentity, text: str, naming: MachineNaming) -> RankFailure:
    """The failure of a rank that has announced its own error, and reports it itself."""
    return RankFailure(
        kind="failed",
        ranks=(rank.rank,),
        what=f"{name_rank_machines([rank], naming)} failed: {text}",
        fix="Its own error is the cause.",
    )


def name_rank_machines(ranks: Iterable[ProcessIdentity], naming: MachineNaming) -> str:
    """ "rank 1"; in a job of several machines "rank 1 on node-a and ranks 2 and 3 on node-b"."""
    known = sorted(ranks, key=lambda identity: identity.rank)
    if not naming:
        return name_ranks(identity.rank for identity in known)
    places: dict[str, list[int]] = {}
    for identity in known:
        place = identity.host if naming == "host" else f"node {identity.node}"
        places.setdefault(place, []).append(identity.rank)
    return " and ".join(f"{name_ranks(ranks)} on {place}" for place, ranks in places.items())


def machine_naming(ranks: Iterable[ProcessIdentity]) -> MachineNaming:
    """How machines are named in a job of these ranks."""
    known = list(ranks)
    if len({identity.host for identity in known}) > 1:
        return "host"
    return "node" if len({identity.node for identity in known}) > 1 else ""


def _reason(answers: set[bool | None]) -> str:
    if answers == {False}:
        return "Nothing sent there is acknowledged: the network is cut, or the machine is down."
    if answers == {True}:
        return (
            "The machine answers, the process does not: it was stopped, it is swapping, or its "
            "code holds Python's lock."
        )
    return "It was killed or stopped, or its network is cut."


def _reports_for_node(own: ProcessIdentity, hub: ProcessIdentity) -> bool:
    """Where rank 0 is lost, the first remaining rank of each machine reports it there."""
    return own.local_rank == (1 if own.node == hub.node else 0)


def _known(peer: HeartbeatConnection) -> ProcessIdentity:
    assert peer.identity is not None
    return peer.identity


_BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.25
_STOOD_STILL_SECONDS = 2.0
# Ranks that fell silent this shortly after each other belong to one verdict.
_TOGETHER_SECONDS = 1.5
# Where a link is cut in the middle, rank 0, which sees most, must be the first to judge.
_AFTER_RANK_0_SECONDS = 0.75
_CONNECT_SECONDS = 5.0
_MOST_HOST_CHARACTERS = 64
# Connections that have not said who they are: for how long, and how many, the oldest go first.
_STRANGER_SECONDS = 10.0
_MOST_STRANGERS = 256

StatusSource = Callable[[], tuple[str, float, bool]]
"""What a rank is doing, since when (`time.monotonic`), and whether it is still preparing."""


@dataclass(frozen=True)
class HeartbeatListener:
    """Rank 0's listening socket, the address at which others reach it, and its random token."""

    server: socket.socket
    address: str
    token: str

    @classmethod
    def open(cls, server: socket.socket, address: str) -> HeartbeatListener:
        """Use a listening socket, for instance of `rendezvous.listen`."""
        server.setblocking(False)
        return cls(server, address, secrets.token_hex(16))

    @property
    def notice(self) -> str:
        """For the others: address, port and token."""
        return f"{self.address} {self.server.getsockname()[1]} {self.token}"


def _key(token: str) -> bytes:
    """Of the connections to a listener: who reads its token in a store lacks the job's secret."""
    return sign(job_secret(), "heartbeat", token)


def connect_heartbeat(notice: str, own: ProcessIdentity) -> HeartbeatConnection:
    """The connection of another rank to rank 0.

    Raises:
        OSError: It cannot be reached there.
    """
    host, port, token = notice.split()
    link = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
    peer = HeartbeatConnection(link, time.monotonic(), _key(token), calls=True)
    peer.send(_hello(own))
    return peer


def _hello(own: ProcessIdentity) -> dict[str, object]:
    # The longest name that a host can have, so that a hello stays below its limit.
    return {"hello": 1, **asdict(own), "host": own.host[:_MOST_HOST_CHARACTERS]}


class Heartbeat:
    """The heartbeat thread of one rank.

    Args:
        hub: The connection to rank 0; None on rank 0.
        patience: Seconds of silence until a rank is lost.
        on_loss: Called once, in the thread, when a rank is lost.
    """

    def __init__(
        self,
        own: ProcessIdentity,
        *,
        listener: HeartbeatListener | None = None,
        hub: HeartbeatConnection | None = None,
        patience: float = HEARTBEAT_TIMEOUT_SECONDS,
        status: StatusSource = lambda: ("", time.monotonic(), False),
        on_loss: Callable[[RankFailure], None] = lambda loss: None,
    ) -> None:
        self.loss: RankFailure | None = None
        self.lost = threading.Event()
        self._own = own
        self._listener = listener
        self._key = b"" if listener is None else _key(listener.token)
        self._patience = patience + (_AFTER_RANK_0_SECONDS if listener is None else 0.0)
        self._status = status
        self._on_loss = on_loss
        self._peers: list[HeartbeatConnection] = [] if hub is None else [hub]
        self._states: dict[int, tuple[str, float]] = {}
        self._answered = threading.Event()
        self._question = False
        self._ended = False
        self._farewell: dict[str, str] | None = None
        self._coming: dict[int, tuple[str, float]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        # A pair of sockets, because `select` cannot wait for a `threading.Event`.
        self._selector.register(self._woken, selectors.EVENT_READ)
        if listener is not None:
            self._selector.register(listener.server, selectors.EVENT_READ)
        for peer in self._peers:
            self._selector.register(peer.link, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="headway-heartbeat", daemon=True)
        _close_in_children(self)

    def start(self) -> None:
        """Start the thread."""
        # A program that ends without `leave` must say goodbye, too, or it counts as lost.
        atexit.register(self.stop)
        self._thread.start()

    def stop(self, failure: str | None = None) -> None:
        """End the thread with a goodbye, or with a line that says why this rank fails."""
        # After a loss this rank's own error is only its effect, and is not announced.
        if self._ended or (failure is not None and self.loss is not None):
            return
        self._farewell = {"bye": "1"} if failure is None else {"failed": clip(failure)}
        self._ended = True
        self.beat_now()
        atexit.unregister(self.stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            # Not without end: the exit of the program must not depend on this thread.
            self._thread.join(_BEAT_SECONDS)

    def beat_now(self) -> None:
        """Report what this rank is doing at once, not at the next second."""
        with suppress(OSError):
            self._wake.send(b"\0")

    def await_loss(self, seconds: float) -> RankFailure | None:
        """The failure, if there is one; waits for it up to `seconds`.

        Where rank 0 has just fallen silent, it waits until that is judged: what broke here may be
        the end of a rank that noticed the silence a moment earlier.
        """
        deadline = time.monotonic() + seconds
        while not self.lost.wait(min(seconds, _TICK_SECONDS)):
            if time.monotonic() >= deadline and not self._judges_rank_0(time.monotonic()):
                break
        return self.loss

    def _judges_rank_0(self, now: float) -> bool:
        """Whether rank 0 misses heartbeats, and not yet for so long that it is lost."""
        silent = [now - peer.heard for peer in self._peers if self._listener is None]
        return any(2 * _BEAT_SECONDS < each < self._patience + _BEAT_SECONDS for each in silent)

    def states(self, seconds: float = 1.0) -> dict[int, tuple[str, float]]:
        """What the ranks are doing and for how many seconds; "" for those that progress."""
        if self._listener is None:
            self._answered.clear()
            self._question = True
            self.beat_now()
            self._answered.wait(seconds)
            return dict(self._states)
        return self._known_states(time.monotonic())

    def close_copies(self) -> None:
        """Close a forked child's copies, which would hold the connections open after a death."""
        sockets = [self._wake, self._woken, *(peer.link for peer in list(self._peers))]
        if self._listener is not None:
            sockets.append(self._listener.server)
        for copy in sockets:
            with suppress(OSError):
                # Detached: the object's own clean-up must not close a number that is in use again.
                os.close(copy.detach())

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        last = beat = time.monotonic()
        while not self._ended and self.loss is None:
            ready = self._selector.select(_TICK_SECONDS)
            now = time.monotonic()
            # A process that stood still itself (a suspended machine, a debugger on all ranks)
            # cannot tell whether the others did: it judges nobody for that time.
            if now - last > _STOOD_STILL_SECONDS:
                for peer in self._peers:
                    peer.restart_timer(now)
            last = now
            for key, _ in ready:
                self._take(key, now)
            if now >= beat:
                self._beat(now)
                beat = now + _BEAT_SECONDS
            if self.loss is None:
                self._check_silence(now)
        if self.loss is None:
            self._say_goodbye()
        else:
            self._on_loss(self.loss)
        self._close()

    def _beat(self, now: float) -> None:
        text, since, preparing = self._status()
        long = text and now - since > _BEAT_SECONDS
        facts: dict[str, object] = {"doing": clip(text), "seconds": now - since} if long else {}
        if preparing:
            facts["preparing"] = 1
        for peer in self._partners():
            peer.send(facts)

    def _take(self, key: selectors.SelectorKey, now: float) -> None:
        if key.fileobj is self._woken:  # this rank's own main thread wants something
            with suppress(BlockingIOError):
                self._woken.recv(64)
            self._beat(now)
            if self._question:
                self._question = False
                for peer in self._peers:
                    peer.send({"ask": 1})
        elif isinstance(key.data, HeartbeatConnection):
            # It may have been dropped since `select` returned.
            if key.data in self._peers:
                self._hear(key.data, now)
        else:
            self._accept(now)

    def _accept(self, now: float) -> None:
        assert self._listener is not None
        with suppress(OSError):
            link, address = self._listener.server.accept()
            peer = HeartbeatConnection(link, now, self._key, address=str(address[0]))
            self._peers.append(peer)
            self._selector.register(link, selectors.EVENT_READ, peer)
        strangers = self._strangers()
        if len(strangers) > _MOST_STRANGERS:
            self._drop(connection_to_drop(strangers, [peer.address for peer in strangers]))

    def _strangers(self) -> list[HeartbeatConnection]:
        """Those that have called and not said who they are, the oldest first."""
        if self._listener is None:
            return []
        return [peer for peer in self._peers if peer.identity is None]

    def _hear(self, peer: HeartbeatConnection, now: float) -> None:
        messages = peer.receive(now)
        if messages is None:
            if peer.identity is not None and not peer.left:
                # A frozen process that its launcher has just killed counts as silent.
                quiet = now - peer.heard > max(self._patience - _TOGETHER_SECONDS, _BEAT_SECONDS)
                quiet = quiet and peer.seems_frozen(self._own.machine)
                loss = silent_ranks([peer], self._own, now, self._naming()) if quiet else None
                self._declare_lost(loss or closed_connection(peer, self._own, self._naming()))
            self._drop(peer)
            return
        for message in messages:
            if peer.identity is None and not self._introduced(peer, message):
                return
            with suppress(ValueError):  # of another version of headway: what is signed is ours
                self._handle(peer, message, now)

    def _introduced(self, peer: HeartbeatConnection, message: dict[str, str]) -> bool:
        """Whether a connection identifies itself; one that does not is closed."""
        with suppress(ValueError):
            identity = ProcessIdentity.from_message(message)
            known = [other.identity for other in self._peers if other.identity is not None]
            if identity.rank not in {self._own.rank, *(each.rank for each in known)}:
                peer.identity = identity
        if peer.identity is None:
            self._drop(peer)
        elif self._listener is not None:
            peer.send(_hello(self._own))
        return peer.identity is not None

    def _handle(self, peer: HeartbeatConnection, message: dict[str, str], now: float) -> None:
        if "verdict" in message:
            self._declare_lost(RankFailure.from_message(message))
        elif "failed" in message:
            assert peer.identity is not None
            self._declare_lost(reported_failure(peer.identity, message["failed"], self._naming()))
        elif "bye" in message:
            peer.left = True
        elif "ask" in message:
            # One line each, so that the length of a line does not depend on the number of ranks.
            for rank, (doing, ago) in self._known_states(now).items():
                peer.send({"state": rank, "doing": clip(doing), "seconds": ago})
            peer.send({"states": 1})
        elif "state" in message:
            state = (message.get("doing", ""), seconds(message.get("seconds", "")))
            self._coming[number(message["state"])] = state
        elif "states" in message:
            self._states, self._coming = self._coming, {}
            self._answered.set()
        elif "hello" not in message:
            peer.take_beat(message, now)

    def _drop(self, peer: HeartbeatConnection) -> None:
        self._selector.unregister(peer.link)
        self._peers.remove(peer)
        peer.link.close()

    # -- deciding -----------------------------------------------------------------------------

    def _check_silence(self, now: float) -> None:
        for peer in self._peers:
            peer.flush()
        for peer in self._strangers():
            if now - peer.begun > _STRANGER_SECONDS:
                self._drop(peer)
        machine = self._own.machine
        if not any(peer.overdue(now, self._patience, machine) for peer in self._peers):
            return
        shorter = max(self._patience - _TOGETHER_SECONDS, 0.0)
        late = [peer for peer in self._peers if peer.overdue(now, shorter, machine)]
        # A connection may outlive its process, in copies that children of it have.
        dead = [peer for peer in late if peer.has_ended(machine)]
        if dead:
            self._declare_lost(closed_connection(dead[0], self._own, self._naming()))
        else:
            self._declare_lost(silent_ranks(late, self._own, now, self._naming()))

    def _declare_lost(self, loss: RankFailure) -> None:
        if self.loss is not None:  # the first one is the cause; what follows are its effects
            return
        self.loss = loss
        if self._listener is not None:  # to lost ranks, too: a slow one learns why it must end
            for peer in self._partners():
                peer.send(loss.to_message())
        self.lost.set()

    def _await_greeting(self) -> None:
        """A rank that fails at once can only say so once the keys of its connection are known."""
        deadline = time.monotonic() + _BEAT_SECONDS / 2
        for peer in self._peers if self._listener is None else ():
            while not peer.greeted and time.monotonic() < deadline:
                self._selector.select(_TICK_SECONDS)
                if peer.receive(time.monotonic()) is None:
                    return

    def _say_goodbye(self) -> None:
        self._await_greeting()
        if self._listener is not None and self._farewell and "failed" in self._farewell:
            text = self._farewell["failed"]
            loss = reported_failure(self._own, text, self._naming())
            self._farewell = loss.to_message()
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
            self._listener.server.close()

    def _partners(self) -> list[HeartbeatConnection]:
        """All ranks that have identified themselves, and rank 0 in any case."""
        return [p for p in self._peers if p.identity is not None or self._listener is None]

    def _naming(self) -> MachineNaming:
        known = [peer.identity for peer in self._peers if peer.identity is not None]
        return machine_naming([self._own, *known])

    def _known_states(self, now: float) -> dict[int, tuple[str, float]]:
        text, since, _ = self._status()
        states = {self._own.rank: (text, now - since)}
        # A copy, because the main thread also comes here (`states`) while peers come and go.
        for peer in list(self._peers):
            if peer.identity is not None:
                states[peer.identity.rank] = (peer.doing[0], now - peer.doing[1])
        return states


def _close_in_children(heartbeat: Heartbeat) -> None:
    # Data-loading children are forked: with a copy of the connection they would hide a death. A
    # weak reference, because functions registered here are never removed.
    reference = weakref.ref(heartbeat)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close_copies()

    os.register_at_fork(after_in_child=close)
