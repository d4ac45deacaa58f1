"""What rank 0 finds out counts for all ranks, and so does its error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch.distributed as dist

from headway.errors import HeadwayError
from headway.run.failure import told_elsewhere

Found = TypeVar("Found")


def found_by_first(
    rank: int, find: Callable[[], Found], exchanging: AbstractContextManager[None]
) -> Found:
    """The same on all ranks; collective.

    Args:
        rank: Of this process.
        find: Called on rank 0 alone; its result travels pickled.
        exchanging: Around the message.

    Raises:
        HeadwayError: What `find` raised on rank 0.
    """
    found: list[Any] = [None]
    if rank == 0:
        try:
            found = [find()]
        except HeadwayError as error:
            found = [error]
    with exchanging:
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], HeadwayError):
        raise found[0] if rank == 0 else told_elsewhere(found[0])
    result: Found = found[0]
    return result
