"""Batch arithmetic: the user states the global batch, everything else is derived here.

The n samples of a global batch are numbered 0..n-1 in the order of the data. They are cut into one
contiguous share per rank, and each share into micro-batches; shares differ by at most one sample,
unless the plan says how large they are. Because the loss is a sum over the global batch divided by
the global count, no cut changes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from headway.documents import document
from headway.errors import PlanError

Norm = Literal["local", "global"]


@document
class BatchSplit:
    """The global batch and the largest number of samples in one forward pass.

    Attributes:
        microbatch: Most samples that a rank passes through the model at once; None: its share.
        parts: In place of it: the number of micro-batches of a share, as long as there are samples.
        shares: Samples of each rank of the data axis, for unequal devices; empty: even.
        norm: Over which samples batch normalisation takes its statistics: "local", those of a
            micro-batch of a rank; "global", those of the global batch, as the serial run.
    """

    samples: int
    microbatch: int | None = None
    parts: int | None = None
    shares: tuple[int, ...] = ()
    norm: Norm = "local"

    def share(self, rank: int, ranks: int, samples: int | None = None) -> range:
        """The samples of `rank`, as positions in the global batch.

        Args:
            samples: Samples present, where the last batch of an epoch is ragged.
        """
        count = self.samples if samples is None else samples
        if self.shares:
            # Of a ragged batch in proportion, rounded down at both ends: shares stay contiguous,
            # and none is larger than that of a whole batch.
            before = sum(self.shares[:rank])
            ends = (before, before + self.shares[rank])
            return range(*(count * end // self.samples for end in ends))
        small, larger = divmod(count, ranks)
        start = rank * small + min(rank, larger)
        return range(start, start + small + (rank < larger))

    def microbatches(self, share: range) -> tuple[range, ...]:
        """A share cut into as few micro-batches as are allowed, of nearly equal size."""
        if not share:
            return ()
        most = self.microbatch or len(share)
        parts = min(self.parts, len(share)) if self.parts else -(-len(share) // most)
        # Micro-batches differ by at most one sample, as even shares do: the same arithmetic once
        # more.
        cuts = BatchSplit(samples=len(share))
        return tuple(
            share[part.start : part.stop] for part in (cuts.share(i, parts) for i in range(parts))
        )

    def passes(self, ranks: int, samples: int | None = None) -> int:
        """The most micro-batches that any rank has of a batch."""
        holders = range(ranks) if self.shares else range(1)  # of even shares the first is largest
        most = max(len(self.share(rank, ranks, samples)) for rank in holders)
        return len(self.microbatches(range(most)))

    def largest(self, ranks: int) -> int | None:
        """Most samples of a micro-batch; None: not limited."""
        if self.parts is None:
            return self.microbatch
        return -(-max(len(self.share(rank, ranks)) for rank in range(ranks)) // self.parts)

    def shared_as(self, other: BatchSplit, ranks: int) -> BatchSplit:
        """With the shares of another batch, in proportion; as it is where those are even.

        Args:
            other: Of at least as many samples.
        """
        parts = [len(other.share(rank, ranks, self.samples)) for rank in range(ranks)]
        return replace(self, shares=tuple(parts)) if other.shares else self

    def problems(self, ranks: int) -> Iterator[str]:
        """The problems of the shares, one line each."""
        if not self.shares:
            return
        if len(self.shares) != ranks:
            yield f"batch.shares has {len(self.shares)} entries for {ranks} ranks on the data axis"
        if sum(self.shares) != self.samples:
            yield f"batch.shares add up to {sum(self.shares)}; batch.samples is {self.samples}"
        for rank, share in enumerate(self.shares):
            if share < 1:
                yield f"batch.shares: rank {rank} has {share} samples; at least 1"

    def equation(self, ranks: int, tokens: int | None = None, *, pipe: int = 1) -> str:
        """The derivation, for people: "64 samples = 2 ranks x 4 micro-batches x 8 samples".

        Uneven cuts are written out, with brackets where a rank's micro-batches differ: "7 samples =
        1 rank x 2 micro-batches x 2 samples + 1 rank x (1 micro-batch x 2 samples + ...)".

        Args:
            pipe: Ranks of a pipeline, which works on a share together.
        """
        shapes = Counter(
            tuple(len(m) for m in self.microbatches(self.share(rank, ranks)))
            for rank in range(ranks)
        )
        terms = [_term(count, sizes, pipe) for sizes, count in shapes.items() if sizes]
        left = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        if tokens is not None:
            left = f"{_spaced(self.samples * tokens)} tokens = {left} x {_spaced(tokens)} tokens"
        return f"{left} = {' + '.join(terms)}"


def largest_remainder_shares(samples: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole samples in proportion to weights, by the largest remainders; of equals the first."""
    # In exact fractions: with floats, rounding could decide which rank gets a sample.
    total = sum(map(Fraction, weights))
    wanted = [samples * Fraction(weight) / total for weight in weights]
    found = [math.floor(share) for share in wanted]
    # The largest remainder is the most negative difference; ties go to the lower rank.
    order = sorted(range(len(found)), key=lambda rank: (found[rank] - wanted[rank], rank))
    for rank in order[: samples - sum(found)]:
        found[rank] += 1
    return tuple(found)


def whole_shares(batch: int, shares: Sequence[float], copies: int) -> tuple[int, ...]:
    """Shares in whole samples; empty: the batch is shared evenly.

    Args:
        shares: In proportion, as for `data_parallel`.

    Raises:
        PlanError: There is not one for each copy, or one is not positive or too small.
    """
    if not shares:
        return ()
    problems = [f"share {n} is {share:g}; above 0" for n, share in enumerate(shares) if share <= 0]
    if len(shares) != copies:
        problems.append(f"{len(shares)} shares; the data axis has {copies} ranks")
    found = () if problems else largest_remainder_shares(batch, shares)
    problems += [
        f"share {n} of {batch} samples is less than one"
        for n, share in enumerate(found)
        if share < 1
    ]
    if problems:
        raise PlanError(
            "the batch cannot be shared like this",
            problems=problems,
            fix="Give one positive number for each rank (or copy of a pipeline), as in [2, 1].",
        )
    return found


def _term(ranks: int, sizes: tuple[int, ...], pipe: int) -> str:
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if pipe > 1:
        count = f"{'1 pipeline' if ranks == 1 else f'{ranks} pipelines'} of {pipe} ranks"
    parts = [_micros(number, size) for size, number in Counter(sizes).items()]
    return f"{count} x {parts[0]}" if len(parts) == 1 else f"{count} x ({' + '.join(parts)})"


def _micros(count: int, size: int) -> str:
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    return f"{batches} x {'1 sample' if size == 1 else f'{size} samples'}"


def _spaced(count: int) -> str:
    return f"{count:,}".replace(",", " ")
