"""The other end of a heartbeat connection: what it says, and what the kernels say about it.

Silence alone does not tell a cut network from a frozen process. Two kernels do: that of the other
machine acknowledges what is sent to it as long as it can be reached (TCP_INFO), and that of this
machine knows what a process on it does (/proc). Both are evidence only; without them (other
systems) silence is all there is.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.run.place import Place

_CHUNK = 65536
_UNACKED = 24
_RETRANSMITS = 2
"""Offsets in Linux's struct tcp_info."""
_SUSPICIOUS_SECONDS = 2.0
_LENIENCE = 10.0
_BUSY_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who a process is.

    Attributes:
        rank: Its rank.
        local_rank: Its number on its machine.
        node: Number of its machine, as the launcher counts.
        host: Name of its machine, as the launcher calls it, or else the machine itself.
        machine: The same text for all processes that can see each other in /proc; "" elsewhere.
        pid: Its process id.
        started: When it started, in the kernel's count; tells it from a later process of its id.
    """

    rank: int
    local_rank: int
    node: int
    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def here(cls, place: Place) -> Identity:
        """The identity of this process."""
        machine = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(
            rank=place.rank,
            local_rank=place.local_rank,
            node=place.node_rank,
            host=place.node_name or socket.gethostname(),
            machine=machine,
            pid=os.getpid(),
            started=_facts(os.getpid())[2],
        )


class Peer:
    """A connection to another rank; used by the heartbeat's thread only.

    Attributes:
        link: The socket, which never blocks.
        identity: Who it is; None until it has said so.
        heard: When something came from it, in `time.monotonic` seconds.
        doing: What it has been doing for more than a second, and since when; "" where it moves on.
        preparing: It has not begun its first step.
        left: It said goodbye: nothing is expected of it any more.
    """

    def __init__(self, link: socket.socket, now: float) -> None:
        link.setblocking(False)
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link = link
        self.identity: Identity | None = None
        self.heard = now
        self.doing: tuple[str, float] = ("", now)
        self.preparing = True
        self.left = False
        self._in = b""
        self._out = b""
        self._cpu: tuple[float, float] | None = None

    # -- the line ----------------------------------------------------------------------------

    def send(self, message: Mapping[str, Any] | None = None) -> None:
        """Send a message, or without one a beat: a single byte."""
        text = b"" if message is None else json.dumps(message).encode()
        self._out += text + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the network did not take yet."""
        if self._out:
            with suppress(OSError):
                self._out = self._out[self.link.send(self._out) :]

    def receive(self, now: float) -> list[dict[str, Any]] | None:
        """The messages that have come (a beat is an empty one); None: the connection is closed."""
        try:
            data = self.link.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard, self._cpu = now, None
        *lines, self._in = (self._in + data).split(b"\n")
        messages = []
        for line in lines:
            with suppress(ValueError):
                message = json.loads(line) if line else {}
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def take_beat(self, message: Mapping[str, Any], now: float) -> None:
        """Note what a beat says: nothing (it moves on), or what it has been doing for how long."""
        self.preparing = bool(message.get("preparing"))
        self.doing = (str(message.get("doing", "")), now - float(message.get("seconds", 0.0)))

    def forgive(self, now: float) -> None:
        """Begin to count anew: this process stood still itself."""
        self.heard, self._cpu = now, None

    # -- the evidence ------------------------------------------------------------------------

    def overdue(self, now: float, patience: float, machine: str) -> bool:
        """Whether it is to be given up: silent for longer than its excuses last.

        Args:
            now: `time.monotonic` seconds.
            patience: Seconds of silence without an excuse. Where its machine answers, a process
                that prepares (reads data, builds a model) or computes has ten times as much: code
                may hold Python's lock.
            machine: Of this process, see `Identity.machine`.
        """
        silent = now - self.heard
        if self.left or self.identity is None or silent < min(patience / 2, _SUSPICIOUS_SECONDS):
            return False
        excused = self.busy(now, machine) or self.preparing
        if excused and self.answers() is not False:
            patience *= _LENIENCE
        return silent > patience

    def answers(self) -> bool | None:
        """Whether the other machine acknowledges what is sent to it; None: not known."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        try:
            info = self.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        except OSError:
            return None
        (unacknowledged,) = struct.unpack_from("=I", info, _UNACKED)
        return not (unacknowledged and info[_RETRANSMITS])

    def busy(self, now: float, machine: str) -> bool:
        """Whether it is a process of this machine that computes, or waits for a core or a disk."""
        if not self.is_here(machine):
            return False
        assert self.identity is not None
        state, seconds, _ = _facts(self.identity.pid)
        if self._cpu is None:
            self._cpu = (now, seconds)
        since, before = self._cpu
        return state in ("R", "D") or seconds - before > _BUSY_SHARE * (now - since)

    def is_here(self, machine: str) -> bool:
        """Whether its process lives, and this one can see it."""
        known = self.identity
        if known is None or not machine or known.machine != machine:
            return False
        return bool(known.started) and _facts(known.pid)[2] == known.started


def hello(identity: Identity, token: str) -> dict[str, Any]:
    """What a rank says first."""
    return {"hello": asdict(identity), "token": token}


def read_identity(message: Mapping[str, Any]) -> Identity | None:
    """Who says hello; None where it is none."""
    try:
        return Identity(**message["hello"])
    except (KeyError, TypeError):
        return None


def _facts(pid: int) -> tuple[str, float, str]:
    """State letter, CPU seconds and start of a process; empty where it is gone or unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return fields[0], seconds, fields[19]
    except (OSError, ValueError, IndexError):
        return "", 0.0, ""
