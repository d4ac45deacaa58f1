"""Repeated blocks: runs of operators of one module that have the same structure as others.

A run's structure is what its operators are, how they are wired inside, and the specs of what
enters; names do not count. A GPT of 48 layers has one distinct block with 48 uses: a planner solves
it once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from headway.graph.model import ModelGraph
from headway.graph.operator import Operator


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Neighbouring operators.

    Attributes:
        start: Number of the first operator.
        stop: Number behind the last.
        module: The module that holds them; "" for a run between blocks.
        structure: Equal for segments of equal structure.
    """

    start: int
    stop: int
    module: str
    structure: str


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A model as a sequence of segments.

    Attributes:
        segments: In order, without gaps.
        uses: How often each structure occurs, in the order of first use.
    """

    segments: tuple[Segment, ...]
    uses: dict[str, int]

    @property
    def repeated(self) -> dict[str, int]:
        """Structures with more than one use."""
        return {structure: count for structure, count in self.uses.items() if count > 1}


def blocks(graph: ModelGraph, smallest: int = 3) -> Blocks:
    """The largest repeated modules, and what lies between them.

    Args:
        graph: The model.
        smallest: Operators that a block has at least; less is left between the blocks.
    """
    runs = list(_runs(graph, 0, len(graph.operators), 0))
    counts = Counter(run.structure for run in runs)
    chosen: list[Segment] = []
    place = 0
    for run in runs:  # outer runs come before inner ones
        repeated = counts[run.structure] > 1 and run.stop - run.start >= smallest
        if repeated and run.start >= place:
            chosen.append(run)
            place = run.stop
    segments = tuple(_filled(graph, chosen))
    return Blocks(segments=segments, uses=dict(Counter(s.structure for s in segments)))


def _runs(graph: ModelGraph, start: int, stop: int, depth: int) -> Iterator[Segment]:
    """Every module's runs, outer ones first."""

    def path(place: int) -> tuple[str, ...]:
        return tuple(graph.operators[place].module.split("."))[: depth + 1]

    for module, group in groupby(range(start, stop), path):
        places = list(group)
        if len(module) <= depth or not module[0]:
            continue
        begin, end = places[0], places[-1] + 1
        yield Segment(
            start=begin,
            stop=end,
            module=".".join(module),
            structure=structure(graph, graph.operators[begin:end]),
        )
        yield from _runs(graph, begin, end, depth + 1)


def _filled(graph: ModelGraph, chosen: list[Segment]) -> Iterator[Segment]:
    place = 0
    for segment in chosen:
        if segment.start > place:
            yield _between(graph, place, segment.start)
        yield segment
        place = segment.stop
    if place < len(graph.operators):
        yield _between(graph, place, len(graph.operators))


def _between(graph: ModelGraph, start: int, stop: int) -> Segment:
    found = structure(graph, graph.operators[start:stop])
    return Segment(start=start, stop=stop, module="", structure=found)


def structure(graph: ModelGraph, operators: tuple[Operator, ...]) -> str:
    """A hash of what some operators are, whatever they and their tensors are called."""
    numbers: dict[str, int] = {}
    tensors = graph.tensors
    lines = []
    for operator in operators:
        wires = [
            (numbers.setdefault(tensor, len(numbers)), tensors[tensor].shape, tensors[tensor].dtype)
            for tensor in (*operator.inputs, *operator.outputs)
        ]
        trained = [tensor in operator.parameters for tensor in operator.inputs]
        kept = sorted(saved.bytes for saved in operator.saved)
        lines.append(f"{wires} {len(operator.inputs)} {trained} {kept}")
        lines.append(graph.descriptions[operator.name])
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
