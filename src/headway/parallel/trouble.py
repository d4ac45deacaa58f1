"""What an error of torch.distributed in a pipeline means, with the cell where this rank stands."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.distributed as dist

from headway.errors import HeadwayError, PeerLost, Stalled
from headway.schedule import Action, Kind

_EXCHANGE = re.compile(r"gloo|nccl|c10d|connection|socket|wait timeout|pipe", re.IGNORECASE)
_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_WAITING = frozenset({Kind.RECV, Kind.SEND, Kind.POST, Kind.SYNC, Kind.WAIT})


def explained(
    error: Exception, row: Sequence[Action], position: int, rank: int
) -> HeadwayError | None:
    """The error to raise in its place; None, and a note, where no other rank is the cause.

    Args:
        error: What was raised.
        row: Of this rank.
        position: Of the action that raised it; behind the last one: sends were awaited.
        rank: Of the table.
    """
    where = f"rank {rank} of the pipeline stands at {stand(row, position)}"
    ours = position >= len(row) or row[position].kind in _WAITING
    text = str(error).partition("\n")[0]
    of_group = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _EXCHANGE.search(text)
    )
    of_stream = isinstance(error, PeerLost | Stalled)
    if not (ours and (of_group or of_stream)):
        error.add_note(where)
        return None
    if isinstance(error, Stalled) or (of_group and _TIMED_OUT.search(text)):
        return Stalled(
            f"{where}, and what it waits for does not come",
            why=text,
            fix="Look for what the rank at the other end does instead, or allow more time.",
        )
    return PeerLost(
        f"another rank vanished while {where}",
        why=text,
        fix="Its own error, or the signal that killed it, is the cause.",
    )


def stand(row: Sequence[Action], position: int) -> str:
    """A cell of a row, for people."""
    if position >= len(row):
        return "the end of its row, where it waits until its last messages have arrived"
    return f"{row[position]} (action {position + 1} of {len(row)})"
