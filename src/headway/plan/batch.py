"""Batch arithmetic: the user states the global batch, everything else is derived here.

The n samples of a global batch are numbered 0..n-1 in the order of the data. They are cut into one
contiguous share per rank, and each share into micro-batches; shares differ by at most one sample.
Because the loss is a sum over the global batch divided by the global count, no cut changes it.
"""

from __future__ import annotations

from collections import Counter

from headway.documents import document


@document
class BatchSplit:
    """The global batch and the largest number of samples in one forward pass.

    Attributes:
        samples: Samples of the global batch of one optimiser step.
        microbatch: Most samples that a rank passes through the model at once; None: its share.
    """

    samples: int
    microbatch: int | None = None

    def share(self, rank: int, ranks: int, samples: int | None = None) -> range:
        """The samples of `rank`, as positions in the global batch.

        Args:
            rank: Position on the data axis.
            ranks: Size of the data axis.
            samples: Samples present, where the last batch of an epoch is ragged.
        """
        count = self.samples if samples is None else samples
        small, larger = divmod(count, ranks)
        start = rank * small + min(rank, larger)
        return range(start, start + small + (rank < larger))

    def microbatches(self, share: range) -> tuple[range, ...]:
        """A share cut into as few micro-batches as `microbatch` allows, of nearly equal size."""
        if not share:
            return ()
        most = self.microbatch or len(share)
        parts = -(-len(share) // most)
        cuts = BatchSplit(samples=len(share))
        return tuple(
            share[part.start : part.stop] for part in (cuts.share(i, parts) for i in range(parts))
        )

    def equation(self, ranks: int, tokens: int | None = None) -> str:
        """The derivation, for people: "64 samples = 2 ranks x 4 micro-batches x 8 samples".

        Args:
            ranks: Size of the data axis.
            tokens: Tokens of one sample, where the batch was stated in tokens.
        """
        shapes = Counter(
            tuple(len(m) for m in self.microbatches(self.share(rank, ranks)))
            for rank in range(ranks)
        )
        terms = [_term(count, sizes) for sizes, count in shapes.items() if sizes]
        left = f"{self.samples} samples"
        if tokens is not None:
            left = f"{self.samples * tokens:,} tokens = {left} x {tokens:,} tokens".replace(",", " ")
        return f"{left} = {' + '.join(terms)}"


def _term(ranks: int, sizes: tuple[int, ...]) -> str:
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if len(set(sizes)) == 1:
        batches = "1 micro-batch" if len(sizes) == 1 else f"{len(sizes)} micro-batches"
        return f"{count} x {batches} x {_samples(sizes[0])}"
    return f"{count} x micro-batches of {' + '.join(map(str, sizes))} samples"


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"
