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
- from 0x5000 to 0x57ff: worker w - 0x5000 comes back in a new life. Four words follow: the number
  of the life (from 1), the step that it begins with, low and high half, and from whom it takes its
  model, plus 1 (0: it asks servers or a centre);
- 0x6000: the holder itself has died and has come back. Two words follow, low and high half: the
  number of words of this log behind which its state was saved. It goes on with that state; 0: with
  the state of the start. All that it did between is lost;
- from 0x6800 to 0x6fff, in the log of a worker's own model: worker w - 0x6800 was gone when this
  one turned to it. Two words follow: the number of the message to its model, from 0, in the life of
  the owner of this log, that has come to nothing. Of a pair the answer is the model that was sent;
  gossip comes back to the own model, as a message of the owner; another message is dropped;
- from 0x7000 to 0x77ff: worker w - 0x7000 is connected to a holder that has come back. Two words
  follow: it goes on with the message of its present life that has this number, from 0, which may
  have been handled before the death (its answer was lost); those before that were not handled are
  lost.

A log without words from 0x4000 to 0x7fff is of a run in which nobody died.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from headway.errors import RunError
from headway.synchrony.actors import Address, Sender

_MAGIC = b"headway history 1\n"
_KINDS = ("server", "centre", "model", "cache", "meeting")
_HEAD = struct.Struct("<BIIQ")
_HOLDER = 0x8000
_MARK, _NUMBER = 0x7000, 0x07FF
_DEAD, _JOINED, _BACK, _UNDONE, _RESUMES = 0x4000, 0x5000, 0x6000, 0x6800, 0x7000
_FOLLOWING = {_DEAD: 0, _JOINED: 4, _BACK: 2, _RESUMES: 2}


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
    """A worker has come back.

    Attributes:
        life: Which one of its lives begins, from 1.
        step: The first that it makes.
        source: The worker whose model it takes; None: it asks servers or a centre.
    """

    worker: int
    life: int
    step: int
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Back:
    """The holder has come back.

    Attributes:
        to: It goes on with its state behind so many words of the log.
    """

    to: int


@dataclass(frozen=True, slots=True)
class Resumes:
    """A worker goes on with a message, by its number in the worker's life."""

    worker: int
    number: int


@dataclass(frozen=True, slots=True)
class Undone:
    """A message to the model of a worker that was gone has come to nothing, by its number."""

    worker: int
    number: int


Entry: TypeAlias = "Handled | Died | Joined | Back | Resumes | Undone"


@dataclass(slots=True)
class Turn:
    """An entry of a log, with what a replay must know of a message.

    Attributes:
        life: Of the sender.
        number: Of the message, in that life and to this holder.
        answered: Whether its answer has reached the sender: not, if it is handled again.
        place: Words of the log before it.
    """

    entry: Entry
    place: int
    life: int = 0
    number: int = 0
    answered: bool = True


def _words(entry: Entry) -> tuple[int, ...]:
    match entry:
        case Handled(sender=sender):
            return (sender if isinstance(sender, int) else _HOLDER | sender.number,)
        case Died(worker=worker):
            return (_DEAD | worker,)
        case Joined(worker=worker, life=life, step=step, source=source):
            return (_JOINED | worker, life, *_halves(step), 0 if source is None else source + 1)
        case Back(to=to):
            return (_BACK, *_halves(to))
        case Undone(worker=worker, number=number):
            return (_UNDONE | worker, *_halves(number))
        case Resumes(worker=worker, number=number):
            return (_RESUMES | worker, *_halves(number))


def _halves(number: int) -> tuple[int, int]:
    return number & 0xFFFF, number >> 16


def _entry(words: array[int], place: int) -> tuple[Entry, int]:
    """What stands at a place of a log, and the place behind it."""
    word = words[place]
    if word & _HOLDER:
        return Handled(Address("server", word & ~_HOLDER)), place + 1
    if word < _DEAD:
        return Handled(word), place + 1
    kind, worker = word & _MARK, word & _NUMBER
    end = place + 1 + _FOLLOWING[kind]
    rest = words[place + 1 : end]
    match kind:
        case 0x4000:
            return Died(worker), end
        case 0x5000:
            source = None if rest[3] == 0 else rest[3] - 1
            return Joined(worker, rest[0], rest[1] | rest[2] << 16, source), end
        case 0x6000 if word & _UNDONE == _UNDONE:
            return Undone(worker, rest[0] | rest[1] << 16), end
        case 0x6000:
            return Back(rest[0] | rest[1] << 16), end
    return Resumes(worker, rest[0] | rest[1] << 16), end


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
        for _, entry in self.placed(holder):
            yield entry

    def placed(self, holder: Address) -> Iterator[tuple[int, Entry]]:
        """What has happened to a holder, each with the number of words before it."""
        words, place = self.logs.get(holder, array("H")), 0
        while place < len(words):
            entry, end = _entry(words, place)
            yield place, entry
            place = end

    def senders(self, holder: Address) -> Iterator[Sender]:
        """Who sent what a holder has handled."""
        for entry in self.entries(holder):
            if isinstance(entry, Handled):
                yield entry.sender

    def turns(self, holder: Address) -> list[Turn]:
        """The log of a holder, for its replay."""
        found: list[Turn] = []
        lives: dict[Sender, int] = defaultdict(int)
        numbers: dict[Sender, int] = defaultdict(int)
        for place, entry in self.placed(holder):
            turn = Turn(entry, place)
            match entry:
                case Handled(sender=sender):
                    turn.life, turn.number = lives[sender], numbers[sender]
                    numbers[sender] += 1
                case Joined(worker=worker, life=life):
                    lives[worker], numbers[worker] = life, 0
                case Resumes(worker=worker, number=number):
                    numbers[worker] = number
                    for before in found:
                        again = before.entry == Handled(worker) and before.life == lives[worker]
                        before.answered &= not (again and before.number >= number)
            found.append(turn)
        return found

    def undone(self, worker: int) -> set[tuple[int, int, int]]:
        """What of a worker has come to nothing: its life, whose model it was for, its number."""
        life, found = 0, set()
        for entry in self.entries(Address("model", worker)):
            if isinstance(entry, Joined) and entry.worker == worker:
                life = entry.life
            elif isinstance(entry, Undone):
                found.add((life, entry.worker, entry.number))
        return found

    def dead(self, holders: Iterable[Address] | None = None) -> set[int]:
        """Workers that have died and have not come back, as these holders know; None: all."""
        found: set[int] = set()
        for holder in self.logs if holders is None else holders:
            here: set[int] = set()
            for entry in self.entries(holder):
                if isinstance(entry, Died):
                    here.add(entry.worker)
                elif isinstance(entry, Joined):
                    here.discard(entry.worker)
            found |= here
        return found

    def lives(self, worker: int) -> dict[int, Joined]:
        """The later lives of a worker, by their numbers."""
        entries = (entry for holder in self.logs for entry in self.entries(holder))
        return {
            entry.life: entry
            for entry in entries
            if isinstance(entry, Joined) and entry.worker == worker
        }

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
        aside = path.with_name(f".{path.name}")
        aside.write_bytes(b"".join(parts))
        aside.replace(path)

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
