"""Compressors' states for another number of ranks, rank by rank, as no checkpoint needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from headway.comm.compress.state import SUMMED_STATE


def merge_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One state for one rank that takes over from one or more others: residuals are added."""
    merged: dict[str, Tensor] = {}
    for state in states:
        for key, value in state.items():
            if key not in merged:
                merged[key] = value.clone()
            elif key.rpartition("/")[2] in SUMMED_STATE:
                merged[key] += value
    return merged


def spread_states(states: Sequence[Mapping[str, Tensor]], ranks: int) -> list[dict[str, Tensor]]:
    """States for another number of ranks.

    New rank r takes over the residuals of old ranks r, r + ranks, r + 2 ranks, and so on; a rank
    that is new begins with none, and with everything else from rank 0.
    """
    spread = []
    for rank in range(ranks):
        own = merge_states(states[rank::ranks]) if rank < len(states) else {}
        common = {
            key: value.clone()
            for key, value in states[0].items()
            if key.rpartition("/")[2] not in SUMMED_STATE
        }
        spread.append(common | own)
    return spread
