"""The definitions of random numbers and orders, written a second time for the reference.

Every run with the same seed draws the same numbers, whatever its plan: as documented in
`run.step.randomness` and `data.order`. The reference draws by these functions, so that a mistake
in one of those is a difference. Sources: splitmix64 (Steele, Lea and Flood 2014); Black and Rogaway
2002, section 4 (a Feistel network with cycle walking).
"""

from __future__ import annotations

import hashlib
import math
import random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway.run.recipe.recipe import Recipe
from headway.verification.reference.weights import start_from_weights

WORD = 2**64
INITIAL = int.from_bytes(b"INIT", "big")
"""Second word of the key of the initial parameters."""
ROUNDS = 8


def chained_hash(*words: int) -> int:
    """64 bits from several words."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ word % WORD) * 0xBF58476D1CE4E5B9 % WORD
        state ^= state >> 27
        state = (state + 0x9E3779B97F4A7C15) * 0x94D049BB133111EB % WORD
        state ^= state >> 31
    return state


def begin_draws(*words: int) -> None:
    """Start the generators of torch, numpy and random from a key."""
    key = chained_hash(*words)
    torch.default_generator.manual_seed(key % 2**63)
    np.random.seed(key % 2**32)
    random.seed(key)


def initial_model(recipe: Recipe) -> nn.Module:
    """The model with the parameters that every plan starts from."""
    begin_draws(recipe.seed, INITIAL)
    model = recipe.model().train()
    start_from_weights(recipe, model)
    return model


def draw_keys(seed: int, epoch: int, first: int, draws: int) -> list[int]:
    """The keys of the first draws of a forward pass, in the batch that begins at a place."""
    generator = torch.Generator().manual_seed(chained_hash(seed, epoch, first) % 2**63)
    drawn = [torch.empty((), dtype=torch.int64).random_(generator=generator) for _ in range(draws)]
    return [int(number) for number in drawn]


def dropout_mask(key: int, epoch: int, position: int, width: int) -> Tensor:
    """Which elements of a sample dropout of one half keeps, in one draw."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(chained_hash(key, epoch, position) // 2)
    kept = nn.functional.dropout(torch.ones(1, width, dtype=torch.float64))[0] != 0
    torch.set_rng_state(state)
    return kept


Words = NDArray[np.uint64]


def shuffled(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Which sample stands at each place of an epoch."""
    root = math.isqrt(length - 1) + 1
    even = root + root % 2
    rows, columns, size = np.uint64(even), np.uint64(-(-length // even)), np.uint64(length)
    keys = _hashed(f"order {seed} {epoch}", 2 * ROUNDS)

    def network(places: Words) -> Words:
        row, column = places // columns, places % columns
        for number in range(ROUNDS):
            row = (row + _finalised(column ^ keys[2 * number]) % rows) % rows
            column = (column + _finalised(row ^ keys[2 * number + 1]) % columns) % columns
        return np.asarray(row * columns + column, np.uint64)

    found = network(np.arange(length, dtype=np.uint64))
    while (beyond := np.flatnonzero(found >= size)).size:
        found[beyond] = network(found[beyond])
    return found.astype(np.int64)


def seeds_of_samples(seed: int, epoch: int, places: range) -> list[int]:
    """What the draws inside each sample, of augmentation, are seeded with."""
    first, second = _hashed(f"sample {seed} {epoch}", 2)
    numbers = np.arange(places.start, places.stop, dtype=np.uint64)
    found: list[int] = _finalised(_finalised(numbers ^ first) ^ second).tolist()
    return found


def sampler_seed(seed: int, epoch: int) -> int:
    """What the draws of a user's sampler in an epoch are seeded with."""
    return int(_hashed(f"sampler {seed} {epoch}", 1)[0])


def _hashed(text: str, count: int) -> Words:
    digest = hashlib.shake_128(text.encode()).digest(8 * count)
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(count)]
    return np.array(words, np.uint64)


def _finalised(words: Words) -> Words:
    """The last lines of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(words ^ (words >> np.uint64(31)), np.uint64)
