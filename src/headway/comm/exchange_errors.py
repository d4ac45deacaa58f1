"""What errors of torch's process groups mean: an exchange that broke, or one that came too late.

Gloo raises bare RuntimeErrors, which only their text tells from a user's.
"""

from __future__ import annotations

import re

import torch.distributed as dist

_EXCHANGE = re.compile(
    r"gloo|nccl|c10d|connection|socket|wait timeout|pair closure|store|pipe", re.IGNORECASE
)
_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


def is_exchange_error(error: BaseException) -> bool:
    """Whether an error comes from an exchange between ranks, and not from the user's code."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_EXCHANGE.search(str(error)))


def is_timeout(error: BaseException) -> bool:
    """Whether an error of an exchange says that another rank did not come in time."""
    return bool(_TIMED_OUT.search(str(error)))
