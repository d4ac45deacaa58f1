"""Water filling: the optimum that Whale's Algorithm 1 is measured against, and its whole samples.

L_i = min(cap_i, lambda DF_i), with the symbols of `headway.planner.whale.load_balance`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.errors import PlanError
from headway.planner.whale.load_balance import (
    DeviceShare,
    LoadBalance,
    check_room,
    check_shares,
)

_ROUNDING = 1e-12


def slowest_seconds(balance: LoadBalance, shares: Sequence[DeviceShare]) -> float:
    """Of the slowest device, for a task graph of 1 FLOP."""
    return max(load / share.rate for load, share in zip(balance.loads, shares, strict=True))


def water_filling(shares: Sequence[DeviceShare]) -> LoadBalance:
    """The loads with the least time of the slowest device: L_i = min(cap_i, lambda DF_i).

    In the order of cap_i / DF_i devices fill up one after the other; lambda is where the others
    take the rest in proportion to their rates.

    Raises:
        PlanError: All devices together do not hold the load; the error says what is missing.
    """
    check_shares(shares)
    check_room(shares)
    order = sorted(range(len(shares)), key=lambda i: (shares[i].cap / shares[i].rate, i))
    loads = [0.0] * len(shares)
    left, rate = 1.0, sum(share.rate for share in shares)
    for place, i in enumerate(order):
        level = left / rate
        if shares[i].cap >= level * shares[i].rate:
            for j in order[place:]:
                loads[j] = level * shares[j].rate
            break
        loads[i] = shares[i].cap
        left -= loads[i]
        rate -= shares[i].rate
    return LoadBalance(tuple(loads))


def whole_samples(
    loads: Sequence[float], samples: int, shares: Sequence[DeviceShare]
) -> tuple[int, ...]:
    """Integer batches by largest remainder, none above a device's memory; they add up to `samples`.

    The gradients of a device then count with weight batch / samples, see `gradient_weights`.

    Raises:
        PlanError: In whole samples they do not fit.
    """
    # 0.29 * 100 is 28.999999999999996: rounding alone must not cost a sample.
    caps = [math.floor(share.cap * samples + _ROUNDING * samples) for share in shares]
    wanted = [load * samples for load in loads]
    batches = [
        min(cap, math.floor(w + _ROUNDING * samples)) for cap, w in zip(caps, wanted, strict=True)
    ]
    if sum(caps) < samples:
        raise PlanError(
            "the batch does not fit",
            problems=[f"the devices hold {sum(caps)} of {samples} samples: {caps}"],
            fix="take a smaller batch, or more micro-batches",
        )
    while (missing := samples - sum(batches)) > 0:
        # Further rounds are needed where caps leave fewer open devices than missing samples.
        open_ = [i for i in range(len(caps)) if batches[i] < caps[i]]
        open_.sort(key=lambda i: (batches[i] - wanted[i], i))
        for i in open_[:missing]:
            batches[i] += 1
    return tuple(batches)


def gradient_weights(batches: Sequence[int]) -> tuple[float, ...]:
    """What a device's mean gradient counts: batch / sum of batches, not 1 / devices."""
    total = sum(batches)
    return tuple(batch / total for batch in batches)
