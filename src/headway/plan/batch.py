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
        parts: In place of it: the number of micro-batches of a share, as long as there are samples.
    """

    samples: int
    microbatch: int | None = None
    parts: int | None = None

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
        """A share cut into as few micro-batches as are allowed, of nearly equal size."""
        if not share:
            return ()
        most = self.microbatch or len(share)
        parts = min(self.parts, len(share)) if self.parts else -(-len(share) // most)
        cuts = BatchSplit(samples=len(share))
        return tuple(
            share[part.start : part.stop] for part in (cuts.share(i, parts) for i in range(parts))
        )

    def largest(self, ranks: int) -> int | None:
        """Most samples of a micro-batch; None: not limited."""
        if self.parts is None:
            return self.microbatch
        return -(-len(self.share(0, ranks)) // self.parts)

    def equation(self, ranks: int, tokens: int | None = None, *, pipe: int = 1) -> str:
        """The derivation, for people: "64 samples = 2 ranks x 4 micro-batches x 8 samples".

        Uneven cuts are written out, with brackets where a rank's micro-batches differ: "7 samples =
        1 rank x 2 micro-batches x 2 samples + 1 rank x (1 micro-batch x 2 samples + ...)".

        Args:
            ranks: Size of the data axis.
            tokens: Tokens of one sample, where the batch was stated in tokens.
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
