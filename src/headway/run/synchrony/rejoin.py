"""How a worker that comes back in a new process finds the others again, on one machine.

The processes of a run that outlives deaths have left the process group (`World.part`), and meet in
the folder of notes: the one that comes back leaves a call for each of the others, whose thread of
holders looks for calls while somebody is gone; then both open channels. One comes back at a time,
so that no two wait for each other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from headway.atomic_files import write_atomically
from headway.channel.channel import Channel
from headway.run.distributed.launch_env import RunEnding
from headway.synchrony.actors import Address, Sender

_POLL_SECONDS = 0.02
CHANNEL_SECONDS = 20.0
"""For both ends to open their channels, once each knows that the other does."""


@dataclass(frozen=True)
class Handshake:
    """What a worker tells one that has come back, before anything else.

    Attributes:
        life: Of the sending process, from 0.
        numbers: Which number the next message has: its sender, for whom, and the number.
    """

    life: int
    numbers: tuple[tuple[Sender, Address, int], ...]


@dataclass(frozen=True)
class JoinRequest:
    """Of a worker that has come back, for one of the others.

    Attributes:
        life: The number of its life, from 1.
        step: The first one that it makes, from 0.
    """

    worker: int
    life: int
    step: int
    path: Path

    @property
    def answer(self) -> Path:
        return self.path.with_name(self.path.name.replace("call", "answer", 1))

    def accept(self, accepts: bool) -> None:
        """Answer it: the others go on, or are about to end."""
        write_atomically(self.answer, "yes" if accepts else "no")


def calls_for(folder: Path, rank: int) -> list[JoinRequest]:
    """The calls for a rank that have not been answered."""
    found = []
    for path in sorted(folder.glob(f"call-*-{rank:05d}")):
        _, worker, life, _ = path.name.split("-")
        with suppress(OSError, ValueError):
            call = JoinRequest(int(worker), int(life), int(path.read_text()), path)
            if not call.answer.exists():
                found.append(call)
    return found


def open_channels(folder: Path, rank: int, call: JoinRequest, peer: int) -> tuple[Channel, Channel]:
    """The channels of a worker that has come back and another, the same two at both ends.

    Raises:
        PeerLost: The other end is gone.
        Stalled: It does not come.
    """
    meeting = FileStore(str(folder / "rejoin"), -1)
    store = PrefixStore(call.path.name, meeting)
    first, second = (
        Channel(peer, slots=4, store=store, rank=rank, timeout=CHANNEL_SECONDS) for _ in range(2)
    )
    return first, second


def call(
    folder: Path, rank: int, life: int, step: int, peer: int, seconds: float
) -> JoinRequest | None:
    """Ask one of the others to connect, and wait for its answer; None: it is gone.

    Raises:
        RunEnding: It is about to end.
    """
    path = folder / f"call-{rank:05d}-{life}-{peer:05d}"
    made = JoinRequest(rank, life, step, path)
    write_atomically(path, str(step))
    until = monotonic() + seconds
    while monotonic() < until:
        if made.answer.exists():
            if made.answer.read_text() == "yes":
                return made
            raise RunEnding
        if not is_there(folder, peer):
            break
        sleep(_POLL_SECONDS)
    path.unlink(missing_ok=True)
    if any((folder / f"{note}-{peer:05d}").exists() for note in ("ended", "result")):
        raise RunEnding
    return None


def note_presence(folder: Path, rank: int) -> None:
    """From now on this process answers calls."""
    write_atomically(folder / f"there-{rank:05d}", str(os.getpid()))


def is_there(folder: Path, rank: int) -> bool:
    """Whether a rank has a process that answers calls: no longer one that comes back itself."""
    try:
        os.kill(int((folder / f"there-{rank:05d}").read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """While a worker comes back; the kernel lets the next one go on if this one dies."""
    with (folder / "comes-back").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
