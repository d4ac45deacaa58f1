"""The state of compressors when the number of ranks changes.

Residuals are gradient that has not been sent yet: where ranks go, theirs must be sent by somebody
else, or it is lost. Everything else (factors, steps, shares) is, or may be, the same on all ranks.
Invariant: the sum of all residuals is the same before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

SUMMED = ("residual", "server")


def parts_of(key: str) -> tuple[str, int, str]:
    """(logical name, offset in elements, what) of "name/what" or "name/offset/what"."""
    name, _, what = key.rpartition("/")
    inner, _, offset = name.rpartition("/")
    return (inner, int(offset), what) if inner and offset.isdigit() else (name, 0, what)


def merge_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One state for one rank that takes over from several: residuals are added.

    Args:
        states: What `Method.state` gave on each of these ranks; not empty.
    """
    merged: dict[str, Tensor] = {}
    for state in states:
        for key, value in state.items():
            if key not in merged:
                merged[key] = value.clone()
            elif key.rpartition("/")[2] in SUMMED:
                merged[key] += value
    return merged


def spread_states(states: Sequence[Mapping[str, Tensor]], ranks: int) -> list[dict[str, Tensor]]:
    """States for another number of ranks.

    New rank r takes over the residuals of old ranks r, r + ranks, r + 2 ranks, and so on; a rank
    that is new begins with none, and with everything else from rank 0.

    Args:
        states: Of the old ranks, in order.
        ranks: The new number.
    """
    spread = []
    for rank in range(ranks):
        own = merge_states(states[rank::ranks]) if rank < len(states) else {}
        common = {
            key: value.clone()
            for key, value in states[0].items()
            if key.rpartition("/")[2] not in SUMMED
        }
        spread.append(common | own)
    return spread
