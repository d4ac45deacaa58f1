"""The order of a user's sampler: which samples the passes of a `DataLoader` visit.

Epoch e is the pass number e + 1 over the sampler from the state in which it was given, as torch's
loader makes it, which takes one number from its generator before each pass. What is drawn from the
global generators of torch (CPU), numpy and random follows from (seed, epoch). So every rank draws
the same order, and a run that resumes draws it again.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from headway.data.order import Cursor, Indices, sampler_seed
from headway.data.source import GlobalGenerators
from headway.errors import DataError

_KEPT = 3
"""Epochs: worker processes read ahead across the end of one."""


class SamplerOrder:
    """The orders of all epochs of a sampler.

    Args:
        sampler: Gives the numbers of samples; with `batches` a list of them for each batch.
        generator: Of the loader; None: torch's global one.
        shared: What copies of the sampler have in common: the data set.

    Raises:
        DataError: The sampler cannot be copied.
    """

    def __init__(
        self, sampler: Any, seed: int, *, batches: bool, generator: Any = None, shared: Any = None
    ) -> None:
        self.kind, self.batches, self._seed = type(sampler).__name__, batches, seed
        self._given = sampler, generator
        self._shared = shared
        self._passing = self._fresh()
        self._passes = 0
        self._drawn: dict[int, tuple[Indices, list[int]]] = {}

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Which samples stand at the places start..stop-1 of an epoch; int64 [stop - start]."""
        return self._epoch(epoch)[0][start:stop]

    def sizes(self, epoch: int, batch: int, *, drop_last: bool) -> Sequence[int]:
        """Samples of each batch of an epoch."""
        places, ends = self._epoch(epoch)
        if self.batches:
            return [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
        whole, rest = divmod(len(places), batch)
        return [batch] * whole + ([rest] if rest and not drop_last else [])

    def take(self, cursor: Cursor, batch: int, drop_last: bool) -> tuple[int, Cursor]:
        """The samples of the batch that begins at a cursor, and the cursor after it; see
        `headway.data.order.take`.

        Raises:
            DataError: No batch begins there, or the epoch has none.
        """
        places, ends = self._epoch(cursor.epoch)
        place, length = cursor.position, len(places)
        if self.batches:
            starts = [0, *ends[:-1]]
            if place not in starts:
                raise DataError(
                    f"no batch of {self.kind} begins at sample {place} of epoch {cursor.epoch}",
                    fix="Resume with the loader that the run was started with.",
                )
            count = ends[starts.index(place)] - place
            left = length - place - count
        else:
            rest = length - place
            if rest <= 0 or (place == 0 and rest < batch and drop_last):
                raise DataError(
                    f"{self.kind} gives {length} samples in epoch {cursor.epoch}",
                    why=f"The next batch, of {batch}, begins at sample {place}.",
                    fix="Give the loader that the run was started with, or a smaller batch.",
                )
            count = batch if rest >= batch else 0 if drop_last else rest
            left = rest - count
        ends_here = count == 0 or left == 0 or (drop_last and not self.batches and left < batch)
        if ends_here:
            return count, Cursor(cursor.seed, cursor.epoch + 1, 0)
        return count, Cursor(cursor.seed, cursor.epoch, place + count)

    def digest(self, epoch: int) -> str:
        """Equal where two processes have drawn the same order."""
        places, ends = self._epoch(epoch)
        return hashlib.blake2b(places.tobytes() + repr(ends).encode(), digest_size=8).hexdigest()

    def _epoch(self, epoch: int) -> tuple[Indices, list[int]]:
        """The samples of an epoch in their order, and the places behind its batches."""
        while epoch not in self._drawn:
            if epoch < self._passes:
                self._passing, self._passes, self._drawn = self._fresh(), 0, {}
            self._drawn[self._passes] = self._pass(self._passes)
            self._drawn.pop(self._passes - _KEPT, None)
            self._passes += 1
        return self._drawn[epoch]

    def _pass(self, epoch: int) -> tuple[Indices, list[int]]:
        sampler, generator = self._passing
        inner = (sampler, *(getattr(sampler, n, None) for n in ("sampler", "batch_sampler")))
        generators = GlobalGenerators()
        generators.seed(sampler_seed(self._seed, epoch))
        try:
            for one in inner:
                if callable(getattr(one, "set_epoch", None)):
                    one.set_epoch(epoch)
            # In torch's order: its sampler of batches begins to draw with the first batch only.
            begun = iter(sampler) if self.batches else None
            # The seed of torch's worker processes.
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            drawn = list(sampler if begun is None else begun)
        except Exception as error:
            raise DataError(
                f"{self.kind} fails in epoch {epoch}", why=f"{type(error).__name__}: {error}"
            ) from error
        finally:
            generators.restore()
        batches = [list(one) for one in drawn] if self.batches else [drawn]
        if not any(batches) or not all(batches):
            raise DataError(
                f"{self.kind} gives {'an empty batch' if any(batches) else 'no samples'}",
                where=f"epoch {epoch}",
                fix="Leave out empty batches; give a sampler that selects samples.",
            )
        places = np.array([int(index) for one in batches for index in one], dtype=np.int64)
        return places, list(accumulate(map(len, batches)))

    def _fresh(self) -> tuple[Any, Any]:
        try:
            # One copy of both: a sampler and its loader may share a generator.
            found: tuple[Any, Any] = copy.deepcopy(self._given, {id(self._shared): self._shared})
        except Exception as error:
            raise DataError(
                f"{self.kind} cannot be copied",
                why=f"{type(error).__name__}: {error}. A copy is drawn from, so that each run "
                "begins with the same order.",
                fix="Keep open files, locks and running generators out of the sampler.",
            ) from error
        return found
