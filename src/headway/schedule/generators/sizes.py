"""The sizes that a generator accepts: it refuses the others with all reasons at once."""

from __future__ import annotations

from headway.errors import PlanError


def check_sizes(
    name: str, ranks: int, microbatches: int, *rules: tuple[bool, str], fix: str = ""
) -> None:
    """Refuse a size unless there is a rank, a micro-batch, and every rule holds.

    Args:
        name: Of the schedule, for the message.
        ranks: Of the pipeline.
        microbatches: Of one step.
        rules: Whether a rule holds, and what to say when it does not.
        fix: What the user can do about the rules, with the legal numbers.

    Raises:
        PlanError: With one line for each broken rule.
    """
    broken = [text for holds, text in rules if not holds]
    if ranks < 1 or microbatches < 1:
        broken, fix = ["a pipeline needs both"], "give at least one rank and one micro-batch"
    if broken:
        raise PlanError(
            f"no schedule {name} with {ranks} ranks and {microbatches} micro-batches",
            problems=broken,
            fix=fix,
        )
