"""A model as a row of units, cut where one tensor crosses, and which stretches of it are alike.

Invariant: units cover the operators without gaps, and stretches of one class have the same costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from headway.graph import Operator, blocks, cuts
from headway.graph.block import Structures
from headway.planner.operators import Workload
from headway.planner.pipeline_cuts import Lines, by_number


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Operators that no stage border divides.

    Attributes:
        start: Number of the first operator.
        stop: Number behind the last.
        kind: Equal for units of equal structure: a number from 0.
        entry: The tensor that enters; "" for the first unit.
        exit: The tensor that leaves; "" for the last.
        module: With which it begins: of the first part of its first operator, where nothing else
            lies in it; else `layer`.
        layer: Module of its first operator that has one. A border in front of it, behind what was
            folded into it, is taken for this one.
    """

    start: int
    stop: int
    kind: int
    entry: str
    exit: str
    module: str
    layer: str = ""


def units(work: Workload) -> tuple[Unit, ...]:
    """The finest row of units: repeated blocks whole, what lies between them cut where possible."""
    graph = work.graph
    structures = Structures(graph)
    segments = blocks(graph, structures=structures).segments
    counts: dict[str, int] = {}
    for segment in segments:
        counts[segment.structure] = counts.get(segment.structure, 0) + 1
    inside = {
        place
        for segment in segments
        if counts[segment.structure] > 1
        for place in range(segment.start + 1, segment.stop)
    }
    borders: list[tuple[int, str]] = [(0, "")]
    for cut in cuts(graph):
        if cut.place not in inside and cut.tensors[0] != borders[-1][1]:
            borders.append((cut.place, cut.tensors[0]))
    borders.append((len(graph.operators), ""))
    kinds: dict[object, int] = {}
    found = []
    everywhere = _around(graph.operators)
    for (start, entry), (stop, exit_) in pairwise(borders):
        operators = graph.operators[start:stop]
        shapes = tuple(graph.tensors[t].shape if t else () for t in (entry, exit_))
        key = (structures.of(start, stop), shapes)
        layer = next((o.module for o in operators if o.module), "")
        module, own = next(iter(operators[0].modules), ""), _around(operators)
        if not module or own[module] < everywhere[module]:
            module = layer
        kind = kinds.setdefault(key, len(kinds))
        found.append(
            Unit(
                start=start,
                stop=stop,
                kind=kind,
                entry=entry,
                exit=exit_,
                module=module,
                layer=layer,
            )
        )
    return tuple(found)


def _around(operators: Sequence[Operator]) -> Counter[str]:
    """How many operators lie in each module, wholly or in part."""
    found = Counter[str]()
    for operator in operators:
        paths = (name.split(".") for name in operator.modules or (operator.module,))
        found.update({".".join(path[:n]) for path in paths for n in range(1, len(path) + 1)})
    return found


@dataclass(frozen=True)
class Stretches:
    """Which stretches of the row are alike.

    Attributes:
        of: (L, L + 1): the class of the units from i to before j.
        before: Of each class the one without its last unit; -1 for one unit.
        last: Of each class the kind of its last unit.
        examples: Of each class one (i, j).
        lengths: The (first class, class behind the last) of each number of units.
    """

    of: np.ndarray
    before: tuple[int, ...]
    last: tuple[int, ...]
    examples: tuple[tuple[int, int], ...]
    lengths: tuple[tuple[int, int], ...]

    @cached_property
    def lines(self) -> Lines:
        """`of` by numbers of units."""
        return by_number(self.of)

    def within(self, width: int) -> Lines:
        """Of stretches of at most so many units; 0: of all."""
        whole, last = self.lines, self.lengths[width - 1][1]
        return Lines(whole.of[: width or None], *(part[:last] for part in whole[1:]))


def stretches(row: tuple[Unit, ...]) -> Stretches:
    """Numbers the distinct sequences of kinds, shorter ones first."""
    length = len(row)
    kinds = np.array([unit.kind for unit in row])
    of = np.full((length, length + 1), -1, dtype=np.int64)
    codes = np.zeros(length, dtype=np.int64)
    numbers = codes - 1
    before: list[int] = []
    last: list[int] = []
    examples: list[tuple[int, int]] = []
    lengths: list[tuple[int, int]] = []
    for size in range(1, length + 1):
        starts = length - size + 1
        pairs = codes[:starts] * (length + 1) + kinds[size - 1 :]
        _, first, codes = np.unique(pairs, return_index=True, return_inverse=True)
        before += numbers[first].tolist()
        last += kinds[first + size - 1].tolist()
        numbers = codes + len(examples)
        examples += [(start, start + size) for start in first.tolist()]
        of[np.arange(starts), np.arange(size, length + 1)] = numbers
        lengths.append((len(examples) - len(first), len(examples)))
    return Stretches(of, tuple(before), tuple(last), tuple(examples), tuple(lengths))
