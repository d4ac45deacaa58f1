"""The all-reduce algorithm of an exchange as plan data, and its program for each bucket size.

`Exchange.collective` names the algorithm (ring, direct, halving-doubling, parameter servers,
trees); `AllReduceOptions` adds what a topology contributes: chunk size, the order of a ring,
packed trees. Together they determine the program of every size, so that all ranks build the
same one and no executor needs to know the topology. `program_fingerprint` names the programs so
that ranks can compare them before they run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, get_args

from headway.collective.compression import UNCOMPRESSED, Compression
from headway.collective.generators import direct, ring, servers, trees
from headway.collective.generators.recursive_halving import halving_doubling
from headway.collective.nodes import NOTHING, Traffic
from headway.collective.program.program import CollectiveProgram, CollectiveTask
from headway.documents import document
from headway.units import parse_bytes

AllReduceKind = Literal["ring", "direct", "halving-doubling", "servers", "trees"]
ALL_REDUCE_KINDS: tuple[AllReduceKind, ...] = get_args(AllReduceKind)
"""Values of `Exchange.collective` that name a program."""
ROOT = -1
"""The parent of a tree's root."""


@document
class PlanTree:
    """One tree of a packing.

    Attributes:
        parents: Of each rank the next one on the way to the root; -1: the root.
        weight: Its part of the bucket, in any unit.
    """

    parents: tuple[int, ...]
    weight: float

    @classmethod
    def of(cls, parent: Iterable[int | None], weight: float) -> PlanTree:
        """From the parents of a packing: None is the parent of the root."""
        return cls(parents=tuple(ROOT if p is None else p for p in parent), weight=weight)

    @property
    def parent(self) -> tuple[int | None, ...]:
        """`parents`, with None for the parent of the root."""
        return tuple(None if p == ROOT else p for p in self.parents)


@document
class AllReduceOptions:
    """What a kind of program needs besides the size.

    Attributes:
        chunk: Size of a message of ring, servers and trees ("256 KiB"; of trees that of the
            heaviest one); empty: as the program decides.
        order: Of ring: the ranks along it; empty: by number.
        rates: The links for which the program was found, where each pair of ranks has links of its
            own: bytes per second by sender and receiver, 0: no link; empty: not known.
    """

    chunk: str = ""
    order: tuple[int, ...] = ()
    trees: tuple[PlanTree, ...] = ()
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


def all_reduce_problems(kind: str, carrier: AllReduceOptions | None, ranks: int) -> Iterator[str]:
    """Why a program cannot perform the sums of the exchange, one line each."""
    if kind not in ALL_REDUCE_KINDS:
        if carrier is not None:
            yield f"exchange.carrier is for collective {', '.join(ALL_REDUCE_KINDS)}; it is {kind}"
        return
    used = {"ring": ("chunk", "order"), "servers": ("chunk",), "trees": ("chunk", "trees")}
    found = carrier or AllReduceOptions()
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
    numbers = [rate for row in rates for rate in row]
    square = len(rates) == ranks and all(len(row) == ranks for row in rates)
    return square and all(0 <= rate < float("inf") for rate in numbers) and any(numbers)


def _tree_problems(tree: PlanTree, ranks: int) -> Iterator[str]:
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
        # After as many steps as there are ranks, only a circle has not reached the root.
        for _ in range(ranks):
            at = parents[at] if at != ROOT else ROOT
        if at != ROOT:
            yield f"parents {list(parents)}: rank {rank} never reaches the root"
            return


# The programs of an exchange whose sums a program carries, made for the size of each bucket.


# Programs that are kept: those of the buckets and chunks of a model or two.
_CACHED_PROGRAMS = 64


@lru_cache(maxsize=_CACHED_PROGRAMS)
def all_reduce_program(
    kind: str, carrier: AllReduceOptions | None, ranks: int, elements: int, element_bytes: int
) -> CollectiveProgram:
    """The program of an all-reduce; `kind` is one of `ALL_REDUCE_KINDS`.

    Args:
        carrier: Legal for `kind` and these ranks.
        element_bytes: Of an element, as it travels.
    """
    task, own = CollectiveTask.of("all_reduce", ranks, elements), carrier or AllReduceOptions()
    size = own.chunk_bytes
    chunk = None if size is None else max(1, size // element_bytes)
    match kind:
        case "ring":
            return ring(task, chunk=chunk, order=own.order or None)
        case "direct":
            return direct(task)
        case "halving-doubling":
            return halving_doubling(task)
        case "servers":
            return servers(task, chunk=chunk)
        case "trees":
            return trees(task, [(tree.parent, tree.weight) for tree in own.trees], chunk=chunk)
    raise ValueError(f"no program {kind!r} carries sums")


def all_reduce_traffic(
    kind: str,
    carrier: AllReduceOptions | None,
    ranks: Sequence[int],
    elements: int,
    compression: Compression = UNCOMPRESSED,
    element_bytes: int = 4,
) -> Traffic:
    """What the exchange of one bucket sends, from the steps of its program.

    Args:
        ranks: Global ranks that exchange, ascending.
        elements: Of the bucket, flags included.

    Raises:
        ValueError: A compressor that is not elementwise.
    """
    if not compression.elementwise:
        raise ValueError(f"a program carries sums, not what {compression.name} gathers")
    if len(ranks) == 1:
        return NOTHING
    # Compressed to 16 bits, elements are also summed as such, and the program is cut for them.
    width = compression.wire_element_bytes(element_bytes)
    sent = all_reduce_program(kind, carrier, len(ranks), elements, width).traffic(width).sent
    return Traffic({(ranks[a], ranks[b]): size for (a, b), size in sent.items()})


def bucket_elements(shapes: Iterable[Sequence[int]]) -> int:
    """Of a bucket of tensors of these shapes, with a flag for each."""
    sizes = [math.prod(shape) for shape in shapes]
    return sum(sizes) + len(sizes)


def program_fingerprint(programs: Iterable[CollectiveProgram]) -> str:
    """Sixteen hexadecimal digits that name what all ranks do in these programs."""
    found = hashlib.sha256()
    for program in programs:
        # repr, because hash() of a text differs from process to process.
        found.update(repr((program.collective, program.steps, program.scratch)).encode())
    return found.hexdigest()[:16]
