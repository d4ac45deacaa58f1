"""Messages of the heartbeat: flat, short, and signed for one connection.

Both ends begin with a line of their own random number. From the two numbers and the job's key each
computes a key for either direction; every later line is a signature and a message. The signature
counts lines, so that none can be left out, repeated or moved to another connection. A message is a
flat set of names and texts as in a query string: its parser neither recurses nor guesses types.

What is not signed is no message: a stranger's connection ends there, and in the connection of a
rank such a line is skipped. The key is `sign(secret, token)`: see `headway.channel.job_secret`.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from math import isfinite
from urllib.parse import parse_qsl, urlencode

from headway.channel.job_secret import sign

MOST_BYTES_OF_STRANGERS = 1024
"""Of a line before the first signed one; a hello has a tenth of it and a host name of at most 255
characters."""
MOST_BYTES = 1 << 18
MOST_CHARACTERS = 4000
"""Of one text: 48,000 bytes when every character takes four bytes, three digits each."""
_MOST_FIELDS = 16
_NONCE_BYTES = 16
# Of HMAC-SHA256: 128 bits are as hard to guess as the key of a connection.
_SIGNATURE_DIGITS = 32


class LineError(ValueError):
    """The other end does not speak as a rank of this job: its connection is to be closed."""


def encode(message: Mapping[str, object]) -> bytes:
    """A message as ASCII without line breaks."""
    return urlencode(
        {name: str(value) for name, value in message.items()}, errors="replace"
    ).encode()


def decode(line: bytes) -> dict[str, str]:
    """The inverse of `encode`.

    Raises:
        ValueError: The line is none of its results.
    """
    if not line:
        return {}
    pairs = parse_qsl(
        line.decode("ascii"),
        keep_blank_values=True,
        strict_parsing=True,
        max_num_fields=_MOST_FIELDS,
    )
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def clip(text: str) -> str:
    """A text that fits a message."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."


def number(text: str) -> int:
    """A whole number from 0 to 2**63, in decimal digits.

    Raises:
        ValueError: Something else.
    """
    # int() also takes signs, underscores, blanks and the digits of all scripts.
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"no number: {text[:40]!r}")
    return int(text)


def seconds(text: str) -> float:
    """A finite number of seconds.

    Raises:
        ValueError: Something else.
    """
    found = float(text[:40])
    if not isfinite(found):
        raise ValueError(f"no time: {text[:40]!r}")
    return found


class SignedLines:
    """The lines of one connection, in both directions.

    Args:
        key: Of all connections to one listener.
        calls: This end has made the connection.
    """

    def __init__(self, key: bytes, *, calls: bool) -> None:
        self._key = key
        self._calls = calls
        self._nonce = secrets.token_bytes(_NONCE_BYTES).hex().encode()
        self._keys: tuple[bytes, bytes] | None = None
        self._counts = [0, 0]
        self._waiting: list[bytes] = []
        self._rest = b""
        self.trusted = False

    @property
    def greeting(self) -> bytes:
        """The first line."""
        return self._nonce + b"\n"

    @property
    def greeted(self) -> bool:
        """Whether the keys are known."""
        return self._keys is not None

    def write(self, message: Mapping[str, object]) -> bytes:
        """What to send for a message; nothing yet, where the other end has not greeted."""
        body = encode(message)
        if self._keys is None:
            self._waiting.append(body)
            return b""
        return self._signed(body)

    def read(self, data: bytes) -> tuple[list[dict[str, str]], bytes]:
        """The messages that are complete with some more bytes, and what is to be sent now.

        Raises:
            LineError: The connection is a stranger's.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        found, out = [], b""
        for line in lines:
            if len(line) > self._limit:
                raise LineError("the line is too long")
            if self._keys is None:
                out += self._greeted(line)
            elif (message := self._open(line)) is not None:
                found.append(message)
        if len(self._rest) > self._limit:
            raise LineError("the line is too long")
        return found, out

    @property
    def _limit(self) -> int:
        return MOST_BYTES if self.trusted else MOST_BYTES_OF_STRANGERS

    def _greeted(self, theirs: bytes) -> bytes:
        """Derive the keys; returns what has waited for them."""
        if len(theirs) != len(self._nonce):
            raise LineError("no greeting")
        caller, called = (self._nonce, theirs) if self._calls else (theirs, self._nonce)
        of_caller, of_called = (
            sign(self._key, who, caller, called) for who in ("caller", "called")
        )
        self._keys = (of_caller, of_called) if self._calls else (of_called, of_caller)
        waiting, self._waiting = self._waiting, []
        return b"".join(map(self._signed, waiting))

    def _signed(self, body: bytes) -> bytes:
        return self._signature(0, body) + b" " + body + b"\n"

    def _signature(self, direction: int, body: bytes) -> bytes:
        """Of the next line that leaves (0) or comes (1)."""
        assert self._keys is not None
        count = self._counts[direction] + 1
        code = sign(self._keys[direction], str(count), body).hex()[:_SIGNATURE_DIGITS].encode()
        if direction == 0:
            self._counts[0] = count
        return code

    def _open(self, line: bytes) -> dict[str, str] | None:
        """The message of a line; None where it is not signed, and not the first."""
        given, _, body = line.partition(b" ")
        if not hmac.compare_digest(given, self._signature(1, body)):
            if not self.trusted:
                raise LineError("the line is not signed with the key of this job")
            return None
        self._counts[1] += 1
        self.trusted = True
        try:
            return decode(body)
        except ValueError:  # of another version of headway
            return None
