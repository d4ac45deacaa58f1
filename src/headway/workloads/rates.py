"""The learning rate of short runs: no step is lost to a rate that is too large or too small."""

from __future__ import annotations

from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from headway.optim.warmup import WarmUp


def rise_and_fall(optimizer: Optimizer, *, steps: int) -> LRScheduler:
    """A tenth of the steps upwards, then a cosine down to almost nothing."""
    rise = steps // 10
    fall = partial(CosineAnnealingLR, T_max=max(1, steps - rise))
    return WarmUp(optimizer, rise, then=fall, delay=True)
