"""Random numbers that depend on what they are for, and on nothing else.

Invariant: the same seed, name, step and rank give the same numbers in every process, whatever was
drawn before, so that ranks agree without communication and a resumed run goes on as if it had never
stopped.
"""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, name: str, step: int = 0, rank: int = 0) -> np.random.Generator:
    """A generator of its own for one parameter (or bucket) in one step on one rank."""
    words = (seed & 0xFFFFFFFFFFFFFFFF, zlib.crc32(name.encode()), step, rank)
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(words)))
