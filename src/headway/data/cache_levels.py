"""What the levels of the data cache have in common, and the rule by which they keep samples.

Both keep what came first. An epoch visits every sample once, in an order that is new every time, so
that what is stored during an epoch can only hit in the next one: whatever the rule of eviction, at
most the C samples held at its beginning hit, of N. Keeping them reaches C/N; LRU, C/N = c, reaches
c + (1 - c) ln(1 - c): 15 % at c = 1/2, and random replacement 28 %. Evicted are whole stores of the
directory that no process uses, least recently used first: between jobs, recency is the right rule.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from headway.data.cache_shelf import RECORD
from headway.errors import DataError
from headway.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class StoreKey:
    """What the stored samples are; two stores of equal keys hold the same samples.

    Attributes:
        name: Of the data, given by the user.
        digest: Hexadecimal, over everything that decides what a sample is.
        facts: The same, to be read by people.
        samples: Number of samples of the source.
    """

    name: str
    digest: str
    facts: dict[str, object]
    samples: int

    @property
    def folder(self) -> str:
        """A name for the store's directory."""
        return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', self.name)[-80:]}-{self.digest[:16]}"

    @property
    def index_bytes(self) -> int:
        """Bytes of the index file."""
        return RECORD.size * self.samples


class LevelLost(Exception):
    """A level can no longer be used; the text says why."""


def check_limit(limit: int, key: StoreKey, where: str) -> None:
    """Raise unless a level of this size can hold any sample.

    Raises:
        DataError: It cannot.
    """
    if limit <= key.index_bytes:
        raise DataError(
            "the data cache is too small for its index",
            where=where,
            why=f"It may take {format_bytes(limit)}; the index of {key.samples} samples alone has "
            f"{format_bytes(key.index_bytes)}.",
            fix="Give it more.",
        )


def close_all(files: list[int]) -> None:
    """Close descriptors."""
    for file in files:
        os.close(file)
