"""Messages of `headway.synchrony` between two processes, over a dynamic channel.

A message is one text, in which tensors are only numbered, and behind it the tensors, each as it
lies. `MessageLink` is one direction: a thread of its own sends, so that whoever posts a message
never waits for the other end.
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
from headway.errors import HeadwayError, RunError

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


def get_message(channel: Channel) -> Any:
    """The next message; waits for it. Errors as of `Channel.get`."""
    with channel.get() as came:
        data = bytes(came.numpy().tobytes())
    count = int.from_bytes(data[:_COUNT_BYTES], "little")
    if len(data) < _COUNT_BYTES or count > 1 << 16:
        raise RunError(f"rank {channel.peer} sent what is no message")
    tensors = []
    for _ in range(count):
        with channel.get() as tensor:
            tensors.append(tensor.clone())
    return read_typed(data[_COUNT_BYTES:], tensors)


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

    def close(self) -> None:
        """Return when all messages have left."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None:
                try:
                    put_message(self._channel, item[0])
                except HeadwayError as error:
                    self._error = error
