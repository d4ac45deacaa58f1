"""The history of a run: in which order each holder has handled its messages.

Everything else follows from it, because the messages of one sender come in the order in which they
were sent: who read which version, whose push was applied when, what a worker computed with. It
takes two bytes for each message, and makes an asynchronous run repeatable bit by bit.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.errors import RunError
from headway.synchrony.actors import Address, Sender

_MAGIC = b"headway history 1\n"
_KINDS = ("server", "centre", "model", "cache", "meeting")
_HOLDER = 0x8000
"""Senders below are workers; above, the number of a server that refreshes a cache."""


@dataclass
class History:
    """The log of each holder: who sent the messages that it has handled, in their order."""

    logs: dict[Address, array[int]] = field(default_factory=dict)

    def note(self, holder: Address, sender: Sender) -> None:
        """A holder handles the next message of a sender."""
        number = sender if isinstance(sender, int) else _HOLDER | sender.number
        self.logs.setdefault(holder, array("H")).append(number)

    def senders(self, holder: Address) -> Iterator[Sender]:
        """Who sent what a holder has handled."""
        for number in self.logs.get(holder, ()):
            yield Address("server", number & ~_HOLDER) if number & _HOLDER else number

    @property
    def events(self) -> int:
        return sum(map(len, self.logs.values()))

    def save(self, path: Path) -> None:
        """Write one file: of each holder its address, and two bytes for each message."""
        parts = [_MAGIC]
        for holder, log in sorted(self.logs.items()):
            head = (_KINDS.index(holder.kind), holder.number, holder.share, len(log))
            parts += [struct.pack("<BIIQ", *head), log.tobytes()]
        path.write_bytes(b"".join(parts))

    @classmethod
    def load(cls, path: Path) -> History:
        """Read what `save` has written.

        Raises:
            RunError: It is no such file, or has been cut off.
        """
        data = path.read_bytes()
        if not data.startswith(_MAGIC):
            raise _damaged(path, "it does not begin as one")
        found, place = cls(), len(_MAGIC)
        head = struct.Struct("<BIIQ")
        while place < len(data):
            if len(data) - place < head.size:
                raise _damaged(path, "it ends in the middle of a log")
            kind, number, share, count = head.unpack_from(data, place)
            place += head.size
            if kind >= len(_KINDS) or len(data) - place < 2 * count:
                raise _damaged(path, "it ends in the middle of a log")
            log = array("H")
            log.frombytes(data[place : place + 2 * count])
            found.logs[Address(_KINDS[kind], number, share)] = log
            place += 2 * count
        return found


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
