"""How devices of several types lie on the axes of a mesh.

Devices stand in an order of their types, tensor groups inside of one type. They are laid out stage
by stage (all copies of stage 0, then of stage 1: pipelines across types) or copy by copy (all
stages of copy 0, then of copy 1: data parallelism across types); where a type ends in the middle of
a stage or of a copy, both are mixed. Invariant: every device that is used stands in one cell.
Sources: Jia et al. 2022 (Whale), order by memory and nested data parallelism; Zheng et al. 2022
(Alpa), device groups in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product

ORDERS = 24
"""Orders of types that are tried; beyond four types only the one that is given."""


@dataclass(frozen=True, kw_only=True, order=True)
class Cells:
    """The type of each cell of data x pipe.

    Attributes:
        copies: For each copy of the model the types of its stages.
        order: Of the axes, as in `Degrees`: "tdp" stage by stage, "tpd" copy by copy.
    """

    copies: tuple[tuple[str, ...], ...]
    order: str

    @cached_property
    def classes(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Distinct copies, and how many there are of each; in order."""
        return tuple(Counter(self.copies).items())

    def types_of(self, stage: int) -> frozenset[tuple[int, str]]:
        """(number of the class, type) of all cells of a stage."""
        return frozenset((c, kinds[stage]) for c, (kinds, _) in enumerate(self.classes))


def layouts(
    amounts: Mapping[str, int], *, tensor: int, data: int, pipeline: int, every: bool = True
) -> Iterator[Cells]:
    """All different ways to lay devices out.

    Args:
        amounts: Devices of each type; those of 0 are left out.
        tensor: Devices of a cell, all of one type.
        data: Copies.
        pipeline: Stages.
        every: All orders of the types; else the one in which they are given.
    """
    used = {kind: number for kind, number in amounts.items() if number}
    if any(number % tensor for number in used.values()):
        return
    if sum(used.values()) != tensor * data * pipeline:
        return
    seen: set[tuple[tuple[str, ...], ...]] = set()
    tried = permutations(used) if every and len(used) <= 4 else iter([tuple(used)])
    for kinds in tried:
        cells = [kind for kind in kinds for _ in range(used[kind] // tensor)]
        for order in ("tdp", "tpd"):
            copies = _copies(cells, data, pipeline, order)
            key = tuple(sorted(copies))  # which copy is the first does not matter
            if key not in seen:
                seen.add(key)
                yield Cells(copies=copies, order=order)


def _copies(
    cells: Sequence[str], data: int, pipeline: int, order: str
) -> tuple[tuple[str, ...], ...]:
    if order == "tpd":
        return tuple(tuple(cells[c * pipeline : (c + 1) * pipeline]) for c in range(data))
    return tuple(tuple(cells[s * data + c] for s in range(pipeline)) for c in range(data))


def amounts_of(
    counts: Mapping[str, int], devices: Sequence[int] | None
) -> tuple[dict[str, int], ...]:
    """How many devices of each type may be used together.

    Args:
        counts: That there are.
        devices: Numbers of devices in all, of powers of two or all of each type; None: every type
            is used whole or not at all.
    """
    ways = []
    for number in counts.values():
        some = {2**n for n in range(number.bit_length())} if devices is not None else set()
        ways.append(sorted({0, number, *(n for n in some if n <= number)}))
    found = [dict(zip(counts, numbers, strict=True)) for numbers in product(*ways)]
    return tuple(
        amounts
        for amounts in found
        if (sum(amounts.values()) in devices if devices is not None else any(amounts.values()))
    )
