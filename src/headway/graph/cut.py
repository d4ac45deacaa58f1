"""Where a model can be cut into stages: between two operators, where few tensors are alive.

Tensors that are made of no input and no parameter (positions, rotations, causal masks) do not
count: a stage makes them itself. Neither do the caller's inputs, which every stage can be given.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.graph.model import ModelGraph


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A place between two operators.

    Attributes:
        place: Number of the operator before which it lies; 1 to the number of operators - 1.
        tensors: What crosses it, in the order in which it was made.
        bytes: Of those.
    """

    place: int
    tensors: tuple[str, ...]
    bytes: int


def cuts(graph: ModelGraph, most: int = 1) -> tuple[Cut, ...]:
    """All places that at most `most` tensors cross.

    Views of one tensor that cross together count each: what crosses is what a later operator reads.
    """
    fixed = constants(graph)
    last = {tensor: max(places) for tensor, places in graph.consumers.items()}
    last |= dict.fromkeys(graph.outputs, len(graph.operators))
    alive: dict[str, int] = {}
    found = []
    for place, operator in enumerate(graph.operators):
        alive = {tensor: end for tensor, end in alive.items() if end >= place}
        if place and 0 < len(alive) <= most:
            size = sum(graph.values[tensor].bytes for tensor in alive)
            found.append(Cut(place=place, tensors=tuple(alive), bytes=size))
        for tensor in operator.outputs:
            if tensor not in fixed and last.get(tensor, -1) > place:
                alive[tensor] = last[tensor]
    return tuple(found)


def constants(graph: ModelGraph) -> frozenset[str]:
    """Tensors that are made of no input and no parameter."""
    found: set[str] = set()
    for operator in graph.operators:
        if all(tensor in found or tensor in graph.buffers for tensor in operator.inputs):
            found.update(operator.outputs)
    return frozenset(found)
