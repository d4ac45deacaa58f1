"""One buffer over several channels that work beside each other, so that all finish together.

Blink (Wang et al. 2020, section 3.4) sends a part over PCIe while the trees run on NVLink. With D
bytes, bandwidths B_p and B_n and t seconds to switch PCIe on:

    D_p / B_p + t = D_n / B_n   =>   D_p = D B_p / (B_p + B_n) - t B_p B_n / (B_p + B_n)

and 0 <= D_p <= D. Invariant: the parts sum to the whole; a channel that gets none would start later
than the others end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import PlanError


@dataclass(frozen=True)
class Channel:
    """A way for bytes.

    Attributes:
        rate: Algorithm bandwidth, bytes per second: of trees the rate of their packing.
        start: Seconds before its first byte, for example to switch to it.
    """

    rate: float
    start: float = 0.0


def shares(num_bytes: float, channels: Sequence[Channel]) -> tuple[float, ...]:
    """The bytes of each channel.

    The moment T at which all end: sum over the channels with start < T of rate (T - start) = bytes.

    Args:
        num_bytes: Of the whole.
        channels: In any order.

    Raises:
        PlanError: No channel, or one that has no rate.
    """
    if not channels or any(channel.rate <= 0 or channel.start < 0 for channel in channels):
        raise PlanError(
            "these channels cannot share a buffer",
            problems=[f"{channel}" for channel in channels] or ["there is none"],
            fix="Give each a rate above 0 and a start of at least 0.",
        )
    end = rate = before = 0.0
    for channel in sorted(channels, key=lambda channel: channel.start):
        if rate and end <= channel.start:
            break
        rate, before = rate + channel.rate, before + channel.rate * channel.start
        end = (num_bytes + before) / rate
    return tuple(max(0.0, (end - channel.start) * channel.rate) for channel in channels)
