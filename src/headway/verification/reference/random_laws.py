"""Whether orders and draws differ where they must: between seeds, epochs, samples and layers.

A verified run sees two epochs of one seed; here further ones are asked for. A dropout layer is
asked for the masks of a few samples. Those of two samples, and of one sample in two epochs, must
differ; that of one sample must not depend on who else is in the batch; and all are those that
`draws` defines.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

from headway.data import SampleOrder
from headway.data.order import sample_seeds
from headway.errors import NotEqual
from headway.run.step.batch import resize_batch
from headway.run.step.randomness import LogicalRandomness, probe_random_draws
from headway.verification.reference.draws import begin_draws, draw_keys, dropout_mask

EPOCHS = (0, 1, 2, 3, 4, 5, 7, 12, 16, 100, 256, 1000, 2**20)
"""With differences that a remainder or a mask of the epoch's number would not see."""
PLACES = (0, 1, 2, 3, 5, 16, 100, 256, 1000, 4096, 2**20, 2**40)
MANY = 24
"""Places: of so many samples two orders begin alike by chance once in 24!, 6e23."""
WIDTH = 512
"""Elements of a mask: two of them are equal by chance once in 2^512."""
POSITIONS = (*range(8), *(2**n for n in range(3, 25)), *(10**n for n in range(1, 8)), 2**40)
"""Also far apart: a key that is cut off somewhere repeats there."""


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


class _TwoMasks(nn.Module):
    """The masks of two dropout layers side by side."""

    def forward(self, data: Tensor) -> Tensor:
        return torch.cat([nn.functional.dropout(data), nn.functional.dropout(data)], 1)


def check_sample_draws(seed: int) -> None:
    """Ask for masks and compare them.

    Raises:
        NotEqual: Two masks are equal that must not be, or one differs that must not.
    """
    layer = _TwoMasks()
    data = torch.ones(len(POSITIONS), WIDTH, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).sum()
        return found

    sites = probe_random_draws(layer, loss, data, resize_batch)

    def masks(positions: Sequence[int], epoch: int) -> Tensor:
        begin_draws(seed, epoch, POSITIONS[0])
        with LogicalRandomness(sites, positions, epoch).active():
            found: Tensor = layer(data[: len(positions)]) != 0
            return found

    # Of each sample two masks, one behind the other: those of two layers must differ as well.
    first, later = masks(POSITIONS, 0), masks(POSITIONS, 1)
    if any(torch.equal(one, other) for one, other in first.view(-1, 2, WIDTH).unbind(0)):
        raise NotEqual("two layers have the same dropout mask")
    every = torch.cat([first, later])
    if len(every.unique(dim=0)) < len(every):
        raise NotEqual("two samples, or epochs, have the same dropout mask")
    for place, position in enumerate(POSITIONS[:4]):
        if not torch.equal(masks([position], 0)[0], first[place]):
            raise NotEqual(f"the dropout mask of sample {position} depends on its batch")
    for epoch, found in enumerate((first, later)):
        keys = draw_keys(seed, epoch, POSITIONS[0], 2)
        for position, own in zip(POSITIONS[:4], found, strict=False):
            wanted = torch.cat([dropout_mask(key, epoch, position, WIDTH) for key in keys])
            if not torch.equal(own, wanted):
                raise NotEqual(
                    f"the dropout mask of sample {position} in epoch {epoch} is not the one that "
                    "seed, epoch, draw and sample define"
                )
    kept = float(every.double().mean())
    # More than six standard deviations of so many draws.
    if abs(kept - 0.5) > 0.05:
        raise NotEqual(f"dropout of one half keeps {kept:.1%} of the elements")
