"""The history of a run: in which order each holder has handled its messages, and who was lost.

Everything else follows from it, because the messages of one sender come in the order in which they
were sent: who read which version, whose push was applied when, what a worker computed with. It
takes two bytes for each message, and makes an asynchronous run repeatable bit by bit.

A file begins with "headway history 1" and a line feed. Behind it are chunks until its end: the
holder's kind (one byte, its place in "server", "centre", "model", "cache", "meeting"), number and
share (four bytes each), the count of words (eight bytes), then so many words of two bytes, all
little-endian. The log of a holder is all its chunks in their order: while a run goes on each word
is a chunk, written before anybody else can have seen an effect of it; at the end the file is
written anew with one chunk for each holder. A word w of a log is

- below 0x4000: the next message of worker w is handled;
- from 0x8000: the next message of server w - 0x8000 is handled (it refreshes a cache);
- from 0x4000 to 0x47ff: worker w - 0x4000 has died. What it had sent and what is not handled yet is
  dropped, and a message of it that waits in the holder is forgotten; nobody waits for it any more;
- from 0x5000 to 0x57ff: worker w - 0x5000 comes back in a new life. Three words follow: the number
  of the life (from 1), and the step that it begins with, from 0, low and high half. In the log of a
  holder that lives with this worker: the holder begins anew, as the worker does;
- 0x6000, in the log of a holder that has come back: from whom on it gets messages. Four words
  follow: a sender, as the word of its messages; its life; and the number of its first message, low
  and high half: those before have gone to the life before, or nowhere;
- from 0x6800 to 0x6fff, in the log of a worker's own model: worker w - 0x6800 was gone when this
  one turned to it. Two words follow, the low half and the high half of a number: so many messages
  of this life to the other's model came before the one that has come to nothing. Of a pair the
  answer is the model that was sent; gossip comes back to the own model, as the owner's next message
  to that; one that asks for the other's model is answered by nothing; another message is dropped.

A log without words from 0x4000 to 0x7fff is of a run in which nobody died.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from headway.atomic_files import write_atomically
from headway.errors import RunError
from headway.synchrony.actors import Address, Sender

_MAGIC = b"headway history 1\n"
_KINDS = ("server", "centre", "model", "cache", "meeting")
_HEAD = struct.Struct("<BIIQ")
_HOLDER = 0x8000
_NUMBER = 0x07FF
_DEAD, _JOINED, _RESUMED, _UNDONE = 0x4000, 0x5000, 0x6000, 0x6800
_FOLLOWING = {_DEAD: 0, _JOINED: 3, _RESUMED: 4, _UNDONE: 2}


@dataclass(frozen=True, slots=True)
class Handled:
    """The next message of a sender."""

    sender: Sender


@dataclass(frozen=True, slots=True)
class Died:
    """A worker is gone."""

    worker: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker comes back, in another process.

    Attributes:
        life: Its number, from 1.
        step: The first one that it makes, from 0.
    """

    worker: int
    life: int
    step: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """To a holder that has come back a sender's messages come from a number on.

    Attributes:
        life: Of the sender, which counts its messages in each life from 0.
    """

    sender: Sender
    life: int
    number: int


@dataclass(frozen=True, slots=True)
class Undone:
    """A message to the model of a worker that was gone has come to nothing, by its number."""

    worker: int
    number: int


Entry: TypeAlias = "Handled | Died | Joined | Resumed | Undone"


def _words(entry: Entry) -> tuple[int, ...]:
    match entry:
        case Handled(sender=sender):
            return (_of_sender(sender),)
        case Died(worker=worker):
            return (_DEAD | worker,)
        case Joined(worker=worker, life=life, step=step):
            return (_JOINED | worker, life, *_halves(step))
        case Resumed(sender=sender, life=life, number=number):
            return (_RESUMED, _of_sender(sender), life, *_halves(number))
        case Undone(worker=worker, number=number):
            return (_UNDONE | worker, *_halves(number))


def _of_sender(sender: Sender) -> int:
    return sender if isinstance(sender, int) else _HOLDER | sender.number


def _halves(number: int) -> tuple[int, int]:
    return number & 0xFFFF, number >> 16


def _sender(word: int) -> Sender:
    return Address("server", word & ~_HOLDER) if word & _HOLDER else word


def _entry(words: array[int], place: int) -> tuple[Entry, int]:
    """What stands at a place of a log, and the place behind it."""
    word = words[place]
    if word & _HOLDER or word < _DEAD:
        return Handled(_sender(word)), place + 1
    kind, worker = word & ~_NUMBER, word & _NUMBER
    end = place + 1 + _FOLLOWING[kind]
    rest = words[place + 1 : end]
    if kind == _DEAD:
        return Died(worker), end
    number = rest[-2] | rest[-1] << 16
    if kind == _JOINED:
        return Joined(worker, rest[0], number), end
    if kind == _RESUMED:
        return Resumed(_sender(rest[0]), rest[1], number), end
    return Undone(worker, number), end


@dataclass
class History:
    """The log of each holder: what it has handled and who was lost, in this order."""

    logs: dict[Address, array[int]] = field(default_factory=dict)
    _file: int | None = field(default=None, repr=False, compare=False)

    def note(self, holder: Address, sender: Sender) -> None:
        """A holder handles the next message of a sender."""
        self.add(holder, Handled(sender))

    def add(self, holder: Address, entry: Entry) -> None:
        """Something has happened to a holder; it is on its way to the disk when this returns."""
        words = array("H", _words(entry))
        self.logs.setdefault(holder, array("H")).extend(words)
        if self._file is not None:
            os.write(self._file, _chunk(holder, words))

    def entries(self, holder: Address) -> Iterator[Entry]:
        """What has happened to a holder."""
        words, place = self.logs.get(holder, array("H")), 0
        while place < len(words):
            entry, end = _entry(words, place)
            yield entry
            place = end

    def senders(self, holder: Address) -> Iterator[Sender]:
        """Who sent what a holder has handled."""
        for entry in self.entries(holder):
            if isinstance(entry, Handled):
                yield entry.sender

    def undone(self, worker: int, life: int = 0) -> set[tuple[int, int]]:
        """What of a life of a worker has come to nothing: for whose model, and its number."""
        found: dict[int, set[tuple[int, int]]] = {}
        now = 0
        for entry in self.entries(Address("model", worker)):
            if isinstance(entry, Joined) and entry.worker == worker:
                now = entry.life
            elif isinstance(entry, Undone):
                found.setdefault(now, set()).add((entry.worker, entry.number))
        return found.get(life, set())

    def dead(self) -> set[int]:
        """Workers that have died, and have not come back."""
        return {worker for holder in self.logs for worker in self._dead_for(holder)}

    def _dead_for(self, holder: Address) -> set[int]:
        gone: set[int] = set()
        for entry in self.entries(holder):
            match entry:
                case Died(worker=worker):
                    gone.add(worker)
                case Joined(worker=worker) if lives_with(holder, worker):
                    gone.clear()  # it hears of those that are there
                case Joined(worker=worker):
                    gone.discard(worker)
        return gone

    def lives(self, worker: int) -> list[Joined]:
        """The later lives of a worker of which others have heard, in their order."""
        found = {
            entry.life: entry
            for holder in self.logs
            if not lives_with(holder, worker)
            for entry in self.entries(holder)
            if isinstance(entry, Joined) and entry.worker == worker
        }
        return [found[life] for life in sorted(found)]

    @property
    def events(self) -> int:
        return sum(map(len, self.logs.values()))

    # -- files ---------------------------------------------------------------------------------

    def append_to(self, path: Path) -> None:
        """Write to a file from now on whatever is noted, at once: it survives this process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def save(self, path: Path) -> None:
        """Write one file: of each holder its address, and two bytes for each message."""
        parts = [_MAGIC, *(_chunk(holder, log) for holder, log in sorted(self.logs.items()))]
        write_atomically(path, b"".join(parts))

    @classmethod
    def load(cls, path: Path, *, killed: bool = False) -> History:
        """Read a file.

        Args:
            killed: Whoever wrote it was killed: what ends in the middle of a word is left out.

        Raises:
            RunError: It is no such file, or has been cut off.
        """
        data = path.read_bytes()
        if not data.startswith(_MAGIC):
            raise _damaged(path, "it does not begin as one")
        found, place = cls(), len(_MAGIC)
        while place < len(data):
            kind, number, share, count = (
                _HEAD.unpack_from(data, place) if len(data) - place >= _HEAD.size else (0, 0, 0, 0)
            )
            place += _HEAD.size
            if place > len(data) or kind >= len(_KINDS) or len(data) - place < 2 * count:
                if killed:
                    break
                raise _damaged(path, "it ends in the middle of a log")
            log = found.logs.setdefault(Address(_KINDS[kind], number, share), array("H"))
            log.frombytes(data[place : place + 2 * count])
            place += 2 * count
        return found


def lives_with(holder: Address, worker: int) -> bool:
    """Whether a holder begins anew with a worker: its own model, its caches."""
    return holder.kind in ("model", "cache") and holder.number == worker


def _chunk(holder: Address, words: array[int]) -> bytes:
    head = (_KINDS.index(holder.kind), holder.number, holder.share, len(words))
    return _HEAD.pack(*head) + words.tobytes()


def _damaged(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} is no history of a run: {why}",
        fix="Replay a run whose files are whole.",
    )


def merged(histories: Mapping[int, History]) -> History:
    """The histories that the processes of a run have noted, each of its own holders."""
    found = History()
    for history in histories.values():
        found.logs.update(history.logs)
    return found
