"""Whether random draws really belong to samples: reference and run share what draws them.

A dropout layer is asked for the masks of a few samples. Those of two samples, and of one sample in
two epochs, must differ; that of one sample must not depend on who else is in the batch; and all are
those that `draw_definitions` draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headway.errors import NotEqual
from headway.run.step.batch import resize_batch
from headway.run.step.randomness import LogicalRandomness, probe_random_draws
from headway.verification.draw_definitions import begin_draws, draw_keys, dropout_mask

WIDTH = 512
"""Elements of a mask: two of them are equal by chance once in 2^512."""
POSITIONS = (*range(8), *(2**n for n in range(3, 25)), *(10**n for n in range(1, 8)), 2**40)
"""Also far apart: a key that is cut off somewhere repeats there."""


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
