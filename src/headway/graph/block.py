"""Repeated blocks: runs of operators of one module that have the same structure as others.

A run's structure is what its operators are, how they are wired inside, and the specs of what
enters; names do not count. A GPT of 48 layers has one distinct block with 48 uses: a planner solves
it once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
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


def blocks(graph: ModelGraph, smallest: int = 3, structures: Structures | None = None) -> Blocks:
    """The largest repeated modules, and what lies between them.

    Args:
        graph: The model.
        smallest: Operators that a block has at least; less is left between the blocks.
        structures: Of the graph, where somebody has them.
    """
    structures = structures or Structures(graph)
    runs = list(_runs(structures, 0, len(graph.operators), 0))
    counts = Counter(run.structure for run in runs)
    chosen: list[Segment] = []
    place = 0
    for run in runs:  # outer runs come before inner ones
        repeated = counts[run.structure] > 1 and run.stop - run.start >= smallest
        if repeated and run.start >= place:
            chosen.append(run)
            place = run.stop
    segments = tuple(_filled(structures, chosen))
    return Blocks(segments=segments, uses=dict(Counter(s.structure for s in segments)))


def _runs(structures: Structures, start: int, stop: int, depth: int) -> Iterator[Segment]:
    """Every module's runs, outer ones first."""
    graph = structures.graph

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
            structure=structures.of(begin, end),
        )
        yield from _runs(structures, begin, end, depth + 1)


def _filled(structures: Structures, chosen: list[Segment]) -> Iterator[Segment]:
    place, stop = 0, len(structures.graph.operators)
    for segment in chosen:
        if segment.start > place:
            yield _between(structures, place, segment.start)
        yield segment
        place = segment.stop
    if place < stop:
        yield _between(structures, place, stop)


def _between(structures: Structures, start: int, stop: int) -> Segment:
    return Segment(start=start, stop=stop, module="", structure=structures.of(start, stop))


@dataclass(frozen=True)
class Structures:
    """Hashes of what neighbouring operators are, whatever they and their tensors are called."""

    graph: ModelGraph
    _specs: dict[str, str] = field(default_factory=dict)
    _known: dict[tuple[int, ...], str] = field(default_factory=dict)

    def of(self, start: int, stop: int) -> str:
        """Of the operators from `start` to before `stop`."""
        numbers: dict[str, int] = {}
        key: list[int] = []
        for fact, tensors in self._lines[start:stop]:
            key.append(fact)
            key += [numbers.setdefault(tensor, len(numbers)) for tensor in tensors]
        line = tuple(key)
        if line not in self._known:
            self._known[line] = self._hash(start, stop)
        return self._known[line]

    @cached_property
    def _lines(self) -> list[tuple[int, tuple[str, ...]]]:
        """Of every operator a number of what it is, with the specs of its tensors; and these."""
        facts: dict[tuple[str, ...], int] = {}
        found = []
        for operator in self.graph.operators:
            tensors = (*operator.inputs, *operator.outputs)
            fact = self._fact(operator), *map(self._spec, tensors)
            found.append((facts.setdefault(fact, len(facts)), tensors))
        return found

    def _hash(self, start: int, stop: int) -> str:
        numbers: dict[str, int] = {}
        lines = []
        for operator in self.graph.operators[start:stop]:
            wires = [
                f"({numbers.setdefault(tensor, len(numbers))}, {self._spec(tensor)})"
                for tensor in (*operator.inputs, *operator.outputs)
            ]
            lines.append(f"[{', '.join(wires)}] {self._fact(operator)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def _spec(self, tensor: str) -> str:
        if tensor not in self._specs:
            spec = self.graph.tensors[tensor]
            self._specs[tensor] = f"{spec.shape}, {spec.dtype!r}"
        return self._specs[tensor]

    def _fact(self, operator: Operator) -> str:
        """What does not depend on the operators before it."""
        trained = [tensor in operator.parameters for tensor in operator.inputs]
        kept = sorted(saved.bytes for saved in operator.saved)
        facts = f"{len(operator.inputs)} {trained} {kept}"
        return f"{facts}\n{self.graph.descriptions[operator.name]}"
