"""The all-reduce program of an exchange: which one, and that all ranks chose the same.

The plan and the size of a bucket decide; nothing is measured. The ranks communicate only to compare
fingerprints before the first program runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.channel.facts import gather_facts
from headway.collective.all_reduce.algorithm import all_reduce_program, program_fingerprint
from headway.collective.program.program import CollectiveProgram, CollectiveTask
from headway.comm.backend.process_group import ChooseProgram
from headway.errors import PlanError
from headway.plans import ExchangePlan


def all_reduce_program_chooser(description: ExchangePlan) -> ChooseProgram | None:
    """For groups of the exchange; None: Gloo's own all-reduce is what the plan wants."""
    if not description.carried:
        return None

    def choose(
        task: CollectiveTask, ranks: tuple[int, ...], element_bytes: int
    ) -> CollectiveProgram | None:
        if task.op != "all_reduce":
            return None
        kind, carrier = description.collective, description.carrier
        return all_reduce_program(kind, carrier, len(ranks), task.elements, element_bytes)

    return choose


def check_same_programs(
    description: ExchangePlan, ranks: int, sizes: Iterable[tuple[int, int]]
) -> None:
    """Compare the programs of all ranks before the first one runs; collective over the world.

    Args:
        sizes: Elements, and bytes of an element, of all buckets and chunks.

    Raises:
        PlanError: Names the ranks whose programs are others than rank 0's.
    """
    own = program_fingerprint(
        all_reduce_program(description.collective, description.carrier, ranks, *size)
        # Sorted, so that the fingerprint does not depend on the order of the buckets.
        for size in sorted(set(sizes))
    )
    found = gather_facts(own)
    others = [rank for rank, name in enumerate(found) if name != found[0]]
    if others:
        listed = ", ".join(map(str, others))
        raise PlanError(
            f"ranks {listed} would carry the sums by other programs than rank 0",
            problems=[f"rank {rank}: {found[rank]}, rank 0: {found[0]}" for rank in others],
            fix="Give all ranks the same plan.json, model and version of headway.",
        )
