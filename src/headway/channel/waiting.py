"""Waiting for whichever of many channels has a tensor, fairly."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headway.channel.channel import Channel
from headway.channel.patience import Pauses
from headway.errors import HeadwayError, Stalled, UsageError


def wait_any(channels: Sequence[Channel], timeout: float | None = None) -> Channel:
    """Wait until some channel has a tensor; of several the one that has waited longest to be asked.

    Args:
        channels: At least one.
        timeout: Seconds; None: the shortest of the channels'.

    Raises:
        PeerLost: One of them can never have any more, and no other has one.
        Stalled: None has one in time.
    """
    if not channels:
        raise UsageError("a wait for any of no channels", fix="Give at least one.")
    seconds = min(c._wire.seconds for c in channels) if timeout is None else timeout
    names = ", ".join(str(channel.peer) for channel in channels)
    pauses = Pauses(
        seconds,
        lambda: None,
        lambda limit: Stalled(
            f"no tensor came from any of the ranks {names} within {limit:g} s",
            where="channels",
            fix="Look for what they do instead, or allow more time with timeout=.",
        ),
    )
    while True:
        order = sorted(channels, key=lambda channel: channel._served)
        lost = None
        for channel in order:
            try:
                if channel.ready():
                    channel._served = time.monotonic_ns()
                    return channel
            except HeadwayError as error:
                lost = error
        if lost is not None:
            raise lost
        pauses.pause()
