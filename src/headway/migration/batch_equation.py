"""batch = micro-batch x accumulation x copies of the model: what is missing, what contradicts.

DeepSpeed and torchtitan state any two or three of the four; headway states the batch, and most
samples of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.units import counted


@dataclass(frozen=True, kw_only=True)
class BatchEquation:
    """The four numbers; None: not known.

    Attributes:
        batch: Samples of one optimiser step, on all ranks.
        micro: Samples of one forward pass on one rank.
        accumulation: Forward passes of one rank in a step.
        copies: Ranks that take shares of the batch.
    """

    batch: int | None = None
    micro: int | None = None
    accumulation: int | None = None
    copies: int | None = None

    def __str__(self) -> str:
        """ "32 = micro-batch 4 x accumulation 2 x 4 copies"."""
        copies = "processes" if self.copies is None else counted(self.copies, "process")
        parts = [f"micro-batch {self.micro or '?'}", f"accumulation {self.accumulation or '?'}"]
        return f"{self.batch or '?'} = {' x '.join([*parts, copies])}"


def solve_batch(known: BatchEquation) -> BatchEquation:
    """With what follows from the others.

    Raises:
        ValueError: The numbers contradict each other, or another one would be no whole number.
    """
    batch, micro, passes, copies = known.batch, known.micro, known.accumulation, known.copies
    if batch is not None and micro is not None and passes is not None:
        found = _quotient(known, batch, micro * passes, "copies")
        if copies is not None and copies != found:
            raise ValueError(
                f"{batch} is not {micro} x {passes} x {counted(copies, 'process')}, which is "
                f"{micro * passes * copies}; it is {micro} x {passes} x {found}"
            )
        return replace(known, copies=found)
    if copies is None:
        return known
    if batch is None:
        if micro is None:
            return known
        passes = passes or 1
        return replace(known, accumulation=passes, batch=micro * passes * copies)
    if micro is not None:
        passes = _quotient(known, batch, micro * copies, "accumulation")
        return replace(known, accumulation=passes)
    if passes is not None:
        return replace(known, micro=_quotient(known, batch, passes * copies, "micro"))
    # Shares need not be equal here: nothing follows for the micro-batch.
    return replace(known, accumulation=1)


def _quotient(known: BatchEquation, batch: int, divisor: int, missing: str) -> int:
    if batch % divisor or batch < divisor:
        what = {
            "copies": "number of processes",
            "accumulation": "number of accumulated micro-batches",
            "micro": "micro-batch",
        }[missing]
        raise ValueError(f"no {what} solves {known}: {batch} / {divisor} = {batch / divisor:g}")
    return batch // divisor
