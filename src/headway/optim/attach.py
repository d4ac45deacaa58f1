"""Makes an optimiser fit an exchange: refuses a rate that does not, divides norms where it may.

Invariant: norms are divided only where all ranks step together, from the same weights and the same
gradients, in the thread that does so.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import Optimizer

from headway.optim.layerwise import parallel_norms
from headway.optim.scaling import check_scaling
from headway.plan import Exchange


def fit_exchange(
    optimizer: Optimizer,
    exchange: Exchange,
    *,
    ranks: int,
    group: dist.ProcessGroup | None = None,
) -> bool:
    """Check the optimiser's rates against the exchange, and divide its norms if it has some.

    They stay whole with `priority` (slices step in another thread), with `values = "updates"` (each
    rank steps from gradients of its own) and with node groups (weights differ between groups).

    Args:
        optimizer: Any optimiser.
        exchange: How gradients are exchanged.
        ranks: That take part; 1: nothing is divided.
        group: The ranks that may share the norms; None: all.

    Returns:
        Whether norms may be divided; in the first steps it is measured whether that pays.

    Raises:
        RecipeError: See `check_scaling`.
    """
    check_scaling(optimizer, exchange.reduce)
    alike = exchange.values == "gradients" and all(part.ranks is None for part in exchange.parts)
    if ranks < 2 or exchange.priority or not alike:
        return False
    return parallel_norms(optimizer, group)
