"""Which program carries the sums of an exchange, as data of the plan: for buckets of every size.

The kind of program is `Exchange.collective`; here is what a topology adds to it: chunks, the order
of a ring, packed trees. Invariant: kind and carrier alone decide on the program of each size, so
that all ranks make the same one, and nothing that obeys a plan knows the topology it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from headway.documents import document
from headway.units import parse_bytes

Kind = Literal["ring", "direct", "halving-doubling", "servers", "trees"]
CARRIED: tuple[Kind, ...] = get_args(Kind)
"""Values of `Exchange.collective` that name a program (`headway.collective.carried`)."""
SUMMED = ("none", "fp16", "bf16")
"""Compressors whose buckets are one sum, which a program can carry."""
ROOT = -1
"""The parent of a tree's root."""


@document
class Tree:
    """One tree of a packing.

    Attributes:
        parents: Of each rank the next one on the way to the root; -1: the root.
        weight: Its part of the bucket, in any unit.
    """

    parents: tuple[int, ...]
    weight: float

    @classmethod
    def of(cls, parent: Iterable[int | None], weight: float) -> Tree:
        """From what packings say: None is the parent of the root."""
        return cls(parents=tuple(ROOT if p is None else p for p in parent), weight=weight)

    @property
    def parent(self) -> tuple[int | None, ...]:
        """`parents` as packings say it."""
        return tuple(None if p == ROOT else p for p in self.parents)


@document
class Carrier:
    """What a kind of program needs besides the size.

    Attributes:
        chunk: Size of a message of ring, servers and trees ("256 KiB"; of trees that of the
            heaviest one); empty: as the program decides.
        order: Of ring: the ranks along it; empty: by number.
        trees: Of trees.
        rates: The links for which the program was found, where each pair of ranks has links of its
            own: bytes per second by sender and receiver, 0: no link; empty: not known.
    """

    chunk: str = ""
    order: tuple[int, ...] = ()
    trees: tuple[Tree, ...] = ()
    rates: tuple[tuple[float, ...], ...] = ()

    @property
    def chunk_bytes(self) -> int | None:
        """None: as the program decides."""
        return parse_bytes(self.chunk) if self.chunk else None

    def __str__(self) -> str:
        """As in "along 2-0-1, in chunks of 64 KiB"."""
        parts = [f"along {'-'.join(map(str, self.order))}"] if self.order else []
        parts += [f"{len(self.trees)} of them"] if self.trees else []
        parts += [f"in chunks of {self.chunk}"] if self.chunk else []
        return ", ".join(parts)


def carrier_problems(kind: str, carrier: Carrier | None, ranks: int) -> Iterator[str]:
    """Why a program cannot carry the sums, one line each.

    Args:
        kind: `Exchange.collective`.
        carrier: Of the exchange.
        ranks: Who sum.
    """
    if kind not in CARRIED:
        if carrier is not None:
            yield f"exchange.carrier is for collective {', '.join(CARRIED)}; it is {kind}"
        return
    used = {"ring": ("chunk", "order"), "servers": ("chunk",), "trees": ("chunk", "trees")}
    found = carrier or Carrier()
    for name in ("chunk", "order", "trees"):
        if getattr(found, name) and name not in used.get(kind, ()):
            yield f"exchange.carrier.{name}: collective {kind} has none"
    if found.chunk:
        try:
            if parse_bytes(found.chunk) < 1:
                yield f"exchange.carrier.chunk is {found.chunk}; at least 1 byte"
        except ValueError as error:
            yield f"exchange.carrier.chunk: {error}"
    if found.order and sorted(found.order) != [*range(ranks)]:
        yield f"exchange.carrier.order {list(found.order)} is no order of ranks 0 to {ranks - 1}"
    if kind == "trees" and not found.trees:
        yield (
            "exchange.carrier.trees is missing; `headway train --collective trees --cluster FILE` "
            "packs them for a cluster's links"
        )
    if found.rates and not _are_rates(found.rates, ranks):
        yield (
            f"exchange.carrier.rates: for {ranks} ranks {ranks} rows of as many numbers that are "
            "finite and at least 0, and not all 0"
        )
    for number, tree in enumerate(found.trees):
        yield from (
            f"exchange.carrier.trees {number}: {why}" for why in _tree_problems(tree, ranks)
        )


def _are_rates(rates: tuple[tuple[float, ...], ...], ranks: int) -> bool:
    """Whether they are of these ranks."""
    numbers = [rate for row in rates for rate in row]
    square = len(rates) == ranks and all(len(row) == ranks for row in rates)
    return square and all(0 <= rate < float("inf") for rate in numbers) and any(numbers)


def _tree_problems(tree: Tree, ranks: int) -> Iterator[str]:
    parents = tree.parents
    if not 0 < tree.weight < float("inf"):
        yield f"weight {tree.weight:g}; it must be positive and finite"
    if len(parents) != ranks:
        yield f"parents of {len(parents)} ranks; there are {ranks}"
        return
    if not all(ROOT <= parent < ranks for parent in parents) or parents.count(ROOT) != 1:
        yield f"parents {list(parents)}: one is -1, the root, the others are ranks"
        return
    for rank in range(ranks):
        at = rank
        for _ in range(ranks):
            at = parents[at] if at != ROOT else ROOT
        if at != ROOT:
            yield f"parents {list(parents)}: rank {rank} never reaches the root"
            return
