"""How much a list of collective calls moves, by kind and axis."""

from __future__ import annotations

from collections.abc import Iterable

from headway.collective.collective_calls import CallKind, CollectiveCall


def call_volumes(calls: Iterable[CollectiveCall]) -> dict[tuple[CallKind, str], tuple[int, float]]:
    """(number, bytes) by kind and axis."""
    found: dict[tuple[CallKind, str], tuple[int, float]] = {}
    for call in calls:
        count, size = found.get((call.kind, call.axis), (0, 0.0))
        found[call.kind, call.axis] = count + call.count, size + call.total
    return found
