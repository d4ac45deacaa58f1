"""The programs of an exchange whose sums a program carries, made for the size of each bucket.

Invariant: what is made depends on the arguments alone; `fingerprint` names it, so that ranks can
compare what they are about to carry out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from headway.collective.carrier import SUMMED, Carrier
from headway.collective.generators import direct, halving_doubling, ring, servers
from headway.collective.generators.trees import trees
from headway.collective.program import CollectiveProgram
from headway.collective.task import Collective
from headway.collective.traffic import NOTHING, Traffic

_KEPT = 64
"""Programs that are kept: those of the buckets and chunks of a model or two."""


@lru_cache(maxsize=_KEPT)
def make_program(
    kind: str, carrier: Carrier | None, ranks: int, elements: int, element_bytes: int
) -> CollectiveProgram:
    """The program of an all-reduce.

    Args:
        kind: Of `CARRIED`.
        carrier: Legal for `kind` and these ranks.
        ranks: Who sum.
        elements: Of the bucket.
        element_bytes: Of an element, as it travels.
    """
    task, own = Collective.of("all_reduce", ranks, elements), carrier or Carrier()
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


def carried_traffic(
    kind: str,
    carrier: Carrier | None,
    ranks: Sequence[int],
    elements: int,
    compressor: str = "none",
    element_bytes: int = 4,
) -> Traffic:
    """What the exchange of one bucket sends, from the steps of its program.

    Args:
        kind: Of `CARRIED`.
        carrier: Of the exchange.
        ranks: Global ranks that exchange, ascending.
        elements: Of the bucket, flags included.
        compressor: One of `SUMMED`.
        element_bytes: Of a gradient.

    Raises:
        ValueError: A compressor that is more than one sum.
    """
    if compressor not in SUMMED:
        raise ValueError(f"a program carries sums, not what {compressor} gathers")
    if len(ranks) == 1:
        return NOTHING
    width = element_bytes if compressor == "none" else 2
    sent = make_program(kind, carrier, len(ranks), elements, width).traffic(width).sent
    return Traffic({(ranks[a], ranks[b]): size for (a, b), size in sent.items()})


def bucket_elements(shapes: Iterable[Sequence[int]]) -> int:
    """Of a bucket of tensors of these shapes, with a flag for each."""
    sizes = [math.prod(shape) for shape in shapes]
    return sum(sizes) + len(sizes)


def fingerprint(programs: Iterable[CollectiveProgram]) -> str:
    """Sixteen hexadecimal digits that name what all ranks do in these programs."""
    found = hashlib.sha256()
    for program in programs:
        found.update(repr((program.collective, program.steps, program.scratch)).encode())
    return found.hexdigest()[:16]
