"""An exchange whose sums a program carries: who chooses it, and that all ranks chose the same.

Invariant: the plan and the size of a bucket decide; nothing is measured, nothing is asked of other
ranks but whether they decided alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from headway.collective.carried import fingerprint, make_program
from headway.collective.program import CollectiveProgram
from headway.collective.task import Collective
from headway.comm.backend import Choose
from headway.errors import PlanError
from headway.plan import Exchange


def chooser(description: Exchange) -> Choose | None:
    """For groups of the exchange; None: Gloo's own all-reduce is what the plan wants."""
    if not description.carried:
        return None

    def choose(
        task: Collective, ranks: tuple[int, ...], element_bytes: int
    ) -> CollectiveProgram | None:
        if task.op != "all_reduce":
            return None
        return program_of(description, len(ranks), task.elements, element_bytes)

    return choose


def program_of(
    description: Exchange, ranks: int, elements: int, element_bytes: int
) -> CollectiveProgram:
    """What carries a bucket or a chunk of so many elements."""
    return make_program(description.collective, description.carrier, ranks, elements, element_bytes)


def check_alike(description: Exchange, ranks: int, sizes: Iterable[tuple[int, int]]) -> None:
    """Compare the programs of all ranks before the first one runs; collective over the world.

    Args:
        description: The plan's, with a program.
        ranks: Who exchange.
        sizes: Elements, and bytes of an element, of all buckets and chunks.

    Raises:
        PlanError: Names the ranks whose programs are others than rank 0's.
    """
    own = fingerprint(program_of(description, ranks, *size) for size in sorted(set(sizes)))
    found: list[str] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    others = [rank for rank, name in enumerate(found) if name != found[0]]
    if others:
        listed = ", ".join(map(str, others))
        raise PlanError(
            f"ranks {listed} would carry the sums by other programs than rank 0",
            problems=[f"rank {rank}: {found[rank]}, rank 0: {found[0]}" for rank in others],
            fix="Give all ranks the same plan.json, model and version of headway.",
        )
