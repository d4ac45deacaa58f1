"""Messages of `headway.synchrony` between two processes, over a dynamic channel.

A message is one text, in which tensors are only numbered, and behind it the tensors, each as it
lies. `MessageLink` is one direction: a thread of its own sends, so that whoever posts a message
never waits for the other end. What is posted to an end that is gone is dropped: whoever reads from
it hears of that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from headway.channel.channel import Channel
from headway.channel.typed_text import read_typed, write_typed
from headway.errors import HeadwayError, PeerLost, RunError

_COUNT_BYTES = 4


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """The tensors of a message, in the order of its fields."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, tuple | list):
        for one in thing:
            yield from tensors_in(one)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            yield from tensors_in(getattr(thing, field.name))


def put_message(channel: Channel, message: Any) -> None:
    """Send a message; waits for the other end where it has not taken those before."""
    tensors = list(tensors_in(message))
    text = write_typed(message, tensors)
    data = len(tensors).to_bytes(_COUNT_BYTES, "little") + text
    channel.put(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    for tensor in tensors:
        channel.put(tensor.detach())


class MessageReader:
    """Takes messages out of one channel part by part, so that a slow sender holds up nobody else.

    Attributes:
        channel: Where they come from.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._text: bytes | None = None
        self._count = 0
        self._tensors: list[Tensor] = []

    def take(self) -> tuple[Any] | None:
        """Take a part that is there; the message that it completes, in a tuple, or None.

        Raises:
            RunError: What came is no message.
            PeerLost: The other end is gone.
        """
        with self.channel.get() as came:
            if self._text is not None:
                self._tensors.append(came.clone())
            else:
                self._text = bytes(came.numpy().tobytes())
                self._count = int.from_bytes(self._text[:_COUNT_BYTES], "little")
        if len(self._text) < _COUNT_BYTES or self._count > 1 << 16:
            raise RunError(f"rank {self.channel.peer} sent what is no message")
        if len(self._tensors) < self._count:
            return None
        message = read_typed(self._text[_COUNT_BYTES:], self._tensors)
        self._text, self._tensors = None, []
        return (message,)


class MessageLink:
    """Sends messages to one process in their order, by a thread of its own."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: HeadwayError | None = None
        self._thread = threading.Thread(
            target=self._send, name=f"messages to rank {channel.peer}", daemon=True
        )
        self._thread.start()

    def post(self, message: Any) -> None:
        """Send a message some time soon.

        Raises:
            HeadwayError: An earlier one could not be sent.
        """
        if self._error is not None:
            raise self._error
        self._queue.put((message,))

    def close(self, seconds: float) -> bool:
        """Return when all messages have left, or after some seconds; whether they have.

        Raises:
            HeadwayError: One could not be sent.
        """
        self._queue.put(None)
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _send(self) -> None:
        gone = False
        while (item := self._queue.get()) is not None:
            if gone or self._error is not None:
                continue
            try:
                put_message(self._channel, item[0])
            except PeerLost:
                gone = True
            except HeadwayError as error:
                self._error = error
