"""Whether orders and draws differ where they must: between seeds, epochs and samples.

Reference and run share `data.order`, and a verified run sees two epochs of one seed. Here further
ones are asked for.
"""

from __future__ import annotations

from itertools import combinations

from headway.data import SampleOrder
from headway.data.order import sample_seeds
from headway.errors import NotEqual

EPOCHS = (0, 1, 2, 3, 4, 5, 7, 12, 16, 100, 256, 1000, 2**20)
"""With differences that a remainder or a mask of the epoch's number would not see."""
PLACES = (0, 1, 2, 3, 5, 16, 100, 256, 1000, 4096, 2**20, 2**40)
MANY = 24
"""Places: of so many samples two orders begin alike by chance once in 24!, 6e23."""


def check_orders(length: int, seed: int) -> None:
    """Compare the orders, and the seeds of samples, of several epochs and seeds.

    Raises:
        NotEqual: Two are equal.
    """
    keys = [*((seed, epoch) for epoch in EPOCHS), (seed + 1, 0), (seed ^ 2**31, 0)]
    if length >= MANY:
        begins = {
            key: SampleOrder(length, key[0]).indices(key[1], 0, MANY).tolist() for key in keys
        }
        for one, other in combinations(keys, 2):
            if begins[one] == begins[other]:
                raise NotEqual(f"the samples have the same order in {_both(one, other)}")
    drawn: dict[int, tuple[tuple[int, int], int]] = {}
    for key, place in [*((keys[0], place) for place in PLACES), *((key, 0) for key in keys[1:])]:
        (number,) = sample_seeds(*key, place, place + 1)
        if number in drawn:
            other, there = drawn[number]
            raise NotEqual(
                f"places {there} and {place} draw the same random numbers in {_both(other, key)}"
            )
        drawn[number] = key, place


def _both(one: tuple[int, int], other: tuple[int, int]) -> str:
    if one == other:
        return f"epoch {one[1]} of seed {one[0]}"
    return f"epoch {one[1]} of seed {one[0]} and epoch {other[1]} of seed {other[0]}"
